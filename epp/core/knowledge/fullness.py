"""Endpoints that are full, and the number of requests that each of them may still receive.

An endpoint is full from the time at which it refuses a request for lack of capacity. It then
answers 429, or 503 with `retry-after` (RFC 9110 section 10.2.3, RFC 6585 section 4). It receives no
requests for as long as its `retry-after` says, at most a minute. Without one, the pause doubles
with each refusal, up to half a minute. After that it may receive one request in the first second,
two in the next, then four, and so on. The first of these requests that it serves ends the state. So
does the end of the seventh second, because long answers give no sign for minutes.

A full endpoint is neither failing nor gone. It keeps its cached prefixes. It also receives requests
while no other endpoint can serve them.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Ints
from epp.core.types import Seconds

PAUSE_S_MIN: Final = 1.0
"""Pause in seconds after the first refusal without `retry-after`; it doubles with each further
refusal, up to `PAUSE_S_MAX`.
"""
PAUSE_S_MAX: Final = 30.0
RETRY_AFTER_S_MAX: Final = 60.0
"""Longest pause in seconds that a `retry-after` header can cause, so that a wrong header cannot
take an endpoint out of service.
"""
STEP_S: Final = 1.0
"""Length of a step in seconds. The number of requests that an endpoint may receive doubles with
each step after its pause.
"""
STEPS: Final = 7
"""Number of steps after the pause. The last one allows 64 requests; an endpoint that refused none
of them is no longer full.
"""
FULL: Final = "full"
"""Name of the state of a full endpoint in reports, and name of the reason why a decision excluded
one.
"""
NO_SLOTS: Final[Ints] = np.empty(0, dtype=np.int64)


class Full(Struct, kw_only=True):
    """The state of one full endpoint."""

    since_s: Seconds
    """Time of the refusal at which the endpoint became full."""
    refused_at_s: Seconds
    """Time of the last refusal that started a pause. Of a request that was sent before it, a
    success is ignored, and a refusal only extends the pause to its own `retry-after`.
    """
    until_s: Seconds
    """Time at which the pause of the full endpoint ends, so that it may receive requests again."""
    pause_s: Seconds = 0.0
    """Length in seconds of the last pause after a refusal without `retry-after`; 0 if there was
    none.
    """
    step: int = 0
    sent: int = 0
    """Number of requests that were sent to the endpoint in the current `step` after its pause."""

    def has_room(self, now: Seconds) -> bool:
        """Return whether the full endpoint may receive one more request at `now`."""
        if now < self.until_s:
            return False
        step = self._step_at(now)
        return step >= STEPS or step != self.step or self.sent < 1 << step

    def count_sent(self, now: Seconds) -> None:
        """Count a request that is sent to the full endpoint at `now`."""
        step = self._step_at(now)
        if step != self.step:
            self.step, self.sent = step, 0
        self.sent += 1

    def _step_at(self, now: Seconds) -> int:
        return max(0, int((now - self.until_s) / STEP_S))


class FullEndpoints:
    """The full endpoints of a pool, by slot. An empty table adds no cost to a decision."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Full] = {}

    def refused(
        self, slot: int, sent_at_s: Seconds, retry_after_s: Seconds | None, now: Seconds
    ) -> None:
        """Record that the endpoint in `slot` refused a request that was sent to it at `sent_at_s`.

        `retry_after_s` is the pause that the response requested, or None. Requests that were on
        their way at the last refusal that started a pause belong to the same burst. Their refusals
        extend the pause only to their own `retry-after`.
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
        """End the full state of `slot`, because its endpoint served a request that was sent at
        `sent_at_s`. Do nothing if that was not after the last refusal that started a pause.
        """
        full = self.by_slot.get(slot)
        if full is not None and sent_at_s > full.refused_at_s:
            del self.by_slot[slot]

    def sent(self, slot: int, now: Seconds) -> None:
        """Count a request that is sent to the endpoint in `slot` at `now`, if the endpoint is full."""
        full = self.by_slot.get(slot)
        if full is not None:
            full.count_sent(now)

    def without_room(self, slots: Ints, now: Seconds) -> Ints:
        """Return those of `slots` whose full endpoints may receive no request at `now`, in the same
        order.
        """
        closed = [slot for slot, full in self.by_slot.items() if not full.has_room(now)]
        if not closed:
            return NO_SLOTS
        return slots[np.isin(slots, closed)]

    def tick(self, now: Seconds) -> None:
        """End the full state of endpoints that refused no request until their last step was over."""
        for slot, full in tuple(self.by_slot.items()):
            if now >= full.until_s + STEPS * STEP_S:
                del self.by_slot[slot]

    def forget(self, slot: int) -> None:
        """Drop the full state of `slot`, because its endpoint left or restarted."""
        self.by_slot.pop(slot, None)

    def states(self) -> Iterator[tuple[int, Full]]:
        """Yield the slot and the state of each full endpoint."""
        yield from self.by_slot.items()
