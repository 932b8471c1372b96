"""The affinity indexes of one scheduler, and the boundary at which a faulty index is contained.

An index is a plugin, so any of its methods may raise or return a wrong value. Such a failure is
counted under the index's name and costs only what the index would have contributed (design D16,
D30). A failing `match` prefers no endpoint. A failing `record` is not undone later. A failing
`resize` is repeated after the next scrape. If `adopt` or `forget` fails, the index is opened again,
because it could otherwise apply old knowledge to a new configuration or to another endpoint. All
other indexes receive every call as if the faulty index did not exist.

The methods that an ability adds are called only on indexes that declare the ability.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from numpy import ndarray

from epp.core.abilities import Abilities
from epp.core.failures import FLOATS, INTS, PluginFailures, array_fault, kind_of
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.hit_accuracy import Correction
from epp.core.knowledge.index import (
    AffinityIndex,
    AffinityIndexSettings,
    CorrectedIndex,
    CountsInflight,
    EventResult,
    HearsEngines,
    Held,
    IndexStanding,
    LimitsMemory,
    MeasuresItself,
    SharedIndex,
    joined,
    missing_verbs,
)
from epp.core.knowledge.inflight import Lease, Recorded
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import Event
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.request import InferenceRequest
from epp.core.types import EndpointMetrics, Seconds


class IndexesSettings(Struct, frozen=True):
    """The settings of all affinity indexes, and the names of the indexes whose match becomes
    `matched_blocks`.
    """

    by_name: Mapping[str, AffinityIndexSettings]
    """Settings of each index by its name. The order is that in which the indexes match."""
    prefix: str = ""
    """Name of the index whose match becomes `matched_blocks`, or "" if there is none."""
    joined: tuple[str, ...] = ()
    """Names of the indexes whose joint match becomes `matched_blocks`, `prefix` first; () or only
    `prefix` if its match alone does.
    """


class Indexes(Mapping[str, AffinityIndex]):
    """The open affinity indexes by name, in the configured order. An index that fails does not
    raise from here.
    """

    def __init__(self, failures: PluginFailures) -> None:
        self.failures = failures
        self.shared: dict[str, SharedIndex] = {}
        """Indexes that can be shared with peers by name, in the order in which they match. The
        dictionary is replaced, never changed, when an index is opened.
        """
        self.hearing: dict[str, HearsEngines] = {}
        """Indexes that receive KV-cache events from engines, by name."""
        self.joins = False
        """True if `matched_blocks` is the joint match of several indexes."""
        self.lives: dict[int, int] = {}
        """Number of times that the indexes dropped the content of each slot, because its endpoint
        left or restarted.
        """
        self._settings = IndexesSettings({})
        self._by_name: dict[str, AffinityIndex] = {}
        self._counting: dict[str, CountsInflight] = {}
        """Indexes that must learn when a request ends, by name."""
        self._measuring: dict[str, MeasuresItself] = {}
        """Indexes that report their entries, memory and look-ups, by name."""
        self._corrected: dict[str, CorrectedIndex] = {}
        self._limited: dict[str, LimitsMemory] = {}
        self._memory_share = 1.0
        self._sizes: dict[int, tuple[int | None, int | None]] = {}
        """KV-cache size that each engine reported, as (blocks, tokens in a block), by slot. An
        entry is missing until all indexes have accepted the size.
        """
        self._asleep: set[int] = set()
        """Slots whose engine is in sleep mode. Maintained only if an index receives KV-cache
        events.
        """

    def __repr__(self) -> str:
        return f"<Indexes [{', '.join(self._by_name) or 'none'}]>"

    def __getitem__(self, name: str) -> AffinityIndex:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    # The set of indexes.

    def configure(self, settings: IndexesSettings) -> tuple[str, ...]:
        """Replace the settings of all indexes. Return the names of the indexes that start empty.

        An index keeps its content if it can adopt its new settings.
        """
        self._sizes.clear()
        before, self._by_name = self._by_name, {}
        self._settings = settings
        self.joins = len(settings.joined) > 1
        restarted: list[str] = []
        for name, index_settings in settings.by_name.items():
            known = before.get(name)
            if known is not None and self._adopt(name, index_settings, known):
                self._by_name[name] = known
            else:
                restarted.append(name)
                self.open(name)
        self._read_abilities()
        return tuple(restarted)

    def open(self, name: str) -> None:
        """Open a new, empty index under `name`, with the settings of that name. If that fails, no
        index has this name.
        """
        self._sizes.clear()
        settings = self._settings.by_name[name]
        try:
            index = settings.open()
            missing = missing_verbs(settings.abilities, index)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "open", error)
        else:
            if not missing:
                self._by_name[name] = index
                self._read_abilities()
                self._limit(name)
                return
            fault = f"{type(index).__name__}, expected an index with {', '.join(missing)}"
            self.failures.returned(name, "open", fault)
        self._by_name.pop(name, None)
        self._read_abilities()

    def _adopt(self, name: str, settings: AffinityIndexSettings, index: AffinityIndex) -> bool:
        try:
            return bool(settings.adopt(index))
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "adopt", error)
            return False

    def _read_abilities(self) -> None:
        """Group the open indexes by the abilities that their settings declare."""
        self.shared = self._able(lambda abilities: abilities.shares)
        self.hearing = self._able(lambda abilities: abilities.hears_engines)
        self._measuring = self._able(lambda abilities: abilities.measures)
        self._counting = self._able(lambda abilities: abilities.counts_inflight)
        self._corrected = self._able(lambda abilities: abilities.corrected)
        self._limited = self._able(lambda abilities: abilities.limits_memory)

    def _able(self, ability: Callable[[Abilities], bool]) -> dict[str, Any]:
        """Return the open indexes for whose settings `ability` is true, by name. `open` has checked
        that they have the methods of `VERBS`.
        """
        settings = self._settings.by_name
        return {
            name: index
            for name, index in self._by_name.items()
            if ability(settings[name].abilities)
        }

    def standings(self) -> list[IndexStanding]:
        """Return the state of every configured index, in the configured order."""
        return [self._standing(name) for name in self._settings.by_name]

    def _standing(self, name: str) -> IndexStanding:
        settings: Any = self._settings.by_name[name]
        measures, measuring = None, self._measuring.get(name)
        if measuring is not None:
            try:
                measures = measuring.measures()
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "measures", error)
        return IndexStanding(
            name=name,
            type_name=settings.type_name,
            origin=settings.abilities.origin,
            is_open=name in self._by_name,
            memory_max_bytes=settings.memory_max_bytes
            if settings.abilities.limits_memory
            else None,
            measures=measures,
        )

    def limit_memory(self, share: float) -> None:
        """Limit the memory of each index that supports it to `share` of its configured maximum."""
        self._memory_share = share
        for name in self._by_name:
            self._limit(name)

    def _limit(self, name: str) -> None:
        limited = self._limited.get(name)
        if limited is not None:
            self.failures.call(name, "limit_memory", limited.limit_memory, self._memory_share)

    def expire(self, now: Seconds) -> None:
        """Let each index remove a bounded amount of expired content; called about once a second."""
        for name, index in self._by_name.items():
            self.failures.call(name, "expire", index.expire, now)

    # Matches: the part of a prompt that endpoints have cached.

    def match(
        self,
        request: InferenceRequest,
        slots: int,
        now: Seconds,
        *,
        names: Sequence[str] | None = None,
    ) -> dict[str, Affinity]:
        """Return how much of `request` each slot in `range(slots)` has cached, by name of the
        index.

        An index that fails is omitted. With `names`, only these indexes are called.
        """
        indexes = self._by_name
        if names is not None:
            indexes = {name: indexes[name] for name in names if name in indexes}
        found: dict[str, Affinity] = {}
        for name, index in indexes.items():
            try:
                known = index.match(request, slots, now)
                fault = affinity_fault(known, slots)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "match", error)
                continue
            if fault:
                self.failures.returned(name, "match", fault)
            else:
                found[name] = known
        return found

    def join(self, affinities: Mapping[str, Affinity]) -> Affinity | None:
        """Return the joint match of the indexes whose match becomes `matched_blocks`, or None if
        `affinities` has none of them.
        """
        names = [name for name in self._filling if name in affinities]
        if not names:
            return None
        return joined([affinities[name] for name in names], list(map(self.block_tokens_of, names)))

    def matched_at(self, request: InferenceRequest, slot: int, slots: int, now: Seconds) -> int:
        """Return the number of blocks of `request` that the endpoint in `slot` is estimated to have
        cached. `slots` is the number of slots.
        """
        known = self.joint(request, slots, now)
        return 0 if known is None else int(known.matched[slot])

    def joint(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity | None:
        """Return how much of `request` each slot in `range(slots)` has cached by the indexes whose
        match becomes `matched_blocks`, or None if there is none.
        """
        return self.join(self.match(request, slots, now, names=self._filling))

    @property
    def _filling(self) -> tuple[str, ...]:
        """Return the names of the indexes whose joint match becomes `matched_blocks`."""
        return self._settings.joined or (self._settings.prefix,)

    def block_tokens_of(self, name: str) -> int:
        """Return the number of tokens in a block of the index `name`, which must count blocks."""
        counting: Any = self._settings.by_name[name]
        tokens: int = counting.block_tokens
        return tokens

    def correct(self, correction: Correction) -> None:
        """Pass a comparison of predicted and counted cache hits on to the index that made the
        prediction. Do nothing if several indexes made it jointly, or if it does not correct itself.
        """
        prefix = self._settings.prefix
        # A joint prediction of several indexes does not show which of them was wrong.
        if not self.joins and prefix in self._corrected:
            corrected = self._corrected[prefix]
            self.failures.call(prefix, "correct", corrected.correct, correction)

    # Requests.

    def record(self, lease: Lease, now: Seconds, left_out: Container[str] = ()) -> None:
        """Record in each index that the request of `lease` is sent to the endpoint in its slot.

        The lease stores the data that undoes this. Indexes named in `left_out` record nothing.
        """
        slot = lease.slot
        hearing = self.hearing if lease.rank >= 0 else {}
        for name, index in self._by_name.items():
            if name in left_out:
                continue
            try:
                if name in hearing:
                    undo = hearing[name].record(lease.request, slot, now, rank=lease.rank)
                else:
                    undo = index.record(lease.request, slot, now)
                lease.recorded[name] = Recorded(index, undo)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "record", error)

    def undo(self, lease: Lease, slot: int, now: Seconds, names: Sequence[str]) -> None:
        """Undo what the indexes `names` recorded for `lease`. An index that was opened again since
        then is left unchanged.
        """
        for name in names:
            recorded = lease.recorded.pop(name, None)
            known = self._by_name.get(name)
            if recorded is not None and known is not None and known is recorded.index:
                given = (lease.request, slot, recorded.undo, now)
                self.failures.call(name, "retract", known.retract, *given)

    def release(self, lease: Lease, now: Seconds) -> None:
        """Notify the indexes that depend on running requests that the request of `lease` has ended."""
        for name, counting in self._counting.items():
            recorded = lease.recorded.get(name)
            if recorded is not None and counting is recorded.index:
                given = (lease.request, lease.slot, recorded.undo, now)
                self.failures.call(name, "release", counting.release, *given)

    # Endpoints.

    def scraped(self, slot: int, metrics: EndpointMetrics) -> None:
        """Pass the cache size, the sleep mode and the adapters on this metrics page of the engine
        in `slot` on to the indexes.
        """
        size = (metrics.blocks_total, metrics.block_size_tokens)
        # Every scrape reports the size, so only a change matters.
        if size != self._sizes.get(slot):
            self._resize(slot, *size)
        if self.hearing:
            self._note_sleep(slot, asleep=metrics.asleep)
            adapters = metrics.adapters
            if adapters is not None and adapters.serves_adapters:
                for name, hearing in self.hearing.items():
                    told = hearing.adapters_told
                    self.failures.call(name, "adapters_told", told, adapters.names)

    def _resize(self, slot: int, blocks_total: int | None, block_size_tokens: int | None) -> None:
        """Report the KV-cache size of the engine in `slot` to every index. If an index fails, the
        next scrape repeats the report.
        """
        if not (blocks_total and block_size_tokens):
            return
        took = [
            self.failures.call(name, "resize", index.resize, slot, blocks_total, block_size_tokens)
            for name, index in self._by_name.items()
        ]
        if all(took):
            self._sizes[slot] = (blocks_total, block_size_tokens)

    def _note_sleep(self, slot: int, *, asleep: bool) -> None:
        """Clear the engine's cached blocks in the indexes when the engine enters sleep mode.

        A sleeping engine drops its cache, but its KV-cache events report that only with its next
        request.
        """
        if not asleep:
            self._asleep.discard(slot)
        elif slot not in self._asleep:
            self._asleep.add(slot)
            self._clear(slot, None)

    def forget(self, slot: int) -> None:
        """Drop all that is known of `slot`, because its endpoint left or restarted."""
        self._sizes.pop(slot, None)
        self.lives[slot] = self.lives.get(slot, 0) + 1
        for name, index in tuple(self._by_name.items()):
            if not self.failures.call(name, "forget", index.forget, slot):
                # The index would apply the knowledge about the old endpoint to the next one in this
                # slot.
                self.open(name)

    # Peers.

    def signatures(self) -> dict[str, str]:
        """Return the signature of each shared index by name; an index that fails is omitted."""
        found: dict[str, str] = {}
        for name, index in self.shared.items():
            try:
                found[name] = index.signature
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "signature", error)
        return found

    def share(self, name: str, request: InferenceRequest) -> Sequence[bytes]:
        """Return the keys of the shared index `name` for `request`, or () if the index fails."""
        try:
            return self.shared[name].share(request)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "share", error)
            return ()

    def shared_entries(self, name: str) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Yield (slot, time, keys) of the content of the shared index `name`, oldest first.

        Yield nothing if there is no such index, and nothing more once it fails.
        """
        index = self.shared.get(name)
        if index is None:
            return
        entries = index.shared_entries()
        while True:
            try:
                entry = next(entries)
            except StopIteration:
                return
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "shared_entries", error)
                return
            yield entry

    def learn(
        self, name: str, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds
    ) -> None:
        """Record in the shared index `name` that a peer added `keys` for `slot` at `stamp`."""
        self.failures.call(name, "learn", self.shared[name].learn, keys, slot, stamp, now)

    # KV-cache events of engines.

    def hear(
        self, slot: int, events: Sequence[Event], now: Seconds, *, rank: int
    ) -> EventResult | None:
        """Apply KV-cache events of one rank of the engine in `slot`. Return the result of the first
        index that receives events and does not fail, or None if there is none.
        """
        heard: EventResult | None = None
        for name, hearing in self.hearing.items():
            try:
                said = hearing.hear(slot, events, now, rank=rank)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "hear", error)
            else:
                heard = heard or said
        return heard

    def change(
        self,
        slot: int,
        changes: Sequence[Changed],
        engine_block_tokens: int,
        *,
        rank: int,
        cleared: bool,
    ) -> None:
        """Apply stored and removed block keys, as `hear` returns them, to each index that receives
        KV-cache events, for a caller that does not have the events.
        """
        if cleared:
            self._clear(slot, rank)
        for name, hearing in self.hearing.items():
            change = partial(hearing.change, rank=rank)
            self.failures.call(name, "change", change, slot, changes, engine_block_tokens)

    def _clear(self, slot: int, rank: int | None) -> None:
        for name, hearing in self.hearing.items():
            self.failures.call(name, "clear", partial(hearing.clear, rank=rank), slot)

    def set_stream(self, slot: int, state: StreamState, *, complete: bool, rank: int) -> None:
        """Set the state of the event stream of one rank of the engine in `slot`."""
        for name, hearing in self.hearing.items():
            change = partial(hearing.set_stream, complete=complete, rank=rank)
            self.failures.call(name, "set_stream", change, slot, state)

    def silence(self, slot: int, *, rank: int) -> None:
        """Drop the blocks that one rank of the engine in `slot` reported. Blocks that are assumed
        from decisions stay.
        """
        for name, hearing in self.hearing.items():
            self.failures.call(name, "silence", partial(hearing.silence, rank=rank), slot)

    def held(self, request: InferenceRequest, slot: int) -> Held | None:
        """Return how much of the first prompt of `request` the engine in `slot` reported as cached.

        Return None if no index receives the engine's events, or if the amount is unknown.
        """
        for name, hearing in self.hearing.items():
            try:
                return hearing.held(request, slot)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "held", error)
        return None

    # Data-parallel ranks.

    def tokens_by_rank(
        self, request: InferenceRequest, slot: int, now: Seconds
    ) -> Sequence[int] | None:
        """Return the number of tokens of `request` that each rank of the engine in `slot` has
        cached.

        Return () if the engine has one rank or no index receives its events, and None if the index
        fails.
        """
        for name, hearing in self.hearing.items():
            try:
                if hearing.ranks_at(slot) < 2:
                    return ()
                tokens = self.block_tokens_of(name)
                return [blocks * tokens for blocks in hearing.held_by_ranks(request, slot, now)]
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "held_by_ranks", error)
                return None
        return ()

    def fewest_ranks(self, slots: Sequence[int]) -> int | None:
        """Return the smallest number of ranks of the engines in `slots`, or None if the index
        fails; 1 if no index receives events.

        `slots` must not be empty.
        """
        for name, hearing in self.hearing.items():
            try:
                return min(map(hearing.ranks_at, slots))
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "held_by_ranks", error)
                return None
        return 1


def affinity_fault(found: object, slots: int) -> str:
    """Return a phrase that says why `found` is no `Affinity` for `slots` slots, or "" if it is one."""
    if not isinstance(found, Affinity):
        return f"{kind_of(found)}, expected Affinity"
    matched, total = found.matched, found.total
    if type(matched) is not ndarray or matched.dtype != INTS or matched.shape != (slots,):
        return f"an Affinity with matched = {array_fault(matched, INTS, slots)}"
    if type(total) is not int or total < 0:
        return f"an Affinity with total = {kind_of(total)}, expected int of 0 or more"
    if found.most is not None and type(found.most) is not int:
        return f"an Affinity with most = {kind_of(found.most)}, expected int or None"
    for name, column in found.columns.items():
        fault = array_fault(column, FLOATS, slots)
        if fault:
            return f"an Affinity with the column {name} = {fault}"
    return ""
