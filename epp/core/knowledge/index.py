"""The protocols that affinity indexes and their settings implement."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from msgspec import Struct, field, structs

from epp.core.abilities import Abilities, Origin
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.hit_accuracy import Correction
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import Event, Fault
from epp.core.kv_events.stream import StreamState
from epp.core.parameters import Plugin
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds

CHAINED_KEY_BYTES: Final = 128
"""Length in bytes above which a key that pickers share is a chain of hashes. Peers send each other
only the part of a chain that is new.
"""


EXACT: Final = "exact"
"""Name of a column of an index that receives KV-cache events. The column is 1.0 if the index knows
all cached blocks of the endpoint, so that no other index is needed for it, else 0.0.
"""


HOST_BLOCKS: Final = "host"
"""Name of a column of an index that receives KV-cache events. The column is the number of leading
blocks of the prompt that the endpoint has in host memory without a gap, from where other engines
can fetch them.
"""


RANKS_MAX: Final = 64
"""Maximum number of data-parallel ranks of one engine, which share one address; each has its own
cache.
"""


class AffinityIndex(Protocol):
    """An affinity index: an estimate, for each endpoint, of what it has cached, learnt from the
    requests that were sent to it (design D12). Other state, such as sessions, is possible.
    """

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return how much of `request` each slot in `range(slots)` is estimated to have cached.
        Change no estimate.
        """
        ...

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Assume from `now` on that `slot` has `request` cached. Return the data that undoes this,
        or None.
        """
        ...

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo the `record` of `request` for `slot` that returned `recorded`.

        The scheduler calls it at most once for each `record`, and not after `forget` of the slot.
        """
        ...

    def forget(self, slot: int) -> None:
        """Drop all content of `slot`, because its endpoint left or restarted."""
        ...

    def expire(self, now: Seconds) -> None:
        """Remove a bounded amount of expired content. The scheduler calls it about once a second."""
        ...

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Record the size of the KV cache that the engine in `slot` reported. An index may ignore
        it.
        """
        ...


class SharedIndex(AffinityIndex, Protocol):
    """An affinity index whose content pickers of one pool can share.

    Its content is expressed as *keys*, byte strings with the same meaning for every picker. A key
    longer than `CHAINED_KEY_BYTES` is a chain of hashes: two chains that are equal at one hash are
    equal up to there.
    """

    @property
    def signature(self) -> str:
        """Return a text that describes the keys of this index. Indexes with equal signatures
        understand each other's keys.
        """
        ...

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """Return the keys that `record` of `request` adds to this index, or () if there is nothing
        to share with peers.
        """
        ...

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """Record that a peer added `keys` for `slot` at `stamp`. Keys may be invalid, late or
        repeated.
        """
        ...

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Yield (slot, time, keys) of the whole content of the index, oldest first. The content may
        change between two items.
        """
        ...


