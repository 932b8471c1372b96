"""What the scheduler tells of its predictions, and what indexes learn of them."""

import msgspec
import pytest

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import (
    PageScraped,
    PeerRecorded,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ScrapeFailed,
    ServedBy,
)
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.exact import ExactIndexSettings
from epp.core.knowledge.exact_parameters import TokenProcessorConfig
from epp.core.knowledge.hit_accuracy import Verdict
from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.kv_events.payload import Stored
from epp.core.kv_events.stream import StreamState
from epp.core.types import ApiKind, EndpointMetrics, MetricsTarget
from tests.builders import endpoint, request

WINDOW_S = 30.0
REQUESTS = 40
TOKENS = 640
INDEX = "approx"
TOLD = "precise"
BLOCK = 64


def scheduler_of(pods=1, *, corrects=True):
    """With one approximate index, whose corrections are on."""
    made = build_settings(default_config(plugin_tables()))
    index = PrefixIndexSettings(lru_capacity_per_server=100, correct_by_engine=corrects)
    made = msgspec.structs.replace(made, indexes={INDEX: index}, prefix=INDEX, joined=(INDEX,))
    scheduler = Scheduler(made, seed=1)
    pool = [endpoint(at, metrics=MetricsTarget(port=1)) for at in range(pods)]
    scheduler.take(PoolReplaced(pool), 0.0)
    for slot in range(pods):
        scheduler.take(PageScraped(slot, page(0, 0, 0)), 0.0)
    return scheduler


