"""What plugins see: the candidates of one decision as read-only numpy columns.

The pool keeps one array a signal, indexed by endpoint slot, and updates it in place. `Candidates`
is a view of some of those slots at one instant; a column is gathered when it is asked for.
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
"""Columns that change only when a scrape tells another value, or an endpoint comes, goes or restarts."""
LISTED: Final = ("endpoints", "labels")
"""Columns that change only with the list of endpoints."""
VERSIONED: Final = (*SCRAPED, *LISTED)
NUMBERS: Final = (
    *("waiting_requests", "running_requests", "kv_cache_usage", "kv_capacity_tokens"),
    *("metrics_age_s", "inflight_requests", "inflight_context_tokens"),
    *("inflight_prefill_tokens", "prefill_tokens_per_s", "matched_blocks"),
)
"""Columns that together say how an endpoint stood at a decision, as `numbers_of` gives them."""

_ROWS: Final = (
    *("waiting_requests", "running_requests", "kv_cache_usage", "kv_capacity_tokens"),
    *("observed_at_s", "prefill_backlog_tokens", "prefill_drained_at_s"),
    *("prefill_tokens_per_s", "prefill_drain_tokens_per_s"),
)
"""Columns that lie in one array, in this order."""

ATTRIBUTES_MAX: Final = 64
"""Of one pool: each is a column. What a configuration names beyond them is unknown of everybody."""

_NO_ADAPTERS: Final = AdapterReport()
_NOTHING: Final = np.zeros(())
"""An array: numpy takes a Python float longer than to add a hundred."""
NO_COLUMNS: Final[Mapping[str, Floats]] = MappingProxyType({})


class Affinity(Struct, frozen=True, eq=False, gc=False):
    """What an affinity index answers: `matched[i]` of `total`, in the index's own unit.

    From an index, `matched` is int64 by endpoint slot; from `Candidates`, by candidate. So are the
    `columns`, float64 by name: whatever else the index knows of each endpoint.
    """

    matched: Ints
    total: int
    columns: Mapping[str, Floats] = NO_COLUMNS


class EngineLoad(Struct, frozen=True, eq=False):
    """The load that the engines of n candidates told last: read-only arrays, float64[n] each."""

    waiting_requests: Floats
    requests: Floats
    """Waiting and running ones."""
    kv_used_tokens: Floats
    """Tokens in KV blocks that requests reference."""
    kv_capacity_tokens: Floats
    complete: bool
    """Every value is known; otherwise unknown ones are NaN."""


class Columns:
    """One array a signal, by endpoint slot; an empty slot holds what an unknown endpoint would.

    Grown by doubling, so a view of an array must not be kept across a change of the pool.
    """

    waiting_requests: Floats
    running_requests: Floats
    kv_cache_usage: Floats
    kv_capacity_tokens: Floats
    observed_at_s: Floats
    """-inf: never."""
    prefill_backlog_tokens: Floats
    """Uncached prefill tokens ahead, as of `prefill_drained_at_s`."""
    prefill_drained_at_s: Floats
    prefill_tokens_per_s: Floats
    """By configuration; of an empty slot, that of the last endpoint there."""
    prefill_drain_tokens_per_s: Floats
    """How fast `prefill_backlog_tokens` become fewer, until more is seen of the endpoint."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint | None] = []
        self.identities: Hashes = np.empty(0, dtype=np.uint64)
        """Hashes of endpoint ids; of an empty slot, that of the last endpoint there."""
        self.adapters: list[AdapterReport | None] = []
        self.rows: Floats = np.empty((len(_ROWS), 0))
        """float64[rows, slots]: the columns `_ROWS`, each of which is an attribute too.

        Because they lie in one array, all of them are read of one endpoint in one step."""
        self._name_rows()
        self.cache_queried_tokens: Floats = np.empty(0)
        """Since the engine started; NaN: it does not tell."""
        self.cache_hit_tokens: Floats = np.empty(0)
        self.observed_since_s: Seconds = -math.inf
        """A lower bound of it for all that are ready; it can only rise while they stay."""
        self.saturated: Bools = np.empty(0, dtype=np.bool_)
        """The engine itself refused a request (503) since the last good scrape."""
        self.unreachable: Bools = np.empty(0, dtype=np.bool_)
        """Scrapes in a row found nobody there."""
        self.ejected: Bools = np.empty(0, dtype=np.bool_)
        """Slow or failing, and to get nothing now: `ejection`."""
        self.inflight_requests: Ints = np.empty(0, dtype=np.int64)
        self.inflight_context_tokens: Ints = np.empty(0, dtype=np.int64)
        self.unreported_requests: Ints = np.empty(0, dtype=np.int64)
        """Sent there since the engine last told its load."""
        self.prefill_alike = False
        """All are known to prefill equally fast."""
        self.adapter_generation: Ints = np.empty(0, dtype=np.int64)
        self.adapters_reported = 0
        """Endpoints of which any of the next is told."""
        self.adapter_slots_max: Ints = np.empty(0, dtype=np.int64)
        self.adapters_active: Ints = np.empty(0, dtype=np.int64)
        self.adapters_resident: Ints = np.empty(0, dtype=np.int64)
        self.adapters_idle: Ints = np.empty(0, dtype=np.int64)
        self.peers: PeerLoads | None = None
        """What peers have in flight; None while there are none."""
        self.attributes: dict[str, Floats] = {}
        """Key of an attribute -> its column; NaN: unknown. A key that nobody told of has none."""
        self.version = 0
        """Counts changes of the columns in `versions`."""
        self.versions = dict.fromkeys(VERSIONED, 0)
        """Column -> how often it changed; the same number, the same values."""
        self.last_load: tuple[Ints, int, EngineLoad] | None = None
        """The `EngineLoad` that was gathered last, with its slots and the `version` at that time."""

    def __len__(self) -> int:
        return len(self.endpoints)

    def add_slot(self) -> int:
        """Make room for one more endpoint and return its slot."""
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
        """Columns `names`, which are among the `VERSIONED`, do not hold what they held."""
        for name in names:
            self.versions[name] += 1
        self.version += len(names)

    def clear(self, slot: int) -> None:
        """Forget everything about `slot`: scrapes and work in flight."""
        if self.endpoints[slot] is not None:
            # Another list: candidates that are looked at later know who was in the slot.
            self.endpoints = [*self.endpoints]
            self.endpoints[slot] = None
        self.forget_observations(slot)
        self.ejected[slot] = False
        self.inflight_requests[slot] = 0
        self.inflight_context_tokens[slot] = 0
        self.unreported_requests[slot] = 0
        self.prefill_backlog_tokens[slot] = 0.0
        self.prefill_drained_at_s[slot] = 0.0
        if self.peers is not None:
            self.peers.forget_slot(slot)

    def forget_observations(self, slot: int) -> None:
        """Forget what scrapes said of `slot`; work in flight stays."""
        self.set_load(slot, math.nan, math.nan, math.nan)
        self.set_kv_capacity(slot, math.nan)
        self.cache_queried_tokens[slot] = self.cache_hit_tokens[slot] = math.nan
        self.observed_at_s[slot] = -math.inf
        self.saturated[slot] = False
        self.unreachable[slot] = False
        self.set_adapters(slot, None)
        self.set_attributes(slot, NO_ATTRIBUTES)

    def set_scraped(self, slot: int, metrics: EndpointMetrics) -> None:
        """Keep what a good scrape says of `slot`."""
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
        """Keep what a scrape said of the load of `slot`; a column that tells the same is unchanged."""
        # Most are told many times a second, and many tell the same. NaN differs from itself.
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
        """Keep what a scrape said of the size of the KV cache of `slot`; NaN: it did not say."""
        before = self.kv_capacity_tokens.item(slot)
        if before != tokens and not (isnan(before) and isnan(tokens)):
            self.kv_capacity_tokens[slot] = tokens
            self.changed("kv_capacity_tokens")

    def set_adapters(self, slot: int, report: AdapterReport | None) -> None:
        """Keep what a scrape said of adapters, counted once here and not at every decision."""
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
        """Keep what a scrape said of `slot` beside its load; an attribute that is not there is unknown.

        One of which nobody tells any more has no column.
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
        for name, row in zip(_ROWS, self.rows, strict=True):
            setattr(self, name, row)

    def _grow(self, capacity: int) -> None:
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and name not in _ROWS:
                grown = np.zeros((*array.shape[:-1], capacity), dtype=array.dtype)
                grown[..., : array.shape[-1]] = array
                setattr(self, name, grown)
        self._name_rows()
        for key, column in self.attributes.items():
            wider = np.full(capacity, math.nan)
            wider[: len(column)] = column
            self.attributes[key] = wider


def kv_capacity_tokens(blocks: float | None, block_size_tokens: float | None) -> float:
    """Of a KV cache, as a page tells of it; NaN: it does not, or tells what cannot be."""
    # As floats: a page may tell numbers whose product is none.
    tokens = float(blocks or 0) * float(block_size_tokens or 0)
    return tokens if 0.0 < tokens < math.inf else math.nan


class AdapterColumns:
    """LoRA state of n candidates."""

    __slots__ = ("_columns", "_slot")

    def __init__(self, columns: Columns, slot: Ints) -> None:
        self._columns = columns
        self._slot = slot

    @property
    def generation(self) -> Ints:
        """0: nothing is reported; 1: `lora_requests_info`; 2: residency is reported too."""
        return self._columns.adapter_generation[self._slot]

    @property
    def slots_max(self) -> Ints:
        """How many adapters the engine can run at once."""
        return self._columns.adapter_slots_max[self._slot]

    @property
    def active_count(self) -> Ints:
        """Adapters with a running or waiting request."""
        return self._columns.adapters_active[self._slot]

    @property
    def resident_count(self) -> Ints:
        """Adapters in GPU memory (generation 2)."""
        return self._columns.adapters_resident[self._slot]

    @property
    def idle_count(self) -> Ints:
        """Adapters in GPU memory that are neither active nor pinned: they can be evicted."""
        return self._columns.adapters_idle[self._slot]

    def active(self, adapter: str) -> Bools:
        """bool[n]: `adapter` has a running or waiting request."""
        return np.array([adapter in report.active for report in self._known()], dtype=np.bool_)

    def on_gpu(self, adapter: str) -> Bools:
        """bool[n]: `adapter` is in GPU memory (generation 2)."""
        return np.array([adapter in report.gpu for report in self._known()], dtype=np.bool_)

    def on_cpu(self, adapter: str) -> Bools:
        """bool[n]: `adapter` is in CPU memory (generation 2)."""
        return np.array([adapter in report.cpu for report in self._known()], dtype=np.bool_)

    @property
    def reports(self) -> list[AdapterReport | None]:
        """What each told of its adapters; None: nothing."""
        adapters = self._columns.adapters
        return [adapters[slot] for slot in self._slot.tolist()]

    def _known(self) -> list[AdapterReport]:
        return [report or _NO_ADAPTERS for report in self.reports]


class Candidates:
    """n endpoints that may serve one request, as columns of length n.

    `slot` is the pool's own and cannot be written. Every other array is a fresh gather: a plugin may
    use it as scratch, the pool does not see it.
    """

    __slots__ = (
        "_affinities",
        "_columns",
        "_endpoints",
        "_now",
        "_prefix",
        "_slot",
        "block_tokens",
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
    ) -> None:
        """`affinities` by the name of the index, by slot; `prefix` names the one for prefixes."""
        slot.setflags(write=False)
        self._slot = slot
        self.block_tokens = block_tokens
        """Tokens in one block of `matched_blocks`."""
        self.prompt_tokens = prompt_tokens
        self._columns = columns
        self._endpoints = columns.endpoints
        self._now = now
        self._affinities = affinities
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self._slot)

    def take(self, keep: Bools | Ints) -> "Candidates":
        """The candidates at `keep`: a mask or positions."""
        return Candidates(
            self._columns,
            self._slot[keep],
            self._now,
            affinities=self._affinities,
            prefix=self._prefix,
            block_tokens=self.block_tokens,
            prompt_tokens=self.prompt_tokens,
        )

    @property
    def version(self) -> int:
        """Counts changes of all columns that have a version, of any endpoint of the pool."""
        return self._columns.version

    def version_of(self, names: tuple[str, ...]) -> int:
        """Counts changes of the columns `names`, which are among the `VERSIONED`."""
        versions = self._columns.versions
        changes = 0
        for name in names:
            changes += versions[name]
        return changes

    @property
    def slot(self) -> Ints:
        """int64[n], the slot of each in the pool, ascending; read-only."""
        return self._slot

    @property
    def waiting_requests(self) -> Floats:
        """float64[n], requests in the engine's queue; NaN: unknown."""
        return self._columns.waiting_requests[self._slot]

    @property
    def running_requests(self) -> Floats:
        """float64[n], requests in the engine's batch; NaN: unknown."""
        return self._columns.running_requests[self._slot]

    @property
    def kv_cache_usage(self) -> Floats:
        """float64[n] in [0, 1], KV blocks referenced by requests; NaN: unknown."""
        return self._columns.kv_cache_usage[self._slot]

    @property
    def kv_capacity_tokens(self) -> Floats:
        """float64[n], tokens that the KV cache holds, 1 or more: its blocks times their size.

        NaN: unknown.
        """
        return self._columns.kv_capacity_tokens[self._slot]

    def engine_load(self) -> EngineLoad:
        """Combine waiting and running requests, KV cache usage and KV capacity, as engines told them.

        The result is gathered once for all requests between two changes of what scrapes tell.
        """
        columns, slot = self._columns, self._slot
        last = columns.last_load
        # The pool keeps one array of the slots that are ready until they change.
        if last is not None and last[0] is slot and last[1] == columns.version:
            return last[2]
        capacity = self.kv_capacity_tokens
        waiting = self.waiting_requests
        requests, used = self.running_requests + waiting, self.kv_cache_usage * capacity
        # A sum or a product is unknown where either part is.
        unknown = np.isnan(requests).any() or np.isnan(used).any()
        load = EngineLoad(waiting, requests, used, capacity, complete=not unknown)
        for column in (waiting, requests, used, capacity):
            column.setflags(write=False)
        columns.last_load = (slot, columns.version, load)
        return load

    @property
    def cache_queried_tokens(self) -> Floats:
        """float64[n], prompt tokens that each looked up in its prefix cache; NaN: unknown."""
        return self._columns.cache_queried_tokens[self._slot]

    @property
    def cache_hit_tokens(self) -> Floats:
        """float64[n], those among them that it held; NaN: unknown."""
        return self._columns.cache_hit_tokens[self._slot]

    @property
    def metrics_age_s(self) -> Floats:
        """float64[n], seconds since the last good scrape; inf: never."""
        return self._now - self._columns.observed_at_s[self._slot]

    @property
    def metrics_age_s_max(self) -> Seconds:
        """The greatest `metrics_age_s`; inf: one was never scraped, or there is nobody."""
        observed_at_s = self._columns.observed_at_s[self._slot]
        if not len(observed_at_s):
            return math.inf
        return self._now - observed_at_s.item(observed_at_s.argmin())

    def all_observed_within(self, age_s: Seconds) -> bool:
        """Whether nobody's metrics are older; `metrics_age_s_max` that mostly looks at no column."""
        observed_since_s = self._columns.observed_since_s
        return self._now - observed_since_s <= age_s or self.metrics_age_s_max <= age_s

    def metrics_age_s_of(self, position: int) -> Seconds:
        """`metrics_age_s` of one candidate."""
        return self._now - self._columns.observed_at_s.item(self._slot.item(position))

    @property
    def saturated(self) -> Bools:
        """bool[n], the engine refused a request (503) since its last good scrape."""
        return self._columns.saturated[self._slot]

    @property
    def inflight_requests(self) -> Ints:
        """int64[n], requests that this picker and its peers sent there and that have not ended."""
        columns = self._columns
        own = columns.inflight_requests[self._slot]
        if columns.peers is not None:
            own += columns.peers.requests(self._slot, len(columns))
        return own

    @property
    def inflight_context_tokens(self) -> Ints:
        """int64[n], prompt tokens, cached ones too, of requests sent there that have not ended.

        Only of this picker: peers tell requests and prefill tokens. Answers so far are not counted.
        """
        return self._columns.inflight_context_tokens[self._slot]

    @property
    def unreported_requests(self) -> Ints:
        """int64[n], requests that this picker sent there since the engine last told its load.

        What `waiting_requests` and `running_requests` cannot know yet, those that ended since too.
        """
        return self._columns.unreported_requests[self._slot]

    @property
    def inflight_prefill_tokens(self) -> Floats:
        """float64[n], uncached prompt tokens sent there and not yet prefilled, as far as is known.

        By the counter of first tokens on the endpoint's page, where it has one, by first outputs that
        are seen, and between these by how fast it computes. Those of peers are among them.
        """
        columns = self._columns
        # An array, as there: a Python float takes twice as long.
        done = np.array(self._now) - columns.prefill_drained_at_s[self._slot]
        speed = columns.prefill_drain_tokens_per_s[self._slot]
        done *= speed
        left: Floats = np.subtract(columns.prefill_backlog_tokens[self._slot], done, out=done)
        np.maximum(left, _NOTHING, out=left)
        if columns.peers is not None:
            left += columns.peers.prefill_tokens(self._slot, self._now, speed)
        return left

    @property
    def prefill_tokens_per_s(self) -> Floats:
        """float64[n], above 0: how fast each prefills, by configuration."""
        return self._columns.prefill_tokens_per_s[self._slot]

    @property
    def prefill_alike(self) -> bool:
        """All prefill equally fast, so that tokens say as much as seconds; False: perhaps not all."""
        return self._columns.prefill_alike

    @property
    def matched_blocks(self) -> Ints:
        """int64[n], leading full blocks of the prompt that each holds, by the prefix index."""
        return self.affinity("").matched

    @property
    def total_blocks(self) -> Ints:
        """int64[n], full blocks of the prompt: the same number for all."""
        return np.full(len(self._slot), self.affinity("").total, dtype=np.int64)

    @property
    def uncached_tokens(self) -> Floats:
        """float64[n], tokens of this prompt that each would have to compute."""
        cached = self.matched_blocks * float(self.block_tokens)
        uncached: Floats = np.maximum(self.prompt_tokens - cached, 0.0)
        return uncached

    @property
    def adapters_reported(self) -> bool:
        """Anything is reported of LoRA adapters, of any endpoint of the pool."""
        return self._columns.adapters_reported > 0

    @property
    def adapter_state(self) -> AdapterColumns:
        """LoRA adapters, as the last good scrape told."""
        return AdapterColumns(self._columns, self._slot)

    def attribute(self, key: str) -> Floats:
        """float64[n], what each tells of itself under `key` (`attribute_key`); NaN: unknown."""
        column = self._columns.attributes.get(key)
        return np.full(len(self._slot), math.nan) if column is None else column[self._slot]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The candidates themselves, for what no column tells; also after some have left."""
        known = self._endpoints
        found = [known[slot] for slot in self._slot.tolist()]
        return tuple([endpoint for endpoint in found if endpoint is not None])

    def name_of(self, position: int) -> str:
        """The name of one of the `endpoints`."""
        endpoint = self._endpoints[self._slot.item(position)]
        assert endpoint is not None, "a candidate is an endpoint"
        return endpoint.name

    @property
    def labels(self) -> tuple[Mapping[str, str], ...]:
        """One mapping a candidate."""
        return tuple([endpoint.labels for endpoint in self.endpoints])

    def rendezvous(self, key: int) -> Hashes:
        """uint64[n]: a weight of each for `key`, 64 bits. The highest wins, the same everywhere.

        Pickers that know the same endpoints find the same winner without a word, and one that
        leaves takes along only the keys that it had won (`core/knowledge/rendezvous`).
        """
        return rendezvous_weights(self._columns.identities[self._slot], key)

    def prefix_match(self, position: int) -> tuple[int, int]:
        """`matched_blocks` and `total_blocks` of one candidate."""
        known = self._affinities.get(self._prefix)
        return (0, 0) if known is None else (int(known.matched[self._slot[position]]), known.total)

    def matched_most(self) -> int:
        """The most `matched_blocks` of any candidate."""
        known = self._affinities.get(self._prefix)
        if known is None:
            return 0
        matched = known.matched[self._slot]
        return matched.item(matched.argmax())

    def inflight_requests_of(self, position: int) -> int:
        """`inflight_requests` of one candidate."""
        columns = self._columns
        if columns.peers is not None:
            return int(self.inflight_requests[position])
        return columns.inflight_requests.item(self._slot.item(position))

    def numbers_of(self, position: int) -> tuple[float, ...]:
        """The columns `NUMBERS` of one candidate, at a fraction of the cost of gathering them."""
        columns, slot, now = self._columns, self._slot.item(position), self._now
        waiting, running, usage, capacity, observed_at_s, *prefill = columns.rows[:, slot].tolist()
        backlog_tokens, drained_at_s, speed, drain_speed = prefill
        requests = columns.inflight_requests.item(slot)
        prefill_tokens = max(0.0, backlog_tokens - (now - drained_at_s) * drain_speed)
        if columns.peers is not None:
            alone = self._slot[position : position + 1]
            requests += columns.peers.requests(alone, len(columns)).item(0)
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
            columns.inflight_context_tokens.item(slot),
            prefill_tokens,
            speed,
            0 if known is None else known.matched.item(slot),
        )

    def affinity(self, name: str) -> Affinity:
        """What the index `name` knows, int64[n]; nothing, if there is no such index.

        "" is the default prefix index.
        """
        known = self._affinities.get(name or self._prefix)
        if known is None:
            return Affinity(np.zeros(len(self._slot), dtype=np.int64), 0)
        if not known.columns:
            return Affinity(known.matched[self._slot], known.total)
        columns = {name: column[self._slot] for name, column in known.columns.items()}
        return Affinity(known.matched[self._slot], known.total, columns)
