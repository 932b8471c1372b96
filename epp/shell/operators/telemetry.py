"""Our own metrics, counted from results: decisions, refusals, outcomes, scrapes, reloads, streams.

What happens per request touches cached children only. Everything that a page can read from the
scheduler when it is asked for (`PoolSnapshot`) costs nothing per request.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct, field
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp import __version__
from epp.core.decision.scheduler import Decision, SchedulerSettings
from epp.core.knowledge.candidates import Candidates
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, Endpoint, Refusal, Seconds
from epp.shell.kubernetes.state import ClusterSnapshot
from epp.shell.operators.counting import Child, Distribution, Family, Number
from epp.shell.operators.metric_table import METRICS

CHILDREN_MAX: Final = 1_000
"""Label combinations a metric keeps; the reference picker caps client-controlled values here."""
LABEL_CHARACTERS_MAX: Final = 128
OTHER: Final = "other"

_Child = TypeVar("_Child")
_Labels: TypeAlias = tuple[str, ...]


class IndexSnapshot(Struct, frozen=True, kw_only=True):
    """What one affinity index tells of itself; the mappings are totals since it was opened."""

    entries: int = 0
    memory_bytes: int = 0
    lookups: Mapping[str, int] = field(default_factory=dict)
    """Result ("full", "partial", "none") -> look-ups."""
    evictions: Mapping[str, int] = field(default_factory=dict)
    """Cause ("ttl", "capacity", "memory", ...) -> entries."""


class PoolSnapshot(Struct, frozen=True, kw_only=True):
    """The scheduler's state as a page shows it. Read and dropped within one synchronous step."""

    pool: str = ""
    """Name of the InferencePool."""
    candidates: Candidates
    """All endpoints known, ready or not."""
    ready: int = 0
    set_aside: int = 0
    indexes: Mapping[str, IndexSnapshot] = field(default_factory=dict)
    """By the name of the producer in the configuration."""
    cluster: ClusterSnapshot | None = None
    """None: endpoints come from a file."""


class Children(Generic[_Child]):
    """Children of one group of metrics, by label values, made at first use.

    Values may come from clients: what is longer than `LABEL_CHARACTERS_MAX` is cut, and past
    `children_max` combinations every new one shares the child whose labels are all "other".
    """

    def __init__(self, make: Callable[[_Labels], _Child], children_max: int = CHILDREN_MAX) -> None:
        self._make = make
        self._children_max = children_max
        self._children: dict[_Labels, _Child] = {}

    def __len__(self) -> int:
        return len(self._children)

    def __call__(self, *labels: str) -> _Child:
        known = self._children.get(labels)
        if known is not None:
            return known
        bounded = tuple(_label(value) for value in labels)
        known = self._children.get(bounded)
        if known is not None:
            return known
        if len(self._children) >= self._children_max:
            bounded = (OTHER,) * len(labels)
            known = self._children.get(bounded)
            if known is not None:
                return known
        child = self._children[bounded] = self._make(bounded)
        return child

    def drop(self, goes: Callable[[_Labels], bool]) -> list[_Labels]:
        """Forget the children whose labels go, and say which they were."""
        gone = [labels for labels in self._children if goes(labels)]
        for labels in gone:
            del self._children[labels]
        return gone


def _label(value: str) -> str:
    """A label value that fits, and that UTF-8 can carry."""
    return value[:LABEL_CHARACTERS_MAX].encode("utf-8", "replace").decode()


def endpoint_labels(endpoint: Endpoint) -> tuple[str, str, str]:
    """(endpoint_name, namespace, port): a name is "namespace/name", or a name alone."""
    namespace, _, name = endpoint.name.rpartition("/")
    return name, namespace, endpoint.address.rpartition(":")[2]


class _Requests(Struct, frozen=True):
    """Children of one model, target model and priority."""

    total: Number
    running: Number
    size_bytes: Distribution
    input_tokens: Distribution
    labels: _Labels
    """As bounded, for the metrics that not every request has."""


