import json

from hypothesis import given
from hypothesis import strategies as st

from epp.core.prompt.token_ids import packed
from epp.shell.engines.tokens import answers
from epp.shell.engines.tokens.answers import id_arrays, ids_of, pieces_of, too_many

IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1)


@given(IDS, st.integers(0, 40), st.sampled_from([None, (",", ":"), (" ,\n ", ": ")]))
def test_pieces_have_together_what_the_whole_has(ids, piece_bytes, separators):
    """However it is spelt and wherever it is cut."""
    encoded = json.dumps({"token_ids": ids}, separators=separators).encode()
    (array,) = id_arrays(encoded, 1)
    before, answers.PIECE_BYTES = answers.PIECE_BYTES, piece_bytes
    try:
        assert b"".join(map(ids_of, pieces_of(array))) == packed(ids)
    finally:
        answers.PIECE_BYTES = before


def test_tokens_go_before():
    """/tokenize calls them so."""
    assert id_arrays(b'{"tokens":[1],"count":1}', 1) == [b"[1]"]


def test_a_template_may_add_to_a_short_prompt():
    """Not without end."""
    assert not too_many(bytes(4 * 65_536), b"")
    assert too_many(bytes(4 * 65_537), b"")
