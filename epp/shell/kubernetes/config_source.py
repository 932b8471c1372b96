"""Decide whether the mounted file or the watched ConfigMap supplies the configuration.

Both show the same ConfigMap: the watch within a second, the file up to 90 s later. While the watch
is connected, only the watch counts; while it is not, the file counts. A file that shows an older
text of the watch is ignored, because applying it would revert the configuration. This module has no
I/O.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Final

VERSIONS_MAX: Final = 64
"""Maximum number of remembered configuration texts that the watch delivered and the mounted file
has not shown yet.
"""


class ConfigSource:
    """A selector of the configuration that calls `apply(text, told_by)` whenever the effective text
    changes.

    `told_by` is `watched`, the name of the ConfigMap, or `file`, the name of the file.
    """

    def __init__(self, apply: Callable[[bytes, str], None], *, watched: str, file: str) -> None:
        self._apply = apply
        self._watched_name = watched
        self._file_name = file
        self._in_touch = False
        self._ahead: deque[bytes] = deque(maxlen=VERSIONS_MAX)
        """Digests of configuration texts that the watch delivered and the file has not shown,
        oldest first.
        """
        self._file: bytes | None = None
        """Latest configuration text that the mounted file showed after the last text of the watch
        and before the watch delivered it, or None.
        """
        self._applied: bytes | None = None

    def started(self, text: bytes) -> None:
        """Record that `text`, the configuration in the mounted file, is in force from the start."""
        self._applied = _digest(text)

    def file_changed(self, text: bytes) -> None:
        """Remember a new configuration text of the mounted file, and apply it if the watch is not
        connected. Ignore a text that the watch delivered before the file showed it.
        """
        digest = _digest(text)
        if digest in self._ahead:
            # The kubelet may skip versions but never goes back.
            while self._ahead.popleft() != digest:
                pass
            self._file = None
            return
        self._file = text
        if not self._in_touch:
            self._use(text, self._file_name)

    def watch_told(self, text: bytes) -> None:
        """Apply a new configuration text of the watched ConfigMap, if it is not in force already, and
        then expect it in the mounted file later, unless the file has shown it.
        """
        digest = _digest(text)
        if digest != self._applied and (self._file is None or _digest(self._file) != digest):
            self._ahead.append(digest)
        # A text that only the file has shown is older than this one or equal.
        self._file = None
        self._use(text, self._watched_name)

    def watch_in_touch(self, in_touch: bool) -> None:
        """Set whether the watch of the ConfigMap is connected, so that it would receive a change.
        If it is not, apply the text of the mounted file that was remembered, if there is one.
        """
        self._in_touch = in_touch
        if not in_touch and self._file is not None:
            self._use(self._file, self._file_name)

    def _use(self, text: bytes, told_by: str) -> None:
        digest = _digest(text)
        if digest != self._applied:
            self._applied = digest
            self._apply(text, told_by)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
