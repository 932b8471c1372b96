"""Responses 503 of requests that several endpoints served, until a page shows who refused.

vLLM answers 503 when its admission limits are reached, and counts it in `vllm:admission_rejections`.
The sidecar of a decode endpoint passes on the 503 of a prefill endpoint. Such a response therefore
waits for the next pages of its endpoints. If a counter has increased, that endpoint is full, and
none has failed. If no counter has increased, one of them has failed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from epp.core.types import Seconds

WAIT_S: Final = 1.0
"""Time in seconds for which a response waits for pages, several intervals of a scrape."""
WAITING_MAX: Final = 1_024
"""Maximum number of responses that wait; the oldest are dropped when there are more."""

Counter: TypeAlias = Callable[[int], float | None]
"""Function that returns the counter of refusals on the last page of a slot, or None if unknown."""


class _Refused(Struct, frozen=True):
    slots: tuple[int, ...]
    counts: tuple[float | None, ...]
    """Number of refusals by each endpoint of `slots` on its last page when the response came, or
    None if unknown.
    """
    sent_at_s: Seconds
    at_s: Seconds


class Judged(Struct, frozen=True):
    """The result of examining a response 503 of a request that several endpoints served, `WAIT_S`
    after the response.
    """

    slots: tuple[int, ...]
    """Slots of the endpoints that served the refused request together."""
    full: tuple[int, ...]
    """Slots of the endpoints whose counters of refusals have increased since the response; () if
    none has, so that one of the endpoints failed.
    """
    sent_at_s: Seconds
    """Time at which the refused request was sent to its endpoints."""


class RefusedPairs:
    """The responses 503 of requests that several endpoints served, oldest first. Each waits
    `WAIT_S` for the next metrics pages of its endpoints.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Refused] = deque(maxlen=WAITING_MAX)

    def wait(
        self, slots: Sequence[int], count_of: Counter, sent_at_s: Seconds, now: Seconds
    ) -> bool:
        """Let a response 503 of the endpoints in `slots` wait for their next metrics pages. Return
        False, without waiting, if none of them counts refusals, so that no page can explain it.
        """
        counts = tuple(map(count_of, slots))
        if all(count is None for count in counts):
            return False
        self._waiting.append(_Refused(tuple(slots), counts, sent_at_s, now))
        return True

    def due(self, count_of: Counter, now: Seconds) -> list[Judged]:
        """Remove the responses that waited `WAIT_S`, and return which of their endpoints were full."""
        judged: list[Judged] = []
        while self._waiting and self._waiting[0].at_s + WAIT_S <= now:
            refused = self._waiting.popleft()
            full = tuple(
                slot
                for slot, before in zip(refused.slots, refused.counts, strict=True)
                if before is not None and (count_of(slot) or 0.0) > before
            )
            judged.append(Judged(refused.slots, full, refused.sent_at_s))
        return judged

    def forget(self, slot: int) -> None:
        """Drop the waiting responses of requests that `slot` helped to serve, because its endpoint
        left or restarted.
        """
        kept = [one for one in self._waiting if slot not in one.slots]
        if len(kept) < len(self._waiting):
            self._waiting = deque(kept, maxlen=WAITING_MAX)
