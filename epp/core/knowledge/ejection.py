"""Who gets no requests for a while, how many may be away at a time, and how one comes back.

An endpoint that `outliers` finds failing or slow is *away*: no decision sees it, whatever the
configuration says about filters. After a time that grows with each ejection it is *probed*: one
request, then two more at a time. If they go well it is back; if one fails it is away again, for
longer. That is Envoy's outlier detection (envoyproxy.io, "Outlier detection", of which the times
and the share are) with the half-open state of a circuit breaker in place of a return at full load.

There are bounds, so that a mistake here costs less than it saves. Who serves some of its requests
may go only as a small share of the pool. Who answers nothing but errors may go as long as a share
of the pool stays, and only while those that stay do better.
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
"""Of two nobody can say which is the slow one."""
PROBES: Final = 3
"""Requests that must go well before an endpoint is back."""


class Cause(StrEnum):
    SLOW = "slow"
    FAILING = "failing"


class OutlierEjection(Parameters, frozen=True):
    """Give endpoints that are slow or fail nothing for a time that grows, then try them by single requests.

    In force by its defaults without being declared, whatever the profile; `enabled: false` turns it
    off, and then who is slow or fails is only told of (`homing_per_endpoint_outlier`). Slow: what a
    request there takes, beside what was to be expected of it, is so many times the median of the
    pool. Failing: so many answers in a row were errors, or so large a share of the last ones. Each
    replica judges by the answers that it sees.
    """

    type_name: ClassVar[str] = "outlier-ejection"

    enabled: bool = True
    """False: nobody is set aside for being slow or failing."""
    slowness_factor: Annotated[float, Meta(ge=2)] = 3.0
    """Slow from so many times the median on."""
    samples_min: Annotated[int, Meta(ge=5, le=32)] = 20
    """Answers of an endpoint before it is compared."""
    consecutive_failures: Annotated[int, Meta(ge=1)] = 3
    """Failing from so many errors in a row on; of more, if the others in service fail too: until chance
    would give them such a row once in ten thousand."""
    failure_percent: Annotated[float, Meta(gt=0, le=100)] = 50.0
    """Failing from this share of errors among its answers of the last `window` on, if others in
    service have less than half of it."""
    requests_min: Annotated[int, Meta(ge=2)] = 10
    """Answers in that time before their share counts."""
    window: Duration = Duration(30.0)
    """About so long an answer counts in that share."""
    base_ejection_time: Duration = Duration(30.0)
    """How long it gets nothing; times how often it was ejected, one less for each such time in good
    standing."""
    max_ejection_time: Duration = Duration(300.0)
    """However often that was."""
    max_ejection_percent: Annotated[float, Meta(ge=0, le=50)] = 10.0
    """Of the endpoints, rounded down, may be away though they serve some requests; but one of three
    or more."""
    max_failing_percent: Annotated[float, Meta(ge=0, le=90)] = 75.0
    """Of the endpoints, rounded down, may be away if these answer nothing but errors."""

    def __post_init__(self) -> None:
        check_above_zero("window", self.window)
        check_above_zero("baseEjectionTime", self.base_ejection_time)
        if self.max_ejection_time < self.base_ejection_time:
            raise ValueError(
                f"maxEjectionTime must be at least baseEjectionTime, {self.base_ejection_time:g}s, "
                f"is {self.max_ejection_time:g}s"
            )

    def away_max(self, endpoints: int, *, serving_some: bool) -> int:
        """How many of so many endpoints may be away at a time."""
        if not serving_some:
            return int(endpoints * self.max_failing_percent / 100.0)
        share = int(endpoints * self.max_ejection_percent / 100.0)
        return max(share, int(endpoints >= COMPARED_MIN and self.max_ejection_percent > 0))


class Away:
    """One endpoint that was ejected."""

    __slots__ = ("cause", "open_probes", "passed", "probed", "serving_some", "since_s", "until_s")

    def __init__(
        self, cause: Cause, since_s: Seconds, until_s: Seconds, *, serving_some: bool
    ) -> None:
        self.cause = cause
        self.serving_some = serving_some
        self.since_s = since_s
        self.until_s = until_s
        """When it is to be probed; older requests say nothing any more."""
        self.probed = False
        self.open_probes = 0
        self.passed = 0

    @property
    def probes_left(self) -> int:
        """How many more requests it may be given now: one until the first went well."""
        allowed = PROBES - self.passed if self.passed else 1
        return allowed - self.open_probes


class _Standing:
    """How often an endpoint was ejected, less one for each base time in good standing."""

    __slots__ = ("ejections", "good_since_s")

    def __init__(self) -> None:
        self.ejections = 0
        self.good_since_s: Seconds = -math.inf


class Ejection:
    """Those that are away, by slot, and `Columns.ejected`: who may get nothing at this moment."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._settings = OutlierEjection()
        self._standings: dict[int, _Standing] = {}
        self.away: dict[int, Away] = {}
        self.masked: set[int] = set()
        """The slots that `Columns.ejected` marks."""
        self.total = dict.fromkeys(Cause, 0)
        """Ejections since the start."""

    def configure(self, settings: OutlierEjection) -> None:
        """Go by `settings` from now on; not enabled: everybody is back."""
        self._settings = settings
        if not settings.enabled:
            for slot in tuple(self.away):
                self._end(slot)

    def eject(self, slot: int, cause: Cause, now: Seconds, *, serving_some: bool) -> bool:
        """Send away the endpoint in `slot`, for longer than last time; False: it may not be."""
        known = self.away.get(slot)
        if not self._settings.enabled or (known is not None and not known.probed):
            return False
        if known is None and not self._room(serving_some=serving_some):
            return False
        standing = self._standings.setdefault(slot, _Standing())
        standing.ejections += 1
        settings = self._settings
        for_s = min(settings.base_ejection_time * standing.ejections, settings.max_ejection_time)
        since_s = now if known is None else known.since_s
        self.away[slot] = Away(cause, since_s, now + for_s, serving_some=serving_some)
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
        """Slots that are to be probed from `now` on; each is told once."""
        due = [slot for slot, one in self.away.items() if not one.probed and now >= one.until_s]
        for slot in due:
            self.away[slot].probed = True
            self._mask(slot, masked=False)
        return due

    def sent(self, lease: Lease) -> None:
        """The request of `lease` goes to its slot: a probe, if that is being probed."""
        one = self.away.get(lease.slot)
        if one is not None and one.probed:
            lease.probe = True
            one.open_probes += 1
            self._mask(lease.slot, masked=one.probes_left <= 0)

    def probe_ended(self, lease: Lease, *, passed: bool) -> bool:
        """The probe of `lease` is over, having failed nothing; True if that was the last needed."""
        lease.probe = False
        one = self.away.get(lease.slot)
        if one is None or not one.probed or lease.opened_at_s < one.until_s:
            return False
        one.open_probes -= 1
        one.passed += passed
        self._mask(lease.slot, masked=one.probes_left <= 0)
        return one.passed >= PROBES

    def back(self, slot: int, now: Seconds) -> None:
        """The endpoint in `slot` is in good standing from `now` on."""
        self._end(slot)
        self._standings[slot].good_since_s = now

    def forgive(self, now: Seconds) -> None:
        """Count an ejection less of who is in good standing for a base time."""
        base_s = self._settings.base_ejection_time
        for slot, standing in tuple(self._standings.items()):
            if slot not in self.away and now - standing.good_since_s >= base_s:
                standing.ejections -= 1
                standing.good_since_s = now
                if standing.ejections <= 0:
                    del self._standings[slot]

    def forget(self, slot: int) -> None:
        """The endpoint left or restarted."""
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
