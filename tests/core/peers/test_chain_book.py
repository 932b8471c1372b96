"""Chains that were told, found again by their hashes."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.peers.chain_book import STEP_BYTES, ChainBook
from epp.core.prompt.blocks import hash_blocks

HASH = 8


def chain(*letters: str) -> bytes:
    """A chain whose hashes each stand for all before them, one a letter."""
    text = "".join(letters).encode()
    return hash_blocks(text, seed=1, block_bytes=1, blocks_max=len(text))


def test_what_two_chains_share_is_known_to_the_last_step():
    """16 hashes are a step; a chain that was told is known to its end."""
    book = ChainBook(100_000)
    first = chain("a" * 50)
    assert book.known(first) == 0
    book.note(first)
    assert book.known(first) == len(first)
    assert book.known(chain("a" * 50, "b" * 9)) == 3 * STEP_BYTES
    assert book.known(chain("a" * 40, "b" * 30)) == 2 * STEP_BYTES
    assert book.known(chain("a" * 10, "b" * 30)) == 0
    assert book.head(first[-HASH:]) == first
    assert book.head(first[STEP_BYTES - HASH : STEP_BYTES]) == first[:STEP_BYTES]
    assert book.head(b"unknown!") is None


def test_what_is_not_told_again_is_known_for_two_ages():
    book = ChainBook(100_000)
    first = chain("a" * 20)
    book.note(first)
    book.age()
    assert book.known(first) == len(first)
    book.age()
    assert book.known(first) == 0
    book.note(first)
    book.clear()
    assert len(book) == 0


def test_a_receiver_keeps_what_a_sender_may_refer_to():
    """Its book is twice as large, and what is used stays."""
    sender, receiver = ChainBook(20_000), ChainBook(40_000)
    random = Random(1)
    heads = [chain(f"{number:03}" * 10) for number in range(20)]
    for _ in range(2_000):
        told = random.choice(heads) + random.randbytes(HASH * random.randint(1, 40))
        known = sender.known(told)
        sender.note(told, known)
        if known:
            head = receiver.head(told[known - HASH : known])
            assert head == told[:known]
        receiver.note(told, known)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=60), st.booleans()), max_size=40))
def test_only_what_was_told_is_known_and_a_book_stays_small(told):
    book = ChainBook(3_000)
    noted = []
    for text, ages in told:
        one = chain(text)
        known = book.known(one)
        assert known <= len(one)
        assert not known or any(other.startswith(one[:known]) for other in noted)
        book.note(one, known)
        noted.append(one)
        if ages:
            book.age()
        # Each generation at most its share and one chain of at most four entries.
        assert len(book) <= 2 * (3_000 // 160 + 5)
