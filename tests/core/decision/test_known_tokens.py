"""Where tokens of a prompt are known, all of a decision counts in them; elsewhere in bytes, 4 a token."""

import msgspec
import pytest

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import EventsHeard, PageScraped, PoolReplaced, ServedBy, StreamChanged
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.exact import ExactIndexSettings
from epp.core.knowledge.exact_parameters import TokenProcessorConfig
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.kv_events.payload import Stored
from epp.core.kv_events.stream import StreamState
from epp.core.types import ApiKind, EndpointMetrics, MetricsTarget
from epp.plugins.added_time import AddedTime
from tests.builders import endpoint, request

BYTES, TOLD = "approx", "precise"
BLOCK = 64
TOKENS = 640
HELD = 320
IDS = bytes(4 * TOKENS)


def scheduler_of(*, told=True):
    """Two endpoints; where engines tell, the first has said that it holds half of the prompt."""
    made = build_settings(default_config(plugin_tables()))
    processor = TokenProcessorConfig(block_size_tokens=BLOCK)
    indexes = {BYTES: PrefixIndexSettings()}
    if told:
        precise = ExactIndexSettings(token_processor_config=processor, speculative_indexing=False)
        indexes = {TOLD: precise, **indexes}
    names = tuple(indexes)
    made = msgspec.structs.replace(
        made, indexes=indexes, prefix=names[0], joined=names, block_tokens=BLOCK
    )
    scheduler = Scheduler(made, seed=1)
    pool = [endpoint(at, metrics=MetricsTarget(port=1)) for at in range(2)]
    scheduler.take(PoolReplaced(pool), 0.0)
    for slot in range(2):
        scheduler.take(PageScraped(slot, EndpointMetrics(waiting_requests=0.0)), 0.0)
        scheduler.take(StreamChanged(slot, StreamState.LIVE, complete=True), 0.0)
    held = Stored(hashes=[*range(HELD // BLOCK)], tokens=IDS[: 4 * HELD], block_tokens=BLOCK)
    scheduler.take(EventsHeard(0, (held,)), 0.0)
    return scheduler


def asked(bytes_per_token, **fields):
    text = b"x" * bytes_per_token * TOKENS
    return request(prompts=(text,), prompt_tokens=len(text) // 4, **{"token_ids": (IDS,)} | fields)


def in_flight(scheduler, slot=0):
    """(Tokens of prompts, those that are to be computed) of what is in flight there."""
    columns = scheduler.pool.columns
    return (
        columns.inflight_context_tokens.item(slot),
        columns.prefill_backlog_tokens.item(slot),
    )


@pytest.mark.parametrize("bytes_per_token", [2, 3, 4, 5, 9])
def test_what_is_held_and_what_is_not_are_counted_alike(bytes_per_token):
    """A prompt of few bytes a token is not taken for cached, nor one of many for computed."""
    scheduler = scheduler_of()
    decision = scheduler.schedule(asked(bytes_per_token), 1.0)
    leg = decision.leg
    assert decision.endpoint.name == "pod-0"
    assert (decision.predicted_tokens, leg.lease.prefill_tokens) == (HELD, TOKENS - HELD)
    assert in_flight(scheduler) == (TOKENS, TOKENS - HELD)
    assert leg.candidates.uncached_tokens[leg.picked] == TOKENS - HELD
    assert leg.request.prompt_tokens == leg.candidates.prompt_tokens == TOKENS
    usual = scheduler_of().schedule(asked(4), 1.0).leg
    costs, those = (AddedTime().cost_parts(one.request, one.candidates) for one in (leg, usual))
    assert costs["prefill"].tolist() == those["prefill"].tolist()


@pytest.mark.parametrize("bytes_per_token", [2, 9])
def test_wherever_it_is_served_it_is_counted_alike(bytes_per_token):
    """Its ids are gone with its prompt by then; how many they were is not."""
    scheduler = scheduler_of()
    lease = scheduler.schedule(asked(bytes_per_token), 1.0).lease
    for slot, uncached in ((1, TOKENS), (0, TOKENS - HELD)):
        scheduler.take(ServedBy(lease, endpoint(slot).address), 1.0)
        assert (lease.prefill_tokens, lease.request.prompt_tokens) == (uncached, TOKENS)
        assert lease.expected.prompt_tokens == TOKENS
        assert in_flight(scheduler, slot) == (TOKENS, uncached)
        assert in_flight(scheduler, 1 - slot) == (0, 0.0)


def test_bytes_stay_what_they_were():
    """By them it is found out how many a token has."""
    lease = scheduler_of().schedule(asked(9), 1.0).lease
    assert lease.expected.prompt_bytes == 9 * TOKENS
    ids = request(api=ApiKind.TOKENS, prompts=(IDS,), prompt_tokens=TOKENS)
    assert scheduler_of().schedule(ids, 1.0).lease.expected.prompt_bytes == 4 * TOKENS


@pytest.mark.parametrize(("told", "fields"), [
    (True, {"token_ids": ()}),
    # What the index of engines does not look up is answered by that of decisions.
    (True, {"token_ids": (IDS[: 4 * BLOCK - 4],)}),
    (False, {}),
])  # fmt: skip
def test_where_blocks_are_counted_in_bytes_so_is_the_prompt(told, fields):
    """Its ids are not known, or too few, or nobody looks at them."""
    scheduler = scheduler_of(told=told)
    first = scheduler.schedule(asked(8, **fields), 1.0)
    assert first.lease.request.prompt_tokens == 2 * TOKENS
    assert first.lease.prefill_tokens == 2 * TOKENS
    again = scheduler.schedule(asked(8, **fields), 1.0)
    assert again.endpoint == first.endpoint
    assert again.lease.prefill_tokens == 0
