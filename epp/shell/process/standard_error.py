"""Log what Python and libraries would print on standard error.

Log records of other libraries, warnings and unhandled exceptions become one log line each, in the
configured format. A line contains no local variables and no text that may quote a request.
"""

import asyncio
import inspect
import logging
import sys
import threading
import time
import warnings
from types import TracebackType
from typing import Any, Final, TextIO

import structlog

from epp.shell.per_second import PerSecond
from epp.shell.process.tracebacks import is_literal

LINES_PER_SECOND_MAX: Final = 10
TEXT_CHARACTERS_MAX: Final = 256

_log = structlog.get_logger(__name__)


class StandardError(logging.Handler):
    """A log handler that writes log records of other libraries to the picker's log, at most
    `LINES_PER_SECOND_MAX` lines a second. Call `take_over` once per process. Set `task_failed` as
    the exception handler of each loop.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = PerSecond(LINES_PER_SECOND_MAX)

    def take_over(self) -> None:
        """Redirect to the log everything that Python would print on standard error, except a crash
        of the interpreter.
        """
        logging.getLogger().addHandler(self)
        warnings.showwarning = self._warned
        sys.excepthook = self._ended
        threading.excepthook = self._thread_failed
        sys.unraisablehook = self._unraisable

    def task_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log that a task or callback failed, with the task's name and the exception. The rest of
        asyncio's context is omitted, because it quotes arguments.
        """
        task = context.get("task") or context.get("future")
        name = task.get_name() if isinstance(task, asyncio.Task) else ""
        error = context.get("exception")
        self._say(logging.ERROR, "task or callback failed", task=name, exc_info=error)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record of another library to the picker's log, without the record's
        arguments. Drop it if there are too many lines in this second.
        """
        self._say(
            logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING,
            "library reported a problem",
            library=record.name,
            place=f"{record.pathname}:{record.lineno}",
            text=_template(record),
            exc_info=record.exc_info,
        )

    def _say(self, level: int, event: str, **fields: Any) -> None:
        if self._limit.admits(time.monotonic()):
            _log.log(level, event, **fields, **self._limit.left_out())

    def _warned(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = f"{filename}:{lineno}"
        self._say(logging.WARNING, "Python warning", kind=category.__name__, place=place)

    def _ended(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        _log.critical("process ended by an exception", exc_info=(kind, error, traceback))

    def _thread_failed(self, told: threading.ExceptHookArgs) -> None:
        self._say(logging.ERROR, "thread failed", exc_info=told.exc_value)

    def _unraisable(self, told: "sys.UnraisableHookArgs") -> None:
        self._say(logging.ERROR, "finalizer failed", exc_info=told.exc_value)


def _template(record: logging.LogRecord) -> str:
    """Return the text of a log record without its arguments, cut to `TEXT_CHARACTERS_MAX`
    characters; "" if it was formatted before it was logged.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if is_literal(record.msg, frame.f_code):
            return record.msg[:TEXT_CHARACTERS_MAX]
        frame = frame.f_back
    return ""
