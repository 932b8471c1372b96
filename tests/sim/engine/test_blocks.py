"""The block pool in runs against one that numbers its blocks."""

import gc
from bisect import bisect_right
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.engine.blocks import BlockPool
from tests.sim.engine.plain_engine import PlainPool

PIECES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=4)
"""Prompts over three texts, so that prefixes are often shared: (text, blocks)."""


class Chain:
    """What a prompt is to both pools. Pieces of one text share up to the shorter one's end."""

    def __init__(self, pieces):
        self.keys, self.ends, self.hashes = [], [], []
        state = 0
        for text, blocks in pieces:
            state = hash((state, text))
            self.keys.append(state)
            self.hashes += [hash((state, place)) for place in range(blocks)]
            self.ends.append(len(self.hashes))
            state = self.hashes[-1]


class Told:
    """Who is told what can be hit: each block by its hash, as often as it is there."""

    def __init__(self):
        self.there = Counter()

    def hashes(self, keys, ends, start, end):
        for block in range(start, end):
            piece = bisect_right(ends, block)
            yield hash((keys[piece], block - (ends[piece - 1] if piece else 0)))

    def stored(self, keys, ends, start, end):
        self.there.update(self.hashes(keys, ends, start, end))

    def forgotten(self, keys, ends, start, end):
        self.there.subtract(self.hashes(keys, ends, start, end))
        assert min(self.there.values()) >= 0

    def cleared(self):
        self.there.clear()


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow and go; both pools must always have the same hits and as many free."""

    @initialize(blocks=st.integers(4, 24))
    def start(self, blocks):
        self.pool, self.plain = BlockPool(blocks), PlainPool(blocks)
        self.blocks = blocks
        self.pool.watcher = self.told = Told()
        self.held = []

    @rule(pieces=PIECES, partial=st.booleans(), spare=st.integers(0, 4))
    def admit(self, pieces, partial, spare):
        chain = Chain(pieces)
        blocks = len(chain.hashes)
        limit = max(0, blocks - spare)
        hit = self.plain.match(chain.hashes, limit)
        idle = sum(1 for block in hit if not self.plain.holders[block])
        assert self.pool.match(chain.keys, chain.ends, limit) == (len(hit), idle)
        missing = blocks + partial - len(hit)
        if missing + idle > self.pool.blocks_free:
            return
        holding = self.pool.hold(chain.keys, chain.ends, len(hit))
        self.pool.take(missing)
        holding.open_blocks += missing
        self.plain.hold(hit)
        taken = self.plain.take(missing)
        self.held.append([chain, holding, hit + taken, len(hit)])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data):
        request = data.draw(st.sampled_from(self.held))
        chain, holding, blocks, registered = request
        upto = data.draw(st.integers(registered, len(chain.hashes)))
        self.pool.register(holding, chain.keys, chain.ends, upto)
        self.plain.register(blocks[registered:upto], chain.hashes[registered:upto])
        request[3] = upto

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        _, holding, blocks, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(holding)
        self.plain.release(blocks)

    @rule()
    def clear(self):
        assert self.pool.clear() == (not self.held)
        if not self.held:
            self.plain = PlainPool(self.blocks)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        there = {block: len(copies) for block, copies in self.plain.with_hash.items()}
        assert +self.told.there == Counter(there)
        assert self.pool.blocks_free == len(self.plain.free)
        assert self.pool.blocks_used == sum(1 for count in self.plain.holders if count)
        twice = sum(count - 1 for count in self.plain.holders if count)
        assert self.pool.duplicate_blocks == twice


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def held(pool, chain, blocks):
    """A holding of `blocks` new blocks of `chain`, all registered."""
    holding = pool.hold(chain.keys, chain.ends, 0)
    pool.take(blocks)
    holding.open_blocks = blocks
    pool.register(holding, chain.keys, chain.ends, blocks)
    return holding


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    """When blocks run short, a released prompt loses its last block first."""
    pool, chain = BlockPool(5), Chain([(0, 3)])
    pool.release(held(pool, chain, 3))
    held(pool, Chain([(1, 2)]), 2)
    assert pool.match(chain.keys, chain.ends, 3) == (2, 2)


def test_a_twin_outlives_the_first_block_with_its_hash():
    """Two blocks with one hash: when one is evicted, the other can still be hit."""
    pool, chain = BlockPool(4), Chain([(0, 1)])
    first = held(pool, chain, 1)
    held(pool, chain, 1)
    pool.release(first)
    held(pool, Chain([(1, 2)]), 2)
    assert pool.match(chain.keys, chain.ends, 1) == (1, 0)


def test_usage_counts_held_blocks_only():
    """A warm cache that nobody uses reads 0."""
    pool = BlockPool(11)
    holding = held(pool, Chain([(0, 5)]), 5)
    assert pool.usage == pytest.approx(0.5)
    pool.release(holding)
    assert pool.usage == 0


def test_a_long_piece_is_one_run_until_its_parts_differ():
    """A prompt of one piece costs one run; a request that shares its head makes it two."""
    pool, chain = BlockPool(100), Chain([(0, 40)])
    holding = held(pool, chain, 40)
    assert len(holding.runs) == 1
    other = pool.hold(chain.keys, chain.ends, 10)
    assert [run.blocks for run in holding.runs] == [10, 30]
    assert pool.duplicate_blocks == 10
    pool.release(other)
    pool.check()


def test_a_pool_of_one_block_is_refused():
    """One block is reserved, so a pool needs two."""
    with pytest.raises(ValueError, match="at least 2 blocks, got 1"):
        BlockPool(1)


def test_what_was_evicted_is_no_work_for_the_garbage_collector():
    """Runs that were neighbours in the free list must not keep each other alive: a run of a million
    requests would drag them along until the collector looks at its oldest generation.
    """
    pool, chains = BlockPool(9), [Chain([(text, 2)]) for text in range(4)]
    for chain in chains:
        pool.release(held(pool, chain, 2))
    gc.collect()
    gc.disable()
    try:
        pool.take(8)
        assert gc.collect() == 0
    finally:
        gc.enable()
