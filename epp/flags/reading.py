"""Parse command lines into frozen structs of flags.

The spelling is that of Go: one or two dashes, `--flag=value` or `--flag value`. A boolean takes its
value only after `=`. If a flag is given twice, the last value counts. An unknown flag or an invalid
value is an error. A flag without effect causes a warning, such as most flags that only the
reference picker has (`reference_picker`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from itertools import groupby
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from epp.core.duration import Duration, duration_text, parse_duration
from epp.core.expectation import place_and_sentence
from epp.flags.row import Flag, flags_of
from epp.flags.values import (
    ByteCount,
    IpAddress,
    MemoryBytes,
    parse_byte_count,
    parse_ip_address,
    parse_memory_bytes,
)

F = TypeVar("F", bound=Struct)


class FlagError(Exception):
    """The error of an invalid command line. Its message is one sentence."""


def wants_help(arguments: Iterable[str]) -> bool:
    return any(argument in {"-h", "-help", "--help"} for argument in arguments)


def help_text(usage: str, kind: type[Struct]) -> str:
    """Return the help text of a command: its usage, and every flag by group, with one line of text
    and its default.
    """
    lines = [f"usage: {usage}"]
    for title, flags in groupby(flags_of(kind).values(), lambda flag: flag.row.group):
        lines += ["", f"{title}:"]
        for flag in flags:
            none = flag.default in (None, "", ())
            shown = "" if none else f" (default: {_shown(flag.default)})"
            lines.append(f"  --{flag.name}")
            lines.append(f"      {flag.row.help}{shown}")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return duration_text(default) if isinstance(default, Duration) else str(default)


def split(
    arguments: Sequence[str], kind: type[Struct], foreign: Mapping[str, bool] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Split `arguments` into flags with their values and the remaining arguments.

    If a flag is repeated, its last value is returned. `foreign` names flags that are accepted
    although `kind` lacks them; its values say which of them are boolean. Raises `FlagError`.
    """
    booleans = {name: flag.base is bool for name, flag in flags_of(kind).items()}
    booleans |= foreign or {}
    given: dict[str, str] = {}
    rest: list[str] = []
    pending = list(reversed(arguments))
    while pending:
        argument = pending.pop()
        if argument == "--":
            return given, rest + pending[::-1]
        if not argument.startswith("-") or argument == "-":
            rest.append(argument)
            continue
        dashes = 2 if argument.startswith("--") else 1
        name, equals, value = argument[dashes:].partition("=")
        if name not in booleans:
            near = get_close_matches(name, booleans, n=1)
            hint = f", did you mean --{near[0]}?" if near else ""
            raise FlagError(f"unknown flag {'-' * dashes + name!r}{hint}")
        if booleans[name]:
            value = _boolean(name, value) if equals else "true"
        elif not equals:
            if not pending:
                raise FlagError(f"--{name} needs a value")
            value = pending.pop()
        given[name] = value
    return given, rest


def _boolean(name: str, text: str) -> str:
    """Return "true" or "false" for any of Go's spellings of a boolean. Raises `FlagError`."""
    if text in {"1", "t", "T", "true", "TRUE", "True"}:
        return "true"
    if text in {"0", "f", "F", "false", "FALSE", "False"}:
        return "false"
    raise FlagError(f"--{name}: expected true or false, got {text!r}")


def convert(given: Mapping[str, str], kind: type[F], **arguments: str) -> F:
    """Return an instance of the struct `kind`, with the flags in `given` and the other fields in
    `arguments`.

    Raises `FlagError` if a value is invalid.
    """
    values: dict[str, Any] = {**arguments}
    for name, flag in flags_of(kind).items():
        if name in given:
            values[flag.field] = _read(flag, given[name])
    return kind(**values)


def expect_none(rest: Sequence[str]) -> None:
    """Raise `FlagError` if `rest`, the arguments that remain after the flags, is not empty."""
    if rest:
        raise FlagError(f"unexpected argument {rest[0]!r}, expected flags only")


def _read(flag: Flag, text: str) -> Any:
    """Return the value of `flag` that `text` spells. Raises `FlagError` if it is invalid."""
    value: Any = text
    if flag.is_list:
        value = [item.strip() for item in text.split(",") if item.strip()]
    if (
        isinstance(flag.base, type)
        and issubclass(flag.base, StrEnum)
        and text not in list(flag.base)
    ):
        raise FlagError(f"--{flag.name}: expected {' or '.join(flag.base)}, got {text!r}")
    try:
        value = msgspec.convert(value, flag.type, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:
        sentence = place_and_sentence(str(error))[1].removesuffix(", got a text")
        if sentence.startswith("expected"):
            sentence += f", got {text!r}"
        raise FlagError(f"--{flag.name}: {sentence}") from error
    _check_bounds(flag, value)
    return value


def _check_bounds(flag: Flag, value: Any) -> None:
    row = flag.row
    spelt = _shown if isinstance(value, Duration) else str
    if row.above is not None and value <= row.above:
        raise FlagError(
            f"--{flag.name}: expected more than {_bound(row.above, value)}, got {spelt(value)}"
        )
    below = row.least is not None and value < row.least
    if row.least is not None and row.most is not None and (below or value > row.most):
        expected = f"{_bound(row.least, value)} to {_bound(row.most, value)}"
        raise FlagError(f"--{flag.name}: expected {expected}, got {spelt(value)}")
    if row.least is not None and below:
        raise FlagError(
            f"--{flag.name}: expected at least {_bound(row.least, value)}, got {spelt(value)}"
        )


def _bound(number: int, value: Any) -> str:
    """Return `number` as text with the unit in which bounds of `value` are shown: hours or seconds
    for a duration, none otherwise.
    """
    if not isinstance(value, Duration):
        return str(number)
    return f"{number // 3600}h" if number and number % 3600 == 0 else f"{number}s"


def _decode(kind: type[Any], text: str) -> Any:
    readers: dict[type[Any], Callable[[str], Any]] = {
        Duration: parse_duration,
        ByteCount: parse_byte_count,
        MemoryBytes: parse_memory_bytes,
        IpAddress: parse_ip_address,
    }
    return readers[kind](text)
