"""At which rank of an endpoint a request is served, and when its engine chooses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import diff_configs
from epp.configuration.explaining import explain
from epp.core.decision.explaining import REASON_HEADER, explained, explaining_headers
from epp.core.decision.inputs import (
    EventsHeard,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ServedBy,
    StreamChanged,
)
from epp.core.decision.rank_choice import RankChoice
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Outcome
from epp.core.kv_events.payload import Stored
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.token_ids import packed
from epp.core.types import EndpointMetrics
from epp.plugins.data_parallel_rank import RANK_HEADER, DataParallelRank
from tests import gateway as gw
from tests.builders import endpoint, request
from tests.shell.gateway.test_ext_proc import serving
from tests.transports import TRANSPORTS

IDS = packed(range(1_000))


@pytest.mark.parametrize(
    ("held_tokens", "sent", "rank"),
    [
        ([0, 640, 64], [0, 0, 0], 1),
        ([0, 640, 639], [0, 0, 0], 1),
        ([640, 0, 640], [0, 0, 0], None),
        ([0, 0, 0], [0, 0, 0], None),
        ([0, 640, 64], [0, 2, 0], 1),
        ([0, 640, 64], [0, 3, 0], None),
        ([0, 640, 64], [2, 4, 9], 1),
        ([0, 640, 64], [2, 5, 9], None),
        ([0, 640], [9, 0], 1),
    ],
)
def test_whoever_holds_most_serves(held_tokens, sent, rank):
    """Unless several hold as much, or it was sent many more than the others already."""
    assert DataParallelRank().rank_of(held_tokens, sent) == rank


def test_few_tokens_are_not_worth_a_rank():
    plugin = DataParallelRank(min_cached_token_delta=577)
    assert plugin.rank_of([0, 640, 64], [0, 0, 0]) is None
    assert plugin.rank_of([0, 641, 64], [0, 0, 0]) == 1


@given(st.integers(2, 8), st.lists(st.booleans(), max_size=200), st.integers(1, 5))
def test_a_hot_prompt_drowns_no_rank(ranks, ends, ahead):
    """However its requests come and end."""
    plugin, sent = DataParallelRank(max_requests_ahead=ahead), [0] * ranks
    held_tokens = [64 * (rank == 1) for rank in range(ranks)]
    for end in ends:
        if end and sent[1]:
            sent[1] -= 1
            continue
        rank = plugin.rank_of(held_tokens, sent)
        if rank is not None:
            sent[rank] += 1
        assert sent[1] <= ahead + min(sent)


DOCUMENT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters:
    speculativeIndexing: false
    tokenProcessorConfig: {blockSizeTokens: 64}
    kvEventsConfig: {discoverPods: false}
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
- type: data-parallel-rank-producer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
"""


def scheduler(*ranks, fallbacks=0, speculative=False):
    """One that hears endpoints, with so many ranks each; 0: not heard."""
    document = DOCUMENT.replace("Indexing: false", f"Indexing: {str(speculative).lower()}")
    settings = build_settings(load_config(document, "here", plugin_tables()))
    made = Scheduler(structs.replace(settings, fallback_endpoints_max=fallbacks), seed=1)
    made.take(PoolReplaced([endpoint(number) for number in range(len(ranks))]), 0.0)
    for slot, count in enumerate(ranks):
        for rank in range(count):
            live = StreamChanged(slot, StreamState.LIVE, complete=True, rank=rank)
            made.take(live, 0.0)
    return made


def store(made, slot, rank, tokens=512):
    blocks = tokens // 64
    stored = Stored([*range(100, 100 + blocks)], None, IDS[: 4 * tokens], 64)
    made.take(EventsHeard(slot, (stored,), rank), 0.0)


def decide(made):
    return made.schedule(request(token_ids=(IDS,), prompt_tokens=1_000), 0.0)


def test_the_rank_of_the_endpoint_that_was_picked_is_named():
    made = scheduler(1, 4)
    assert decide(made).request_headers() == {}
    store(made, 1, 3)
    decision = decide(made)
    assert decision.endpoint == endpoint(1)
    assert decision.request_headers() == {RANK_HEADER: "3"}
    assert decision.leg.matched_blocks == 8
    store(made, 0, 0, tokens=960)
    assert decide(made).endpoint == endpoint(0)
    assert decide(made).request_headers() == {}
    assert not list(made.failures)


