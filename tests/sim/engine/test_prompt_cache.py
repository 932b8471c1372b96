"""An engine with a cache of prompts: what it asks, when, and what it takes."""

import pytest

from sim.caches.behaviour import UnhashedPool
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.prompt_cache import Found
from sim.engine.request import EngineRequest, PromptParts

PROFILE = find_profile(DEFAULT_PROFILE)


class Told:
    """Finds what it is told to find, and writes down what it is asked."""

    def __init__(self, found, save_s=0.0):
        self.found = found
        self.save_s = save_s
        self.calls = []

    def pool(self, blocks_total):
        return UnhashedPool(blocks_total)

    def fetch(self, request, held_tokens, now):
        self.calls.append(("fetch", request.request_id))
        return self.found

    def computed(self, request, now):
        self.calls.append(("computed", request.request_id))
        return self.save_s

    def left(self, request, now):
        self.calls.append(("left", request.request_id, request.finished))
        return 0.0


def engine_with(cache, **changes):
    return Engine(EngineSettings(**{"blocks_total": 1000, **changes}), PROFILE, cache)


def request_of(name, prompt_tokens, output_tokens=1):
    return EngineRequest(
        name,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chain=[hash(name)],
        chain_ends=[(prompt_tokens + output_tokens) // 16],
        parts=PromptParts([1, 2], [prompt_tokens, prompt_tokens + output_tokens]),
    )


def run(engine, now=0.0):
    steps = []
    while (step := engine.step(now)) is not None:
        engine.check()
        steps.append(step)
        now = step.ends_at
    return steps


def test_what_is_found_is_not_computed_and_restoring_takes_its_time():
    """Tokens count from the beginning, in no blocks; the step is longer by the restoring."""
    durations = []
    for restore_s in (0.0, 0.25):
        engine = engine_with(Told(Found(701, restore_s)))
        one = request_of("a", 1_000)
        engine.submit(one, 0.0)
        [step] = run(engine)
        assert (one.cached_tokens, step.work.tokens) == (701, 299)
        durations.append(step.duration_s)
    assert durations[1] - durations[0] == pytest.approx(0.25)


def test_the_last_token_is_always_computed():
    """A cache may have the whole prompt: there is no first token without a pass."""
    engine = engine_with(Told(Found(1_000)))
    one = request_of("a", 1_000)
    engine.submit(one, 0.0)
    [step] = run(engine)
    assert (one.cached_tokens, step.work.tokens) == (999, 1)


def test_saving_holds_up_the_next_pass_and_only_that():
    """The first answer goes on decoding after the time that its prompt takes to be saved."""
    ends = []
    for save_s in (0.0, 0.5):
        engine = engine_with(Told(Found(), save_s))
        one = request_of("a", 1_000, 5)
        engine.submit(one, 0.0)
        steps = run(engine)
        ends.append([step.ends_at for step in steps])
    assert ends[1][0] == pytest.approx(ends[0][0])
    late_s = [slow - usual for usual, slow in zip(*ends, strict=True)][1:]
    assert late_s == pytest.approx([0.5] * 4)


def test_what_is_saved_while_nobody_asks_holds_up_nobody():
    """A request that comes later finds an engine that has finished saving."""
    durations = []
    for later_s in (0.1, 10.0):
        engine = engine_with(Told(Found(), 0.5))
        engine.submit(request_of("a", 1_000), 0.0)
        [step] = run(engine)
        now = step.ends_at + later_s
        engine.submit(request_of("b", 1_000), now)
        [step] = run(engine, now)
        durations.append(step.duration_s)
    assert durations[0] - durations[1] == pytest.approx(0.4)


def test_a_cache_that_is_busy_lets_requests_wait_in_order():
    """Who is refused heads the queue; he is asked for again when somebody has left."""
    cache = Told(Found())
    engine = engine_with(cache)
    engine.submit(request_of("a", 100, 3), 0.0)
    first = engine.step(0.0)
    cache.found = None
    engine.submit(request_of("b", 100), first.ends_at)
    engine.submit(request_of("c", 100), first.ends_at)
    second = engine.step(first.ends_at)
    assert [one.request_id for one in engine.waiting] == ["b", "c"]
    cache.found = Found()
    run(engine, second.ends_at)
    admitted = [call[1] for call in cache.calls if call[0] == "computed"]
    assert admitted == ["a", "b", "c"]


def test_every_request_is_told_of_to_its_end():
    """Finished, aborted or preempted: each `fetch` that found room has one `left`."""
    cache = Told(Found())
    engine = engine_with(cache, blocks_total=24)
    for name in "ab":
        engine.submit(request_of(name, 160, 100), 0.0)
    step = engine.step(0.0)
    engine.submit(request_of("c", 8, 100), step.ends_at)
    engine.step(step.ends_at)
    engine.abort("c")
    run(engine, 1.0)
    assert engine.preemptions
    kinds = [call[0] for call in cache.calls]
    assert kinds.count("fetch") == kinds.count("left") == kinds.count("computed")
    assert ("left", "a", True) in cache.calls
    assert ("left", "c", False) in cache.calls
