"""Outlier ejection: which endpoints are excluded for a while, how many at a time, and how they
return.

Within the limits below, an endpoint that `outliers` finds failing or slow is *away*: regardless of
the configured filters, no decision considers it while a ready endpoint is left that is not away.
After a time that grows with each ejection, it is *probed* with one request, then with up to two at
a time. If they succeed, the endpoint returns. If one fails, it is ejected again, for longer up to a
limit. The times and the share follow Envoy's outlier detection (envoyproxy.io, "Outlier
detection"). The half-open state of a circuit breaker replaces Envoy's return at full load.

Limits keep a wrong ejection cheaper than the benefit of a right one. Endpoints that serve some of
their requests are ejected only up to a small share of the pool. Endpoints that return nothing but
errors are ejected while a share of the pool stays, and only while those that stay do better.
"""

import math
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from epp.core.duration import Duration, check_above_zero
from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.inflight import Lease
from epp.core.parameters import Parameters
from epp.core.types import Seconds

COMPARED_MIN: Final = 3
"""Minimum number of endpoints whose speeds are compared. With two endpoints, a comparison does not
show which one is slow.
"""
PROBES: Final = 3
"""Number of probe requests that must succeed before an ejected endpoint returns to service. A probe
is a real request that tests the endpoint.
"""


class Cause(StrEnum):
    SLOW = "slow"
    FAILING = "failing"


class OutlierEjection(Parameters, frozen=True):
    """Eject endpoints that are slow or fail, for a growing time; then probe them with single
    requests.

    `outlier-ejection` applies to every profile, with its defaults if the document does not declare
    it. If `enabled` is false, slow and failing endpoints are only reported
    (`homing_per_endpoint_outlier`). An endpoint is slow if its requests take a multiple of their
    expected time, compared with the median of the pool. An endpoint is failing if several answers
    in a row, or a large share of its recent answers, were errors. Each replica of the picker judges
    endpoints by the answers that it sees.
    """

    type_name: ClassVar[str] = "outlier-ejection"

    enabled: bool = True
    """True if slow or failing endpoints are ejected."""
    slowness_factor: Annotated[float, Meta(ge=2)] = 3.0
    """Multiple of the pool's median time from which an endpoint counts as slow."""
    samples_min: Annotated[int, Meta(ge=5, le=32)] = 20
    """Minimum number of answers of an endpoint before its times are compared with those of the
    others.
    """
    consecutive_failures: Annotated[int, Meta(ge=1)] = 3
    """Number of errors in a row from which an endpoint is failing. If the other endpoints fail too,
    more errors are needed: as many as occur in a row by chance once in ten thousand.
    """
    failure_percent: Annotated[float, Meta(gt=0, le=100)] = 50.0
    """Percentage of errors among an endpoint's answers of the last `window` from which the endpoint
    is failing. More than a quarter of the other endpoints in service must have less than half of
    this endpoint's percentage.
    """
    requests_min: Annotated[int, Meta(ge=2)] = 10
    """Minimum number of an endpoint's answers in the last `window` before its share of errors
    counts.
    """
    window: Duration = Duration(30.0)
    """Approximate time for which an answer counts in an endpoint's share of errors."""
    base_ejection_time: Duration = Duration(30.0)
    """Duration of an endpoint's first ejection. Later ones last this time multiplied by the number
    of ejections, which falls by one for each such time in service.
    """
    max_ejection_time: Duration = Duration(300.0)
    """Longest duration of one ejection."""
    max_ejection_percent: Annotated[float, Meta(ge=0, le=50)] = 10.0
    """Largest percentage of the endpoints, rounded down, that may be ejected although they serve
    some requests; at least one endpoint if there are three or more, and none if it is 0.
    """
    max_failing_percent: Annotated[float, Meta(ge=0, le=90)] = 75.0
    """Largest percentage of the endpoints, rounded down, that may be ejected if they return nothing
    but errors. Endpoints that are ejected for other reasons count too.
    """

    def __post_init__(self) -> None:
        check_above_zero("window", self.window)
        check_above_zero("baseEjectionTime", self.base_ejection_time)
        if self.max_ejection_time < self.base_ejection_time:
            raise ValueError(
                f"maxEjectionTime is {self.max_ejection_time:g}s; it must be at least "
                f"baseEjectionTime, {self.base_ejection_time:g}s"
            )

    def away_max(self, endpoints: int, *, serving_some: bool) -> int:
        """Return how many of a pool's `endpoints` may be ejected at a time: by
        `max_ejection_percent` if they serve some requests, by `max_failing_percent` if none.
        """
        if not serving_some:
            return int(endpoints * self.max_failing_percent / 100.0)
        share = int(endpoints * self.max_ejection_percent / 100.0)
        return max(share, int(endpoints >= COMPARED_MIN and self.max_ejection_percent > 0))


class EjectedEndpoint:
    """The state of one ejected endpoint."""

    __slots__ = ("cause", "open_probes", "passed", "probed", "serving_some", "until_s")

    def __init__(self, cause: Cause, until_s: Seconds, *, serving_some: bool) -> None:
        self.cause = cause
        self.serving_some = serving_some
        self.until_s = until_s
        """Time from which on the ejected endpoint is probed; results of requests that were sent
        before it are ignored.
        """
        self.probed = False
        self.open_probes = 0
        self.passed = 0

    @property
    def probes_left(self) -> int:
        """Return how many more probe requests may start now: one at a time until the first has
        succeeded.
        """
        allowed = PROBES - self.passed if self.passed else 1
        return allowed - self.open_probes


