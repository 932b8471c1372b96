"""Four bytes a token: sharing survives the way from answer to next prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.pods.tokens import (
    TOKEN_BYTES,
    Answer,
    chain_seed,
    encode_ids,
    encode_text,
    hash_chain,
    render_chat,
)


@given(st.text(max_size=50))
def test_a_text_is_a_token_for_every_four_bytes(text):
    """The number of tokens is the bytes divided by four, rounded up."""
    assert len(encode_text(text)) // TOKEN_BYTES == -(-len(text.encode()) // 4)


@given(st.text(max_size=40), st.text(max_size=40), st.integers(1, 40))
def test_the_next_turn_begins_with_prompt_and_answer(system, question, tokens):
    """A conversation that goes on contains its earlier tokens unchanged."""
    turns = [("system", system), ("user", question)]
    prompt = render_chat(turns)
    answer = Answer(prompt, tokens_max=tokens, ignore_eos=True, seed=1)
    grown = render_chat([*turns, ("assistant", answer.text), ("user", "go on")])
    assert grown.startswith(prompt + answer.text.encode())


def test_an_answer_depends_on_prompt_and_seed_only():
    """Two pods say the same; another prompt or another seed says something else."""
    answers = [
        Answer(prompt, tokens_max=30, ignore_eos=True, seed=seed).text
        for prompt, seed in [(b"abcd", 1), (b"abcd", 1), (b"abce", 1), (b"abcd", 2)]
    ]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


def test_an_answer_stops_by_itself_unless_told_not_to():
    """With `ignore_eos` the limit is reached; without, an answer may end before it."""
    prompts = [index.to_bytes(4, "little") for index in range(50)]
    free = [Answer(prompt, tokens_max=100, ignore_eos=False, seed=1) for prompt in prompts]
    full = [Answer(prompt, tokens_max=100, ignore_eos=True, seed=1) for prompt in prompts]
    assert {answer.tokens for answer in full} == {100}
    assert {answer.stopped for answer in full} == {False}
    assert {answer.stopped for answer in free} == {True, False}
    assert all(len(answer.text) == answer.tokens * TOKEN_BYTES for answer in free)


def test_a_chain_counts_full_blocks_and_keeps_prefixes():
    """Equal heads have equal hashes, the first difference changes all that follow."""
    one = hash_chain(encode_ids(range(50)), block_size_tokens=16)
    two = hash_chain(encode_ids([*range(20), 99, *range(21, 50)]), block_size_tokens=16)
    assert len(one) == len(two) == 3
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])


def test_adapters_and_salts_share_nothing():
    """The first hash depends on the adapter and on the cache salt."""
    seeds = {
        chain_seed(adapter, salt) for adapter, salt in [("", ""), ("a", ""), ("", "a"), ("ab", "c")]
    }
    assert len(seeds) == 4


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_a_token_id_out_of_range_is_refused(token_id):
    """Ids are unsigned 32-bit integers."""
    with pytest.raises(ValueError, match="from 0 to 4294967295"):
        encode_ids([token_id])