class Telemetry:
    """The shell calls one method an event. Owns no clock: durations are handed in."""

    def __init__(
        self, registry: CollectorRegistry, pool: Callable[[], PoolSnapshot] | None = None
    ) -> None:
        """`pool` is called once a page, on the thread that makes it."""
        made = _Counted(registry)
        numbers, distributions = made.numbers, made.distributions
        self._requests = Children(_request_children(made))
        self._duration_s = distributions["homing_request_duration_seconds"]
        self._ttft_s = distributions["homing_request_ttft_seconds"]
        self._output_tokens = distributions["homing_request_output_tokens"]
        self._cached_tokens = distributions["homing_request_cached_tokens"]
        self._errors = Children(_labelled(numbers["homing_request_error_total"]))
        self._processing_s = distributions["homing_request_processing_duration_seconds"].labels()
        self._headers_s = distributions["homing_response_headers_seconds"].labels()
        self._decision_s = distributions["homing_scheduler_e2e_duration_seconds"].labels()
        self._attempts_metric = numbers["homing_scheduler_attempts_total"]
        self._attempts = Children(
            _labelled(numbers["homing_scheduler_attempts_total"]), 5 * CHILDREN_MAX
        )
        self._refusals = Children(_labelled(numbers["homing_refusals_total"]))
        self._eliminated = Children(_labelled(numbers["homing_filter_eliminated_total"]))
        self._contribution = Children(_labelled(distributions["homing_scorer_contribution"]))
        self._contributions: tuple[tuple[str, ...], list[Distribution]] = ((), [])
        self._without_prefix = Children(_labelled(numbers["homing_scheduled_without_prefix_total"]))
        self._unknown_mode = Children(_labelled(numbers["homing_unknown_body_mode_total"]), 32)
        self._usage_unseen = numbers["homing_response_usage_unseen_total"].labels()
        self._violations = Children(_labelled(numbers["homing_protocol_violations_total"]))
        self._hit_ratio = distributions["homing_prefix_indexer_hit_ratio"].labels()
        self._hit_bytes = distributions["homing_prefix_indexer_hit_bytes"].labels()
        self._hit_tokens = numbers["homing_predicted_hit_tokens_total"].labels()
        self._compared_tokens = Children(_labelled(numbers["homing_prefix_hit_tokens_total"]))
        self._set_aside_metric = numbers["homing_set_aside_total"]
        self._set_aside = Children(_labelled(numbers["homing_set_aside_total"]))
        self._scrape_s = distributions["homing_scrape_duration_seconds"].labels()
        self._scrape_errors = Children(_labelled(numbers["homing_scrape_errors_total"]), 64)
        self._reload_ok = numbers["homing_config_last_reload_successful"].labels()
        self._last_good = Children(_labelled(numbers["homing_last_good_in_force"]))
        self._not_kept = Children(_labelled(numbers["homing_last_good_write_errors_total"]))
        self._reloads = Children(_labelled(numbers["homing_config_reloads_total"]))
        self._config_info = numbers["homing_config_info"]
        self._weights = numbers["homing_scorer_weight"]
        self._streams = numbers["homing_extproc_streams_inflight"].labels()
        self._streams_ended = Children(_labelled(numbers["homing_extproc_streams_total"]), 32)
        self._stream_s = distributions["homing_extproc_stream_duration_seconds"].labels()
        self._drain_cut = numbers["homing_drain_cut_streams_total"].labels()
        numbers["homing_info"].labels(__version__).set(1)
        if pool is not None:
            registry.register(PoolCollector(pool))

    def decided(
        self,
        decision: Decision,
        *,
        scheduling_s: Seconds,
        processing_s: Seconds,
        request_bytes: int,
        model_name: str = "",
    ) -> None:
        """A request was routed. `model_name` is what the client asked for, if it was rewritten."""
        request = decision.lease.request
        children = self._of(request, model_name)
        children.total.inc()
        children.running.inc()
        children.size_bytes.observe(request_bytes)
        children.input_tokens.observe(request.prompt_tokens)
        self._decision_s.observe(scheduling_s)
        self._processing_s.observe(processing_s)
        self._attempts("success", request.model, *endpoint_labels(decision.endpoint)).inc()

        hit_tokens = decision.matched_blocks * decision.block_tokens
        if decision.total_blocks:
            self._hit_ratio.observe(decision.matched_blocks / decision.total_blocks)
            self._hit_bytes.observe(hit_tokens * BYTES_PER_TOKEN)
            self._hit_tokens.inc(hit_tokens)
        for name, dropped in decision.eliminated.items():
            self._eliminated(name).inc(dropped)
        parts = decision.scored.parts_of(decision.picked)
        for child, part in zip(self._scorers(decision.scorers), parts, strict=True):
            child.observe(part)

    def refused(
        self,
        refusal: Refusal,
        *,
        scheduling_s: Seconds | None = None,
        request: InferenceRequest | None = None,
        model_name: str = "",
    ) -> None:
        """A request was refused; `request` is known once it was parsed, the time if scheduled."""
        reason = refusal.reason.value
        self._refusals(reason).inc()
        for name, dropped in refusal.eliminated.items():
            self._eliminated(name).inc(dropped)
        model, priority = (request.model, str(request.priority)) if request else ("", "0")
        labels = (model_name or model, model, priority)
        self._requests(*labels).total.inc()
        self._errors(*labels, reason).inc()
        if scheduling_s is not None:
            self._decision_s.observe(scheduling_s)
            self._attempts("failure", model, "", "", "").inc()

    def response_started(self, *, elapsed_s: Seconds) -> None:
        """Response headers were seen, `elapsed_s` after the request headers."""
        self._headers_s.observe(elapsed_s)

    def first_output(self, decision: Decision, *, elapsed_s: Seconds, model_name: str = "") -> None:
        """The first output token was seen; only where the response is parsed."""
        labels = self._of(decision.lease.request, model_name).labels
        self._ttft_s.labels(*labels).observe(elapsed_s)

    def completed(
        self,
        decision: Decision,
        outcome: Outcome,
        *,
        elapsed_s: Seconds,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        model_name: str = "",
    ) -> None:
        """A routed request ended: exactly once for each `decided`, with the same `model_name`."""
        request = decision.lease.request
        children = self._of(request, model_name)
        children.running.dec()
        self._duration_s.labels(*children.labels).observe(elapsed_s)
        if output_tokens is not None:
            self._output_tokens.labels(*children.labels).observe(output_tokens)
        if cached_tokens is not None:
            self._cached_tokens.labels(*children.labels).observe(cached_tokens)
            predicted = decision.matched_blocks * decision.block_tokens
            self._compared_tokens("predicted").inc(predicted)
            self._compared_tokens("served").inc(cached_tokens)
        error_code = _error_code(outcome)
        if error_code:
            self._errors(
                model_name or request.model, request.model, str(request.priority), error_code
            ).inc()

    def scheduled_without_prefix(self, mode: str) -> None:
        """A request was scheduled at its headers; `mode` is its body mode or "headers-only"."""
        self._without_prefix(mode).inc()

    def unknown_body_mode(self, mode: int) -> None:
        """A gateway announced a body mode that the picker does not know."""
        self._unknown_mode(str(mode)).inc()

    def protocol_violated(self, phase: str, event: str) -> None:
        """A gateway sent `event` in a `phase` of the stream that does not allow it."""
        self._violations(phase, event).inc()

    def usage_unseen(self) -> None:
        """Usage was to be read of a response whose body the gateway does not show."""
        self._usage_unseen.inc()

    def set_aside(self, endpoint: Endpoint) -> None:
        self._set_aside(*endpoint_labels(endpoint)).inc()

    def endpoints_replaced(self, endpoints: Iterable[Endpoint]) -> None:
        """Drop the counters of endpoints that are gone; pods come and go for as long as we run."""
        present = {endpoint_labels(endpoint) for endpoint in endpoints}
        present |= {("", "", ""), (OTHER, OTHER, OTHER)}
        for children, metric in (
            (self._attempts, self._attempts_metric),
            (self._set_aside, self._set_aside_metric),
        ):
            for labels in children.drop(lambda labels: labels[-3:] not in present):
                metric.remove(*labels)

    def scraped(self, *, elapsed_s: Seconds) -> None:
        """One endpoint was scraped with success."""
        self._scrape_s.observe(elapsed_s)

    def scrape_failed(self, kind: str) -> None:
        self._scrape_errors(kind).inc()

    def config_applied(
        self, settings: SchedulerSettings, *, config_hash: str, generation: int
    ) -> None:
        """`settings` are in force from now on."""
        self._reload_ok.set(1)
        self._reloads("success").inc()
        self._config_info.clear()
        self._config_info.labels(config_hash, str(generation)).set(1)
        self._weights.clear()
        profile = settings.profile
        for scorer in profile.scorers:
            self._weights.labels(profile.name, scorer.name).set(scorer.weight)

    def config_rejected(self) -> None:
        """A new configuration was not taken; the last good one stays in force."""
        self._reload_ok.set(0)
        self._reloads("failure").inc()

    def last_good_in_force(self, file: str, in_force: bool) -> None:
        """Whether the picker runs by a copy of `file`, because that was broken at the start."""
        self._last_good(file).set(in_force)

    def last_good_not_kept(self, file: str) -> None:
        """The copy of `file` could not be written."""
        self._not_kept(file).inc()

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self, code: str, *, elapsed_s: Seconds) -> None:
        """An ext_proc stream ended with the gRPC status `code` ("OK", "CANCELLED", ...)."""
        self._streams.dec()
        self._streams_ended(code).inc()
        self._stream_s.observe(elapsed_s)

    def drain_cut(self, streams: int) -> None:
        """`streams` were still open when the drain timed out."""
        self._drain_cut.inc(streams)

    def _of(self, request: InferenceRequest, model_name: str) -> _Requests:
        return self._requests(model_name or request.model, request.model, str(request.priority))

    def _scorers(self, names: tuple[str, ...]) -> list[Distribution]:
        # The scorers change with the configuration only.
        if self._contributions[0] != names:
            self._contributions = (names, [self._contribution(name) for name in names])
        return self._contributions[1]


