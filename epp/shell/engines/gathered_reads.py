"""Read many connections together.

Waking the event loop for each message takes as long as reading it. Connections that are gathered
here do not wake the loop: their owner reads all of them every few milliseconds.
"""

import selectors
from collections.abc import Callable

from epp.core.types import Seconds


class GatheredReads:
    """A set of connections that are read together, for use in one thread.

    Remove a connection from the set before closing it, because the operating system reuses its file
    descriptor.
    """

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._selector = selectors.DefaultSelector()
        self._clock = clock
        self._turns = 0

    def __len__(self) -> int:
        return len(self._selector.get_map() or ())

    def add(self, descriptor: int, read: Callable[[], None]) -> None:
        """Add a connection. From now on `fetch` calls `read` if the connection is readable or has
        ended.
        """
        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def remove(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def fetch(self, until_s: Seconds) -> bool:
        """Call the callbacks of readable connections, until the time `until_s`. Return True if any
        connection was readable.

        Each call starts with another connection, so that all are served eventually.
        """
        ready = self._selector.select(0)
        if not ready:
            return False
        self._turns += 1
        first = self._turns % len(ready)
        for key, _ in (*ready[first:], *ready[:first]):
            key.data()
            if self._clock() >= until_s:
                break
        return True

    def close(self) -> None:
        self._selector.close()
