"""Parsing of lines of CSV and TSV files into cells, and of whole numbers in cells."""

import csv
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sim.traces.arrival import FieldError

_DELIMITERS: Final = (",", "\t", ";", "|")
_NAME_CHARACTERS_MAX: Final = 64
_TOKENS_MAX: Final = 10_000_000


class Table:
    """The header of a CSV or TSV file, with which its lines are parsed into cells by column name."""

    def __init__(self, header: bytes, needed: Sequence[str] = ()) -> None:
        """Read the header. The delimiter that is most frequent in it is that of the file.

        Raises `FieldError` if a column in `needed` is missing.
        """
        self._delimiter = _delimiter(header)
        self.names = [name.strip() for name in _cells(header, self._delimiter)]
        missing = [name for name in needed if name not in self.names]
        if missing:
            raise FieldError("", f"Expected columns {', '.join(needed)}, missing {missing[0]}")

    def row(self, line: bytes) -> dict[str, str]:
        """Return the cells of a line by column name.

        Raises `FieldError` if their number differs from that of the header.
        """
        found = _cells(line, self._delimiter)
        if len(found) != len(self.names):
            raise FieldError("", f"Expected {len(self.names)} columns, got {len(found)}")
        return {name: cell.strip() for name, cell in zip(self.names, found, strict=True)}


def is_header(line: bytes) -> bool:
    """Return whether a line could be the header of a table: several short texts, of which none is a
    number.
    """
    if line.lstrip().startswith((b"{", b"[")):
        return False
    try:
        names = [name.strip() for name in _cells(line, _delimiter(line))]
    except (FieldError, UnicodeDecodeError):
        return False
    return len(names) > 1 and all(map(_is_name, names))


def count(row: Mapping[str, Any], name: str, lowest: int) -> int:
    """Return the whole number in the column `name` of a row; `600.0` and texts of numbers are
    accepted.

    Raises `FieldError` if the value is not a whole number from `lowest` to 10 million.
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
    raise FieldError(name, f"Expected an integer from {lowest} to {_TOKENS_MAX:,}, got {got}")


def _cells(line: bytes, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line.decode().rstrip("\r\n")], delimiter=delimiter))
    except csv.Error:
        longest = f"with cells of at most {csv.field_size_limit()} characters"
        raise FieldError("", f"Expected a row without line breaks and {longest}") from None


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
