"""Detection of returning sessions, from the last requests that named a session."""

from collections import OrderedDict, deque
from typing import Final

from epp.core.knowledge.rendezvous import identity_hash

SESSIONS_MAX: Final = 4_096
"""Maximum number of remembered sessions; above it, those that sent no request for longest are
dropped.
"""
LOOKED_AT: Final = 64
"""Number of recent requests with a session that decide whether sessions are expected to return."""
RETURNED_MIN: Final = 1 / 8
"""Minimum share of the last `LOOKED_AT` requests with a session that must name a known session,
so that sessions are expected to return.

If each session has a second turn and four pickers share the turns by chance, one of four second
turns returns to the same picker. That is one of eight requests.
"""


class SessionReturns:
    """The sessions that this picker saw. It sees only some of a session's turns if there are other
    pickers.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()
        self._returned: deque[bool] = deque(maxlen=LOOKED_AT)
        self.expected = False
        """True if a request that names a session is expected to be followed by more requests of
        that session. It is False before any request.
        """

    def note(self, session: str) -> None:
        """Record that a request named `session`, and update `expected`."""
        key = identity_hash(session)
        returned = key in self._known
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > SESSIONS_MAX:
            self._known.popitem(last=False)
        self._returned.append(returned)
        self.expected = sum(self._returned) >= RETURNED_MIN * len(self._returned)
