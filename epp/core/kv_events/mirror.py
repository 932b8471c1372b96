"""The mirror of one rank's cached blocks, translated from the engine's events into our own keys.

An engine names a block by a hash that only it can compute. `Mirror` keeps, for each cached block,
the chained hashes of *ours* that stand for it (`core/prompt/token_blocks`). It turns events into
keys that are stored or removed.

**Steps.** A key stands for a block of `block_tokens` tokens, and an engine's block may be shorter.
The chain is therefore computed in steps of 16 tokens, if 16 divides our block's length. If a block
of the engine ends inside one of ours, the mirror keeps the hash of that step, because other prompts
continue there. If a block ends inside a step, as most blocks of one token do, the mirror also keeps
the tokens after the last full step. Each such block has its own copy, which is smaller than a
reference to its neighbours' tokens and outlives them. One of our blocks counts as cached while the
engine's block in which it ends is cached. This is enough, because engines evict the end of a prompt
before its beginning.

**Copies.** One hash may belong to several physical blocks, and each copy is stored and removed. If
the copies exceed the engine's number of blocks, its stores and removals do not balance
(`unbalanced`). From then on, a removal counts for all copies, which may drop too much and never too
little.

**Orphans.** The parent of a run may be unknown, because its store was lost or came before the
subscription. Such runs are kept apart, within bounds, until the parent comes. To attach them
elsewhere would mistake one prompt for another.

**Groups.** A hybrid model has one chain of blocks for each group, with the same hashes. Blocks of
groups that look back to the start become our keys. For other groups, the mirror keeps the cached
steps. `supported` returns how much of a prompt is usable if it needs all groups at its end.
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
"""Maximum size in bytes of the tokens of all runs with an unknown parent: a million tokens."""
FLOATING_BLOCKS_MAX: Final = 65_536
"""Maximum number of blocks in all runs with an unknown parent; a block may have one token."""
TIERS_MAX: Final = 8
GROUPS_MAX: Final = 16
ADAPTERS_MAX: Final = 4_096

LOOKS_BACK_TO_THE_START: Final = frozenset(
    {"", "full_attention", "mla_attention", "sink_full_attention"}
)
"""Kinds of block groups (of hybrid models) for which the engine needs every block of a prompt."""
_LOOKS_BACK_A_WINDOW: Final = frozenset({"sliding_window", "sliding_window_mla"})
_LOOKS_BACK_ONE: Final = frozenset({"mamba"})

_KEY_BITS: Final = 64
_KEY_MASK: Final = (1 << _KEY_BITS) - 1
_END_BYTES: Final = 10
"""Size in bytes of the value of `_end` with which a tail begins, before the tokens."""
_TAIL_TOKENS_MAX: Final = 48
"""Number of tokens whose bytes take about as much memory as a block with its key takes."""


class Changed(Struct, gc=False):
    """Block keys in one tier that an engine stored (`held` is True) or removed (`held` is False)."""

    held: bool
    tier: str
    keys: list[int]


class MirrorCounts(Struct):
    """The numbers of blocks that an engine stored or removed, or that the mirror ignored, since the
    mirror was made.
    """

    stored: int = 0
    removed: int = 0
    orphans: int = 0
    """Number of stored blocks whose parent was unknown when they were stored. The parents of some
    may have been stored since.
    """
    unknown: int = 0
    """Number of removed blocks that the mirror did not know as stored."""
    skipped: int = 0
    """Number of blocks that were not stored: not local, hashes without tokens, above the memory
    limit, or in a tier beyond `TIERS_MAX`.
    """


class _Start(Struct, frozen=True, gc=False):
    """The position in a chain of hashes at which a run of blocks begins."""

    key: int
    """Hash of the last step before the run, or the seed of the chain, combined with the media that
    begin after it.
    """
    steps: int
    """Number of steps between the run and the end of the last whole block of the picker's index
    before it.
    """
    rest: bytes = b""
    """Token ids between the end of the last step and the run, as bytes; b"" if there are none."""


class _Floating(Struct, gc=False):
    """A run of blocks that cannot be attached, because its parent is unknown."""

    stored: Stored
    count: int
    """Number of leading blocks of the run that the engine has not removed since."""


class _Tier:
    """The blocks of one tier, by the engine's hashes. A key stands for one block of the picker's
    index.
    """

    __slots__ = ("blocks", "copies", "more", "more_keys", "tails")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Position at which each block ends, by the engine's hash of the block. It is the key of
        the index's block that ends there, as the very object of the index. If none ends there, it
        is a value of `_end` below 0.
        """
        self.tails: dict[int, bytes] = {}
        """Data of each block that ends inside a step (its tail), by the engine's hash of the block:
        the value of `_end` for the last step before the end, then the tokens after that step.
        """
        self.more: dict[int, tuple[int, ...]] = {}
        """Keys of the index's blocks that end within a block of the engine but not at its end, by
        the engine's hash of the block.
        """
        self.more_keys = 0
        """Total number of keys in `more`, over all blocks."""
        self.copies: dict[int, int] = {}
        """Number of copies of each block that the engine stored more than once, by the engine's
        hash of the block.
        """

    def __len__(self) -> int:
        return len(self.blocks) + len(self.tails)


