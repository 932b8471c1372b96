"""Log when an endpoint becomes a slow or failing outlier, is ejected, and when it no longer is."""

import math
import time
from typing import Final

import structlog

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.outliers import Outlier
from epp.core.types import Seconds

LINES_MAX: Final = 10
"""Maximum number of log lines about outliers per report; a bad rollout makes hundreds of endpoints
fail at once.
"""

AGAIN_S: Final = 60.0
"""Minimum time in seconds between two log lines about one endpoint, whose outlier status may change
often.
"""

_log: Final = structlog.get_logger(__name__)


class OutliersLog:
    """A log of endpoints that become or no longer are outliers, compared with the previous report.
    Call `report` about once a second.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._told: dict[str, tuple[Outlier | None, Seconds]] = {}
        """Outlier status in the last log line about each endpoint, and that line's time, by
        endpoint id.
        """

    def report(self) -> None:
        """Log the endpoints whose outlier status differs from their last log line, each at most
        once in `AGAIN_S` seconds. Beyond `LINES_MAX` lines, log only the number of further
        endpoints.
        """
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
            _log.warning(
                "outlier status changed for more endpoints than are logged",
                endpoints=changed - LINES_MAX,
            )


def _alike(was: Outlier | None, outlier: Outlier | None) -> bool:
    if was is None or outlier is None:
        return was is outlier
    return (was.cause, was.ejected) == (outlier.cause, outlier.ejected)


def _tell(endpoint: str, was: Outlier | None, outlier: Outlier | None) -> None:
    if outlier is None:
        assert was is not None, "one of both is an outlier"
        _log.info("endpoint is no longer an outlier", endpoint=endpoint, was=was.cause.value)
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
