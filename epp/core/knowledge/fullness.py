"""Which endpoints are full, and how many requests each of them may still get.

An endpoint is full from the moment at which it refuses a request for want of room: it answers 429,
or 503 with `retry-after` (RFC 9110 section 10.2.3, RFC 6585 section 4). It then gets nothing for as
long as its `retry-after` says. After that it may get one request in the first second, two in the
next, then four, and so on. The first of these that it serves ends the state, and so does
the end of the seventh second, because long answers say nothing for minutes.

A full endpoint is neither failing nor gone. It keeps its cached prefixes, and it gets requests all
the same while no other endpoint can serve them.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Ints
from epp.core.types import Seconds

PAUSE_S_MIN: Final = 1.0
"""Pause after the first refusal without `retry-after`; it doubles with each further one."""
PAUSE_S_MAX: Final = 30.0
RETRY_AFTER_S_MAX: Final = 60.0
"""Longest pause that an engine can ask for: a wrong header must not take it out of service."""
STEP_S: Final = 1.0
"""The number of requests that may be sent doubles after this time."""
STEPS: Final = 7
"""The last step allows 64 requests. An endpoint that refused none of them is not full any more."""
FULL: Final = "full"
"""Name of this state for operators, and of the reason why a decision dropped an endpoint."""
NO_SLOTS: Final[Ints] = np.empty(0, dtype=np.int64)


class Full(Struct, kw_only=True):
    """One full endpoint."""

    since_s: Seconds
    """Time of the refusal that began the state."""
    refused_at_s: Seconds
    """Time of the last refusal that counts. Requests sent before it say nothing more."""
    until_s: Seconds
    """End of the pause."""
    pause_s: Seconds = 0.0
    """Length of the last pause that no `retry-after` set; 0 if there was none."""
    step: int = 0
    sent: int = 0
    """Requests sent in `step`."""

    def has_room(self, now: Seconds) -> bool:
        """Return whether it may get a request at `now`."""
        if now < self.until_s:
            return False
        step = self._step_at(now)
        return step >= STEPS or step != self.step or self.sent < 1 << step

    def count_sent(self, now: Seconds) -> None:
        """Count a request that is sent to it at `now`."""
        step = self._step_at(now)
        if step != self.step:
            self.step, self.sent = step, 0
        self.sent += 1

    def _step_at(self, now: Seconds) -> int:
        return max(0, int((now - self.until_s) / STEP_S))


class FullEndpoints:
    """The full endpoints of a pool, by slot. An empty table costs a decision nothing."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Full] = {}

    def refused(
        self, slot: int, sent_at_s: Seconds, retry_after_s: Seconds | None, now: Seconds
    ) -> None:
        """Note that the endpoint in `slot` refused a request, which was sent to it at `sent_at_s`.

        `retry_after_s` is what the response asked for; None if it said nothing. Requests that were
        on their way when the endpoint refused the first are one burst, and their refusals do not
        lengthen the pause beyond their own `retry-after`.
        """
        full = self.by_slot.get(slot)
        if full is None:
            full = self.by_slot[slot] = Full(since_s=now, refused_at_s=now, until_s=now)
        elif sent_at_s <= full.refused_at_s:
            if retry_after_s is not None:
                full.until_s = max(full.until_s, now + min(retry_after_s, RETRY_AFTER_S_MAX))
            return
        if retry_after_s is None:
            full.pause_s = min(max(PAUSE_S_MIN, 2.0 * full.pause_s), PAUSE_S_MAX)
            pause_s = full.pause_s
        else:
            pause_s = min(retry_after_s, RETRY_AFTER_S_MAX)
        full.refused_at_s = now
        full.until_s = now + pause_s
        full.step = full.sent = 0

    def served(self, slot: int, sent_at_s: Seconds) -> None:
        """Note that the endpoint in `slot` served a request, which was sent to it at `sent_at_s`."""
        full = self.by_slot.get(slot)
        if full is not None and sent_at_s > full.refused_at_s:
            del self.by_slot[slot]

    def sent(self, slot: int, now: Seconds) -> None:
        """Note that a request is sent to the endpoint in `slot`."""
        full = self.by_slot.get(slot)
        if full is not None:
            full.count_sent(now)

    def without_room(self, slots: Ints, now: Seconds) -> Ints:
        """Return those of `slots` that may get nothing at `now`, in the same order."""
        closed = [slot for slot, full in self.by_slot.items() if not full.has_room(now)]
        if not closed:
            return NO_SLOTS
        return slots[np.isin(slots, closed)]

    def tick(self, now: Seconds) -> None:
        """Forget the endpoints that refused nothing in the last step."""
        for slot, full in tuple(self.by_slot.items()):
            if now >= full.until_s + STEPS * STEP_S:
                del self.by_slot[slot]

    def forget(self, slot: int) -> None:
        """Note that the endpoint in `slot` left or restarted."""
        self.by_slot.pop(slot, None)

    def states(self) -> Iterator[tuple[int, Full]]:
        """Yield the slot and the state of each full endpoint."""
        yield from self.by_slot.items()
