"""A cheap count of the structure of a JSON body outside its texts, before it is decoded.

The cost of decoding depends on the content of a body, not only on its length. An empty array has
two bytes and takes a fifth of a microsecond; a number of four thousand digits takes as long as a
page of text. Costly elements are therefore counted first, by fast passes over the bytes. A body
with too many of them for its length is not decoded (`TooMuchError`). Integers of usual size,
`true`, `false`, `null` and blanks are cheap and not counted, because a prompt may be a million
token ids.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import ValidationError

PIECES_MAX: Final = 80_000
"""Number of pieces that a body of any length may have. Pieces are objects, arrays, strings
(including member names) and numbers with a fraction or an exponent.
"""
BYTES_PER_PIECE: Final = 48
"""Number of bytes that a body must have for each piece, if it has more than `PIECES_MAX` pieces. A
plain message has five pieces, so nearly 16,000 short messages are always accepted.
"""
PIECES_PER_FRACTION: Final = 4
"""Number of pieces that a JSON number with a point or an exponent adds to the count of a body's
pieces, because it takes as long to decode as these.
"""
DIGITS_MAX: Final = 255
"""Maximum number of consecutive digits outside texts. The time to decode an integer grows with the
square of its digits.
"""

Symbols: TypeAlias = npt.NDArray[np.uint8]
Places: TypeAlias = npt.NDArray[np.bool_]

_QUOTE: Final = np.uint8(ord('"'))
_COMMA: Final = np.uint8(ord(","))
_OPENING: Final = np.uint8(ord("{"))
_FOLDING: Final = np.uint8(0x20)
"""The bit in which "[" differs from "{", "]" from "}", and "E" from "e"; they differ in no other
bit.
"""
_SLICE_BYTES: Final = 262_144
"""Number of bytes of a body that are counted at a time. The results fit into a core's cache, and a
body of some hundred kilobytes needs few calls.
"""
_WINDOW: Final = (DIGITS_MAX + 1) // 2
"""Number of bytes of the windows in which a body is searched for digits only. More than
`DIGITS_MAX` consecutive digits fill at least one window.
"""


class TooMuchError(ValidationError):
    """The error of a body that would take too long to read for its length."""


def admit(body: bytes) -> None:
    """Raise `TooMuchError` if `body` has more elements than may be decoded for its length, or a
    number with too many digits.

    Valid JSON is counted exactly, except that a number with a point and an exponent may count
    twice. So is the valid part of other bodies, because no decoder gets further. A body of at most
    `PIECES_MAX` bytes is not examined.
    """
    if len(body) <= PIECES_MAX:
        return
    pieces_max = max(PIECES_MAX, len(body) // BYTES_PER_PIECE)
    symbols = np.frombuffer(body, np.uint8)
    many = _has_more_pieces(symbols, pieces_max)
    long = _may_have_long_number(symbols)
    if not many and not long:
        return
    # Texts may contain anything, and most bodies that get here are harmless. The second count
    # therefore excludes texts.
    symbols = outside_texts(body)
    if many and _has_more_pieces(symbols, pieces_max):
        raise TooMuchError(
            f"Expected at most {pieces_max:,} objects, arrays, strings and fractions"
        )
    if long and _has_long_number(symbols):
        raise TooMuchError(f"Expected numbers of at most {DIGITS_MAX} digits")


def outside_texts(body: bytes) -> Symbols:
    """Return a copy of the bytes of `body`, valid JSON, in which the bytes of each string except
    its closing quote are 0.
    """
    symbols = np.frombuffer(body, np.uint8)
    quotes = _packed(symbols == ord('"')) & ~_escaped(_packed(symbols == ord("\\")))
    inside = np.unpackbits(_odd_so_far(quotes), count=len(symbols), bitorder="little")
    # 1 minus 1 keeps no bit of a byte, and 0 minus 1 keeps all.
    inside -= 1
    return np.bitwise_and(symbols, inside, out=inside)


# Marks are sets of positions in a body, one bit each. The methods are those of simdjson, which
# finds texts at the speed of memory. Loops over bytes would take ten times as long.


def _packed(places: Places) -> Symbols:
    """Return the Boolean array `places` as bits, one for each of its positions, padded to whole
    words of 64 bits.
    """
    marks = np.zeros(-(-len(places) // 64) * 8, np.uint8)
    marks[: -(-len(places) // 8)] = np.packbits(places, bitorder="little")
    return marks


def _escaped(backslashes: Symbols) -> Symbols:
    """Return, as bits, the positions of escaped bytes: every second backslash of a run, and the
    byte after an odd run.

    A single subtraction over all bits borrows along each run from its start.
    """
    marks = int.from_bytes(backslashes.tobytes(), "little")
    odd = int.from_bytes(b"\xaa" * (len(backslashes) + 1), "little")
    escaped = ((marks << 1 | odd) - marks) ^ odd ^ marks
    return np.frombuffer(escaped.to_bytes(len(backslashes) + 1, "little"), np.uint8)[:-1]


def _odd_so_far(marks: Symbols) -> Symbols:
    """Return, as bits, the positions at which the number of set bits in `marks` so far, this
    position included, is odd.

    Shifts by 1, 2, 4 and so on, combined, turn each bit of a word into the parity of all bits up to
    it.
    """
    words = marks.view(np.uint64)
    for shift in (1, 2, 4, 8, 16, 32):
        words = words ^ (words << np.uint64(shift))
    odd = words >> np.uint64(63)
    before = np.bitwise_xor.accumulate(odd) ^ odd
    inverted: npt.NDArray[np.uint64] = words ^ (np.uint64(0) - before)
    return inverted.view(np.uint8)


def is_opening(symbols: Symbols) -> Places:
    """Return a Boolean for each byte: whether an object or an array begins there. Texts must be
    blanked (`outside_texts`).
    """
    opening: Places = _folded(symbols) == ord("{")
    return opening


def is_closing(symbols: Symbols) -> Places:
    """Return a Boolean for each byte: whether an object or an array ends there. Texts must be
    blanked (`outside_texts`).
    """
    closing: Places = _folded(symbols) == ord("}")
    return closing


def _folded(symbols: Symbols) -> Symbols:
    """Return the bytes in `symbols` with square brackets turned into braces, and letters into lower
    case.
    """
    folded: Symbols = symbols | _FOLDING
    return folded


def _has_more_pieces(symbols: Symbols, pieces_max: int) -> bool:
    """Return whether the JSON text in `symbols` has more than `pieces_max` pieces. If its strings
    are not blanked, their content may count as pieces, so that True may be wrong.
    """
    pieces, innermost = 0, 1
    for start in range(0, len(symbols), _SLICE_BYTES):
        part = symbols[start : start + _SLICE_BYTES]
        unlike = _folded(part)
        unlike ^= _OPENING
        # A byte is now 0 if it begins an object or an array, or is a quote.
        np.minimum(unlike, part ^ _QUOTE, out=unlike)
        pieces += len(part) - int(np.count_nonzero(unlike))
        # A document has at most one more scalar or empty value than commas.
        innermost += _count(part == _COMMA)
    if pieces + PIECES_PER_FRACTION * innermost <= pieces_max:
        return False
    fractions = min(innermost, _count_points(symbols))
    return pieces + PIECES_PER_FRACTION * fractions > pieces_max


def _count_points(symbols: Symbols) -> int:
    """Return the number of points and exponents that follow a digit in the JSON text in `symbols`."""
    points = 0
    for start in range(0, len(symbols), _SLICE_BYTES):
        # The first byte of the next slice may be such a point.
        part = symbols[start : start + _SLICE_BYTES + 1]
        after = _folded(part[1:])
        points += _count(_is_digit(part[:-1]) & ((after == ord(".")) | (after == ord("e"))))
    return points


def _count(places: Places) -> int:
    return int(np.count_nonzero(places))


def _may_have_long_number(symbols: Symbols) -> bool:
    """Return whether any of the windows of `_WINDOW` bytes into which `symbols` is divided consists
    of digits only.
    """
    ends = _is_digit(symbols[_WINDOW - 1 :: _WINDOW])
    if not ends.any():
        return False
    windows = symbols[: len(ends) * _WINDOW].reshape(-1, _WINDOW)[ends]
    return bool(_is_digit(windows).all(axis=1).any())


def _has_long_number(symbols: Symbols) -> bool:
    runs = _is_digit(symbols)
    length = 1
    while length <= DIGITS_MAX:
        # Two runs of a length at that distance form one of twice the length.
        runs = runs[:-length] & runs[length:]
        length *= 2
    return bool(runs.any())


def _is_digit(symbols: Symbols) -> Places:
    # Bytes below "0" wrap round to values above 9.
    return (symbols - np.uint8(ord("0"))) < 10
