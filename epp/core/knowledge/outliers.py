"""Which endpoint is worse than the others: slow against the pool's median, or failing.

**Slow.** What a request took is divided by what was to be expected of it where it was sent, so that
long prompts, long queues and endpoints that are known to be slower (`inflight-load-producer`) count
for nothing. That is the time to the first chunk of a streamed answer, where the gateway shows it,
against the prompts ahead of it and its own; and the time to the end, against these and what answers
take in this pool. The logarithms of these quotients are averaged over the last requests of each
endpoint and compared to the median of all: the expectation may be wrong by any factor that is the
same for all. The worse of the two counts. If more than a third are that slow, nobody is: then the
pool has two kinds of endpoints.

**Failing.** So many responses in a row were errors. A 503 of the engine itself is none: it is full.

Both are told, and change no decision unless `outlier-ejection-filter` is in the profile: then
whoever is worse gets no requests for a while, longer each time, as Envoy's outlier detection does
(envoyproxy.io, "Outlier detection"; the defaults of failures, times and share are Envoy's).
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from statistics import median
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta, Struct

from epp.core.duration import Duration, check_above_zero
from epp.core.knowledge.candidates import Bools, Candidates, Columns
from epp.core.knowledge.inflight import (
    SECONDS_PER_OUTPUT_TOKEN_ESTIMATE,
    Ending,
    Lease,
    Outcome,
)
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

SAMPLES_AVERAGED: Final = 32
"""Requests that an average remembers, the last counts for one in so many. Where times scatter by a
factor of e, it then scatters by 13 %."""
ANSWERS_AVERAGED: Final = 256
"""Of all endpoints together, for what answers take."""
SAMPLE_LOG_MAX: Final = math.log(100.0)
"""One request counts as at most a hundred times too slow or too fast."""
FRESH_S: Final = 300.0
"""An endpoint without an answer for so long is compared to nobody."""
COMPARED_MIN: Final = 3
"""Of two nobody can say which is the outlier."""
KIND_SHARE: Final = 3
"""One in so many may be slow; where more are, that is a kind of endpoint."""
BACK_SHARE: Final = 2 / 3
"""Whoever is slow is so until it is below this share of the factor, so that it does not flicker;
and whoever is above it looks like those that are slow."""
EVALUATE_EVERY_S: Final = 5.0


class Cause(StrEnum):
    SLOW = "slow"
    FAILING = "failing"


class OutlierEjection(
    Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Drop endpoints that are slow or fail, for a time that grows; keep all if nobody is left.

    Slow: what a request there takes, beside what was to be expected of it, is so many times the
    median of the pool. Failing: so many answers in a row were errors. Without this filter who is
    either by its defaults is only told of (`homing_per_endpoint_outlier`). Each replica judges by
    the answers that it sees.
    """

    type_name: ClassVar[str] = "outlier-ejection-filter"
    sheds_load: ClassVar[bool] = False

    slowness_factor: Annotated[float, Meta(ge=2)] = 3.0
    """Slow from so many times the median on."""
    samples_min: Annotated[int, Meta(ge=5, le=SAMPLES_AVERAGED)] = 20
    """Answers of an endpoint before it is compared."""
    consecutive_failures: Annotated[int, Meta(ge=1)] = 5
    """Failing from so many errors in a row on."""
    base_ejection_time: Duration = Duration(30.0)
    """How long it gets nothing; times how often it was ejected, one less for each such time in good
    standing."""
    max_ejection_time: Duration = Duration(300.0)
    """However often that was."""
    max_ejection_percent: Annotated[float, Meta(ge=0, le=50)] = 10.0
    """Of the endpoints, rounded down; but one of three or more."""

    def __post_init__(self) -> None:
        check_above_zero("baseEjectionTime", self.base_ejection_time)
        if self.max_ejection_time < self.base_ejection_time:
            raise ValueError(
                f"maxEjectionTime must be at least baseEjectionTime, {self.base_ejection_time:g}s, "
                f"is {self.max_ejection_time:g}s"
            )

    def ejected_max(self, endpoints: int) -> int:
        """How many of so many endpoints may be ejected at a time."""
        share = int(endpoints * self.max_ejection_percent / 100.0)
        return max(share, int(endpoints >= COMPARED_MIN and self.max_ejection_percent > 0))

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        keep: Bools = ~candidates.ejected
        return keep if keep.item(keep.argmax()) else np.ones(len(candidates), dtype=np.bool_)


_TOLD_BY: Final = OutlierEjection()
"""What is told of where nothing is ejected."""


class Outlier(Struct, frozen=True, kw_only=True):
    """Why an endpoint is told of."""

    cause: Cause
    slowness: float
    """Times the median of the pool; NaN: not known."""
    failures: int
    """In a row."""
    ejected: bool


