"""The candidates of one decision, as numpy columns for plugins.

The pool keeps one array for each signal, indexed by endpoint slot, and updates it in place.
`Candidates` is a view of some of those slots at one time. A column is gathered when a plugin reads
it.
"""

import math
from collections.abc import Mapping
from math import isnan
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from epp.core.knowledge.peer_load import PeerLoads
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.knowledge.rendezvous import Hashes, rendezvous_weights
from epp.core.knowledge.request_load import RequestLoad
from epp.core.knowledge.topology import DEFAULT_TOPOLOGY, TopologyLabels, nearness_to, places_of
from epp.core.types import NO_ATTRIBUTES, AdapterReport, Endpoint, EndpointMetrics, Seconds

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

SCRAPED: Final = (
    "waiting_requests",
    "running_requests",
    "kv_cache_usage",
    "kv_capacity_tokens",
    "adapter_state",
    "attribute",
)
"""Names of the columns that change only when an engine reports a new value, or when an endpoint
joins, leaves or restarts.
"""
LISTED: Final = ("endpoints", "labels")
"""Names of the columns that change only when the list of endpoints changes."""
VERSIONED: Final = (*SCRAPED, *LISTED)
NUMBERS: Final = (
    *("waiting_requests", "running_requests", "kv_cache_usage", "kv_capacity_tokens"),
    *("metrics_age_s", "inflight_requests", "inflight_context_tokens"),
    *("inflight_prefill_tokens", "prefill_tokens_per_s", "matched_blocks"),
)
"""Names of the columns that together describe the state of one endpoint at a decision, in the order
in which `numbers_of` returns them.
"""
REPORTED_S_MAX: Final = 2.0
"""Maximum age in seconds of an endpoint's metrics that a scorer with costs (`TellsCost`) uses as
they are. Older ones describe requests that have ended since, and would send all requests to the
endpoint that was idle then. The scorer may use the median of the other endpoints for them. The
picker's own counts are used at any age.
"""

_ROWS: Final = (
    *("waiting_requests", "running_requests", "kv_cache_usage", "kv_capacity_tokens"),
    *("observed_at_s", "prefill_backlog_tokens", "prefill_drained_at_s"),
    *("prefill_tokens_per_s", "prefill_drain_tokens_per_s"),
)
"""Names of the columns that are rows of the array `Columns.rows`, in this order."""
_VIEWS: Final = frozenset({*_ROWS, "by_slot"})
"""Names of the attributes of `Columns` that are views of its array `rows`."""

LABELLED_MAX: Final = 64
"""Maximum number of label conditions whose results are kept until labels change."""
ATTRIBUTES_MAX: Final = 64
"""Maximum number of attributes of a pool, each of which is a column. Attributes beyond it are
unknown for every endpoint.
"""

PREDICTED_LATENCY: Final = "predicted latency"
"""Key of the predicted latencies among the affinities of candidates."""
PREDICTED_TTFT: Final = "ttft_s"
PREDICTED_TPOT: Final = "tpot_s"
PREDICTED_TTFT_ERROR: Final = "ttft_error"
PREDICTED_TPOT_ERROR: Final = "tpot_error"

_NO_ADAPTERS: Final = AdapterReport()
_NOTHING: Final = np.zeros(())
"""Zero as a numpy array, used instead of a Python float. Converting a float takes numpy longer than
adding a hundred values.
"""
NO_COLUMNS: Final[Mapping[str, Floats]] = MappingProxyType({})


class Affinity(Struct, frozen=True, eq=False, gc=False):
    """The match of a request in an affinity index: `matched[i]` of `total`, in the index's own
    unit.

    From an index, `matched` is int64 by endpoint slot; from `Candidates`, it is by candidate. The
    `columns` hold further values that the index knows of each endpoint, float64 by name, in the
    same order.
    """

    matched: Ints
    total: int
    columns: Mapping[str, Floats] = NO_COLUMNS
    most: int | None = None
    """Largest of `matched`, or None if the index does not tell it."""


class EngineLoad(Struct, frozen=True, eq=False):
    """The latest load that the engines of n candidates reported: read-only arrays, float64[n] each."""

    waiting_requests: Floats
    requests: Floats
    """Number of waiting and running requests of each engine."""
    kv_used_tokens: Floats
    """Number of tokens in KV blocks that requests reference."""
    kv_capacity_tokens: Floats
    complete: bool
    """True if every value of these arrays is known. If False, each unknown value is NaN."""
    waits: bool = True
    """False if it is known that no request waits at any of the engines."""
    kv_free_least_tokens: float = math.nan
    """Smallest number of tokens that the KV cache of any of the engines has room for; NaN if one of
    them is unknown.
    """


