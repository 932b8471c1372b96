"""The engine against the plain one: same hits, preemptions and times, however it is driven."""

import math
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest
from sim.traces.prompts import engine_chain
from tests.sim.engine.plain_engine import PlainEngine, PlainRequest
from tests.sim.made import arrival, arrivals, kind, ran

SIZE = 4
PROFILE = msgspec.structs.replace(
    find_profile(DEFAULT_PROFILE), shared_context_factor=0.5, skew=0.07, head_s_per_sequence=1e-4
)

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
TOKENS_MAX = 36 * SIZE + SIZE
"""Of a request."""
ENGINES = st.builds(
    lambda blocks, seqs, budget, loras, chunked: EngineSettings(
        blocks_total=blocks,
        block_size_tokens=SIZE,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, budget if chunked else TOKENS_MAX + budget // 4),
        max_loras=loras,
        chunked_prefill=chunked,
    ),
    st.integers(38, 60),
    st.integers(1, 10),
    st.integers(8, 150),
    st.integers(1, 2),
    st.booleans(),
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
    for number, (at, abort, _) in enumerate(told):
        events.append((at, number, "submit"))
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


def test_a_pod_that_evicts_hits_block_by_block_what_the_plain_engine_hits():
    """In the cluster, with prompts that share heads and a cache that holds a few of them."""
    pod = kind(blocks_total=400)
    given_all = [
        *arrivals(250, rate=12.0, groups=5, blocks=(2, 24), output=(1, 60)),
        *(
            # Each turn holds what was said before, its answers too.
            arrival(
                1_000 + turn, time_s=1.5 * turn, prompt_tokens=64 * (turn + 1), output_tokens=64,
                blocks=tuple(range(5_000, 5_001 + turn)), block_tokens=64, answer=5_001 + turn,
            )
            for turn in range(12)
        ),
    ]  # fmt: skip
    given_all.sort(key=lambda one: one.time_s)
    requests, one = ran(given_all, pods=(pod,))
    plain = PlainEngine(pod.engine, pod.profile)
    theirs = []
    busy_until = 0.0
    for request in [*sorted(requests, key=lambda request: request.submitted_at), None]:
        at = math.inf if request is None else request.submitted_at
        while busy_until < at and (ends_at := plain.step(busy_until)) is not None:
            busy_until = ends_at
        if request is not None:
            trace = request.arrival
            chain = engine_chain(trace, pod.engine.block_size_tokens)
            alike = PlainRequest("", trace.prompt_tokens, trace.output_tokens, chain, "")
            theirs.append((request, alike))
            plain.waiting.append(alike)
            busy_until = max(busy_until, at)
    held = sum(request.arrival.prompt_tokens for request in requests)
    assert held > 20 * pod.engine.kv_tokens, "the cache is turned over again and again"
    assert one.pods[0].engine.pool.blocks_used == 0
    for request, alike in theirs:
        assert request.engine.cached_tokens == alike.cached_tokens
        assert request.first_token_at == pytest.approx(alike.first_token_at, rel=1e-9)
    assert 0 < sum(alike.cached_tokens for _, alike in theirs) < held
