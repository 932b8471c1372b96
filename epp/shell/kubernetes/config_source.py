"""Which text is the configuration: the mounted file's, or the watched ConfigMap's. Pure.

Both show the same ConfigMap, the watch within a second and the file up to 90 s later. So while the
watch is in touch it alone counts; while it is not, the file does. A file that merely catches up
with what the watch has told is no news: applying it would go back to an older text.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Final

VERSIONS_MAX: Final = 64
"""Texts of the watch that the file has yet to show."""


class ConfigSource:
    """Calls `apply(text, told_by)` whenever the text that counts is another.

    `told_by` is `watched`, the name of the ConfigMap, or `file`, that of the file.
    """

    def __init__(self, apply: Callable[[bytes, str], None], *, watched: str, file: str) -> None:
        self._apply = apply
        self._watched_name = watched
        self._file_name = file
        self._in_touch = False
        self._ahead: deque[bytes] = deque(maxlen=VERSIONS_MAX)
        """Digests that the watch told and the file has not shown yet, oldest first."""
        self._file: bytes | None = None
        """What the file shows that the watch has not told."""
        self._applied: bytes | None = None

    def started(self, text: bytes) -> None:
        """`text` of the file is in force from the start."""
        self._applied = _digest(text)

    def file_changed(self, text: bytes) -> None:
        """The file shows another text."""
        digest = _digest(text)
        if digest in self._ahead:
            # The kubelet may have skipped versions, never gone back.
            while self._ahead.popleft() != digest:
                pass
            self._file = None
            return
        self._file = text
        if not self._in_touch:
            self._use(text, self._file_name)

    def watch_told(self, text: bytes) -> None:
        """The ConfigMap says `text`."""
        digest = _digest(text)
        if digest != self._applied and (self._file is None or _digest(self._file) != digest):
            self._ahead.append(digest)
        # What the file alone has shown is older than this, or the same.
        self._file = None
        self._use(text, self._watched_name)

    def watch_in_touch(self, in_touch: bool) -> None:
        """Whether a change of the ConfigMap would be heard of now."""
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
