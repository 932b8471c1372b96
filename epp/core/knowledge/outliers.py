"""Which endpoint is worse than the others: slow against the pool's median, or failing.

**Slow.** What a request took is divided by what was to be expected of it where it was sent, so that
long prompts, long queues and endpoints that are known to be slower (`inflight-load-producer`) count
for nothing. That is the time to the first chunk of a streamed answer, where the gateway shows it,
against the prompts ahead of it and its own; and the time to the end, against these and what answers
take in this pool. The logarithms of these quotients are averaged over the last requests of each
endpoint and compared to the median of all: the expectation may be wrong by any factor that is the
same for all. The worse of the two counts. If more than a third are that slow, nobody is: then the
pool has two kinds of endpoints. A client that left counts as having waited at least so long.

**Failing.** So many responses in a row were errors, more than chance would have it at the others in
service; or so large a share of the last ones, while others have less than half of it. Where everybody fails nobody is sent away, and
who was comes back: then it is the model, or what it is asked.

**Full is not failing.** An endpoint that answers 429, or 503 with `retry-after`, is full
(`fullness`), and its answer counts for nothing here. vLLM answers 503 when its admission limits are reached, and counts it in
`vllm:admission_rejections`. Such a 503 without `retry-after` is taken for that until a page contradicts it: the
counter stands still, or there is none and nobody waits. Then each was an error. And who refuses
`REFUSALS_MAX` in a row without one answer is not full, whatever it counts.

What follows for decisions is `ejection`'s.
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
"""Requests that an average remembers, the last counts for one in so many. Where times scatter by a
factor of e, it then scatters by 13 %."""
ANSWERS_AVERAGED: Final = 256
"""Of all endpoints together, for what answers take."""
SAMPLE_LOG_MAX: Final = math.log(100.0)
"""One request counts as at most a hundred times too slow or too fast."""
FRESH_S: Final = 300.0
"""An endpoint without an answer for so long is compared to nobody."""
KIND_SHARE: Final = 3
"""One in so many may be slow; where more are, that is a kind of endpoint."""
BACK_SHARE: Final = 2 / 3
"""Whoever is slow is so until it is below this share of the factor, so that it does not flicker;
and whoever is above it looks like those that are slow."""
EVALUATE_EVERY_S: Final = 5.0
LOOK_AGAIN_S: Final = 0.2
"""So long nobody else is looked at after one could not be ejected: all endpoints are compared then."""
PAGES_TO_CONTRADICT: Final = 2
"""Pages after a 503 that must not show it as a refusal: the first may have been on its way."""
OTHERS_SHARE: Final = 4
"""What a pool loses anyhow is what the best one in so many of the others lose at most."""
CHANCE: Final = 1e-4
"""A row of errors that is likelier at the others is no sign of this one."""
PATIENCE_S: Final = 5.0
"""A request on trial that its client left after so long without any answer has failed."""
PAGE_S: Final = 5.0
"""Where the last page is older, none will say soon whether a 503 was a refusal."""
REFUSALS_MAX: Final = 50
"""503s in a row that can be those of an engine that is full: it would have served somebody."""


class Outlier(Struct, frozen=True, kw_only=True):
    """Why an endpoint is told of."""

    cause: Cause
    slowness: float
    """Times the median of the pool; NaN: not known."""
    failures: int
    """In a row."""
    ejected: bool
    """It gets nothing, or single requests on trial."""
    probed: bool = False
    """It is on trial."""
    failure_share: float = math.nan
    """Of its answers in the window that counts; NaN: there were too few."""
    since_s: Seconds = -math.inf
    """When it was found to be so."""


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


class _Recent:
    """How many of the last answers were errors: those of the last half window, and of the one before."""

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
        """NaN: there were fewer than `answers_min`."""
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
    """What is known of one endpoint."""

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
        "since_s",
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
        """In a row."""
        self.since_s: Seconds = math.inf
        """When it was found slow or failing; inf: it is neither."""
        self.refused = 0
        """503s of the engine, of which no page has said yet what they were."""
        self.refused_in_a_row = 0
        self.pages = 0
        """Since the first of `refused`."""
        self.rejections = rejections
        """What the engine's counter said last."""
        self.anew_s = anew_s
        """What was sent before says nothing any more."""


