"""Lines that a generator makes, read as a file is read."""

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
    """`lines` one after another, to be read once; reading raises what making the lines raises."""
    return io.BufferedReader(_Lines(iter(lines)), _BUFFER_BYTES)
