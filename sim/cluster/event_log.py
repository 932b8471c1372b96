"""What one process of a simulated engine has published: KV events, a frame a step.

Frames have our keys in the place of tokens, those that `sim/traces/prompts` makes: what a picker makes of
the tokens and hashes of a real frame is made here once, for all pickers. That the two come to the same is
tested. A block that is there more than once is told with the first copy and with the last, as a picker
counts them.
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
"""To be told again; `buffer_steps` of vLLM."""


class _Change(Struct):
    """Blocks that are held from now on, or not any more: their numbers in their chains, and hashes."""

    held: bool
    numbers: list[int]
    hashes: list[int]


class Frame(Struct):
    """What one step did."""

    number: int
    sent_at_s: Seconds
    changes: list[_Change]
    by_size: dict[int, list[Changed]] = field(default_factory=dict)


class EventLog:
    """A `PoolWatcher`. `end_step` closes a frame; the last are kept."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: in a block of the engine."""
        self.block_tokens = block_tokens
        self.next = 0
        """The number of the frame that comes next."""
        self.ended_at_s: Seconds = math.inf
        """When the process was gone."""
        self._frames: list[Frame] = []
        self._copies: dict[int, int] = {}
        self._changes: list[_Change] = []

    @property
    def first(self) -> int:
        """The number of the oldest frame that is still there, or of the next."""
        return self.next - len(self._frames)

    def stored(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Of copies the first is told."""
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
        """Of copies the last is told."""
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
        raise AssertionError("nobody resets a cache in simulated time")

    def end_step(self, now: Seconds) -> None:
        """The step has ended: what it did is sent, if it did anything."""
        changes = [change for change in self._changes if change.hashes]
        self._changes = []
        if not changes:
            return
        self._frames.append(Frame(self.next, now, changes))
        self.next += 1
        if len(self._frames) >= 2 * FRAMES_KEPT_MAX:
            del self._frames[:-FRAMES_KEPT_MAX]

    def end(self, now: Seconds) -> None:
        """The process is gone, with what it did not send."""
        self.ended_at_s = now
        self._changes = []

    def frame(self, number: int) -> Frame | None:
        """None: it is not kept any more."""
        at = number - self.first
        return self._frames[at] if at >= 0 else None

    def next_at(self, instant: Seconds) -> int:
        """The number of the first frame that is sent after `instant`."""
        number = self.next
        while number > self.first and self._frames[number - 1 - self.first].sent_at_s > instant:
            number -= 1
        return number

    def kept(self, first: int, before: int) -> Sequence[Frame]:
        """The frames `first` to `before` that an engine would tell again when `before` comes next."""
        first = max(first, self.first, before - FRAMES_KEPT_MAX)
        return self._frames[first - self.first : max(first, before) - self.first]

    def changes_of(self, frame: Frame, block_tokens: int) -> list[Changed]:
        """What `frame` tells of blocks of `block_tokens`, a multiple of those of the engine.

        One is held while the block of the engine is with which it ends.
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
        """The last one, if it goes on with that."""
        if self._changes and self._changes[-1].held is held:
            return self._changes[-1]
        change = _Change(held, [], [])
        self._changes.append(change)
        return change
