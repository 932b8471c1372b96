"""Rows as a plain table, for pages and terminals."""

from collections.abc import Iterable
from typing import Any

from epp.shell.operators.decision_rows import Row


def table(rows: Iterable[Row]) -> str:
    """`rows` under the names of their members, in aligned columns; "-" where there is nothing."""
    lines = [{name: cell(value) for name, value in row.items()} for row in rows]
    names = list(dict.fromkeys(name for line in lines for name in line))
    if not names:
        return "none\n"
    widths = {name: max(len(name), *(len(line.get(name, "-")) for line in lines)) for name in names}
    head = {name: name for name in names}
    return "".join(
        "  ".join(line.get(name, "-").ljust(widths[name]) for name in names).rstrip() + "\n"
        for line in (head, *lines)
    )


def cell(value: Any) -> str:
    """One word or phrase; what a client wrote cannot steer a terminal or forge a line."""
    if value is None or value == "":
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
