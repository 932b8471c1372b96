"""The delay of engines' KV-cache events, measured by the events of some decisions.

After some decisions, the exact prefix index waits for the event that the engine will send when it
has cached the prompt. As long as it does not come, decisions count for longer. An endpoint that is
later than `LATE_S_MAX` is overdue: it does not count as complete.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from epp.core.knowledge.exact_rows import Rows
from epp.core.knowledge.exact_slots import SlotState
from epp.core.types import Seconds

LATE_S_MAX: Final[Seconds] = 30.0
"""Longest time in seconds for which the index waits for the KV-cache event of one decision."""
AWAITED_MAX: Final = 32
"""Divisor of `LATE_S_MAX` that gives the shortest time between two waits for KV-cache events of one
endpoint, so that about this many are awaited at most.
"""


class AwaitedEvents:
    """The KV-cache events of all endpoints for which the index waits. An event has come once its
    block key is in `rows` for the endpoint.
    """

    def __init__(self, rows: Rows, block_tokens: int) -> None:
        self._rows = rows
        self._block_tokens = block_tokens
        self._any = False
        """True if the exact prefix index waits for any KV-cache event."""
        self._looked_at_s: Seconds = -math.inf
        """Time at which the exact prefix index last checked for awaited KV-cache events."""

    def sent(self, known: SlotState, chain: bytes, now: Seconds) -> None:
        """Begin to wait for the KV-cache event of a prompt that is sent to an endpoint now. Do
        nothing if the last open wait began a moment ago, or if no event is expected.
        """
        if known.awaited and now - known.awaited[-1][0] < LATE_S_MAX / AWAITED_MAX:
            return
        if not known.reported_all:
            return
        keys, size = array("Q", chain), known.engine_block_tokens
        blocks = reported_blocks(len(keys), self._block_tokens, size) if size else len(keys)
        if not blocks or self._holds(known, keys[blocks - 1]):
            return
        known.awaited.append((now, keys[blocks - 1]))
        self._any = True

    def not_sent(self, known: SlotState, chain: bytes) -> None:
        """Stop waiting for the KV-cache event of the prompt with this chain of keys, because the
        prompt was not computed at the endpoint.
        """
        awaited = known.awaited
        keys = frozenset(array("Q", chain)) if awaited else ()
        for one in [one for one in awaited if one[1] in keys]:
            awaited.remove(one)

    def look(
        self,
        slots: Sequence[SlotState],
        now: Seconds,
        ttl_s: Seconds,
        stretch: Callable[[int, SlotState, float], None],
    ) -> bool:
        """Check for awaited KV-cache events, at most four times per `ttl_s`, the time to live of
        recent decisions. Call `stretch` with the slot of each endpoint, its state and the factor by
        which its decisions live longer. Return whether any endpoint became overdue or ceased to be.
        """
        if not self._any or now - self._looked_at_s < ttl_s / 4:
            return False
        self._looked_at_s = now
        self._any = changed = False
        for slot, known in enumerate(slots):
            awaited = known.awaited
            newest_first = range(len(awaited), 0, -1)
            told = next((at for at in newest_first if self._holds(known, awaited[at - 1][1])), 0)
            for _ in range(told):
                awaited.popleft()
            overdue = known.overdue and not told
            while awaited and now - awaited[0][0] > LATE_S_MAX:
                awaited.popleft()
                overdue = True
            if overdue is not known.overdue:
                known.overdue = overdue
                changed = True
            late_s = now - awaited[0][0] if awaited else 0.0
            # Events without delay need no longer time to live.
            stretch(slot, known, 1.0 + late_s / ttl_s if late_s > ttl_s / 2 else 1.0)
            self._any = self._any or bool(awaited)
        return changed

    def _holds(self, known: SlotState, key: int) -> bool:
        return any(self._rows.holds(place.bit, key) for place in known.places)


def reported_blocks(blocks: int, block_tokens: int, engine_block_tokens: int) -> int:
    """Return how many of the first `blocks` blocks of the index are covered by whole blocks of the
    engine.

    An engine reports only whole blocks of its own size.
    """
    size = engine_block_tokens
    if not block_tokens % size:
        return blocks
    return blocks * block_tokens // size * size // block_tokens
