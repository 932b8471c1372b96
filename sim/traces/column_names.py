"""Detection of the roles of a trace's columns (time, prompt tokens, ...), by name or by
`--columns`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from sim.traces.arrival import FieldError
from sim.traces.moments import unit_in

ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "timestamp": (
        *("timestamp", "arrivaltime", "arrivedat", "arrivaltimestamp", "arrival", "time", "ts"),
        *("starttime", "starttimestamp", "requeststarttime", "requeststart", "requesttime"),
        *("requesttimestamp", "relativetimestamp", "sendtime", "sentat", "createdat", "created"),
        *("datetime", "date"),
    ),
    "prompt_tokens": (
        *("prompttokens", "inputtokens", "inputlength", "inputlen", "promptlength", "promptlen"),
        *("numprefilltokens", "prefilltokens", "numprompttokens", "numinputtokens"),
        *("prompttokenscount", "inputtokenscount", "prompttokencount", "inputtokencount"),
        *("contexttokens", "requesttokens", "inputsequencelength", "isl", "inputtoks"),
    ),
    "output_tokens": (
        *("outputtokens", "completiontokens", "outputlength", "outputlen", "completionlength"),
        *("numdecodetokens", "decodetokens", "numoutputtokens", "numgeneratedtokens"),
        *("outputtokenscount", "completiontokenscount", "outputtokencount"),
        *("completiontokencount", "generatedtokens", "generationtokens", "responsetokens"),
        *("responselength", "outputsequencelength", "osl", "outputtoks"),
    ),
    "session": ("sessionid", "session", "conversationid", "threadid", "chatid"),
    "model": ("model", "modelname", "modelid"),
    "prefix": ("hashids", "prefix", "prefixid", "prefixgroup", "blockhashes"),
    "prefix_tokens": ("prefixtokens", "prefixlength", "prefixlen", "numprefixtokens"),
    "block_tokens": ("blocksize", "blocktokens"),
    "delay": ("delay",),
    "prompt": (
        *("conversations", "conversation", "messages", "payload", "textinput", "prompt", "text"),
        *("question", "instruction", "query"),
    ),
    "answer": ("completion", "response", "answer", "output"),
}
"""Column names by which each role is recognised, the likeliest first.

Names are written with lower-case letters and digits only.
"""
NEEDED: Final[Mapping[str, str]] = {
    "timestamp": "arrival times",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
}
"""Roles that a trace needs unless its prompts are texts; requests at a constant rate and later turns of
a session need no times. The values name the roles in errors.
"""
_IN_MILLISECONDS: Final = frozenset({"textinput", "outputlength", "inputlength", "delay"})
"""Column names of AIPerf. If a trace with prompts as text has one of them, its times are
milliseconds.
"""
_NAMES_LISTED_MAX: Final = 20
_NAME_CHARACTERS_MAX: Final = 64
_NOT_IN_A_NAME: Final = re.compile(r"[^a-z0-9]+")


class Meaning(Struct, frozen=True, kw_only=True):
    """The role of each column of a trace, and the units of its times and delays."""

    names: Mapping[str, str]
    """Name of the column of each role that was found; roles are keys of `ROLES`."""
    time_unit: str
    """Time unit at the end of the name of the time column, a key of `moments.UNITS_S`, or "" if the
    name has none.
    """
    usual_time_unit: str
    """Time unit of the trace's times if neither the user, nor the name of the column, nor the size
    of the numbers shows it.
    """
    delay_unit: str


def meaning_of(names: Sequence[str], told: Mapping[str, str]) -> Meaning:
    """Find the column of each role. `names` are the columns of the trace; `told` maps roles to the
    columns that the user named. A role without a column is left out.

    A nested name such as `a.b.c` is compared by its last part, or by the part before it if the last
    is `value`. If several columns match a role, the first name in `ROLES` wins, then the name with
    the fewest dots. Raises `FieldError` if a column that the user named is not in `names`.
    """
    for what, name in told.items():
        if name not in names:
            raise FieldError("", f"Expected a column {name!r} for {what}, found {listed(names)}")
    found = dict(told)
    units = {
        what: unit_in(told[what])[1] if what in told else "" for what in ("timestamp", "delay")
    }
    for what, aliases in ROLES.items():
        if what in told:
            continue
        known: dict[str, tuple[str, str]] = {}
        for name in sorted(names, key=lambda name: name.count(".")):
            bare, unit = unit_in(_leaf(name)) if what in units else (_leaf(name), "")
            known.setdefault(_plain(bare), (name, unit))
        alias = next((alias for alias in aliases if alias in known), None)
        if alias is not None:
            found[what], unit = known[alias]
            units |= {what: unit} if what in units else {}
    in_ms = "prompt" in found and not _IN_MILLISECONDS.isdisjoint(map(_plain, names))
    return Meaning(
        names=found,
        time_unit=units["timestamp"],
        usual_time_unit="ms" if in_ms else "s",
        delay_unit=units["delay"],
    )


def check_meaning(meaning: Meaning, names: Sequence[str], *, times_needed: bool) -> None:
    """Raise `FieldError` if the times, the prompt tokens or the output tokens have no column, neither
    by its name in `names` nor by `--columns`.

    Traces with prompts as text need none of them. `times_needed` is False if requests are sent at a
    constant rate or a later turn of a session waits for an answer.
    """
    if "prompt" in meaning.names:
        # Its tokens can be counted, and a list of prompts seldom has times.
        return
    for what, called in NEEDED.items():
        if what in meaning.names or (what == "timestamp" and not times_needed):
            continue
        or_else = ""
        if what == "timestamp":
            or_else = ", or send the requests at a constant rate with --rate-per-s"
        raise FieldError(
            "",
            f"Expected a column with a known name for {called}, found {listed(names)}: "
            f"name the column with --columns {what}=NAME{or_else}",
        )


def listed(names: Sequence[str]) -> str:
    """Join column names for an error: at most 20 names, each cut to 64 characters."""
    if not names:
        return "none"
    shown = [name[:_NAME_CHARACTERS_MAX] for name in names[:_NAMES_LISTED_MAX]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _plain(name: str) -> str:
    return _NOT_IN_A_NAME.sub("", name.lower())


def _leaf(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if parts[-1] == "value" and len(parts) > 1 else parts[-1]
