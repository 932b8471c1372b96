"""What any affinity index can do, and how one is configured."""

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
"""Longer keys are chains, of which peers tell only what is new."""


EXACT: Final = "exact"
"""A column of an index that engines tell: 1.0 where it knows all that is held, so that what others say of
that endpoint is not asked."""


HOST_BLOCKS: Final = "host"
"""A column of an index that engines tell: leading blocks of the prompt in the memory of the host, without
a gap, from where others can fetch them."""


RANKS_MAX: Final = 64
"""Of one engine that are heard: data-parallel engines behind one address, each with a cache of its own."""


class AffinityIndex(Protocol):
    """State that a strategy keeps about which endpoint has seen what (design D12)."""

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """How much of `request` each of the endpoint slots 0..`slots`-1 holds; changes nothing."""
        ...

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Assume from `now` on that `slot` holds `request`; returns what undoes it, or None."""
        ...

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo what `record` of `request` for `slot` did, which returned `recorded`.

        Once for each `record` at most, and not after `forget` of the slot.
        """
        ...

    def forget(self, slot: int) -> None:
        """The endpoint in `slot` left or restarted: drop all that is known of it."""
        ...

    def expire(self, now: Seconds) -> None:
        """Bounded housekeeping; called about once a second."""
        ...

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The engine in `slot` says how large its cache is; ignore it if it does not matter."""
        ...


class SharedIndex(AffinityIndex, Protocol):
    """An affinity index of which pickers of one pool can tell each other.

    What a request teaches is spelt as *keys*, byte strings that mean the same to every picker. A key
    longer than `CHAINED_KEY_BYTES` is a chain of hashes: equal at one hash, equal up to there.
    """

    @property
    def signature(self) -> str:
        """Two indexes with the same understand each other's keys."""
        ...

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """The keys of what `record` of `request` notes; none: there is nothing to tell."""
        ...

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """A peer noted `keys` for `slot` at `stamp`; keys may be anything, late or repeated."""
        ...

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """(slot, stamp, keys) of all that is known, oldest first; it may change meanwhile."""
        ...


