"""Containment of plugin failures: checks of returned values, and a count of failures by plugin.

A plugin that fails loses only its own contribution (design D16). Its caller catches what it raises,
checks what it returns, reports to `PluginFailures` and continues without it. The caller catches
every `BaseException`. Nothing is awaited here, so a `CancelledError` comes from the plugin itself.
Uncaught, it would end the deciding task, and a `SystemExit` would end the process. Only the type
and the place of an exception are recorded. Its message is not, because it may quote a prompt or a
header.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Final, ParamSpec

import numpy as np
from msgspec import Struct
from numpy import ndarray

P = ParamSpec("P")

BOOLS: Final = np.dtype(np.bool_)
INTS: Final = np.dtype(np.int64)
FLOATS: Final = np.dtype(np.float64)

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Regular expression that matches a valid header name (RFC 9110, 5.6.2)."""
_NOT_IN_A_HEADER: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Regular expression that finds a character that a gateway refuses in a header value. The gateway
would drop the whole response.
"""


class Interrupted(KeyboardInterrupt):
    """An interrupt that a signal handler raises while plugins run. Plugin guards let it pass.

    `epp serve` does not raise it while it serves, because the event loop handles signals there.
    """


class FailingPlugin(Struct):
    """A plugin that failed at least once, with its number of failures."""

    name: str
    """Name of the plugin in the configuration."""
    failures: int = 0
    what: str = ""
    """Description of the plugin's latest failure, such as "score raised KeyError at
    near/near.py:14"; "" if it did not fail yet.
    """


class PluginFailures:
    """The plugins of one scheduler that failed, by name. There are at most as many as configured
    plugins.
    """

    def __init__(self) -> None:
        self._failing: dict[str, FailingPlugin] = {}
        self.so_far = 0
        """Total number of failures of plugins, including plugins that are no longer configured."""

    def __len__(self) -> int:
        return len(self._failing)

    def __iter__(self) -> Iterator[FailingPlugin]:
        return iter(self._failing.values())

    def raised(self, name: str, verb: str, error: BaseException) -> None:
        """Record that method `verb` of plugin `name` raised `error`. An `Interrupted` is raised again
        instead of being recorded.
        """
        if isinstance(error, Interrupted):
            raise error
        self.add(name, f"{verb} raised {type(error).__name__}{place_of(error)}")

    def returned(self, name: str, verb: str, fault: str) -> None:
        """Record that method `verb` of plugin `name` returned a value that its contract forbids."""
        self.add(name, f"{verb} returned {fault}")

    def add(self, name: str, what: str) -> None:
        """Count one failure of plugin `name`, described by `what`."""
        failing = self._failing.setdefault(name, FailingPlugin(name))
        failing.failures += 1
        self.so_far += 1
        failing.what = what

    def call(
        self, name: str, verb: str, method: Callable[P, object], *given: P.args, **named: P.kwargs
    ) -> bool:
        """Call `method`, which is the method `verb` of plugin `name`, with `given` and `named`.
        Return False, and record the failure, if it raised.
        """
        try:
            method(*given, **named)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.raised(name, verb, error)
            return False
        return True

    def retain(self, names: Collection[str]) -> None:
        """Drop the failures of all plugins that are not among `names`, because these are no longer
        configured.
        """
        self._failing = {name: one for name, one in self._failing.items() if name in names}


# Each of these functions describes what is wrong with a result and what was expected; "" if nothing
# is wrong.


def array_fault(found: object, dtype: "np.dtype[np.generic]", n: int) -> str:
    """Return why `found` is no array of `dtype` with shape (n,), or "" if it is one."""
    if type(found) is ndarray and found.dtype == dtype and found.shape == (n,):
        return ""
    return f"{kind_of(found)}, expected {dtype.name}[{n}]"


def positions_fault(found: object, n: int) -> str:
    """Return why `found` is no int64 array of distinct positions from 0 to n - 1, at least one, or
    "" if it is.
    """
    if type(found) is not ndarray or found.dtype != INTS or found.ndim != 1:
        return f"{kind_of(found)}, expected {INTS.name}[k]"
    positions = found.tolist()
    if len(positions) == 1 and 0 <= positions[0] < n:
        return ""
    if not positions:
        return "no position, expected at least one"
    if min(positions) < 0 or max(positions) >= n:
        wrong = next(position for position in positions if not 0 <= position < n)
        return f"position {wrong}, expected positions from 0 to {n - 1}"
    if len(set(positions)) < len(positions):
        return "a position twice, expected distinct positions"
    return ""


def headers_fault(found: object) -> str:
    """Return why `found` is no mapping of header names to values that a gateway can set, or "" if
    it is.
    """
    if not isinstance(found, Mapping):
        return f"{kind_of(found)}, expected a mapping of header names to values"
    for name, value in found.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            return f"a header {kind_of(name)}: {kind_of(value)}, expected str: str"
        if not _HEADER_NAME.fullmatch(name):
            return "a header with an invalid name (RFC 9110, 5.6.2)"
        if _NOT_IN_A_HEADER.search(value) or not _encodable(value):
            return "a header with an invalid character in its value"
    return ""


def _encodable(value: str) -> bool:
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def kind_of(found: object) -> str:
    """Return the type of `found` as text, without its content, which may come from a client."""
    if type(found) is ndarray:
        return f"{found.dtype.name}[{', '.join(map(str, found.shape))}]"
    return type(found).__name__


def place_of(error: BaseException) -> str:
    """Return the place where `error` was raised, as text that follows a verb, such as " at
    near/near.py:14". It includes the plugin's line that led there, if that is another one.
    """
    traceback = error.__traceback__
    if traceback is None or traceback.tb_next is None:
        return " when it was called"
    # The first frame belongs to the caller, the second to the plugin.
    called = raised = traceback.tb_next
    while raised.tb_next is not None:
        raised = raised.tb_next
        if raised.tb_frame.f_code.co_filename == called.tb_frame.f_code.co_filename:
            called = raised
    place = f" at {_line(raised)}"
    return place if raised is called else f"{place}, called at {_line(called)}"


def _line(traceback: TracebackType) -> str:
    """Return the last two parts of the file's path and the line number of a traceback entry, such
    as "near/near.py:14".
    """
    path = traceback.tb_frame.f_code.co_filename.rsplit("/", 2)[-2:]
    return f"{'/'.join(path)}:{traceback.tb_lineno}"
