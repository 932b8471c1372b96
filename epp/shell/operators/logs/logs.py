"""Log set-up, and the line that explains a decision.

Of a request a line shows its id, its model and, where it was refused, its path without the query;
all else that a client sent never reaches a log.

Lines go to standard output: it is where a container's logs are collected, and `epp serve` prints
nothing else there.
"""

import logging
import sys
from typing import Final, Literal, TypeAlias

import numpy as np
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from epp.core.decision.account import Account, Leg, rounded_parts
from epp.core.decision.scheduler import Decision
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Refusal, Seconds
from epp.shell.per_second import PerSecond
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
_TEXT_CHARACTERS_MAX: Final = 256
"""What a client can write into a line, a model name or a request id, is cut here."""


def configure_logging(log_format: LogFormat, level: LogLevel) -> None:
    """Set up structlog, once, at start: one line an event, UTC timestamps, below `level` nothing.

    Loggers are cached at first use, so that a filtered line costs one call of an empty function;
    a logger that was used before this call keeps the old set-up.
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
    """What a client wrote cannot forge a line, nor steer a terminal; JSON escapes it anyhow."""
    for name, value in line.items():
        if isinstance(value, str):
            line[name] = printable(value)
    return line


class DecisionLog:
    """Explains decisions and refusals, at a bounded rate.

    At debug every decision is a line. At info every `sample_every`-th is, by its number, so that
    two runs with the same decisions log the same ones, beginning with the first. Refusals are
    logged at info, at most `refusals_per_second_max`; the next line tells how many were left out.
    """

    def __init__(
        self,
        logger: FilteringBoundLogger,
        *,
        level: LogLevel,
        sample_every: int = 100,
        refusals_per_second_max: int = 10,
        candidates_max: int = 16,
    ) -> None:
        """`level` as given to `configure_logging`. At most `candidates_max` rows in a table."""
        assert sample_every >= 1, f"sample_every must be at least 1, is {sample_every}"
        assert candidates_max >= 1, f"candidates_max must be at least 1, is {candidates_max}"
        self._logger = logger
        self._debug = level == "debug"
        self._info = self._debug or level == "info"
        self._sample_every = sample_every
        self._refusals = PerSecond(refusals_per_second_max)
        self._candidates_max = candidates_max

    def decided(self, decision: Decision) -> None:
        """Log where a request goes and the best candidates' scores by scorer."""
        if self._debug:
            self._logger.debug("decision", **self._line(decision.account))
            return
        # Numbers count from 1.
        if self._info and (decision.number - 1) % self._sample_every == 0:
            self._logger.info(
                "decision", sample_every=self._sample_every, **self._line(decision.account)
            )

    def refused(
        self,
        refusal: Refusal,
        now: Seconds,
        request: InferenceRequest | None = None,
        *,
        request_id: str = "",
        path: str = "",
    ) -> None:
        """Log why a request was refused; `request` is known once it was parsed.

        Not the sentence for the client: it may quote what the client sent.
        """
        if not self._info or not (self._debug or self._refusals.admits(now)):
            return
        line: dict[str, object] = {
            "reason": refusal.reason.value,
            "status": refusal.status,
            "path": _cut(path),
            "eliminated": dict(refusal.eliminated),
        }
        if refusal.param is not None:
            line["param"] = _cut(refusal.param)
        line |= _identity(request) if request is not None else {"request_id": _cut(request_id)}
        self._logger.info("refusal", **line, **self._refusals.left_out())

    def _line(self, account: Account) -> dict[str, object]:
        leg = account.leg
        return {
            "number": account.number,
            **_identity(account.request),
            "endpoint": leg.endpoint.name,
            "address": leg.endpoint.address,
            "fallbacks": [endpoint.address for endpoint in leg.fallbacks],
            "prompt_tokens": account.request.prompt_tokens,
            "matched_blocks": leg.matched_blocks,
            "total_blocks": leg.total_blocks,
            "ready": leg.ready,
            "eliminated": leg.eliminated,
            "candidates": len(leg.candidates),
            "scores": self._scores(leg),
            **({} if account.shadow is None else {"shadow": account.shadow.told()}),
        }

    def _scores(self, leg: Leg) -> list[dict[str, object]]:
        order = leg.best(self._candidates_max)
        shown = leg.candidates.take(np.array(order, dtype=np.int64))
        return [
            {
                "endpoint": endpoint.name,
                "total": round(float(leg.scored.total[position]), 4),
                "matched_blocks": matched,
                "parts": rounded_parts(leg.scorers, leg.scored.parts_of(position)),
            }
            for position, endpoint, matched in zip(
                order, shown.endpoints, shown.matched_blocks.tolist(), strict=True
            )
        ]


def _identity(request: InferenceRequest) -> dict[str, object]:
    return {
        "request_id": _cut(request.request_id),
        "model": _cut(request.model),
        "priority": request.priority,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "…"