class _Group:
    """A group of a hybrid model, other than the first that needs every block: its cached blocks,
    and the number of blocks that it needs.
    """

    __slots__ = ("held", "kind", "window")

    def __init__(self, kind: str, window: int) -> None:
        self.kind = kind
        self.window = window
        """Number of tokens that the group looks back from the end of a prompt; 0 if not reported."""
        self.held: dict[int, int] = {}
        """Number of cached copies of each block of the group, by the engine's hash of the block."""

    def blocks_needed(self, blocks: int, block_tokens: int) -> int:
        """Return how many blocks at the end of a prompt of `blocks` blocks must be cached in this
        group so that the engine can continue after them.
        """
        if self.kind in _LOOKS_BACK_ONE:
            return min(1, blocks)
        if self.kind in _LOOKS_BACK_A_WINDOW and self.window:
            return min(-(-(self.window - 1) // block_tokens), blocks)
        return blocks


class Mirror:
    """The cached blocks of one rank, translated from the engine's hashes into the picker's own
    keys.
    """

    def __init__(self, block_tokens: int) -> None:
        """Create an empty mirror; `block_tokens` is the number of tokens in a block of the picker's
        index.
        """
        self.block_tokens: Final = block_tokens
        self.step_tokens: Final = step_tokens_of(block_tokens)
        self.counts = MirrorCounts()
        self.engine_block_tokens = 0
        """Number of tokens in the largest block of the rank so far; 0 if none is known."""
        self.adapters: set[str] = set()
        """Names of the LoRA adapters that appeared in the engine's events."""
        self.counting = True
        """True if the copies of each block are counted; False if a removal counts for all copies."""
        self.cut = False
        """True if some blocks that the engine has cached are missing in the mirror for lack of
        memory.
        """
        self.tiers: dict[str, _Tier] = {DEVICE: _Tier()}
        self.groups: dict[int, _Group] = {}
        """Groups of a hybrid model by number, other than the first that needs every block."""
        self._first_group: int | None = None
        self._named: dict[int, int] = {}
        """Engine's hash of the block that ends with each step, by hash of the step; kept only if
        there are groups.
        """
        self._steps_per_block: Final = block_tokens // self.step_tokens
        self._inside: Final = [-(steps << _KEY_BITS) for steps in range(self._steps_per_block)]
        """Offset for each number of steps since the last block of the picker's index ended. The
        offset minus the hash of a step is the value of `_end` for a block that ends with that step.
        """
        self.tail_blocks: Final = -(-self.step_tokens // _TAIL_TOKENS_MAX)
        """Number that `len` adds for one block with a tail, instead of 1 for a block without. It is
        higher because the tail's tokens use memory too.
        """
        self._floating: OrderedDict[int, list[_Floating]] = OrderedDict()
        """Runs of blocks whose parent is unknown, by the engine's hash of the parent, oldest first.
        """
        self._floating_at: dict[int, _Floating] = {}
        """Run with an unknown parent that contains a block, by the engine's hash of the block."""
        self._floating_bytes = 0
        self.floating_runs = 0
        """Number of runs of blocks that wait because their parent is unknown."""

    def __len__(self) -> int:
        """Return the number of stored blocks of all tiers and groups, by which memory is limited. A
        block with a tail counts as `tail_blocks`.
        """
        return self._taken(self.tail_blocks)

    @property
    def rows(self) -> int:
        """Return the number of rows of tables from which the mirror's memory is estimated. A block
        with a tail counts as more than one, because of its tokens.
        """
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
        """Return the number of integers that the mirror stores for ends of blocks and for keys,
        from which its memory is estimated. A list of keys counts as two.
        """
        return sum(
            len(tier.blocks) + 2 * len(tier.more) + tier.more_keys for tier in self.tiers.values()
        )

    @property
    def copies(self) -> int:
        """Return the number of blocks that the engine has on the device; each copy counts."""
        device = self.tiers[DEVICE]
        return len(device) + sum(device.copies.values()) - len(device.copies)

    def unbalanced(self, blocks_total: int) -> bool:
        """Return whether the events stored more blocks than fit into the device's `blocks_total`,
        so that its stores and removals contradict each other. Return False once copies are no
        longer counted.
        """
        return self.counting and self.copies > max(0, blocks_total - 1)

    # Events.

    def store(self, stored: Stored, changes: list[Changed], room: int) -> Fault | None:
        """Apply the event that a run of blocks was stored. Keys of the picker that become cached
        are added to `changes`. Return a fault if the run is unusable.

        `room` limits the growth of `len`; blocks beyond it are not stored.
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
        """Store the blocks of a run that comes with its tokens, then the runs that waited for it as
        their parent.
        """
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
        """Apply the event that blocks, or one copy of each, were removed. Keys of the picker that
        are no longer cached are added to `changes`.
        """
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
        """Remove blocks in the usual case, in which each block has at most one key and one copy.
        Removed keys are added to `gone`.
        """
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
        """Apply changes of block keys without the engine's hashes, which are unknown here; each key
        then stands for the hash of its own block.
        """
        for changed in changes:
            tier = self.tiers.setdefault(changed.tier, _Tier())
            if changed.held:
                tier.blocks.update(zip(changed.keys, changed.keys, strict=True))
            else:
                for key in changed.keys:
                    tier.blocks.pop(key, None)

    def give_up(self, blocks: int, changes: list[Changed]) -> int:
        """Drop at least `blocks` blocks, as counted by `len`, or all if there are fewer: blocks
        with tails first, and the last stored first. Set `cut`, and return how many were dropped.

        Removed keys are added to `changes`.
        """
        self.cut = True
        given = 0
        # `popitem` skips deleted entries at the end of a table only once; `reversed` skips them
        # each time.
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
        """Return how many of `blocks` cached blocks of the index a prompt can use, because every
        group has what it needs there. Return 0 if there are groups and the engine's blocks do not
        consist of whole steps.

        `steps` are the hashes of the prompt's steps.
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
        """Return the position in a chain of hashes at which the run of blocks begins, or None if
        its parent is unknown.
        """
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
        """Store each block of the run, which begins at `start`. Return the keys of the picker that
        are new.
        """
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
        """Store the blocks of a run whose block size divides that of the index. There must be room
        for all. New keys are added to `new`.
        """
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
        """Store the blocks of a run whose size does not divide that of the index, or that have
        media, a salt or tails. New keys are added to `new`.
        """
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
            # These keys of ours end within the block.
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
                    # The end of the block already stands for this key.
                    ended.pop()
                if self.groups:
                    self._named[key] = block
            if ended:
                tier.more[block] = tuple(ended)
                tier.more_keys += len(ended)
        self.counts.stored += kept

    def _store_hashes(self, stored: Stored, tier: _Tier, changes: list[Changed], room: int) -> None:
        """Store blocks that come without tokens, if the mirror knows their keys from another tier;
        skip the others.
        """
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
        """Remove one copy of the engine's block `block`. Return whether another copy is left."""
        count = tier.copies.pop(block, 1) - 1
        if count > 1:
            tier.copies[block] = count
        return count > 0

    def _drop(self, block: int, tier: _Tier, gone: list[int]) -> bool:
        """Remove the engine's block `block`, and add its keys to `gone`. Return False if the block
        was unknown.
        """
        end = tier.blocks.pop(block, None)
        if end is not None:
            self._ended(block, end, tier, gone)
            return True
        if tier.tails.pop(block, None) is None:
            return False
        self._dropped(block, None, tier, gone)
        return True

    def _ended(self, block: int, end: int, tier: _Tier, gone: list[int]) -> None:
        """Complete the removal of `block`, whose entry in the table was `end` and which had no
        tail.
        """
        if end >= 0:
            gone.append(end)
        self._dropped(block, end, tier, gone)

    def _dropped(self, block: int, end: int | None, tier: _Tier, gone: list[int]) -> None:
        """Remove the data stored for `block` beside its entry in the table; `end` is None for a
        block with a tail.
        """
        if tier.copies:
            tier.copies.pop(block, None)
        if tier.more:
            more = tier.more.pop(block, ())
            tier.more_keys -= len(more)
            gone += more
        if end is not None and self._named:
            self._named.pop(_step_of(end)[0], None)

    # Runs with an unknown parent.

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
        """Remove a run from those with an unknown parent, and return the part of it that is still
        cached.
        """
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
        """Drop `block` and the later blocks of its run, whose parent is unknown, because nothing
        can be attached to them.
        """
        run = self._floating_at[block]
        gone = None
        # Blocks are dropped from the end, so that each is dropped once, in any order of removal.
        while gone != block:
            run.count -= 1
            gone = run.stored.hashes[run.count]
            self._floating_at.pop(gone, None)

    # Groups.

    def _store_in_group(self, stored: Stored, room: int) -> Fault | None:
        group = self.groups.get(stored.group)
        if group is None:
            if len(self.groups) >= GROUPS_MAX:
                return Fault.TOO_MANY_GROUPS
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
        """Begin to record which block of the engine ends with which step. Do so for all blocks that
        are stored already.
        """
        for tier in self.tiers.values():
            self._named.update((_step_of(end)[0], block) for block, end in tier.blocks.items())


def _end(step: int, steps: int) -> int:
    """Return one integer for the position at which a block ends. `step` is the hash of its last
    step, `steps` the number of steps since the last block of the picker's index ended. It is `step`
    itself, which is then a key, if `steps` is 0, else an integer below 0.
    """
    return -(steps << _KEY_BITS | step) if steps else step


def _step_of(end: int) -> tuple[int, int]:
    """Return the pair (step, steps) from which `_end` made the integer `end`."""
    return (end, 0) if end >= 0 else (-end & _KEY_MASK, -end >> _KEY_BITS)


def _begins(stored: Stored, behind: int, step_bytes: int) -> dict[int, list[tuple[int, str]]]:
    """Return the identifiers of the media that begin in each step of a run, as (block in the run,
    identifier), by the number of the step. Step 0 is the step that is unfinished before the run;
    `behind` is the number of its bytes.
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
    """Return a list of `seed` and the chained hash of each whole step of `tokens`, with the media
    in `begins`.
    """
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
