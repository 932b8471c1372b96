"""What one endpoint holds, as its engine tells it, under keys of our own.

An engine names a block by a hash that nobody else can make. `Mirror` keeps, for each block that the
endpoint holds, which of *our* chained hashes stand for it (`core/prompt/token_blocks`), and turns
events into keys that are held or gone.

**Steps.** A key stands for a block of `block_tokens` tokens; an engine's block may be shorter, so the
chain is made in steps of 16 tokens, and where a block of the engine ends inside one of ours, the mirror
keeps the hash of that step: other prompts go on from there. Of a block that ends inside a step, as most
pages of one token do, the tokens behind the last step are kept too: a copy for each block, which takes
less than a reference to what its neighbours have and outlives them. One of ours is held while the block
of the engine in which it ends is: engines give up the tail of a prompt before its head.

**Copies.** One hash may be in several physical blocks; each copy is stored and removed. An engine whose
copies come to more blocks than it has does not balance the two: `unbalanced`, and from then on a
removal is one of all copies, which may forget too much and never too little.

**Orphans.** A run whose parent is not known, because its store was lost or came before we listened, is
kept apart, in bounds, until the parent comes: to hang it anywhere else would take one prompt for another.

**Groups.** A hybrid model has one chain of blocks a group, of the same hashes. Blocks of groups that
look back to the start are ours; of another group it is kept which steps it holds, and `supported` says
how far a prompt can go that needs all groups at its end.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash
from msgspec import Struct

from epp.core.kv_events.payload import DEVICE, Fault, Removed, Stored
from epp.core.prompt.blocks import chained
from epp.core.prompt.token_blocks import TOKEN_BYTES, step_tokens_of, token_seed, with_media

FLOATING_RUNS_MAX: Final = 4_096
FLOATING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of tokens of runs whose parent is not known: a million."""
FLOATING_BLOCKS_MAX: Final = 65_536
"""In these runs: they may have one token each."""
TIERS_MAX: Final = 8
GROUPS_MAX: Final = 16
ADAPTERS_MAX: Final = 4_096

LOOKS_BACK_TO_THE_START: Final = frozenset(
    {"", "full_attention", "mla_attention", "sink_full_attention"}
)
"""Kinds of groups of which a prompt needs every block."""
_LOOKS_BACK_A_WINDOW: Final = frozenset({"sliding_window", "sliding_window_mla"})
_LOOKS_BACK_ONE: Final = frozenset({"mamba"})

_KEY_BITS: Final = 64
_KEY_MASK: Final = (1 << _KEY_BITS) - 1
_END_BYTES: Final = 10
"""Of an end before the tokens of a tail."""
_TAIL_TOKENS_MAX: Final = 48
"""In a step, for a tail to take about as much memory as a block with its key."""


class Changed(Struct, gc=False):
    """Keys of one tier that are held from now on, or not any more."""

    held: bool
    tier: str
    keys: list[int]


class MirrorCounts(Struct):
    """Blocks of the engine, since the mirror was made, by what became of them."""

    stored: int = 0
    removed: int = 0
    orphans: int = 0
    """Their parent is not known; some may have found it since."""
    unknown: int = 0
    """Removed, and not known to be held."""
    skipped: int = 0
    """Not followed: held elsewhere, hashes without tokens, more than there is room for."""


class _Start(Struct, frozen=True, gc=False):
    """Where a run begins."""

    key: int
    """The hash of the last step, or the seed of the chain; with the media that begin behind it."""
    steps: int
    """Since the last of our keys."""
    rest: bytes = b""
    """The tokens behind the last step."""


class _Floating(Struct, gc=False):
    """A run whose parent is not known."""

    stored: Stored
    count: int
    """Of its blocks, from the first on, those that still are held."""


