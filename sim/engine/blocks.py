"""The paged KV cache of one simulated engine: used, cached and free blocks, and the order of
eviction.

The order is vLLM's (`v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`). Tests compare it with
the recorded run of a real engine:

- One block is reserved. All others are free at the start.
- A block without holders goes to the back of the free list if it has a hash, because it may be hit
  again. It goes to the front if it has none. A request releases its last block first, so the tail
  of a prefix is evicted before its head.
- A hash is dropped only when the block is reused.
- Nothing is deduplicated: two requests that miss together make two blocks with one hash, and later
  requests hit the older one.

A chain describes the content of a prompt's blocks. It consists of keys, each of which stands for
all text up to the end of its blocks (see `sim/pods/tokens.py`), and the ends of the keys' blocks.
Two chains with the same key share its blocks as far as both have them. Consecutive blocks of one
chain with the same holders are one `Run`, regardless of their number of keys. A run is split when
this is no longer true. A prompt therefore costs as many runs as its conversation has turns, instead
of as many as it has blocks. Hits are the same as in vLLM. Only block numbers are not modelled, and
nothing depends on them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol


class Run:
    """Consecutive KV blocks of one chain with the same holders: blocks `start` to `end`, in the
    chain's pieces `first` to `last`.

    A piece is the blocks of one key. A run has at least one block, and at least one block of each
    of its pieces.
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
        """Number of KV blocks in the run."""
        return self.end - self.start


class Holding:
    """The KV blocks that one request uses, in the order of the request's chain."""

    __slots__ = ("open_blocks", "piece", "registered_blocks", "runs")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.registered_blocks = 0
        """Number of the request's blocks in `runs`. They are computed or scheduled, so other
        requests can hit them.
        """
        self.open_blocks = 0
        """Number of blocks that the request uses without a hash, because they are not completely
        computed.
        """
        self.piece = 0
        """Index of a piece of the request's chain: the first piece whose blocks are not all
        registered, or the one before it.
        """

    @property
    def blocks(self) -> int:
        return self.registered_blocks + self.open_blocks


class PoolWatcher(Protocol):
    """An observer of KV blocks that become available for hits, or are lost for them, in the order
    of vLLM's KV-cache events.

    If a block has several copies, the observer is called for each copy.
    """

    def stored(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Report that blocks `start` to `end` of a chain are stored, and can be hit from now on."""
        ...

    def forgotten(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Report that blocks `start` to `end` of a chain are evicted, the last one first, because
        their memory is reused.
        """
        ...

    def cleared(self) -> None:
        """Report that the whole cache was cleared."""
        ...


class BlockPool:
    """The KV blocks of one engine: `blocks_total` blocks, one of them reserved. The pool knows only
    keys and counts, no time and no tokens.
    """

    def __init__(self, blocks_total: int) -> None:
        """Create a pool in which all blocks are free. Raises `ValueError` if `blocks_total` is
        below 2.
        """
        if blocks_total < 2:
            raise ValueError(f"A block pool needs at least 2 blocks, got {blocks_total}.")
        self.blocks_total = blocks_total
        self.blocks_usable = blocks_total - 1
        """Number of all blocks of the pool except the reserved one."""
        self._blank_blocks = blocks_total - 1
        """Number of free blocks without a hash. They are reused before any block with a hash."""
        self._cached_blocks = 0
        """Number of free blocks with a hash, which can still be hit."""
        self.duplicate_blocks = 0
        """Number of additional holders of blocks: the sum, over all held blocks, of the number of
        holders minus one.
        """
        self._order = Run((), (), 0, 0, 0, 0, 0)
        """Head of the ring of free runs, in the order of eviction. Of a run, the last block is
        evicted first.
        """
        self._runs: dict[int, tuple[Run, ...]] = {}
        """Runs that have blocks of a key, by key. If two runs have the same block, the older run
        comes first.
        """
        self._holdings: dict[Holding, None] = {}
        self.watcher: PoolWatcher | None = None

    @property
    def blocks_free(self) -> int:
        """Number of blocks that no request uses, cached or not."""
        return self._blank_blocks + self._cached_blocks

    @property
    def blocks_used(self) -> int:
        """Number of distinct blocks that requests use."""
        return self.blocks_usable - self._blank_blocks - self._cached_blocks

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests use, from 0 to 1 (`vllm:kv_cache_usage_perc`).
        Cached blocks of an idle engine do not count.
        """
        return self.blocks_used / self.blocks_usable

    def match(self, keys: Sequence[int], ends: Sequence[int], blocks_max: int) -> tuple[int, int]:
        """Return how many blocks of the chain are cached, counted from its beginning up to
        `blocks_max`, and how many of these no request uses.

        The chain must have at least `blocks_max` blocks.
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
        """Return a new holding of the first `blocks` blocks of the chain. `match` must have found
        them in the cache.
        """
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
        """Reuse the next `count` free blocks in the order of eviction, and drop their content.

        The caller adds them to `open_blocks` of holdings. At least `count` blocks must be free.
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
            # Two dropped runs must not keep each other in memory.
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
        """Make the holding's blocks before block `upto` of the chain available for hits, because
        their computation is scheduled.
        """
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
        """Register the holding's blocks before block `upto` as `register` does, and return True, if
        this only extends the holding's last run, and no other run has blocks of its last key or of
        the keys that follow. Return False without a change otherwise.

        Registrations by other holdings meanwhile make no difference if it returns True, because
        they reach the same place of the chain later.
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
        """Release all blocks of a request, the last block first, so that its beginning stays cached
        longest.
        """
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
        """Drop all cached blocks. Return False without a change if a request uses any block."""
        if self._holdings:
            return False
        self._runs.clear()
        self._order = Run((), (), 0, 0, 0, 0, 0)
        self._blank_blocks, self._cached_blocks = self.blocks_usable, 0
        if self.watcher is not None:
            self.watcher.cleared()
        return True

    def free_runs(self) -> Iterator[Run]:
        """Yield the cached runs that no request uses, in the order of eviction."""
        run = self._order.after
        while run is not self._order:
            yield run
            run = run.after

    def check(self) -> None:
        """Check the pool's counters against its runs and holdings. Raises AssertionError if a block
        is lost or used twice.
        """
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
        """Return the oldest run that has block `position` of the chain, which is in piece `piece`.
        None if no run has it.

        Also return the block up to which this run is the oldest (at most `upto`), and the piece of
        that block.
        """
        found: Run | None = None
        while position < upto:
            end = ends[piece]
            stop = min(end, upto)
            for run in self._runs.get(keys[piece], ()):
                # Its own chain may have fewer blocks of this key, with other keys behind them.
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
        """Return whether other runs have blocks of the last key of `run`, between its end and block
        `upto`.
        """
        piece = run.last
        runs = self._runs[run.keys[piece]]
        return len(runs) > 1 and any(
            other.start < upto and run.end < min(other.end, other.ends[piece])
            for other in runs
            if other is not run
        )

    def _forget(self, run: Run, first: int) -> None:
        """Remove `run` from the runs of its keys, from the run's piece `first` on."""
        known = self._runs
        for key in run.keys[first : run.last + 1]:
            runs = known[key]
            if len(runs) == 1:
                del known[key]
            else:
                known[key] = tuple(other for other in runs if other is not run)

    def _split(self, run: Run, place: int) -> Run:
        """Split `run` before block `place` of its chain: `run` keeps the head, and a new run with
        the tail is returned.
        """
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
