"""Block ids to hashes and to bytes: both share in the same places, and nowhere else."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import BYTES_PER_TOKEN
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest
from sim.traces.arrival import Arrival
from sim.traces.prompts import (
    body_of,
    engine_chain,
    prompt_text,
    request_of,
    request_through_bytes,
)
from sim.traces.standard import STANDARD
from sim.traces.workloads import arrivals as workload_arrivals


def arrival(index=0, **fields):
    defaults = {"time_s": 0.0, "prompt_tokens": 1, "output_tokens": 1}
    return Arrival(index=index, **(defaults | fields))


def common(left, right):
    """How many items two sequences begin with in common."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))


def picker_blocks(request, block_tokens=64):
    [chain] = request.chains_of(block_tokens * BYTES_PER_TOKEN, 1_000_000)
    return [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]


def tokens_of(one, *, answer):
    """Every token told apart by what it must differ in: the model that the hashes are held to."""
    tokens = [(block, place) for block, size in one.spans() for place in range(size)]
    own = one.prompt_tokens - len(tokens)
    tokens += [("own", one.index, place) for place in range(own)]
    if answer:
        name = ("answer", one.index) if one.answer is None else one.answer
        tokens += [(name, place) for place in range(one.output_tokens)]
    return tokens


@pytest.mark.parametrize("block_tokens", [4, 16, 64, 128, 192])
def test_bytes_and_hashes_match_the_same_blocks_for_every_pair_of_a_small_trace(block_tokens):
    """All prompts of up to three blocks out of three ids, with a whole or a cut last block."""
    trace = []
    for count in range(4):
        for blocks in product((0, 1, 2**24), repeat=count):
            for rest in {0, 1, block_tokens // 2, block_tokens - 1}:
                tokens = (count - bool(rest)) * block_tokens + rest
                if tokens > 0:
                    one = {"prompt_tokens": tokens, "block_tokens": block_tokens, "blocks": blocks}
                    trace.append(arrival(len(trace), **one))
    fast = [picker_blocks(request_of(one)) for one in trace]
    through = [picker_blocks(request_through_bytes(one)) for one in trace]
    for left, right in combinations(range(len(trace)), 2):
        assert len(fast[left]) == len(through[left])
        assert common(fast[left], fast[right]) == common(through[left], through[right])


lengths = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), min_size=0, max_size=4)


@st.composite
def arrivals(draw, index):
    parts = draw(lengths)
    own = draw(st.integers(0 if parts else 1, 200))
    return arrival(
        index,
        blocks=tuple(block for block, _ in parts),
        lengths=tuple(tokens for _, tokens in parts),
        prompt_tokens=sum(tokens for _, tokens in parts) + own,
        output_tokens=draw(st.integers(1, 100)),
        answer=draw(st.none() | st.integers(0, 3)),
        adapter=draw(st.sampled_from(["", "tuned"])),
    )


@settings(max_examples=150)
@given(left=arrivals(index=7), right=arrivals(index=8), engine_block=st.sampled_from([1, 16, 48]))
def test_hashes_share_exactly_the_full_blocks_of_equal_tokens(left, right, engine_block):
    """The picker's prompt and the engine's prompt and answer, for blocks of any lengths."""
    same_model = left.adapter == right.adapter
    for block_tokens, answer in ((64, False), (engine_block, True)):
        shared = common(tokens_of(left, answer=answer), tokens_of(right, answer=answer))
        expected = shared // block_tokens if same_model else 0
        if answer:
            found = common(engine_chain(left, block_tokens), engine_chain(right, block_tokens))
        else:
            found = common(picker_blocks(request_of(left)), picker_blocks(request_of(right)))
            through = [picker_blocks(request_through_bytes(one)) for one in (left, right)]
            assert common(*through) == expected
        assert found == expected


def test_every_full_block_has_a_hash_of_its_own():
    """Also inside of one trace block, and with the answer for an engine."""
    one = arrival(prompt_tokens=1000, output_tokens=50, blocks=(5, 5), block_tokens=512)
    assert len(picker_blocks(request_of(one))) == len(set(picker_blocks(request_of(one)))) == 15
    assert len(engine_chain(one, 16)) == len(set(engine_chain(one, 16))) == 65


