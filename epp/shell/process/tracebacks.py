"""Convert an exception to a log entry with types and places, but without data.

Local variables are never shown. Most texts of exceptions are not shown either: `KeyError`,
`ValueError` and plugins' exceptions quote their input, which may be a prompt or a header. The text
of an exception is shown if it is a literal in the code that raised it, or the system's text of an
error number.
"""

import errno
import os
from collections import deque
from collections.abc import Iterator
from traceback import walk_tb
from types import CodeType
from typing import Any, Final, TextIO

from structlog.typing import ExcInfo

EXCEPTIONS_MAX: Final = 8
"""Maximum number of exceptions shown for one error, counting causes, contexts and members of
groups.
"""
FRAMES_MAX: Final = 30
"""Maximum number of stack frames shown per exception, the innermost ones."""


def as_data(exc_info: ExcInfo) -> list[dict[str, Any]]:
    """Return log entries for an exception, its causes, contexts and members, starting with the
    outermost; at most `EXCEPTIONS_MAX`.
    """
    return [
        {
            "how": how,
            "exc_type": type(error).__name__,
            "exc_value": _text(error, frames),
            "frames": [
                {"filename": code.co_filename, "lineno": line, "name": code.co_name}
                for code, line in frames
            ],
        }
        for how, error, frames in _chain(exc_info[1])
    ]


def as_lines(out: TextIO, exc_info: ExcInfo) -> None:
    """Write the entries that `as_data` returns for people, with one line per exception and
    frame.
    """
    for how, error, frames in _chain(exc_info[1]):
        text = _text(error, frames)
        out.write(f"\n{how} {type(error).__name__}{': ' if text else ''}{text}")
        out.writelines(
            f"\n    {code.co_filename}:{line} in {code.co_name}" for code, line in frames
        )


def is_literal(text: object, code: CodeType) -> bool:
    """Return True if `text`, of an exception or a log record, is a literal in `code`, and thus
    quotes no input.
    """
    return isinstance(text, str) and any(
        type(constant) is str and constant == text for constant in code.co_consts
    )


_Frames = list[tuple[CodeType, int]]


def _chain(error: BaseException) -> Iterator[tuple[str, BaseException, _Frames]]:
    pending: deque[tuple[str, BaseException]] = deque([("raised", error)])
    seen: set[int] = set()
    while pending and len(seen) < EXCEPTIONS_MAX:
        how, at = pending.popleft()
        if id(at) in seen:
            continue
        seen.add(id(at))
        walked = ((frame.f_code, line) for frame, line in walk_tb(at.__traceback__))
        yield how, at, list(deque(walked, FRAMES_MAX))
        if at.__cause__ is not None:
            pending.append(("from", at.__cause__))
        elif at.__context__ is not None and not at.__suppress_context__:
            pending.append(("while handling", at.__context__))
        if isinstance(at, BaseExceptionGroup):
            pending.extend(("one of it", member) for member in at.exceptions[:EXCEPTIONS_MAX])


def _text(error: BaseException, frames: _Frames) -> str:
    if isinstance(error, OSError) and error.errno and error.errno in errno.errorcode:
        words = os.strerror(error.errno)
        return words if error.strerror == words else ""
    text = error.args[0] if error.args else ""
    return text if frames and is_literal(text, frames[-1][0]) else ""
