"""What is kept of decisions, for how long, and what is told of them."""

import asyncio
import gc
import tracemalloc

import msgspec
import numpy as np
import pytest

from epp.core.decision.inputs import PageScraped, PoolReplaced, Reconfigured, ServedBy
from epp.core.decision.stages import Stages
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.session import Exchange, StreamFailure
from epp.core.protocol.usage import Usage
from epp.core.types import EndpointMetrics
from epp.shell.operators.decisions.recent_decisions import (
    _MEMBERSHIPS_MAX,
    WAITING_MAX,
    RecentDecisions,
    Wanted,
    recent_decisions,
)
from tests.builders import endpoint
from tests.builders import request as make_request
from tests.shell.operators.decided import with_leg
from tests.shell.operators.pages.test_debug_pages import REFUSAL, Picker
from tests.turns import counted_turns


@pytest.fixture
def picker():
    return Picker()


async def test_what_is_kept_is_bounded_in_bytes(picker):
    """The oldest go, whatever clients and gateways write; minutes of ordinary traffic stay."""
    decision = picker.scheduler.schedule(make_request(request_id="r" * 36, model="m" * 40), 1.0)
    tracemalloc.start()
    recent = RecentDecisions(picker.scheduler.pool, rows_bytes_max=10**6, scores_bytes_max=10**5)
    empty, _ = tracemalloc.get_traced_memory()
    for _ in range(4_000):
        recent.decided(decision)
        recent.refused(REFUSAL, None, request_id="r" * 300, path="/p" * 10_000)
    recent.fold()
    full, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1.1e6 < empty < 1.2e6, "taken at once"
    assert full < 1.02 * empty
    ordinary = RecentDecisions(picker.scheduler.pool)
    for _ in range(2 * 60 * 100):
        ordinary.decided(decision)
    assert len(ordinary) == 2 * 60 * 100, "two minutes at 100 a second"


async def test_old_decisions_keep_the_score_of_the_chosen_one(picker):
    """Those of all candidates are large, and stay as long as there is room for them."""
    recent = RecentDecisions(picker.scheduler.pool, scores_bytes_max=248)
    for number in range(5):
        decision = picker.scheduler.schedule(make_request(request_id=str(number)), 1.0)
        recent.decided(decision)
    newest, *_, oldest = await recent.rows(5, Wanted())
    assert len(newest["scores"]) == 2
    (chosen,) = oldest["scores"]
    assert chosen["endpoint"] == oldest["endpoint"]
    assert sum(chosen["parts"].values()) == pytest.approx(chosen["total"], abs=1e-3)
    assert list(chosen["parts"]) == list(decision.leg.scorers)


async def test_scores_go_when_the_names_of_their_endpoints_do(picker):
    """Lists of endpoints are bounded in number; those of the chosen one stay."""
    first = picker.decide()
    for number in range(2 * _MEMBERSHIPS_MAX):
        replaced = [endpoint(8, name=f"new-{number}"), endpoint(9)]
        picker.scheduler.take(PoolReplaced(replaced), 1.0)
        for slot, _ in picker.scheduler.pool.endpoints():
            picker.scheduler.take(PageScraped(slot, EndpointMetrics()), 1.0)
        picker.decide()
    assert len(picker.recent._memberships) == _MEMBERSHIPS_MAX
    newest, *_, oldest = await picker.recent.rows(1_000, Wanted())
    assert {score["endpoint"] for score in newest["scores"]} == {at.name for at in replaced}
    (chosen,) = oldest["scores"]
    assert chosen["endpoint"] == oldest["endpoint"] == first.endpoint.name


