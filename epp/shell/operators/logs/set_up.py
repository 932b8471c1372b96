"""Configure the format and destination of log lines.

Lines are written to standard output, where a container's logs are collected. `epp serve` prints
nothing else there.
"""

import logging
import sys
from typing import Final, Literal, TypeAlias

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from epp.shell.printable import printable
from epp.shell.process.tracebacks import as_data, as_lines

LogFormat: TypeAlias = Literal["json", "console"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logging(log_format: LogFormat, level: LogLevel) -> None:
    """Configure structlog once at start: one line per event, UTC times, no events below `level`.

    Loggers are cached at first use, so that a filtered line costs one call of an empty function. A
    logger that was used before this call keeps the old configuration.
    """
    structlog.configure(
        processors=_processors(log_format),
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        context_class=dict,
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )


def _processors(log_format: LogFormat) -> list[Processor]:
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if log_format == "console":
        console = structlog.dev.ConsoleRenderer(
            colors=sys.stdout.isatty(), exception_formatter=as_lines
        )
        return [*shared, _only_printable, console]
    exceptions = structlog.processors.ExceptionRenderer(as_data)
    return [*shared, exceptions, structlog.processors.JSONRenderer(ensure_ascii=True)]


def _only_printable(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """Escape control characters in log values, so that clients cannot forge lines or control a
    terminal. JSON output escapes them by itself.
    """
    for name, value in line.items():
        if isinstance(value, str):
            line[name] = printable(value)
    return line