def _error_code(outcome: Outcome) -> str:
    """Empty for what went well."""
    if outcome.ending is Ending.CLIENT_LEFT:
        return outcome.ending.value
    if outcome.status is not None and outcome.status >= 400:
        return str(outcome.status) if outcome.status < 600 else OTHER
    return outcome.ending.value if outcome.ending is Ending.ERROR else ""


class _Counted:
    """The metrics of the table that are counted as things happen, registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.numbers: dict[str, Family[Number]] = {}
        self.distributions: dict[str, Family[Distribution]] = {}
        for row in METRICS:
            if row.sampled:
                continue
            if row.kind == "histogram":
                made = Family(row, partial(Distribution, row.buckets))
                self.distributions[row.name] = made
                registry.register(made)
                continue
            registry.register(self.numbers.setdefault(row.name, Family(row, Number)))


def _labelled(family: Family[Child]) -> Callable[[_Labels], Child]:
    return lambda labels: family.labels(*labels)


def _request_children(made: _Counted) -> Callable[[_Labels], _Requests]:
    def make(labels: _Labels) -> _Requests:
        numbers, distributions = made.numbers, made.distributions
        return _Requests(
            total=numbers["homing_request_total"].labels(*labels),
            running=numbers["homing_request_running"].labels(*labels),
            size_bytes=distributions["homing_request_size_bytes"].labels(*labels),
            input_tokens=distributions["homing_request_input_tokens"].labels(*labels),
            labels=labels,
        )

    return make


class PoolCollector(Collector):
    """Reads the scheduler when a page is made. A family without a known value has no samples."""

    def __init__(self, source: Callable[[], PoolSnapshot]) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        """The empty families: registering must not read a scheduler that is not yet built."""
        return iter(_empty_families().values())

    def collect(self) -> Iterator[Metric]:
        snapshot = self._source()
        families = _empty_families()
        _add_pool(families, snapshot)
        _add_endpoints(families, snapshot)
        _add_indexes(families, snapshot)
        if snapshot.cluster is not None:
            _add_cluster(families, snapshot.cluster)
        return iter(families.values())


def _empty_families() -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
    families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    return {
        row.name: families[row.kind](row.name, row.help, labels=row.labels)
        for row in METRICS
        if row.sampled
    }


_Families: TypeAlias = Mapping[str, CounterMetricFamily | GaugeMetricFamily]


def _add_pool(families: _Families, snapshot: PoolSnapshot) -> None:
    name = [_label(snapshot.pool)]
    candidates = snapshot.candidates
    families["homing_ready_endpoints"].add_metric(name, snapshot.ready)
    families["homing_known_endpoints"].add_metric(name, len(candidates))
    families["homing_endpoints_set_aside"].add_metric(name, snapshot.set_aside)
    for suffix, column in (
        ("kv_cache_utilization", candidates.kv_cache_usage),
        ("queue_size", candidates.waiting_requests),
        ("running_requests", candidates.running_requests),
    ):
        known = column[~np.isnan(column)]
        if len(known):
            families[f"homing_average_{suffix}"].add_metric(name, float(known.mean()))
            families[f"homing_std_dev_{suffix}"].add_metric(name, float(known.std()))


def _add_endpoints(families: _Families, snapshot: PoolSnapshot) -> None:
    candidates = snapshot.candidates
    rows = zip(
        candidates.endpoints,
        candidates.waiting_requests.tolist(),
        candidates.metrics_age_s.tolist(),
        candidates.inflight_requests.tolist(),
        candidates.inflight_prefill_tokens.tolist(),
        strict=True,
    )
    queue = families["homing_per_endpoint_queue_size"]
    age = families["homing_per_endpoint_metrics_age_seconds"]
    requests = families["homing_inflight_requests"]
    tokens = families["homing_inflight_tokens"]
    shown: set[tuple[str, str, str]] = set()
    for endpoint, waiting, age_s, inflight_requests, inflight_tokens in rows:
        labels = endpoint_labels(endpoint)
        # Two samples with the same labels would make the whole page invalid.
        if labels in shown:
            continue
        shown.add(labels)
        if math.isfinite(waiting):
            queue.add_metric([_label(snapshot.pool), endpoint.name, labels[2]], waiting)
        if math.isfinite(age_s):
            age.add_metric(labels, age_s)
        requests.add_metric(labels, inflight_requests)
        tokens.add_metric(labels, inflight_tokens)


def _add_indexes(families: _Families, snapshot: PoolSnapshot) -> None:
    for index, told in snapshot.indexes.items():
        families["homing_prefix_indexer_size"].add_metric([index], told.entries)
        families["homing_prefix_indexer_memory_bytes"].add_metric([index], told.memory_bytes)
        for result, lookups in told.lookups.items():
            families["homing_prefix_indexer_lookups_total"].add_metric([index, result], lookups)
        for cause, entries in told.evictions.items():
            families["homing_prefix_indexer_evictions_total"].add_metric([index, cause], entries)


def _add_cluster(families: _Families, cluster: ClusterSnapshot) -> None:
    for resource, told in cluster.kinds.items():
        for name, value in (
            ("staleness_seconds", told.stale_s),
            ("synced", float(told.synced)),
            ("objects", told.objects),
            ("lists_total", told.lists),
            ("watches_total", told.watches),
            ("repairs_total", told.repairs),
        ):
            families[f"homing_kube_{name}"].add_metric([resource], value)
        for kind, errors in told.errors.items():
            families["homing_kube_errors_total"].add_metric([resource, kind], errors)
    for result, events in cluster.events.items():
        families["homing_kube_events_total"].add_metric([result], events)
    if cluster.leading is not None:
        families["homing_leader"].add_metric([], float(cluster.leading))
