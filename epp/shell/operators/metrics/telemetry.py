"""Count the picker's own metrics: decisions, refusals, outcomes, scrapes, reloads, streams.

Events of single requests use only cached children of metrics. A decision changes about twenty
children, so its values are collected and `fold` counts several decisions together. Values that a
page can read from the scheduler (`PoolSnapshot`) take no time per request.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from epp import __version__
from epp.configuration.token_producer import Backend
from epp.core.decision.account import Leg, Route
from epp.core.decision.scheduler import Decision
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import ShadowTotals
from epp.core.knowledge.agent_sessions import SessionCounts
from epp.core.knowledge.candidates import Candidates
from epp.core.knowledge.hit_accuracy import ERROR_BOUNDS, ErrorHistogram, HitComparison
from epp.core.knowledge.index import IndexStanding
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.latency import LatencyErrors
from epp.core.knowledge.outliers import Outlier
from epp.core.peers.exchange import PeerExchange
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.flow_queue import QueueSnapshot
from epp.core.types import BYTES_PER_TOKEN, Endpoint, Refusal, Seconds
from epp.shell.engines.first_tokens import FirstTokens
from epp.shell.engines.kv_event_source import KVEventsSnapshot
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.service import TokensSnapshot
from epp.shell.gateway.calls import Connected, Cut
from epp.shell.kubernetes.state import ClusterSnapshot
from epp.shell.operators.journal import JournalSnapshot
from epp.shell.operators.metrics.counting import (
    Child,
    Column,
    Distribution,
    Family,
    Number,
    Rows,
    Sum,
    Waiting,
)
from epp.shell.operators.metrics.endpoint_series import EndpointSeries
from epp.shell.operators.metrics.metric_table import METRICS
from epp.shell.operators.metrics.role_loads import RoleLoad
from epp.shell.peers.state import PeersSnapshot
from epp.shell.printable import printable
from epp.shell.process.own_process import ProcessSnapshot

CHILDREN_MAX: Final = 1_000
"""Maximum number of label combinations of a metric, unless it has a limit of its own. It is limited
because clients control some label values.
"""
COUNTS_BYTES_MAX: Final = 150_000
"""Maximum number of bytes that the request counters by model take on a metrics page: several
hundred models.
"""
ERRORS_BYTES_MAX: Final = 100_000
DISTRIBUTIONS_BYTES_MAX: Final = 560_000
"""Maximum number of bytes that the histograms by model take on a metrics page: some thirty to sixty
models.

A page with 1,000 endpoints, whose number only the operator controls, stays below 4.5 MB.
"""
ATTEMPTS_BYTES_MAX: Final = 100_000
ATTEMPTS_BYTES_PER_ENDPOINT: Final = 200
"""Number of bytes per endpoint on a metrics page for picks by model and endpoint, but at least
`ATTEMPTS_BYTES_MAX` in all. Beyond this limit, picks are counted only by endpoint.
"""
WAITING_MAX: Final = 256
"""Maximum number of decisions, and of ended streams, that wait to be counted.

Counting so many decisions takes 0.3 ms, or ten times that if each has its own model. A limit of twice as many
would save 0.3 µs per decision.
"""
EXEMPLARS_MAX: Final = 500
"""Maximum number of exemplars of all histograms together; each adds 80 bytes to a metrics page in
OpenMetrics format.
"""
LABEL_CHARACTERS_MAX: Final = 128
OTHER: Final = "other"

_Child = TypeVar("_Child")
_Labels: TypeAlias = tuple[str, ...]
_Decided: TypeAlias = tuple[str, str, int, str, str]
"""Key of a decision that waits to be counted: requested and served model, priority, name and
address of the endpoint.
"""
_DECIDED_NUMBERS: Final = 7
"""Number of values of a decision that waits to be counted; one value per scorer follows them."""


class PoolSnapshot(Struct, frozen=True, kw_only=True):
    """The scheduler's state for a metrics page, to be used and dropped within one synchronous
    step.
    """

    pool: str = ""
    """Name of the InferencePool, or "" if there is none."""
    candidates: Candidates
    """All known endpoints of the pool, ready or not, as candidates."""
    ready: int = 0
    set_aside: int = 0
    roles: Mapping[str, RoleLoad] = field(default_factory=dict)
    """Load of the ready endpoints by role, of those that have a label of their role."""
    revision_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of requests that each revision gets, by revision; empty if revisions are not screened."""
    prefills_overdue: int | None = None
    """Number of prefill stages that did not end in time, or None if no stage prefills elsewhere."""
    kv_link_bytes_per_s: float | None = None
    """Measured speed of KV transfers in the pool, or None if none was measured."""
    kv_link_ignored: int | None = None
    """Number of ignored measurements of the speed of KV transfers, or None if no stage prefills
    elsewhere.
    """
    indexes: Sequence[IndexStanding] = ()
    """State of every index in the configuration."""
    held_body_bytes: int = 0
    held_body_bytes_max: int = 0
    memory_limit_bytes: int = 0
    memory_pressure: int = 0
    load_reports: Mapping[str, int] = field(default_factory=dict)
    """Number of load reports in response headers, by result of reading them."""
    rank_choices: Mapping[str, int] = field(default_factory=dict)
    """Number of requests to endpoints with several data-parallel ranks, by result of the choice;
    empty until a plugin selects ranks.
    """
    streams: int = 0
    """Number of open ext_proc streams."""
    messages: Mapping[str, int] = field(default_factory=dict)
    """Number of gateways' ext_proc messages, by the decoder that read them."""
    connected: Connected | None = None
    """Counts of gateways' connections, or None if the transport does not report them."""
    segments: Mapping[str, int] = field(default_factory=dict)
    """Number of segments of long prompts that were looked up, by result ("known", "new")."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """Number of trace spans by result; empty if tracing is disabled."""
    slowness: Mapping[int, float] = field(default_factory=dict)
    """Slowness of each endpoint's responses as a multiple of the pool's median, by slot."""
    outliers: Mapping[int, Outlier] = field(default_factory=dict)
    """Kind of outlier (slow or failing) of each endpoint that is one, by slot."""
    full: int = 0
    """Number of endpoints that count as full because they refused requests."""
    ejections: Mapping[str, int] = field(default_factory=dict)
    """Number of ejections of endpoints since the start, by cause."""
    plugin_errors: Mapping[str, int] = field(default_factory=dict)
    """Number of failures of each configured plugin, by the plugin's name."""
    cluster: ClusterSnapshot | None = None
    """State of the connection to the API server, or None if endpoints come from a file."""
    queue: QueueSnapshot | None = None
    """State of the queue, or None if the configuration lets no request wait."""
    pages_unread: Mapping[str, int] = field(default_factory=dict)
    """Number of endpoints whose model or GPU page could not be fetched, by kind of page; empty if
    none are configured.
    """
    kv_events: KVEventsSnapshot | None = None
    """State and counts of the reception of KV-cache events, or None if no index receives them."""
    peers: PeerExchange | None = None
    """Exchange of state with the other replicas, or None if this picker has no peers."""
    peer_links: PeersSnapshot | None = None
    """Counts about connections to peers, or None if this picker has no peers."""
    capture: JournalSnapshot | None = None
    """Counts of the capture, or None if nothing is captured."""
    history: JournalSnapshot | None = None
    """Counts of the decision history in files, or None if it is disabled."""
    shadow: ShadowTotals | None = None
    """Totals of comparing the shadow profile with the decisions, or None if no shadow profile is
    configured.
    """
    first_tokens: Mapping[str, FirstTokens] = field(default_factory=dict)
    """Engines' times to first token by endpoint id, for endpoints whose engine reports them."""
    hits: Mapping[int, HitComparison] = field(default_factory=dict)
    """Estimated cache hits and those counted by the engine, by slot, for endpoints where both are
    known.
    """
    hit_verdicts: Mapping[str, int] = field(default_factory=dict)
    """Number of endpoints by the result of the last check of their estimated cache hits
    (`Verdict`).
    """
    hit_errors: Mapping[str, ErrorHistogram] = field(default_factory=dict)
    """Distribution of the errors of estimated cache hits, by the direction of the error ("over",
    "under").
    """
    bytes_per_token: Mapping[str, float] = field(default_factory=dict)
    """Learned number of prompt bytes per token, by model."""
    latency_errors: Mapping[int, Mapping[str, LatencyErrors]] = field(default_factory=dict)
    """Errors of predicted latencies by slot, then by latency; empty if none are predicted."""
    answer_tokens: float | None = None
    """Learned mean number of output tokens per response, or None if too little is known."""
    process: ProcessSnapshot | None = None
    """CPU and memory of the picker's process, or None if not measured."""
    tokens: Sequence[TokensSnapshot] = ()
    """Counts of each backend for token ids of prompts that has been used since the start."""


