"""An engine that verifies drafted tokens."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.engine import Engine, EngineSettings
from sim.engine.request import EngineRequest
from sim.engine.speculation import Speculation, speculation_of
from sim.engine.speculative_engine import SpeculativeEngine
from tests.sim.engine.speculation_figures import (
    PROFILE,
    PUBLISHED_GAIN,
    PUBLISHED_MS,
    gain,
    pass_ms,
)
from tests.sim.engine.test_engine import request_of, run
from tests.sim.engine.test_engine_agrees import ENGINES, SHAPES, events_of, requests_of

OFF_MAX = {1: 0.1, 8: 0.1, 16: 0.1, 32: 0.2, 64: 0.35, 128: 0.25}
"""Requests -> how far the time of a pass may be off, as a share of the published time."""


def engine_with(*acceptance, draft_s=0.0, **changes):
    speculation = Speculation(acceptance=acceptance, draft_s=draft_s)
    return SpeculativeEngine(
        EngineSettings(**{"blocks_total": 1000, **changes}), PROFILE, speculation
    )


def test_all_accepted_are_as_many_tokens_a_pass_as_are_drafted_and_one():
    """100 tokens: one with the prompt, then four a pass, three with the last."""
    engine = engine_with(1.0, 1.0, 1.0)
    one = request_of("a", 100, 100)
    engine.submit(one, 0.0)
    steps = run(engine)
    assert len(steps) == 1 + 25
    assert one.generated_tokens == 100
    assert steps[1].work.tokens == 4
    assert steps[-1].work.tokens == 3
    given = sum(step.work.sequences + step.work.drafts_accepted for step in steps)
    assert given == 100


def test_without_acceptance_it_is_as_many_passes_as_tokens_and_each_costs_more():
    """What is drafted in vain is computed all the same."""
    plain, vain = Engine(EngineSettings(blocks_total=1000), PROFILE), engine_with(0.0, 0.0, 0.0)
    spans = []
    for engine in (plain, vain):
        requests = [request_of(str(at), 100, 20) for at in range(200)]
        for one in requests:
            engine.submit(one, 0.0)
        steps = run(engine)
        spans.append((len(steps), steps[-1].ends_at))
    assert spans[0][0] == spans[1][0]
    assert spans[1][1] > 1.1 * spans[0][1]


def test_more_acceptance_is_never_later():
    """The same requests, one by one."""
    spans = []
    for shares in ((0.0, 0.0), (0.4, 0.2), (0.8, 0.6), (1.0, 1.0)):
        engine = engine_with(*shares)
        requests = [request_of(str(at), 64 * (1 + at % 5), 40 + at) for at in range(20)]
        for one in requests:
            engine.submit(one, 0.0)
        run(engine)
        spans.append([one.last_token_at for one in requests])
    for slower, faster in pairwise(spans):
        assert all(after <= before + 1e-9 for before, after in zip(slower, faster, strict=True))


def test_several_tokens_of_a_pass_are_one_gap():
    """As vLLM counts: the time between two outputs."""
    engine = engine_with(1.0, 1.0)
    one = request_of("a", 100, 10)
    engine.submit(one, 0.0)
    steps = run(engine)
    assert one.token_gap_s == pytest.approx(steps[-1].duration_s)
    assert [len(step.outputs) for step in steps] == [1] * len(steps)


@pytest.mark.parametrize("requests", OFF_MAX)
def test_a_verifying_pass_against_what_was_measured(requests):
    """Within a tenth up to 16 requests, too short with more: a pass takes here the longer of reading
    weights and computing, theirs the sum of both.
    """
    published_ms = pytest.approx(PUBLISHED_MS[requests], rel=OFF_MAX[requests])
    assert pass_ms(requests) == published_ms


def test_blocks_for_drafted_tokens_are_held_and_given_back():
    """A request that may draft into a new block has it; nothing is left behind."""
    engine = engine_with(0.0, 0.0, 0.0)
    engine.submit(request_of("a", 30, 10), 0.0)
    engine.step(0.0)
    engine.step(1.0)
    (one,) = engine.running
    assert (one.known_tokens, one.holding.blocks) == (32, 3)
    engine.check()
    run(engine, 2.0)
    assert engine.pool.blocks_used == 0


def test_a_budget_too_small_for_all_drafts_serves_the_oldest_first():
    """Eight tokens for four requests of four: two whole, the others wait."""
    engine = engine_with(1.0, 1.0, 1.0, max_num_batched_tokens=8, max_num_seqs=4)
    requests = [request_of(str(at), 2, 30) for at in range(4)]
    for one in requests:
        engine.submit(one, 0.0)
    engine.step(0.0)
    engine.step(1.0)
    assert [one.generated_tokens for one in requests] == [5, 5, 1, 1]
    engine.check()
    run(engine, 2.0)
    assert all(one.finished for one in requests)


@settings(max_examples=100, deadline=None)
@given(shape=ENGINES, shapes=SHAPES, shares=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_every_token_is_given_once_whatever_happens(shape, shapes, shares):
    """Preempted or aborted, with a small cache: books agree, answers are as long as they are."""
    told = list(requests_of(shapes))
    speculation = Speculation(acceptance=tuple(sorted(shares, reverse=True)))
    engine = SpeculativeEngine(shape, PROFILE, speculation)
    requests = [
        EngineRequest(
            t.name,
            prompt_tokens=t.prompt,
            output_tokens=t.output,
            chain=t.keys,
            chain_ends=t.ends,
            adapter=t.adapter,
        )
        for _, _, t in told
    ]
    now, given, aborted = 0.0, 0, 0
    for at, number, what in [*events_of(told), (float("inf"), 0, "")]:
        while now < at:
            step = engine.step(now)
            if step is None:
                break
            given += step.work.sequences + step.work.drafts_accepted
            now = step.ends_at
            engine.check()
        if what == "submit":
            engine.submit(requests[number], at)
            now = max(now, at)
        elif what == "abort":
            aborted += engine.abort(requests[number].request_id)
        engine.check()
    assert engine.pool.blocks_used == 0
    assert sum(one.finished for one in requests) == len(requests) - aborted
    assert given == sum(one.generated_tokens for one in requests)


def test_the_gain_of_many_requests_is_the_published_one():
    assert gain() == pytest.approx(PUBLISHED_GAIN, rel=0.1)


def test_a_long_context_accepts_less_as_it_is_told():
    """All of the drafted tokens where it is short, none where it is long."""
    passes = {}
    for prompt_tokens in (100, 9_000):
        told = speculation_of("1000:1/1/1+8000:0/0/0", 0.0)
        engine = SpeculativeEngine(EngineSettings(blocks_total=1_000), PROFILE, told)
        engine.submit(request_of("a", prompt_tokens, 100), 0.0)
        passes[prompt_tokens] = sum(step.work.drafts > 0 for step in run(engine))
    assert passes == {100: 25, 9_000: 98}
