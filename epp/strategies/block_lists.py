"""The hashes of a request's blocks one by one, for what keeps them one by one."""

from collections.abc import Sequence
from typing import Final

from epp.core.prompt.blocks import HASH_BYTES

REQUEST_BLOCKS_MAX: Final = 16_384
"""Of all prompts of one request: a completion may have thousands. A million tokens in blocks of 64,
and some milliseconds."""


def block_lists(chains: Sequence[bytes], blocks_max: int) -> list[list[int]]:
    """64 bits a block, at most `blocks_max` of each chain and `REQUEST_BLOCKS_MAX` of all.

    Of what is too much the later chains keep nothing. The chains are those of `chains_of`.
    """
    left = REQUEST_BLOCKS_MAX
    lists: list[list[int]] = []
    for chain in chains:
        blocks = min(len(chain) // HASH_BYTES, blocks_max, left)
        left -= blocks
        lists.append(memoryview(chain)[: blocks * HASH_BYTES].cast("Q").tolist())
    return lists