class PageBudget:
    """A limit for the bytes that some metric children take on a page.

    The first child that does not fit closes the budget for later ones, until a child is removed or
    the limit changes.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes_taken = 0
        self.closed = False

    def takes(self, page_bytes: int) -> bool:
        self.closed = self.closed or self._bytes_taken + page_bytes > self._bytes_max
        if not self.closed:
            self._bytes_taken += page_bytes
        return not self.closed

    def gives_back(self, page_bytes: int) -> None:
        self._bytes_taken -= page_bytes
        self.closed = False

    def resize(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.closed = False


def _unlimited(_: _Labels) -> int:
    return 0


def _all_other(labels: _Labels) -> _Labels:
    return (OTHER,) * len(labels)


class Children(Generic[_Child]):
    """The children of a group of metrics by label values, created at first use.

    Values may come from clients. Those longer than `LABEL_CHARACTERS_MAX` are shortened, and
    unprintable characters are escaped. Beyond `children_max` combinations, or if `budget` is
    exhausted, new combinations share the child with the labels `others(labels)`, by default all
    "other".
    """

    def __init__(
        self,
        make: Callable[[_Labels], _Child],
        children_max: int = CHILDREN_MAX,
        *,
        budget: PageBudget | None = None,
        page_bytes: Callable[[_Labels], int] = _unlimited,
        others: Callable[[_Labels], _Labels] = _all_other,
    ) -> None:
        self._make = make
        self._children_max = children_max
        self._budget = budget
        self._page_bytes = page_bytes
        self._others = others
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
        if not self._admits(bounded):
            bounded = self._others(bounded)
            known = self._children.get(bounded)
            if known is not None:
                return known
        child = self._children[bounded] = self._make(bounded)
        return child

    def drop(self, goes: Callable[[_Labels], bool]) -> list[_Labels]:
        """Remove the children for whose labels `goes` is true, and return the labels of the removed
        ones.
        """
        gone = [labels for labels in self._children if goes(labels)]
        for labels in gone:
            del self._children[labels]
            if self._budget is not None and labels != self._others(labels):
                self._budget.gives_back(self._page_bytes(labels))
        return gone

    def _admits(self, labels: _Labels) -> bool:
        budget = self._budget
        if len(self._children) >= self._children_max:
            return False
        if budget is None or labels == self._others(labels):
            return True
        # The size is not computed for a closed budget, because that may happen with every request.
        return not budget.closed and budget.takes(self._page_bytes(labels))


def _label(value: str) -> str:
    """Return a value from outside as a label value: shortened, on one line and encodable as
    UTF-8.
    """
    return printable(value[:LABEL_CHARACTERS_MAX])[:LABEL_CHARACTERS_MAX]


def _bounded_labels(endpoint: Endpoint) -> _Labels:
    return _bounded_endpoint_labels(endpoint.name, endpoint.address)


def _bounded_endpoint_labels(full_name: str, address: str) -> tuple[str, str, str]:
    name, namespace, port = _endpoint_labels(full_name, address)
    return _label(name), _label(namespace), _label(port)


def _other_model(labels: _Labels) -> _Labels:
    """Return the labels of a pick with the model replaced by "other". The endpoint stays, because
    clients do not control it.
    """
    return (labels[0], OTHER, *labels[2:])


def endpoint_labels(endpoint: Endpoint) -> tuple[str, str, str]:
    """Split an endpoint's name and address into the labels (endpoint_name, namespace, port). A name
    is "namespace/name" or a name alone.
    """
    return _endpoint_labels(endpoint.name, endpoint.address)


def _endpoint_labels(full_name: str, address: str) -> tuple[str, str, str]:
    namespace, _, name = full_name.rpartition("/")
    return name, namespace, address.rpartition(":")[2]


class _Routed(Struct, frozen=True):
    """The histograms that count every routed request, for one combination of model, target model
    and priority.
    """

    size_bytes: Distribution
    input_tokens: Distribution
    duration_s: Distribution


class _Parsed(Struct, frozen=True):
    """The histograms of what parsed responses show, for one combination of model, target model and
    priority.
    """

    ttft_s: Distribution
    output_tokens: Distribution
    cached_tokens: Distribution


class _Requests(Struct, frozen=True):
    """The request counters for one combination of model, target model and priority."""

    total: Number
    running: Number


class Telemetry:
    """The picker's metrics, with one method per event.

    It reads no clock: durations are arguments.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        pool: Callable[[], PoolSnapshot] | None = None,
        could_not: Callable[[str, Exception], None] | None = None,
    ) -> None:
        """Create the metrics. `pool` returns the scheduler's state and is called once per page, in
        the thread that creates the page.

        `could_not` receives the event and error of values that cannot be counted; if it is None,
        only the number of such events is counted.
        """
        self._could_not = could_not or (lambda event, _: self.telemetry_failed(event))
        # Registered first, so that a page counts the waiting decisions before it reads them.
        registry.register(_First(self.fold))
        made = _Counted(registry)
        self._open_requests(made)
        self._open_decisions(made)
        self._open_responses(made)
        self._open_endpoints(made)
        self._open_configuration(made)
        self._open_streams(made)
        self._open_process(made)
        if pool is not None:
            registry.register(PoolCollector(pool))

    def _open_requests(self, made: "_Counted") -> None:
        """Create the metrics that are counted by model. Those with model names from clients share
        limits of their size.
        """
        numbers, distributions = made.numbers, made.distributions
        self._requests = _group(
            _Requests,
            (numbers["homing_request_total"], numbers["homing_request_running"]),
            PageBudget(COUNTS_BYTES_MAX),
        )
        by_model = PageBudget(DISTRIBUTIONS_BYTES_MAX)
        self._routed = _group(
            _Routed,
            (
                distributions["homing_request_size_bytes"],
                distributions["homing_request_input_tokens"],
                distributions["homing_request_duration_seconds"],
            ),
            by_model,
        )
        self._parsed = _group(
            _Parsed,
            (
                distributions["homing_request_ttft_seconds"],
                distributions["homing_request_output_tokens"],
                distributions["homing_request_cached_tokens"],
            ),
            by_model,
        )
        self._errors = _group(
            _only, (numbers["homing_request_error_total"],), PageBudget(ERRORS_BYTES_MAX)
        )
        self._unparsed = made.numbers_by("homing_requests_unparsed_total")
        self._unknown_objective = made.number("homing_unknown_objective_total")
        self._exemplars = 0

    def _open_decisions(self, made: "_Counted") -> None:
        """Create the metrics of decisions, and the list of decisions that wait to be counted."""
        self._scorers: tuple[str, ...] = ()
        """Names of the scorers of the decisions that wait to be counted."""
        self._waiting: Waiting[_Decided] = Waiting(_DECIDED_NUMBERS)
        self._processing_s = made.distribution("homing_request_processing_duration_seconds")
        self._decision_s = made.distribution("homing_scheduler_e2e_duration_seconds")
        self._attempts_metric = made.numbers["homing_scheduler_attempts_total"]
        self._attempts_budget = PageBudget(ATTEMPTS_BYTES_MAX)
        self._attempts = Children(
            _labelled(self._attempts_metric),
            10 * CHILDREN_MAX,
            budget=self._attempts_budget,
            page_bytes=self._attempts_metric.page_bytes,
            others=_other_model,
        )
        self._refusals = made.numbers_by("homing_refusals_total")
        self._routes = made.numbers_by("homing_routes_total")
        self._stage_refusals = made.numbers_by("homing_stage_refusals_total")
        self._eliminated = made.numbers_by("homing_filter_eliminated_total")
        self._contribution = made.distributions_by("homing_scorer_contribution")
        self._without_prefix = made.numbers_by("homing_scheduled_without_prefix_total")
        self._hit_ratio = made.distribution("homing_prefix_indexer_hit_ratio")
        self._hit_bytes = made.distribution("homing_prefix_indexer_hit_bytes")
        self._hit_tokens = made.number("homing_predicted_hit_tokens_total")

    def _open_responses(self, made: "_Counted") -> None:
        """Create the metrics of responses that are not counted by model."""
        self._headers_s = made.distribution("homing_response_headers_seconds")
        self._declined = made.number("homing_response_bodies_declined_total")
        self._usage_unseen = made.number("homing_response_usage_unseen_total")
        self._gateways_blind = made.number("homing_gateways_without_responses_total")
        self._compared_tokens = made.numbers_by("homing_prefix_hit_tokens_total")
        self._first_token_error = made.distributions_by("homing_first_token_error_seconds", 2)
        self._first_token_expected_s = made.number("homing_first_token_expected_seconds_total")
        self._first_token_observed_s = made.number("homing_first_token_observed_seconds_total")

    def _open_endpoints(self, made: "_Counted") -> None:
        """Create the metrics of endpoints, and of what endpoints and peers report."""
        # Series of each endpoint's requests, which the observer reports.
        self.by_endpoint = EndpointSeries(made.sums, made.numbers, _bounded_endpoint_labels)
        self._set_aside_metric = made.numbers["homing_set_aside_total"]
        self._set_aside = made.numbers_by("homing_set_aside_total")
        self._scrape_s = made.distribution("homing_scrape_duration_seconds")
        self._scrape_errors = made.numbers_by("homing_scrape_errors_total", 64)
        self._peer_snapshot_s = made.distributions_by("homing_peer_snapshot_seconds")
        self._tokenize_s = made.distributions_by("homing_tokenize_duration_seconds", len(Backend))

    def _open_configuration(self, made: "_Counted") -> None:
        """Create the metrics of the configuration and of its last-good copies."""
        self._reload_ok = made.number("homing_config_last_reload_successful")
        self._reloads = made.numbers_by("homing_config_reloads_total")
        self._config_info = made.numbers["homing_config_info"]
        self._weights = made.numbers["homing_scorer_weight"]
        self._last_good = made.numbers_by("homing_last_good_in_force")
        self._not_kept = made.numbers_by("homing_last_good_write_errors_total")

    def _open_streams(self, made: "_Counted") -> None:
        """Create the metrics of ext_proc streams and of the gateways' connections that carry these
        streams.
        """
        self._closed: Waiting[str] = Waiting(1)
        self._streams_ended = made.numbers_by("homing_extproc_streams_total", 32)
        self._stream_s = made.distribution("homing_extproc_stream_duration_seconds")
        self._unknown_mode = made.numbers_by("homing_unknown_body_mode_total", 32)
        self._violations = made.numbers_by("homing_protocol_violations_total")
        self._drain_cut = made.number("homing_drain_cut_streams_total")
        self._connections_cut = made.numbers_by("homing_extproc_connections_cut_total", len(Cut))
        for reason in Cut:
            # The series exist from the start, so that an alert notices the first event.
            self._connections_cut(reason.value)

    def _open_process(self, made: "_Counted") -> None:
        """Create the metrics of the picker's process and its tasks."""
        self._loop_lag_s = made.distribution("homing_loop_lag_seconds")
        self._failures = made.numbers_by("homing_telemetry_failures_total", 32)
        self._task_ends = made.numbers_by("homing_task_ends_total", 64)
        made.numbers["homing_info"].labels(__version__).set(1)

    def decided(
        self,
        leg: Leg,
        *,
        scheduling_s: Seconds,
        processing_s: Seconds,
        request_bytes: int,
        model_name: str = "",
    ) -> None:
        """Record a routed request, which is counted later together with others (`fold`); the
        candidates that filters dropped are counted at once. `model_name` is the client's model name
        if it was rewritten.
        """
        request, endpoint = leg.lease.request, leg.endpoint
        if leg.scorers != self._scorers:
            self._fold_decisions()
            self._scorers = leg.scorers
            self._waiting = Waiting(_DECIDED_NUMBERS + len(leg.scorers))
        # A name may be as long as a body, so it is shortened.
        model = request.model[:LABEL_CHARACTERS_MAX]
        asked = model_name[:LABEL_CHARACTERS_MAX] or model
        waiting = self._waiting.append(
            (asked, model, request.priority, endpoint.name, endpoint.address),
            scheduling_s,
            processing_s,
            request_bytes,
            request.prompt_tokens,
            leg.matched_blocks,
            leg.total_blocks,
            leg.block_tokens,
            *leg.parts,
        )
        if leg.dropped:
            for name, slots in leg.dropped.items():
                self._eliminated(name).inc(len(slots))
        if waiting >= WAITING_MAX:
            self._fold_decisions()

    def staged(self, route: Route, earlier: Sequence[Leg]) -> None:
        """Count a decision in several stages by its route, and the endpoints that filters dropped
        in the `earlier` stages.
        """
        self._routes(route.value).inc()
        for leg in earlier:
            for name, dropped in leg.eliminated.items():
                self._eliminated(name).inc(dropped)

    def fold(self) -> None:
        """Count the decisions, answers and ended streams that wait to be counted. Every read calls
        this first, so that totals are exact.

        A decision that cannot be counted does not affect others.
        """
        self._fold_decisions()
        for event, fold in (
            ("answered", self.by_endpoint.fold),
            ("stream_closed", self._fold_streams),
        ):
            try:
                fold()
            except Exception as error:  # noqa: BLE001  telemetry fails neither a page nor the picker
                self._could_not(event, error)

    def _fold_decisions(self) -> None:
        if not self._waiting:
            return
        decided, rows = self._waiting.take()
        try:
            self._count(decided, rows)
        except Exception:  # noqa: BLE001  telemetry never fails a request, and this one belongs to another request
            for at, key in enumerate(decided):
                self._count_alone(key, rows[at : at + 1])

    def _count_alone(self, key: _Decided, row: Rows) -> None:
        try:
            self._count([key], row)
        except Exception as error:  # noqa: BLE001  the same as above
            self._could_not("decided", error)

    def _count(self, decided: Sequence[_Decided], rows: Rows) -> None:
        """Count all given decisions, or none of them if it raises."""
        # Steps that may fail come first.
        positions: dict[tuple[str, str, int], list[int]] = {}
        for at, key in enumerate(decided):
            positions.setdefault(key[:3], []).append(at)
        models = []
        for (asked, model, priority), found_at in positions.items():
            labels = asked, model, str(priority)
            models.append((self._requests(*labels), self._routed(*labels), found_at))
        attempts = [
            (self._attempts("success", model, *_endpoint_labels(name, address)), count)
            for (_, model, _, name, address), count in Counter(decided).items()
        ]
        scorers = [self._contribution(name) for name in self._scorers]

        columns = rows.T
        scheduling_s, processing_s, sizes_bytes, input_tokens = columns[:4]
        matched, total, block_tokens = columns[4:_DECIDED_NUMBERS]
        for counts, routed, found_at in models:
            counts.total.inc(len(found_at))
            counts.running.inc(len(found_at))
            routed.size_bytes.observe_all(sizes_bytes[found_at])
            routed.input_tokens.observe_all(input_tokens[found_at])
        for child, count in attempts:
            child.inc(count)
        self._decision_s.observe_all(scheduling_s)
        self._processing_s.observe_all(processing_s)
        self._count_hits(matched, total, block_tokens)
        for scorer, part in zip(scorers, columns[_DECIDED_NUMBERS:], strict=True):
            scorer.observe_all(part)

    def _count_hits(self, matched: Column, total: Column, block_tokens: Column) -> None:
        """Count the estimated cache hits of decisions whose prompt has at least one full block."""
        has_blocks = total > 0
        matched, total = matched[has_blocks], total[has_blocks]
        hit_tokens = matched * block_tokens[has_blocks]
        self._hit_ratio.observe_all(matched / total)
        self._hit_bytes.observe_all(hit_tokens * BYTES_PER_TOKEN)
        self._hit_tokens.inc(float(hit_tokens.sum()))

    def refused(
        self,
        refusal: Refusal,
        *,
        scheduling_s: Seconds | None = None,
        request: InferenceRequest | None = None,
        model_name: str = "",
    ) -> None:
        """Count a refused request. `request` is None if it was not parsed, and `scheduling_s` is
        None if it was not scheduled.
        """
        reason = refusal.reason.value
        self._refusals(reason).inc()
        if refusal.stage is not None:
            self._stage_refusals(refusal.stage.value).inc()
        for name, dropped in refusal.eliminated.items():
            self._eliminated(name).inc(dropped)
        model, priority = (request.model, str(request.priority)) if request else ("", "0")
        labels = (model_name or model, model, priority)
        self._requests(*labels).total.inc()
        self._errors(*labels, reason).inc()
        if scheduling_s is not None:
            self._decision_s.observe(scheduling_s)
            self._attempts("failure", model, "", "", "").inc()

    def failed(
        self,
        failure: str,
        *,
        request: InferenceRequest | None = None,
        model_name: str = "",
        counted: bool = False,
    ) -> None:
        """Count an ext_proc stream that ended with an error. `counted` is True if its request was
        counted as routed before.
        """
        model, priority = (request.model, str(request.priority)) if request else ("", "0")
        labels = (model_name or model, model, priority)
        if not counted:
            self._requests(*labels).total.inc()
        self._errors(*labels, failure).inc()

    def response_started(self, *, elapsed_s: Seconds) -> None:
        """Count response headers that arrived `elapsed_s` seconds after the request headers."""
        self._headers_s.observe(elapsed_s)

    def first_output(self, decision: Decision, *, elapsed_s: Seconds, model_name: str = "") -> None:
        """Count the first output token of a response, which is seen only if the gateway sends
        response bodies.
        """
        labels = _model_labels(decision.lease.request, model_name)
        self._parsed(*labels).ttft_s.observe(elapsed_s)

    def traced(
        self,
        decision: Decision,
        trace_id: str,
        at_s: Seconds,
        *,
        elapsed_s: Seconds,
        headers_s: Seconds | None = None,
        ttft_s: Seconds | None = None,
        model_name: str = "",
    ) -> None:
        """Attach the trace id of a request, as exemplar, to the histograms of its durations, which
        were observed before.

        `at_s` is Unix time; the other times are seconds since the request headers.
        """
        labels = _model_labels(decision.lease.request, model_name)
        self._exemplify(self._routed(*labels).duration_s, elapsed_s, trace_id, at_s)
        if headers_s is not None:
            self._exemplify(self._headers_s, headers_s, trace_id, at_s)
        if ttft_s is not None:
            self._exemplify(self._parsed(*labels).ttft_s, ttft_s, trace_id, at_s)

    def _exemplify(self, shown: Distribution, value: float, trace_id: str, at_s: Seconds) -> None:
        exemplar = Exemplar({"trace_id": trace_id}, value, at_s)
        self._exemplars += shown.exemplify(exemplar, grow=self._exemplars < EXEMPLARS_MAX)

    def completed(
        self,
        decision: Decision,
        outcome: Outcome,
        *,
        elapsed_s: Seconds,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        model_name: str = "",
        counted: bool = False,
    ) -> None:
        """Count the end of a routed request: once for each call of `decided`, with the `model_name`
        of that call.

        `counted` is True if its failure was counted under its own reason before.
        """
        request = decision.lease.request
        labels = _model_labels(request, model_name)
        self._requests(*labels).running.dec()
        self._routed(*labels).duration_s.observe(elapsed_s)
        if output_tokens is not None:
            self._parsed(*labels).output_tokens.observe(output_tokens)
        if cached_tokens is not None:
            self._parsed(*labels).cached_tokens.observe(cached_tokens)
            predicted = decision.predicted_tokens
            self._compared_tokens("predicted").inc(predicted)
            self._compared_tokens("served").inc(cached_tokens)
        error_code = _error_code(outcome)
        if error_code and not counted:
            self._errors(*labels, error_code).inc()

    def scheduled_without_prefix(self, mode: str) -> None:
        """Count a request that was scheduled without its complete body. `mode` is the gateway's
        body mode, or "memory" if the body was not read for lack of memory.
        """
        self._without_prefix(mode).inc()

    def request_unparsed(self, api: str, reason: str) -> None:
        """Count a request that was routed although the picker did not fully understand its body."""
        self._unparsed(api, reason).inc()

    def unknown_body_mode(self, mode: int) -> None:
        """Count a request for which a gateway announced an unknown body mode."""
        self._unknown_mode(str(mode)).inc()

    def unknown_objective(self) -> None:
        """Count a request that names an inference objective that does not exist."""
        self._unknown_objective.inc()

    def protocol_violated(self, phase: str, event: str) -> None:
        """Count an `event` that a gateway sent although the stream's `phase` does not allow it."""
        self._violations(phase, event).inc()

    def response_body_declined(self) -> None:
        """Count a response whose body the picker asked the gateway not to send."""
        self._declined.inc()

    def usage_unseen(self) -> None:
        """Count a response whose token usage is unknown because the gateway does not send its
        body.
        """
        self._usage_unseen.inc()

    def responses_unseen(self) -> None:
        """Count a gateway that does not report responses to the picker."""
        self._gateways_blind.inc()

    def set_aside(self, endpoint: Endpoint) -> None:
        self._set_aside(*endpoint_labels(endpoint)).inc()

    def endpoints_replaced(self, endpoints: Iterable[Endpoint]) -> None:
        """Set which endpoints are in the pool, and remove the counters of all others, because pods
        come and go.
        """
        # Waiting decisions would create these counters again.
        self.fold()
        endpoints = tuple(endpoints)
        self.by_endpoint.replace(endpoints)
        present = {_bounded_labels(endpoint) for endpoint in endpoints}
        per_endpoint = ATTEMPTS_BYTES_PER_ENDPOINT * len(present)
        self._attempts_budget.resize(max(ATTEMPTS_BYTES_MAX, per_endpoint))
        present |= {("", "", ""), (OTHER, OTHER, OTHER)}
        for children, metric in (
            (self._attempts, self._attempts_metric),
            (self._set_aside, self._set_aside_metric),
        ):
            for labels in children.drop(lambda labels: labels[-3:] not in present):
                metric.remove(*labels)

    def scraped(self, *, elapsed_s: Seconds) -> None:
        """Count a successful scrape of an endpoint's metrics page."""
        self._scrape_s.observe(elapsed_s)

    def scrape_failed(self, kind: str) -> None:
        self._scrape_errors(kind).inc()

    def config_applied(
        self, settings: SchedulerSettings, *, config_hash: str, generation: int
    ) -> None:
        """Show `settings` as those in force, in the metrics of the configuration, and count a
        successful reload.
        """
        self._reload_ok.set(1)
        self._reloads("success").inc()
        self._config_info.clear()
        self._config_info.labels(config_hash, str(generation)).set(1)
        self._weights.clear()
        for _, profile in settings.stages.profiles():
            for scorer in profile.scorers:
                names = printable(profile.name), printable(scorer.name)
                self._weights.labels(*names).set(scorer.weight)

    def config_rejected(self) -> None:
        """Record and count that a new configuration was rejected and the last valid one stays in
        force.
        """
        self._reload_ok.set(0)
        self._reloads("failure").inc()

    def last_good_in_force(self, file: str, in_force: bool) -> None:
        """Record whether the picker runs with the last-good copy of `file`, because `file` was
        broken at start.
        """
        self._last_good(file).set(in_force)

    def last_good_not_kept(self, file: str) -> None:
        """Count a last-good copy of `file` that could not be written."""
        self._not_kept(file).inc()

    def task_ended(self, task: str, times: int) -> None:
        """Add `times` unexpected ends of the background task `task`; 0 creates the series when the
        task starts.
        """
        self._task_ends(task).inc(times)

    def tokens_asked(
        self, backend: str, result: TokensResult, waited_s: Seconds, tokens: int
    ) -> None:
        """Record how long a request waited for the token ids of its prompt; a request that did not
        wait is not counted. The token backend itself counts the results.
        """
        if waited_s:
            self._tokenize_s(backend).observe(waited_s)

    def peer_snapshot(self, source: str, elapsed_s: Seconds) -> None:
        """Record that a complete snapshot of shared state was loaded from `source` ("peer", "file"
        or "broker"), and how long that took.
        """
        self._peer_snapshot_s(source).observe(elapsed_s)

    def loop_lagged(self, late: Sequence[Seconds]) -> None:
        """Record by how many seconds the timers of the event loop were late."""
        for late_s in late:
            self._loop_lag_s.observe(late_s)

    def first_token_compared(self, expected_s: Seconds, observed_s: Seconds) -> None:
        """Record the time to first token of one request, in seconds: expected from the decision on,
        and observed from the request headers on.
        """
        came = "later" if observed_s >= expected_s else "earlier"
        self._first_token_error(came).observe(abs(observed_s - expected_s))
        self._first_token_expected_s.inc(expected_s)
        self._first_token_observed_s.inc(observed_s)

    def stream_closed(self, code: str, *, elapsed_s: Seconds) -> None:
        """Record an ext_proc stream that ended with the gRPC status `code` ("OK", "CANCELLED",
        ...). It is counted later together with others (`fold`).
        """
        if self._closed.append(code, elapsed_s) >= WAITING_MAX:
            self._fold_streams()

    def _fold_streams(self) -> None:
        if not self._closed:
            return
        codes, rows = self._closed.take()
        for code, count in Counter(codes).items():
            self._streams_ended(code).inc(count)
        self._stream_s.observe_all(rows[:, 0])

    def connection_cut(self, reason: Cut) -> None:
        """Count a gateway's connection that the picker closed, rejected or asked to leave, although
        the gateway would have kept it open.
        """
        self._connections_cut(reason.value).inc()

    def drain_cut(self, streams: int) -> None:
        """Count `streams` ext_proc streams that were still open when the drain ended, and as many
        failed requests.
        """
        self._drain_cut.inc(streams)
        self._errors("", "", "0", "drain-cut").inc(streams)

    def telemetry_failed(self, event: str) -> None:
        """Count an `event` whose metrics or log lines are missing because of a defect."""
        self._failures(event).inc()


