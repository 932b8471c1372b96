"""The exact prefix index: which endpoint holds which head of a prompt, as its engine says.

Keys are our own chained hashes over token ids (`core/prompt/token_blocks`). What engines say becomes
keys in a `Mirror` an endpoint; here is, by key, who holds it: one integer, a bit an endpoint. A look-up
goes through the keys of a prompt from its head and drops on the way whoever does not hold the next.

**Belief is exact and recent.** Events come when a step of the engine has run, after queue and prefill. What
was decided in the last seconds is held apart, in an index of decisions with a short time to live, and
counts beside what is told.

**Where a stream does not count.** `set_stream` says of each endpoint how its stream stands. One that is
not heard has nothing here, and the index of decisions answers for it (`joined`); of one that is heard and
told all that it holds, the column `EXACT` says that nobody else need be asked.

**Never more than is held.** The last block of a prompt that is wholly cached is computed again, a block
of the engine is used wholly or not at all, and a hybrid model needs all its groups at the same place:
so far each match is cut down. A tier that is not the device counts by its weight.

**Memory.** A bit belongs to a mirror and not to an endpoint: what restarts is forgotten at once, by
another bit, and the old rows are swept out bit by bit. Above the limit whoever holds more than an even
share gives up what it stored last, which is the tail of conversations; it then does not know all.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from msgspec import Struct

from epp.core.abilities import Abilities, Origin
from epp.core.duration import Duration
from epp.core.knowledge.candidates import Affinity, Floats, Ints
from epp.core.knowledge.exact_parameters import PrecisePrefixCacheParameters
from epp.core.knowledge.index import (
    EXACT,
    AffinityIndex,
    Heard,
    IndexMeasures,
)
from epp.core.knowledge.prefix import PrefixIndex, PrefixIndexSettings
from epp.core.kv_events.mirror import Changed, Mirror
from epp.core.kv_events.payload import DEVICE, Cleared, Event, Fault, Removed, Stored
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.prompt.request import InferenceRequest
from epp.core.prompt.token_blocks import TOKEN_BYTES
from epp.core.types import Seconds

TOKENS_MAX: Final = 131_072
"""Of a prompt that are looked at."""
ROW_BYTES: Final = 92
"""Of a key, with who holds it; and of a block of the engine, with its key. CPython 3.11, measured."""
SWEPT_MAX: Final = 8_192
"""Blocks of mirrors that are forgotten, taken out in one call."""
SWEPT_AT_ONCE_MAX: Final = 1_024
"""Of a mirror that has no more, all are taken out when it is forgotten."""
GIVEN_UP_SHARE: Final = 64
"""Whoever gives up blocks for others gives up at least one in so many."""
RECENT_BYTES_MAX: Final = 16 * 1024 * 1024
_COUNTS: Final = frozenset({StreamState.REPLAYING, StreamState.LIVE})


class ExactIndexSettings(PrecisePrefixCacheParameters, frozen=True):
    """`precise-prefix-cache-producer`."""

    type_name: ClassVar[str] = "precise-prefix-cache-producer"
    abilities: ClassVar[Abilities] = Abilities(
        origin=Origin.TOLD,
        counts_blocks=True,
        limits_memory=True,
        measures=True,
        hears_engines=True,
        warns=True,
    )

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return ExactIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply to a running index all but what its keys and its streams depend on."""
        return isinstance(index, ExactIndex) and index.configure(self)


class _RecentSettings(PrefixIndexSettings, frozen=True):
    """The index of what was decided lately: its blocks are as small as those of the other."""

    @property
    def block_tokens(self) -> int:
        return self.block_size_tokens


class ExactStatistics(Struct):
    """Counts since the index was opened. Evictions count (key, endpoint) pairs."""

    full_hits: int = 0
    partial_hits: int = 0
    no_hits: int = 0
    unknown_tokens: int = 0
    """Requests whose tokens are not known: nothing was looked up."""
    evicted_told: int = 0
    """The engine said so."""
    evicted_memory: int = 0
    evicted_forgotten: int = 0
    unbalanced: int = 0
    """Engines whose stores and removals did not balance."""


class _Place:
    """The rows of one mirror: they carry its bit."""

    __slots__ = ("bit", "mirror", "number", "slot")

    def __init__(self, number: int, slot: int, mirror: Mirror) -> None:
        self.number = number
        self.bit = 1 << number
        self.slot = slot
        """-1: it is forgotten."""
        self.mirror = mirror


