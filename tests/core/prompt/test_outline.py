import json

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec import ValidationError

from epp.core.prompt.outline import (
    _SLICE_BYTES,
    BYTES_PER_PIECE,
    DIGITS_MAX,
    PIECES_MAX,
    PIECES_PER_FRACTION,
    admit,
    is_closing,
    is_opening,
    outside_texts,
)

texts = st.text(alphabet='a,:.5[]{}"\\\n\x7fé語😀', max_size=80)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**6), 10**6).map(lambda number: number / 8)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def admitted(body):
    try:
        admit(body)
    except ValidationError:
        return False
    return True


def without_texts(body):
    """What `outside_texts` is to give, a byte at a time."""
    outside = bytearray()
    text = escaped = False
    for byte in body:
        closing = text and byte == ord('"') and not escaped
        opening = not text and byte == ord('"')
        outside.append(byte if closing or not (text or opening) else 0)
        text = opening or (text and not closing)
        escaped = text and byte == ord("\\") and not escaped
    return bytes(outside)


def pieces(value):
    """How much of a decoded `value` is counted."""
    match value:
        case dict():
            return 1 + len(value) + sum(map(pieces, value.values()))
        case list():
            return 1 + sum(map(pieces, value))
        case str():
            return 1
        case float():
            return PIECES_PER_FRACTION
        case _:
            return 0


@settings(max_examples=300)
@given(values, st.booleans(), st.sampled_from([None, 1]))
@example("\\" * 130 + '"' + "\\" * 63, True, None)
def test_texts_are_told_from_what_is_around_them(value, ascii_only, indent):
    """Whatever is in a text, escaped quotes and runs of backslashes too, it is blanked; the rest stays."""
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert outside_texts(body).tobytes() == without_texts(body)


@given(st.binary(max_size=300) | st.text(alphabet='\\"a', max_size=300).map(str.encode))
def test_any_bytes_have_an_outline(body):
    """What is no JSON is somehow outlined, byte for byte."""
    assert len(outside_texts(body)) == len(body)
    admit(body)


@given(values)
def test_brackets_are_found(value):
    """Both kinds, those that open and those that close."""
    body = json.dumps(value).encode()
    outside = outside_texts(body)
    for found, brackets in ((is_opening(outside), "[{"), (is_closing(outside), "]}")):
        at = np.flatnonzero(found).tolist()
        expected = [n for n, byte in enumerate(without_texts(body)) if chr(byte) in brackets]
        assert at == expected


@settings(max_examples=60, deadline=None)
@given(values, st.booleans())
def test_a_body_is_let_in_exactly_if_it_holds_no_more_pieces_than_the_limit(value, ascii_only):
    """As the decoded value is counted, texts left out, and integers and literals free."""
    one = json.dumps(value, ensure_ascii=ascii_only)
    most = (PIECES_MAX - 1) // max(1, pieces(value))
    # A longer body is allowed more; a short one is not looked at.
    assume(len(one) * most < (BYTES_PER_PIECE - 3) * PIECES_MAX)
    for count in (most, most + 1):
        body = f"[{', '.join([one] * count)}{' ' * PIECES_MAX}]".encode()
        assert admitted(body) == (1 + count * pieces(value) <= PIECES_MAX)


@pytest.mark.parametrize("piece", ["[]", "{}", '""', '"\\""', "1.5", "-2e5", "3E-7"])
def test_each_kind_of_piece_is_counted(piece):
    """One more than the limit is refused, as many as the limit are not."""
    weight = 1 if piece[0] in '[{"' else PIECES_PER_FRACTION
    most = (PIECES_MAX - 1) // weight
    for count, fits in ((most, True), (most + 1, False)):
        body = f"[{','.join([piece] * count)}{' ' * PIECES_MAX}]".encode()
        assert admitted(body) is fits, count


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("piece", ["[]", '""', "1.5"])
def test_pieces_are_counted_wherever_a_slice_of_the_body_ends(piece, shift):
    """A fraction between two slices is counted, and nothing is counted twice."""
    weight = PIECES_PER_FRACTION if piece == "1.5" else 1
    most = (PIECES_MAX - 1) // weight
    blanks = " " * (_SLICE_BYTES - 40 - shift)
    for count, fits in ((most, True), (most + 1, False)):
        assert admitted(f"[{blanks}{','.join([piece] * count)}]".encode()) is fits, count


@pytest.mark.parametrize("cheap", ["1", "123456", "-7", "true", "false", "null", " "])
def test_what_is_cheap_is_not_counted(cheap):
    """A prompt may be a million token ids."""
    admit(f"[{','.join([cheap] * 1_000_000)}]".encode())


def test_a_long_body_may_hold_more():
    """In proportion to its length."""
    count = 2 * PIECES_MAX
    body = f"[{','.join(['{}'] * (count - 1))}]".encode()
    assert not admitted(body)
    assert not admitted(body + b" " * ((count - 1) * BYTES_PER_PIECE - len(body)))
    assert admitted(body + b" " * (count * BYTES_PER_PIECE - len(body)))


def test_texts_may_hold_anything():
    """Code, data and long numbers that somebody asks about are no structure of the body."""
    quoted = json.dumps([{"a": [1.5, 2], "b": "x"}] * 20_000)
    admit(json.dumps({"messages": [{"role": "user", "content": quoted}]}).encode())
    admit(json.dumps({"content": "7" * 1_000_000, "more": "9" * 1_000 + '"'}).encode())


@pytest.mark.parametrize("before", [0, 1, 63, 64, 127, 128, 200])
@pytest.mark.parametrize("fraction", ["", "0."])
def test_long_numbers_are_refused(before, fraction):
    """From one digit more than the limit, wherever the number stands."""
    for digits, fits in ((DIGITS_MAX, True), (DIGITS_MAX + 1, False), (5_000, False)):
        body = f"[{' ' * before}{fraction}{'7' * digits}{' ' * PIECES_MAX}]".encode()
        assert admitted(body) is fits, digits


def test_many_numbers_of_the_longest_kind_are_let_in():
    """The limit is on each of them."""
    admit(("[" + ",".join(["7" * DIGITS_MAX] * 4_000) + "]").encode())


def test_refusals_say_what_was_expected():
    """One sentence each, with the limit."""
    with pytest.raises(ValidationError, match="at most 80,000 objects, arrays, strings and frac"):
        admit(b"[" + b"[]," * PIECES_MAX)
    with pytest.raises(ValidationError, match="numbers of at most 255 digits"):
        admit(b"7" * (PIECES_MAX + 1))