def scheduler_that_is_told(held=b""):
    """With the index that engines tell beside the approximate one; the engine says that it holds `held`."""
    scheduler = scheduler_of(corrects=True)
    processor = TokenProcessorConfig(block_size_tokens=BLOCK)
    told = ExactIndexSettings(token_processor_config=processor, speculative_indexing=False)
    indexes = {TOLD: told, **scheduler.settings.indexes}
    settings = msgspec.structs.replace(
        scheduler.settings, indexes=indexes, prefix=TOLD, joined=(TOLD, INDEX), block_tokens=BLOCK
    )
    scheduler.take(Reconfigured(settings), 0.0)
    index = scheduler.indexes[TOLD]
    index.set_stream(0, StreamState.LIVE, complete=True)
    if held:
        hashes = list(range(len(held) // 4 // BLOCK))
        index.hear(0, [Stored(hashes=hashes, parent=None, tokens=held, block_tokens=BLOCK)], 0.0)
    return scheduler


def page(queried, hit, requests, **fields):
    return EndpointMetrics(
        waiting_requests=0.0,
        running_requests=0.0,
        kv_cache_usage=0.0,
        cache_queried_tokens=float(queried),
        cache_hit_tokens=float(hit),
        ttft_count=float(requests),
        **fields,
    )


def send(scheduler, times=REQUESTS, *, now=1.0, ended=200):
    """The same prompt again and again: all but the first are believed to be cached."""
    for _ in range(times):
        decision = scheduler.schedule(
            request(prompts=(b"x" * 4 * TOKENS,), prompt_tokens=TOKENS, model="llama"), now
        )
        scheduler.take(RequestEnded(decision.lease, Outcome(status=ended)), now)
    return decision


def test_a_window_of_decisions_is_compared_with_the_engine():
    scheduler = scheduler_of()
    send(scheduler)
    found = TOKENS * (REQUESTS - 1)
    scheduler.take(PageScraped(0, page(TOKENS * REQUESTS, found, REQUESTS)), WINDOW_S)
    compared = scheduler.accuracy.comparison(0)
    assert compared.predicted == pytest.approx((REQUESTS - 1) / REQUESTS)
    assert compared.error == pytest.approx(0.0)
    assert scheduler.accuracy.bytes_per_token("llama") == pytest.approx(4.0)


def test_an_index_that_believed_too_much_holds_less():
    scheduler = scheduler_of()
    send(scheduler)
    scheduler.take(PageScraped(0, page(TOKENS * REQUESTS, 0, REQUESTS)), WINDOW_S)
    assert scheduler.indexes[INDEX].capacity_blocks(0) < 100
    assert not scheduler.failures.so_far


def test_without_the_parameter_it_is_compared_and_not_corrected():
    scheduler = scheduler_of(corrects=False)
    send(scheduler)
    scheduler.take(PageScraped(0, page(TOKENS * REQUESTS, 0, REQUESTS)), WINDOW_S)
    assert scheduler.accuracy.verdict(0) is Verdict.MEASURED
    assert scheduler.indexes[INDEX].capacity_blocks(0) == 100


def test_what_several_indexes_predict_together_corrects_none():
    scheduler = scheduler_of()
    settings = msgspec.structs.replace(scheduler.settings, joined=(INDEX, "another"))
    scheduler.take(Reconfigured(settings), 0.0)
    send(scheduler)
    scheduler.take(PageScraped(0, page(TOKENS * REQUESTS, 0, REQUESTS)), WINDOW_S)
    assert scheduler.indexes[INDEX].capacity_blocks(0) == 100


def test_what_was_decided_alone_would_have_predicted_stands_beside_what_was_told():
    """The engine tells that it keeps nothing; to the other index all but the first were there."""
    scheduler = scheduler_that_is_told()
    ids = bytes(4 * TOKENS)
    for _ in range(REQUESTS):
        asked = request(api=ApiKind.TOKENS, prompts=(ids,), prompt_tokens=TOKENS)
        decision = scheduler.schedule(asked, 1.0)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 1.0)
    scheduler.take(PageScraped(0, page(TOKENS * REQUESTS, 0, REQUESTS)), WINDOW_S)
    compared = scheduler.accuracy.comparison(0)
    assert (compared.predicted, compared.error) == (0.0, 0.0)
    assert compared.indexes == {INDEX: pytest.approx((REQUESTS - 1) / REQUESTS)}
    assert scheduler.indexes[INDEX].capacity_blocks(0) == 100, "what is told needs no correction"


def test_what_was_told_is_a_share_of_the_tokens_that_are_known():
    """Each byte is a token here: half of the prompt is held, and that is all that four bytes each would be."""
    ids = bytes(4 * 4 * TOKENS)
    scheduler = scheduler_that_is_told(held=ids[: len(ids) // 2])
    for _ in range(REQUESTS):
        asked = request(prompts=(b"x" * 4 * TOKENS,), prompt_tokens=TOKENS, token_ids=(ids,))
        scheduler.schedule(asked, 1.0)
    told = page(4 * TOKENS * REQUESTS, 2 * TOKENS * REQUESTS, REQUESTS)
    scheduler.take(PageScraped(0, told), WINDOW_S)
    compared = scheduler.accuracy.comparison(0)
    assert compared.predicted == pytest.approx(0.5)
    assert compared.error == pytest.approx(0.0)
    assert scheduler.accuracy.bytes_per_token("my-model") == pytest.approx(1.0)


def test_a_decision_counts_what_is_held_in_the_tokens_that_are_known():
    """Each byte is a token here: what is held is more than four bytes each would be."""
    ids = bytes(4 * 4 * TOKENS)
    scheduler = scheduler_that_is_told(held=ids[: len(ids) // 2])
    asked = request(prompts=(b"x" * 4 * TOKENS,), prompt_tokens=TOKENS, token_ids=(ids,))
    decision = scheduler.schedule(asked, 1.0)
    assert decision.predicted_tokens == decision.leg.predicted_tokens == 2 * TOKENS
    assert decision.lease.request.prompt_tokens == 4 * TOKENS


def test_a_replica_that_is_not_heard_makes_nothing_wrong():
    """It sent as many requests that found nothing: of ours all may have been found."""
    scheduler = scheduler_of()
    send(scheduler)
    found = TOKENS * (REQUESTS - 1)
    scheduler.take(PageScraped(0, page(TOKENS * REQUESTS * 2, found, REQUESTS * 2)), WINDOW_S)
    compared = scheduler.accuracy.comparison(0)
    assert compared.known_share == pytest.approx(0.5)
    assert compared.predicted - compared.engine > 0.4
    assert compared.error == pytest.approx(0.0)
    assert scheduler.indexes[INDEX].capacity_blocks(0) == 100


def test_a_counter_that_jumps_back_is_a_restart():
    """What was compared and corrected was of the engine before it."""
    scheduler = scheduler_of()
    send(scheduler)
    found = page(TOKENS * REQUESTS, 0, REQUESTS, requests_total=40.0)
    scheduler.take(PageScraped(0, found), WINDOW_S)
    assert scheduler.indexes[INDEX].capacity_blocks(0) < 100
    scheduler.take(PageScraped(0, page(0, 0, 0, requests_total=1.0)), WINDOW_S + 1.0)
    assert scheduler.accuracy.verdict(0) is Verdict.WAITING
    assert scheduler.indexes[INDEX].capacity_blocks(0) == 100


def test_pages_that_are_missing_make_the_window_longer():
    """What was sent meanwhile is compared when its engine answers again."""
    scheduler = scheduler_of()
    send(scheduler)
    for now in range(10, 60, 10):
        scheduler.take(ScrapeFailed(slot=0, answered=False), now)
    assert scheduler.accuracy.verdict(0) is Verdict.WAITING
    scheduler.take(PageScraped(0, page(TOKENS * REQUESTS, 0, REQUESTS)), 60.0)
    assert scheduler.accuracy.comparison(0).predicted == pytest.approx((REQUESTS - 1) / REQUESTS)


def test_requests_that_were_not_served_are_not_counted():
    scheduler = scheduler_of()
    send(scheduler, ended=500)
    scheduler.take(PageScraped(0, page(0, 0, 0)), WINDOW_S)
    assert scheduler.accuracy.verdict(0) is Verdict.WAITING


def test_a_request_counts_where_it_was_served():
    scheduler = scheduler_of(pods=2)
    for _ in range(REQUESTS):
        decision = scheduler.schedule(
            request(prompts=(b"x" * 4 * TOKENS,), prompt_tokens=TOKENS, model="llama"), 1.0
        )
        scheduler.take(ServedBy(decision.lease, endpoint(1).address), 1.0)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 1.0)
    told = page(TOKENS * REQUESTS, TOKENS, REQUESTS)
    for slot in (0, 1):
        scheduler.take(PageScraped(slot, told), WINDOW_S)
    assert scheduler.accuracy.verdict(0) is Verdict.WAITING
    assert scheduler.accuracy.verdict(1) is Verdict.MEASURED


def test_requests_that_peers_told_of_are_known():
    scheduler = scheduler_of()
    send(scheduler)
    for _ in range(REQUESTS):
        scheduler.take(PeerRecorded(INDEX, (b"12345678",), 0, 2.0), 2.0)
    told = page(TOKENS * REQUESTS * 2, 0, REQUESTS * 2)
    scheduler.take(PageScraped(0, told), WINDOW_S)
    assert scheduler.accuracy.comparison(0).known_share == 1.0


def test_a_restart_begins_anew():
    scheduler = scheduler_of()
    send(scheduler)
    found = page(TOKENS * REQUESTS, 0, REQUESTS, process_started_at_s=1.0)
    scheduler.take(PageScraped(0, found), WINDOW_S)
    assert scheduler.accuracy.comparison(0) is not None
    again = page(0, 0, 0, process_started_at_s=2.0)
    scheduler.take(PageScraped(0, again), WINDOW_S + 1.0)
    assert scheduler.accuracy.comparison(0) is None
    assert scheduler.indexes[INDEX].capacity_blocks(0) == 100
