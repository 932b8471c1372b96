"""Keep copies of watched files that came into force, for a start with a broken file.

If its configuration or endpoints file breaks, a running picker continues with the last valid
content. A picker that starts has no such content. Therefore each content that came into force is
copied to a configurable directory, and a start falls back on the copy. A directory belongs to one
picker or to replicas of one; replicas that share it share the copies.

A copy consists of its SHA-256 and the content. A copy whose content has another checksum is
ignored: a node crashed, two processes wrote at once, or somebody edited it.
"""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog

from epp.core.types import Seconds
from epp.shell.starting import StartError

COPY_MAX_BYTES: Final = 4 * 1024 * 1024
"""Maximum size in bytes of a last-good copy, equal to the limit of a watched file."""
_HEAD: Final = "sha256:{}\n"
_HEAD_BYTES: Final = len(_HEAD.format("0" * 64))

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class LastGood:
    """The last-good copy of one file.

    `start` reads the file or, if it is broken, the copy. `keep` stores new content of the file that
    came into force.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        on_failure: Callable[[], None],
        *,
        retry_s: Seconds = 60.0,
    ) -> None:
        """Create the handler of the last-good copy in `folder`; if `folder` is "", copies are
        disabled. `on_failure` is called for each failed write.
        """
        self.name = name
        """Name of the copied file in metrics and logs, and file name of its last-good copy."""
        self.in_force = False
        """True if the picker uses the last-good copy instead of the file."""
        self._path = Path(folder, name) if folder else None
        self._on_failure = on_failure
        self._retry_s = retry_s
        self._pending = b""
        self._due = asyncio.Event()
        self._problem: str | None = None

    def start(self, read: Callable[[], bytes], make: Callable[[bytes], T]) -> T:
        """Return the result of `make` for the content that `read` returns, which becomes the
        last-good copy. If that fails, return the result for the existing copy, which is then
        `in_force`.

        Raises the `StartError` about the file if the copy is missing or invalid too.
        """
        try:
            content = read()
            made = make(content)
        except StartError as error:
            return self._recalled(make, error)
        self.keep(content)
        return made

    def keep(self, content: bytes) -> None:
        """Note that the file's `content` came into force, so that the last-good copy no longer is.
        `run` writes it to the last-good copy if copies are enabled.
        """
        self.in_force = False
        if self._path is not None:
            self._pending = content
            self._due.set()

    async def run(self) -> None:
        """Write each new content of the watched file to its last-good copy until cancelled. Failed
        writes are counted and retried. Return at once if copies are disabled.
        """
        while self._path is not None:
            await self._due.wait()
            self._due.clear()
            # A thread writes the copy, because a volume that hangs must not block the event loop.
            try:
                problem = await asyncio.to_thread(_write, self._path, self._pending)
            except BaseException:
                # A restarted task must find the content that is still to be written.
                self._due.set()
                raise
            if problem is None:
                self._problem = None
                continue
            self._on_failure()
            if problem != self._problem:
                self._problem = problem
                _log.error("last-good copy cannot be written", file=self.name, problem=problem)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), self._retry_s)
            self._due.set()

    def _recalled(self, make: Callable[[bytes], T], error: StartError) -> T:
        if self._path is None:
            raise error
        try:
            made = make(_read(self._path))
        except StartError as unfit:
            problems = str(unfit).splitlines()
            _log.error(
                "file is broken, and its last-good copy cannot be used either",
                file=self.name,
                problems=problems,
            )
            raise error from unfit
        self.in_force = True
        _log.warning(
            "file is broken, its last-good copy is in force until the file is repaired",
            file=self.name,
            copy=str(self._path),
            problems=str(error).splitlines(),
        )
        return made


def _read(path: Path) -> bytes:
    """Return the content of the last-good copy at `path`. Raises `StartError`."""
    try:
        with path.open("rb") as file:
            text = file.read(_HEAD_BYTES + COPY_MAX_BYTES)
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror or error}") from error
    content = text[_HEAD_BYTES:]
    if text[:_HEAD_BYTES] != _head(content):
        raise StartError(f"{path} does not match the checksum that it contains")
    return content


def _write(path: Path, content: bytes) -> str | None:
    """Replace the last-good copy at `path` atomically. Return the problem as text, or None if there
    was none.
    """
    beside = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Only the picker's user may read the copy, because configurations may contain confidential
        # names.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            file.write(_head(content) + content)
        # The file is not synced to disk, because the checksum detects a crash of the node.
        beside.replace(path)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror or error}"
    return None


def _head(content: bytes) -> bytes:
    return _HEAD.format(hashlib.sha256(content).hexdigest()).encode()