class _Slot:
    """How the stream of one endpoint stands."""

    __slots__ = ("blocks_total", "complete", "counting", "place", "state")

    def __init__(self) -> None:
        self.place: _Place | None = None
        self.state = StreamState.NONE
        self.complete = False
        self.counting = True
        self.blocks_total = 0
        """Of the engine; 0: it does not say."""


class ExactIndex:
    """`AffinityIndex` that engines tell; the unit is one full block of `block_tokens` tokens."""

    def __init__(self, settings: ExactIndexSettings) -> None:
        self.block_tokens: Final = settings.block_tokens
        self.statistics: Final = ExactStatistics()
        self.entries = 0
        """(key, endpoint) pairs, of all tiers, those that are forgotten and not yet swept included."""
        self._tiers: dict[str, dict[int, int]] = {DEVICE: {}}
        """Tier -> key -> who holds it, a bit a place."""
        self._slots: list[_Slot] = []
        self._places: list[_Place | None] = []
        self._forgotten: list[_Place] = []
        self._counted = 0
        """The bits of the places whose streams count."""
        self._blocks = 0
        """Of the engines, in all mirrors."""
        self._memory_share = 1.0
        self._adapters: set[str] = set()
        self._exact: Floats | None = None
        """The column `EXACT`; None: it is to be made anew."""
        self._settings = settings
        self._recent = PrefixIndex(self._recent_settings(settings))
        self.configure(settings)

    def configure(self, settings: ExactIndexSettings) -> bool:
        """Adopt weights and limits; False and no change if keys or engines would be others."""
        before = self._settings
        if (
            settings.block_tokens != before.block_tokens
            or settings.kv_events_config != before.kv_events_config
        ):
            return False
        self._settings = settings
        self._sglang = settings.kv_events_config.engine_type == "sglang"
        self._weights = {tier: settings.weight_of(tier) for tier in self._tiers}
        self.limit_memory(self._memory_share)
        return self._recent.configure(self._recent_settings(settings))

    @staticmethod
    def _recent_settings(settings: ExactIndexSettings) -> _RecentSettings:
        return _RecentSettings(
            block_size_tokens=settings.block_tokens,
            ttl=Duration(settings.speculative_ttl),
            auto_tune=False,
            max_prefix_tokens_to_match=TOKENS_MAX,
            memory_max_bytes=RECENT_BYTES_MAX,
        )

    def limit_memory(self, share: float) -> None:
        """Take `share` of `memoryMaxBytes` at most; what is above goes with events and sweeps."""
        self._memory_share = share
        self._memory_max_bytes = int(share * self._settings.memory_max_bytes)

    # What is known.

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Leading full blocks that each slot holds, by their weight, summed over the prompts."""
        chains = self._chains(request)
        columns = {EXACT: self._exact_of(slots)}
        if not chains:
            self.statistics.unknown_tokens += 1
            return Affinity(np.zeros(slots, dtype=np.int64), 0, columns)
        matched = np.zeros(slots, dtype=np.int64)
        total = 0
        for number, chain in enumerate(chains):
            blocks = len(chain) // HASH_BYTES
            tokens = self._tokens_of(request, number, blocks)
            total += blocks
            # The last token is always computed, to have what comes after it.
            usable = min(blocks, max(0, tokens - 1) // self.block_tokens)
            matched += self._matched(request, number, chain, usable, tokens, slots, now)
        if total:
            best = int(matched.max(initial=0))
            if not best:
                self.statistics.no_hits += 1
            elif best >= total - len(chains):
                self.statistics.full_hits += 1
            else:
                self.statistics.partial_hits += 1
        return Affinity(matched, total, columns)

    def measures(self) -> IndexMeasures:
        """For the metrics; `MeasuresItself`."""
        told = self.statistics
        return IndexMeasures(
            entries=self.entries,
            memory_bytes=self.bytes_estimated,
            lookups={
                "full": told.full_hits,
                "partial": told.partial_hits,
                "none": told.no_hits,
                "unknown": told.unknown_tokens,
            },
            evictions={
                "told": told.evicted_told,
                "memory": told.evicted_memory,
                "forgotten": told.evicted_forgotten,
            },
        )

    @property
    def bytes_estimated(self) -> int:
        """Process memory of the index, from measured constants."""
        keys = sum(map(len, self._tiers.values()))
        return (keys + self._blocks) * ROW_BYTES + self._recent.bytes_estimated

    def mirror_of(self, slot: int) -> Mirror | None:
        """What the engine in `slot` told; None: nothing."""
        place = self._slots[slot].place if slot < len(self._slots) else None
        return None if place is None else place.mirror

    # What engines say.

    def hear(self, slot: int, events: Sequence[Event], now: Seconds) -> Heard:
        """The engine in `slot` says so."""
        known = self._slot(slot)
        changes: list[Changed] = []
        faults: list[Fault] = []
        cleared = [at for at, event in enumerate(events) if type(event) is Cleared]
        if cleared:
            # What came before it is as if it had not been; all is gone, in all tiers and groups.
            events = events[cleared[-1] + 1 :]
            self.clear(slot)
        place = known.place or self._new_place(slot)
        mirror = place.mirror
        cut = mirror.cut
        for event in events:
            before = len(mirror)
            if isinstance(event, Removed):
                mirror.remove(event, changes)
            elif isinstance(event, Stored):
                if self._sglang and event.adapter:
                    faults.append(Fault.KEYS)
                    continue
                mirror.rows_max = before + self._room(mirror, len(event.hashes))
                fault = mirror.store(event, changes)
                if fault is not None:
                    faults.append(fault)
            self._blocks += len(mirror) - before
        told = self._apply(changes, place)
        self.statistics.evicted_told += told
        if mirror.cut is not cut:
            self._exact = None
        if not mirror.adapters <= self._adapters:
            self._adapters |= mirror.adapters
        unbalanced = bool(known.blocks_total) and mirror.unbalanced(known.blocks_total)
        if unbalanced:
            self.statistics.unbalanced += 1
            known.counting = False
            self.silence(slot)
        return Heard(
            cleared=bool(cleared) or unbalanced,
            changes=() if unbalanced else changes,
            engine_block_tokens=mirror.engine_block_tokens,
            faults=faults,
            unbalanced=unbalanced,
        )

    def clear(self, slot: int) -> None:
        """The engine in `slot` holds nothing, neither of what it said nor of what was decided."""
        self.silence(slot)
        self._recent.forget(slot)

    def change(self, slot: int, changes: Sequence[Changed], engine_block_tokens: int = 0) -> None:
        """As `hear`, for whoever has only what came of it."""
        place = self._slot(slot).place or self._new_place(slot)
        place.mirror.engine_block_tokens = engine_block_tokens
        before = len(place.mirror)
        place.mirror.adopt(changes)
        self._blocks += len(place.mirror) - before
        self._apply(changes, place)

    def set_stream(self, slot: int, state: StreamState, *, complete: bool) -> None:
        """How much what `slot` says counts; `complete`: it told all that it holds."""
        known = self._slot(slot)
        known.state = state
        known.complete = complete
        if known.place is None and state in _COUNTS:
            self._new_place(slot)
        self._count_places()

    def silence(self, slot: int) -> None:
        """What the engine in `slot` said so far does not hold; what was decided does."""
        known = self._slot(slot)
        place, known.place = known.place, None
        if place is None:
            return
        place.slot = -1
        self._forgotten.append(place)
        if len(place.mirror) <= SWEPT_AT_ONCE_MAX or len(self._forgotten) > len(self._slots):
            self._sweep(place, len(place.mirror))
        if known.state in _COUNTS:
            self._new_place(slot)
        self._count_places()

    # What the scheduler does.

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Assume for a little while that `slot` holds `request`; returns what undoes it, or None."""
        if not self._settings.speculative_indexing:
            return None
        chains = self._chains(request)
        return self._recent.record(self._as_recent(chains), slot, now) if chains else None

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`slot` was not sent `request` after all."""
        if recorded is not None:
            chains = request.token_chains.get(self.block_tokens, ())
            self._recent.retract(self._as_recent(chains), slot, recorded, now)

    def forget(self, slot: int) -> None:
        """The endpoint in `slot` left or restarted."""
        if slot >= len(self._slots):
            return
        known = self._slots[slot]
        known.complete = False
        known.counting = True
        known.blocks_total = 0
        self.clear(slot)

    def expire(self, now: Seconds) -> None:
        """Sweep out what is forgotten, and what is above the memory limit, a bounded number."""
        left = SWEPT_MAX
        while self._forgotten and left > 0:
            left -= self._sweep(self._forgotten[0], left)
        if self.bytes_estimated > self._memory_max_bytes:
            self._give_up(min(SWEPT_MAX, self._above()))
        self._recent.expire(now)

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The engine in `slot` has so many blocks: it cannot hold more."""
        self._slot(slot).blocks_total = max(0, blocks_total)

    # Looking up.

    def _chains(self, request: InferenceRequest) -> tuple[bytes, ...]:
        adapter = request.model if request.model in self._adapters else ""
        if self._sglang and (adapter or request.cache_salt):
            # Its hashes leave these out, so that what it says of them cannot be told from the rest.
            return ()
        blocks_max = max(1, TOKENS_MAX // self.block_tokens)
        return request.token_chains_of(self.block_tokens, blocks_max, adapter=adapter)

    def _as_recent(self, chains: tuple[bytes, ...]) -> InferenceRequest:
        block_bytes = self.block_tokens * TOKEN_BYTES
        return InferenceRequest(request_id="", chains={block_bytes: chains})

    def _tokens_of(self, request: InferenceRequest, number: int, blocks: int) -> int:
        """Tokens of prompt `number`; where they are gone, as many as the request says, or its blocks have."""
        prompts = request.token_ids
        if prompts:
            return len(prompts[number]) // TOKEN_BYTES
        least = blocks * self.block_tokens
        if len(request.token_chains.get(self.block_tokens, ())) > 1:
            return least
        return min(max(least, request.prompt_tokens), least + self.block_tokens - 1)

    def _matched(
        self,
        request: InferenceRequest,
        number: int,
        chain: bytes,
        usable: int,
        tokens: int,
        slots: int,
        now: Seconds,
    ) -> Ints:
        depths = np.zeros(slots, dtype=np.int64)
        if not usable:
            return depths
        keys = array("Q", chain).tolist()[:usable]
        if self._settings.speculative_indexing and self._recent.entries:
            known = self._recent.match(self._as_recent((chain,)), slots, now)
            np.minimum(known.matched, usable, out=depths)
        found, lost = self._walk(keys)
        steps: Sequence[int] = ()
        for place_number, blocks in found.items():
            place = self._places[place_number]
            if place is None or not 0 <= place.slot < slots:
                continue
            mirror = place.mirror
            depth = blocks
            if mirror.groups:
                steps = steps or self._steps(request, number)
                depth = mirror.supported(steps, blocks)
            size = mirror.engine_block_tokens
            if size and self.block_tokens % size:
                whole = min(depth * self.block_tokens, tokens - 1) // size * size
                depth = whole // self.block_tokens
            weighed = int(depth - lost.get(place_number, 0.0))
            depths[place.slot] = max(depths.item(place.slot), weighed)
        return depths

    def _exact_of(self, slots: int) -> Floats:
        """1.0 for each slot that told all that it holds, and of which all is kept."""
        exact = self._exact
        if exact is None or len(exact) < slots:
            exact = self._exact = np.zeros(max(slots, len(self._slots)))
            for slot, known in enumerate(self._slots):
                place = known.place
                told = known.complete and known.state in _COUNTS
                exact[slot] = told and place is not None and not place.mirror.cut
        return exact[:slots]

    def _steps(self, request: InferenceRequest, number: int) -> Sequence[int]:
        """The chain of a prompt in steps; nothing, where its tokens are gone."""
        step_tokens = next(place.mirror.step_tokens for place in self._places if place is not None)
        if not request.token_ids:
            return ()
        adapter = request.model if request.model in self._adapters else ""
        chains = request.token_chains_of(step_tokens, TOKENS_MAX, adapter=adapter)
        return array("Q", chains[number])

    def _walk(self, keys: list[int]) -> tuple[dict[int, int], dict[int, float]]:
        """Number of a place -> how many of `keys` it holds from the first on; and what tiers take off."""
        found: dict[int, int] = {}
        lost: dict[int, float] = {}
        alive = self._counted
        device = self._tiers[DEVICE]
        if any(rows for tier, rows in self._tiers.items() if tier != DEVICE):
            return self._walk_tiers(keys)
        for depth, key in enumerate(keys):
            mask = device.get(key, 0) & alive
            if mask != alive:
                _note(found, alive & ~mask, depth)
                alive = mask
                if not alive:
                    return found, lost
        _note(found, alive, len(keys))
        return found, lost

    def _walk_tiers(self, keys: list[int]) -> tuple[dict[int, int], dict[int, float]]:
        """As `_walk`, where a block counts by the best of the tiers that hold it."""
        found: dict[int, int] = {}
        lost: dict[int, float] = {}
        alive = self._counted
        tiers = sorted(self._tiers.items(), key=lambda tier: -self._weights[tier[0]])
        # (mask, what a block takes off) -> in how many blocks: mostly the same from block to block.
        runs: dict[tuple[int, float], int] = {}
        depth = 0
        for depth, key in enumerate(keys):
            left = alive
            for tier, rows in tiers:
                mask = rows.get(key, 0) & left
                if mask:
                    left &= ~mask
                    less = 1.0 - self._weights[tier]
                    if less:
                        runs[mask, less] = runs.get((mask, less), 0) + 1
                if not left:
                    break
            if left:
                _note(found, left, depth)
                alive &= ~left
                if not alive:
                    break
        else:
            _note(found, alive, len(keys))
        for (mask, less), blocks in runs.items():
            for number in _places_in(mask):
                lost[number] = lost.get(number, 0.0) + less * blocks
        return found, lost

    # Rows.

    def _slot(self, number: int) -> _Slot:
        slots = self._slots
        while number >= len(slots):
            slots.append(_Slot())
        return slots[number]

    def _new_place(self, slot: int) -> _Place:
        known = self._slot(slot)
        number = next(
            (at for at, place in enumerate(self._places) if place is None), len(self._places)
        )
        if number == len(self._places):
            self._places.append(None)
        mirror = Mirror(self.block_tokens, rows_max=0)
        mirror.counting = known.counting
        place = known.place = self._places[number] = _Place(number, slot, mirror)
        self._count_places()
        return place

    def _count_places(self) -> None:
        """How a stream stands, or who is where, has changed."""
        self._exact = None
        self._counted = 0
        for known in self._slots:
            if known.place is not None and known.state in _COUNTS:
                self._counted |= known.place.bit

    def _apply(self, changes: Iterable[Changed], place: _Place) -> int:
        """Note what `place` holds from now on; return how many rows it holds no more."""
        bit = place.bit
        gone = 0
        for changed in changes:
            rows = self._tiers.get(changed.tier)
            if rows is None:
                rows = self._tiers[changed.tier] = {}
                self._weights[changed.tier] = self._settings.weight_of(changed.tier)
            if changed.held:
                for key in changed.keys:
                    mask = rows.get(key, 0)
                    if not mask & bit:
                        rows[key] = mask | bit
                        self.entries += 1
                continue
            for key in changed.keys:
                mask = rows.get(key, 0)
                if mask & bit:
                    gone += 1
                    mask ^= bit
                    if mask:
                        rows[key] = mask
                    else:
                        del rows[key]
        self.entries -= gone
        return gone

    # Giving up.

    def _sweep(self, place: _Place, blocks_max: int) -> int:
        """Take out rows of a forgotten place; return how many blocks went."""
        changes: list[Changed] = []
        before = len(place.mirror)
        place.mirror.give_up(blocks_max, changes)
        self._blocks -= before - len(place.mirror)
        self.statistics.evicted_forgotten += self._apply(changes, place)
        if not len(place.mirror):
            self._forgotten.remove(place)
            self._places[place.number] = None
        return max(1, before - len(place.mirror))

    def _above(self) -> int:
        """Blocks that are too many for the memory limit."""
        return -(-max(0, self.bytes_estimated - self._memory_max_bytes) // (2 * ROW_BYTES))

    def _room(self, mirror: Mirror, wanted: int) -> int:
        """How many of `wanted` blocks `mirror` may keep more."""
        each = 2 * ROW_BYTES
        free = (self._memory_max_bytes - self.bytes_estimated) // each
        if free >= wanted:
            return wanted
        fair = self._memory_max_bytes // each // max(1, len(self._slots))
        if len(mirror) + wanted <= fair:
            self._give_up(wanted - free)
            free = (self._memory_max_bytes - self.bytes_estimated) // each
        return max(0, min(free, wanted))

    def _give_up(self, blocks: int) -> None:
        """Let whoever holds most forget so many blocks, and some more, so as not to come back at once."""
        places = [place for place in self._places if place is not None and place.slot >= 0]
        if not places or not blocks:
            return
        largest = max(places, key=lambda place: len(place.mirror))
        changes: list[Changed] = []
        before = len(largest.mirror)
        largest.mirror.give_up(max(blocks, before // GIVEN_UP_SHARE), changes)
        self._blocks -= before - len(largest.mirror)
        self.statistics.evicted_memory += self._apply(changes, largest)
        self._exact = None


def _note(found: dict[int, int], mask: int, depth: int) -> None:
    """The places of `mask` hold `depth` blocks."""
    if depth:
        found.update(dict.fromkeys(_places_in(mask), depth))


def _places_in(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
