"""The common form of all trace formats: one request, usually without its text."""

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
    """Number of the request in its trace, from 0. In a file it is the number of its line, without the
    header and blank lines. `Arrival.after` and the request id refer to it.
    """
    time_s: Seconds
    """Arrival time of the request in seconds since the start of the trace. If `after` is set, it is
    the earliest possible time, computed as if answers took no time.
    """
    prompt_tokens: int
    """Length of the prompt in tokens, at least 1."""
    output_tokens: int
    """Length of the answer in tokens, at least 1. The scheduler does not see it."""
    output_tokens_max: int | None = None
    """Limit of answer tokens that the client sent with the request; None if the trace has no limit.
    """
    blocks: tuple[int, ...] = ()
    """Ids of the blocks of the prompt, unsigned 64-bit. Prompt tokens after the last block are
    unique to this request.
    """
    block_tokens: int = 0
    """Number of tokens in each block of the prompt; 0 if `lengths` has the sizes or there are no
    blocks. A last block that is not full is unique to this request.
    """
    lengths: tuple[int, ...] = ()
    """Number of tokens in each block, if blocks differ in length (`block_tokens` is then 0). Two
    blocks with the same id and different lengths share the tokens of the shorter one.
    """
    answer: int | None = None
    """Block id under which a later prompt contains the answer of this request; None if no prompt
    contains it.
    """
    model: str = ""
    adapter: str = ""
    """Name of the LoRA adapter; "" for the base model."""
    cache_salt: str = ""
    session: str = ""
    turn: int = 0
    """Position of the request in its session, from 0."""
    priority: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    """Request headers that the picker receives, as (name in lower case, value)."""
    after: int | None = None
    """`index` of the earlier request for whose answer this request waits; None if it does not wait.
    """
    think_s: Seconds = 0.0
    """Pause in seconds between the end of the answer to request `after` and the sending of this
    request.
    """
    path: str = ""
    body: bytes = b""
    """Request body for `path`, if the trace has the prompt as text or as a request. If it is empty,
    `prompts.body_of` makes a body from the blocks.
    """

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (id, tokens) of each prompt block that other requests may share; later prompt
        tokens are unique to this request.
        """
        if self.lengths:
            yield from zip(self.blocks, self.lengths, strict=True)
            return
        whole = self.prompt_tokens // self.block_tokens if self.block_tokens else 0
        for block in self.blocks[:whole]:
            yield block, self.block_tokens

    @property
    def shareable_tokens(self) -> int:
        """Number of prompt tokens in blocks that other requests may share."""
        if self.lengths:
            return sum(self.lengths)
        if not self.block_tokens:
            return 0
        return min(self.prompt_tokens // self.block_tokens, len(self.blocks)) * self.block_tokens


class TraceError(ValueError):
    """An error in a trace file; its text says where the error is and what was expected there.

    `line` counts from 1; it is 0 if the error is about the whole file.
    """

    def __init__(self, path: str, line: int, field: str, expected: str) -> None:
        """Create an error in the trace file `path`. `field` is the faulty field, or "" if the error
        is about the whole line.
        """
        where = f"{path}:{line}" if line else path
        super().__init__(f"{where}: {field}: {expected}" if field else f"{where}: {expected}")
        self.path = path
        self.line = line
        self.field = field
        self.expected = expected


class FieldError(ValueError):
    """An error in one field of a line of a trace; the reader turns it into a `TraceError` with file
    and line.
    """

    def __init__(self, field: str, expected: str) -> None:
        """Create an error in a line of a trace. `field` is the faulty field, or "" if the error is
        about the whole line.
        """
        super().__init__(f"{field}: {expected}")
        self.field = field
        self.expected = expected


def field_error(problem: Exception, kind: Any = None) -> FieldError:
    """Return msgspec's validation error as a `FieldError`. `kind` is the type that was decoded, if
    known.
    """
    place, what = place_and_sentence(str(problem), kind)
    if missing := _MISSING.fullmatch(what):
        place, what = f"{place}.{missing[1]}", "expected this field, found none"
    return FieldError(place.removeprefix("."), f"{what[:1].upper()}{what[1:]}")
