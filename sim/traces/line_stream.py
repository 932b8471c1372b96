"""An adapter that makes the lines of a generator readable like a file."""

import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

_BUFFER_BYTES: Final = 65_536


class _Lines(io.RawIOBase):
    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._rest = b""

    def readable(self) -> bool:
        return True

    # typeshed allows every writable buffer; `BufferedReader` gives a memoryview.
    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        while not self._rest:
            line = next(self._lines, None)
            if line is None:
                return 0
            self._rest = line
        given = self._rest[: len(buffer)]
        buffer[: len(given)] = given
        self._rest = self._rest[len(given) :]
        return len(given)


def stream_of(lines: Iterable[bytes]) -> BinaryIO:
    """Return a binary file that contains `lines` and can be read once.

    Reading it raises the errors of the generator.
    """
    return io.BufferedReader(_Lines(iter(lines)), _BUFFER_BYTES)
