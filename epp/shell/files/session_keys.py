"""The keys of session tokens: a file that is watched, or a key of this process's own.

A line a key: the first signs, all are accepted, so that keys are changed without losing a session.
What a line says reaches no message.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import structlog

from epp.core.types import Seconds
from epp.shell.files.watch import FileWatcher, first_read
from epp.shell.starting import StartError

KEY_BYTES_MIN: Final = 32
"""As `openssl rand -base64 32` and more; what can be guessed is no key."""
KEYS_MAX: Final = 8
FILE_BYTES_MAX: Final = 65_536

Keys: TypeAlias = tuple[bytes, ...]

_log = structlog.get_logger(__name__)


class SessionKeysError(ValueError):
    """A file of keys that cannot be used: one sentence."""


class SessionKeys:
    """`keys` as they are now; `on_change` is told of others while `run` runs."""

    def __init__(
        self, path: str, on_change: Callable[[Keys], None], *, poll_s: Seconds = 1.0
    ) -> None:
        """`path`: "" for a key that is drawn here. Raises `StartError`."""
        self._path = path
        self._on_change = on_change
        self._watcher = FileWatcher(
            Path(path), self._changed, _report, poll_s=poll_s, bytes_max=FILE_BYTES_MAX
        )
        self.keys: Keys = self._first() if path else (secrets.token_bytes(KEY_BYTES_MIN),)

    async def run(self) -> None:
        """Watch the file until cancelled."""
        await self._watcher.run()

    def _first(self) -> Keys:
        content = first_read(self._watcher, f"--session-token-key-file {self._path}")
        try:
            return read_session_keys(content, self._path)
        except SessionKeysError as error:
            raise StartError(str(error)) from error

    def _changed(self, content: bytes) -> None:
        try:
            self.keys = read_session_keys(content, self._path)
        except SessionKeysError as error:
            _log.error("session token keys refused, the last good ones stay", problem=str(error))
            return
        self._on_change(self.keys)
        _log.info("session token keys replaced", keys=len(self.keys))


def read_session_keys(content: bytes, source: str) -> Keys:
    """A key a line, white space round it and empty lines left out. Raises `SessionKeysError`."""
    keys: list[bytes] = []
    for number, line in enumerate(content.splitlines(), 1):
        key = line.strip()
        if not key:
            continue
        if len(key) < KEY_BYTES_MIN:
            raise SessionKeysError(
                f"{source}: line {number} has {len(key)} bytes, expected a key of at least "
                f"{KEY_BYTES_MIN}"
            )
        keys.append(key)
    if not 1 <= len(keys) <= KEYS_MAX:
        raise SessionKeysError(f"{source}: has {len(keys)} keys, expected 1 to {KEYS_MAX}")
    return tuple(keys)


def _report(problem: str) -> None:
    _log.error("the session token keys cannot be read, the last ones stay", problem=problem)
