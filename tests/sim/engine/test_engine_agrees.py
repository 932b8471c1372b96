"""The engine against the plain one: same hits, preemptions and times, however it is driven."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.engine import Engine, EngineRequest, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from tests.sim.engine.plain_engine import PlainEngine, PlainRequest

SIZE = 4
PROFILE = msgspec.structs.replace(
    find_profile(DEFAULT_PROFILE), shared_context_factor=1.0, skew=0.07, head_s_per_sequence=1e-4
)
"""The plain engine does not count shared tokens."""

PIECES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=2, max_size=6)
"""A prompt and its answer: few texts, so that heads are shared, answers too. (text, blocks)."""
SHAPES = st.lists(
    st.tuples(
        PIECES,
        st.integers(0, SIZE - 1),
        st.floats(0.05, 0.7),
        st.sampled_from(["", "", "x", "y"]),
        st.sampled_from([0.0, 0.0, 0.003, 0.04, 0.3]),
        st.sampled_from([None, None, None, 0.001, 0.05, 0.2]),
    ),
    min_size=3,
    max_size=14,
)
"""(pieces, tokens behind the last block, share of the prompt, adapter, gap to the one before,
time from arrival to abort)."""
ENGINES = st.builds(
    lambda blocks, seqs, budget, loras: EngineSettings(
        blocks_total=blocks,
        block_size_tokens=SIZE,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, budget),
        max_loras=loras,
    ),
    st.integers(38, 60),
    st.integers(1, 10),
    st.integers(8, 150),
    st.integers(1, 2),
)


def requests_of(shapes):
    """(arrival, abort or None, what both engines are told) for each shape."""
    now = 0.0
    for number, (pieces, rest, share, adapter, gap, patience) in enumerate(shapes):
        now += gap
        tokens = max(2, sum(blocks for _, blocks in pieces) * SIZE + rest)
        prompt = min(tokens - 1, max(1, int(tokens * share)))
        keys, ends, hashes, state, end = [], [], [], hash(("", adapter)), 0
        for text, blocks in pieces:
            key = hash((state, text))
            hashes += [hash((key, place)) for place in range(blocks)]
            state = hashes[-1]
            end += blocks
            keys.append(key)
            ends.append(end)
        told = SimpleNamespace(
            name=str(number), prompt=prompt, output=tokens - prompt, adapter=adapter,
            hashes=hashes, keys=keys, ends=ends,
        )  # fmt: skip
        yield now, None if patience is None else now + patience, told


def events_of(told):
    events = []
    for number, (arrival, abort, _) in enumerate(told):
        events.append((arrival, number, "submit"))
        if abort is not None:
            events.append((abort, number, "abort"))
    return sorted(events)


def run_plain(shape, told):
    engine = PlainEngine(shape, PROFILE)
    requests = [PlainRequest(t.name, t.prompt, t.output, t.hashes, t.adapter) for _, _, t in told]
    busy_until = 0.0
    events = [*events_of(told), (float("inf"), 0, "")]
    for at, number, what in events:
        # Every pass that starts before this event.
        while busy_until < at and (ends_at := engine.step(busy_until)) is not None:
            busy_until = ends_at
        if what == "submit":
            engine.waiting.append(requests[number])
            busy_until = max(busy_until, at)
        elif what == "abort":
            engine.abort(requests[number])
    return [
        (r.cached_tokens, r.preemptions, r.generated, r.first_token_at, r.last_token_at)
        for r in requests
    ]


def run_ours(shape, told, *, leaps, pieces):
    engine = Engine(shape, PROFILE)
    requests = [
        EngineRequest(
            t.name,
            prompt_tokens=t.prompt,
            output_tokens=t.output,
            chain=t.keys if pieces else t.hashes,
            chain_ends=t.ends if pieces else None,
            adapter=t.adapter,
        )
        for _, _, t in told
    ]
    busy_until = 0.0
    for at, number, what in [*events_of(told), (float("inf"), 0, "")]:
        while busy_until < at:
            if leaps and (engine.ends_at is not None or engine.begin(busy_until) is not None):
                if engine.ends_at >= at:
                    engine.cut(at)
                    assert engine.pool.blocks_used <= engine.snapshot(at).kv_cache_usage * (
                        engine.pool.blocks_usable + 1e-6
                    )
                busy_until = engine.end().ends_at
            elif not leaps and (step := engine.step(busy_until)) is not None:
                busy_until = step.ends_at
            else:
                break
            engine.check()
        if what == "submit":
            engine.submit(requests[number], at)
            busy_until = max(busy_until, at)
        elif what == "abort":
            engine.abort(requests[number].request_id)
        engine.check()
    assert engine.pool.blocks_used == 0
    return [
        (
            r.cached_tokens if r.scheduled_at is not None else None,
            r.preemptions,
            r.generated_tokens,
            r.first_token_at,
            r.last_token_at,
        )
        for r in requests
    ]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("leaps", [False, True])
@settings(max_examples=150, deadline=None)
@given(shape=ENGINES, shapes=SHAPES)
def test_the_engine_agrees_with_the_plain_one(leaps, pieces, shape, shapes):
    """Step by step or in leaps, by block or by piece: the same hits, preemptions and times."""
    told = list(requests_of(shapes))
    ours = run_ours(shape, told, leaps=leaps, pieces=pieces)
    for got, expected in zip(ours, run_plain(shape, told), strict=True):
        assert got[:3] == expected[:3]
        # None, where there was no token, as a time before all.
        assert [at or -1.0 for at in got[3:]] == pytest.approx(
            [at or -1.0 for at in expected[3:]], rel=1e-9
        )
