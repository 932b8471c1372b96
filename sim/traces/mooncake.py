"""Arrivals written as Mooncake JSONL, for tools that read nothing else.

The format has one id for every 512 tokens and nothing else that identifies text, so whatever is
finer is rounded: an id stands for all text up to its end. Models, sessions, closed loops and
answers are lost; with `after` the times are those without the wait.
"""

from typing import BinaryIO

import msgspec

from sim.traces.arrival import Arrival
from sim.traces.blocks import MOONCAKE_BLOCK_TOKENS
from sim.traces.prompts import PromptHashes

_ID_MASK = 2**63 - 1
"""Other readers take ids for signed."""


class MooncakeWriter:
    """Writes line by line; the file stays the caller's."""

    def __init__(self, file: BinaryIO) -> None:
        """Nothing is written before the first request."""
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self.lines = 0

    def write(self, arrival: Arrival) -> None:
        """Append a request; the cut last block gets the id of its last token."""
        hashes = PromptHashes(arrival)
        size, tokens = MOONCAKE_BLOCK_TOKENS, arrival.prompt_tokens
        blocks = (hashes.chain(size, tokens) & _ID_MASK).tolist()
        if tokens % size:
            blocks.append(int(hashes.chain(tokens, tokens)[0]) & _ID_MASK)
        line = {
            "timestamp": round(arrival.time_s * 1000),
            "input_length": tokens,
            "output_length": arrival.output_tokens,
            "hash_ids": blocks,
        }
        self._file.write(self._encode(line) + b"\n")
        self.lines += 1
