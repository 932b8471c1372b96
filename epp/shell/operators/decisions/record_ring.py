"""Store the last records of a stream in memory that is allocated once.

Long-lived objects among short-lived ones prevent the allocator from returning pages, and memory
that fills slowly looks like a leak. Therefore one buffer contains all records. Each record stands
between two words with its length. The oldest record can thus be dropped at one end and the newest
read at the other.
"""

from collections.abc import Callable, Iterator
from typing import Final

_WORD_BYTES: Final = 4
_WORD_SHIFT: Final = 2
GONE: Final = -1
"""Returned instead of a position for a record that was not stored."""


class RecordRing:
    """A ring buffer with the newest records that fit in `size_bytes`, for use in one thread.

    Raises `ValueError` unless `size_bytes` is a multiple of 4 from 16 to 2**32 - 4.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes % _WORD_BYTES or not 4 * _WORD_BYTES <= size_bytes < 2**32:
            raise ValueError(
                f"a ring must have a multiple of {_WORD_BYTES} bytes from 16 to 2**32 - 4, got "
                f"{size_bytes}"
            )
        # `bytearray(size_bytes)` would not allocate memory before it is written.
        self._bytes = memoryview(bytearray(b"\0") * size_bytes)
        self._words = self._bytes.cast("I")
        self._size_bytes = size_bytes
        self._oldest = 0
        """Position of the oldest record: the number of bytes appended before it since the start."""
        self._end = 0
        self.displaced = 0
        """Number of records of the ring that were overwritten by newer ones."""

    def __len__(self) -> int:
        """Return the number of records in the ring; the call iterates over all of them."""
        return sum(1 for _ in self.newest_first())

    def append(self, record: bytes) -> int:
        """Store `record`, overwriting the oldest records if necessary, and return its position for
        `get`.

        Return `GONE` if the record does not fit in the ring.
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
        """Overwrite the beginning of the record at the given position with `head`.

        Return False if the record no longer exists. `head` must not be longer than the record.
        """
        if not self._oldest <= place < self._end:
            return False
        start = place % self._size_bytes
        length = self._words[start >> _WORD_SHIFT]
        assert len(head) <= length, f"{len(head)} bytes do not fit in a record of {length}"
        self._write(start, head)
        return True

    def drop_oldest(self, goes: Callable[[bytes], bool], count_max: int) -> int:
        """Drop the oldest records as long as `goes(record)` is true, at most `count_max`. Return
        the number of dropped records.
        """
        dropped = 0
        while dropped < count_max and self._oldest < self._end:
            length = self._words[self._oldest % self._size_bytes >> _WORD_SHIFT]
            if not goes(self._read(self._oldest, length)):
                break
            self._oldest += _framed_bytes(length)
            dropped += 1
        return dropped

    def get(self, place: int) -> bytes | None:
        """Return the record at a position that `append` returned, or None if it no longer
        exists.
        """
        if not self._oldest <= place < self._end:
            return None
        length = self._words[place % self._size_bytes >> _WORD_SHIFT]
        return self._read(place, length)

    def oldest(self) -> bytes | None:
        """Return the oldest record in the ring, or None if the ring is empty."""
        return self.get(self._oldest)

    def newest_first(self) -> Iterator[bytes]:
        """Yield every record in the ring, newest first. Records that are added or dropped during
        the iteration are skipped.
        """
        end = self._end
        while end > self._oldest:
            length = self._words[(end - _WORD_BYTES) % self._size_bytes >> _WORD_SHIFT]
            end -= _framed_bytes(length)
            yield self._read(end, length)

    def _write(self, start: int, content: bytes) -> None:
        """Write bytes of a record after the length word at `start`."""
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
    """Return the number of bytes that a record occupies with its two length words. Words never
    cross the end of the buffer.
    """
    return (length + 3 * _WORD_BYTES - 1) & -_WORD_BYTES