class _Tier:
    """The blocks of one tier, by the engine's hashes."""

    __slots__ = ("blocks", "copies", "more", "more_keys", "tails")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Of a block -> its end: the key of ours with which it ends, the very object of the index, or,
        of one that ends inside of ours what `_end` makes, below 0."""
        self.tails: dict[int, bytes] = {}
        """Of one that ends inside a step -> hash of the step before, steps since the last of our keys,
        and the tokens behind that step."""
        self.more: dict[int, tuple[int, ...]] = {}
        """Of a block within which some of ours end -> their keys."""
        self.more_keys = 0
        """In all of `more`."""
        self.copies: dict[int, int] = {}
        """Of a block that is there more than once -> how often."""

    def __len__(self) -> int:
        return len(self.blocks) + len(self.tails)


class _Group:
    """A group beside the first that needs every block: what it holds, and what it needs."""

    __slots__ = ("held", "kind", "window")

    def __init__(self, kind: str, window: int) -> None:
        self.kind = kind
        self.window = window
        """Tokens that it looks back; 0: not told."""
        self.held: dict[int, int] = {}
        """The engine's hash of a block -> copies."""

    def blocks_needed(self, blocks: int, block_tokens: int) -> int:
        """Of the last `blocks` blocks before the end of a prompt, those that must be held."""
        if self.kind in _LOOKS_BACK_ONE:
            return min(1, blocks)
        if self.kind in _LOOKS_BACK_A_WINDOW and self.window:
            return min(-(-(self.window - 1) // block_tokens), blocks)
        return blocks


class Mirror:
    """What one endpoint holds."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: of ours."""
        self.block_tokens: Final = block_tokens
        self.step_tokens: Final = step_tokens_of(block_tokens)
        self.counts = MirrorCounts()
        self.engine_block_tokens = 0
        """The most that a block of the engine had."""
        self.adapters: set[str] = set()
        """LoRA adapters that were named."""
        self.counting = True
        """Copies are counted; False: a removal is one of all."""
        self.cut = False
        """Blocks are held that are not kept here: there was no room."""
        self.tiers: dict[str, _Tier] = {DEVICE: _Tier()}
        self.groups: dict[int, _Group] = {}
        """All but the first of those that need every block."""
        self._first_group: int | None = None
        self._named: dict[int, int] = {}
        """Hash of a step -> the engine's hash of the block that ends there; where there are groups."""
        self._steps_per_block: Final = block_tokens // self.step_tokens
        self._inside: Final = [-(steps << _KEY_BITS) for steps in range(self._steps_per_block)]
        """By the steps behind a key: less the hash of a step it is the `_end` there."""
        self.tail_blocks: Final = -(-self.step_tokens // _TAIL_TOKENS_MAX)
        """A block that ends inside a step counts as so many, by the memory that its tokens take."""
        self._floating: OrderedDict[int, list[_Floating]] = OrderedDict()
        """By the parent that is not known; the oldest first."""
        self._floating_at: dict[int, _Floating] = {}
        """The engine's hash of a block -> the run in which it is."""
        self._floating_bytes = 0
        self.floating_runs = 0
        """Whose parent is not known."""

    def __len__(self) -> int:
        """Blocks of the engine that are kept, of all tiers and groups; of tails `tail_blocks` each."""
        return self._taken(self.tail_blocks)

    @property
    def rows(self) -> int:
        """The same in rows of the memory plan: a block of a tail takes one more, for its tokens."""
        return self._taken(2 * self.tail_blocks)

    def _taken(self, by_tail: int) -> int:
        if len(self.tiers) == 1 and not self.groups:
            device = self.tiers[DEVICE]
            return len(device.blocks) + by_tail * len(device.tails)
        taken = sum(len(group.held) for group in self.groups.values())
        for tier in self.tiers.values():
            taken += len(tier.blocks) + by_tail * len(tier.tails)
        return taken

    @property
    def numbers(self) -> int:
        """That are kept of where blocks end, and of keys that end within; a list of these is two."""
        return sum(
            len(tier.blocks) + 2 * len(tier.more) + tier.more_keys for tier in self.tiers.values()
        )

    @property
    def copies(self) -> int:
        """Blocks of the device, each copy counted."""
        device = self.tiers[DEVICE]
        return len(device) + sum(device.copies.values()) - len(device.copies)

    def unbalanced(self, blocks_total: int) -> bool:
        """More is held than the device has blocks: what it tells does not balance."""
        return self.counting and self.copies > max(0, blocks_total - 1)

    # Events.

    def store(self, stored: Stored, changes: list[Changed], room: int) -> Fault | None:
        """Follow a run of blocks; what becomes held of ours goes to `changes`.

        `room`: by how much `len` may grow; what is more is not kept.
        """
        if not stored.local:
            self.counts.skipped += len(stored.hashes)
            return None
        first = self._first_group
        if stored.kind not in LOOKS_BACK_TO_THE_START or first not in (None, stored.group):
            return self._store_in_group(stored, room)
        if first is None and stored.tier == DEVICE:
            self._first_group = stored.group
        if stored.sparse:
            return Fault.NOT_DENSE
        tier = self.tiers.get(stored.tier)
        if tier is None:
            if len(self.tiers) >= TIERS_MAX:
                self.counts.skipped += len(stored.hashes)
                return None
            tier = self.tiers[stored.tier] = _Tier()
        if not stored.tokens:
            self._store_hashes(stored, tier, changes, room)
        else:
            self._store_tokens(stored, tier, changes, room)
        return None

    def _store_tokens(self, stored: Stored, tier: _Tier, changes: list[Changed], room: int) -> None:
        """Follow a run, and those that waited for it."""
        if stored.adapter and len(self.adapters) < ADAPTERS_MAX:
            self.adapters.add(stored.adapter)
        runs = [stored]
        while runs:
            run = runs.pop()
            start = self._start_of(run)
            if start is None:
                self._float(run)
                continue
            before = len(self) if self._floating else 0
            keys = self._follow(run, start, tier, room)
            if keys:
                changes.append(Changed(True, run.tier, keys))
            if self._floating:
                room -= len(self) - before
                for block in run.hashes:
                    runs += [self._attached(waiting) for waiting in self._floating.pop(block, ())]

    def remove(self, removed: Removed, changes: list[Changed]) -> None:
        """Blocks are gone, or one copy of them; keys that are not held any more go to `changes`."""
        if not removed.local:
            return
        if removed.group in self.groups or self._first_group not in (None, removed.group):
            self._remove_from_group(removed)
            return
        tier = self.tiers.get(removed.tier)
        if tier is None:
            self.counts.unknown += len(removed.hashes)
            return
        gone: list[int] = []
        if removed.copies_left is None and not (tier.copies or tier.more or self._named):
            self._remove_usual(removed, tier, gone)
            if gone:
                changes.append(Changed(False, removed.tier, gone))
            return
        for at, block in enumerate(removed.hashes):
            left = 0 if removed.copies_left is None else removed.copies_left[at]
            if left > 0:
                continue
            if removed.copies_left is None and tier.copies and self._one_less(block, tier):
                continue
            if self._drop(block, tier, gone):
                self.counts.removed += 1
            elif block in self._floating_at:
                self._cut_floating(block)
            else:
                self.counts.unknown += 1
        if gone:
            changes.append(Changed(False, removed.tier, gone))

    def _remove_usual(self, removed: Removed, tier: _Tier, gone: list[int]) -> None:
        """As `remove`, where a block is in one table and nowhere else."""
        blocks, tails = tier.blocks, tier.tails
        before = len(blocks) + len(tails)
        for block in removed.hashes:
            end = blocks.pop(block, None)
            if end is not None:
                if end >= 0:
                    gone.append(end)
            elif tails.pop(block, None) is not None:
                continue
            elif block in self._floating_at:
                self._cut_floating(block)
            else:
                self.counts.unknown += 1
        self.counts.removed += before - len(blocks) - len(tails)

    def adopt(self, changes: Iterable[Changed]) -> None:
        """Hold keys, and hold them no more, of blocks whose names are not known: each its own."""
        for changed in changes:
            tier = self.tiers.setdefault(changed.tier, _Tier())
            if changed.held:
                tier.blocks.update(zip(changed.keys, changed.keys, strict=True))
            else:
                for key in changed.keys:
                    tier.blocks.pop(key, None)

    def give_up(self, blocks: int, changes: list[Changed]) -> int:
        """Forget `blocks` of `len`, those that were stored last, tails first; return how many."""
        self.cut = True
        given = 0
        # `popitem` goes by what was deleted at the end of a table once, `reversed` each time.
        for name, tier in reversed(self.tiers.items()):
            gone: list[int] = []
            while given < blocks and tier.tails:
                self._dropped(tier.tails.popitem()[0], None, tier, gone)
                given += self.tail_blocks
            if gone:
                changes.append(Changed(False, name, gone))
        for name, tier in reversed(self.tiers.items()):
            gone = []
            while given < blocks and tier.blocks:
                self._ended(*tier.blocks.popitem(), tier, gone)
                given += 1
            if gone:
                changes.append(Changed(False, name, gone))
        for group in self.groups.values():
            while given < blocks and group.held:
                group.held.popitem()
                given += 1
        return given

    def supported(self, steps: Sequence[int], blocks: int) -> int:
        """Of `blocks` of ours that are held, how many a prompt can use that needs all groups.

        `steps`: the chain of the prompt in steps.
        """
        size, odd = divmod(self.engine_block_tokens, self.step_tokens)
        if not self.groups:
            return blocks
        if odd or not size:
            return 0
        groups = list(self.groups.values())
        in_a_row = [0] * len(groups)
        best = 0
        for number in range(1, min(len(steps), blocks * self._steps_per_block) // size + 1):
            block = self._named.get(steps[number * size - 1], -1)
            for at, group in enumerate(groups):
                in_a_row[at] = in_a_row[at] + 1 if block in group.held else 0
            ours, inside = divmod(number * size, self._steps_per_block)
            if not inside and all(
                run >= group.blocks_needed(number, self.engine_block_tokens)
                for run, group in zip(in_a_row, groups, strict=True)
            ):
                best = ours
        return best

    # Chains.

    def _start_of(self, stored: Stored) -> _Start | None:
        """Where the run begins; None: its parent is not known."""
        parent = stored.parent
        if parent is None:
            salt = stored.extras[0].salt if stored.extras else ""
            return _Start(token_seed(stored.adapter, salt), 0)
        for tier in self.tiers.values():
            end = tier.blocks.get(parent)
            if end is not None:
                return _Start(*_step_of(end))
            tail = tier.tails.get(parent)
            if tail is not None:
                end = int.from_bytes(tail[:_END_BYTES], "little", signed=True)
                return _Start(*_step_of(end), tail[_END_BYTES:])
        return None

    def _follow(self, stored: Stored, start: _Start, tier: _Tier, room: int) -> list[int]:
        """Note each block of the run, which begins at `start`; return the keys that are new."""
        size = stored.block_tokens
        self.engine_block_tokens = max(self.engine_block_tokens, size)
        steps, odd = divmod(size, self.step_tokens)
        even = not (odd or start.rest or stored.extras) and len(stored.hashes) <= room
        new: list[int] = []
        if even and self._steps_per_block % steps == 0 and start.steps % steps == 0:
            self._follow_even(stored, start, tier, steps, new)
        else:
            self._follow_odd(stored, start, tier, room, new)
        return new

    def _follow_even(
        self, stored: Stored, start: _Start, tier: _Tier, steps: int, new: list[int]
    ) -> None:
        """Some blocks of the engine make one of ours, and there is room for all."""
        chain = chained(stored.tokens, start.key, self.step_tokens * TOKEN_BYTES)
        hashes = chain[steps - 1 :: steps] if steps > 1 else chain
        blocks = tier.blocks
        before = len(blocks)
        at, per_block, inside = start.steps, self._steps_per_block, self._inside
        for block, key in zip(stored.hashes, hashes, strict=True):
            at += steps
            if at == per_block:
                at = 0
            if block in blocks:
                self._once_more(block, tier)
                continue
            if at:
                blocks[block] = inside[at] - key
            else:
                blocks[block] = key
                new.append(key)
        if self.groups:
            self._named.update(zip(hashes, stored.hashes, strict=True))
        self.counts.stored += len(blocks) - before

    def _follow_odd(
        self, stored: Stored, start: _Start, tier: _Tier, room: int, new: list[int]
    ) -> None:
        """Blocks of the engine that are no part of ours, or that have more than tokens."""
        step_bytes = self.step_tokens * TOKEN_BYTES
        block_bytes = stored.block_tokens * TOKEN_BYTES
        end = len(start.rest)
        tokens = start.rest + stored.tokens
        begins = _begins(stored, end, step_bytes) if stored.extras else {}
        keys = _chain(tokens, start.key, step_bytes, begins)
        blocks, tails = tier.blocks, tier.tails
        done, kept, per_block = 0, 0, self._steps_per_block
        for number, block in enumerate(stored.hashes):
            end += block_bytes
            steps, rest = divmod(end, step_bytes)
            first, done = done + 1, steps
            if block in blocks or block in tails:
                self._once_more(block, tier)
                continue
            taken = self.tail_blocks if rest else 1
            if room < taken:
                self.cut = True
                self.counts.skipped += 1
                continue
            kept += 1
            room -= taken
            # Those of ours that end within the block.
            ended = keys[first + -(start.steps + first) % per_block : steps + 1 : per_block]
            new += ended
            at = (start.steps + steps) % per_block
            key = keys[steps]
            if rest:
                if steps in begins:
                    key = with_media(
                        key, (each for where, each in begins[steps] if where <= number)
                    )
                head = _end(key, at).to_bytes(_END_BYTES, "little", signed=True)
                tails[block] = head + tokens[end - rest : end]
            else:
                blocks[block] = _end(key, at)
                if not at:
                    # It is told by the end.
                    ended.pop()
                if self.groups:
                    self._named[key] = block
            if ended:
                tier.more[block] = tuple(ended)
                tier.more_keys += len(ended)
        self.counts.stored += kept

    def _store_hashes(self, stored: Stored, tier: _Tier, changes: list[Changed], room: int) -> None:
        """Blocks without tokens: those that another tier has told are known by it."""
        keys: list[int] = []
        for block in stored.hashes:
            if block in tier.blocks or block in tier.tails:
                self._once_more(block, tier)
                continue
            for other in self.tiers.values():
                end, tail = other.blocks.get(block), other.tails.get(block)
                taken = 1 if tail is None else self.tail_blocks
                if room >= taken and (end is not None or tail is not None):
                    break
            else:
                self.counts.skipped += 1
                continue
            room -= taken
            self.counts.stored += 1
            more = other.more.get(block)
            if more:
                tier.more[block] = more
                tier.more_keys += len(more)
                keys += more
            if end is not None:
                tier.blocks[block] = end
                if end >= 0:
                    keys.append(end)
            elif tail is not None:
                tier.tails[block] = tail
        if keys:
            changes.append(Changed(True, stored.tier, keys))

    def _once_more(self, block: int, tier: _Tier) -> None:
        if self.counting:
            tier.copies[block] = tier.copies.get(block, 1) + 1

    def _one_less(self, block: int, tier: _Tier) -> bool:
        """Whether a copy is left of `block`."""
        count = tier.copies.pop(block, 1) - 1
        if count > 1:
            tier.copies[block] = count
        return count > 0

    def _drop(self, block: int, tier: _Tier, gone: list[int]) -> bool:
        """`block` is held no more; False: it was not known."""
        end = tier.blocks.pop(block, None)
        if end is not None:
            self._ended(block, end, tier, gone)
            return True
        if tier.tails.pop(block, None) is None:
            return False
        self._dropped(block, None, tier, gone)
        return True

    def _ended(self, block: int, end: int, tier: _Tier, gone: list[int]) -> None:
        """`block`, which is no tail, is held no more."""
        if end >= 0:
            gone.append(end)
        self._dropped(block, end, tier, gone)

    def _dropped(self, block: int, end: int | None, tier: _Tier, gone: list[int]) -> None:
        """What is kept beside the row of `block` goes with it; `end`: of one that is no tail."""
        if tier.copies:
            tier.copies.pop(block, None)
        if tier.more:
            more = tier.more.pop(block, ())
            tier.more_keys -= len(more)
            gone += more
        if end is not None and self._named:
            self._named.pop(_step_of(end)[0], None)

    # Runs whose parent is not known.

    def _float(self, stored: Stored) -> None:
        self.counts.orphans += len(stored.hashes)
        assert stored.parent is not None, "a first run has no parent to wait for"
        at = self._floating_at
        if len(stored.tokens) > FLOATING_BYTES_MAX or any(block in at for block in stored.hashes):
            return
        run = _Floating(stored, len(stored.hashes))
        self._floating.setdefault(stored.parent, []).append(run)
        at.update(dict.fromkeys(stored.hashes, run))
        self._floating_bytes += len(stored.tokens)
        self.floating_runs += 1
        while (
            self.floating_runs > FLOATING_RUNS_MAX
            or self._floating_bytes > FLOATING_BYTES_MAX
            or len(at) > FLOATING_BLOCKS_MAX
        ):
            _, oldest = self._floating.popitem(last=False)
            for gone in oldest:
                self._attached(gone)

    def _attached(self, run: _Floating) -> Stored:
        """What is left of a run that floats no more."""
        stored = run.stored
        self._floating_bytes -= len(stored.tokens)
        self.floating_runs -= 1
        count = run.count
        for block in stored.hashes[:count]:
            self._floating_at.pop(block, None)
        if count == len(stored.hashes):
            return stored
        return Stored(
            hashes=stored.hashes[:count],
            parent=stored.parent,
            tokens=stored.tokens[: count * stored.block_tokens * TOKEN_BYTES],
            block_tokens=stored.block_tokens,
            tier=stored.tier,
            adapter=stored.adapter,
            extras=stored.extras[:count],
            group=stored.group,
            kind=stored.kind,
        )

    def _cut_floating(self, block: int) -> None:
        """What follows `block` in its run leads nowhere any more."""
        run = self._floating_at[block]
        gone = None
        # From the end, so that each block of a run is gone by once, in whatever order they go.
        while gone != block:
            run.count -= 1
            gone = run.stored.hashes[run.count]
            self._floating_at.pop(gone, None)

    # Groups.

    def _store_in_group(self, stored: Stored, room: int) -> Fault | None:
        group = self.groups.get(stored.group)
        if group is None:
            if len(self.groups) >= GROUPS_MAX:
                return Fault.NOT_DENSE
            if not self.groups:
                self._name_all()
            group = self.groups[stored.group] = _Group(stored.kind, stored.window)
        if stored.tier != DEVICE:
            return None
        for block in stored.hashes:
            copies = group.held.get(block, 0)
            if not copies:
                if room <= 0:
                    self.cut = True
                    self.counts.skipped += 1
                    continue
                room -= 1
            group.held[block] = copies + 1 if self.counting else 1
        return None

    def _remove_from_group(self, removed: Removed) -> None:
        group = self.groups.get(removed.group)
        if group is None or removed.tier != DEVICE:
            return
        for at, block in enumerate(removed.hashes):
            told = removed.copies_left
            left = group.held.get(block, 1) - 1 if told is None else told[at]
            if left > 0:
                group.held[block] = left
            else:
                group.held.pop(block, None)

    def _name_all(self) -> None:
        """From now on it matters which block of the engine ends where."""
        for tier in self.tiers.values():
            self._named.update((_step_of(end)[0], block) for block, end in tier.blocks.items())


def _end(step: int, steps: int) -> int:
    """Of a block that ends with the hash `step`, `steps` behind the last of our keys: a key itself."""
    return -(steps << _KEY_BITS | step) if steps else step


def _step_of(end: int) -> tuple[int, int]:
    """What `_end` was made of."""
    return (end, 0) if end >= 0 else (-end & _KEY_MASK, -end >> _KEY_BITS)


def _begins(stored: Stored, behind: int, step_bytes: int) -> dict[int, list[tuple[int, str]]]:
    """Step, of those from the one that the run finds open -> (block in the run, medium that begins).

    `behind`: bytes of that step before the run.
    """
    begins: dict[int, list[tuple[int, str]]] = {}
    for number, extra in enumerate(stored.extras):
        for identifier, offset in extra.media:
            at = behind + (number * stored.block_tokens + offset) * TOKEN_BYTES
            begins.setdefault(at // step_bytes, []).append((number, identifier))
    return begins


def _chain(
    tokens: bytes, seed: int, step_bytes: int, begins: dict[int, list[tuple[int, str]]]
) -> list[int]:
    """`seed`, and the hash of each whole step behind it."""
    steps = len(tokens) // step_bytes
    keys = [seed]
    if not begins:
        keys += chained(tokens, seed, step_bytes)
        return keys
    for step in range(steps):
        seed = with_media(seed, (each for _, each in begins.get(step, ())))
        seed = xxhash.xxh64_intdigest(tokens[step * step_bytes : (step + 1) * step_bytes], seed)
        keys.append(seed)
    return keys