def test_the_rank_is_told_with_the_decision():
    """To the client that asks why."""
    made = scheduler(4)
    store(made, 0, 3)
    decision = decide(made)
    told = explaining_headers(explained(decision.leg, {}), made.failures)
    assert told[REASON_HEADER].endswith("8 of 15 blocks, rank 3")
    made = scheduler(4)
    decision = decide(made)
    told = explaining_headers(explained(decision.leg, {}), made.failures)
    assert "rank" not in told[REASON_HEADER]


def test_what_was_sent_counts_until_it_ends():
    """Wherever it goes: to its end, to another endpoint, or away with the endpoint."""
    made = scheduler(2, 2)
    store(made, 0, 1)
    decisions = [decide(made) for _ in range(5)]
    assert [one.rank for one in decisions] == [1, 1, 1, None, None]
    made.take(RequestEnded(decisions[0].lease, Outcome()), 1.0)
    made.take(RequestEnded(decisions[0].lease, Outcome()), 1.0)
    made.take(ServedBy(decisions[1].lease, endpoint(1).address), 1.0)
    assert made.ledger.sent_to_ranks(0, 2) == [0, 1]
    assert made.ledger.sent_to_ranks(1, 2) == [0, 1]
    assert decide(made).rank == 1
    made.take(PoolReplaced([endpoint(1)]), 2.0)
    assert made.ledger.sent_to_ranks(0, 2) == [0, 0]
    for one in decisions:
        made.take(RequestEnded(one.lease, Outcome()), 3.0)
    assert made.ledger.sent_to_ranks(1, 2) == [0, 0]


@pytest.mark.parametrize(
    ("others", "rank", "named"),
    [((4, 4), 3, True), ((4, 3), 3, False), ((4, 3), 2, True), ((4, 0), 1, False), ((4, 1), 0, True)],
)  # fmt: skip
def test_a_rank_is_named_that_each_endpoint_of_the_answer_has(others, rank, named):
    """Whoever serves in the place of the first gets the same headers; rank 0 all have."""
    made = scheduler(4, *others, fallbacks=2)
    store(made, 0, rank)
    decision = decide(made)
    assert decision.endpoint == endpoint(0)
    assert len(decision.leg.fallbacks) == 2
    assert decision.request_headers() == ({RANK_HEADER: str(rank)} if named else {})
    assert made.ledger.sent_to_ranks(0, 4)[rank] == named


def choices(made):
    """Those that there were."""
    return {choice.value: count for choice, count in made.placements.rank_choices.items() if count}


def test_what_came_of_choosing_is_counted():
    """Once a request, and nothing where there is nothing to choose."""
    made = scheduler(1)
    decide(made)
    assert made.placements.rank_choices == dict.fromkeys(RankChoice, 0)
    made = scheduler(4, 2, fallbacks=1)
    store(made, 0, 3)
    moved = decide(made)
    made.take(ServedBy(moved.lease, endpoint(1).address), 1.0)
    assert choices(made) == {"fallback": 1}
    made = scheduler(2)
    decide(made)
    store(made, 0, 1)
    for _ in range(4):
        decide(made)
    store(made, 0, 0)
    decide(made)
    assert choices(made) == {"unheld": 1, "named": 3, "crowded": 1, "alike": 1}
    made.take(Reconfigured(made.settings), 2.0)
    assert choices(made)["named"] == 3
    without = structs.replace(
        made.settings, stages=Stages(decode=structs.replace(made.settings.profile, responders=()))
    )
    assert Scheduler(without, seed=1).placements.rank_choices == {}


def held_by_ranks(made, slot):
    (index,) = made.indexes.hearing.values()
    return list(index.held_by_ranks(request(token_ids=(IDS,)), slot, 0.0))


def test_whoever_asks_the_same_before_an_engine_tells_is_sent_to_the_same_rank():
    """Though another rank says that it holds as much as this one did."""
    made = scheduler(3, speculative=True)
    store(made, 0, 2)
    assert decide(made).rank == 2
    assert held_by_ranks(made, 0) == [0, 0, 15]
    store(made, 0, 1)
    decision = decide(made)
    assert (decision.rank, decision.leg.matched_blocks) == (2, 15)
    made.take(Reconfigured(made.settings), 0.0)
    assert held_by_ranks(made, 0) == [0, 8, 15]


def test_where_the_engine_chose_no_rank_is_believed_to_hold_more():
    made = scheduler(3, speculative=True)
    decide(made)
    assert held_by_ranks(made, 0) == [0, 0, 0]


