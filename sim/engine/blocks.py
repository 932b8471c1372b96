"""The paged KV cache of one engine: which blocks are held, cached, free, and next to be evicted.

The order is vLLM's (`v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`), and the recorded run of
a real engine in the tests checks it:

- One block is reserved; the others begin free.
- A block that leaves its last holder goes to the back of the free list if it carries a hash (it may
  be hit again), to the front if it does not. A request lets its blocks go tail first, so the tail
  of a prefix is evicted before its head.
- A hash is dropped only when the block itself is taken for something else.
- Nothing is deduplicated: two requests that miss together make two blocks with one hash, and the
  older is hit.

What a block holds is told by a chain: keys that stand for all up to and with their blocks (see
`sim/pods/tokens.py`), and where the blocks of each key end. Two chains with the same key share its
blocks as far as both have them. Blocks of one chain that follow each other and are held together
are one `Run`, however many keys they have; a run is split where that ends to be true. So a prompt
costs as many runs as there are turns in its conversation, not as it has blocks, and hits are the
same: block numbers are the one thing that is not modelled, and nothing depends on them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol


class Run:
    """Blocks `start` to `end` of a chain, in its pieces `first` to `last`, with one set of holders.

    A piece is one key's blocks. At least one block, and at least one of each piece, is in the run.
    """

    __slots__ = ("after", "before", "end", "ends", "first", "holders", "keys", "last", "start")

    def __init__(
        self,
        keys: Sequence[int],
        ends: Sequence[int],
        start: int,
        end: int,
        first: int,
        last: int,
        holders: int,
    ) -> None:
        self.keys = keys
        self.ends = ends
        self.start = start
        self.end = end
        self.first = first
        self.last = last
        self.holders = holders
        self.before = self
        self.after = self

    @property
    def blocks(self) -> int:
        """How many."""
        return self.end - self.start


class Holding:
    """The blocks of one request, in the order of its chain."""

    __slots__ = ("open_blocks", "piece", "registered_blocks", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.registered_blocks = 0
        """Blocks in `runs`."""
        self.open_blocks = 0
        """Blocks without a hash: not computed to their end."""
        self.piece = 0
        """Of the chain: the first whose blocks are not all registered, or one before it."""

    @property
    def blocks(self) -> int:
        return self.registered_blocks + self.open_blocks


class PoolWatcher(Protocol):
    """Is told which blocks can be hit and which cannot any more, in the order of vLLM's KV events.

    Of a block that is there more than once it is told for each copy.
    """

    def stored(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Blocks `start` to `end` of a chain can be hit from now on."""
        ...

    def forgotten(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Blocks `start` to `end` of a chain are taken for something else, the last one first."""
        ...

    def cleared(self) -> None:
        """No block can be hit any more."""
        ...


class BlockPool:
    """`blocks_total` blocks, one of them reserved. No time, no tokens: keys and counts."""

    def __init__(self, blocks_total: int) -> None:
        """At least 2 blocks, or ValueError."""
        if blocks_total < 2:
            raise ValueError(f"A block pool needs at least 2 blocks, got {blocks_total}.")
        self.blocks_total = blocks_total
        self.blocks_usable = blocks_total - 1
        """All but the reserved one."""
        self._blank_blocks = blocks_total - 1
        """Free and without a hash: all of them are taken before any with one."""
        self._cached_blocks = 0
        """Free with a hash."""
        self.duplicate_blocks = 0
        """Held blocks counted once for each holder but the first."""
        self._order = Run((), (), 0, 0, 0, 0, 0)
        """Head of the ring of free runs in the order of eviction; a run's last block goes first."""
        self._runs: dict[int, tuple[Run, ...]] = {}
        """Those with blocks of a key; of two with the same block the older comes first."""
        self._holdings: dict[Holding, None] = {}
        self.watcher: PoolWatcher | None = None

    @property
    def blocks_free(self) -> int:
        """Blocks without a holder, cached or not."""
        return self._blank_blocks + self._cached_blocks

    @property
    def blocks_used(self) -> int:
        """Distinct blocks with a holder."""
        return self.blocks_usable - self._blank_blocks - self._cached_blocks

    @property
    def usage(self) -> float:
        """`vllm:kv_cache_usage_perc`: the held share, 0 to 1; a warm idle cache reads 0."""
        return self.blocks_used / self.blocks_usable

    def match(self, keys: Sequence[int], ends: Sequence[int], blocks_max: int) -> tuple[int, int]:
        """The longest cached head, at most `blocks_max` blocks, and how many of them are free.

        The chain has as many blocks, or more.
        """
        position = piece = free = 0
        while position < blocks_max:
            run, stop, piece = self._oldest(keys, ends, piece, position, blocks_max)
            if run is None:
                break
            if not run.holders:
                free += stop - position
            position = stop
        return position, free

    def hold(self, keys: Sequence[int], ends: Sequence[int], blocks: int) -> Holding:
        """A holding of the first `blocks` blocks, all of which `match` has found."""
        holding = Holding()
        self._holdings[holding] = None
        position = piece = 0
        while position < blocks:
            run, stop, piece = self._oldest(keys, ends, piece, position, blocks)
            assert run is not None, "the caller holds what was matched"
            if run.start < position:
                run = self._split(run, position)
            if run.end > stop:
                self._split(run, stop)
            if run.holders:
                self.duplicate_blocks += stop - position
            else:
                _unlink(run)
                self._cached_blocks -= stop - position
            run.holders += 1
            holding.runs.append(run)
            position = stop
        holding.piece = piece
        holding.registered_blocks = blocks
        return holding

    def take(self, count: int) -> None:
        """Take the next `count` free blocks for holdings; what they held is forgotten.

        The caller counts them as `open_blocks` of the holdings.
        """
        blank, cached = self._blank_blocks, self._cached_blocks
        if count <= blank:
            self._blank_blocks = blank - count
            return
        count -= blank
        assert count <= cached, "the caller asks for no more than there is"
        self._blank_blocks = 0
        self._cached_blocks = cached - count
        watcher = self.watcher
        run = self._order.after
        while 0 < run.end - run.start <= count:
            count -= run.end - run.start
            self._forget(run, run.first)
            if watcher is not None:
                watcher.forgotten(run.keys, run.ends, run.start, run.end)
            run = run.after
            # Two runs that are gone must not keep each other alive.
            run.before = self._order
        if count:
            run.end -= count
            if watcher is not None:
                watcher.forgotten(run.keys, run.ends, run.end, run.end + count)
            piece = run.last
            while piece > run.first and run.ends[piece - 1] >= run.end:
                piece -= 1
            if piece < run.last:
                self._forget(run, piece + 1)
                run.last = piece
        self._order.after = run

    def register(
        self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int
    ) -> None:
        """From now on the holding's blocks before `upto` can be hit: they are scheduled."""
        position = holding.registered_blocks
        if position >= upto:
            return
        holding.open_blocks -= upto - position
        holding.registered_blocks = upto
        first = bisect_right(ends, position, holding.piece)
        last = holding.piece = bisect_left(ends, upto, first)
        runs = holding.runs
        run = runs[-1] if runs else None
        if (
            run is not None
            and run.keys is keys
            and run.holders == 1
            and run.end == position
            and (run.last < first or not self._have_others(run, upto))
        ):
            run.end = upto
            first, run.last = run.last + 1, last
        else:
            run = Run(keys, ends, position, upto, first, last, 1)
            runs.append(run)
        fresh = keys[first : last + 1]
        known, alone = self._runs, (run,)
        if known.keys().isdisjoint(fresh):
            known.update(dict.fromkeys(fresh, alone))
        else:
            for key in fresh:
                known[key] = known.get(key, ()) + alone
        if self.watcher is not None:
            self.watcher.stored(keys, ends, position, upto)

    def extend(self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int) -> bool:
        """`register`, if the blocks only make the holding's last run longer and nobody else has any
        under the last key of that run, nor under those that follow; False, and nothing changed,
        otherwise.

        What other holdings register meanwhile makes no difference then: whoever comes to the same
        place of the chain comes later.
        """
        run = holding.runs[-1] if holding.runs else None
        if (
            run is None
            or run.keys is not keys
            or run.holders != 1
            or run.end != holding.registered_blocks
            or len(self._runs[keys[run.last]]) != 1
        ):
            return False
        if ends[run.last] < upto:
            last = bisect_left(ends, upto, run.last)
            fresh = keys[run.last + 1 : last + 1]
            if not self._runs.keys().isdisjoint(fresh):
                return False
            self._runs.update(dict.fromkeys(fresh, (run,)))
            run.last = holding.piece = last
        start = run.end
        holding.open_blocks -= upto - start
        run.end = holding.registered_blocks = upto
        if self.watcher is not None:
            self.watcher.stored(keys, ends, start, upto)
        return True

    def release(self, holding: Holding) -> None:
        """Let all blocks of a holding go, last block first."""
        self._blank_blocks += holding.open_blocks
        last = self._order.before
        for run in reversed(holding.runs):
            run.holders -= 1
            if run.holders:
                self.duplicate_blocks -= run.blocks
                continue
            self._cached_blocks += run.blocks
            last.after = run
            run.before = last
            last = run
        last.after = self._order
        self._order.before = last
        del self._holdings[holding]
        holding.runs = []
        holding.registered_blocks = holding.open_blocks = 0

    def clear(self) -> bool:
        """Forget all that is cached; False, and nothing changed, while anybody holds blocks."""
        if self._holdings:
            return False
        self._runs.clear()
        self._order = Run((), (), 0, 0, 0, 0, 0)
        self._blank_blocks, self._cached_blocks = self.blocks_usable, 0
        if self.watcher is not None:
            self.watcher.cleared()
        return True

    def free_runs(self) -> Iterator[Run]:
        """What is cached and without a holder, next to be evicted first."""
        run = self._order.after
        while run is not self._order:
            yield run
            run = run.after

    def check(self) -> None:
        """AssertionError if a block is lost or used twice: every count told in two ways."""
        free = 0
        for run in self.free_runs():
            assert not run.holders, "a free run has no holder"
            assert run.blocks > 0, "a run has blocks"
            assert run.after.before is run, "the ring is whole"
            free += run.blocks
        assert free == self._cached_blocks, "the free list has the blocks that are counted"
        holders: dict[Run, int] = {}
        for holding in self._holdings:
            assert sum(run.blocks for run in holding.runs) == holding.registered_blocks
            for run in holding.runs:
                holders[run] = holders.get(run, 0) + 1
        assert all(run.holders == count for run, count in holders.items()), "each holder counts"
        held = sum(run.blocks for run in holders)
        opened = sum(holding.open_blocks for holding in self._holdings)
        assert held + opened + free + self._blank_blocks == self.blocks_usable, "free + used = all"
        everything = {run for runs in self._runs.values() for run in runs}
        for run in everything:
            for piece in range(run.first, run.last + 1):
                assert run in self._runs[run.keys[piece]], "a run is known by all its keys"
                begin = run.ends[piece - 1] if piece else 0
                assert max(run.start, begin) < min(run.end, run.ends[piece]), "and by no other"
        assert sum(run.blocks for run in everything) == held + free, "each run is held or free"
        twice = sum(run.blocks * (count - 1) for run, count in holders.items())
        assert twice == self.duplicate_blocks, "duplicates are counted"

    def _oldest(
        self, keys: Sequence[int], ends: Sequence[int], piece: int, position: int, upto: int
    ) -> tuple[Run | None, int, int]:
        """The oldest run that has block `position` of the chain, in its piece `piece`, up to where,
        at most `upto`, it is the oldest, and the piece of the block after that.
        """
        found: Run | None = None
        while position < upto:
            end = ends[piece]
            stop = min(end, upto)
            for run in self._runs.get(keys[piece], ()):
                # Its own chain may have fewer blocks of this key, and more behind them.
                run_end = min(run.end, run.ends[piece])
                if run.start > position:
                    stop = min(stop, run.start)
                elif position < run_end:
                    stop = min(stop, run_end)
                    break
            else:
                break
            if found is not None and run is not found:
                break
            found = run
            position = stop
            if stop < end:
                break
            piece += 1
        return found, position, piece

    def _have_others(self, run: Run, upto: int) -> bool:
        """Whether other runs have blocks of the last key of `run`, from its end and before `upto`."""
        piece = run.last
        runs = self._runs[run.keys[piece]]
        return len(runs) > 1 and any(
            other.start < upto and run.end < min(other.end, other.ends[piece])
            for other in runs
            if other is not run
        )

    def _forget(self, run: Run, first: int) -> None:
        """`run` has no blocks of the keys from piece `first` on any more."""
        known = self._runs
        for key in run.keys[first : run.last + 1]:
            runs = known[key]
            if len(runs) == 1:
                del known[key]
            else:
                known[key] = tuple(other for other in runs if other is not run)

    def _split(self, run: Run, place: int) -> Run:
        """Cut `run` before block `place`: it keeps the head, the tail is returned."""
        keys, ends = run.keys, run.ends
        piece = bisect_right(ends, place, run.first)
        tail = Run(keys, ends, place, run.end, piece, run.last, run.holders)
        run.end, run.last = place, piece
        if piece > run.first and ends[piece - 1] == place:
            run.last -= 1
        else:
            runs = self._runs[keys[piece]]
            after = runs.index(run) + 1
            self._runs[keys[piece]] = (*runs[:after], tail, *runs[after:])
            piece += 1
        for key in keys[piece : tail.last + 1]:
            runs = self._runs[key]
            self._runs[key] = tuple(tail if other is run else other for other in runs)
        if not run.holders:
            tail.before, tail.after = run.before, run
            run.before.after = tail
            run.before = tail
            return tail
        for holding in self._holdings:
            if run in holding.runs:
                holding.runs.insert(holding.runs.index(run) + 1, tail)
        return tail


def _unlink(run: Run) -> None:
    run.before.after = run.after
    run.after.before = run.before
