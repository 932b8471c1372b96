"""The common form of all trace formats: one request, without its text."""

import re
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from epp.core.expectation import place_and_sentence
from epp.core.types import Seconds

_MISSING: Final = re.compile(r"needs field `([^`]*)`")


class Arrival(Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """One request of a trace.

    The prompt is described by `blocks`, ids of text. Under the same model, adapter and salt, two
    prompts share the blocks before the first place where their ids (or lengths) differ, and no
    others. Ids may be chained or not.
    """

    index: int
    """Position in the file, from 0: its line, not counting a header. It identifies the request
    everywhere.
    """
    time_s: Seconds
    """Arrival time from the start of the trace. With `after`, the earliest time, as if answers took
    no time.
    """
    prompt_tokens: int
    """Prompt length, at least 1."""
    output_tokens: int
    """Answer length, at least 1. Only the pod that generates the answer knows it."""
    output_tokens_max: int | None = None
    """Limit that the client sent, if the trace has it; None if it sent none."""
    blocks: tuple[int, ...] = ()
    """Unsigned 64-bit ids. Tokens after the last block are unique to this request."""
    block_tokens: int = 0
    """Length of every block. A shorter last block is unique to this request."""
    lengths: tuple[int, ...] = ()
    """Tokens of each block if they differ (`block_tokens` is then 0). Two blocks with one id share
    as many tokens as the shorter one has.
    """
    answer: int | None = None
    """Id under which a later prompt contains the answer; None if no prompt contains it."""
    model: str = ""
    adapter: str = ""
    """LoRA adapter; "" is the base model."""
    cache_salt: str = ""
    session: str = ""
    turn: int = 0
    """Position in its session, from 0."""
    priority: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    """Headers that the picker receives, as (name in lower case, value)."""
    after: int | None = None
    """Index of the earlier request whose answer this one waits for; None if it does not wait."""
    think_s: Seconds = 0.0
    """Time from the end of that answer to the sending of this request."""
    path: str = ""
    body: bytes = b""
    """Raw request as it was sent, together with `path`. If empty, both are made from the blocks."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (id, tokens) of each block that others may share; the remaining tokens are unique."""
        if self.lengths:
            yield from zip(self.blocks, self.lengths, strict=True)
            return
        whole = self.prompt_tokens // self.block_tokens if self.block_tokens else 0
        for block in self.blocks[:whole]:
            yield block, self.block_tokens

    @property
    def shareable_tokens(self) -> int:
        """Prompt tokens in blocks that others may share."""
        if self.lengths:
            return sum(self.lengths)
        if not self.block_tokens:
            return 0
        return min(self.prompt_tokens // self.block_tokens, len(self.blocks)) * self.block_tokens


class TraceError(ValueError):
    """A trace or a line of it cannot be read; the sentence says where and what was expected.

    `line` counts from 1 and is 0 if the whole file is meant.
    """

    def __init__(self, path: str, line: int, field: str, expected: str) -> None:
        """Create the error. `field` is "" if the whole line is meant."""
        where = f"{path}:{line}" if line else path
        super().__init__(f"{where}: {field}: {expected}" if field else f"{where}: {expected}")
        self.path = path
        self.line = line
        self.field = field
        self.expected = expected


class FieldError(ValueError):
    """A field of a line is not as expected; the reader adds file and line."""

    def __init__(self, field: str, expected: str) -> None:
        """Create the error. `field` is "" if the whole line is meant."""
        super().__init__(f"{field}: {expected}")
        self.field = field
        self.expected = expected


def field_error(problem: Exception, kind: Any = None) -> FieldError:
    """Return msgspec's validation error as a `FieldError`. `kind` is the expected type, if known."""
    place, what = place_and_sentence(str(problem), kind)
    if missing := _MISSING.fullmatch(what):
        place, what = f"{place}.{missing[1]}", "expected this field, found none"
    return FieldError(place.removeprefix("."), f"{what[:1].upper()}{what[1:]}")
