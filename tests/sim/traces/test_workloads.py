"""Generated workloads: one seed, order, closed loops, sharing as described, nothing held."""

import gc
import math
import statistics
import tracemalloc
from collections import Counter
from itertools import combinations, islice, pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.traces.arrival import FieldError
from sim.traces.lengths import Spread
from sim.traces.prompts import request_of, request_through_bytes
from sim.traces.standard import STANDARD, Drawing
from sim.traces.workloads import OpenLoad, Stage, arrivals

NAMES = sorted(STANDARD)


def endless(name, rate=10.0):
    load = OpenLoad(stages=(Stage(rate_per_s=rate, duration_s=1e9),))
    return msgspec.structs.replace(STANDARD[name], load=load)


@pytest.mark.parametrize("name", NAMES)
def test_every_standard_workload_can_be_replayed(name):
    """Ordered, numbered in turn, each waiting only for what came before it."""
    trace = list(arrivals(STANDARD[name], seed=1, requests_max=300))
    assert trace
    assert [one.index for one in trace] == list(range(len(trace)))
    assert trace[0].time_s >= 0
    assert all(one.time_s <= other.time_s for one, other in pairwise(trace))
    for one in trace:
        assert one.prompt_tokens == sum(one.lengths) >= 1
        assert one.output_tokens >= 1
        assert min(one.lengths) >= 1
        if one.after is not None:
            first = trace[one.after]
            assert first.index < one.index
            assert one.time_s >= first.time_s + one.think_s - 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_makes_one_trace(name):
    """And another seed another."""
    first, again, other = (
        list(arrivals(STANDARD[name], seed, requests_max=100)) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", ["agent-tree", "interactive-chat", "multi-turn"])
def test_a_later_turn_contains_the_prompt_and_the_answer_that_it_waited_for(name):
    """So that what was generated is found again."""
    trace = list(arrivals(STANDARD[name], seed=1, requests_max=500))
    later = [one for one in trace if one.after is not None]
    assert later
    for one in later:
        before = trace[one.after]
        contained = (*zip(before.blocks, before.lengths, strict=True),)
        contained += ((before.answer, before.output_tokens),)
        assert (*zip(one.blocks, one.lengths, strict=True),)[: len(contained)] == contained


def test_agents_of_one_task_start_side_by_side():
    """They wait for the same answer of the planner."""
    trace = list(arrivals(STANDARD["agent-tree"], seed=1, requests_max=500))
    starts = Counter(one.after for one in trace if one.turn == 0 and one.after is not None)
    assert max(starts.values()) > 1
    assert all(trace[planner].after is None for planner in starts)


def test_the_control_shares_nothing():
    """No id occurs twice."""
    seen = Counter(
        block for one in arrivals(STANDARD["zero-reuse"], seed=1) for block in one.blocks
    )
    assert set(seen.values()) == {1}


def test_a_hot_spot_is_hot():
    """The first groups get most of the requests, unlike in a workload without skew."""

    def share_of_ten(name):
        trace = arrivals(endless(name), seed=1, requests_max=5000)
        groups = Counter(one.blocks[0] for one in trace)
        return sum(count for _, count in groups.most_common(10)) / 5000

    assert share_of_ten("hot-spot") > 0.4
    assert share_of_ten("b2b") < 0.1


def test_adapters_are_drawn_by_their_weights():
    """Zipf: the first about twice as often as the second."""
    trace = arrivals(endless("lora-mix"), seed=1, requests_max=5000)
    drawn = Counter(one.adapter for one in trace)
    assert len(drawn) == 32
    assert 1.6 < drawn["adapter-1"] / drawn["adapter-2"] < 2.5


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 4.0])
def test_gaps_vary_as_was_asked_for_at_the_rate_that_was_asked_for(burstiness):
    """Their coefficient of variation is the burstiness; the mean is the rate's."""
    stage = Stage(rate_per_s=10, duration_s=6000)
    times = list(OpenLoad(stages=(stage,), burstiness=burstiness).times(Random("gaps")))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.1, rel=0.06)
    assert statistics.pstdev(gaps) / mean == pytest.approx(burstiness, rel=0.1, abs=1e-6)


def test_a_stage_without_a_rate_is_a_pause():
    """Nobody comes in it."""
    stages = tuple(Stage(rate_per_s=rate, duration_s=10) for rate in (1, 0, 1))
    times = list(OpenLoad(stages=stages, burstiness=0).times(Random(1)))
    assert all(not 10 <= time < 20 for time in times)
    assert len(times) == 18


def test_a_generated_trace_shares_alike_through_bytes():
    """Lengths that are no multiple of anything."""
    trace = list(arrivals(STANDARD["agent-tree"], seed=2, requests_max=60))
    chains = []
    for make in (request_of, request_through_bytes):
        whole = [make(one).chains_of(256, 10_000)[0] for one in trace]
        chains.append([[chain[at : at + 8] for at in range(0, len(chain), 8)] for chain in whole])
    for left, right in combinations(range(len(trace)), 2):
        fast, through = (shared_blocks(one[left], one[right]) for one in chains)
        assert fast == through


