"""What every trace format is read into: one request, without its text."""

import re
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from epp.core.expectation import place_and_sentence
from epp.core.types import Seconds

_MISSING: Final = re.compile(r"needs field `([^`]*)`")


class Arrival(Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """One request of a trace.

    The prompt is told as `blocks`, ids of text: two prompts share exactly the blocks up to the
    first place where their ids (or lengths) differ, under the same model, adapter and salt. It does
    not matter whether ids were chained where they come from.
    """

    index: int
    """Place in the file, from 0: its line, not counting a header. Names the request everywhere."""
    time_s: Seconds
    """From the start of the trace. With `after`: the earliest moment, if answers took no time."""
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1. How long the answer is: only the pod that makes it knows."""
    output_tokens_max: int | None = None
    """The limit that the client sent, where the trace has it; None: it sent none."""
    blocks: tuple[int, ...] = ()
    """Unsigned 64-bit ids. Tokens behind the last block belong to this request alone."""
    block_tokens: int = 0
    """Length of every block. If the last one is cut short, it belongs to this request alone."""
    lengths: tuple[int, ...] = ()
    """Tokens of each block where they differ (`block_tokens` is 0 then). Blocks with one id share
    as many tokens as the shorter of them has."""
    answer: int | None = None
    """Id under which a later prompt contains the answer; None: no prompt contains it."""
    model: str = ""
    adapter: str = ""
    """LoRA adapter; "" is the base model."""
    cache_salt: str = ""
    session: str = ""
    turn: int = 0
    """Place in its session, from 0."""
    priority: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    """(name in lower case, value) of those that the picker is to see."""
    after: int | None = None
    """Index of the request whose answer this one waits for; it comes earlier in the trace."""
    think_s: Seconds = 0.0
    """From the end of that answer to the sending of this request."""
    path: str = ""
    body: bytes = b""
    """A raw request as it was sent, with its path; else both are made from the blocks."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """(id, tokens) of each block that others may share; what is left is this request's own."""
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
    """A trace cannot be read, or a line of it: one sentence that says where and what was expected.

    `line` counts from 1 and is 0 if the whole file is meant.
    """

    def __init__(self, path: str, line: int, field: str, expected: str) -> None:
        """`field` is "" if the whole line is meant."""
        where = f"{path}:{line}" if line else path
        super().__init__(f"{where}: {field}: {expected}" if field else f"{where}: {expected}")
        self.path = path
        self.line = line
        self.field = field
        self.expected = expected


class FieldError(ValueError):
    """A field of a line is not what was expected; the reader adds file and line."""

    def __init__(self, field: str, expected: str) -> None:
        """`field` is "" if the whole line is meant."""
        super().__init__(f"{field}: {expected}")
        self.field = field
        self.expected = expected


def field_error(problem: Exception, kind: Any = None) -> FieldError:
    """What msgspec has refused, as a `kind` if it is known of which type."""
    place, what = place_and_sentence(str(problem), kind)
    if missing := _MISSING.fullmatch(what):
        place, what = f"{place}.{missing[1]}", "expected this field, found none"
    return FieldError(place.removeprefix("."), f"{what[:1].upper()}{what[1:]}")