class CountsInflight(AffinityIndex, Protocol):
    """An affinity index that goes by what runs now, and not only by what was sent."""

    def release(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`request`, which `record` noted for `slot`, has ended there.

        Once for each at most, and not for what was taken back by `retract`, or was at an endpoint
        that left or restarted, which `forget` tells. `recorded` is what `record` returned.
        """
        ...


class CorrectedIndex(AffinityIndex, Protocol):
    """An affinity index that is told how wrong it was."""

    def correct(self, correction: Correction) -> None:
        """What engines found beside what was predicted by this index alone."""
        ...


class LimitsMemory(AffinityIndex, Protocol):
    """An affinity index that gives up the oldest of what it knows where memory is scarce."""

    def limit_memory(self, share: float) -> None:
        """Take at most `share` of `memory_max_bytes` of its settings, if not at once then soon."""
        ...


class Heard(Struct, frozen=True, kw_only=True):
    """What came of events."""

    cleared: bool = False
    """Before the changes, all that the engine held was gone."""
    changes: Sequence[Changed] = ()
    """Keys that are held from now on or not any more, in their order."""
    engine_block_tokens: int = 0
    """The most that a block of the engine has."""
    faults: Sequence[Fault] = ()
    """Events that were not followed."""
    unbalanced: bool = False
    """What was told does not add up, and is forgotten: all is to be told again."""


class Held(Struct):
    """How much of a prompt an engine says that it holds; and whether it has held all since then.

    Engines tell late, and may have evicted by the time at which they are asked again.
    """

    blocks: int
    """From the head on, without those that were only decided. It becomes `total` once the engine tells
    that it holds all, and stays so when that is evicted."""
    total: int
    """As many as it holds of a prompt that it has computed."""
    block_tokens: int
    void: bool = False
    """What came after this answer is not known: all that the engine told was forgotten, or this was no
    longer followed."""


class HearsEngines(AffinityIndex, Protocol):
    """An affinity index that engines tell what they hold.

    An engine has one rank, 0, or several behind one address, below `RANKS_MAX`, each with a cache and a
    stream of its own. What it is believed to hold of a prompt is what the best of them holds.
    """

    def record(
        self, request: InferenceRequest, slot: int, now: Seconds, *, rank: int | None = None
    ) -> Any:
        """As of `AffinityIndex`. `rank`: which was told to serve; None: none was.

        The engine in `slot` may have fewer.
        """
        ...

    def hear(self, slot: int, events: Sequence[Event], now: Seconds, *, rank: int) -> Heard:
        """The engine in `slot` says so; events may be anything."""
        ...

    def set_stream(self, slot: int, state: StreamState, *, complete: bool, rank: int) -> None:
        """How much what it says of `rank` counts; `complete`: it told all that it holds there.

        A rank after the first is there from what is first told of it until it has no stream, and is
        silenced.
        """
        ...

    def adapters_told(self, names: Collection[str]) -> None:
        """Engines serve LoRA adapters, these among them; told with every scrape that names any."""
        ...

    def change(
        self, slot: int, changes: Sequence[Changed], engine_block_tokens: int, *, rank: int
    ) -> None:
        """As `hear`, for whoever has only what came of it."""
        ...

    def clear(self, slot: int, *, rank: int | None) -> None:
        """The engine in `slot` holds nothing, neither of what it said nor of what was decided.

        `rank`: of what it said that alone which it said of this one; None: of all.
        """
        ...

    def silence(self, slot: int, *, rank: int) -> None:
        """What the engine in `slot` said so far of `rank` does not hold; what was decided does."""
        ...

    def ranks_at(self, slot: int) -> int:
        """How many ranks the engine in `slot` has; 1 also where it is not heard."""
        ...

    def held_by_ranks(self, request: InferenceRequest, slot: int, now: Seconds) -> Sequence[int]:
        """Leading blocks of `request` that each rank of the engine in `slot` is believed to hold.

        By what it said, and what was decided lately for this rank.
        """
        ...

    def held(self, request: InferenceRequest, slot: int) -> Held | None:
        """How much of the first prompt of `request`, which has let it go, the engine in `slot` said
        that it holds; None: that cannot be told.

        Changes nothing that decisions see. An answer that is less than all is kept up to date for a while.
        """
        ...


class IndexMeasures(Struct, frozen=True, kw_only=True):
    """What one affinity index tells of itself; the mappings are totals since it was opened."""

    entries: int
    memory_bytes: int
    lookups: Mapping[str, int] = field(default_factory=dict)
    """By how much was found, "none" among it."""
    evictions: Mapping[str, int] = field(default_factory=dict)
    """Entries by cause."""
    known_from_peers: int = 0

    @property
    def hits(self) -> int | None:
        """Look-ups that found anything; None: it does not count them."""
        if not self.lookups:
            return None
        return sum(count for found, count in self.lookups.items() if found != "none")


class MeasuresItself(AffinityIndex, Protocol):
    """An affinity index that is shown among the metrics."""

    def measures(self) -> IndexMeasures:
        """As of now."""
        ...


class IndexStanding(Struct, frozen=True, kw_only=True):
    """What is to be told of one index that is configured, by whatever page."""

    name: str
    type_name: str
    origin: Origin | None
    """How it knows which blocks endpoints hold; None: it knows something else."""
    is_open: bool
    """False: opening it failed, and nothing is remembered under its name."""
    memory_max_bytes: int | None
    """What it may take; None: it is bounded otherwise."""
    measures: IndexMeasures | None
    """None: it measures nothing, or failed to."""


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
"""What an index must have: for each of its abilities, and "" for all."""


class AffinityIndexSettings(Plugin, Protocol):
    """A frozen struct that is configured like a plugin and opens the index it describes."""

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        ...

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to a running index and keep what it knows; False: it cannot."""
        ...


def missing_verbs(abilities: Abilities, index: object) -> list[str]:
    """What an index that declares `abilities` does not have."""
    wanted = [
        verb
        for ability, verbs in VERBS.items()
        if not ability or structs.asdict(abilities)[ability]
        for verb in verbs
    ]
    return [verb for verb in wanted if not callable(getattr(index, verb, None))]


def joined(affinities: Sequence[Affinity], block_tokens: Sequence[int] = ()) -> Affinity:
    """What indexes of different origins know of one prompt: what any says is held.

    Where one of them is told by engines, it comes first, and it alone is asked of the endpoints that it
    knows all of. It counts in tokens and the others in bytes, so of the others that share of the prompt
    is taken which they say is held. Without the tokens of the prompt they answer alone, in blocks as long
    as its own. `block_tokens`: of each; (): all are alike.
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
