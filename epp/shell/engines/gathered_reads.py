"""Reading many connections in one go.

To be woken for each message costs an event loop as much as reading it does. Of connections that are
gathered here nobody is woken: their owner fetches what has come, every few milliseconds.
"""

import selectors
from collections.abc import Callable

from epp.core.types import Seconds


class GatheredReads:
    """Not for more than one thread. Who gathers a connection lets it go before it is closed: the
    system gives its descriptor to the next one.
    """

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._selector = selectors.DefaultSelector()
        self._clock = clock
        self._turns = 0

    def __len__(self) -> int:
        return len(self._selector.get_map() or ())

    def add(self, descriptor: int, read: Callable[[], None]) -> None:
        """From now on `read` is called where there is something to read, an end included."""
        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def remove(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def fetch(self, until_s: Seconds) -> bool:
        """Call who has something to read, as far as there is time; whether there was anything.

        Each time it begins with another, so that in the end all have their turn.
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