class _Standing:
    """The number of one endpoint's ejections. It falls by one for each base ejection time that the
    endpoint is in service.
    """

    __slots__ = ("ejections", "good_since_s")

    def __init__(self) -> None:
        self.ejections = 0
        self.good_since_s: Seconds = -math.inf


class Ejection:
    """The ejected endpoints by slot. `Columns.ejected` is True for those that may receive no
    request at the moment, not even a probe, while another ready endpoint is in service.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._settings = OutlierEjection()
        self._standings: dict[int, _Standing] = {}
        self.away: dict[int, EjectedEndpoint] = {}
        self.masked: set[int] = set()
        """Slots of the ejected endpoints that may receive no request at the moment, unless all
        ready endpoints are among them. `Columns.ejected` is True for them.
        """
        self.total = dict.fromkeys(Cause, 0)
        """Number of ejections since the start of the picker, by cause."""

    def configure(self, settings: OutlierEjection) -> None:
        """Use `settings` from now on. If they disable ejection, all ejected endpoints return to
        service.
        """
        self._settings = settings
        if not settings.enabled:
            for slot in tuple(self.away):
                self._end(slot)

    def eject(self, slot: int, cause: Cause, now: Seconds, *, serving_some: bool) -> bool:
        """Eject the endpoint in `slot` for a time that grows with the number of its ejections, at
        most `max_ejection_time`.
        Return False if ejection is disabled, if this endpoint is ejected and not being probed, or
        if it is not ejected and too many others are.
        """
        known = self.away.get(slot)
        if not self._settings.enabled or (known is not None and not known.probed):
            return False
        if known is None and not self._room(serving_some=serving_some):
            return False
        standing = self._standings.setdefault(slot, _Standing())
        standing.ejections += 1
        settings = self._settings
        for_s = min(settings.base_ejection_time * standing.ejections, settings.max_ejection_time)
        self.away[slot] = EjectedEndpoint(cause, now + for_s, serving_some=serving_some)
        self._mask(slot, masked=True)
        self.total[cause] += 1
        return True

    def _room(self, *, serving_some: bool) -> bool:
        endpoints = sum(endpoint is not None for endpoint in self._columns.endpoints)
        most = self._settings.away_max(endpoints, serving_some=False)
        if not serving_some:
            return len(self.away) < most
        few = self._settings.away_max(endpoints, serving_some=True)
        partial = sum(one.serving_some for one in self.away.values())
        return partial < few and len(self.away) < max(most, few)

    def due(self, now: Seconds) -> list[int]:
        """Return the slots whose ejection time is over at `now`, and begin to probe their
        endpoints. Each is returned once.
        """
        due = [slot for slot, one in self.away.items() if not one.probed and now >= one.until_s]
        for slot in due:
            self.away[slot].probed = True
            self._mask(slot, masked=False)
        return due

    def sent(self, lease: Lease) -> None:
        """Count the request of `lease` as a probe if the endpoint to which it is sent is ejected
        and being probed.
        """
        one = self.away.get(lease.slot)
        if one is not None and one.probed:
            lease.probe = True
            one.open_probes += 1
            self._mask(lease.slot, masked=one.probes_left <= 0)

    def probe_ended(self, lease: Lease, *, passed: bool) -> bool:
        """End the probe with the request of `lease`. `passed` is True if it counts as a success.
        Do nothing if the request was sent before the present ejection was over. Return True if the
        endpoint has had enough successes to return to service.
        """
        lease.probe = False
        one = self.away.get(lease.slot)
        if one is None or not one.probed or lease.opened_at_s < one.until_s:
            return False
        one.open_probes -= 1
        one.passed += passed
        self._mask(lease.slot, masked=one.probes_left <= 0)
        return one.passed >= PROBES

    def back(self, slot: int, now: Seconds) -> None:
        """End the ejection of the endpoint in `slot` at `now`."""
        self._end(slot)
        self._standings[slot].good_since_s = now

    def forgive(self, now: Seconds) -> None:
        """Reduce the number of ejections by one for each endpoint that was in service for a base
        ejection time since its return or the last reduction.
        """
        base_s = self._settings.base_ejection_time
        for slot, standing in tuple(self._standings.items()):
            if slot not in self.away and now - standing.good_since_s >= base_s:
                standing.ejections -= 1
                standing.good_since_s = now
                if standing.ejections <= 0:
                    del self._standings[slot]

    def forget(self, slot: int) -> None:
        """Drop the ejection and the number of ejections of `slot`, because its endpoint left or
        restarted.
        """
        self._standings.pop(slot, None)
        if slot in self.away:
            self._end(slot)

    def _end(self, slot: int) -> None:
        del self.away[slot]
        self._mask(slot, masked=False)

    def _mask(self, slot: int, *, masked: bool) -> None:
        self._columns.ejected[slot] = masked
        if masked:
            self.masked.add(slot)
        else:
            self.masked.discard(slot)
