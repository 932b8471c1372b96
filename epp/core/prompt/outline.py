"""What a JSON body has outside of its texts, counted before anything of it is decoded.

Decoding costs what a body holds, not how long it is: an empty array is two bytes and a fifth of a
microsecond, a number of four thousand digits takes as long as a page of text. So what is dear is
counted first, by passes over the bytes that run at the speed of memory, and a body that holds more
of it than its length excuses is refused. Integers of usual size, `true`, `false`, `null` and blanks
are cheap and are not counted: a prompt may be a million token ids.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import ValidationError

PIECES_MAX: Final = 80_000
"""Objects, arrays, strings (names of members too) and fractions that any body may hold."""
BYTES_PER_PIECE: Final = 48
"""A longer body may hold one for so many of its bytes. A plain message is five pieces: 16,000 of them
are let in however short they are."""
PIECES_PER_FRACTION: Final = 4
"""What a number with a point or an exponent counts, because it takes as long."""
DIGITS_MAX: Final = 255
"""Digits in a row of a number. What an integer costs grows with the square of them."""

Symbols: TypeAlias = npt.NDArray[np.uint8]
Places: TypeAlias = npt.NDArray[np.bool_]

_FOLDING: Final = np.uint8(0x20)
"""The bit that is all that tells "[" from "{", "]" from "}" and "E" from "e"."""
_SLICE_BYTES: Final = 262_144
"""Bytes of a body that one call counts. The results of that many fit into the cache of a core, and a
body of some hundred kilobytes takes few calls."""
_WINDOW: Final = (DIGITS_MAX + 1) // 2
"""More than `DIGITS_MAX` digits in a row fill at least one aligned window of this size."""


class TooMuchError(ValidationError):
    """Reading a body would take more time than its length excuses."""


def admit(body: bytes) -> None:
    """Raise `TooMuchError` if `body` holds more than can be decoded in the time of its length.

    What is valid JSON is counted as such, and so is the valid part of what is not: no decoder gets
    further. A body of no more bytes than `PIECES_MAX` is not looked at.
    """
    if len(body) <= PIECES_MAX:
        return
    pieces_max = max(PIECES_MAX, len(body) // BYTES_PER_PIECE)
    symbols = np.frombuffer(body, np.uint8)
    many = _has_more_pieces(symbols, pieces_max)
    long = _may_have_long_number(symbols)
    if not many and not long:
        return
    # Texts may hold anything, and most that comes here is innocent: now look without them.
    symbols = outside_texts(body)
    if many and _has_more_pieces(symbols, pieces_max):
        raise TooMuchError(
            f"Expected at most {pieces_max:,} objects, arrays, strings and fractions"
        )
    if long and _has_long_number(symbols):
        raise TooMuchError(f"Expected numbers of at most {DIGITS_MAX} digits")


def outside_texts(body: bytes) -> Symbols:
    """The bytes of valid JSON, those of each string replaced by 0 except its closing quote."""
    symbols = np.frombuffer(body, np.uint8)
    quotes = _packed(symbols == ord('"')) & ~_escaped(_packed(symbols == ord("\\")))
    inside = np.unpackbits(_odd_so_far(quotes), count=len(symbols), bitorder="little")
    # 1 less 1 keeps nothing of a byte, 0 less 1 all of it.
    inside -= 1
    return np.bitwise_and(symbols, inside, out=inside)


# Marks are sets of places in a body, a bit a place: the tricks are those of simdjson, which finds
# texts so at the speed of memory. As loops over bytes they would take ten times as long.


def _packed(places: Places) -> Symbols:
    """The marks of `places`, filled up to whole words of 64."""
    marks = np.zeros(-(-len(places) // 64) * 8, np.uint8)
    marks[: -(-len(places) // 8)] = np.packbits(places, bitorder="little")
    return marks


def _escaped(backslashes: Symbols) -> Symbols:
    """The marks of what a backslash escapes: in a run of them every second, and what comes after
    an odd number.

    One subtraction over all marks at once borrows along each run from where it begins.
    """
    marks = int.from_bytes(backslashes.tobytes(), "little")
    odd = int.from_bytes(b"\xaa" * (len(backslashes) + 1), "little")
    escaped = ((marks << 1 | odd) - marks) ^ odd ^ marks
    return np.frombuffer(escaped.to_bytes(len(backslashes) + 1, "little"), np.uint8)[:-1]


def _odd_so_far(marks: Symbols) -> Symbols:
    """The marks of the places up to and with which the number of `marks` is odd.

    Shifted by 1, 2, 4 ... and combined, each bit of a word becomes the parity of all up to it.
    """
    words = marks.view(np.uint64)
    for shift in (1, 2, 4, 8, 16, 32):
        words = words ^ (words << np.uint64(shift))
    odd = words >> np.uint64(63)
    before = np.bitwise_xor.accumulate(odd) ^ odd
    inverted: npt.NDArray[np.uint64] = words ^ (np.uint64(0) - before)
    return inverted.view(np.uint8)


def is_opening(symbols: Symbols) -> Places:
    """Where an object or an array begins."""
    opening: Places = _folded(symbols) == ord("{")
    return opening


def is_closing(symbols: Symbols) -> Places:
    """Where an object or an array ends."""
    closing: Places = _folded(symbols) == ord("}")
    return closing


def _folded(symbols: Symbols) -> Symbols:
    """Brackets as braces, and letters in lower case."""
    folded: Symbols = symbols | _FOLDING
    return folded


def _has_more_pieces(symbols: Symbols, pieces_max: int) -> bool:
    """Whether there are more than `pieces_max`; if texts are there too, whether there may be."""
    pieces, innermost = 0, 1
    for start in range(0, len(symbols), _SLICE_BYTES):
        part = symbols[start : start + _SLICE_BYTES]
        pieces += _count(is_opening(part)) + _count(part == ord('"'))
        # Of values that hold no others a document has one more than commas.
        innermost += _count(part == ord(","))
    if pieces + PIECES_PER_FRACTION * innermost <= pieces_max:
        return False
    fractions = min(innermost, _count_points(symbols))
    return pieces + PIECES_PER_FRACTION * fractions > pieces_max


def _count_points(symbols: Symbols) -> int:
    """Count the points and exponents that follow a digit."""
    points = 0
    for start in range(0, len(symbols), _SLICE_BYTES):
        # One byte of the next slice may be such a point.
        part = symbols[start : start + _SLICE_BYTES + 1]
        after = _folded(part[1:])
        points += _count(_is_digit(part[:-1]) & ((after == ord(".")) | (after == ord("e"))))
    return points


def _count(places: Places) -> int:
    return int(np.count_nonzero(places))


def _may_have_long_number(symbols: Symbols) -> bool:
    """Whether some aligned window is all digits."""
    ends = _is_digit(symbols[_WINDOW - 1 :: _WINDOW])
    if not ends.any():
        return False
    windows = symbols[: len(ends) * _WINDOW].reshape(-1, _WINDOW)[ends]
    return bool(_is_digit(windows).all(axis=1).any())


def _has_long_number(symbols: Symbols) -> bool:
    runs = _is_digit(symbols)
    length = 1
    while length <= DIGITS_MAX:
        # Two runs of some length that far apart are one of twice the length.
        runs = runs[:-length] & runs[length:]
        length *= 2
    return bool(runs.any())


def _is_digit(symbols: Symbols) -> Places:
    # What is below "0" wraps round to above 9.
    return (symbols - np.uint8(ord("0"))) < 10
