"""Detection of endpoints that are worse than the others: slow relative to the median, or failing.

**Slow.** The time of a request is divided by the time that was expected at its endpoint. Long
prompts, long queues and endpoints that are known to be slower (`inflight-load-producer`) therefore
do not count. One time is that to the first chunk of a streamed answer, if the gateway shows it. It
is compared with the prefill of the prompts ahead and of the request's own. The other is the time to
the end, which is compared with these and the usual time of answers in the pool. The logarithms of
these quotients are averaged over the last requests of each endpoint, and compared with the median
of all. The expectation may thus be wrong by a factor that is the same for all. The worse of the two
quotients counts. If more than a third of the endpoints are that slow, none counts as slow, because
the pool then has two kinds of endpoints. A client that left counts as having waited at least that
long.

**Failing.** An endpoint fails if more responses in a row were errors than chance explains at the
others in service. It also fails if a large share of its last responses were errors, while others
have less than half of that. If all endpoints fail, none is ejected for it, and those that were
return. The cause is then the model or the requests.

**Full is not failing.** An endpoint that answers 429, or 503 with `retry-after`, is full
(`fullness`), and its answer does not count here. vLLM answers 503 when its admission limits are
reached, and counts it in `vllm:admission_rejections`. A 503 without `retry-after` counts as such a
refusal until a page contradicts it, unless the last page is older than `PAGE_S`. A page does so if
the counter stands still, or if there is no counter and no request waits. Each of these responses
then counts as an error. An endpoint that refuses `REFUSALS_MAX` requests in a row without one
answer is not full, whatever its counter shows.

Module `ejection` applies the consequences to decisions.
"""

import math
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

from msgspec import Struct

from epp.core.knowledge.candidates import Columns
from epp.core.knowledge.ejection import COMPARED_MIN, Cause, Ejection, OutlierEjection
from epp.core.knowledge.inflight import (
    SECONDS_PER_OUTPUT_TOKEN_ESTIMATE,
    Ending,
    Lease,
    Outcome,
)
from epp.core.types import EndpointMetrics, Seconds

SAMPLES_AVERAGED: Final = 32
"""Number of requests of an endpoint in a running average; the newest request has a weight of one in
this number. If times scatter by a factor of e, the average scatters by 13 %.
"""
ANSWERS_AVERAGED: Final = 256
"""Number of answers, of all endpoints together, in the running average of answer times."""
SAMPLE_LOG_MAX: Final = math.log(100.0)
"""Largest logarithm of the quotient of a request's time and its expected time: a request counts as
at most a hundred times too slow or too fast.
"""
FRESH_S: Final = 300.0
"""Time in seconds without an answer after which the speed of an endpoint is not compared."""
KIND_SHARE: Final = 3
"""Divisor of the number of compared endpoints. If more than the quotient, and more than one, are
slow, none counts as slow, because they are a kind of endpoint of their own.
"""
BACK_SHARE: Final = 2 / 3
"""Share of the slowness factor below which a slow endpoint recovers. It is below 1 to avoid
flicker. Endpoints above it count as similar to the slow ones.
"""
EVALUATE_EVERY_S: Final = 5.0
LOOK_AGAIN_S: Final = 0.2
"""Time in seconds after an attempt to eject a failing endpoint that did not eject it, until the
next attempt for any endpoint, because each attempt compares all endpoints.
"""
PAGES_TO_CONTRADICT: Final = 2
"""Number of metrics pages after a 503 that must not count it as a refusal before it counts as an
error. The first page may have been on its way.
"""
OTHERS_SHARE: Final = 4
"""Divisor of the number of other endpoints: the quarter of them with the lowest error rates is left
out, and the lowest error rate of the remaining ones counts as that of the others.
"""
CHANCE: Final = 1e-4
"""Probability above which a row of errors counts as chance, given the error rate of the other
endpoints.
"""
PATIENCE_S: Final = 5.0
"""Time in seconds without an answer after which a probe counts as failed if its client disconnects."""
PAGE_S: Final = 5.0
"""Age in seconds of the last metrics page above which a 503 counts as an error at once, because no
page will soon explain it.
"""
REFUSALS_MAX: Final = 50
"""Maximum number of responses 503 in a row that count as refusals. An engine that is only full
would have served some request by then.
"""


