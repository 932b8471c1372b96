"""Blocks are hashed for who asks, and nothing is known of endpoints."""

from homing_rivals.prompt_blocks import PromptBlocksSettings
from tests.builders import request


def test_it_hashes_and_remembers_nothing():
    """Recorded or not: the same answer."""
    settings = PromptBlocksSettings(block_tokens=4, blocks_max=2)
    index = settings.open()
    asked = request(prompts=(b"x" * 100,))
    index.match(asked, 3, 0.0)
    assert [len(chain) for chain in asked.chains[16]] == [16], "two blocks of 8 bytes"
    index.record(asked, 1, 0.0)
    known = index.match(asked, 3, 1.0)
    assert known.matched.tolist() == [0, 0, 0]
    assert known.total == 0
    assert settings.block_tokens == 4, "the simulator makes chains of this size"


def test_other_blocks_are_adopted():
    """From the next prompt on."""
    index = PromptBlocksSettings().open()
    assert PromptBlocksSettings(block_tokens=8).adopt(index)
    asked = request(prompts=(b"x" * 100,))
    index.match(asked, 1, 0.0)
    assert list(asked.chains) == [32]
