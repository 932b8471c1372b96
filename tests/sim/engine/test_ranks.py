"""Ranks behind one address."""

import pytest
from msgspec import structs

from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.ranks import RankedEngine
from tests.sim.engine.test_engine import request_of, run

SETTINGS = EngineSettings(blocks_total=1000)
DENSE = find_profile(DEFAULT_PROFILE)
EXPERTS = structs.replace(DENSE, expert_tokens=(64, 1064), expert_s=(2e-3, 12e-3))


def ranked(count, profile=DENSE, settings=SETTINGS):
    return RankedEngine([Engine(settings, profile) for _ in range(count)])


def driven(engine, submissions):
    """Steps of an engine that gets (instant, request) in order."""
    steps, now = [], 0.0
    for at, request in [*submissions, (float("inf"), None)]:
        while True:
            ends_at = engine.ends_at
            if ends_at is None:
                ends_at = engine.begin(now)
            if ends_at is None or ends_at > at:
                break
            now = ends_at
            steps.append(engine.end())
            assert steps[-1].ends_at == now
            engine.check()
        if request is not None:
            now = at
            engine.submit(request, now)
            if engine.ends_at is None:
                engine.begin(now)
    return steps


def test_a_request_goes_to_the_rank_with_the_least_load():
    """Waiting ones count four times, the first of several ranks is taken."""
    engine = ranked(3)
    for at in range(4):
        engine.submit(request_of(str(at), 100), 0.0)
    assert [len(rank.waiting) for rank in engine.ranks] == [2, 1, 1]
    engine.begin(0.0)
    engine.submit(request_of("4", 100), 0.0)
    assert [len(rank.running) for rank in engine.ranks] == [2, 1, 1]
    assert [len(rank.waiting) for rank in engine.ranks] == [0, 1, 0]


def test_dense_ranks_are_as_fast_as_alone():
    """Two prompts at two ranks: each as a single engine computes it."""
    alone = Engine(SETTINGS, DENSE)
    one = request_of("a", 4_000, 50)
    alone.submit(one, 0.0)
    run(alone)
    pair = [request_of(name, 4_000, 50) for name in "ab"]
    driven(ranked(2), [(0.0, pair[0]), (0.0, pair[1])])
    assert {each.first_token_at for each in pair} == {one.first_token_at}
    assert [each.last_token_at for each in pair] == pytest.approx([one.last_token_at] * 2)


def test_each_rank_has_a_cache_of_its_own():
    """The same prompt twice, the first under way: the other rank has to compute it."""
    engine = ranked(2)
    first, second, third = (
        request_of(name, 800, 400, prefix="p", shared_blocks=40) for name in "abc"
    )
    driven(engine, [(0.0, first), (0.5, second), (30.0, third)])
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert third.cached_tokens == 640


def test_one_rank_in_step_is_the_engine():
    """With a curve of experts and nobody to wait for: the same times."""
    alone, one = Engine(SETTINGS, EXPERTS), ranked(1, EXPERTS)
    requests = [[request_of(str(at), 300 + at, 20) for at in range(5)] for _ in range(2)]
    for engine, some in ((alone, requests[0]), (one, requests[1])):
        for request in some:
            engine.submit(request, 0.0)
    run(alone)
    driven(one, [])
    told = [[(each.first_token_at, each.last_token_at) for each in some] for some in requests]
    for ours, theirs in zip(*told, strict=True):
        assert ours == pytest.approx(theirs)


def test_a_pass_takes_as_long_as_the_slowest_rank_and_the_experts_of_all():
    """A prompt alone, beside a token for nobody; then its next token waits for another's prompt."""
    alone = Engine(SETTINGS, EXPERTS)
    alone.submit(request_of("c", 1_000, 1), 0.0)
    alone_s = run(alone)[0].duration_s
    engine = ranked(2, EXPERTS)
    long, short = request_of("a", 1_000, 2), request_of("b", 500, 2)
    first, second, third = driven(engine, [(0.0, long), (0.0, short)])
    assert [step.work.tokens for step in (first, second, third)] == [1_000, 501, 1]
    # Each token takes the experts 10 µs.
    assert long.first_token_at == pytest.approx(alone_s + 1e-5)
    assert long.last_token_at == short.first_token_at
    beside = Engine(SETTINGS, EXPERTS)
    beside.submit(request_of("d", 500, 1), 0.0)
    assert second.duration_s == pytest.approx(run(beside)[0].duration_s + 1e-5)


def test_tokens_are_given_once():
    """Whatever ranks are in step: every answer is whole, and steps tell of all of it."""
    for profile in (DENSE, EXPERTS):
        engine = ranked(3, profile)
        requests = [request_of(str(at), 50 + 37 * at, 1 + at % 40) for at in range(30)]
        steps = driven(engine, [(at / 20, one) for at, one in enumerate(requests)])
        assert all(one.finished for one in requests)
        given = sum(step.work.sequences + step.work.decodes * (step.passes - 1) for step in steps)
        assert given == sum(one.output_tokens for one in requests)
        assert not engine.running
        assert not engine.waiting
        assert engine.kv_cache_usage() == 0


def test_who_leaves_leaves_its_rank():
    """At once while it waits, at the end of the step while it runs."""
    engine = ranked(2, DENSE)
    pair = [request_of(name, 4_000, 50) for name in "ab"]
    for one in pair:
        engine.submit(one, 0.0)
    engine.begin(0.0)
    engine.cut(0.0)
    assert engine.abort("b")
    assert engine.leaving == {"b"}
    assert not engine.abort("c")
    engine.end()
    engine.end()
    assert engine.running == (pair[0],)
    assert not engine.leaving


def test_a_page_tells_of_all_ranks():
    """Counts are sums, the usage the mean."""
    engine = ranked(2)
    engine.submit(request_of("a", 1_600, 50), 0.0)
    engine.begin(0.0)
    told = engine.snapshot()
    assert (told.running, told.waiting) == (1, 0)
    assert told.kv_cache_usage == engine.ranks[0].kv_cache_usage() / 2 > 0
