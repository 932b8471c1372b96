"""Watch one file by polling: configuration, endpoints file, certificates.

Each poll opens the path and hashes what it finds, and the hash alone decides. That sees what other
signs of change miss: the kubelet swaps a symlink two directories up, editors rename, some volumes
give no events, and two writes may share a time stamp. A file in the middle of being written is
read as it is; the rest of it is one more change.
"""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from epp.core.types import Seconds
from epp.shell.starting import StartError


class FileWatcher:
    """Calls `on_change(content)` on the loop whenever the content of `path` is another.

    `on_problem(sentence)` is called once when the file cannot be read, and again only after it
    could be read in between or the reason changed; what was read last stays in force.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[bytes], None],
        on_problem: Callable[[str], None],
        *,
        poll_s: Seconds = 1.0,
        bytes_max: int = 4 * 1024 * 1024,
    ) -> None:
        self._path = path
        self._on_change = on_change
        self._on_problem = on_problem
        self._poll_s = poll_s
        self._bytes_max = bytes_max
        self._digest: bytes | None = None
        self._problem: str | None = None
        self.errors_total = 0
        """Polls that could not read the file."""

    def read(self) -> bytes:
        """Return the content now; `run` reports only what differs from it.

        Raises `OSError` if there is none, or more than `bytes_max` of it.
        """
        with self._path.open("rb") as file:
            content = file.read(self._bytes_max + 1)
        if len(content) > self._bytes_max:
            raise OSError(f"{self._path} is larger than {self._bytes_max} bytes")
        self._digest = hashlib.sha256(content).digest()
        return content

    async def run(self) -> None:
        """Poll until cancelled. Without an earlier `read` the first content is a change."""
        while True:
            self.poll()
            await asyncio.sleep(self._poll_s)

    def poll(self) -> None:
        """Look once."""
        before = self._digest
        try:
            content = self.read()
        except OSError as problem:
            self.errors_total += 1
            sentence = f"{self._path} cannot be read, its last content stays: {problem}"
            if sentence != self._problem:
                self._problem = sentence
                self._on_problem(sentence)
            return
        self._problem = None
        if self._digest != before:
            self._on_change(content)


def first_read(watcher: FileWatcher, name: str) -> bytes:
    """The content of a file that must be there at start. Raises `StartError`."""
    try:
        return watcher.read()
    except OSError as error:
        raise StartError(f"{name} cannot be read: {error.strerror or error}") from error
