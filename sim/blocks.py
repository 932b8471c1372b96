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
`sim/tokens.py`), and where the blocks of each key end. Two chains with the same key share its
blocks as far as both have them. Blocks of one key that were taken together and are held together
are one `Run`; a run is split where that ends to be true. So a trace that names its prompts in
pieces of 512 tokens costs a 32nd of one that names every block of 16, and hits are the same: block
numbers are the one thing that is not modelled, and nothing depends on them.
"""

from collections.abc import Iterator, Sequence


class Run:
    """`blocks` blocks of `key`, from the one `start`, with one set of holders."""

    __slots__ = ("after", "before", "blocks", "holders", "key", "start")

    def __init__(self, key: int, start: int, blocks: int, holders: int) -> None:
        self.key = key
        self.start = start
        self.blocks = blocks
        self.holders = holders
        self.before = self
        self.after = self

    @property
    def end(self) -> int:
        """The block after the last."""
        return self.start + self.blocks


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


class BlockPool:
    """`blocks_total` blocks, one of them reserved. No time, no tokens: keys and counts."""

    def __init__(self, blocks_total: int) -> None:
        """At least 2 blocks, or ValueError."""
        if blocks_total < 2:
            raise ValueError(f"A block pool needs at least 2 blocks, got {blocks_total}.")
        self.blocks_total = blocks_total
        self._blank_blocks = blocks_total - 1
        """Free and without a hash: all of them are taken before any with one."""
        self._cached_blocks = 0
        """Free with a hash."""
        self.duplicate_blocks = 0
        """Held blocks counted once for each holder but the first."""
        self._order = Run(0, 0, 0, 0)
        """Head of the ring of free runs in the order of eviction; a run's last block goes first."""
        self._runs: dict[int, list[Run]] = {}
        """By key, each place of the key oldest first."""
        self._holdings: dict[Holding, None] = {}

    @property
    def blocks_usable(self) -> int:
        """All but the reserved one."""
        return self.blocks_total - 1

    @property
    def blocks_free(self) -> int:
        """Blocks without a holder, cached or not."""
        return self._blank_blocks + self._cached_blocks

    @property
    def blocks_used(self) -> int:
        """Distinct blocks with a holder."""
        return self.blocks_total - 1 - self._blank_blocks - self._cached_blocks

    @property
    def usage(self) -> float:
        """`vllm:kv_cache_usage_perc`: the held share, 0 to 1; a warm idle cache reads 0."""
        return self.blocks_used / self.blocks_usable

    def match(self, keys: Sequence[int], ends: Sequence[int], blocks_max: int) -> tuple[int, int]:
        """The longest cached head, at most `blocks_max` blocks, and how many of them are free."""
        position = free = begin = 0
        for key, end in zip(keys, ends, strict=True):
            runs = self._runs.get(key)
            if runs is None or position >= blocks_max:
                break
            stop = min(end, blocks_max)
            while position < stop:
                run, place = _find(runs, position - begin, stop - begin)
                if run is None:
                    return position, free
                if not run.holders:
                    free += place + begin - position
                position = place + begin
            begin = end
        return position, free

    def hold(self, keys: Sequence[int], ends: Sequence[int], blocks: int) -> Holding:
        """A holding of the first `blocks` blocks, all of which `match` has found."""
        holding = Holding()
        self._holdings[holding] = None
        position = begin = piece = 0
        while position < blocks:
            end = ends[piece]
            stop = min(end, blocks)
            while position < stop:
                runs = self._runs[keys[piece]]
                run, place = _find(runs, position - begin, stop - begin)
                assert run is not None, "the caller holds what was matched"
                if run.start < position - begin:
                    run = self._split(run, position - begin)
                if run.end > place:
                    self._split(run, place)
                if run.holders:
                    self.duplicate_blocks += run.blocks
                else:
                    _unlink(run)
                    self._cached_blocks -= run.blocks
                run.holders += 1
                holding.runs.append(run)
                position = place + begin
            begin = end
            piece += 1
        holding.piece = max(0, piece - 1)
        holding.registered_blocks = blocks
        return holding

    def take(self, count: int) -> None:
        """Take the next `count` free blocks for holdings; what they held is forgotten.

        The caller counts them as `open_blocks` of the holdings.
        """
        assert count <= self.blocks_free, "the caller asks for no more than there is"
        blank = min(count, self._blank_blocks)
        self._blank_blocks -= blank
        count -= blank
        if not count:
            return
        self._cached_blocks -= count
        known, run = self._runs, self._order.after
        while 0 < run.blocks <= count:
            count -= run.blocks
            twins = known[run.key]
            if len(twins) == 1:
                del known[run.key]
            else:
                twins.remove(run)
            run = run.after
        run.blocks -= count
        run.before, self._order.after = self._order, run

    def register(
        self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int
    ) -> None:
        """From now on the holding's blocks before `upto` can be hit: they are scheduled."""
        position, piece = holding.registered_blocks, holding.piece
        if position >= upto:
            return
        holding.open_blocks -= upto - position
        holding.registered_blocks = upto
        begin = ends[piece - 1] if piece else 0
        known, runs = self._runs, holding.runs
        while True:
            end, key = ends[piece], keys[piece]
            if position < end:
                stop = min(upto, end)
                twins = known.get(key)
                if twins is None:
                    run = Run(key, position - begin, stop - position, 1)
                    known[key] = [run]
                    runs.append(run)
                else:
                    _prolong(runs, twins, key, position - begin, stop - begin)
                if stop == upto:
                    holding.piece = piece
                    return
                position = stop
            begin = end
            piece += 1

    def extend(self, holding: Holding, keys: Sequence[int], ends: Sequence[int], upto: int) -> bool:
        """`register`, if the blocks only make the holding's last run longer and nobody else has any
        under its key; False, and nothing changed, otherwise.

        What other holdings register meanwhile makes no difference then: whoever comes to the same
        place of the key comes later.
        """
        piece = holding.piece
        if not holding.runs or ends[piece] < upto:
            return False
        last, key = holding.runs[-1], keys[piece]
        if last.key != key or last.holders != 1 or len(self._runs[key]) != 1:
            return False
        if (
            last.start + last.blocks + (ends[piece - 1] if piece else 0)
            != holding.registered_blocks
        ):
            return False
        count = upto - holding.registered_blocks
        last.blocks += count
        holding.open_blocks -= count
        holding.registered_blocks = upto
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
            assert run in self._runs[run.key], "a free run is cached"
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
        assert sum(run.blocks for run in everything) == held + free, "each run is held or free"
        twice = sum(run.blocks * (count - 1) for run, count in holders.items())
        assert twice == self.duplicate_blocks, "duplicates are counted"

    def _split(self, run: Run, place: int) -> Run:
        """Cut `run` before `place`: it keeps the head, the tail is returned."""
        tail = Run(run.key, place, run.end - place, run.holders)
        run.blocks = place - run.start
        runs = self._runs[run.key]
        runs.insert(runs.index(run) + 1, tail)
        if not run.holders:
            tail.before, tail.after = run.before, run
            run.before.after = tail
            run.before = tail
            return tail
        for holding in self._holdings:
            if run in holding.runs:
                holding.runs.insert(holding.runs.index(run) + 1, tail)
        return tail


def _find(runs: Sequence[Run], place: int, stop: int) -> tuple[Run | None, int]:
    """The oldest run that has block `place`, and up to where, at most `stop`, it is the oldest."""
    for run in runs:
        if run.start > place:
            stop = min(stop, run.start)
        elif place < run.start + run.blocks:
            return run, min(stop, run.start + run.blocks)
    return None, place


def _prolong(runs: list[Run], twins: list[Run], key: int, start: int, end: int) -> None:
    """Add blocks of `key` to a holding's `runs`: to the last if they follow it, else as a new one.

    `twins`: all runs of that key.
    """
    last = runs[-1] if runs else None
    if (
        last is not None
        and last.key == key
        and last.holders == 1
        and last.start + last.blocks == start
        and (len(twins) == 1 or not _any_within(twins, start, end))
    ):
        last.blocks += end - start
        return
    run = Run(key, start, end - start, 1)
    twins.append(run)
    runs.append(run)


def _any_within(runs: Sequence[Run], start: int, end: int) -> bool:
    return any(run.start < end and start < run.start + run.blocks for run in runs)


def _unlink(run: Run) -> None:
    run.before.after = run.after
    run.after.before = run.before