class CountsInflight(AffinityIndex, Protocol):
    """An affinity index whose estimates depend on which requests are still running, so that it must
    learn when they end.
    """

    def release(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Record that `request`, recorded for `slot`, has ended there.

        It is called at most once for each record. It is not called after `retract`, or after
        `forget` because the endpoint left or restarted. `recorded` is the result of `record`.
        """
        ...


class CorrectedIndex(AffinityIndex, Protocol):
    """An affinity index that corrects its estimates when they differ from the cache hits that
    engines count.
    """

    def correct(self, correction: Correction) -> None:
        """Correct the estimates by a comparison of the engines' counted hits with the predictions
        of this index alone.
        """
        ...


class LimitsMemory(AffinityIndex, Protocol):
    """An affinity index whose memory can be limited: it drops content when it has more than the
    limit.
    """

    def limit_memory(self, share: float) -> None:
        """Limit the memory of the index to `share` of the settings' `memory_max_bytes`, from now on
        or soon.
        """
        ...


class EventResult(Struct, frozen=True, kw_only=True):
    """The result of applying KV-cache events of one engine to an index."""

    cleared: bool = False
    """True if all cached blocks of the rank were dropped before these changes of keys."""
    changes: Sequence[Changed] = ()
    """Block keys that became cached or are no longer cached, in the order of the engine's events.
    """
    engine_block_tokens: int = 0
    """Number of tokens in the largest block of the engine; 0 if none is known."""
    faults: Sequence[Fault] = ()
    """Reasons why events of the engine could not be applied."""
    unbalanced: bool = False
    """True if the events contradict each other. The blocks that the rank reported are dropped, and
    the engine must report all its cached blocks again.
    """


class Held(Struct):
    """The part of a prompt that an engine reported as cached, updated until it is the whole prompt.

    Engines report late, and may have evicted blocks by the time of a later request.
    """

    blocks: int
    """Number of leading blocks of the prompt that the engine reported as cached. Recent decisions
    do not count. The number becomes `total` once the engine reports all of them, and stays so after
    an eviction.
    """
    total: int
    """Number of leading blocks of the prompt that the engine will have cached once it has computed
    the prompt.
    """
    block_tokens: int
    void: bool = False
    """True if `blocks` is no longer reliable, because the engine's events became invalid or this
    answer is no longer updated.
    """


class HearsEngines(AffinityIndex, Protocol):
    """An affinity index that receives KV-cache events from engines.

    An engine has one rank, 0, or several behind one address, below `RANKS_MAX`. Each rank has a
    cache and a stream of its own. The match of an engine is the match of its best rank.
    """

    def record(
        self, request: InferenceRequest, slot: int, now: Seconds, *, rank: int | None = None
    ) -> Any:
        """Record as `AffinityIndex.record` does. `rank` is the data-parallel rank that must serve
        the request, or None if the engine chooses.

        The engine in `slot` may have fewer ranks.
        """
        ...

    def hear(self, slot: int, events: Sequence[Event], now: Seconds, *, rank: int) -> EventResult:
        """Apply KV-cache events of one rank of the engine in `slot`. Events may be invalid."""
        ...

    def set_stream(self, slot: int, state: StreamState, *, complete: bool, rank: int) -> None:
        """Set the state of the event stream of `rank` at `slot`. `complete` is True if the rank
        reported all blocks that it has cached.

        A rank other than the first exists from its first report until its stream ends and `silence`
        is called.
        """
        ...

    def adapters_told(self, names: Collection[str]) -> None:
        """Record that engines serve LoRA adapters with these names. Called with each scrape that
        reports adapters.
        """
        ...

    def change(
        self, slot: int, changes: Sequence[Changed], engine_block_tokens: int, *, rank: int
    ) -> None:
        """Apply stored and removed block keys, as `hear` returns them, for a caller that does not
        have the events themselves.
        """
        ...

    def clear(self, slot: int, *, rank: int | None) -> None:
        """Drop all blocks of the engine in `slot`, both reported and assumed from decisions.

        `rank` limits the reported blocks to those of one rank; None drops those of all ranks.
        """
        ...

    def silence(self, slot: int, *, rank: int) -> None:
        """Drop the blocks that `rank` at `slot` reported. Blocks that are assumed from decisions
        stay.
        """
        ...

    def ranks_at(self, slot: int) -> int:
        """Return the number of data-parallel ranks of the engine in `slot`; 1 if it sends no
        events.
        """
        ...

    def held_by_ranks(self, request: InferenceRequest, slot: int, now: Seconds) -> Sequence[int]:
        """Return the number of leading blocks of `request` that each rank of the engine in `slot`
        has cached, as reported or as assumed from recent decisions.
        """
        ...

    def held(self, request: InferenceRequest, slot: int) -> Held | None:
        """Return how much of the first prompt of `request` the engine in `slot` reported as cached,
        or None if unknown.

        The prompt itself is no longer in `request`. The call changes nothing that decisions use. An
        answer with less than the whole prompt is updated for a while.
        """
        ...


class IndexMeasures(Struct, frozen=True, kw_only=True):
    """The entries, the memory, the look-ups and the evictions of one index of prefixes, media or
    sessions. The mappings are totals since it was opened.
    """

    entries: int
    memory_bytes: int
    lookups: Mapping[str, int] = field(default_factory=dict)
    """Number of look-ups by their result: "none" stands for look-ups without a match, "unknown" for
    requests that could not be looked up.
    """
    evictions: Mapping[str, int] = field(default_factory=dict)
    """Number of entries that were evicted, by cause."""
    known_from_peers: int = 0

    @property
    def hits(self) -> int | None:
        """Return the number of look-ups that found a match, or None if the index does not count
        look-ups.
        """
        if not self.lookups:
            return None
        without = {"none", "unknown"}
        return sum(count for result, count in self.lookups.items() if result not in without)


class MeasuresItself(AffinityIndex, Protocol):
    """An affinity index that reports its size and its look-ups for the picker's metrics."""

    def measures(self) -> IndexMeasures:
        """Return the entries, the memory, the look-ups and the evictions of this index."""
        ...


class IndexStanding(Struct, frozen=True, kw_only=True):
    """The state of one configured affinity index, as operators see it."""

    name: str
    type_name: str
    origin: Origin | None
    """Source of what the index knows about cached blocks, or None if it stores something else."""
    is_open: bool
    """True if the index could be opened; if not, nothing is stored under its name."""
    memory_max_bytes: int | None
    """Limit of the index's memory in bytes, or None if its settings have no such limit."""
    measures: IndexMeasures | None
    """Entries, memory and look-ups of the index. It is None if the index does not report them or
    failed to report them.
    """


VERBS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("match", "record", "retract", "forget", "expire", "resize"),
    "shares": ("share", "learn", "shared_entries"),
    "counts_inflight": ("release",),
    "corrected": ("correct",),
    "limits_memory": ("limit_memory",),
    "measures": ("measures",),
    "hears_engines": (
        *("hear", "set_stream", "adapters_told", "change", "clear", "silence", "held"),
        *("ranks_at", "held_by_ranks"),
    ),
}
"""Names of the methods that an index must have for each ability; "" stands for those that every
index must have.
"""