class Columns:
    """One array for each signal of the pool's endpoints, by endpoint slot. An empty slot has the
    values of an endpoint about which nothing is known.

    The arrays grow by doubling, so a view of one must not be kept across a change of the pool.
    """

    waiting_requests: Floats
    running_requests: Floats
    kv_cache_usage: Floats
    kv_capacity_tokens: Floats
    observed_at_s: Floats
    """Time of each endpoint's last good scrape; -inf if there was none."""
    prefill_backlog_tokens: Floats
    """Number of uncached prompt tokens that each endpoint still had to prefill at
    `prefill_drained_at_s`.
    """
    prefill_drained_at_s: Floats
    prefill_tokens_per_s: Floats
    """Configured prefill speed of each endpoint in tokens per second; an empty slot has the speed
    of its last endpoint.
    """
    receiving_tokens: Floats
    """Number of prompt tokens whose KV blocks each endpoint still has to receive, for this picker's
    requests in flight.
    """
    sending_tokens: Floats
    """Number of prompt tokens whose KV blocks each endpoint still has to send, or to compute and send,
    for this picker's requests in flight.
    """
    link_bytes_per_s: Floats
    """Measured speed in bytes per second at which KV blocks move to each endpoint; NaN if unknown."""
    pool_link_bytes_per_s: float = math.nan
    """Median of the known values of `link_bytes_per_s`. If there are none, it is 0 if the next
    transfer will show its speed, else NaN.
    """
    adapters_active: Ints
    adapters_resident: Ints
    adapters_idle: Ints
    prefill_drain_tokens_per_s: Floats
    """Tokens per second by which `prefill_backlog_tokens` of each endpoint fall until the endpoint
    is observed again.
    """
    by_slot: Floats
    """View of `rows` as float64[slots, rows]."""

    first_slots: Ints | None = None
    """Read-only array of the ready slots if these are the first slots of the pool in order, none left
    out; else None. It is compared by identity.
    """

    def __init__(self) -> None:
        self.endpoints: list[Endpoint | None] = []
        self.identities: Hashes = np.empty(0, dtype=np.uint64)
        """Hash of each endpoint's id; an empty slot has the hash of its last endpoint."""
        self.adapters: list[AdapterReport | None] = []
        self.rows: Floats = np.empty((len(_ROWS), 0))
        """The columns named in `_ROWS` as float64[rows, slots]. Each of them is also an attribute
        of this object.

        One array makes it possible to read all columns of an endpoint in one step.
        """
        self._name_rows()
        self.cache_queried_tokens: Floats = np.empty(0)
        """Number of prompt tokens that each engine looked up in its prefix cache since it started;
        NaN if not reported.
        """
        self.cache_hit_tokens: Floats = np.empty(0)
        self.observed_since_s: Seconds = -math.inf
        """Lower bound of `observed_at_s` of all ready endpoints; it never falls while the same
        endpoints are ready.
        """
        self.saturated: Bools = np.empty(0, dtype=np.bool_)
        """True for each endpoint whose engine itself refused a request, with 503 and without
        `retry-after`, since its last good scrape. A scrape without an answer resets it.
        """
        self.unreachable: Bools = np.empty(0, dtype=np.bool_)
        """True for each endpoint whose last scrapes, several in a row, got no response."""
        self.ejected: Bools = np.empty(0, dtype=np.bool_)
        """True for each endpoint that outlier ejection excludes now (module `ejection`)."""
        self.inflight_requests: Ints = np.empty(0, dtype=np.int64)
        self.inflight_context_tokens: Ints = np.empty(0, dtype=np.int64)
        self.receiving_tokens = self.sending_tokens = self.link_bytes_per_s = np.empty(0)
        self.unreported_requests: Ints = np.empty(0, dtype=np.int64)
        """Number of requests that the picker sent to each endpoint since the last load report of
        its engine.
        """
        self.prefill_alike = False
        """True if the same prefill speed is configured for all endpoints of the pool."""
        self.adapter_generation: Ints = np.empty(0, dtype=np.int64)
        self.adapters_reported = 0
        """Number of endpoints that report LoRA adapters. Only these have values in the columns
        about adapters.
        """
        self.adapter_slots_max: Ints = np.empty(0, dtype=np.int64)
        # Arrays without elements may be shared: `_grow` replaces each by its own.
        self.adapters_active = self.adapters_resident = self.adapters_idle = np.empty(0, np.int64)
        self.peers: PeerLoads | None = None
        """Loads that peers report for the endpoints, or None if this picker does not share with
        peers.
        """
        self.attributes: dict[str, Floats] = {}
        """Column of each attribute by the attribute's key; NaN where an endpoint does not report
        it. A key that no endpoint reports has no column.
        """
        self.topology = DEFAULT_TOPOLOGY
        """Keys of the endpoint labels whose values name the endpoint's host, rack, zone and region.
        """
        self._places: tuple[TopologyLabels, int, Ints] | None = None
        """The result of `places_of`, after the labels and the version for which it was computed."""
        self._labelled: tuple[int, dict[tuple[str, frozenset[str | None]], Bools]] = (0, {})
        """Version of the labels, and the results of `labelled` for it by its arguments."""
        self.version = 0
        """Total number of changes of the columns in `versions`."""
        self.versions = dict.fromkeys(VERSIONED, 0)
        """Number of changes of each column by its name. If it is unchanged, so are the column's
        values.
        """
        self.last_load: tuple[Ints, int, EngineLoad] | None = None
        """The `EngineLoad` that was gathered last, as (slots, `version` of the columns, load). None
        before the first.
        """
        self.last_requests: tuple[EngineLoad, RequestLoad] | None = None
        """The engines' load, and the `RequestLoad` of all slots that was gathered from it last; None
        before the first.
        """
        self.recounted: set[int] = set()
        """Slots whose requests in flight have changed since `last_requests` was current."""

    def __len__(self) -> int:
        return len(self.endpoints)

    def add_slot(self) -> int:
        """Add a slot for one more endpoint to all columns, and return its number."""
        slot = len(self.endpoints)
        if slot == len(self.waiting_requests):
            self._grow(max(8, 2 * slot))
        self.endpoints.append(None)
        self.adapters.append(None)
        self.prefill_tokens_per_s[slot] = PREFILL_TOKENS_PER_S
        self.prefill_drain_tokens_per_s[slot] = PREFILL_TOKENS_PER_S
        self.clear(slot)
        return slot

    def changed(self, *names: str) -> None:
        """Record that the columns `names`, which must be among the `VERSIONED`, have new values."""
        for name in names:
            self.versions[name] += 1
        self.version += len(names)

    def places(self) -> Ints:
        """Return int64[4, slots]: the place of each endpoint on each level (`places_of`)."""
        version, known = self.versions["labels"], self._places
        if known is None or known[0] is not self.topology or known[1] != version:
            known = self.topology, version, places_of(self.endpoints, self.topology)
            self._places = known
        return known[2]

    def labelled(self, label: str, accepted: frozenset[str | None]) -> Bools:
        """Return bool[slots], read-only: whether the value of `label` at each endpoint is in
        `accepted`, which contains None if a missing label is accepted. An empty slot is False.
        """
        version, results = self._labelled
        if version != self.versions["labels"]:
            results = {}
            self._labelled = self.versions["labels"], results
        known = results.get((label, accepted))
        if known is None or len(known) != len(self.endpoints):
            known = np.array(
                [at is not None and at.labels.get(label) in accepted for at in self.endpoints],
                dtype=np.bool_,
            )
            if len(results) < LABELLED_MAX:
                results[label, accepted] = known
        return known

    def clear(self, slot: int) -> None:
        """Reset all columns at `slot`, those of its scrapes and those of its requests in flight."""
        if self.endpoints[slot] is not None:
            # A new list keeps earlier candidates intact: they still know the endpoint that was in
            # the slot.
            self.endpoints = [*self.endpoints]
            self.endpoints[slot] = None
        self.forget_observations(slot)
        self.ejected[slot] = False
        self.recounted.add(slot)
        self.inflight_requests[slot] = 0
        self.inflight_context_tokens[slot] = 0
        self.unreported_requests[slot] = 0
        self.receiving_tokens[slot] = self.sending_tokens[slot] = 0.0
        self.link_bytes_per_s[slot] = math.nan
        self.prefill_backlog_tokens[slot] = 0.0
        self.prefill_drained_at_s[slot] = 0.0
        if self.peers is not None:
            self.peers.forget_slot(slot)

    def forget_observations(self, slot: int) -> None:
        """Reset the scraped columns at `slot`; the counts of requests in flight stay."""
        self.set_load(slot, math.nan, math.nan, math.nan)
        self.set_kv_capacity(slot, math.nan)
        self.cache_queried_tokens[slot] = self.cache_hit_tokens[slot] = math.nan
        self.observed_at_s[slot] = -math.inf
        self.saturated[slot] = False
        self.unreachable[slot] = False
        self.set_adapters(slot, None)
        self.set_attributes(slot, NO_ATTRIBUTES)

    def set_scraped(self, slot: int, metrics: EndpointMetrics) -> None:
        """Store the values of a good scrape of `slot`."""
        self.set_load(
            slot, metrics.waiting_requests, metrics.running_requests, metrics.kv_cache_usage
        )
        self.cache_queried_tokens[slot] = metrics.cache_queried_tokens
        self.cache_hit_tokens[slot] = metrics.cache_hit_tokens
        if self.adapters[slot] != metrics.adapters:
            self.set_adapters(slot, metrics.adapters)
        if metrics.attributes or self.attributes:
            self.set_attributes(slot, metrics.attributes)

    def set_load(
        self, slot: int, waiting_requests: float, running_requests: float, kv_cache_usage: float
    ) -> None:
        """Store the scraped queue, batch and KV usage of `slot`; a column with an equal value
        counts as unchanged.
        """
        # Scrapes come many times a second, and most values stay the same. NaN differs from itself.
        before = self.waiting_requests.item(slot)
        if before != waiting_requests and not (isnan(before) and isnan(waiting_requests)):
            self.waiting_requests[slot] = waiting_requests
            self.changed("waiting_requests")
        before = self.running_requests.item(slot)
        if before != running_requests and not (isnan(before) and isnan(running_requests)):
            self.running_requests[slot] = running_requests
            self.changed("running_requests")
        before = self.kv_cache_usage.item(slot)
        if before != kv_cache_usage and not (isnan(before) and isnan(kv_cache_usage)):
            self.kv_cache_usage[slot] = kv_cache_usage
            self.changed("kv_cache_usage")

    def set_kv_capacity(self, slot: int, tokens: float) -> None:
        """Store the scraped KV-cache size of `slot`; NaN if not reported."""
        before = self.kv_capacity_tokens.item(slot)
        if before != tokens and not (isnan(before) and isnan(tokens)):
            self.kv_capacity_tokens[slot] = tokens
            self.changed("kv_capacity_tokens")

    def set_adapters(self, slot: int, report: AdapterReport | None) -> None:
        """Store the scraped adapters of `slot`, with counts that decisions then need not compute."""
        self.adapters_reported += (report is not None) - (self.adapters[slot] is not None)
        self.adapters[slot] = report
        self.changed("adapter_state")
        if report is None:
            self.adapter_generation[slot] = 0
            report = AdapterReport()
        else:
            self.adapter_generation[slot] = 2 if report.resident_known else 1
        self.adapter_slots_max[slot] = report.slots_max
        self.adapters_active[slot] = len(report.active)
        self.adapters_resident[slot] = len(report.gpu)
        self.adapters_idle[slot] = len(report.gpu - report.active - report.pinned)

    def set_attributes(self, slot: int, told: Mapping[str, float]) -> None:
        """Store the scraped attributes of `slot`; a missing attribute is unknown.

        An attribute that no endpoint reports any longer loses its column.
        """
        for key in told.keys() - self.attributes.keys():
            if len(self.attributes) < ATTRIBUTES_MAX:
                self.attributes[key] = np.full(len(self.waiting_requests), math.nan)
        forgotten: list[str] = []
        changed = False
        for key, column in self.attributes.items():
            before, now = column.item(slot), told.get(key, math.nan)
            if before != now and not (isnan(before) and isnan(now)):
                column[slot] = now
                changed = True
                if isnan(now) and np.isnan(column).all():
                    forgotten.append(key)
        for key in forgotten:
            del self.attributes[key]
        if changed:
            self.changed("attribute")

    def _name_rows(self) -> None:
        self.by_slot = self.rows.T
        for name, row in zip(_ROWS, self.rows, strict=True):
            setattr(self, name, row)

    def _grow(self, capacity: int) -> None:
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and name not in _VIEWS:
                grown = np.zeros((*array.shape[:-1], capacity), dtype=array.dtype)
                grown[..., : array.shape[-1]] = array
                setattr(self, name, grown)
        self._name_rows()
        for key, column in self.attributes.items():
            wider = np.full(capacity, math.nan)
            wider[: len(column)] = column
            self.attributes[key] = wider