async def test_rows_that_go_while_others_are_looked_through_are_left_out(picker):
    """What is kept meanwhile neither repeats a row nor tears one."""
    recent = RecentDecisions(picker.scheduler.pool, rows_bytes_max=200_000)
    for number in range(5_000):
        recent.refused(REFUSAL, make_request(request_id=f"r-{number}"))
    kept = len(recent)
    asking = asyncio.create_task(recent.rows(kept, Wanted()))
    await asyncio.sleep(0)
    for number in range(kept * 3 // 4):
        recent.refused(REFUSAL, make_request(request_id=f"s-{number}"))
    found = [row["request_id"] for row in await asking]
    assert 0 < len(found) < kept
    assert found == [f"r-{number}" for number in range(4_999, 4_999 - len(found), -1)]


async def test_the_loop_runs_while_rows_are_looked_through(picker):
    """Other tasks get their turn every few hundred rows."""
    for _ in range(3_000):
        picker.recent.refused(REFUSAL, None)
    async with counted_turns() as turns:
        assert await picker.recent.rows(10, Wanted(request_id="none")) == []
    assert turns.count >= 5


async def test_what_is_kept_holds_no_request(picker):
    """Neither prompts nor leases nor headers live on because a page may ask."""
    asked = make_request(prompts=(b"once upon a time" * 100,), headers={"authorization": "secret"})
    decision = picker.scheduler.schedule(asked, 1.0)
    picker.recent.decided(decision)
    picker.recent.fold()
    for ring in (picker.recent._rows, picker.recent._scores):
        (kept,) = ring.newest_first()
        assert b"once upon" not in kept
        assert b"secret" not in kept
    reached, seen = [picker.recent._memberships], set()
    while reached:
        at = reached.pop()
        if id(at) in seen or at is picker.scheduler.pool:
            continue
        seen.add(id(at))
        assert not isinstance(at, InferenceRequest)
        assert at is not decision.lease
        fields = getattr(at, "__struct_fields__", ())
        reached += [getattr(at, name) for name in fields] or gc.get_referents(at)


class Clock:
    def __init__(self):
        self.now_s = 1_700_000_000.0

    def __call__(self):
        return self.now_s


def exchange_of(decision, **fields):
    made = Exchange(100.0)
    made.decision = decision
    for name, value in fields.items():
        setattr(made, name, value)
    return made


async def test_how_a_request_ended_is_told_with_its_decision(picker):
    """Status, times and what the engine found in its cache; nothing until it has ended."""
    first, second = picker.decide(request_id="a"), picker.decide(request_id="b")
    third = picker.decide(request_id="c")
    ended = exchange_of(
        first,
        response_started_at_s=100.25,
        first_output_at_s=100.5,
        usage=Usage(cached_tokens=64),
    )
    picker.recent.completed(ended, Outcome(status=200), 101.5)
    picker.recent.completed(
        exchange_of(second, failure=StreamFailure.INTERNAL),
        Outcome(ending=Ending.CLIENT_LEFT, status=503, by_gateway=True),
        100.125,
    )
    picker.recent.completed(ended, Outcome(status=500), 200.0)
    open_, failed, served = await picker.recent.rows(3, Wanted())
    assert served["outcome"] == {
        "ending": "complete",
        "failure": None,
        "status": 200,
        "by_gateway": False,
        "served_by": None,
        "duration_s": 1.5,
        "response_headers_s": 0.25,
        "first_output_s": 0.5,
        "cached_tokens": 64,
    }, "what ended stays as it ended"
    assert failed["outcome"] == {
        "ending": "client-disconnect",
        "failure": "internal",
        "status": 503,
        "by_gateway": True,
        "served_by": None,
        "duration_s": 0.125,
        "response_headers_s": None,
        "first_output_s": None,
        "cached_tokens": None,
    }
    assert open_["outcome"] is None
    assert open_["number"] == third.number


async def test_numbers_that_cannot_be_are_cut_and_not_raised(picker):
    """Statuses and usage come from elsewhere."""
    decision = picker.decide()
    usage = Usage(cached_tokens=10**30)
    told = exchange_of(decision, usage=usage)
    picker.recent.completed(told, Outcome(status=10**9), 101.0)
    (row,) = await picker.recent.rows(1, Wanted())
    assert row["outcome"]["cached_tokens"] == 2**31 - 1
    assert row["outcome"]["status"] == 2**15 - 1


async def test_who_served_instead_is_told(picker):
    """Only where the gateway went elsewhere than it was told."""
    kept, moved = picker.decide(request_id="a"), picker.decide(request_id="b")
    picker.recent.served(exchange_of(kept, served=kept.endpoint.address))
    (other,) = (at for _, at in picker.scheduler.pool.endpoints() if at.name != moved.endpoint.name)
    picker.scheduler.take(ServedBy(moved.lease, other.address), 1.0)
    picker.recent.served(exchange_of(moved, served=other.address))
    picker.recent.completed(exchange_of(moved), Outcome(status=200), 101.0)
    elsewhere, there = await picker.recent.rows(2, Wanted())
    assert elsewhere["outcome"]["served_by"] == other.address
    assert there["outcome"] is None
    (alone,) = await picker.recent.rows(1, Wanted(request_id="b"))
    assert alone["outcome"]["served_by"] == other.address


@pytest.mark.parametrize("stranger", [False, True])
async def test_every_page_has_a_moved_request_where_it_was_served(picker, stranger):
    """What was predicted, too: by who served it, of whom nothing is known if that is a stranger."""
    prompts = (bytes(1_024),)
    first = picker.decide(prompts=prompts, prompt_tokens=256)
    moved = picker.decide(prompts=prompts, prompt_tokens=256)
    assert moved.endpoint is first.endpoint
    (other,) = (at for _, at in picker.scheduler.pool.endpoints() if at.name != moved.endpoint.name)
    address = "192.0.2.1:80" if stranger else other.address
    picker.scheduler.take(ServedBy(moved.lease, address), 1.0)
    served = exchange_of(moved, served=address, endpoint=None if stranger else other)
    picker.recent.served(served)
    usage = Usage(cached_tokens=0)
    picker.recent.completed(exchange_of(moved, usage=usage), Outcome(status=200), 101.0)
    row, before = await picker.recent.rows(2, Wanted())
    assert (row["matched_blocks"], row["predicted_tokens"]) == (4, 0)
    assert (before["matched_blocks"], before["predicted_tokens"]) == (0, 0)
    lately = await picker.recent.lately(60.0, 100)
    there = lately.endpoints[address if stranger else other.name]
    assert (there.requests, there.predicted_tokens, there.compared_tokens) == (1, 0, 0)
    assert lately.endpoints[first.endpoint.name].requests == 1
    assert moved.predicted_tokens == 0


async def test_what_is_too_old_is_told_no_more_and_dropped(picker):
    """By the clock of the day, whether there is room or not."""
    clock = Clock()
    recent = RecentDecisions(picker.scheduler.pool, keep_s=60.0, clock=clock)
    for number in range(10):
        decision = picker.scheduler.schedule(make_request(request_id=str(number)), 1.0)
        recent.decided(decision)
        recent.refused(REFUSAL, None)
        clock.now_s += 10.0
    told = await recent.rows(100, Wanted(refused="false"))
    assert [row["request_id"] for row in told] == ["9", "8", "7", "6", "5", "4"]
    assert len(recent) == 20
    recent.expire()
    assert len(recent) == 12
    assert recent.oldest_at_s == clock.now_s - 60.0
    clock.now_s += 1_000.0
    recent.expire()
    assert len(recent) == 0
    assert recent.oldest_at_s is None


async def test_nothing_is_kept_where_nothing_is_to_be(picker):
    """And what asks is answered with nothing."""
    failed = []
    recent = recent_decisions(picker.scheduler.pool, 2**20, 0.0, failed.append)
    decision = picker.scheduler.schedule(make_request(), 1.0)
    recent.decided(decision)
    assert await recent.rows(10, Wanted()) == []
    recent = recent_decisions(picker.scheduler.pool, 2**20, 60.0, failed.append)
    recent.decided(decision)
    assert len(await recent.rows(10, Wanted())) == 1


async def test_the_runner_up_and_who_decided_are_told(picker):
    """With what was known of both when it was decided: this request is not counted yet."""
    busy = picker.decide(request_id="first")
    decision = picker.decide(request_id="second", prompt_tokens=640)
    newest, oldest = await picker.recent.rows(2, Wanted())
    assert oldest["known"]["endpoint"]["inflight_requests"] == 0
    (other,) = (
        at.name for _, at in picker.scheduler.pool.endpoints() if at.name != decision.endpoint.name
    )
    assert newest["runner_up"]["endpoint"] == other
    assert newest["decided_by"][0] == "queue-scorer"
    same = busy.endpoint.name == decision.endpoint.name
    assert newest["known"]["endpoint"]["inflight_requests"] == (1 if same else 0)
    assert newest["known"]["endpoint"]["inflight_prefill_tokens"] == 0.0
    assert newest["known"]["endpoint"]["waiting_requests"] == 0.0
    assert newest["known"]["endpoint"]["metrics_age_s"] == 1.0
    assert newest["known"]["runner_up"]["waiting_requests"] == 3.0
    assert msgspec.json.encode(newest)


async def test_the_only_candidate_has_no_runner_up(picker):
    """Nor did anything decide; who was not scored is named."""
    address = picker.scheduler.pool.columns.endpoints[1].address
    picker.decide(subset=(address,))
    (row,) = await picker.recent.rows(1, Wanted())
    assert row["runner_up"] is None
    assert row["decided_by"] == []
    assert row["not_scored"] == ["pod-0"]


async def test_decisions_name_the_configuration_that_made_them(picker):
    """After a reload the old ones keep the names and the generation of theirs."""
    settings = picker.scheduler.settings
    picker.recent.configured(3, settings)
    picker.decide()
    renamed = msgspec.structs.replace(
        settings,
        stages=Stages(
            decode=msgspec.structs.replace(
                settings.profile,
                scorers=tuple(
                    msgspec.structs.replace(scorer, name=f"new-{scorer.name}")
                    for scorer in settings.profile.scorers[:2]
                ),
            )
        ),
    )
    picker.scheduler.take(Reconfigured(renamed), 1.0)
    picker.recent.configured(4, renamed)
    picker.decide()
    new, old = await picker.recent.rows(2, Wanted())
    assert (new["config_generation"], old["config_generation"]) == (4, 3)
    assert list(new["score"]["parts"]) == ["new-queue-scorer", "new-kv-cache-utilization-scorer"]
    assert "prefix-cache-scorer" in old["score"]["parts"]
    assert old["by_blocks"] == ["prefix-cache-scorer"]


async def test_sums_are_of_the_window_that_they_name(picker):
    """By endpoint: requests, tokens predicted and found; refusals by reason."""
    clock = Clock()
    recent = RecentDecisions(picker.scheduler.pool, clock=clock)

    def decide():
        decision = picker.scheduler.schedule(make_request(prompt_tokens=100), 1.0)
        recent.decided(decision)
        return decision

    decide()
    clock.now_s += 100.0
    decisions = [decide() for _ in range(3)]
    usage = Usage(cached_tokens=64)
    recent.completed(exchange_of(decisions[0], usage=usage), Outcome(status=200), 101.0)
    recent.completed(exchange_of(decisions[1]), Outcome(status=500), 101.0)
    recent.refused(REFUSAL, None)
    lately = await recent.lately(60.0, 1_000)
    assert lately.since_s == clock.now_s - 60.0
    assert lately.decided == 3
    assert lately.refused == {"rejected-no-endpoints": 1}
    assert sum(there.requests for there in lately.endpoints.values()) == 3
    assert sum(there.prompt_tokens for there in lately.endpoints.values()) == 300
    assert sum(there.cached_tokens for there in lately.endpoints.values()) == 64
    assert sum(there.failed for there in lately.endpoints.values()) == 1
    few = await recent.lately(60.0, 2)
    assert (few.decided, few.since_s) == (1, clock.now_s)
    assert (await recent.lately(1_000.0, 1_000)).decided == 4


async def test_a_window_that_does_not_fit_is_told_shorter(picker):
    """What was displaced is not counted, and not claimed."""
    clock = Clock()
    recent = RecentDecisions(picker.scheduler.pool, rows_bytes_max=4_000, clock=clock)
    for _ in range(200):
        recent.refused(REFUSAL, None)
        clock.now_s += 0.1
    lately = await recent.lately(60.0, 10_000)
    assert 0 < lately.refused["rejected-no-endpoints"] < 200
    assert lately.since_s == pytest.approx(
        clock.now_s - 0.1 * lately.refused["rejected-no-endpoints"]
    )
    clock.now_s += 1_000.0
    recent.expire()
    recent.refused(REFUSAL, None)
    clock.now_s += 10.0
    lately = await recent.lately(60.0, 10_000)
    assert lately.refused == {"rejected-no-endpoints": 1}
    assert lately.since_s == clock.now_s - 60.0, "what was displaced is older than that"


async def test_a_window_longer_than_records_are_kept_is_told_shorter(picker):
    clock = Clock()
    recent = RecentDecisions(picker.scheduler.pool, keep_s=30.0, clock=clock)
    for _ in range(5):
        recent.refused(REFUSAL, None)
        clock.now_s += 10.0
    lately = await recent.lately(60.0, 10_000)
    assert lately.since_s == clock.now_s - 30.0
    assert lately.refused == {"rejected-no-endpoints": 3}


async def test_what_cannot_be_kept_costs_no_other(picker, monkeypatch):
    """It is told of, and those that waited with it are kept; nothing waits for long."""
    failed = []
    recent = RecentDecisions(
        picker.scheduler.pool, could_not=lambda event, error: failed.append((event, str(error)))
    )
    decisions = [
        picker.scheduler.schedule(make_request(request_id=f"r-{number}"), 1.0)
        for number in range(2 * WAITING_MAX)
    ]
    for decision in decisions:
        recent.decided(decision)
        assert len(recent._waiting) < WAITING_MAX
    recent.decided(with_leg(decisions[0], dropped={object(): np.arange(1)}))
    told = await recent.rows(1_000, Wanted())
    assert len(told) == 2 * WAITING_MAX
    assert [event for event, _ in failed] == ["recent"]


async def test_what_waits_holds_no_request(picker):
    """Not even for the second until it is kept."""
    request = make_request(
        prompts=(b"once upon a time" * 100,), headers={"authorization": "secret"}
    )
    decision = picker.scheduler.schedule(request, 1.0)
    picker.recent.decided(decision)
    picker.recent.completed(exchange_of(decision), Outcome(status=200), 101.0)
    assert len(picker.recent._waiting) == 2
    for waiting in picker.recent._waiting:
        for name in waiting.__struct_fields__:
            held = getattr(waiting, name)
            assert held is not request
            assert held is not decision.lease
            assert held is not decision
            assert b"secret" not in repr(held).encode()
