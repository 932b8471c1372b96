"""Whether sessions that clients name come again, told by the last requests that named one."""

from collections import OrderedDict, deque
from typing import Final

from epp.core.knowledge.rendezvous import identity_hash

SESSIONS_MAX: Final = 4_096
"""Sessions that are remembered; of more, those go that were not named for longest."""
LOOKED_AT: Final = 64
"""Requests that decide, and of them"""
RETURNED_MIN: Final = 1 / 8
"""named a session that was named before. So many do if each session has a second turn and four pickers
share them by chance: one of four second turns is one of eight requests."""


class SessionReturns:
    """What is seen of sessions at one picker, which with others sees some of their turns only."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()
        self._returned: deque[bool] = deque(maxlen=LOOKED_AT)
        self.expected = False
        """Whether a session that is named will be named again. Of nobody seen: no."""

    def note(self, session: str) -> None:
        """A request named `session`."""
        key = identity_hash(session)
        returned = key in self._known
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > SESSIONS_MAX:
            self._known.popitem(last=False)
        self._returned.append(returned)
        self.expected = sum(self._returned) >= RETURNED_MIN * len(self._returned)
