"""The last records of a stream of them, in memory that is taken once.

What lives for minutes among objects that live for milliseconds keeps whole pages of the allocator
from being given back, and memory that fills slowly looks like a leak. Here all of it is one buffer:
each record stands between two words that say how long it is, so that the oldest can be dropped from
one end and the newest read from the other.
"""

from collections.abc import Callable, Iterator
from typing import Final

_WORD_BYTES: Final = 4
_WORD_SHIFT: Final = 2
GONE: Final = -1
"""The place of what was never kept."""


class RecordRing:
    """Keeps the newest records that fit in `size_bytes`, which all are taken at once.

    Not for more than one thread. Raises `ValueError` for a size that is not a multiple of 4 from 16
    to 2**32 - 4.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes % _WORD_BYTES or not 4 * _WORD_BYTES <= size_bytes < 2**32:
            raise ValueError(
                f"a ring must have a multiple of {_WORD_BYTES} bytes from 16 to 2**32 - 4, "
                f"is asked for {size_bytes}"
            )
        # Repeated and not `bytearray(size_bytes)`, which takes no memory before it is written to.
        self._bytes = memoryview(bytearray(b"\0") * size_bytes)
        self._words = self._bytes.cast("I")
        self._size_bytes = size_bytes
        self._oldest = 0
        """Bytes that were written before the oldest record; so places count."""
        self._end = 0
        self.displaced = 0
        """Records that went because newer ones needed their room."""

    def __len__(self) -> int:
        """How many records are kept; they are counted."""
        return sum(1 for _ in self.newest_first())

    def append(self, record: bytes) -> int:
        """Keep `record` in place of the oldest; its place, for `get`.

        A record that is longer than the ring is not kept: `GONE`.
        """
        size_bytes, words, length = self._size_bytes, self._words, len(record)
        framed_bytes = _framed_bytes(length)
        if framed_bytes > size_bytes:
            return GONE
        place = self._end
        self._end = end = place + framed_bytes
        oldest, keep_from = self._oldest, end - size_bytes
        while oldest < keep_from:
            oldest += _framed_bytes(words[oldest % size_bytes >> _WORD_SHIFT])
            self.displaced += 1
        self._oldest = oldest

        start = place % size_bytes
        words[start >> _WORD_SHIFT] = length
        words[(end - _WORD_BYTES) % size_bytes >> _WORD_SHIFT] = length
        self._write(start, record)
        return place

    def overwrite(self, place: int, head: bytes) -> bool:
        """The record at a place that `append` returned begins with `head` from now on.

        False: it is not there any more. `head` must not be longer than the record.
        """
        if not self._oldest <= place < self._end:
            return False
        start = place % self._size_bytes
        length = self._words[start >> _WORD_SHIFT]
        assert len(head) <= length, f"{len(head)} bytes do not fit in a record of {length}"
        self._write(start, head)
        return True

    def drop_oldest(self, goes: Callable[[bytes], bool], count_max: int) -> int:
        """Drop the oldest while it `goes`, at most `count_max`; how many went."""
        dropped = 0
        while dropped < count_max and self._oldest < self._end:
            length = self._words[self._oldest % self._size_bytes >> _WORD_SHIFT]
            if not goes(self._read(self._oldest, length)):
                break
            self._oldest += _framed_bytes(length)
            dropped += 1
        return dropped

    def get(self, place: int) -> bytes | None:
        """The record at a place that `append` returned; None: not any more."""
        if not self._oldest <= place < self._end:
            return None
        length = self._words[place % self._size_bytes >> _WORD_SHIFT]
        return self._read(place, length)

    def oldest(self) -> bytes | None:
        """The one that will go first; None: there is none."""
        return self.get(self._oldest)

    def newest_first(self) -> Iterator[bytes]:
        """Every record, newest first.

        Others may be kept between two of them: those are not given, nor what they drop.
        """
        end = self._end
        while end > self._oldest:
            length = self._words[(end - _WORD_BYTES) % self._size_bytes >> _WORD_SHIFT]
            end -= _framed_bytes(length)
            yield self._read(end, length)

    def _write(self, start: int, content: bytes) -> None:
        """Write behind the word at `start`."""
        at = (start + _WORD_BYTES) % self._size_bytes
        fits = self._size_bytes - at
        if len(content) <= fits:
            self._bytes[at : at + len(content)] = content
        else:
            self._bytes[at:] = content[:fits]
            self._bytes[: len(content) - fits] = content[fits:]

    def _read(self, start: int, length: int) -> bytes:
        at = (start + _WORD_BYTES) % self._size_bytes
        if at + length <= self._size_bytes:
            return bytes(self._bytes[at : at + length])
        return bytes(self._bytes[at:]) + bytes(self._bytes[: at + length - self._size_bytes])


def _framed_bytes(length: int) -> int:
    """What a record takes, both its words included; words do not straddle the end."""
    return (length + 3 * _WORD_BYTES - 1) & -_WORD_BYTES
