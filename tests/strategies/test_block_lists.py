"""Blocks one by one, and not too many."""

from epp.strategies.block_lists import REQUEST_BLOCKS_MAX, block_lists
from epp.strategies.block_load import BlockLoadSettings
from epp.strategies.burst import BurstSettings
from epp.strategies.routed_blocks import RoutedBlocksSettings
from tests.builders import request


def chain(start, blocks):
    return b"".join((start + at).to_bytes(8, "little") for at in range(blocks))


def test_each_chain_has_its_limit_and_all_have_one():
    """Later ones keep nothing."""
    assert block_lists([chain(1, 3), chain(9, 1), b""], 2) == [[1, 2], [9], []]
    many = block_lists([chain(10_000 * at, 2_048) for at in range(20)], 2_048)
    assert sum(map(len, many)) == REQUEST_BLOCKS_MAX
    assert [len(blocks) for blocks in many] == [2_048] * 8 + [0] * 12


def test_a_completion_of_thousands_of_prompts_costs_no_more_than_that():
    """In every index that keeps blocks one by one; it can be taken back and released."""
    for settings, held in (
        (RoutedBlocksSettings(), lambda index: index.blocks),
        (BlockLoadSettings(), lambda index: index.active.blocks),
        (BurstSettings(min_colocate_blocks=1), lambda index: index.placed_blocks),
    ):
        index = settings.open()
        chains = tuple(chain(1 + 10_000 * at, 100) for at in range(1_000))
        hostile = request(chains={256: chains})
        index.match(hostile, 2, 0.0)
        recorded = index.record(hostile, 0, 0.0)
        assert 0 < held(index) <= REQUEST_BLOCKS_MAX
        index.retract(hostile, 0, recorded, 0.0)
        assert held(index) == 0
