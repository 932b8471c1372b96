"""The block pool against a model that remembers everything."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim.blocks import BlockPool

PREFIXES = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""Prompts over three block contents, so that prefixes are often shared."""


def chain_of(contents):
    """One distinct number for each prefix."""
    chain, value = [], 1
    for content in contents:
        value = value * 4 + content
        chain.append(value)
    return chain


class PoolMachine(RuleBasedStateMachine):
    """Requests come and go; a plain list of (block, hash) says what must be free, in order."""

    @initialize(blocks=st.integers(4, 16))
    def start(self, blocks):
        self.pool = BlockPool(blocks)
        self.order = [(block, None) for block in range(1, blocks)]
        self.held = []
        self.hash_of = dict(self.order)

    def cached(self, block_hash):
        return [block for block, known in self.hash_of.items() if known == block_hash]

    @rule(contents=PREFIXES, partial=st.booleans())
    def admit(self, contents, partial):
        chain = chain_of(contents)
        hit = self.pool.match(chain, len(chain) - 1)
        expected = 0
        while expected < len(chain) - 1 and self.cached(chain[expected]):
            expected += 1
        assert len(hit) == expected
        for block, block_hash in zip(hit, chain, strict=False):
            assert self.hash_of[block] == block_hash
        missing = len(chain) - len(hit) + partial
        if missing + self.pool.free_among(hit) > self.pool.blocks_free:
            return
        self.pool.hold(hit)
        self.order = [item for item in self.order if item[0] not in hit]
        taken = self.pool.take(missing)
        assert taken == [block for block, _ in self.order[:missing]]
        self.order = self.order[missing:]
        for block in taken:
            self.hash_of[block] = None
        full = len(chain) - len(hit)
        self.pool.register(taken[:full], chain[len(hit) :])
        self.hash_of.update(zip(taken[:full], chain[len(hit) :], strict=True))
        self.held.append(hit + taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        still = {block for others in self.held for block in others}
        left = [block for block in reversed(blocks) if block not in still]
        front = [(block, None) for block in left if self.hash_of[block] is None]
        back = [(block, 0) for block in left if self.hash_of[block] is not None]
        self.order = front + self.order + back

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "pool"):
            return
        held = {block for blocks in self.held for block in blocks}
        free = {block for block, _ in self.order}
        assert not held & free
        assert self.pool.blocks_used == len(held)
        assert self.pool.blocks_free == len(free)
        assert held | free == set(range(1, self.pool.blocks_total))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    """When blocks run short, a released prompt loses its last block first."""
    pool = BlockPool(5)
    chain = chain_of([0, 1, 2])
    blocks = pool.take(3)
    pool.register(blocks, chain)
    pool.release(blocks)
    pool.take(2)
    assert pool.match(chain, 3) == blocks[:2]


def test_a_twin_outlives_the_first_block_with_its_hash():
    """Two blocks with one hash: when one is evicted, the other can still be hit."""
    pool = BlockPool(4)
    first, second = pool.take(1), pool.take(1)
    pool.register(first, [7])
    pool.register(second, [7])
    pool.release(first)
    pool.take(2)
    assert pool.match([7], 1) == second


def test_usage_counts_held_blocks_only():
    """A warm cache that nobody uses reads 0."""
    pool = BlockPool(11)
    blocks = pool.take(5)
    pool.register(blocks, chain_of([0, 1, 2, 0, 1]))
    assert pool.usage == pytest.approx(0.5)
    pool.release(blocks)
    assert pool.usage == 0


def test_a_pool_of_one_block_is_refused():
    """One block is reserved, so a pool needs two."""
    with pytest.raises(ValueError, match="at least 2 blocks, got 1"):
        BlockPool(1)
