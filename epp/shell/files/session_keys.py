"""Read the keys of session tokens from a watched file, or generate a random key.

The file has one key per line. The first key signs new tokens, and tokens signed with any of the
keys are accepted, so that keys can be changed without losing sessions. Keys never appear in
messages.
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
"""Minimum length in bytes of a key for session tokens; `openssl rand -base64 32` generates a longer
one.
"""
KEYS_MAX: Final = 8
FILE_BYTES_MAX: Final = 65_536

Keys: TypeAlias = tuple[bytes, ...]

_log = structlog.get_logger(__name__)


class SessionKeysError(ValueError):
    """Raised if a file of keys for session tokens is invalid. The message is one sentence."""


class SessionKeys:
    """The current `keys` for session tokens. While `run` is running, `on_change` is called with new
    keys.
    """

    def __init__(
        self, path: str, on_change: Callable[[Keys], None], *, poll_s: Seconds = 1.0
    ) -> None:
        """Read the keys from the file at `path`, or generate a random key if `path` is "". Raises
        `StartError`.
        """
        self._path = path
        self._on_change = on_change
        self._watcher = FileWatcher(
            Path(path), self._changed, _report, poll_s=poll_s, bytes_max=FILE_BYTES_MAX
        )
        self.keys: Keys = self._first() if path else (secrets.token_bytes(KEY_BYTES_MIN),)

    async def run(self) -> None:
        """Watch the file of keys for session tokens until cancelled."""
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
            _log.error(
                "session token keys rejected, the last valid ones stay in force", problem=str(error)
            )
            return
        self._on_change(self.keys)
        _log.info("session token keys replaced", keys=len(self.keys))


def read_session_keys(content: bytes, source: str) -> Keys:
    """Parse the content of a key file: one key per line, ignoring surrounding white space and empty
    lines.

    Raises `SessionKeysError`.
    """
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
    _log.error("session token keys cannot be read, the last ones stay in force", problem=problem)