class Outlier(Struct, frozen=True, kw_only=True):
    """The reason why an endpoint is reported as an outlier, with the figures behind it."""

    cause: Cause
    slowness: float
    """Time of the endpoint's requests relative to the expected time, as a multiple of the pool's
    median; NaN if unknown.
    """
    failures: int
    """Number of the endpoint's latest answers, without a good one in between, that were errors."""
    ejected: bool
    """True if the endpoint is ejected: it receives no requests, or only probes."""
    probed: bool = False
    """True if the endpoint is ejected and being probed with single requests."""
    failure_share: float = math.nan
    """Share of errors among the endpoint's answers in about the last `window` of the outlier
    settings, 0 to 1; NaN if there were too few answers.
    """


class _Average:
    """A running average of logarithms: of request times divided by expected times, or of the
    seconds that answers take.
    """

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


class _Recent:
    """The numbers of answers and errors of one endpoint in a sliding window of time: in the current
    half of the window and in the half before.
    """

    __slots__ = ("_answers", "_failures", "_since_s")

    def __init__(self) -> None:
        self._answers = [0, 0]
        self._failures = [0, 0]
        self._since_s: Seconds = -math.inf

    def add(self, now: Seconds, window_s: Seconds, *, failed: bool) -> None:
        self._turn(now, window_s)
        self._answers[1] += 1
        self._failures[1] += failed

    def share(self, now: Seconds, window_s: Seconds, answers_min: int) -> float:
        """Return the share of errors among the endpoint's latest answers, or NaN if there were
        fewer than `answers_min`. All answers of the last half of `window_s` seconds count, and none
        that is older than one and a half times `window_s`.
        """
        self._turn(now, window_s)
        answers = sum(self._answers)
        return sum(self._failures) / answers if answers >= answers_min else math.nan

    def _turn(self, now: Seconds, window_s: Seconds) -> None:
        halves = (now - self._since_s) / (window_s / 2.0)
        if halves < 1.0:
            return
        for counts in (self._answers, self._failures):
            counts[:] = (counts[1] if halves < 2.0 else 0, 0)
        self._since_s = now


class _Record:
    """The times, errors and refusals of one endpoint."""

    __slots__ = (
        "anew_s",
        "duration",
        "failures",
        "first_output",
        "pages",
        "recent",
        "refused",
        "refused_in_a_row",
        "rejections",
        "slow",
        "slowness",
    )

    def __init__(self, *, anew_s: Seconds = -math.inf, rejections: float | None = None) -> None:
        self.first_output = _Average()
        self.duration = _Average()
        self.recent = _Recent()
        self.slowness = math.nan
        self.slow = False
        self.failures = 0
        """Number of the endpoint's latest answers, without a good one in between, that were errors.
        """
        self.refused = 0
        """Number of responses 503 of the engine that no metrics page has explained yet."""
        self.refused_in_a_row = 0
        self.pages = 0
        """Number of metrics pages read since the first response 503 that is counted in `refused`.
        """
        self.rejections = rejections
        """Last value of the engine's counter of refused requests; None if it has no such counter."""
        self.anew_s = anew_s
        """Time at which this record was started anew. Requests that were sent before it do not
        count in it.
        """


