"""The state of a pool as its scheduler knows it."""

from collections.abc import Mapping, Sequence
from math import isnan

from epp.core.decision.inputs import LoadReported
from epp.core.decision.settings import SchedulerSettings
from epp.core.failures import PluginFailures
from epp.core.flow.gate import Gate
from epp.core.flow.shares import FlowShares
from epp.core.knowledge.answer_lengths import AnswerLengths
from epp.core.knowledge.candidates import Affinity, Candidates, Ints
from epp.core.knowledge.fullness import FullEndpoints
from epp.core.knowledge.hit_accuracy import HitAccuracy
from epp.core.knowledge.indexes import Indexes
from epp.core.knowledge.inflight import InflightLedger, Lease
from epp.core.knowledge.latency import LatencyModel, LatencyPrediction
from epp.core.knowledge.link_speed import LinkSpeeds
from epp.core.knowledge.load_report import read_load_report
from epp.core.knowledge.outliers import Outlier, Outliers
from epp.core.knowledge.overdue_prefills import OverduePrefills
from epp.core.knowledge.pair_failures import PairFailures
from epp.core.knowledge.pool import EndpointPool
from epp.core.knowledge.refused_pairs import RefusedPairs
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, EndpointMetrics, Seconds


class PoolState:
    """The state of a pool: its endpoints, what they have cached, the requests in flight, and what
    was learned from requests and pages.

    The parts of a scheduler share one object of this class.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.failures = PluginFailures()
        """Failures of plugins and indexes; decisions continue without those that failed."""
        self.pool = EndpointPool()
        self.indexes = Indexes(self.failures)
        """Affinity indexes by name; an index that could not be opened is missing."""
        self.ledger = InflightLedger(self.pool.columns, self.indexes.release)
        self.links = LinkSpeeds(self.pool.columns)
        """Measured speeds of KV transfers."""
        self.outliers = Outliers(self.pool.columns)
        """Detector of endpoints that are slower or fail more often than the others. It ejects such
        endpoints if its settings allow.
        """
        self.outlying: dict[int, Outlier] = {}
        """Reason why each endpoint that was an outlier at the last tick was one, by slot."""
        self.pairs = PairFailures()
        """Failures of requests that several endpoints served, from which the endpoint at fault is
        found.
        """
        self.refused_pairs = RefusedPairs()
        """Refusals of requests that several endpoints served, until the pages of these endpoints
        tell which of them was full.
        """
        self.overdue_prefills = OverduePrefills()
        """Prefill stages that neither ended nor failed in time."""
        self.full = FullEndpoints()
        """Endpoints that are full because they refused requests for lack of capacity; they receive
        fewer requests for a while.
        """
        self.accuracy = HitAccuracy()
        """Comparison of the cache hits that decisions predict with the hits that engines count."""
        self.answer_lengths = AnswerLengths()
        self.latency: LatencyModel | None = None
        """Predictions of latencies and their errors, or None if no latency is predicted."""
        self.shares = FlowShares()
        """The number of pickers and the charges of flows that this picker and its peers exchange
        for flow control.
        """
        self.gate: Gate | None = None
        """Estimate of the endpoints' room, or None without flow control."""
        self.replicas_unheard = 0
        """Number of other pickers that are expected in this pool and from which this picker
        receives nothing at present.
        """
        self.load_reports = 0
        """Number of engines' load reports in response headers that the picker read and applied."""
        self.load_reports_unread = 0
        """Number of load reports in response headers that were ignored, because they were
        malformed, or because their endpoint was never scraped, is not in the pool or has restarted.
        """

    def configure(self, settings: SchedulerSettings, now: Seconds = 0.0) -> tuple[str, ...]:
        """Apply `settings`. Return the names of the indexes that start empty.

        The pool keeps what it learned, except latencies, whose estimator may change, and parts that
        `settings` turn off. Failures of plugins that are no longer configured are forgotten.
        """
        self.settings = settings
        self.failures.retain(settings.plugin_names)
        restarted = self.indexes.configure(settings.index_settings)
        self.ledger.set_speeds(self.pool.endpoints(), settings.prefill_speed_of, now)
        columns = self.pool.columns
        columns.prefill_alike = not settings.labelled_speeds
        columns.topology = settings.topology
        if settings.flow is None:
            self.gate = None
        elif self.gate is None:
            self.gate = Gate(settings.flow, columns, self.shares)
        else:
            self.gate.configure(settings.flow)
        self._configure_latency(settings.latency)
        self.outliers.configure(settings.ejection)
        return restarted

    def _configure_latency(self, settings: LatencyPrediction | None) -> None:
        """Begin or stop predicting latencies. What is learned stays while the estimator stays."""
        if settings is None:
            self.latency = None
        elif self.latency is None or self.latency.settings.estimator != settings.estimator:
            self.latency = LatencyModel(settings)
        else:
            self.latency.settings = settings

    def candidates(
        self,
        slots: Ints,
        affinities: Mapping[str, Affinity],
        request: InferenceRequest,
        now: Seconds,
    ) -> Candidates:
        """Return the endpoints in `slots` as the candidates of a decision about `request`."""
        return Candidates(
            self.pool.columns,
            slots,
            now,
            affinities=affinities,
            prefix=self.settings.prefix,
            block_tokens=self.settings.block_tokens,
            prompt_tokens=request.prompt_tokens,
        )

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> list[int]:
        """Make `endpoints` the endpoints of the pool. Return the slots whose endpoints left or
        restarted, after all knowledge about them was dropped.
        """
        left = self.pool.replace(endpoints, now)
        for slot in left:
            self._forget(slot)
        self.ledger.set_speeds(self.pool.endpoints(), self.settings.prefill_speed_of, now)
        return left

    def observe(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> bool:
        """Learn from a good page of the endpoint in `slot`. Return whether the endpoint restarted;
        all earlier knowledge about it is then dropped first.
        """
        restarted = self.pool.observe(slot, metrics, now)
        if restarted:
            self._forget(slot)
        self.ledger.scraped(slot, metrics, now)
        transfers = metrics.transfers
        if transfers is not None and not isnan(transfers.ended):
            self.links.scraped(slot, transfers, now)
        if self.gate is not None:
            self.gate.scraped(slot, metrics, now)
        self.outliers.observed(slot, metrics, now)
        self.answer_lengths.scraped(slot, metrics)
        correction = self.accuracy.scraped(slot, metrics, now)
        if correction is not None:
            self.indexes.correct(correction)
        self.indexes.scraped(slot, metrics)
        return restarted

    def read_load(self, given: LoadReported) -> None:
        """Apply a load report in the headers of a response, and count it as applied or ignored."""
        lease, report = given.lease, read_load_report(given.header)
        if (
            report is not None
            and self.ledger.is_live(lease)
            and self.pool.report(lease.slot, report)
        ):
            self.load_reports += 1
        else:
            self.load_reports_unread += 1

    def endpoint_of(self, lease: Lease) -> Endpoint | None:
        """Return the endpoint at which the request of `lease` runs, or None if the request ended or
        the endpoint left or restarted.
        """
        return self.pool.endpoint_in(lease.slot) if self.ledger.is_live(lease) else None

    def tick(self, now: Seconds) -> None:
        """Do the housekeeping of about once a second: find overdue prefills and outliers, end the
        full state of endpoints, compute the average answer length, and expire index entries.
        """
        self.overdue_prefills.tick(self.ledger, self.settings.stages.prefill_deadline_s, now)
        self.outliers.tick(now)
        self.full.tick(now)
        self.links.tick(now)
        self.answer_lengths.tick()
        if self.gate is not None and self.answer_lengths.tokens is not None:
            self.gate.rooms.answer_tokens = self.answer_lengths.tokens
        self.outlying = dict(self.outliers.detected(now))
        self.indexes.expire(now)

    def _forget(self, slot: int) -> None:
        """Drop all knowledge about the endpoint in `slot`, because it left or restarted."""
        self.ledger.forget(slot)
        self.links.forget(slot)
        self.outliers.forget(slot)
        self.pairs.forget(slot)
        self.refused_pairs.forget(slot)
        self.overdue_prefills.forget(slot)
        self.full.forget(slot)
        if self.gate is not None:
            self.gate.forget(slot)
        self.accuracy.forget(slot)
        self.answer_lengths.forget(slot)
        if self.latency is not None:
            self.latency.forget(slot)
        self.outlying.pop(slot, None)
        self.indexes.forget(slot)
