"""Readers of published traces: Mooncake, Azure, BurstGPT and Qwen-Bailian."""

from collections import OrderedDict
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from epp.core.journal.lines import BlockId, TokenCount, Tokens
from sim.traces.arrival import Arrival
from sim.traces.blocks import MOONCAKE_BLOCK_TOKENS, check_block_tokens, check_blocks
from sim.traces.cells import Table, count
from sim.traces.moments import UNITS_S, instant_of, seconds_of
from sim.traces.reading import LineFormat, Parse, ReadOptions
from sim.traces.turns import Turns

_CONVERSATIONS_MAX: Final = 1_000_000
"""Maximum number of Bailian requests whose conversation is remembered."""


class _MooncakeLine(Struct, gc=False):
    """A line of a Mooncake trace: `timestamp` in ms, and one id for every 512 tokens and for a
    partial last block.

    Source: kvcache-ai/Mooncake, FAST25-release/traces. Other tools write this format with other
    block sizes, and without times or ids. AIPerf adds `delay` (ms, after the previous answer of
    `session_id`).
    """

    input_length: Tokens
    output_length: TokenCount
    timestamp: float | str | None = None
    hash_ids: tuple[BlockId, ...] | None = None
    session_id: str | int | None = None
    delay: Annotated[float, Meta(ge=0)] | None = None
    block_size: Tokens | None = None


def _mooncake(first: bytes, options: ReadOptions) -> Parse:
    # Some tools write every number as a float, which is still a whole number.
    decode = msgspec.json.Decoder(_MooncakeLine, strict=False).decode
    sizes: set[int] = set()
    turns: Turns | None = None

    def parse(index: int, line: bytes) -> Arrival:
        nonlocal turns
        row = decode(line)
        size = options.block_tokens or row.block_size or MOONCAKE_BLOCK_TOKENS
        if size not in sizes:
            check_block_tokens(size)
            sizes.add(size)
        if row.hash_ids:
            check_blocks(row.hash_ids, row.input_length, size, "hash_ids")
        time_s = None
        if row.timestamp is not None:
            time_s = seconds_of(row.timestamp, "timestamp", options.time_unit, "ms")
        if turns is None:
            turns = Turns(options, timed=time_s is not None)
        session = "" if row.session_id is None else str(row.session_id)
        delay_s = None if row.delay is None else row.delay / 1000
        moment = turns.next(index, time_s, session, delay_s, "timestamp")
        return Arrival(
            index=index,
            time_s=moment.time_s,
            prompt_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            blocks=row.hash_ids or (),
            block_tokens=size if row.hash_ids else 0,
            session=session,
            turn=moment.turn,
            after=moment.after,
            think_s=moment.think_s,
        )

    return parse


class _BailianLine(Struct, gc=False):
    """A line of a Qwen-Bailian trace: `timestamp` in s, and one id for every 16 tokens; ids are not
    chained.

    Source: alibaba-edu/qwen-bailian-usagetraces-anon. `parent_chat_id` is -1 for the first turn.
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
    unit_s = UNITS_S[options.time_unit or "s"]
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
            time_s=row.timestamp * unit_s,
            prompt_tokens=row.input_length,
            output_tokens=max(1, row.output_length),
            blocks=row.hash_ids,
            block_tokens=size,
            session=str(root),
            turn=max(0, row.turn - 1),
        )

    return parse


_EPOCH: Final = datetime(2023, 1, 1, tzinfo=UTC)
"""Date from which times of Azure's traces are counted. It is near their dates, so that a float
keeps the microseconds.
"""


def _azure(header: bytes, options: ReadOptions) -> Parse:
    """Return the parser of Azure's CSV: `TIMESTAMP` with up to seven decimals, and lengths.

    The format has no information about shared prompts. Source: Azure/AzurePublicDataset, 2023 and
    2024.
    """
    columns = Table(header, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))

    def parse(index: int, line: bytes) -> Arrival:
        row = columns.row(line)
        return Arrival(
            index=index,
            time_s=(instant_of(row["TIMESTAMP"], "TIMESTAMP") - _EPOCH).total_seconds(),
            prompt_tokens=count(row, "ContextTokens", 1),
            output_tokens=max(1, count(row, "GeneratedTokens", 0)),
        )

    return parse


def _burstgpt(header: bytes, options: ReadOptions) -> Parse:
    """Return the parser of BurstGPT: `Timestamp` in s, lengths, and in later versions a session.

    A request with an answer of 0 tokens failed and is skipped, because there was nothing to serve.
    Source: HPMLL/BurstGPT.
    """
    columns = Table(header, ("Timestamp", "Model", "Request tokens", "Response tokens"))

    def parse(index: int, line: bytes) -> Arrival | None:
        row = columns.row(line)
        output_tokens = count(row, "Response tokens", 0)
        if not output_tokens:
            return None
        return Arrival(
            index=index,
            time_s=seconds_of(row["Timestamp"], "Timestamp", options.time_unit, "s"),
            prompt_tokens=count(row, "Request tokens", 1),
            output_tokens=output_tokens,
            model=row["Model"],
            session=row.get("Session ID", ""),
        )

    return parse


def _is_bailian(line: bytes) -> bool:
    return b'"hash_ids"' in line and b'"chat_id"' in line


def _may_be_csv(line: bytes) -> bool:
    return b"," in line and not line.lstrip().startswith(b"{")


def _is_mooncake(line: bytes) -> bool:
    if not line.lstrip().startswith(b"{") or _is_bailian(line):
        return False
    return b'"hash_ids"' in line or (b'"input_length"' in line and b'"output_length"' in line)


MOONCAKE: Final = LineFormat(
    name="mooncake",
    recognises=_is_mooncake,
    takes=frozenset({"time_unit"}),
    parser=_mooncake,
)
BAILIAN: Final = LineFormat(
    name="bailian",
    recognises=_is_bailian,
    takes=frozenset({"time_unit"}),
    parser=_bailian,
)
AZURE: Final = LineFormat(
    name="azure",
    recognises=lambda line: b"ContextTokens" in line and _may_be_csv(line),
    parser=_azure,
    has_header=True,
)
BURSTGPT: Final = LineFormat(
    name="burstgpt",
    recognises=lambda line: b"Request tokens" in line and _may_be_csv(line),
    takes=frozenset({"time_unit"}),
    parser=_burstgpt,
    has_header=True,
)
