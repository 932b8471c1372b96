"""Watch one file by polling: configuration, endpoints file, certificates.

Each poll opens the path and hashes the content, and only the hash decides. This detects changes
that other methods miss. The kubelet swaps a symlink two directories up, editors rename files, some
volumes send no events, and two writes may have the same time stamp. A file that is still being
written is read as it is, and the rest appears as another change.
"""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from epp.core.types import Seconds
from epp.shell.starting import StartError


class FileWatcher:
    """A watcher that calls `on_change(content)` in the event loop when the content of `path`
    changes.

    `on_problem(sentence)` is called once when the file cannot be read. It is called again only if
    the reason changed or the file was readable in between. Meanwhile the last content stays in
    force.
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
        """Number of polls that could not read the watched file."""

    def read(self) -> bytes:
        """Return the current content of the file; `run` later reports only content that differs
        from it.

        Raises `OSError` if the file is missing or larger than `bytes_max`.
        """
        with self._path.open("rb") as file:
            content = file.read(self._bytes_max + 1)
        if len(content) > self._bytes_max:
            raise OSError(f"{self._path} is larger than {self._bytes_max} bytes")
        self._digest = hashlib.sha256(content).digest()
        return content

    async def run(self) -> None:
        """Poll the file until cancelled. Without an earlier call of `read`, its first content
        counts as a change.
        """
        while True:
            self.poll()
            await asyncio.sleep(self._poll_s)

    def poll(self) -> None:
        """Read the watched file once, and report a change or a new problem. Count a read that
        failed.
        """
        before = self._digest
        try:
            content = self.read()
        except OSError as problem:
            self.errors_total += 1
            sentence = f"{self._path} cannot be read, its last content stays in force: {problem}"
            if sentence != self._problem:
                self._problem = sentence
                self._on_problem(sentence)
            return
        self._problem = None
        if self._digest != before:
            self._on_change(content)


def first_read(watcher: FileWatcher, name: str) -> bytes:
    """Return the content of a watched file that must exist when the picker starts. Raises
    `StartError`.
    """
    try:
        return watcher.read()
    except OSError as error:
        raise StartError(f"{name} cannot be read: {error.strerror or error}") from error
