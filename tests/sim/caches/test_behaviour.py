"""What holds for every way to keep prompts, in an engine that runs many requests at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.caches.names import BEHAVIOURS
from sim.engine.engine import Engine, EngineSettings
from tests.sim.caches.made import PROFILE, opened, request

SMALL = EngineSettings(blocks_total=129, max_num_seqs=64, max_num_batched_tokens=256)

MESSAGES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 150)), min_size=1, max_size=4)
REQUESTS = st.lists(
    st.tuples(MESSAGES, st.integers(1, 40), st.floats(0.0, 0.1), st.booleans()),
    min_size=1,
    max_size=12,
)


def engine_with(name):
    return Engine(SMALL, PROFILE, opened(name, settings=SMALL))


def in_common(one, other):
    """Tokens that a prompt has in common with another and its answer, told by every token."""
    shared = 0
    for (key, end), (other_key, other_end) in zip(told(one), told(other), strict=False):
        if key != other_key:
            break
        shared = min(end, other_end)
        if end != other_end:
            break
    return min(shared, one.prompt_tokens)


def told(one):
    return list(zip(one.parts.keys, one.parts.ends, strict=True))


@pytest.mark.parametrize("name", BEHAVIOURS)
@given(REQUESTS)
@settings(max_examples=40, deadline=None)
def test_nothing_is_found_that_was_never_computed(name, drawn):
    """All are answered, whoever leaves in between; what is found was in a prompt before; the books of
    the engine agree after every step.
    """
    engine = engine_with(name)
    waiting = [
        (request(*messages, output=output, index=at), gap_s, leaves)
        for at, (messages, output, gap_s, leaves) in enumerate(drawn)
    ]
    come, now = [], 0.0
    while waiting or engine.running or engine.waiting:
        if waiting:
            one, gap_s, leaves = waiting.pop(0)
            come.append((one, leaves))
            engine.submit(one, now)
            now += gap_s
            if len(come) > 1 and come[-2][1]:
                engine.abort(come[-2][0].request_id)
        step = engine.step(now)
        engine.check()
        if step is not None:
            now = step.ends_at
    for at, (one, leaves) in enumerate(come):
        assert one.finished or leaves
        assert one.cached_tokens < one.prompt_tokens
        before = [in_common(one, earlier) for earlier, _ in come if earlier is not one]
        assert one.cached_tokens <= max(before, default=0), at


@pytest.mark.parametrize("name", BEHAVIOURS)
@given(REQUESTS)
@settings(max_examples=25, deadline=None)
def test_steps_of_many_passes_are_the_same(name, drawn):
    """`begin` and `end` find and compute what `step` does, at the same times."""
    ends = []
    for in_one in (False, True):
        engine, now = engine_with(name), 0.0
        come = [
            request(*messages, output=output, index=at)
            for at, (messages, output, _, _) in enumerate(drawn)
        ]
        for one in come:
            engine.submit(one, now)
            while engine.running or engine.waiting:
                if in_one:
                    engine.begin(now)
                    step = engine.end()
                else:
                    step = engine.step(now)
                now = step.ends_at
                if len(engine.running) + len(engine.waiting) < 2:
                    break
        while engine.running or engine.waiting:
            if in_one:
                engine.begin(now)
                step = engine.end()
            else:
                step = engine.step(now)
            now = step.ends_at
        ends.append([(one.cached_tokens, one.first_token_at, one.last_token_at) for one in come])
    for plain, many in zip(*ends, strict=True):
        assert many == pytest.approx(plain)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_conversation_is_found_by_all_but_the_plain_reading(name):
    """The third turn of one user; only how much differs."""
    engine, now = engine_with(name), 0.0
    turns = [[(1, 400), (2, 40)], [(1, 400), (2, 40), (3, 16), (4, 40)]]
    turns.append([*turns[1], (5, 16), (6, 40)])
    cached = []
    for at, messages in enumerate(turns):
        one = request(*messages, output=16, answer=(3, 5, 7)[at], index=at)
        engine.submit(one, now)
        while (step := engine.step(now)) is not None:
            now = step.ends_at
        cached.append(one.cached_tokens)
    assert (
        cached
        == {
            "ruvllm-faithful": [0, 440, 496],
            "ruvllm-fixed": [0, 440, 496],
            "kronk-spc": [0, 400, 400],
            "kronk-imc-v1": [0, 400, 456],
            "kronk-imc-v2": [0, 440, 496],
            "mlx-memory": [0, 456, 512],
            "mlx-disk": [0, 456, 512],
            "lmcache-cpu": [0, 448, 496],
            "offload": [0, 448, 496],
        }[name]
    )
