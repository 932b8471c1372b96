"""Export of requests as Mooncake JSONL, for tools that read no other format.

The format has one id for every 512 tokens and no other information about shared text, so sharing in
finer blocks is rounded. An id stands for all text up to the end of its block. Models, sessions,
closed loops and answers are lost. Times of requests with `after` do not include the wait for the
earlier answer.
"""

from typing import BinaryIO

import msgspec

from sim.traces.arrival import Arrival
from sim.traces.blocks import MOONCAKE_BLOCK_TOKENS
from sim.traces.prompts import PromptHashes

_ID_MASK = 2**63 - 1
"""Mask that keeps 63 bits of an id, because other readers of the format use signed integers."""


class MooncakeWriter:
    """A writer of a trace in Mooncake's format. The caller closes the file."""

    def __init__(self, file: BinaryIO) -> None:
        """Create the writer; nothing is written to `file` before the first request."""
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self.lines = 0

    def write(self, arrival: Arrival) -> None:
        """Append a request. A partial last block gets an id that stands for the whole prompt."""
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