def test_a_later_turn_matches_the_answer_that_the_trace_says_it_contains():
    """Block 2 is the answer of the first turn and a part of the second prompt."""
    first = arrival(0, prompt_tokens=160, output_tokens=80, blocks=(1,), lengths=(160,), answer=2)
    second = arrival(1, prompt_tokens=300, output_tokens=9, blocks=(1, 2, 3), lengths=(160, 80, 60))
    assert common(engine_chain(first, 16), engine_chain(second, 16)) == 240 // 16


@pytest.mark.parametrize("name", ["multi-turn", "agent-tree", "b2b"])
def test_an_engine_caches_what_the_trace_says_it_can(name):
    """With room for all, a prompt hits the longest head of any prompt and answer before it."""
    block, room = 16, 1_000_000
    engine = Engine(EngineSettings(blocks_total=room), find_profile(DEFAULT_PROFILE))
    before = []
    for one in workload_arrivals(STANDARD[name], seed=1, requests_max=40):
        request = EngineRequest(
            str(one.index),
            prompt_tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
            chain=engine_chain(one, block),
        )
        engine.submit(request, 0.0)
        while engine.step(0.0) is not None:
            pass
        prompt = tokens_of(one, answer=False)
        shared = max((common(prompt, known) for known in before), default=0)
        assert request.cached_tokens == min(shared, one.prompt_tokens - 1) // block * block
        # The last token of an answer is never computed, so its block may not be full.
        before.append(tokens_of(one, answer=True)[:-1])


def test_an_answer_without_an_id_is_shared_with_nobody():
    """Two requests with one prompt give different answers."""
    both = [
        arrival(index, prompt_tokens=64, output_tokens=64, blocks=(1,), block_tokens=64)
        for index in range(2)
    ]
    assert common(*(engine_chain(one, 16) for one in both)) == 4


def test_a_salt_a_model_and_an_adapter_each_keep_prompts_apart():
    """And in both ways alike."""
    prompt = {"prompt_tokens": 64, "blocks": (1,), "block_tokens": 64}
    variants = [
        arrival(0, **prompt),
        arrival(1, **prompt, cache_salt="a"),
        arrival(2, **prompt, model="m"),
        arrival(3, **prompt, model="m", adapter="x"),
    ]
    for make in (request_of, request_through_bytes):
        assert len({picker_blocks(make(one))[0] for one in variants}) == len(variants)


def test_both_ways_tell_the_picker_the_same():
    """Model, lengths, salt, session and priority."""
    one = arrival(
        3, prompt_tokens=70, output_tokens=9, output_tokens_max=64, cache_salt="s", session="c",
        priority=-1, adapter="x",
    )  # fmt: skip
    fast, through = request_of(one), request_through_bytes(one)
    for field in (
        "request_id",
        "api",
        "model",
        "prompt_tokens",
        "cache_salt",
        "priority",
        "stream",
        "output_tokens_max",
        "session_id",
    ):
        assert getattr(fast, field) == getattr(through, field), field


def test_a_text_has_four_bytes_a_token():
    """So that the picker's estimate is the trace's number."""
    one = arrival(prompt_tokens=77, blocks=(9,), lengths=(33,))
    assert len(prompt_text(one).encode()) == 77 * BYTES_PER_TOKEN


def test_ids_that_do_not_fit_into_a_block_are_refused():
    """A block of one token has room for 24 bits."""
    one = arrival(4, prompt_tokens=1, blocks=(2**24,), block_tokens=1)
    with pytest.raises(ValueError, match="Request 4 has a block id of 16777216"):
        body_of(one)


def test_text_of_its_own_must_be_told_by_one_token_behind_stretches():
    """Which has room for 22 bits of the request's index."""
    one = arrival(2**22, prompt_tokens=9, blocks=(5,), lengths=(8,))
    with pytest.raises(ValueError, match="Request 4194304 ends in text of its own"):
        body_of(one)


def test_a_raw_body_that_production_refuses_is_a_named_error():
    """The body is not JSON."""
    one = arrival(5, path="/v1/chat/completions", body=b"{")
    with pytest.raises(ValueError, match="Request 5 is refused: The body for chat/completions"):
        request_through_bytes(one)