def shared_blocks(left, right):
    return next(
        (at for at, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
        min(len(left), len(right)),
    )


def test_a_workload_without_end_is_never_held():
    """Only sessions that are under way are in memory."""
    tracemalloc.start()
    try:
        stream = arrivals(endless("agent-tree", rate=1.0), seed=1)
        assert sum(1 for _ in islice(stream, 6000)) == 6000
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()


@settings(max_examples=100)
@given(
    kind=st.sampled_from(["normal", "lognormal", "uniform", "fixed", "poisson"]),
    mean=st.floats(0.5, 1e5),
    std_dev=st.floats(0, 1e5),
    lowest=st.floats(0, 100),
    span=st.floats(0, 1e5),
    seed=st.integers(0, 2**32),
)
def test_a_draw_stays_within_its_limits(kind, mean, std_dev, lowest, span, seed):
    """Whatever the distribution."""
    spread = Spread(type=kind, mean=mean, std_dev=std_dev, min=lowest, max=lowest + span)
    assert lowest <= spread.draw(Random(seed)) <= lowest + span
    assert spread.count(Random(seed)) >= 1


@pytest.mark.parametrize("kind", ["normal", "lognormal", "poisson"])
@pytest.mark.parametrize("mean", [4.0, 400.0])
def test_draws_have_the_mean_that_was_asked_for(kind, mean):
    """Mean and deviation are those of the variable itself, also of a lognormal."""
    random = Random(kind)
    spread = Spread(type=kind, mean=mean, std_dev=mean / 4)
    drawn = [spread.draw(random) for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    deviation = math.sqrt(mean) if kind == "poisson" else mean / 4
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.1)


def test_limits_that_cannot_be_are_refused():
    """The smallest above the largest."""
    with pytest.raises(FieldError, match="Expected 0 <= min <= max"):
        Spread(mean=1, min=3, max=2)


def steady_chat(duration_s=600.0, seed=1):
    drawing = Drawing(
        kind="interactive-chat", rate_per_s=4.0, duration_s=duration_s, seed=seed, steady=True
    )
    return list(drawing.generated().arrivals(seed))


def test_steady_traffic_has_sessions_under_way_and_ends():
    """Each third has about the same number of requests; without the flag a tail follows the end."""
    found = steady_chat()
    assert found[0].time_s >= 0.0
    assert found[-1].time_s < 600.0
    thirds = Counter(int(one.time_s // 200.0) for one in found)
    assert max(thirds.values()) < 1.1 * min(thirds.values())
    early = [one for one in found if one.time_s < 5.0]
    assert sum(one.turn > 0 for one in early) > sum(one.turn == 0 for one in early)
    usual = Drawing(kind="interactive-chat", rate_per_s=4.0, duration_s=600.0)
    assert list(usual.generated().arrivals(1))[-1].time_s > 700.0


def test_turns_of_steady_traffic_wait_for_answers_in_the_trace():
    """The first turn in the trace waits for nothing, later ones wait for the one before."""
    found = steady_chat(duration_s=200.0)
    assert [one.index for one in found] == list(range(len(found)))
    latest = {}
    for one in found:
        before = latest.get(one.session)
        assert one.after == before
        latest[one.session] = one.index


def test_each_seed_draws_other_steady_traffic():
    """And one seed always the same."""
    assert steady_chat(100.0) == steady_chat(100.0)
    assert steady_chat(100.0) != steady_chat(100.0, seed=2)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("multi-turn", "Expected sessions that end"),
        ("rag", "Expected arrivals at a rate"),
        ("b2b", "Expected one rate"),
    ],
)
def test_a_workload_that_cannot_be_steady_is_refused(kind, told):
    """With the reason."""
    with pytest.raises(FieldError) as refused:
        Drawing(kind=kind, steady=True).generated()
    assert refused.value.expected.startswith(told)


def test_workloads_beside_each_other_share_no_text_and_keep_their_marks():
    """Each has its own sessions, whose turns still wait for each other, and its own priority."""
    talks = msgspec.structs.replace(STANDARD["interactive-chat"], priority=2)
    tasks = msgspec.structs.replace(STANDARD["agent-tree"], headers=(("x-team", "agents"),))
    both = msgspec.structs.replace(talks, beside=(tasks,))
    trace = list(arrivals(both, seed=1, requests_max=400))
    assert [one.index for one in trace] == list(range(400))
    assert all(one.time_s <= other.time_s for one, other in pairwise(trace))
    of = {2: [one for one in trace if one.priority == 2], 0: [one for one in trace if one.headers]}
    assert len(of[2]) + len(of[0]) == 400
    assert min(len(of[2]), len(of[0])) > 20
    ids = [{part for one in some for part in (*one.blocks, one.answer)} for some in of.values()]
    assert not ids[0] & ids[1]
    sessions = [{one.session for one in some} for some in of.values()]
    assert not sessions[0] & sessions[1]
    later = [one for one in trace if one.after is not None]
    assert later
    for one in later:
        assert trace[one.after].priority == one.priority
        assert trace[one.after].answer in one.blocks


def test_the_first_of_two_workloads_is_as_if_it_were_alone():
    """So that what it costs to have another beside it can be measured."""
    alone = STANDARD["zero-reuse"]
    both = msgspec.structs.replace(alone, priority=1, beside=(STANDARD["chatbot"],))
    mine = [one for one in arrivals(both, seed=4, requests_max=200) if one.priority]
    same = list(arrivals(alone, seed=4, requests_max=len(mine)))
    assert [(one.time_s, one.output_tokens) for one in mine] == [
        (one.time_s, one.output_tokens) for one in same
    ]


def test_the_rate_of_one_kind_of_traffic_can_be_changed_only():
    with pytest.raises(FieldError, match="one kind"):
        Drawing(kind="two-tenants", rate_per_s=3.0).generated()
    with pytest.raises(FieldError, match="one kind"):
        Drawing(kind="two-tenants", steady=True).generated()