@pytest.mark.parametrize("ranks", [3, 1])
def test_what_was_not_served_there_is_believed_of_no_rank_there(ranks):
    """But where it was served, at the rank of the same number."""
    made = scheduler(3, ranks, speculative=True)
    store(made, 0, 2)
    failed = decide(made)
    made.take(RequestEnded(failed.lease, Outcome(status=500)), 0.0)
    assert held_by_ranks(made, 0) == [0, 0, 8]
    moved = decide(made)
    assert held_by_ranks(made, 0) == [0, 0, 15]
    made.take(ServedBy(moved.lease, endpoint(1).address), 0.0)
    assert held_by_ranks(made, 0) == [0, 0, 8]
    assert held_by_ranks(made, 1) == ([0, 0, 15] if ranks == 3 else [0])
    made.take(RequestEnded(moved.lease, Outcome(status=500)), 0.0)
    assert held_by_ranks(made, 1) == [0] * ranks
    assert not list(made.failures)


def test_an_engine_that_restarts_holds_nothing_at_any_rank():
    made = scheduler(3, speculative=True)
    store(made, 0, 2)
    made.take(PageScraped(0, EndpointMetrics(process_started_at_s=1.0)), 0.0)
    decision = decide(made)
    made.take(PageScraped(0, EndpointMetrics(process_started_at_s=2.0)), 0.0)
    assert held_by_ranks(made, 0) == [0, 0, 0]
    made.take(RequestEnded(decision.lease, Outcome(status=500)), 0.0)
    assert held_by_ranks(made, 0) == [0, 0, 0]
    assert not list(made.failures)


def test_two_pickers_name_the_same_rank():
    """Each by what engines tell it."""
    first, second = scheduler(1, 3), scheduler(1, 3)
    for made in (first, second):
        store(made, 1, 2)
    assert [decide(made).rank for made in (first, second)] == [2, 2]


BODY = b'{"model": "m", "prompt": [%s]}' % b", ".join(b"%d" % at for at in range(1_000))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_each_transport_carries_it(transport):
    async with serving(transport) as rig:
        rig.scheduler = scheduler(4)
        store(rig.scheduler, 0, 3)
        fields = gw.COMPLETIONS | {RANK_HEADER: "0"}
        messages = gw.request_headers(fields), gw.request_body(BODY)
        head, _ = await rig.call().exchange(*messages, answers=2)
        assert gw.set_headers(head)[RANK_HEADER] == "3"


@pytest.mark.parametrize("held_rank", [None, 2])
def test_what_a_client_says_there_never_reaches_an_engine(held_rank):
    """It is overwritten, or removed where the engine is to choose."""
    made = scheduler(4)
    if held_rank is not None:
        store(made, 0, held_rank)
    fields = gw.COMPLETIONS | {RANK_HEADER: "1"}
    head, *_ = gw.Stream(made).send(gw.request_headers(fields), gw.request_body(BODY))
    if held_rank is None:
        assert gw.removed_headers(head) == {RANK_HEADER}
    else:
        assert gw.set_headers(head)[RANK_HEADER] == "2"


class Broken(DataParallelRank, frozen=True):
    """It says what no plugin should."""

    says: object = None

    def rank_of(self, held_tokens, sent, /):
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.mark.parametrize("says", [2, -1, True, "0", math.nan, KeyError("x")])
def test_one_that_fails_costs_the_header_alone(says):
    made = scheduler(2)
    store(made, 0, 1)
    chooser = made.placements.rank_chooser
    made.placements.rank_chooser = structs.replace(chooser, plugin=Broken(says=says))
    decision = decide(made)
    assert decision.endpoint == endpoint(0)
    assert decision.request_headers() == {}
    (failure,) = made.failures
    assert failure.name == "data-parallel-rank-producer"
    assert choices(made) == {"failed": 1}


def test_it_works_by_being_declared():
    """No profile names it, and the index is made for it."""
    with_it = load_config(DOCUMENT, "a", plugin_tables())
    text = DOCUMENT + "  - pluginRef: data-parallel-rank-producer\n"
    with pytest.raises(ConfigError, match="is a request plugin, expected a filter"):
        load_config(text, "b", plugin_tables())
    before = load_config(DOCUMENT.replace("- type: data-parallel-rank-producer\n", ""), "b", plugin_tables())  # fmt: skip
    assert diff_configs(before, with_it) == ["request plugin data-parallel-rank-producer: added"]
    assert "data-parallel-rank-producer" in explain(with_it)
    alone = DOCUMENT.partition("- type: precise")[0] + "- type: data-parallel-rank-producer\n"
    assert "precise-prefix-cache-producer" in load_config(alone, "c", plugin_tables()).indexes