class Outliers:
    """The request times of each endpoint, the outliers among the endpoints, and the ejected
    endpoints.

    The effect of other clients' requests is not accounted for. If another picker loads an endpoint
    more than the others, it looks slow here.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._records: dict[int, _Record] = {}
        self._settings = OutlierEjection()
        self.ejection = Ejection(columns)
        self._due_s: Seconds = -math.inf
        self._look_again_s: Seconds = -math.inf
        self._answers = _Average(ANSWERS_AVERAGED)
        """Running average of the logarithm of the seconds that answers take after the prompt is
        computed, over all endpoints.
        """
        self._middles: dict[str, float] = {}
        """Median of the endpoints' averages in the last comparison, by name of the average:
        "duration" or "first_output". A name is missing if too few endpoints were compared.
        """

    def configure(self, settings: OutlierEjection) -> None:
        """Use `settings` from now on, and compare the endpoints at the next `tick`."""
        self._settings = settings
        self._due_s = -math.inf
        self.ejection.configure(settings)

    def ended(self, lease: Lease, outcome: Outcome, now: Seconds) -> None:
        """Record the end of the request of `lease`, its time and whether it failed. This may eject
        the endpoint, or end its ejection if the request was a probe.

        Called once, while the lease is live. A request that was sent before the endpoint's record
        was started anew is ignored.
        """
        slot = lease.slot
        record = self._record(slot)
        if lease.opened_at_s < record.anew_s:
            return
        failed = self._failed(slot, record, outcome, now)
        if failed:
            self._judge(slot, record, now)
        elif lease.earlier:
            # The time includes that of other endpoints.
            pass
        elif outcome.ending is not Ending.UNSEEN and (outcome.status or 200) < 300:
            self._took(lease, record, outcome.ending, now)
        if lease.probe:
            hung = outcome.status is None and now - lease.opened_at_s >= PATIENCE_S
            self._probed(
                lease,
                record,
                now,
                passed=_answered(outcome) and outcome.ending is Ending.COMPLETE,
                failed=failed or (hung and outcome.ending is Ending.CLIENT_LEFT),
            )

    def passed(self, lease: Lease, now: Seconds) -> None:
        """Evaluate the probe of `lease` as a success, because a request that several endpoints
        served succeeded.
        """
        record = self._record(lease.slot)
        if lease.opened_at_s >= record.anew_s:
            self._probed(lease, record, now, passed=True, failed=False)

    def blame(self, slot: int, now: Seconds) -> None:
        """Eject the endpoint in `slot`, if the limits of ejection allow it, because it explains the
        failures of requests that several endpoints served.
        """
        self.ejection.eject(slot, Cause.FAILING, now, serving_some=False)

    def left(self, lease: Lease) -> None:
        """End the probe of `lease`, if it is one, without a result: another endpoint serves the
        request, or may be the one that failed it.
        """
        if lease.probe:
            self.ejection.probe_ended(lease, passed=False)

    def observed(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """Read a metrics page of the endpoint in `slot`. If its counter of refusals has increased,
        earlier responses 503 were refusals. If later pages contradict that, they count as errors,
        and the endpoint may be ejected.
        """
        record = self._records.get(slot)
        if record is None:
            if metrics.rejections_total is not None:
                self._record(slot).rejections = metrics.rejections_total
            return
        before, record.rejections = record.rejections, metrics.rejections_total
        if not record.refused:
            return
        record.pages += 1
        told = metrics.rejections_total
        if told is not None and before is not None and told > before:
            record.refused = 0
        elif record.pages >= PAGES_TO_CONTRADICT:
            refused, record.refused = record.refused, 0
            if told is not None or metrics.waiting_requests == 0:
                for _ in range(refused):
                    self._count_failure(record, now)
                self._judge(slot, record, now)

    def rejections_of(self, slot: int) -> float | None:
        """Return the engine's counter of refusals on the last page of `slot`, or None if unknown."""
        record = self._records.get(slot)
        return None if record is None else record.rejections

    def tick(self, now: Seconds) -> None:
        """Start probes of endpoints that were ejected long enough. Every `EVALUATE_EVERY_S`,
        compare the speed of all endpoints and eject the slow ones.
        """
        for slot in self.ejection.due(now):
            self._start_anew(slot, now)
        if now >= self._due_s:
            self._due_s = now + EVALUATE_EVERY_S
            self._evaluate(now)

    def forget(self, slot: int) -> None:
        """Drop the times, errors and the ejection of `slot`, because its endpoint left or
        restarted.
        """
        self._records.pop(slot, None)
        self.ejection.forget(slot)

    def slowness(self) -> dict[int, float]:
        """Return the slowness of each slot in the last comparison, as a multiple of the median.
        Slots that were not compared are omitted.
        """
        return {
            slot: record.slowness
            for slot, record in self._records.items()
            if not math.isnan(record.slowness)
        }

    def detected(self, now: Seconds) -> Iterator[tuple[int, Outlier]]:
        """Yield (slot, reason) of each endpoint that is slow, failing or ejected at `now`."""
        for slot, record in self._records.items():
            away = self.ejection.away.get(slot)
            share = self._failure_share(record, now)
            failing = self._fails(record, share)
            if away is None and not (failing or record.slow):
                continue
            cause = Cause.FAILING if failing else Cause.SLOW
            yield (
                slot,
                Outlier(
                    cause=cause if away is None else away.cause,
                    slowness=record.slowness,
                    failures=record.failures,
                    ejected=away is not None,
                    probed=away is not None and away.probed,
                    failure_share=share,
                ),
            )

    def _record(self, slot: int) -> _Record:
        record = self._records.get(slot)
        if record is None:
            record = self._records[slot] = _Record()
        return record

    def _start_anew(self, slot: int, now: Seconds) -> None:
        """Reset the record of `slot`, so that only requests that are sent from `now` on count."""
        rejections = self._record(slot).rejections
        self._records[slot] = _Record(anew_s=now, rejections=rejections)

    # Failures.

    def _failed(self, slot: int, record: _Record, outcome: Outcome, now: Seconds) -> bool:
        """Record how a request of the endpoint ended. Return whether that was an error of the
        endpoint. A refusal because the endpoint is full is no error, and a 503 of the engine is
        none as long as its next metrics pages may explain it.
        """
        if outcome.full:
            return False
        if outcome.status == 503 and not outcome.by_gateway:
            record.refused_in_a_row += 1
            page_age_s = now - self._columns.observed_at_s.item(slot)
            if page_age_s <= PAGE_S and record.refused_in_a_row <= REFUSALS_MAX:
                if not record.refused:
                    record.pages = 0
                record.refused += 1
                return False
        elif not outcome.failed:
            if _answered(outcome):
                if record.failures >= self._settings.consecutive_failures:
                    record.recent = _Recent()  # the cause of the failures is gone
                record.failures = record.refused_in_a_row = 0
                record.recent.add(now, self._settings.window, failed=False)
            return False
        self._count_failure(record, now)
        return True

    def _count_failure(self, record: _Record, now: Seconds) -> None:
        record.failures += 1
        record.recent.add(now, self._settings.window, failed=True)

    def _failure_share(self, record: _Record, now: Seconds) -> float:
        return record.recent.share(now, self._settings.window, self._settings.requests_min)

    def _fails(self, record: _Record, share: float) -> bool:
        """Return whether the endpoint fails, by its errors in a row or by `share`, its share of
        errors (NaN if unknown).
        """
        settings = self._settings
        return (
            record.failures >= settings.consecutive_failures
            or share >= settings.failure_percent / 100.0
        )

    def _judge(self, slot: int, record: _Record, now: Seconds) -> None:
        """Eject the endpoint in `slot` if it fails and the other endpoints fail less. If all the
        others fail too, end the ejections for failing.
        """
        share = self._failure_share(record, now)
        if not self._fails(record, share):
            return
        away = self.ejection.away
        if slot in away or now < self._look_again_s:
            return
        serving_some = record.failures < self._settings.consecutive_failures
        others = sorted(
            self._loss(self._records.get(other), now)
            for other, endpoint in enumerate(self._columns.endpoints)
            if endpoint is not None and other != slot and other not in away
        )
        # The mean is not used: if several endpoints break at once, each would excuse the others.
        loss = others[len(others) // OTHERS_SHARE] if others else 1.0
        does_worse = loss < share / 2.0 if serving_some else loss**record.failures <= CHANCE
        if does_worse:
            if self.ejection.eject(slot, Cause.FAILING, now, serving_some=serving_some):
                return
        elif not others or others[0] >= 1.0:
            self._let_failing_back(now)
        self._look_again_s = now + LOOK_AGAIN_S

    def _loss(self, record: _Record | None, now: Seconds) -> float:
        """Return the share of errors among an endpoint's answers in about the last `window` of the
        settings, 0 to 1. It is 0 if unknown, and 1 after `consecutive_failures` errors in a row.
        """
        if record is None:
            return 0.0
        if record.failures >= self._settings.consecutive_failures:
            return 1.0
        share = record.recent.share(now, self._settings.window, 1)
        return 0.0 if math.isnan(share) else share

    def _let_failing_back(self, now: Seconds) -> None:
        """End the ejection of all endpoints that were ejected for failing, because all endpoints
        fail.
        """
        for slot, one in tuple(self.ejection.away.items()):
            if one.cause is Cause.FAILING:
                self.ejection.back(slot, now)

    def _probed(
        self, lease: Lease, record: _Record, now: Seconds, *, passed: bool, failed: bool
    ) -> None:
        """Evaluate a probe that ended: eject its endpoint again, return it to service, or wait for
        more probes.
        """
        slot = lease.slot
        one = self.ejection.away.get(slot)
        enough = self.ejection.probe_ended(lease, passed=passed)
        if one is None:
            return
        slow = (enough or not passed) and self._probes_were_slow(record)
        if failed or slow:
            cause = Cause.FAILING if failed else Cause.SLOW
            self.ejection.eject(slot, cause, now, serving_some=one.serving_some)
        elif enough:
            self.ejection.back(slot, now)
            self._start_anew(slot, lease.opened_at_s)

    def _probes_were_slow(self, record: _Record) -> bool:
        """Return whether the probes of an endpoint were slow relative to the medians of the last
        comparison.
        """
        for name, middle in self._middles.items():
            average: _Average = getattr(record, name)
            if average.samples and average.log - middle >= math.log(self._settings.slowness_factor):
                return True
        return False

    # Slowness.

    def _took(self, lease: Lease, record: _Record, ending: Ending, now: Seconds) -> None:
        """Record the times of a finished request relative to those that were expected at its
        endpoint. The duration of a request whose client left counts only if it is not below the
        endpoint's average.
        """
        speed = self._columns.prefill_tokens_per_s.item(lease.slot)
        prefill_s = lease.ahead_tokens / speed
        request = lease.request
        if request.stream and lease.first_output_at_s is not None:
            took_s = lease.first_output_at_s - lease.opened_at_s
            expected_s = prefill_s + SECONDS_PER_OUTPUT_TOKEN_ESTIMATE
            record.first_output.add(_log_of(took_s / expected_s), now)
        took_s = now - lease.opened_at_s
        # A request whose client left would have taken at least as long.
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

    def _evaluate(self, now: Seconds) -> None:
        """Compare each endpoint's average duration, and its average time to the first output, with
        the median of all endpoints. Eject the slow endpoints, unless so many are slow in one of the
        two times that they are a kind of their own.
        """
        slow: set[int] = set()
        compared: dict[int, float] = {}
        for name in ("duration", "first_output"):
            averages = {slot: getattr(record, name) for slot, record in self._records.items()}
            quotients = self._compare(name, averages, now)
            enough = {
                slot: quotient
                for slot, quotient in quotients.items()
                if averages[slot].samples >= self._settings.samples_min
            }
            for slot, quotient in enough.items():
                compared[slot] = max(quotient, compared.get(slot, 0.0))
            # Endpoints with few samples count too, because the first of a kind is no outlier.
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
            self.ejection.eject(slot, Cause.SLOW, now, serving_some=True)
        self.ejection.forgive(now)

    def _compare(
        self, name: str, averages: Mapping[int, _Average], now: Seconds
    ) -> dict[int, float]:
        """Return the slowness of each slot that has recent samples, by slot: the running average of
        its requests' times over expected times, divided by the median of these averages.

        Return {} if too few endpoints have enough samples. `averages` are those of one kind of
        time, `name`: "duration" or "first_output". The median counts only endpoints with enough
        samples, and is stored under `name` for probes.
        """
        fresh = {
            slot: average
            for slot, average in averages.items()
            if average.samples and now - average.last_at_s <= FRESH_S
        }
        logs = [one.log for one in fresh.values() if one.samples >= self._settings.samples_min]
        self._middles.pop(name, None)
        if len(logs) < COMPARED_MIN:
            return {}
        self._middles[name] = middle = median(logs)
        return {slot: math.exp(average.log - middle) for slot, average in fresh.items()}

    def _factor(self, *, slow: bool) -> float:
        """Return the slowness from which an endpoint counts as slow. It is lower if `slow`, that
        is, if the endpoint already counts as slow.
        """
        return max(self._settings.slowness_factor * (BACK_SHARE if slow else 1.0), 1.0)


def _answered(outcome: Outcome) -> bool:
    """Return whether the endpoint gave an answer to the request that was no failure."""
    return outcome.status is not None and not outcome.failed and outcome.ending is not Ending.UNSEEN


def _log_of(quotient: float) -> float:
    """Return the logarithm of `quotient`, limited to ±`SAMPLE_LOG_MAX`; the lower limit if
    `quotient` is 0 or less.
    """
    if quotient <= 0.0:
        return -SAMPLE_LOG_MAX
    return min(max(math.log(quotient), -SAMPLE_LOG_MAX), SAMPLE_LOG_MAX)
