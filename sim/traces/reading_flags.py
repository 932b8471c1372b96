"""Command-line flags for reading a trace, shared by all commands that read one."""

import argparse
from typing import Final

from sim.traces.column_names import ROLES
from sim.traces.formats import FORMATS
from sim.traces.moments import UNITS_S
from sim.traces.reading import ReadOptions

_BLOCK_TOKENS_MAX: Final = 10**6
_RATE_MAX: Final = 1e9


def add_reading_flags(parser: argparse.ArgumentParser, *format_flags: str) -> None:
    """Add the flags for reading a trace to `parser`;
    `read_options` returns their values. `format_flags` are the flags for the trace format.
    """
    add = parser.add_argument_group("Reading the trace").add_argument
    names = [known.name for known in FORMATS]
    add(*format_flags, dest="trace_format", default="", choices=["", *names], metavar="NAME",
        help=f"format of the trace (default: detected by content): {', '.join(names)}")  # fmt: skip
    add("--columns", type=_columns, action="append", default=[], metavar="WHAT=NAME,…",
        help="names of trace columns that are not recognised by name; WHAT is one of "
        f"{', '.join(ROLES)}")  # fmt: skip
    add("--time-unit", choices=tuple(UNITS_S), default="",
        help="unit of the times in the trace (default: that of the format or of the column name)")  # fmt: skip
    add("--rate-per-s", type=_rate, metavar="R",
        help="arrival rate in requests a second, if the trace has no times (default: 1)")  # fmt: skip
    add("--block-tokens", type=_block_tokens, metavar="N",
        help="tokens per block (default: the size that the trace states, or the usual one of the format)")  # fmt: skip
    add("--tokenizer", default="", metavar="PATH",
        help="a tokenizer.json, or its folder, that counts the tokens of prompts given as text "
        "(default: one token for every 4 bytes)")  # fmt: skip
    add(
        "--skip-bad",
        action="store_true",
        help="skip and count malformed lines instead of stopping at the first",
    )


def read_options(options: argparse.Namespace, seed: int = 1, kept_in: str = "") -> ReadOptions:
    """Return the reading options from the flags of `add_reading_flags`. `kept_in` is the folder for
    cached traces.
    """
    return ReadOptions(
        format=options.trace_format,
        block_tokens=options.block_tokens,
        skip_bad=options.skip_bad,
        rate_per_s=options.rate_per_s,
        columns=tuple(
            sorted({what: name for told in options.columns for what, name in told}.items())
        ),
        time_unit=options.time_unit,
        tokenizer=options.tokenizer,
        seed=seed,
        kept_in=kept_in,
    )


def _columns(text: str) -> tuple[tuple[str, str], ...]:
    told = []
    for part in text.split(","):
        what, _, name = (side.strip() for side in part.partition("="))
        if what not in ROLES or not name:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not WHAT=NAME, where WHAT is one of {', '.join(ROLES)}"
            )
        told.append((what, name))
    return tuple(told)


def _block_tokens(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 0 < number <= _BLOCK_TOKENS_MAX:
        raise argparse.ArgumentTypeError(
            f"expected an integer from 1 to {_BLOCK_TOKENS_MAX}, got {text!r}"
        )
    return number


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _RATE_MAX:
        raise argparse.ArgumentTypeError(
            f"expected a number above 0 and at most 10^9, got {text!r}"
        )
    return number
