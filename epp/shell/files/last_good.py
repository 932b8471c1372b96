"""Copies of watched files as they last came into force, for a start at which a file is broken.

A running picker keeps what is in force when its configuration or endpoints file breaks; one that
starts anew has nothing to keep. So each content that came into force is written beside, in a
directory of the operator's choice, and a start falls back on it. A directory belongs to one picker
or to replicas of one: who shares it shares the copies.

A copy is its SHA-256 and the content. Whoever finds another sum ignores the copy: it is the rest of
a node that crashed, or of two that wrote at once, or somebody edited it.
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
"""As much as is read of a watched file."""
_HEAD: Final = "sha256:{}\n"
_HEAD_BYTES: Final = len(_HEAD.format("0" * 64))

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class LastGood:
    """The copy of one file. `start` reads the file or else the copy, `keep` what came into force."""

    def __init__(
        self,
        folder: str,
        name: str,
        on_failure: Callable[[], None],
        *,
        retry_s: Seconds = 60.0,
    ) -> None:
        """`folder` "": nothing is kept. `on_failure` is called for each write that failed."""
        self.name = name
        """What the copy is called, and the file in metrics and log."""
        self.in_force = False
        """Whether the copy is what the picker runs by."""
        self._path = Path(folder, name) if folder else None
        self._on_failure = on_failure
        self._retry_s = retry_s
        self._pending = b""
        self._due = asyncio.Event()
        self._problem: str | None = None

    def start(self, read: Callable[[], bytes], make: Callable[[bytes], T]) -> T:
        """What `make` makes of the file that `read` reads, or else of the copy.

        Raises the `StartError` that the file gave if the copy gives none or another.
        """
        try:
            content = read()
            made = make(content)
        except StartError as error:
            return self._recalled(make, error)
        self.keep(content)
        return made

    def keep(self, content: bytes) -> None:
        """`content` of the file came into force; `run` writes it."""
        self.in_force = False
        if self._path is not None:
            self._pending = content
            self._due.set()

    async def run(self) -> None:
        """Write what came into force, until cancelled; what cannot be written is tried again."""
        while self._path is not None:
            await self._due.wait()
            self._due.clear()
            # In a thread: a volume that hangs must not hold the loop.
            try:
                problem = await asyncio.to_thread(_write, self._path, self._pending)
            except BaseException:
                # Whoever starts this anew finds what is still to be written.
                self._due.set()
                raise
            if problem is None:
                self._problem = None
                continue
            self._on_failure()
            if problem != self._problem:
                self._problem = problem
                _log.error("the last good copy is not kept", file=self.name, problem=problem)
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
            _log.error("the last good copy cannot be used", file=self.name, problems=problems)
            raise error from unfit
        self.in_force = True
        _log.warning(
            "the file is broken, its last good copy is in force until it is mended",
            file=self.name,
            copy=str(self._path),
            problems=str(error).splitlines(),
        )
        return made


def _read(path: Path) -> bytes:
    """The content of the copy at `path`. Raises `StartError`."""
    try:
        with path.open("rb") as file:
            text = file.read(_HEAD_BYTES + COPY_MAX_BYTES)
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror or error}") from error
    content = text[_HEAD_BYTES:]
    if text[:_HEAD_BYTES] != _head(content):
        raise StartError(f"{path} does not have the checksum that it names")
    return content


def _write(path: Path, content: bytes) -> str | None:
    """Replace the copy at `path` as a whole; what hinders, None if nothing does."""
    beside = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # For our own user only: configurations may name what others need not know.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            file.write(_head(content) + content)
        # Not waited for until it is on disk: after a crash of the node the checksum tells.
        beside.replace(path)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror or error}"
    return None


def _head(content: bytes) -> bytes:
    return _HEAD.format(hashlib.sha256(content).hexdigest()).encode()