def kv_capacity_tokens(blocks: float | None, block_size_tokens: float | None) -> float:
    """Return the size of a KV cache in tokens: `blocks` times `block_size_tokens`. Return NaN if a
    metrics page has no valid values of the two.
    """
    # Floats are used because the product of two large numbers on a page may overflow to infinity.
    tokens = float(blocks or 0) * float(block_size_tokens or 0)
    return tokens if 0.0 < tokens < math.inf else math.nan


class AdapterColumns:
    """The state of LoRA adapters at n candidates, as their engines reported it."""

    __slots__ = ("_columns", "_slot")

    def __init__(self, columns: Columns, slot: Ints) -> None:
        self._columns = columns
        self._slot = slot

    @property
    def generation(self) -> Ints:
        """Return int64[n]: the form in which each engine reports adapters. It is 0 if the engine
        reports none, 1 if it reports `lora_requests_info`, and 2 if it also reports the adapters in
        memory.
        """
        return self._columns.adapter_generation[self._slot]

    @property
    def slots_max(self) -> Ints:
        """Return int64[n]: the number of adapters that each engine can run at once; 0 if unknown."""
        return self._columns.adapter_slots_max[self._slot]

    @property
    def active_count(self) -> Ints:
        """Return int64[n]: the number of LoRA adapters with a running or waiting request at each
        engine.
        """
        return self._columns.adapters_active[self._slot]

    @property
    def resident_count(self) -> Ints:
        """Return int64[n]: the number of adapters in GPU memory of each engine; 0 unless
        `generation` is 2.
        """
        return self._columns.adapters_resident[self._slot]

    @property
    def idle_count(self) -> Ints:
        """Return int64[n]: the number of adapters in GPU memory that are neither active nor pinned,
        so that the engine can evict them; 0 unless `generation` is 2.
        """
        return self._columns.adapters_idle[self._slot]

    def active(self, adapter: str) -> Bools:
        """Return bool[n]: whether each engine has a running or waiting request for `adapter`."""
        return np.array([adapter in report.active for report in self._known()], dtype=np.bool_)

    def on_gpu(self, adapter: str) -> Bools:
        """Return bool[n]: whether each engine has `adapter` in GPU memory; False unless
        `generation` is 2.
        """
        return np.array([adapter in report.gpu for report in self._known()], dtype=np.bool_)

    def on_cpu(self, adapter: str) -> Bools:
        """Return bool[n]: whether each engine has `adapter` in CPU memory; False unless
        `generation` is 2.
        """
        return np.array([adapter in report.cpu for report in self._known()], dtype=np.bool_)

    @property
    def reports(self) -> list[AdapterReport | None]:
        """Return the adapter report of each candidate, in which None stands for a candidate without
        a report.
        """
        adapters = self._columns.adapters
        return [adapters[slot] for slot in self._slot.tolist()]

    def _known(self) -> list[AdapterReport]:
        return [report or _NO_ADAPTERS for report in self.reports]


