import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.moment import PlacedMedia
from epp.core.prompt.token_ids import packed
from epp.shell.engines.tokens import answers
from epp.shell.engines.tokens.answers import (
    MEDIA_MAX,
    BadAnswerError,
    UnidentifiedMediaError,
    check_placed,
    ids_of,
    pieces_of,
    rendered_prompts,
    too_many,
)

IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1)


@given(IDS, st.integers(0, 40), st.sampled_from([None, (",", ":"), (" ,\n ", ": ")]))
def test_pieces_have_together_what_the_whole_has(ids, piece_bytes, separators):
    """However it is spelt and wherever it is cut."""
    encoded = json.dumps({"token_ids": ids}, separators=separators).encode()
    (prompt,) = rendered_prompts(encoded, 1)
    before, answers.PIECE_BYTES = answers.PIECE_BYTES, piece_bytes
    try:
        assert b"".join(map(ids_of, pieces_of(prompt.ids))) == packed(ids)
    finally:
        answers.PIECE_BYTES = before


def test_tokens_go_before():
    """/tokenize calls them so."""
    (prompt,) = rendered_prompts(b'{"tokens":[1],"count":1}', 1)
    assert (prompt.ids, prompt.media) == (b"[1]", ())


def media_of(hashes, places):
    features = {"mm_hashes": hashes, "mm_placeholders": places}
    answer = json.dumps({"token_ids": [1], "features": features}).encode()
    (prompt,) = rendered_prompts(answer, 1)
    return prompt.media


def at(offset, length=1):
    return {"offset": offset, "length": length, "is_embed": None}


def test_media_are_what_and_where_they_are():
    """In the order of the prompt, whatever they are."""
    found = media_of(
        {"image": ["cat", "dog"], "audio": ["bark"]}, {"audio": [at(7)], "image": [at(2, 4), at(9)]}
    )
    assert found == (
        PlacedMedia("cat", 2, 4),
        PlacedMedia("bark", 7, 1),
        PlacedMedia("dog", 9, 1),
    )
    check_placed(found, bytes(4 * 10))
    with pytest.raises(BadAnswerError):
        check_placed(found, bytes(4 * 9))


@pytest.mark.parametrize(
    ("hashes", "places"),
    [
        ({"image": ["cat"]}, None),
        ({"image": ["cat"]}, {"image": []}),
        ({"image": [None]}, {"image": [at(0)]}),
        ({"image": [""]}, {"image": [at(0)]}),
        ({"image": ["x" * 10_000]}, {"image": [at(0)]}),
        (None, {"image": [at(0)]}),
        ({"image": []}, {"image": []}),
        ({"image": ["x"] * (MEDIA_MAX + 1)}, {"image": [at(0)] * (MEDIA_MAX + 1)}),
    ],
)
def test_media_without_identifiers_are_not_told_apart(hashes, places):
    """So the prompt has no ids."""
    with pytest.raises(UnidentifiedMediaError):
        media_of(hashes, places)


@pytest.mark.parametrize(
    ("hashes", "places"),
    [("cat", None), ({"image": [7]}, None), ({}, {"image": [at(-1)]}), ({}, {"image": [at(0, 0)]})],
)
def test_features_that_are_none_are_a_bad_answer(hashes, places):
    with pytest.raises(BadAnswerError):
        media_of(hashes, places)


def test_a_template_may_add_to_a_short_prompt():
    """Not without end."""
    assert not too_many(bytes(4 * 65_536), b"")
    assert too_many(bytes(4 * 65_537), b"")
