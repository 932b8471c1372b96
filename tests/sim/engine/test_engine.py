"""The engine, told `now`: what it admits, preempts, loads and how long it says that takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest

PROFILE = find_profile(DEFAULT_PROFILE)
SIZE = 16


def engine_with(**changes):
    return Engine(EngineSettings(**{"blocks_total": 1000, **changes}), PROFILE)


def request_of(name, prompt_tokens, output_tokens=1, *, prefix="", shared_blocks=0, adapter=""):
    blocks = (prompt_tokens + output_tokens) // SIZE
    names = [(prefix if index < shared_blocks else name, index, adapter) for index in range(blocks)]
    chain = [int.from_bytes(repr(part).encode(), "little") for part in names]
    return EngineRequest(
        name,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chain=chain,
        adapter=adapter,
    )


def run(engine, now=0.0):
    steps = []
    while (step := engine.step(now)) is not None:
        steps.append(step)
        now = step.ends_at
    return steps


def test_an_idle_engine_has_no_step():
    """Nothing submitted, nothing done."""
    assert engine_with().step(0.0) is None


@pytest.mark.parametrize(
    ("prompt_tokens", "expected_ms"), [(1024, 22.1), (2048, 43.5), (4096, 90.1), (8192, 200.0)]
)
def test_one_prefill_takes_what_kernel_tables_say(prompt_tokens, expected_ms):
    """Single-request TTFT of the 8B on one H100 is within 10 % of operator-level runs."""
    engine = engine_with()
    engine.submit(request_of("a", prompt_tokens), 0.0)
    assert run(engine)[0].duration_s * 1000 == pytest.approx(expected_ms, rel=0.10)


def test_a_cached_prefix_is_not_computed_again():
    """The second request with the same prefix computes only what follows it."""
    engine = engine_with()
    engine.submit(request_of("a", 800, prefix="p", shared_blocks=40), 0.0)
    run(engine)
    second = request_of("b", 800, prefix="p", shared_blocks=40)
    engine.submit(second, 1.0)
    [step] = run(engine, 1.0)
    assert second.cached_tokens == 640
    assert step.work.tokens == 160


def test_a_whole_cached_prompt_computes_its_last_block():
    """The last token must run, so the hit stops a block short."""
    engine = engine_with()
    engine.submit(request_of("a", 64), 0.0)
    run(engine)
    again = request_of("a", 64)
    engine.submit(again, 1.0)
    run(engine, 1.0)
    assert again.cached_tokens == 48


def test_blocks_hit_as_soon_as_they_are_scheduled():
    """Two identical prompts in one step: the second finds the blocks of the first."""
    engine = engine_with()
    requests = [request_of("a", 160), request_of("a", 160)]
    for request in requests:
        engine.submit(request, 0.0)
    run(engine)
    assert [request.cached_tokens for request in requests] == [0, 144]


def test_generated_tokens_are_cached_for_the_next_turn():
    """A follow-up that contains prompt and answer hits both."""
    engine = engine_with()
    first = request_of("a", 160, 65)
    engine.submit(first, 0.0)
    run(engine)
    second = request_of("b", 320, prefix="a", shared_blocks=14)
    engine.submit(second, 1.0)
    run(engine, 1.0)
    assert second.cached_tokens == 224


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    """No step computes more than the token budget; decodes go first."""
    engine = engine_with(max_num_batched_tokens=256, max_num_seqs=256)
    engine.submit(request_of("a", 100, 4), 0.0)
    engine.submit(request_of("b", 600), 0.0)
    steps = run(engine)
    assert [step.work.tokens for step in steps] == [256, 256, 190, 1]
    assert [len(step.outputs) for step in steps] == [1, 1, 2, 1]


def test_no_more_sequences_run_than_allowed():
    """The third of three waits when two may run."""
    engine = engine_with(max_num_seqs=2)
    for name in "abc":
        engine.submit(request_of(name, 32, 2), 0.0)
    engine.step(0.0)
    after = engine.snapshot()
    assert (after.running, after.waiting, after.deferred) == (2, 1, 0)


def test_a_prompt_is_admitted_whole_or_not_at_all():
    """A prompt that fits the budget but not the free blocks waits."""
    engine = engine_with(blocks_total=31, max_num_batched_tokens=64, max_num_seqs=64)
    engine.submit(request_of("a", 320, 5), 0.0)
    engine.submit(request_of("b", 320, 5), 0.0)
    engine.step(0.0)
    assert engine.snapshot().waiting == 1
    run(engine)


def test_the_youngest_is_preempted_and_computed_anew():
    """When decodes outgrow the cache the last admitted gives way; both finish in the end."""
    engine = engine_with(blocks_total=24)
    requests = [request_of("a", 160, 100), request_of("b", 160, 100)]
    for request in requests:
        engine.submit(request, 0.0)
    run(engine)
    assert engine.preemptions >= 1
    assert requests[0].preemptions == 0
    assert requests[1].preemptions == engine.preemptions == engine.snapshot().preemptions
    assert engine.first_tokens == len(requests), "whoever was computed anew had it before"
    assert (engine.answers, engine.answer_tokens) == (2, 200)
    assert all(request.finished for request in requests)
    assert requests[1].cached_tokens == 0


def test_an_adapter_without_a_slot_is_passed_over():
    """With one slot, the second adapter is deferred and the base model behind it is not."""
    engine = engine_with(max_loras=1)
    engine.submit(request_of("a", 32, 3, adapter="x"), 0.0)
    engine.submit(request_of("b", 32, 3, adapter="y"), 0.0)
    engine.submit(request_of("c", 32, 3), 0.0)
    engine.step(0.0)
    after = engine.snapshot()
    assert (after.running, after.waiting, after.deferred) == (2, 1, 1)
    assert after.adapters == ("x", "y")
    run(engine)


def test_an_adapter_is_loaded_once_while_it_keeps_its_slot():
    """The load time is paid at the first use and again after eviction."""
    engine = engine_with(max_loras=1)
    loads = []
    for name, adapter in [("a", "x"), ("b", "x"), ("c", "y"), ("d", "x")]:
        engine.submit(request_of(name, 32, adapter=adapter), 0.0)
        [step] = run(engine)
        loads.append(step.work.adapters_loaded)
        assert (step.duration_s > PROFILE.adapter_load_s) is bool(loads[-1])
    assert loads == [1, 0, 1, 1]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_aborted_request_leaves_nothing_behind(steps_before):
    """Waiting or running, an aborted request gives its blocks back."""
    engine = engine_with()
    engine.submit(request_of("a", 320, 50), 0.0)
    for _ in range(steps_before):
        engine.step(0.0)
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.step(0.0) is None
    assert engine.pool.blocks_used == 0


def test_what_can_never_fit_is_refused():
    """A request larger than the cache is refused when it is submitted, not stuck for ever."""
    engine = engine_with(blocks_total=3)
    with pytest.raises(ValueError, match="needs 33 tokens of KV cache, the engine has 32"):
        engine.submit(request_of("a", 32, 1), 0.0)


def test_shared_context_is_cheaper_to_read_than_copies():
    """Decoding over one shared prefix takes less time than over as many copies of it."""

    def decode_s(shared_blocks):
        engine = engine_with(blocks_total=10_000)
        for index in range(20):
            name = str(index)
            shape = {"prefix": "p", "shared_blocks": shared_blocks}
            engine.submit(request_of(name, 3200, 20, **shape), 0.0)
        return max(
            step.duration_s
            for step in run(engine)
            if step.work.decodes == 20 and not step.work.prefills
        )

    assert decode_s(190) < decode_s(0)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 200), st.integers(1, 60), st.integers(0, 8), st.sampled_from(["", "x", "y"])
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(REQUESTS, st.integers(18, 60), st.integers(16, 300), st.integers(1, 6), st.integers(1, 2))
def test_every_request_ends_and_every_block_comes_back(shapes, blocks, budget, seqs, loras):
    """Whatever the sizes: no request is lost, time only moves on, the pool ends empty."""
    engine = engine_with(
        blocks_total=blocks, max_num_batched_tokens=budget, max_num_seqs=seqs, max_loras=loras
    )
    requests = [
        request_of(str(index), prompt, output, prefix="p", shared_blocks=shared, adapter=adapter)
        for index, (prompt, output, shared, adapter) in enumerate(shapes)
    ]
    for request in requests:
        engine.submit(request, 0.0)
    tokens = 0
    now = 0.0
    while (step := engine.step(now)) is not None:
        assert 0 < step.work.tokens <= budget
        after = engine.snapshot()
        assert after.running <= seqs
        assert 0 <= after.kv_cache_usage <= 1
        assert step.ends_at > now
        now = step.ends_at
        tokens += len(step.outputs)
    assert tokens == sum(output for _, output, _, _ in shapes)
    assert all(request.finished and request.last_token_at <= now for request in requests)
    assert engine.pool.blocks_used == 0


def test_an_engine_without_a_block_of_its_own_is_refused():
    """One block is reserved, so that it takes two."""
    with pytest.raises(ValueError, match="blocks_total is 1; expected at least 2"):
        engine_with(blocks_total=1)


def test_a_whole_prompt_waits_for_a_pass_with_room():
    """Of a budget of 1,000 tokens 600 are taken: the next 600 are computed in the pass after, whole."""
    for chunked, told in ((True, [(2, 1_000), (1, 201)]), (False, [(1, 600), (1, 601)])):
        engine = engine_with(max_num_batched_tokens=1_000, max_num_seqs=8, chunked_prefill=chunked)
        for name in "ab":
            engine.submit(request_of(name, 600, 2), 0.0)
        steps = run(engine)
        assert [(step.work.prefills, step.work.tokens) for step in steps[:2]] == told


def test_a_prompt_longer_than_a_pass_is_refused_where_prompts_are_whole():
    """Its answer counts too: preempted, it is part of the prompt."""
    engine = engine_with(max_num_batched_tokens=1_000, max_num_seqs=8, chunked_prefill=False)
    engine.submit(request_of("a", 900, 100), 0.0)
    with pytest.raises(
        ValueError, match="1001 tokens, the engine computes prompts in one pass of at most 1000"
    ):
        engine.submit(request_of("b", 900, 101), 0.0)