class Candidates:
    """The n endpoints that may serve one request, as columns of length n.

    `slot` belongs to the pool and is read-only, as are the arrays of `engine_load`. Every other
    column is a new copy, so a plugin may use it as scratch space without an effect on the pool.
    """

    __slots__ = (
        "_affinities",
        "_columns",
        "_endpoints",
        "_now",
        "_prefix",
        "_slot",
        "block_tokens",
        "peer",
        "prompt_tokens",
    )

    def __init__(
        self,
        columns: Columns,
        slot: Ints,
        now: Seconds,
        *,
        affinities: Mapping[str, Affinity],
        prefix: str = "",
        block_tokens: int = 1,
        prompt_tokens: int = 0,
        peer: int = -1,
    ) -> None:
        """Create candidates from the endpoints in the slots `slot`. `affinities` are the matches of
        the request, by name of the index; `prefix` names the default prefix index.
        """
        if slot is not columns.first_slots:
            slot.setflags(write=False)
        self._slot = slot
        self.block_tokens = block_tokens
        """Number of tokens in one block of `matched_blocks`."""
        self.prompt_tokens = prompt_tokens
        self.peer = peer
        """Slot of the endpoint that was chosen for the other of the stages prefill and decode, or
        -1 if none was chosen yet.
        """
        self._columns = columns
        self._endpoints = columns.endpoints
        self._now = now
        self._affinities = affinities
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self._slot)

    def take(self, keep: Bools | Ints) -> "Candidates":
        """Return the subset of the candidates that `keep` selects, a Boolean mask or an array of
        positions.
        """
        return Candidates(
            self._columns,
            self._slot[keep],
            self._now,
            affinities=self._affinities,
            prefix=self._prefix,
            block_tokens=self.block_tokens,
            prompt_tokens=self.prompt_tokens,
            peer=self.peer,
        )

    def near(self, peer: int) -> "Candidates":
        """Return these candidates with `peer`, the slot of the endpoint that was chosen for the
        other stage.
        """
        return Candidates(
            self._columns,
            self._slot,
            self._now,
            affinities=self._affinities,
            prefix=self._prefix,
            block_tokens=self.block_tokens,
            prompt_tokens=self.prompt_tokens,
            peer=peer,
        )

    @property
    def version(self) -> int:
        """Return the number of changes of all versioned columns; a change of any endpoint of the
        pool counts.
        """
        return self._columns.version

    def version_of(self, names: tuple[str, ...]) -> int:
        """Return the number of changes of the columns `names` together, which must be among the
        `VERSIONED`.
        """
        versions = self._columns.versions
        changes = 0
        for name in names:
            changes += versions[name]
        return changes

    @property
    def slot(self) -> Ints:
        """Return int64[n]: each candidate's slot in the pool, ascending; read-only."""
        return self._slot

    @property
    def waiting_requests(self) -> Floats:
        """Return float64[n]: the number of requests in each engine's queue; NaN if unknown."""
        return self._columns.waiting_requests[self._slot]

    @property
    def running_requests(self) -> Floats:
        """Return float64[n]: the number of requests in each engine's batch; NaN if unknown."""
        return self._columns.running_requests[self._slot]

    @property
    def kv_cache_usage(self) -> Floats:
        """Return float64[n] in [0, 1]: the share of each engine's KV blocks that requests
        reference; NaN if unknown.
        """
        return self._columns.kv_cache_usage[self._slot]

    @property
    def kv_capacity_tokens(self) -> Floats:
        """Return float64[n]: the size of each engine's KV cache in tokens, at least 1; NaN if
        unknown.
        """
        return self._columns.kv_capacity_tokens[self._slot]

    def engine_load(self) -> EngineLoad:
        """Return the load that the candidates' engines reported last: the waiting requests, all
        requests, and the used and the total tokens of the KV cache.

        If all ready endpoints are candidates, the result is gathered once for all requests between
        two changes of scraped values.
        """
        columns, slot = self._columns, self._slot
        last = columns.last_load
        # The pool keeps one array of the ready slots until they change.
        if last is not None and last[0] is slot and last[1] == columns.version:
            return last[2]
        capacity = self.kv_capacity_tokens
        waiting = self.waiting_requests
        requests, used = self.running_requests + waiting, self.kv_cache_usage * capacity
        # A sum or a product is unknown if either part is.
        unknown = np.isnan(requests).any() or np.isnan(used).any()
        # `argmax` takes a third of the time of `any`.
        waits = len(waiting) > 0 and waiting.item(waiting.argmax()) != 0.0
        free, least = capacity - used, math.nan
        if len(free):
            least = free.item(free.argmin())
        load = EngineLoad(
            *(waiting, requests, used, capacity),
            waits=waits,
            complete=not unknown,
            kv_free_least_tokens=least,
        )
        for column in (waiting, requests, used, capacity):
            column.setflags(write=False)
        columns.last_load = (slot, columns.version, load)
        return load

    def request_load(self, load: EngineLoad) -> RequestLoad:
        """Return the requests that the candidates' engines report in `load`, and those in flight.

        The result is valid until the next change of requests in flight. It is gathered once for
        all requests between two changes of scraped values, if all slots are candidates and this
        picker does not share with peers.
        """
        columns, slot = self._columns, self._slot
        known = columns.last_requests
        # Each gathered load belongs to one array of slots, so that the slots are the same too.
        if known is not None and known[0] is load and columns.peers is None:
            requests = known[1]
            for changed in columns.recounted:
                if changed < len(slot):
                    inflight = columns.inflight_requests.item(changed)
                    context_tokens = columns.inflight_context_tokens.item(changed)
                    requests.recount(changed, inflight, context_tokens)
            columns.recounted.clear()
            return requests
        requests = RequestLoad(
            load.requests,
            load.waiting_requests,
            self.inflight_requests.astype(np.float64),
            self.inflight_context_tokens.astype(np.float64),
            load.kv_used_tokens,
            waits=load.waits,
        )
        last = columns.last_load
        if last is not None and last[2] is load and slot is columns.first_slots:
            columns.last_requests = load, requests
            columns.recounted.clear()
        return requests

    @property
    def cache_queried_tokens(self) -> Floats:
        """Return float64[n]: the number of prompt tokens that each engine looked up in its prefix
        cache since it started; NaN if unknown.
        """
        return self._columns.cache_queried_tokens[self._slot]

    @property
    def cache_hit_tokens(self) -> Floats:
        """Return float64[n]: the number of prompt tokens that each engine found in its prefix cache
        since it started; NaN if unknown.
        """
        return self._columns.cache_hit_tokens[self._slot]

    @property
    def metrics_age_s(self) -> Floats:
        """Return float64[n]: seconds since the last good scrape of each candidate; inf if there was
        none.
        """
        return self._now - self._columns.observed_at_s[self._slot]

    @property
    def metrics_age_s_max(self) -> Seconds:
        """Return the largest age of a candidate's metrics in seconds; inf if a candidate was never
        scraped or there are no candidates.
        """
        observed_at_s = self._columns.observed_at_s[self._slot]
        if not len(observed_at_s):
            return math.inf
        return self._now - observed_at_s.item(observed_at_s.argmin())

    def all_observed_within(self, age_s: Seconds) -> bool:
        """Return whether no candidate's metrics are older than `age_s` seconds.

        This is faster than `metrics_age_s_max`, because it usually reads no column.
        """
        observed_since_s = self._columns.observed_since_s
        return self._now - observed_since_s <= age_s or self.metrics_age_s_max <= age_s

    def metrics_age_s_of(self, position: int) -> Seconds:
        """Return the seconds since the last good scrape of the candidate at `position`; inf if
        there was none.
        """
        return self._now - self._columns.observed_at_s.item(self._slot.item(position))

    @property
    def saturated(self) -> Bools:
        """Return bool[n]: whether each engine refused a request, with 503 and without
        `retry-after`, since its last scrape that succeeded or got no answer.
        """
        return self._columns.saturated[self._slot]

    @property
    def inflight_requests(self) -> Ints:
        """Return int64[n]: the number of requests of this picker and its peers that each candidate
        is serving.
        """
        columns = self._columns
        own = columns.inflight_requests[self._slot]
        if columns.peers is not None:
            own += columns.peers.requests(self._slot, len(columns))
        return own

    @property
    def inflight_context_tokens(self) -> Ints:
        """Return int64[n]: prompt tokens, cached ones included, of the requests in flight at each
        candidate, from this picker and its peers. Answer tokens are not counted.
        """
        columns = self._columns
        own = columns.inflight_context_tokens[self._slot]
        if columns.peers is not None:
            own += columns.peers.context_tokens(self._slot, len(columns))
        return own

    @property
    def unreported_requests(self) -> Ints:
        """Return int64[n]: the number of requests that this picker sent to each candidate since the
        last load report of its engine.

        `waiting_requests` and `running_requests` do not include them yet. Requests that have ended
        since the report count as well.
        """
        return self._columns.unreported_requests[self._slot]

    @property
    def inflight_prefill_tokens(self) -> Floats:
        """Return float64[n]: the estimate of uncached prompt tokens that were sent to each
        candidate and are not yet prefilled.

        The estimate follows the counter of first tokens on the endpoint's metrics page, if it has
        one, and the first outputs that the picker sees. In between, it falls with the endpoint's
        speed. Tokens of peers are included.
        """
        columns, slot = self._columns, self._slot
        # Usually every slot is a candidate. A slice of a column then takes a third of the time.
        at = slice(len(slot)) if slot is columns.first_slots else slot
        # An array is used here as above, because a Python float takes twice as long.
        done = np.array(self._now) - columns.prefill_drained_at_s[at]
        speed = columns.prefill_drain_tokens_per_s[at]
        done *= speed
        left: Floats = np.subtract(columns.prefill_backlog_tokens[at], done, out=done)
        np.maximum(left, _NOTHING, out=left)
        if columns.peers is not None:
            left += columns.peers.prefill_tokens(self._slot, self._now, speed)
        return left

    @property
    def receiving_tokens(self) -> Floats:
        """Return float64[n]: the estimate of prompt tokens whose KV blocks each candidate still has
        to receive from endpoints that prefill. Requests of peers are included.
        """
        columns = self._columns
        own = columns.receiving_tokens[self._slot]
        if columns.peers is not None:
            own += columns.peers.receiving_tokens(self._slot, len(columns))
        return own

    @property
    def sending_tokens(self) -> Floats:
        """Return float64[n]: the estimate of prompt tokens whose KV blocks each candidate still has
        to send to endpoints that decode. Requests of peers are included.
        """
        columns = self._columns
        own = columns.sending_tokens[self._slot]
        if columns.peers is not None:
            own += columns.peers.sending_tokens(self._slot, len(columns))
        return own

    def link_bytes_per_s(self, configured: float) -> Floats | float:
        """Return float64[n]: the measured speed in bytes per second at which KV blocks move to each
        candidate. It is the median of the pool if a candidate's speed is unknown. Return
        `configured` if no speed was measured.
        """
        columns = self._columns
        common = columns.pool_link_bytes_per_s
        if not common > 0.0:
            return configured
        speeds = columns.link_bytes_per_s[self._slot]
        speeds[np.isnan(speeds)] = common
        return speeds

    @property
    def link_unmeasured(self) -> bool:
        """Return True if no speed of KV transfers was measured yet and the next transfer will show
        one.
        """
        return self._columns.pool_link_bytes_per_s == 0.0

    @property
    def own_prefill_tokens(self) -> Floats:
        """Return float64[n]: the part of `inflight_prefill_tokens` that this picker sent."""
        columns, tokens = self._columns, self.inflight_prefill_tokens
        if columns.peers is None:
            return tokens
        speed = columns.prefill_drain_tokens_per_s[self._slot]
        return tokens - columns.peers.prefill_tokens(self._slot, self._now, speed)

    @property
    def prefill_tokens_per_s(self) -> Floats:
        """Return float64[n], above 0: the configured prefill speed of each candidate in tokens per
        second.
        """
        return self._columns.prefill_tokens_per_s[self._slot]

    @property
    def prefill_alike(self) -> bool:
        """Return True if the same prefill speed is configured for all endpoints of the pool, so that
        prefill tokens of two endpoints can be compared instead of seconds. Return False if that is
        unknown.
        """
        return self._columns.prefill_alike

    @property
    def common_prefill_tokens_per_s(self) -> float | None:
        """Return the configured prefill speed of all candidates in tokens per second, or None if it
        may differ. This is faster than `prefill_tokens_per_s`.
        """
        columns = self._columns
        if not columns.prefill_alike:
            return None
        return columns.prefill_tokens_per_s.item(self._slot.item(0))

    @property
    def matched_blocks(self) -> Ints:
        """Return int64[n]: number of leading full blocks of the prompt that each candidate is
        estimated to have cached, by the default prefix index.
        """
        return self.affinity("").matched

    @property
    def total_blocks(self) -> Ints:
        """Return int64[n]: the number of full blocks of the prompt that the default prefix index
        looked up, the same for all candidates. A long prompt may have more.
        """
        return np.full(len(self._slot), self.affinity("").total, dtype=np.int64)

    @property
    def uncached_tokens(self) -> Floats:
        """Return float64[n]: the number of tokens of this request's prompt that each candidate
        would have to compute, because the default prefix index does not estimate them as cached
        there.
        """
        cached = self.matched_blocks * float(self.block_tokens)
        uncached: Floats = np.maximum(self.prompt_tokens - cached, 0.0)
        return uncached

    @property
    def predicted_ttft_s(self) -> Floats:
        """Return float64[n]: the predicted time from this decision to the first token at each
        candidate in seconds; NaN if there is no usable prediction, or no `predicted-latency-producer`.
        """
        return self._predicted(PREDICTED_TTFT)

    @property
    def predicted_tpot_s(self) -> Floats:
        """Return float64[n]: the predicted time per output token at each candidate in seconds; NaN
        as for `predicted_ttft_s`.
        """
        return self._predicted(PREDICTED_TPOT)

    @property
    def predicted_ttft_error(self) -> Floats:
        """Return float64[n]: the median relative error of recent `predicted_ttft_s` of each
        candidate, 0.1 for 10 %; NaN if unknown.
        """
        return self._predicted(PREDICTED_TTFT_ERROR)

    @property
    def predicted_tpot_error(self) -> Floats:
        """Return float64[n]: the median relative error of recent `predicted_tpot_s` of each
        candidate; NaN if unknown.
        """
        return self._predicted(PREDICTED_TPOT_ERROR)

    def _predicted(self, name: str) -> Floats:
        known = self._affinities.get(PREDICTED_LATENCY)
        if known is None:
            return np.full(len(self._slot), math.nan)
        return known.columns[name][self._slot]

    @property
    def adapters_reported(self) -> bool:
        """Return whether any endpoint of the pool reports LoRA adapters."""
        return self._columns.adapters_reported > 0

    @property
    def adapter_state(self) -> AdapterColumns:
        """Return the LoRA adapters that each candidate reported in its last good scrape."""
        return AdapterColumns(self._columns, self._slot)

    def attribute(self, key: str) -> Floats:
        """Return float64[n]: the reported values of attribute `key` (`attribute_key`); NaN if
        unknown.
        """
        column = self._columns.attributes.get(key)
        return np.full(len(self._slot), math.nan) if column is None else column[self._slot]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoint of each candidate, even if it has left the pool since."""
        known = self._endpoints
        found = [known[slot] for slot in self._slot.tolist()]
        return tuple([endpoint for endpoint in found if endpoint is not None])

    def name_of(self, position: int) -> str:
        """Return the name of the endpoint of the candidate at `position`."""
        endpoint = self._endpoints[self._slot.item(position)]
        assert endpoint is not None, "a candidate is an endpoint"
        return endpoint.name

    @property
    def labels(self) -> tuple[Mapping[str, str], ...]:
        """Return the labels of each candidate's endpoint."""
        return tuple([endpoint.labels for endpoint in self.endpoints])

    def labelled(self, label: str, accepted: frozenset[str | None]) -> Bools:
        """Return bool[n]: whether the value of `label` at each candidate is in `accepted`, which
        contains None if a missing label is accepted. This is faster than reading `labels`.
        """
        columns, slot = self._columns, self._slot
        if self._endpoints is columns.endpoints:
            known = columns.labelled(label, accepted)
            # Usually every slot is a candidate. A copy then takes a tenth of the time.
            return known[: len(slot)].copy() if slot is columns.first_slots else known[slot]
        return np.array([labels.get(label) in accepted for labels in self.labels], dtype=np.bool_)

    @property
    def nearness(self) -> Ints:
        """Return int64[n]: the nearest place (`Nearness`) that each candidate shares with `peer`,
        the endpoint that was chosen for the other stage; all 0 if none was chosen yet.
        """
        if self.peer < 0:
            return np.zeros(len(self._slot), dtype=np.int64)
        return nearness_to(self._columns.places(), self._slot, self.peer)

    def rendezvous(self, key: int) -> Hashes:
        """Return uint64[n]: the weight of each candidate for `key`, a number of 64 bits. The
        highest wins.

        Pickers with the same endpoints compute the same winner without communication. An endpoint
        that leaves changes only the keys that it had won (`core/knowledge/rendezvous`).
        """
        return rendezvous_weights(self._columns.identities[self._slot], key)

    def prefix_match(self, position: int) -> tuple[int, int]:
        """Return `matched_blocks` and `total_blocks` of the candidate at `position`."""
        known = self._affinities.get(self._prefix)
        if known is None:
            return 0, 0
        return known.matched.item(self._slot.item(position)), known.total

    def matched_most(self) -> int:
        """Return the largest number of leading full blocks that any candidate is estimated to have
        cached.
        """
        known = self._affinities.get(self._prefix)
        if known is None:
            return 0
        every = self._slot is self._columns.first_slots and len(self._slot) == len(known.matched)
        if every and known.most is not None:
            return known.most
        matched = known.matched[self._slot]
        return matched.item(matched.argmax())

    def inflight_requests_of(self, position: int) -> int:
        """Return the number of requests of this picker and its peers at the candidate at
        `position`.
        """
        columns = self._columns
        if columns.peers is not None:
            return int(self.inflight_requests[position])
        return columns.inflight_requests.item(self._slot.item(position))

    def numbers_of(self, position: int) -> tuple[float, ...]:
        """Return the columns `NUMBERS` of the candidate at `position`, faster than gathering the
        columns of all candidates.
        """
        columns, slot, now = self._columns, self._slot.item(position), self._now
        waiting, running, usage, capacity, observed_at_s, *prefill = columns.by_slot[slot].tolist()
        backlog_tokens, drained_at_s, speed, drain_speed = prefill
        requests = columns.inflight_requests.item(slot)
        context_tokens = columns.inflight_context_tokens.item(slot)
        prefill_tokens = backlog_tokens - (now - drained_at_s) * drain_speed
        # A call of `max` would take longer. NaN becomes 0 too.
        if not prefill_tokens > 0.0:
            prefill_tokens = 0.0
        if columns.peers is not None:
            alone = self._slot[position : position + 1]
            requests += columns.peers.requests(alone, len(columns)).item(0)
            context_tokens += columns.peers.context_tokens(alone, len(columns)).item(0)
            speeds = columns.prefill_drain_tokens_per_s[alone]
            prefill_tokens += columns.peers.prefill_tokens(alone, now, speeds).item(0)
        known = self._affinities.get(self._prefix)
        return (
            waiting,
            running,
            usage,
            capacity,
            now - observed_at_s,
            requests,
            context_tokens,
            prefill_tokens,
            speed,
            0 if known is None else known.matched.item(slot),
        )

    def prefill_numbers_of(self, position: int) -> tuple[float, ...]:
        """Return what determines the time of a prefill at the candidate at `position`.

        These are the prompt tokens that it has not cached, the pending prefill tokens, its configured
        prefill speed in tokens per second, its running requests, the tokens whose KV blocks it still
        has to receive and to send, and the measured speed in bytes per second of KV transfers to it.
        If this speed is unknown, it is the median of the pool. If that is unknown too, it is 0 if the
        next transfer will show a speed, else NaN. If the candidate does
        not report its running requests, or not within `REPORTED_S_MAX`, the number of its requests in
        flight is returned instead.
        """
        columns, slot = self._columns, self._slot.item(position)
        _, running, _, _, age_s, inflight, _, pending, speed, matched = self.numbers_of(position)
        uncached = max(0.0, self.prompt_tokens - matched * self.block_tokens)
        if age_s > REPORTED_S_MAX or isnan(running):
            running = inflight
        receiving_tokens = columns.receiving_tokens.item(slot)
        sending_tokens = columns.sending_tokens.item(slot)
        if columns.peers is not None:
            alone = self._slot[position : position + 1]
            receiving_tokens += columns.peers.receiving_tokens(alone, len(columns)).item(0)
            sending_tokens += columns.peers.sending_tokens(alone, len(columns)).item(0)
        link = columns.link_bytes_per_s.item(slot)
        if isnan(link):
            link = columns.pool_link_bytes_per_s
        return uncached, pending, speed, running, receiving_tokens, sending_tokens, link

    @property
    def prefill_measured_tokens_per_s(self) -> Floats:
        """Return float64[n], above 0: the measured prefill speed of each candidate in tokens per
        second, which begins with the configured one.
        """
        return self._columns.prefill_drain_tokens_per_s[self._slot]

    @property
    def peer_candidates(self) -> "Candidates | None":
        """Return the endpoint `peer`, which was chosen for the other of the stages prefill and
        decode, as the only candidate; None if none was chosen yet.
        """
        if self.peer < 0:
            return None
        return Candidates(
            self._columns,
            np.array([self.peer], dtype=np.int64),
            self._now,
            affinities=self._affinities,
            prefix=self._prefix,
            block_tokens=self.block_tokens,
            prompt_tokens=self.prompt_tokens,
        )

    def affinity(self, name: str) -> Affinity:
        """Return the match of the index `name` at each candidate; all zero if there is no such
        index.

        The name "" stands for the default prefix index.
        """
        known = self._affinities.get(name or self._prefix)
        if known is None:
            return Affinity(np.zeros(len(self._slot), dtype=np.int64), 0)
        if not known.columns:
            return Affinity(known.matched[self._slot], known.total)
        columns = {name: column[self._slot] for name, column in known.columns.items()}
        return Affinity(known.matched[self._slot], known.total, columns)
