"""Plugins that fail: what is wrong with what they return, and who failed how often.

A part that fails costs only what it adds (design D16). Whoever calls a plugin catches what it
raises, checks what it returns, tells `PluginFailures` and goes on without it. That is every
`BaseException`: here nothing is awaited, so that a `CancelledError` is the plugin's own, and past a
guard it would end the task that decides, a `SystemExit` the process. Of an exception the type and the
place are kept. Its message is not: it may quote a prompt or a header.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Final, ParamSpec

import numpy as np
from msgspec import Struct
from numpy import ndarray

from epp.core.knowledge.candidates import Affinity

P = ParamSpec("P")

BOOLS: Final = np.dtype(np.bool_)
INTS: Final = np.dtype(np.int64)
FLOATS: Final = np.dtype(np.float64)

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, 5.6.2."""
_NOT_IN_A_HEADER: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""A gateway refuses the whole answer for one of these."""


class Interrupted(KeyboardInterrupt):
    """What a signal handler raises while plugins run: no plugin's, and no guard keeps it.

    `epp serve` has none while it serves: there the event loop takes the signals.
    """


class FailingPlugin(Struct):
    """One plugin that failed."""

    name: str
    """In the configuration."""
    failures: int = 0
    what: str = ""
    """What it did last: "score raised KeyError at near/near.py:14"."""


class PluginFailures:
    """The plugins of one scheduler that failed, by name; as many as are configured at most."""

    def __init__(self) -> None:
        self._failing: dict[str, FailingPlugin] = {}
        self.so_far = 0
        """Failures of all, of those that are configured no more too."""

    def __len__(self) -> int:
        return len(self._failing)

    def __iter__(self) -> Iterator[FailingPlugin]:
        return iter(self._failing.values())

    def raised(self, name: str, verb: str, error: BaseException) -> None:
        """`verb` of the plugin `name` did not return. Raises `error` if it is an `Interrupted`."""
        if isinstance(error, Interrupted):
            raise error
        self.add(name, f"{verb} raised {type(error).__name__}{place_of(error)}")

    def returned(self, name: str, verb: str, fault: str) -> None:
        """`verb` of the plugin `name` returned what its contract does not allow."""
        self.add(name, f"{verb} returned {fault}")

    def add(self, name: str, what: str) -> None:
        """Count one failure of the plugin `name`."""
        failing = self._failing.setdefault(name, FailingPlugin(name))
        failing.failures += 1
        self.so_far += 1
        failing.what = what

    def call(
        self, name: str, verb: str, method: Callable[P, object], *given: P.args, **named: P.kwargs
    ) -> bool:
        """Call `method`, which is `verb` of the plugin `name`; False if it failed."""
        try:
            method(*given, **named)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.raised(name, verb, error)
            return False
        return True

    def retain(self, names: Collection[str]) -> None:
        """Forget all but `names`: the others are configured no more."""
        self._failing = {name: one for name, one in self._failing.items() if name in names}


# What is wrong with a result, and what was expected; "" if nothing is.


def array_fault(found: object, dtype: "np.dtype[np.generic]", n: int) -> str:
    """Expected is one `dtype` for each of `n` candidates."""
    if type(found) is ndarray and found.dtype == dtype and found.shape == (n,):
        return ""
    return f"{_kind(found)}, expected {dtype.name}[{n}]"


def positions_fault(found: object, n: int) -> str:
    """Expected are different positions among `n` candidates, at least one."""
    if type(found) is not ndarray or found.dtype != INTS or found.ndim != 1:
        return f"{_kind(found)}, expected {INTS.name}[k]"
    positions = found.tolist()
    if len(positions) == 1 and 0 <= positions[0] < n:
        return ""
    if not positions:
        return "nobody, expected at least one position"
    if min(positions) < 0 or max(positions) >= n:
        wrong = next(position for position in positions if not 0 <= position < n)
        return f"position {wrong}, expected positions from 0 to {n - 1}"
    if len(set(positions)) < len(positions):
        return "a position twice, expected different ones"
    return ""


def affinity_fault(found: object, slots: int) -> str:
    """Expected is an `Affinity` of as many endpoint slots."""
    if not isinstance(found, Affinity):
        return f"{_kind(found)}, expected Affinity"
    matched, total = found.matched, found.total
    if type(matched) is not ndarray or matched.dtype != INTS or matched.shape != (slots,):
        return f"an Affinity with matched = {array_fault(matched, INTS, slots)}"
    if type(total) is not int or total < 0:
        return f"an Affinity with total = {_kind(total)}, expected int from 0 on"
    for name, column in found.columns.items():
        fault = array_fault(column, FLOATS, slots)
        if fault:
            return f"an Affinity with the column {name} = {fault}"
    return ""


def headers_fault(found: object) -> str:
    """Expected are headers that a gateway can set, by name."""
    if not isinstance(found, Mapping):
        return f"{_kind(found)}, expected a mapping of header names to values"
    for name, value in found.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            return f"a header {_kind(name)}: {_kind(value)}, expected str: str"
        if not _HEADER_NAME.fullmatch(name):
            return "a header whose name is none (RFC 9110, 5.6.2)"
        if _NOT_IN_A_HEADER.search(value) or not _encodable(value):
            return "a header with a character in its value that no header can carry"
    return ""


def _encodable(value: str) -> bool:
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _kind(found: object) -> str:
    """`found` by its type alone: what it holds may be a client's."""
    if type(found) is ndarray:
        return f"{found.dtype.name}[{', '.join(map(str, found.shape))}]"
    return type(found).__name__


def place_of(error: BaseException) -> str:
    """Where it was raised, and where the plugin is that led there: " at near/near.py:14"."""
    traceback = error.__traceback__
    if traceback is None or traceback.tb_next is None:
        return " when it was called"
    # The first frame is the caller's, the second the plugin's.
    called = raised = traceback.tb_next
    while raised.tb_next is not None:
        raised = raised.tb_next
        if raised.tb_frame.f_code.co_filename == called.tb_frame.f_code.co_filename:
            called = raised
    place = f" at {_line(raised)}"
    return place if raised is called else f"{place}, called at {_line(called)}"


def _line(traceback: TracebackType) -> str:
    """The last two parts of the path, and the line."""
    path = traceback.tb_frame.f_code.co_filename.rsplit("/", 2)[-2:]
    return f"{'/'.join(path)}:{traceback.tb_lineno}"
