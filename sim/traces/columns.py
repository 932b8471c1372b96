"""Trace formats with one column for each property of a request: CSV, TSV, JSON Lines, JSON arrays
and Parquet.

The role of a column follows from `--columns` or from its name; `docs/own-trace.md` lists the names
that other tools use. A prompt may be a text, messages or a whole request instead of a number of
tokens.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from sim.traces.arrival import Arrival, FieldError
from sim.traces.blocks import MOONCAKE_BLOCK_TOKENS, check_block_tokens, check_blocks
from sim.traces.cells import Table, count, is_header
from sim.traces.column_names import Meaning, check_meaning, meaning_of
from sim.traces.moments import seconds_of
from sim.traces.openai_requests import TOKEN_ESTIMATE, arrival_of_body
from sim.traces.prompts import DEFAULT_MODEL
from sim.traces.reading import MALFORMED, LineFormat, Parse, ReadOptions
from sim.traces.texts import prompt_in, tokenizer_at, tokens_in
from sim.traces.turns import Turns

_DEPTH_MAX: Final = 4
"""Maximum depth of nested JSON objects whose members are treated as columns."""
_SHAPES_MAX: Final = 256
"""Maximum number of different sets of column names whose roles are cached."""
_PREFIXES_MAX: Final = 2**24
"""Number of different shared prefixes that a trace must not reach, because one token of generated text
cannot encode larger ids.
"""
_WHOLE_REQUEST: Final = "payload"
"""Name of the JSON member that holds a whole request; its own members are not treated as columns of
the trace.
"""
_TAKES: Final = frozenset({"columns", "time_unit", "tokenizer"})
_MEMBER: Final = re.compile(rb'"(\w{1,64})"\s*:')


class _Row(Struct, frozen=True):
    """The cells of one row of a trace, accessible by the roles of their columns."""

    cells: Mapping[str, Any]
    meaning: Meaning

    def value(self, what: str) -> Any:
        """Return the cell in the column of role `what`; None if the trace has no such column or the
        cell is empty.
        """
        name = self.meaning.names.get(what)
        told = None if name is None else self.cells.get(name)
        return None if told == "" else told

    def name(self, what: str) -> str:
        return self.meaning.names.get(what, what)

    def text(self, what: str) -> str:
        value = self.value(what)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return "" if value is None else str(value)

    def count(self, what: str, lowest: int) -> int:
        return count(self.cells, self.name(what), lowest)


class RowParser:
    """A parser of the rows of one trace into arrivals. A row maps column names to values."""

    def __init__(self, options: ReadOptions) -> None:
        """Load the tokenizer, if the options name one. Raises the errors of `tokenizer_at`."""
        self._options = options
        self._told = dict(options.columns)
        self._shapes: dict[tuple[str, ...], Meaning] = {}
        self._turns: Turns | None = None
        self._prefixes: dict[str, int] = {}
        self._tokenize = tokenizer_at(options.tokenizer)

    def meaning(self, names: Sequence[str]) -> Meaning:
        """Return the roles of the columns `names`.

        Raises `FieldError` if a property that every request needs has no column.
        """
        shape = tuple(names)
        known = self._shapes.get(shape)
        if known is None:
            known = meaning_of(shape, self._told)
            # A later turn waits for an answer and needs no time, though the first row had one.
            later_turn = self._turns is not None and "session" in known.names
            times_needed = self._options.rate_per_s is None and not later_turn
            check_meaning(known, shape, times_needed=times_needed)
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            self._shapes[shape] = known
        return known

    def arrival(self, index: int, cells: Mapping[str, Any]) -> Arrival | None:
        """Return the request in a row of a trace. Return None if the row's prompt is a ShareGPT
        conversation without question or answer, or an empty list in a trace without numbers of
        prompt tokens.

        Raises the exceptions in `MALFORMED`.
        """
        meaning = self.meaning(tuple(cells))
        row = _Row(cells, meaning)
        time_s = delay_s = None
        if (told := row.value("timestamp")) is not None:
            unit = self._options.time_unit or meaning.time_unit
            time_s = seconds_of(told, row.name("timestamp"), unit, meaning.usual_time_unit)
        if (told := row.value("delay")) is not None:
            delay_s = seconds_of(told, row.name("delay"), meaning.delay_unit, "ms")
        if self._turns is None:
            self._turns = Turns(self._options, timed=time_s is not None)
        has_text = row.value("prompt") or "prompt_tokens" not in meaning.names
        asked = self._asked(index, row) if has_text else self._counted(index, row)
        if asked is None:
            return None
        session = row.text("session")
        moment = self._turns.next(index, time_s, session, delay_s, row.name("timestamp"))
        return structs.replace(
            asked,
            time_s=moment.time_s,
            session=session,
            turn=moment.turn,
            after=moment.after,
            think_s=moment.think_s,
        )

    def _asked(self, index: int, row: _Row) -> Arrival | None:
        """Return the request of a row whose prompt is a text, at time 0.

        Return None if the prompt is an empty list, or a ShareGPT conversation without question or
        answer.
        """
        prompt = prompt_in(row.cells, row.name("prompt"), row.text("model"))
        if prompt is None:
            return None
        answer = row.value("answer") if prompt.answer is None else prompt.answer
        output_tokens = None
        if row.value("output_tokens") is not None:
            output_tokens = max(1, row.count("output_tokens", 0))
        elif isinstance(answer, str):
            output_tokens = tokens_in(answer, self._tokenize)
        body = dict(prompt.body)
        if output_tokens is not None and prompt.path:
            # Benchmarks do the same, so that a real engine generates as much as was recorded.
            body |= {"max_tokens": output_tokens, "ignore_eos": True}
        asked = arrival_of_body(
            index, msgspec.json.encode(body), prompt.path, tokenize=self._tokenize
        )
        # A body must name a model. The default name is removed, because the row names no model.
        model = "" if asked.model == DEFAULT_MODEL else asked.model
        return structs.replace(
            asked, output_tokens=output_tokens or asked.output_tokens, model=model
        )

    def _counted(self, index: int, row: _Row) -> Arrival:
        """Return the request of a row that has token counts instead of a text, at time 0."""
        prompt_tokens = row.count("prompt_tokens", 1)
        asked = Arrival(
            index=index,
            time_s=0.0,
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, row.count("output_tokens", 0)),
            model=row.text("model"),
        )
        prefix = row.value("prefix")
        if isinstance(prefix, list) and prefix:
            size = self._options.block_tokens
            if size is None and row.value("block_tokens") is not None:
                size = row.count("block_tokens", 1)
            size = size or MOONCAKE_BLOCK_TOKENS
            blocks = _ids(prefix, row.name("prefix"))
            check_block_tokens(size)
            check_blocks(blocks, prompt_tokens, size, row.name("prefix"))
            return structs.replace(asked, blocks=blocks, block_tokens=size)
        shared_tokens = self._prefix_tokens(row, prompt_tokens)
        if not prefix or not shared_tokens:
            return asked
        known = self._prefixes.setdefault(row.text("prefix"), len(self._prefixes) + 1)
        if known >= _PREFIXES_MAX:
            expected = f"Expected fewer than {_PREFIXES_MAX:,} different prefixes"
            raise FieldError(row.name("prefix"), expected)
        return structs.replace(asked, blocks=(known,), lengths=(shared_tokens,))

    def _prefix_tokens(self, row: _Row, prompt_tokens: int) -> int:
        """Return the number of prompt tokens that a request shares with others of the same prefix
        name; 0 if the trace does not say and the user did not name the prefix column.
        """
        if row.value("prefix_tokens") is not None:
            return min(prompt_tokens, row.count("prefix_tokens", 0))
        # The name of a column alone does not imply that prompts share as much as possible.
        return prompt_tokens if "prefix" in self._told else 0


def _ids(values: Sequence[Any], name: str) -> tuple[int, ...]:
    ids = []
    for value in values:
        whole = value if type(value) is int else None
        if isinstance(value, float) and value.is_integer():
            whole = int(value)
        if whole is None or whole < 0:
            raise FieldError(
                name, f"Expected ids of blocks, integers of at least 0, got {value!r:.40}"
            )
        ids.append(whole)
    return tuple(ids)


def flat(row: Mapping[str, Any], depth: int = _DEPTH_MAX) -> Mapping[str, Any]:
    """Return the row with the members of nested objects, down to `depth` levels, as separate
    columns named `object.member`. A whole request (`payload`) remains one column.
    """
    if not any(isinstance(value, dict) for value in row.values()):
        return row
    flattened: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and depth and name != _WHOLE_REQUEST:
            inner = flat(value, depth - 1)
            flattened |= {f"{name}.{member}": told for member, told in inner.items()}
        else:
            flattened[name] = value
    return flattened


def _table(header: bytes, options: ReadOptions) -> Parse:
    table = Table(header)
    rows = RowParser(options)
    rows.meaning(table.names)
    return lambda index, line: rows.arrival(index, table.row(line))


def _objects(first: bytes, options: ReadOptions) -> Parse:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    rows = RowParser(options)
    return lambda index, line: rows.arrival(index, flat(decode(line)))


def _is_object(line: bytes) -> bool:
    return line.lstrip().startswith(b"{")


def _has_prompt(line: bytes) -> bool:
    """Return whether a line is a JSON object with a prompt as text or messages.

    An incomplete line is judged by the member names in it.
    """
    if not _is_object(line):
        return False
    try:
        cells = flat(msgspec.json.decode(line, type=dict[str, Any]))
    except MALFORMED:
        names = [name.decode(errors="replace") for name in _MEMBER.findall(line)]
        return "prompt" in meaning_of(names, {}).names
    prompt = _Row(cells, meaning_of(tuple(cells), {})).value("prompt")
    return isinstance(prompt, str | list | dict)


TABLE: Final = LineFormat(
    name="csv",
    recognises=is_header,
    parser=_table,
    takes=_TAKES,
    has_header=True,
)
PROMPTS: Final = LineFormat(
    name="prompts",
    recognises=_has_prompt,
    parser=_objects,
    takes=_TAKES,
    token_estimate=TOKEN_ESTIMATE,
)
OBJECTS: Final = LineFormat(
    name="json",
    recognises=_is_object,
    parser=_objects,
    takes=_TAKES,
)
