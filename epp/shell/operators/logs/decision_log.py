"""Log one line that explains a decision or a refusal.

A line contains the id and model of a request, the names of flows if it waited in the queue and, if
it was refused, the path without query and the name of the faulty parameter. Other data from clients
never reaches a log.
"""

from typing import Final

import numpy as np
from structlog.typing import FilteringBoundLogger

from epp.core.decision.account import Account, Leg, Queued, rounded_parts
from epp.core.decision.scheduler import Decision
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Refusal, Seconds
from epp.shell.operators.logs.set_up import LogLevel
from epp.shell.per_second import PerSecond

_TEXT_CHARACTERS_MAX: Final = 256
"""Maximum number of characters that are logged of a text from a client, such as the model name or
the request id.
"""


class DecisionLog:
    """A log of decisions and refusals at a bounded rate.

    At debug level every decision and every refusal is logged. At info level every `sample_every`-th
    decision is logged, by its number, so that two runs with the same decisions log the same ones,
    and at most `refusals_per_second_max` refusals a second; the next line of a refusal contains the
    number of omitted ones. Above info level nothing is logged.
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
        """Create the log. `level` is the one passed to `configure_logging`; a line has the scores
        of at most `candidates_max` candidates.
        """
        assert sample_every >= 1, f"sample_every must be at least 1, got {sample_every}"
        assert candidates_max >= 1, f"candidates_max must be at least 1, got {candidates_max}"
        self._logger = logger
        self._debug = level == "debug"
        self._info = self._debug or level == "info"
        self._sample_every = sample_every
        self._refusals = PerSecond(refusals_per_second_max)
        self._candidates_max = candidates_max

    def decided(self, decision: Decision) -> None:
        """Log the destination of a request and the best candidates' scores by scorer, if the level
        and the sampling allow it.
        """
        if self._debug:
            self._logger.debug("decision", **self._line(decision.account))
            return
        # Numbers start at 1.
        if self._info and (decision.account.number - 1) % self._sample_every == 0:
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
        queued: Queued | None = None,
    ) -> None:
        """Log why a request was refused, if the level and the rate limit allow it; `request` is
        None if it was not parsed.

        The sentence for the client is omitted, because it may quote the client's data.
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
        if queued is not None:
            line["queued"] = queued.fields()
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
            **({} if leg.rank is None else {"rank": leg.rank}),
            "ready": leg.ready,
            "eliminated": leg.eliminated,
            "candidates": len(leg.candidates),
            "scores": self._scores(leg),
            **self._stages(account),
            **({} if account.queued is None else {"queued": account.queued.fields()}),
            **({} if account.shadow is None else {"shadow": account.shadow.fields()}),
        }

    def _stages(self, account: Account) -> dict[str, object]:
        """Return the route and the endpoints of the stages before decode; {} without stages."""
        if account.route is None:
            return {}
        line: dict[str, object] = {
            "route": account.route.value,
            "uncached_tokens": account.uncached_tokens,
        }
        for leg in account.legs[1:]:
            line[leg.stage.value] = {
                "endpoint": leg.endpoint.name,
                "address": leg.endpoint.address,
                "matched_blocks": leg.matched_blocks,
                "eliminated": leg.eliminated,
                "candidates": len(leg.candidates),
                "scores": self._scores(leg),
            }
        return line

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