class Outliers:
    """Averages by slot, who is an outlier by them, and who is ejected for it.

    Not answered for is what an endpoint does with requests of others: if another picker loads it
    more than the rest, it is slow here.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._records: dict[int, _Record] = {}
        self._settings = OutlierEjection()
        self.ejection = Ejection(columns)
        self._due_s: Seconds = -math.inf
        self._look_again_s: Seconds = -math.inf
        self._answers = _Average(ANSWERS_AVERAGED)
        """What they take after the prompt, of all endpoints: the logarithm of seconds."""
        self._middles: dict[str, float] = {}
        """The median by which endpoints were compared last, by the name of the average."""

    def configure(self, settings: OutlierEjection) -> None:
        """Judge by `settings` from now on."""
        self._settings = settings
        self._due_s = -math.inf
        self.ejection.configure(settings)

    def ended(self, lease: Lease, outcome: Outcome, now: Seconds) -> None:
        """The request of `lease`, which is live, ended; called once, before it is closed."""
        slot = lease.slot
        record = self._record(slot)
        if lease.opened_at_s < record.anew_s:
            return
        failed = self._failed(slot, record, outcome, now)
        if failed:
            self._judge(slot, record, now)
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

    def left(self, lease: Lease) -> None:
        """The request of `lease` goes to another endpoint: it says nothing of this one."""
        if lease.probe:
            self.ejection.probe_ended(lease, passed=False)

    def observed(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """A page of the endpoint in `slot`: it may say what its 503s were."""
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

    def tick(self, now: Seconds) -> None:
        """About once a second: put on trial who was away for long enough, and compare now and then."""
        for slot in self.ejection.due(now):
            self._start_anew(slot, now)
        if now >= self._due_s:
            self._due_s = now + EVALUATE_EVERY_S
            self._evaluate(now)

    def forget(self, slot: int) -> None:
        """The endpoint left or restarted."""
        self._records.pop(slot, None)
        self.ejection.forget(slot)

    def slowness(self) -> dict[int, float]:
        """Slot -> times the pool's median, of those that were compared last."""
        return {
            slot: record.slowness
            for slot, record in self._records.items()
            if not math.isnan(record.slowness)
        }

    def detected(self, now: Seconds) -> Iterator[tuple[int, Outlier]]:
        """Slot and reason of each that is slow, fails or is ejected, as of `now`."""
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
                    since_s=record.since_s if away is None else away.since_s,
                ),
            )

    def _record(self, slot: int) -> _Record:
        record = self._records.get(slot)
        if record is None:
            record = self._records[slot] = _Record()
        return record

    def _start_anew(self, slot: int, now: Seconds) -> None:
        """It is as good as new: only what is sent from `now` on counts."""
        rejections = self._record(slot).rejections
        self._records[slot] = _Record(anew_s=now, rejections=rejections)

    # Failing.

    def _failed(self, slot: int, record: _Record, outcome: Outcome, now: Seconds) -> bool:
        """Take note of how it ended; whether that was an error of the endpoint."""
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
                    record.recent = _Recent()  # whatever it was, it is over
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
        """NaN of `share` is not known."""
        settings = self._settings
        return (
            record.failures >= settings.consecutive_failures
            or share >= settings.failure_percent / 100.0
        )

    def _judge(self, slot: int, record: _Record, now: Seconds) -> None:
        """Send away who fails, if the others do better."""
        share = self._failure_share(record, now)
        if not self._fails(record, share):
            return
        record.since_s = min(record.since_s, now)
        away = self.ejection.away
        if slot in away or now < self._look_again_s:
            return
        serving_some = record.failures < self._settings.consecutive_failures
        others = sorted(
            self._loss(self._records.get(other), now)
            for other, endpoint in enumerate(self._columns.endpoints)
            if endpoint is not None and other != slot and other not in away
        )
        # Not their mean: when several break at once each would excuse the others.
        loss = others[len(others) // OTHERS_SHARE] if others else 1.0
        does_worse = loss < share / 2.0 if serving_some else loss**record.failures <= CHANCE
        if does_worse:
            if self.ejection.eject(slot, Cause.FAILING, now, serving_some=serving_some):
                return
        elif not others or others[0] >= 1.0:
            self._let_failing_back(now)
        self._look_again_s = now + LOOK_AGAIN_S

    def _loss(self, record: _Record | None, now: Seconds) -> float:
        """What share of its requests an endpoint loses, as far as is known: unknown is 0."""
        if record is None:
            return 0.0
        if record.failures >= self._settings.consecutive_failures:
            return 1.0
        share = record.recent.share(now, self._settings.window, 1)
        return 0.0 if math.isnan(share) else share

    def _let_failing_back(self, now: Seconds) -> None:
        """Everybody fails: it is not those that are away."""
        for slot, one in tuple(self.ejection.away.items()):
            if one.cause is Cause.FAILING:
                self.ejection.back(slot, now)

    def _probed(
        self, lease: Lease, record: _Record, now: Seconds, *, passed: bool, failed: bool
    ) -> None:
        """One request of an endpoint on trial ended."""
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
        """By the median of the last comparison."""
        for name, middle in self._middles.items():
            average: _Average = getattr(record, name)
            if average.samples and average.log - middle >= math.log(self._settings.slowness_factor):
                return True
        return False

    # Slow.

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

    def _evaluate(self, now: Seconds) -> None:
        """Compare each to the median, by what is known of first outputs and of durations."""
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
            if record.slow:
                record.since_s = min(record.since_s, now)
            elif not self._fails(record, self._failure_share(record, now)):
                record.since_s = math.inf
        for slot in sorted(slow, key=lambda slot: -compared[slot]):
            self.ejection.eject(slot, Cause.SLOW, now, serving_some=True)
        self.ejection.forgive(now)

    def _compare(
        self, name: str, averages: Mapping[int, _Average], now: Seconds
    ) -> dict[int, float]:
        """Slot -> times the median of those with enough samples; {}: they are too few."""
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
        """From which slowness on an endpoint is slow; less is enough for one that is."""
        return max(self._settings.slowness_factor * (BACK_SHARE if slow else 1.0), 1.0)


def _answered(outcome: Outcome) -> bool:
    """The endpoint answered, and not that it failed or is full."""
    return outcome.status is not None and not outcome.failed and outcome.ending is not Ending.UNSEEN


def _log_of(quotient: float) -> float:
    """Of what took no time, or less: the least that counts."""
    if quotient <= 0.0:
        return -SAMPLE_LOG_MAX
    return min(max(math.log(quotient), -SAMPLE_LOG_MAX), SAMPLE_LOG_MAX)