class AffinityIndexSettings(Plugin, Protocol):
    """The settings of an affinity index: a frozen struct, configured like a plugin, that opens the
    index.
    """

    def open(self) -> AffinityIndex:
        """Return a new, empty index with these settings."""
        ...

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to `index`, which keeps its content. Return False if that is
        impossible.
        """
        ...


def missing_verbs(abilities: Abilities, index: object) -> list[str]:
    """Return the names of the methods that `index` lacks although an index with these abilities
    must have them.
    """
    wanted = [
        verb
        for ability, verbs in VERBS.items()
        if not ability or structs.asdict(abilities)[ability]
        for verb in verbs
    ]
    return [verb for verb in wanted if not callable(getattr(index, verb, None))]


def joined(affinities: Sequence[Affinity], block_tokens: Sequence[int] = ()) -> Affinity:
    """Return the joint match of indexes of different origins: the largest match at each slot.

    An index fed by engines counts as such only if it comes first. For the endpoints that it knows
    completely, it then counts alone. That index counts tokens while the others count bytes, so the
    others contribute their matched share of the prompt. If the prompt has no token ids, the others
    answer alone, in blocks of that index's length. `block_tokens` are the block lengths of the
    indexes; () means that all are equal.
    """
    first, *others = affinities
    if not others:
        return first
    exact = first.columns.get(EXACT)
    if exact is None:
        matched = np.maximum.reduce([known.matched for known in affinities])
        return Affinity(matched, max(known.total for known in affinities), first.columns)
    if not first.total:
        sizes = block_tokens or (1,) * len(affinities)
        ratios = [(size, sizes[0]) for size in sizes]
        total = max(
            known.total * size // sizes[0] for known, size in zip(affinities, sizes, strict=True)
        )
    else:
        ratios = [(first.total, max(1, known.total)) for known in affinities]
        total = first.total
    matched = np.maximum.reduce(
        [known.matched * up // down for known, (up, down) in zip(affinities, ratios, strict=True)]
    )
    if first.total:
        matched = np.where(exact > 0.0, first.matched, matched)
    return Affinity(matched, total, first.columns)