def _model_labels(request: InferenceRequest, model_name: str) -> tuple[str, str, str]:
    return model_name or request.model, request.model, str(request.priority)


def _error_code(outcome: Outcome) -> str:
    """Return the error code of a request that failed, was evicted or whose client left, or "" for a
    success.
    """
    ending, status = outcome.ending, outcome.status
    if ending is Ending.CLIENT_LEFT or ending is Ending.EVICTED:
        return ending.value
    if status is not None and status >= 400:
        return str(status) if status < 600 else OTHER
    return ending.value if ending is Ending.ERROR else ""


class _Counted:
    """The metrics of the table that are counted when events happen, each registered once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.numbers: dict[str, Family[Number]] = {}
        self.distributions: dict[str, Family[Distribution]] = {}
        self.sums: dict[str, Family[Sum]] = {}
        for row in METRICS:
            if row.sampled:
                continue
            if row.kind == "histogram":
                made = Family(row, partial(Distribution, row.buckets))
                self.distributions[row.name] = made
                registry.register(made)
                continue
            if row.kind == "summary":
                registry.register(self.sums.setdefault(row.name, Family(row, Sum)))
                continue
            registry.register(self.numbers.setdefault(row.name, Family(row, Number)))

    def number(self, name: str) -> Number:
        """Return the only child of a counter or gauge without labels."""
        return self.numbers[name].labels()

    def numbers_by(self, name: str, most: int = CHILDREN_MAX) -> Children[Number]:
        """Return the children of a counter or gauge by label values; beyond `most` combinations
        they share "other".
        """
        return Children(_labelled(self.numbers[name]), most)

    def distribution(self, name: str) -> Distribution:
        """Return the only child of a histogram without labels."""
        return self.distributions[name].labels()

    def distributions_by(self, name: str, most: int = CHILDREN_MAX) -> Children[Distribution]:
        """Return the children of a histogram by label values; beyond `most` combinations they share
        "other".
        """
        return Children(_labelled(self.distributions[name]), most)


def _labelled(family: Family[Child]) -> Callable[[_Labels], Child]:
    return lambda labels: family.labels(*labels)


def _group(
    together: Callable[..., _Child], families: Sequence[Family[Child]], budget: PageBudget
) -> Children[_Child]:
    """Return the children of several metrics with the same labels. The children for one combination
    of label values are created together.
    """
    return Children(
        lambda labels: together(*[family.labels(*labels) for family in families]),
        budget=budget,
        page_bytes=lambda labels: sum(family.page_bytes(labels) for family in families),
    )


def _only(number: Number) -> Number:
    return number


class _First(Collector):
    """A collector without metrics. It is registered first, so that it runs `prepare` before a page
    is read.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self._prepare()
        return iter(())


