"""Checks of the block ids and block sizes in a trace."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from sim.traces.arrival import FieldError
from sim.traces.prompts import PICKER_BLOCK_TOKENS

MOONCAKE_BLOCK_TOKENS: Final = 512
"""Number of tokens in a block of Mooncake's traces, and of LiteLLM logs and traces with columns that
do not state their block size.
"""


def check_ids(ids: Iterable[int], field: str) -> None:
    """Raise `FieldError` unless all block ids are from 0 to 2^64 - 1."""
    try:
        array("Q", ids)
    except OverflowError:
        raise FieldError(field, "Expected ids from 0 to 2^64 - 1") from None


def check_block_tokens(block_tokens: int) -> None:
    """Raise `FieldError` unless `block_tokens` divides, or is a multiple of, the picker's block
    size of 64 tokens.
    """
    if PICKER_BLOCK_TOKENS % block_tokens and block_tokens % PICKER_BLOCK_TOKENS:
        raise FieldError(
            "",
            f"Expected blocks of a multiple or a divisor of {PICKER_BLOCK_TOKENS} tokens, "
            f"got {block_tokens}",
        )


def check_blocks(blocks: Sequence[int], prompt_tokens: int, block_tokens: int, field: str) -> None:
    """Raise `FieldError` unless there is an id for every full block of the prompt, and optionally
    one for a partial last block.
    """
    check_ids(blocks, field)
    whole, rest = divmod(prompt_tokens, block_tokens)
    if whole <= len(blocks) <= whole + bool(rest):
        return
    expected = f"{whole} or {whole + 1}" if rest else str(whole)
    raise FieldError(
        field,
        f"Expected {expected} ids for {prompt_tokens} tokens in blocks of "
        f"{block_tokens}, got {len(blocks)}",
    )
