"""The KV-cache events that one process of a simulated engine published, one frame per engine step.

Frames contain the picker's block keys instead of tokens (`sim/traces/prompts`). In production, each
picker computes these keys from the tokens and hashes of a frame. Here they are computed once for
all pickers, and a test shows that both ways agree. If an engine has several copies of a block, the
log reports the block as stored with the first copy and as removed with the last, because a picker
counts copies this way.
"""

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct, field

from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import DEVICE
from epp.core.types import Seconds
from sim.traces.prompts import block_hashes

FRAMES_KEPT_MAX: Final = 10_000
"""Maximum number of frames that an engine replays, the latest ones; vLLM's `buffer_steps`."""


class _Change(Struct):
    """KV blocks that were stored (`held`) or removed: their positions in their prompts, and their
    hashes.
    """

    held: bool
    numbers: list[int]
    hashes: list[int]


class Frame(Struct):
    """The KV-cache events of one engine step, sent together."""

    number: int
    sent_at_s: Seconds
    changes: list[_Change]
    by_size: dict[int, list[Changed]] = field(default_factory=dict)


class EventLog:
    """A `PoolWatcher` that records KV-cache events in frames. `end_step` closes a frame; the latest
    frames are retained for replays.
    """

    def __init__(self, block_tokens: int) -> None:
        """Start an empty log of KV-cache events; `block_tokens` is the engine's block size in
        tokens.
        """
        self.block_tokens = block_tokens
        self.next = 0
        """Number that the next frame of KV-cache events will have."""
        self.ended_at_s: Seconds = math.inf
        """Time when the engine process ended; infinite while it runs."""
        self._frames: list[Frame] = []
        self._copies: dict[int, int] = {}
        self._changes: list[_Change] = []

    @property
    def first(self) -> int:
        """Number of the oldest retained frame of KV-cache events, or of the next frame if none is
        retained.
        """
        return self.next - len(self._frames)

    def stored(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Record that the blocks from `start` to `end` of a prompt were stored. A block of which
        the engine already has a copy is not reported.
        """
        change = self._change(held=True)
        copies = self._copies
        hashes = block_hashes(keys, ends, start, end, self.block_tokens)
        for number, block in enumerate(hashes, start):
            count = copies.get(block, 0)
            copies[block] = count + 1
            if not count:
                change.numbers.append(number)
                change.hashes.append(block)

    def forgotten(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Record that the blocks from `start` to `end` of a prompt were removed. A block is
        reported only with its last copy.
        """
        change = self._change(held=False)
        copies = self._copies
        hashes = block_hashes(keys, ends, start, end, self.block_tokens)
        for number, block in enumerate(hashes, start):
            count = copies.pop(block) - 1
            if count:
                copies[block] = count
            else:
                change.numbers.append(number)
                change.hashes.append(block)

    def cleared(self) -> None:
        raise AssertionError("no cache is reset in simulated time")

    def end_step(self, now: Seconds) -> None:
        """Store the KV-cache changes of the step that has ended as a frame that is sent at `now`.
        Do nothing if the step changed nothing.
        """
        changes = [change for change in self._changes if change.hashes]
        self._changes = []
        if not changes:
            return
        self._frames.append(Frame(self.next, now, changes))
        self.next += 1
        if len(self._frames) >= 2 * FRAMES_KEPT_MAX:
            del self._frames[:-FRAMES_KEPT_MAX]

    def end(self, now: Seconds) -> None:
        """Record that the engine process ended at `now`; changes that were not sent are lost."""
        self.ended_at_s = now
        self._changes = []

    def frame(self, number: int) -> Frame | None:
        """Return the frame of KV-cache events with this number, or None if it is no longer
        retained.
        """
        at = number - self.first
        return self._frames[at] if at >= 0 else None

    def next_at(self, instant: Seconds) -> int:
        """Return the number of the first frame of KV-cache events that was sent after the time
        `instant`; the number of the next frame if there is none.
        """
        number = self.next
        while number > self.first and self._frames[number - 1 - self.first].sent_at_s > instant:
            number -= 1
        return number

    def retained(self, first: int, before: int) -> Sequence[Frame]:
        """Return the retained frames of KV-cache events from number `first` to below `before`. An
        engine that is asked to replay from `first` sends these before it sends frame `before`.
        """
        first = max(first, self.first, before - FRAMES_KEPT_MAX)
        return self._frames[first - self.first : max(first, before) - self.first]

    def changes_of(self, frame: Frame, block_tokens: int) -> list[Changed]:
        """Return the stored and removed blocks in `frame`, converted for an index with blocks of
        `block_tokens`, a multiple of the engine's block size.

        A block of the index counts as stored as long as the engine's block at its end is stored.
        """
        known = frame.by_size.get(block_tokens)
        if known is None:
            blocks = block_tokens // self.block_tokens
            known = frame.by_size[block_tokens] = []
            for change in frame.changes:
                keys = [
                    block
                    for number, block in zip(change.numbers, change.hashes, strict=True)
                    if not (number + 1) % blocks
                ]
                if keys:
                    known.append(Changed(change.held, DEVICE, keys))
        return known

    def _change(self, *, held: bool) -> _Change:
        """Return the change that collects blocks of this kind (stored or removed) in the current
        step: the last one if it has this kind, else a new one.
        """
        if self._changes and self._changes[-1].held is held:
            return self._changes[-1]
        change = _Change(held, [], [])
        self._changes.append(change)
        return change