class _Average:
    """Of the logarithms of the last quotients."""

    __slots__ = ("_samples_max", "last_at_s", "log", "samples")

    def __init__(self, samples_max: int = SAMPLES_AVERAGED) -> None:
        self._samples_max = samples_max
        self.log = 0.0
        self.samples = 0
        self.last_at_s: Seconds = -math.inf

    def add(self, log: float, now: Seconds) -> None:
        if self.samples < self._samples_max:
            self.samples += 1
        self.log += (log - self.log) / self.samples
        self.last_at_s = now


class _Record:
    """What is known of one endpoint."""

    __slots__ = (
        "back_at_s",
        "duration",
        "ejected",
        "ejections",
        "failures",
        "first_output",
        "good_since_s",
        "slow",
        "slowness",
    )

    def __init__(self) -> None:
        self.first_output = _Average()
        self.duration = _Average()
        self.slowness = math.nan
        self.slow = False
        self.failures = 0
        self.ejected = False
        self.ejections = 0
        """How often, less one for each base time in good standing."""
        self.back_at_s: Seconds = -math.inf
        """When the last ejection ends or ended; older requests say nothing any more."""
        self.good_since_s: Seconds = -math.inf


class Outliers:
    """Averages by slot, who is an outlier by them, and who is ejected: `Columns.ejected`.

    Not answered for is what an endpoint does with requests of others: if another picker loads it
    more than the rest, it is slow here.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._records: dict[int, _Record] = {}
        self._settings = _TOLD_BY
        self._ejects = False
        self._due_s: Seconds = -math.inf
        self._answers = _Average(ANSWERS_AVERAGED)
        """What they take after the prompt, of all endpoints: the logarithm of seconds."""
        self.ejections = dict.fromkeys(Cause, 0)
        """Since the start."""

    def configure(self, settings: OutlierEjection | None) -> None:
        """Judge by `settings` from now on; None: eject nobody."""
        self._settings = settings or _TOLD_BY
        self._ejects = settings is not None
        self._due_s = -math.inf
        if not self._ejects:
            for slot, record in self._records.items():
                record.ejected = self._columns.ejected[slot] = False

    def ended(self, lease: Lease, outcome: Outcome, now: Seconds) -> None:
        """The request of `lease`, which is live, ended; called once, before it is closed."""
        record = self._records.get(lease.slot)
        if record is None:
            record = self._records[lease.slot] = _Record()
        if lease.opened_at_s < record.back_at_s:
            return
        status = outcome.status
        if outcome.ending is Ending.ERROR or (status is not None and status >= 500):
            # vLLM answers 503 when its admission limits are reached.
            if status != 503 or outcome.by_gateway:
                self._failed(lease.slot, record, now)
            return
        if status is None or outcome.ending is Ending.UNSEEN:
            return
        record.failures = 0
        if status < 300:
            self._took(lease, record, outcome.ending, now)

    def tick(self, now: Seconds) -> None:
        """About once a second: let back who was away for long enough, and compare now and then."""
        for slot, record in self._records.items():
            if record.ejected and now >= record.back_at_s:
                self._let_back(slot, record, now)
        if now >= self._due_s:
            self._due_s = now + EVALUATE_EVERY_S
            self._evaluate(now)

    def forget(self, slot: int) -> None:
        """The endpoint left or restarted."""
        self._records.pop(slot, None)
        self._columns.ejected[slot] = False

    def slowness(self) -> dict[int, float]:
        """Slot -> times the pool's median, of those that were compared last."""
        return {
            slot: record.slowness
            for slot, record in self._records.items()
            if not math.isnan(record.slowness)
        }

    def found(self) -> Iterator[tuple[int, Outlier]]:
        """Slot and reason of each that is slow, fails or is ejected."""
        for slot, record in self._records.items():
            failing = record.failures >= self._settings.consecutive_failures
            if failing or record.slow or record.ejected:
                yield (
                    slot,
                    Outlier(
                        cause=Cause.FAILING if failing else Cause.SLOW,
                        slowness=record.slowness,
                        failures=record.failures,
                        ejected=record.ejected,
                    ),
                )

    def _took(self, lease: Lease, record: _Record, ending: Ending, now: Seconds) -> None:
        """Count how long it took by how long it was to take."""
        speed = self._columns.prefill_tokens_per_s.item(lease.slot)
        prefill_s = lease.ahead_tokens / speed
        request = lease.request
        if request.stream and lease.first_output_at_s is not None:
            took_s = lease.first_output_at_s - lease.opened_at_s
            expected_s = prefill_s + SECONDS_PER_OUTPUT_TOKEN_ESTIMATE
            record.first_output.add(_log_of(took_s / expected_s), now)
        took_s = now - lease.opened_at_s
        # Whoever left did not wait for the end: it would have taken at least as long.
        complete = ending is Ending.COMPLETE
        if complete:
            answer_s = max(took_s - prefill_s, SECONDS_PER_OUTPUT_TOKEN_ESTIMATE)
            self._answers.add(math.log(answer_s), now)
        elif not self._answers.samples:
            return
        answer_s = math.exp(self._answers.log)
        if request.output_tokens_max is not None:
            answer_s = min(answer_s, request.output_tokens_max * SECONDS_PER_OUTPUT_TOKEN_ESTIMATE)
        log = _log_of(took_s / (prefill_s + max(answer_s, SECONDS_PER_OUTPUT_TOKEN_ESTIMATE)))
        if complete or log >= record.duration.log:
            record.duration.add(log, now)

    def _failed(self, slot: int, record: _Record, now: Seconds) -> None:
        record.failures += 1
        if record.failures >= self._settings.consecutive_failures:
            self._eject(slot, record, Cause.FAILING, now)

    def _evaluate(self, now: Seconds) -> None:
        """Compare each to the median, by what is known of first outputs and of durations."""
        slow: set[int] = set()
        compared: dict[int, float] = {}
        for averages in (
            {slot: record.duration for slot, record in self._records.items()},
            {slot: record.first_output for slot, record in self._records.items()},
        ):
            quotients = self._compare(averages, now)
            enough = {
                slot: quotient
                for slot, quotient in quotients.items()
                if averages[slot].samples >= self._settings.samples_min
            }
            for slot, quotient in enough.items():
                compared[slot] = max(quotient, compared.get(slot, 0.0))
            # Also those of which little is known yet: the first of a kind is no outlier.
            alike = sum(quotient >= self._factor(slow=True) for quotient in quotients.values())
            if alike <= max(1, len(enough) // KIND_SHARE):
                slow |= {
                    slot
                    for slot, quotient in enough.items()
                    if quotient >= self._factor(slow=self._records[slot].slow)
                }
        for slot, record in self._records.items():
            record.slowness = compared.get(slot, math.nan)
            record.slow = slot in slow
        for slot in sorted(slow, key=lambda slot: -compared[slot]):
            self._eject(slot, self._records[slot], Cause.SLOW, now)
        self._forgive(now)

    def _compare(self, averages: Mapping[int, _Average], now: Seconds) -> dict[int, float]:
        """Slot -> times the median of those with enough samples; {}: they are too few."""
        fresh = {
            slot: average
            for slot, average in averages.items()
            if average.samples and now - average.last_at_s <= FRESH_S
        }
        logs = [one.log for one in fresh.values() if one.samples >= self._settings.samples_min]
        if len(logs) < COMPARED_MIN:
            return {}
        middle = median(logs)
        return {slot: math.exp(average.log - middle) for slot, average in fresh.items()}

    def _factor(self, *, slow: bool) -> float:
        """From which slowness on an endpoint is slow; less is enough for one that is."""
        return max(self._settings.slowness_factor * (BACK_SHARE if slow else 1.0), 1.0)

    def _forgive(self, now: Seconds) -> None:
        base_s = self._settings.base_ejection_time
        for record in self._records.values():
            if record.ejections and not record.ejected and now - record.good_since_s >= base_s:
                record.ejections -= 1
                record.good_since_s = now

    def _eject(self, slot: int, record: _Record, cause: Cause, now: Seconds) -> None:
        if not self._ejects or record.ejected:
            return
        endpoints = sum(endpoint is not None for endpoint in self._columns.endpoints)
        ejected = sum(other.ejected for other in self._records.values())
        settings = self._settings
        if ejected >= settings.ejected_max(endpoints):
            return
        record.ejections += 1
        for_s = min(settings.base_ejection_time * record.ejections, settings.max_ejection_time)
        record.back_at_s = now + for_s
        record.ejected = self._columns.ejected[slot] = True
        self.ejections[cause] += 1

    def _let_back(self, slot: int, record: _Record, now: Seconds) -> None:
        """It is as good as new, but for how often this happened."""
        record.ejected = self._columns.ejected[slot] = False
        record.slow, record.slowness, record.failures = False, math.nan, 0
        record.first_output, record.duration = _Average(), _Average()
        record.good_since_s = now


def _log_of(quotient: float) -> float:
    """Of what took no time, or less: the least that counts."""
    if quotient <= 0.0:
        return -SAMPLE_LOG_MAX
    return min(max(math.log(quotient), -SAMPLE_LOG_MAX), SAMPLE_LOG_MAX)