class PoolCollector(Collector):
    """A collector of metrics that reads the scheduler when a page is created. A metric without a
    known value has no samples.
    """

    def __init__(self, source: Callable[[], PoolSnapshot]) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without samples, because the scheduler does not exist yet when this
        collector is registered.
        """
        return iter(_empty_families().values())

    def collect(self) -> Iterator[Metric]:
        snapshot = self._source()
        families = _empty_families()
        _add_pool(families, snapshot)
        _add_endpoints(families, snapshot)
        _add_accuracy(families, snapshot)
        _add_indexes(families, snapshot)
        _add_plugins(families, snapshot)
        _add_roles(families, snapshot)
        if snapshot.cluster is not None:
            _add_cluster(families, snapshot.cluster)
        for page, unread in snapshot.pages_unread.items():
            families["homing_endpoint_pages_unread"].add_metric([page], unread)
        if snapshot.kv_events is not None:
            _add_kv_events(families, snapshot.kv_events)
        if snapshot.peers is not None:
            _add_peers(families, snapshot.peers)
        if snapshot.peer_links is not None:
            _add_peer_links(families, snapshot.peer_links)
        if snapshot.capture is not None:
            _add_capture(families, snapshot.capture)
        if snapshot.history is not None:
            _add_history(families, snapshot.history)
        if snapshot.shadow is not None:
            _add_shadow(families, snapshot.shadow, snapshot.candidates)
        if snapshot.process is not None:
            _add_process(families, snapshot.process)
        for backend in snapshot.tokens:
            _add_tokens(families, backend)
        if snapshot.queue is not None:
            _add_queue(families, snapshot.queue)
        return iter(families.values())


_Family: TypeAlias = (
    CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | SummaryMetricFamily
)


def _empty_families() -> dict[str, Any]:
    families: dict[str, type[_Family]] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
        "summary": SummaryMetricFamily,
    }
    return {
        row.name: families[row.kind](row.name, row.help, labels=row.labels)
        for row in METRICS
        if row.sampled
    }


_Families: TypeAlias = Mapping[str, Any]
"""Metric of prometheus_client for each row of the table that is sampled per page."""


def _add_pool(families: _Families, snapshot: PoolSnapshot) -> None:
    name = [_label(snapshot.pool)]
    candidates = snapshot.candidates
    families["homing_ready_endpoints"].add_metric(name, snapshot.ready)
    families["homing_known_endpoints"].add_metric(name, len(candidates))
    families["homing_endpoints_set_aside"].add_metric(name, snapshot.set_aside)
    ejected = sum(outlier.ejected for outlier in snapshot.outliers.values())
    families["homing_endpoints_ejected"].add_metric(name, ejected)
    families["homing_endpoints_full"].add_metric(name, snapshot.full)
    for cause, ejections in snapshot.ejections.items():
        families["homing_endpoint_ejections_total"].add_metric([cause], ejections)
    families["homing_held_body_bytes"].add_metric([], snapshot.held_body_bytes)
    families["homing_held_body_bytes_max"].add_metric([], snapshot.held_body_bytes_max)
    families["homing_memory_limit_bytes"].add_metric([], snapshot.memory_limit_bytes)
    families["homing_memory_pressure"].add_metric([], snapshot.memory_pressure)
    for result, count in snapshot.load_reports.items():
        families["homing_load_reports_total"].add_metric([result], count)
    for result, choices in snapshot.rank_choices.items():
        families["homing_rank_choices_total"].add_metric([result], choices)
    for result, segments in snapshot.segments.items():
        families["homing_prompt_segments_total"].add_metric([result], segments)
    for result, spans in snapshot.spans.items():
        families["homing_spans_total"].add_metric([result], spans)
    families["homing_extproc_streams_inflight"].add_metric([], snapshot.streams)
    for path, messages in snapshot.messages.items():
        families["homing_extproc_messages_total"].add_metric([path], messages)
    connected = snapshot.connected
    if connected is not None:
        families["homing_extproc_connections"].add_metric([], connected.connections)
        families["homing_extproc_unacknowledged_bytes"].add_metric(
            [], connected.unacknowledged_bytes
        )
    for suffix, column in (
        ("kv_cache_utilization", candidates.kv_cache_usage),
        ("queue_size", candidates.waiting_requests),
        ("running_requests", candidates.running_requests),
    ):
        known = column[~np.isnan(column)]
        if len(known):
            families[f"homing_average_{suffix}"].add_metric(name, float(known.mean()))
            families[f"homing_std_dev_{suffix}"].add_metric(name, float(known.std()))


def _add_roles(families: _Families, snapshot: PoolSnapshot) -> None:
    if snapshot.prefills_overdue is not None:
        families["homing_prefills_overdue_total"].add_metric([], snapshot.prefills_overdue)
    if snapshot.kv_link_bytes_per_s is not None:
        speed = families["homing_kv_transfer_speed_bytes_per_second"]
        speed.add_metric([], snapshot.kv_link_bytes_per_s)
    if snapshot.kv_link_ignored is not None:
        families["homing_kv_transfer_speeds_ignored_total"].add_metric([], snapshot.kv_link_ignored)
    for revision, share in snapshot.revision_shares.items():
        labels = [_label(snapshot.pool), _label(revision)]
        families["homing_revision_share"].add_metric(labels, share)
    for role, load in snapshot.roles.items():
        labels = [_label(snapshot.pool), role]
        values: Mapping[str, float | None] = {
            "endpoints": load.endpoints,
            "average_queue_size": load.waiting_mean,
            "average_running_requests": load.running_mean,
            "average_kv_cache_utilization": load.kv_cache_usage_mean,
            "inflight_requests": load.inflight_requests,
            "inflight_tokens": load.inflight_prefill_tokens,
        }
        for name, value in values.items():
            if value is not None:
                families[f"homing_role_{name}"].add_metric(labels, value)


def _add_shadow(families: _Families, totals: ShadowTotals, candidates: Candidates) -> None:
    for verdict, count in totals.verdicts.items():
        families["homing_shadow_decisions_total"].add_metric([verdict], count)
    for slot, endpoint in zip(candidates.slot.tolist(), candidates.endpoints, strict=True):
        labels = _bounded_labels(endpoint)
        families["homing_shadow_picks_total"].add_metric(labels, totals.picks[slot])
    for profile, tokens, inflight in (
        ("live", totals.live_uncached_tokens, totals.live_inflight_requests),
        ("shadow", totals.uncached_tokens, totals.inflight_requests),
    ):
        families["homing_shadow_uncached_tokens_total"].add_metric([profile], tokens)
        families["homing_shadow_inflight_requests_total"].add_metric([profile], inflight)


def _add_process(families: _Families, process: ProcessSnapshot) -> None:
    families["homing_process_cpu_seconds_total"].add_metric([], process.cpu_s)
    if process.resident_bytes:
        families["homing_process_resident_memory_bytes"].add_metric([], process.resident_bytes)


def _add_queue(families: _Families, queue: QueueSnapshot) -> None:
    for (state, priority), count in queue.totals.outcomes.items():
        families["homing_flow_requests_total"].add_metric([state.value, str(priority)], count)
    for key, count in queue.totals.waits.items():
        state, priority = key
        families["homing_flow_wait_seconds"].add_metric(
            [state.value, str(priority)], count, queue.totals.waited_s.get(key, 0.0)
        )
    for band in queue.bands:
        labels = [str(band.priority)]
        families["homing_flow_waiting"].add_metric(labels, band.requests)
        families["homing_flow_waiting_bytes"].add_metric(labels, band.bytes)
        families["homing_flow_flows"].add_metric(labels, band.flows)
        families["homing_flow_oldest_wait_seconds"].add_metric(labels, band.oldest_wait_s)
        if band.light_wait_ratio is not None:
            families["homing_flow_light_wait_ratio"].add_metric(labels, band.light_wait_ratio)
    for priority, count in queue.evicted.items():
        families["homing_flow_evictions_total"].add_metric([str(priority)], count)
    if queue.saturation is not None:
        families["homing_flow_saturation"].add_metric([], queue.saturation)
    if queue.agents is not None:
        _add_agents(families, queue.agents, queue.agents_waiting)


def _add_agents(families: _Families, agents: SessionCounts, waiting: int) -> None:
    sessions, changes = "homing_flow_agent_sessions", "homing_flow_agent_changes_total"
    families[sessions].add_metric(["admitted"], agents.admitted)
    families[sessions].add_metric(["waiting"], waiting)
    families["homing_flow_agent_tokens"].add_metric([], agents.tokens)
    families[changes].add_metric(["admitted"], agents.admissions)
    families[changes].add_metric(["paused"], agents.pauses)


def _add_tokens(families: _Families, tokens: TokensSnapshot) -> None:
    families["homing_tokenize_waiting"].add_metric([tokens.backend], tokens.waiting)
    families["homing_tokenize_circuit_open"].add_metric([tokens.backend], tokens.circuit_open)
    for result, count in tokens.results.items():
        families["homing_tokenize_requests_total"].add_metric([tokens.backend, result], count)
    for result, count in tokens.compared.items():
        families["homing_tokenize_compared_total"].add_metric([tokens.backend, result], count)


def _add_history(families: _Families, history: JournalSnapshot) -> None:
    families["homing_decision_history_records_total"].add_metric([], history.events)
    for reason, records in history.dropped.items():
        families["homing_decision_history_dropped_total"].add_metric([reason], records)
    families["homing_decision_history_write_errors_total"].add_metric([], history.write_errors)
    families["homing_decision_history_bytes"].add_metric([], history.bytes)


def _add_capture(families: _Families, capture: JournalSnapshot) -> None:
    families["homing_capture_requests_total"].add_metric([], capture.requests)
    families["homing_capture_events_total"].add_metric([], capture.events)
    for reason, notes in capture.dropped.items():
        families["homing_capture_dropped_total"].add_metric([reason], notes)
    families["homing_capture_write_errors_total"].add_metric([], capture.write_errors)
    families["homing_capture_bytes"].add_metric([], capture.bytes)


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
    scraped = (
        ("running_requests", candidates.running_requests.tolist()),
        ("kv_cache_utilization", candidates.kv_cache_usage.tolist()),
        ("cache_queried_tokens_total", candidates.cache_queried_tokens.tolist()),
        ("cache_hit_tokens_total", candidates.cache_hit_tokens.tolist()),
    )
    slots = candidates.slot.tolist()
    queue = families["homing_per_endpoint_queue_size"]
    age = families["homing_per_endpoint_metrics_age_seconds"]
    requests = families["homing_inflight_requests"]
    tokens = families["homing_inflight_tokens"]
    shown: set[_Labels] = set()
    for at, (endpoint, waiting, age_s, inflight_requests, inflight_tokens) in enumerate(rows):
        labels = _bounded_labels(endpoint)
        # Two samples with the same labels would make the whole page invalid.
        if labels in shown:
            continue
        shown.add(labels)
        if math.isfinite(waiting):
            queue.add_metric([_label(snapshot.pool), _label(endpoint.name), labels[2]], waiting)
        if math.isfinite(age_s):
            age.add_metric(labels, age_s)
        for latency, errors in snapshot.latency_errors.get(slots[at], {}).items():
            for by, error in errors.told().items():
                of_error = families["homing_latency_prediction_error_ratio"]
                of_error.add_metric([*labels, latency, by], error)
            families["homing_latency_prediction_used"].add_metric(
                [*labels, latency, errors.used], 1
            )
        requests.add_metric(labels, inflight_requests)
        tokens.add_metric(labels, inflight_tokens)
        for suffix, column in scraped:
            if math.isfinite(column[at]):
                families[f"homing_per_endpoint_{suffix}"].add_metric(labels, column[at])
        first_tokens = snapshot.first_tokens.get(endpoint.endpoint_id)
        if first_tokens is not None:
            told = first_tokens.count, first_tokens.sum_s
            families["homing_per_endpoint_engine_ttft_seconds"].add_metric(labels, *told)
        if slots[at] in snapshot.hits:
            _add_hits(families, labels, snapshot.hits[slots[at]])
        if slots[at] in snapshot.slowness:
            slowness = snapshot.slowness[slots[at]]
            families["homing_per_endpoint_slowness_ratio"].add_metric(labels, slowness)
        if slots[at] in snapshot.outliers:
            cause = snapshot.outliers[slots[at]].cause.value
            families["homing_per_endpoint_outlier"].add_metric((*labels, cause), 1.0)


def _add_hits(families: _Families, labels: _Labels, compared: HitComparison) -> None:
    predicted = {"all": compared.predicted}
    for index, ratio in compared.indexes.items():
        predicted.setdefault(_label(index), ratio)
    for index, ratio in predicted.items():
        families["homing_predicted_hit_ratio"].add_metric((*labels, index), ratio)
    engine = families["homing_engine_hit_ratio"]
    engine.add_metric((*labels, "all"), compared.engine)
    for tier, ratio in compared.tiers.items():
        # If nothing was ever found in a tier, the engine does not have it.
        if ratio:
            engine.add_metric((*labels, tier), ratio)


def _add_accuracy(families: _Families, snapshot: PoolSnapshot) -> None:
    for verdict, count in snapshot.hit_verdicts.items():
        families["homing_hit_verdicts"].add_metric([verdict], count)
    for side, errors in snapshot.hit_errors.items():
        bounds = [*map(str, ERROR_BOUNDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(errors.counts), strict=True))
        families["homing_predicted_hit_error_ratio"].add_metric([side], buckets, errors.total)
    sizes: dict[str, float] = {}
    for model, size in snapshot.bytes_per_token.items():
        # Two names may become equal when they are shortened.
        sizes.setdefault(_label(model), size)
    for model, size in sizes.items():
        families["homing_bytes_per_token"].add_metric([model], size)
    if snapshot.answer_tokens is not None:
        families["homing_answer_tokens"].add_metric([], snapshot.answer_tokens)


def _add_indexes(families: _Families, snapshot: PoolSnapshot) -> None:
    for standing in snapshot.indexes:
        index, told = printable(standing.name), standing.measures
        families["homing_index_info"].add_metric(
            [index, printable(standing.type_name), standing.origin or ""], 1.0
        )
        if told is None:
            continue
        families["homing_prefix_indexer_size"].add_metric([index], told.entries)
        families["homing_prefix_indexer_memory_bytes"].add_metric([index], told.memory_bytes)
        for result, lookups in told.lookups.items():
            families["homing_prefix_indexer_lookups_total"].add_metric([index, result], lookups)
        for cause, entries in told.evictions.items():
            families["homing_prefix_indexer_evictions_total"].add_metric([index, cause], entries)
        known_from_peers = families["homing_prefix_known_from_peers_total"]
        known_from_peers.add_metric([index], told.known_from_peers)


def _add_plugins(families: _Families, snapshot: PoolSnapshot) -> None:
    errors: dict[str, int] = {}
    for name, count in snapshot.plugin_errors.items():
        # Two names may become equal when they are shortened.
        errors[_label(name)] = errors.get(_label(name), 0) + count
    for label, count in errors.items():
        families["homing_plugin_errors_total"].add_metric([label], count)


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


def _add_kv_events(families: _Families, told: KVEventsSnapshot) -> None:
    families["homing_kv_event_streams_incomplete"].add_metric([], told.incomplete)
    families["homing_kv_event_streams_silent"].add_metric([], told.silent)
    for name, counts in (
        ("homing_kv_event_streams", told.states),
        ("homing_kv_events_total", told.events),
        ("homing_kv_event_faults_total", told.faults),
        ("homing_kv_event_stream_changes_total", told.streams),
    ):
        for label, count in counts.items():
            families[name].add_metric([label], count)


def _add_peers(families: _Families, peers: PeerExchange) -> None:
    families["homing_peers"].add_metric([], len(peers.peers))
    families["homing_peer_replicas_unheard"].add_metric([], peers.unheard)
    records = families["homing_peer_records_total"]
    records.add_metric(["sent", "sent"], peers.records_sent)
    for outcome, count in asdict(peers.received).items():
        records.add_metric(["received", outcome], count)
    if peers.peers:
        lag_s = max(peer.inbox.lag_s for peer in peers.peers.values())
        families["homing_peer_lag_seconds"].add_metric([], lag_s)
    for name, frames in (
        ("lost", peers.frames_lost),
        ("asked_again", peers.frames_asked),
        ("recovered", peers.frames_recovered),
    ):
        families[f"homing_peer_frames_{name}_total"].add_metric([], frames)
    families["homing_peer_claims_cut_total"].add_metric([], peers.claims_cut)


def _add_peer_links(families: _Families, peers: PeersSnapshot) -> None:
    families["homing_peers_known"].add_metric([], peers.known)
    for frame_labels, frames in peers.frames.items():
        families["homing_peer_frames_total"].add_metric(frame_labels, frames)
    sizes = families["homing_peer_bytes_total"]
    sizes.add_metric(["sent"], peers.bytes_sent)
    sizes.add_metric(["received"], peers.bytes_received)
    for kind, failures in peers.failures.items():
        families["homing_peer_failures_total"].add_metric([kind], failures)
    for snapshot_labels, count in peers.snapshots.items():
        families["homing_peer_snapshots_total"].add_metric(snapshot_labels, count)
