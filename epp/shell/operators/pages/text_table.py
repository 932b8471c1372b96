"""Format rows as a plain table, for pages and terminals."""

from collections.abc import Iterable, Iterator
from typing import Any

from epp.shell.operators.decisions.decision_rows import Row
from epp.shell.operators.pages.page_queue import in_turns


def table(rows: Iterable[Row]) -> str:
    """Format `rows` as aligned columns, with the members' names as headings; "-" stands for missing
    values.
    """
    made = _Table()
    for row in rows:
        made.add(row)
    return "".join(made.lines())


async def table_in_turns(rows: Iterable[Row]) -> str:
    """Format rows as `table` does, but let the event loop run after every few rows."""
    made = _Table()
    async for row in in_turns(rows):
        made.add(row)
    return "".join([line async for line in in_turns(made.lines())])


class _Table:
    """The rows of a table as text, with the width of each column."""

    def __init__(self) -> None:
        self._rows: list[dict[str, str]] = []
        self._widths: dict[str, int] = {}

    def add(self, row: Row) -> None:
        line = {name: cell(value) for name, value in row.items()}
        self._rows.append(line)
        for name, text in line.items():
            self._widths[name] = max(self._widths.get(name, len(name)), len(text))

    def lines(self) -> Iterator[str]:
        if not self._widths:
            yield "none\n"
            return
        for row in ({name: name for name in self._widths}, *self._rows):
            cells = (row.get(name, "-").ljust(width) for name, width in self._widths.items())
            yield "  ".join(cells).rstrip() + "\n"


def cell(value: Any) -> str:
    """Return a table's value as text without control characters or line breaks, or "-" for None and
    "".
    """
    if value is None or value == "":
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
