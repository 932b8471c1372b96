"""One line for each endpoint that turns out slow or failing beside the others, and one when it is not."""

import math
import time
from typing import Final

import structlog

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.outliers import Outlier
from epp.core.types import Seconds

LINES_MAX: Final = 10
"""In one look: a bad rollout makes hundreds fail at once."""

AGAIN_S: Final = 60.0
"""Of one endpoint at most a line in so long: it may fail and recover many times a minute."""

_log: Final = structlog.get_logger(__name__)


class OutliersLog:
    """Compares the outliers with those of the last look; called about once a second."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._told: dict[str, tuple[Outlier | None, Seconds]] = {}
        """Endpoint id -> what was told of it last, and when."""

    def report(self) -> None:
        """Log what has changed since it was told."""
        now = time.monotonic()
        found = dict(self._scheduler.outliers.detected(now))
        before, self._told = self._told, {}
        changed = 0
        for slot, endpoint in self._scheduler.pool.endpoints():
            was, told_at_s = before.get(endpoint.endpoint_id, (None, -math.inf))
            outlier = found.get(slot)
            if not _alike(was, outlier) and now >= told_at_s + AGAIN_S:
                changed += 1
                if changed <= LINES_MAX:
                    _tell(endpoint.name, was, outlier)
                was, told_at_s = outlier, now
            if was is not None or now < told_at_s + AGAIN_S:
                self._told[endpoint.endpoint_id] = was, told_at_s
        if changed > LINES_MAX:
            _log.warning("more endpoints became outliers or ceased", endpoints=changed - LINES_MAX)


def _alike(was: Outlier | None, outlier: Outlier | None) -> bool:
    if was is None or outlier is None:
        return was is outlier
    return (was.cause, was.ejected) == (outlier.cause, outlier.ejected)


def _tell(endpoint: str, was: Outlier | None, outlier: Outlier | None) -> None:
    if outlier is None:
        assert was is not None, "something changed"
        _log.info("endpoint is no outlier any more", endpoint=endpoint, was=was.cause.value)
        return
    known = not math.isnan(outlier.slowness)
    _log.warning(
        "endpoint is an outlier",
        endpoint=endpoint,
        cause=outlier.cause.value,
        times_the_median=round(outlier.slowness, 2) if known else None,
        failures_in_a_row=outlier.failures,
        ejected=outlier.ejected,
    )
