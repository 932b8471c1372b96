"""Parsing of CSV and TSV lines into cells, and of the whole numbers in them."""

import csv
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sim.traces.arrival import FieldError

_DELIMITERS: Final = (",", "\t", ";", "|")
_NAME_CHARACTERS_MAX: Final = 64
_TOKENS_MAX: Final = 10_000_000


class Table:
    """A table with a header; its columns are found by name."""

    def __init__(self, header: bytes, needed: Sequence[str] = ()) -> None:
        """Read the header; its most frequent delimiter is that of the file.

        Raises `FieldError` if a column in `needed` is missing.
        """
        self._delimiter = _delimiter(header)
        self.names = [name.strip() for name in _cells(header, self._delimiter)]
        missing = [name for name in needed if name not in self.names]
        if missing:
            raise FieldError("", f"Expected columns {', '.join(needed)}, missing {missing[0]}")

    def row(self, line: bytes) -> dict[str, str]:
        """Return the cells of a line by column. Raises `FieldError` if there are too few or too many."""
        found = _cells(line, self._delimiter)
        if len(found) != len(self.names):
            raise FieldError("", f"Expected {len(self.names)} columns, got {len(found)}")
        return {name: cell.strip() for name, cell in zip(self.names, found, strict=True)}


def is_header(line: bytes) -> bool:
    """Return whether a line could be a header: it has several short texts, and none is a number."""
    if line.lstrip().startswith((b"{", b"[")):
        return False
    try:
        names = [name.strip() for name in _cells(line, _delimiter(line))]
    except (FieldError, UnicodeDecodeError):
        return False
    return len(names) > 1 and all(map(_is_name, names))


def count(row: Mapping[str, Any], name: str, lowest: int) -> int:
    """Return the whole number in a column, which may be written as `600.0` or as a text.

    Raises `FieldError` if it is no whole number or is less than `lowest`.
    """
    value = row.get(name)
    number = -1.0
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = -1.0
    if lowest <= number <= _TOKENS_MAX and number.is_integer():
        return int(number)
    got = "none" if value is None or value == "" else repr(value)[:40]
    raise FieldError(name, f"Expected an integer of at least {lowest}, got {got}")


def _cells(line: bytes, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line.decode().rstrip("\r\n")], delimiter=delimiter))
    except csv.Error:
        longest = f"cells of at most {csv.field_size_limit()} characters"
        raise FieldError("", f"Expected a row without line breaks, {longest}") from None


def _delimiter(header: bytes) -> str:
    return max(_DELIMITERS, key=lambda delimiter: header.count(delimiter.encode()))


def _is_name(text: str) -> bool:
    if not text or len(text) > _NAME_CHARACTERS_MAX or not text.isprintable():
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False
