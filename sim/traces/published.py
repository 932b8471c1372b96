"""Published traces: Mooncake, Azure, BurstGPT, Qwen-Bailian. Each is described where it is read."""

import csv
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from epp.core.capture.lines import BlockId, TokenCount, Tokens
from sim.traces.arrival import Arrival, FieldError
from sim.traces.blocks import check_block_tokens, check_blocks
from sim.traces.reading import LineFormat, Parse, ReadOptions

_DIGITS_MAX: Final = 7
"""Of a number of tokens."""
_CONVERSATIONS_MAX: Final = 1_000_000
"""Bailian: conversations whose first request is remembered."""


class _MooncakeLine(Struct, gc=False):
    """`timestamp` in ms; one id for every 512 tokens, the rest at the end has one too.

    kvcache-ai/Mooncake, FAST25-release/traces. Other tools write this format with other blocks.
    """

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Tokens
    output_length: TokenCount
    hash_ids: tuple[BlockId, ...]


def _mooncake(first: bytes, options: ReadOptions) -> Parse:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    size = options.block_tokens or 512
    check_block_tokens(size)

    def parse(index: int, line: bytes) -> Arrival:
        row = decode(line)
        check_blocks(row.hash_ids, row.input_length, size, "hash_ids")
        return Arrival(
            index=index,
            time_s=row.timestamp / 1000,
            prompt_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            blocks=row.hash_ids,
            block_tokens=size,
        )

    return parse


class _BailianLine(Struct, gc=False):
    """`timestamp` in s; one id for every 16 tokens, each block hashed without its predecessors.

    alibaba-edu/qwen-bailian-usagetraces-anon. `parent_chat_id` is -1 for the first turn.
    """

    chat_id: int
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Tokens
    output_length: TokenCount
    hash_ids: tuple[BlockId, ...]
    parent_chat_id: int = -1
    turn: int = 1


def _bailian(first: bytes, options: ReadOptions) -> Parse:
    decode = msgspec.json.Decoder(_BailianLine).decode
    size = options.block_tokens or 16
    check_block_tokens(size)
    roots: OrderedDict[int, int] = OrderedDict()

    def parse(index: int, line: bytes) -> Arrival:
        row = decode(line)
        check_blocks(row.hash_ids, row.input_length, size, "hash_ids")
        root = roots.get(row.parent_chat_id, row.chat_id)
        roots[row.chat_id] = root
        if len(roots) > _CONVERSATIONS_MAX:
            roots.popitem(last=False)
        return Arrival(
            index=index,
            time_s=row.timestamp,
            prompt_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            blocks=row.hash_ids,
            block_tokens=size,
            session=str(root),
            turn=max(0, row.turn - 1),
        )

    return parse


class _Columns:
    """The columns of a CSV file, found by name."""

    def __init__(self, header: bytes, needed: Sequence[str]) -> None:
        names = [name.strip() for name in _cells(header.removeprefix(b"\xef\xbb\xbf"))]
        missing = [name for name in needed if name not in names]
        if missing:
            raise FieldError("", f"Expected columns {', '.join(needed)}, missing {missing[0]}")
        self._width = len(names)
        self._at = {name: names.index(name) for name in names}

    def row(self, line: bytes) -> dict[str, str]:
        """The cells by column; `FieldError` if there are too few or too many."""
        cells = _cells(line)
        if len(cells) != self._width:
            raise FieldError("", f"Expected {self._width} columns, got {len(cells)}")
        return {name: cells[at].strip() for name, at in self._at.items()}


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode().rstrip("\r\n")]))
    except csv.Error:
        longest = f"cells of at most {csv.field_size_limit()} characters"
        raise FieldError("", f"Expected a row without line breaks, {longest}") from None


def _count(row: dict[str, str], name: str, lowest: int) -> int:
    text = row[name]
    # Some tables are written with floats throughout.
    digits = text.removesuffix(".0")
    if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS_MAX:
        number = int(digits)
        if lowest <= number:
            return number
    raise FieldError(name, f"Expected an integer of at least {lowest}, got {text[:40]!r}")


def _azure(header: bytes, options: ReadOptions) -> Parse:
    """`TIMESTAMP` with up to seven decimals, lengths; nothing says what prompts share.

    Azure/AzurePublicDataset, 2023 and 2024.
    """
    columns = _Columns(header, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))

    def parse(index: int, line: bytes) -> Arrival:
        row = columns.row(line)
        return Arrival(
            index=index,
            time_s=_instant_s(row["TIMESTAMP"]),
            prompt_tokens=_count(row, "ContextTokens", 1),
            output_tokens=max(1, _count(row, "GeneratedTokens", 0)),
        )

    return parse


_EPOCH: Final = datetime(2023, 1, 1, tzinfo=UTC)
"""Near the data, so that a float keeps the microseconds."""


def _instant_s(text: str) -> float:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise FieldError("TIMESTAMP", f"Expected a date and a time, got {text[:40]!r}") from None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return (instant - _EPOCH).total_seconds()


def _burstgpt(header: bytes, options: ReadOptions) -> Parse:
    """`Timestamp` in s, lengths, in later versions a session; an answer of 0 tokens failed.

    HPMLL/BurstGPT. A request that failed is no arrival: there was nothing to serve.
    """
    columns = _Columns(header, ("Timestamp", "Model", "Request tokens", "Response tokens"))

    def parse(index: int, line: bytes) -> Arrival | None:
        row = columns.row(line)
        output_tokens = _count(row, "Response tokens", 0)
        if not output_tokens:
            return None
        try:
            time_s = float(row["Timestamp"])
        except ValueError:
            time_s = -1.0
        if not 0 <= time_s < float("inf"):
            raise FieldError(
                "Timestamp", f"Expected seconds of at least 0, got {row['Timestamp'][:40]!r}"
            )
        return Arrival(
            index=index,
            time_s=time_s,
            prompt_tokens=_count(row, "Request tokens", 1),
            output_tokens=output_tokens,
            model=row["Model"],
            session=row.get("Session ID", ""),
        )

    return parse


def _is_bailian(line: bytes) -> bool:
    return b'"hash_ids"' in line and b'"chat_id"' in line


MOONCAKE: Final = LineFormat(
    name="mooncake",
    says="Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
    recognises=lambda line: b'"hash_ids"' in line and not _is_bailian(line),
    parser=_mooncake,
)
BAILIAN: Final = LineFormat(
    name="bailian",
    says="Qwen-Bailian JSONL: chat_id, timestamp (s), hash_ids of 16 tokens, not chained",
    recognises=_is_bailian,
    parser=_bailian,
)
AZURE: Final = LineFormat(
    name="azure",
    says="Azure LLM inference CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
    recognises=lambda line: b"ContextTokens" in line and b"," in line,
    parser=_azure,
    has_header=True,
)
BURSTGPT: Final = LineFormat(
    name="burstgpt",
    says="BurstGPT CSV: Timestamp (s), Model, Request tokens, Response tokens",
    recognises=lambda line: b"Request tokens" in line and b"," in line,
    parser=_burstgpt,
    has_header=True,
)
