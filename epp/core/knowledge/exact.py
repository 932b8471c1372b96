"""The exact prefix index: cached prefixes of each endpoint, as the engines' KV-cache events report
them.

Keys are Homing's own chained hashes over token ids (`core/prompt/token_blocks`). A `Mirror` for
each rank translates the engine's events into keys. `exact_rows` stores, for each key, the places
that hold it, as one integer with a bit for each place. A look-up walks the keys of a prompt from
its beginning and drops every place that lacks the next key.

**Events are exact, and late.** An engine sends events after a step has run, so after queue and
prefill. A second index therefore keeps the decisions of the last seconds, with a short time to
live. Both indexes count. The time to live grows with the delay of the endpoint's events. To measure
it, `exact_awaited` sometimes waits for the event of a decision, until the engine reports that
decision or a later one. An endpoint that is later than `LATE_S_MAX` does not count as complete.

**Streams that do not count.** `set_stream` sets the state of each endpoint's stream. An endpoint
without a stream has no entries here, and the index of decisions answers for it (`joined`). If an
endpoint reported all that it has cached, the column `EXACT` says that no other index is needed for
it.

**Ranks.** An engine with several ranks behind its address has a mirror and a bit for each rank. Its
match is that of its best rank, because the picker names the rank that must serve. The endpoint is
complete once each of its ranks is. A rank whose stream ends is forgotten alone. A decision for a
rank is recorded twice: for the endpoint, like decisions without a rank, and for the rank.

**A match is never too long.** An engine computes the last block of a wholly cached prompt again. It
uses a block of its own wholly or not at all. A hybrid model needs all its groups at the same
position. Each match is cut accordingly. A block counts by the weight of its tier, which is 1 for
the device unless the configuration says otherwise.

**Memory.** A bit belongs to a mirror and not to an endpoint. After a restart, the endpoint gets
another bit at once, and the old rows are swept out in small steps. Above the memory limit, the
largest mirror drops what it stored last, which is the end of conversations, or a rank with more
than an even share stores no more. The endpoint of this rank then no longer counts as complete.
"""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from msgspec import Struct

from epp.core.abilities import Abilities, Origin
from epp.core.duration import Duration
from epp.core.knowledge.candidates import Affinity, Floats, Ints
from epp.core.knowledge.exact_awaited import AwaitedEvents, reported_blocks
from epp.core.knowledge.exact_parameters import (
    NUMBER_BYTES,
    ROW_BYTES,
    PrecisePrefixCacheParameters,
)
from epp.core.knowledge.exact_rows import Rows, walk_one
from epp.core.knowledge.exact_slots import COUNTS, Place, RankState, SlotState
from epp.core.knowledge.index import (
    EXACT,
    HOST_BLOCKS,
    RANKS_MAX,
    AffinityIndex,
    EventResult,
    Held,
    IndexMeasures,
)
from epp.core.knowledge.model_names import ModelNames
from epp.core.knowledge.prefix import PrefixIndex, PrefixIndexSettings
from epp.core.kv_events.mirror import Changed, Mirror
from epp.core.kv_events.payload import Cleared, Event, Fault, Removed, Stored
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.prompt.request import InferenceRequest
from epp.core.prompt.token_blocks import TOKEN_BYTES, hash_tokens, token_seed
from epp.core.types import Seconds

TOKENS_MAX: Final = 131_072
"""Maximum number of tokens of a prompt that the exact prefix index looks up."""
SWEPT_MAX: Final = 8_192
"""Maximum number of blocks that one `expire` removes from dropped mirrors, for example those of
endpoints that left or restarted.
"""
SWEPT_AT_ONCE_MAX: Final = 1_024
"""Maximum number of blocks of a dropped mirror, for example of an endpoint that left, that is
removed at once rather than in steps. Larger mirrors are removed at once only if too many of them
wait.
"""
KNOWN_SPARE_MAX: Final = 4_096
"""Maximum number of blocks that the exact prefix index may store before it checks its memory limit
again: about 100 messages.
"""
GIVEN_UP_SHARE: Final = 64
"""Divisor of the size of the largest mirror. The quotient is the least number of blocks that are
dropped at a time to meet the memory limit.
"""
RECENT_BYTES_MAX: Final = 16 * 1024 * 1024
HOST: Final = "cpu"
"""Engines' name of the tier in host memory, from which other engines can fetch blocks."""


class ExactIndexSettings(PrecisePrefixCacheParameters, frozen=True):
    """`precise-prefix-cache-producer`: an index of the cached prefixes that engines report."""

    type_name: ClassVar[str] = "precise-prefix-cache-producer"
    abilities: ClassVar[Abilities] = Abilities(
        origin=Origin.TOLD,
        counts_blocks=True,
        limits_memory=True,
        measures=True,
        hears_engines=True,
        reads_token_ids=True,
        warns=True,
    )

    def open(self) -> AffinityIndex:
        """Return a new, empty exact index."""
        return ExactIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to `index`. Return False, without a change, if its block size or its
        event settings would change.
        """
        return isinstance(index, ExactIndex) and index.configure(self)


class _RecentSettings(PrefixIndexSettings, frozen=True):
    """The settings of the index of recent decisions within the exact index. Its blocks may be
    smaller than those of a usual prefix index.
    """

    @property
    def block_tokens(self) -> int:
        return self.block_size_tokens


class ExactStatistics(Struct):
    """Counts of look-ups and evictions since the exact prefix index was opened. Evictions count
    (key, engine rank) pairs.
    """

    full_hits: int = 0
    partial_hits: int = 0
    no_hits: int = 0
    unknown_tokens: int = 0
    """Number of calls of `match` without a look-up, because the request's tokens or its adapter
    were unknown.
    """
    evicted_told: int = 0
    """Number of blocks evicted because engines reported them as removed."""
    evicted_memory: int = 0
    evicted_forgotten: int = 0
    unbalanced: int = 0
    """Number of times that an engine's events contradicted each other, because its stores and
    removals did not balance.
    """


class _Placed(Struct, frozen=True, gc=False):
    """The data that undoes the record of a decision that named a data-parallel rank."""

    anywhere: Any
    """Data that undoes the record in the index of decisions for endpoints."""
    number: int
    """Internal number under which the rank is recorded in the index of decisions for ranks."""
    there: Any


class ExactIndex:
    """An `AffinityIndex` that learns from KV-cache events which blocks engines have cached; the
    unit is one full block of `block_tokens` tokens.
    """

    def __init__(self, settings: ExactIndexSettings) -> None:
        self.block_tokens: Final = settings.block_tokens
        self._blocks_max: Final = max(1, TOKENS_MAX // settings.block_tokens)
        self.statistics: Final = ExactStatistics()
        self._rows = Rows()
        self._slots: list[SlotState] = []
        self._places: list[Place | None] = []
        self._slot_of: list[int] = []
        """Slot of the endpoint of each place by the place's number, where a place stands for one
        engine rank; -1 if the place was dropped, for example because the endpoint left.
        """
        self._forgotten: list[Place] = []
        self._counted = 0
        """Bit mask of the places (engine ranks) whose event streams count in a match."""
        self._mirror_rows, self._mirror_numbers = 0, 0
        """Sizes of all mirrors together, as the number of rows and the number of stored integers,
        from which the memory is estimated.
        """
        self._known_spare = 0
        """Number of blocks that may be stored before `_spare`, the number of blocks below the
        memory limit, is computed again.
        """
        self._memory_share = 1.0
        self._names = ModelNames()
        self._awaited = AwaitedEvents(self._rows, settings.block_tokens)
        self._exact: Floats | None = None
        """The column `EXACT`: 1.0 for each slot whose cached blocks are all known, else 0.0. None
        if it must be computed again.
        """
        self._settings = settings
        self._recent = PrefixIndex(self._recent_settings(settings))
        self._placed = PrefixIndex(self._recent_settings(settings))
        """Index of recent decisions for ranks. Its "slots" are internal numbers, one for each rank
        of each endpoint (`_number_of`).
        """
        self._numbers = 0
        """Number of internal rank numbers in use. It is also the next number to assign."""
        self.configure(settings)

    def configure(self, settings: ExactIndexSettings) -> bool:
        """Apply new weights and limits. Return False, without a change, if the block size or the
        event settings differ.
        """
        before = self._settings
        if (
            settings.block_tokens != before.block_tokens
            or settings.kv_events_config != before.kv_events_config
        ):
            return False
        self._settings = settings
        self._sglang = settings.kv_events_config.engine_type == "sglang"
        self._rows.weigh(settings.weight_of)
        self.limit_memory(self._memory_share)
        recent = self._recent_settings(settings)
        return self._recent.configure(recent) and self._placed.configure(recent)

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
        """Limit the memory of the exact index to `share` of `memoryMaxBytes`; the excess is dropped
        by later events and sweeps.
        """
        self._memory_share = share
        self._memory_max_bytes = int(share * self._settings.memory_max_bytes)
        self._known_spare = 0

    @property
    def entries(self) -> int:
        """Return the number of (key, engine rank) pairs in all tiers of the index, including those
        of dropped mirrors that are not yet removed.
        """
        return self._rows.entries

    # Look-ups.

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return the number of leading full blocks that each slot has cached, as reported or by
        recent decisions, weighted by tier and summed over the prompts of `request`. Count the
        look-up.
        """
        chains = self._chains(request)
        self._look_for_awaited(now)
        columns = {EXACT: self._exact_of(slots)}
        if not chains:
            self.statistics.unknown_tokens += 1
            return Affinity(np.zeros(slots, dtype=np.int64), 0, columns)
        matched = np.zeros(slots, dtype=np.int64)
        host = np.zeros(slots) if self._rows.tiers.get(HOST) else None
        total = 0
        for number, chain in enumerate(chains):
            blocks = len(chain) // HASH_BYTES
            tokens = self._tokens_of(request, number, blocks)
            total += blocks
            # The engine always computes the last token, because it needs the output after it.
            usable = min(blocks, max(0, tokens - 1) // self.block_tokens)
            matched += self._matched(request, number, chain, usable, tokens, slots, now)
            if host is not None:
                self._add_host_blocks(host, array("Q", chain).tolist()[:usable])
        if len(chains) > 1:
            self._limit_to_one_rank(matched, request, chains, now)
        if host is not None:
            columns[HOST_BLOCKS] = host
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
        """Return the entries, the memory, the look-ups and the evictions of this index."""
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
        """Return the estimated memory of the exact index in bytes, from measured constants."""
        keys = self._rows.keys
        # One mirror of each key shares its number with the row.
        others = max(0, self._mirror_numbers - keys)
        told_bytes = (keys + self._mirror_rows) * ROW_BYTES + others * NUMBER_BYTES
        return told_bytes + self._recent.bytes_estimated + self._placed.bytes_estimated

    def mirror_of(self, slot: int, rank: int = 0) -> Mirror | None:
        """Return the mirror of the cached blocks of `rank` of the engine in `slot`. Return None if
        there is none, because the rank has no event stream and has reported no blocks.
        """
        place = self._rank(slot, rank).place if rank < self.ranks_at(slot) else None
        return None if place is None else place.mirror

    # Events of engines.

    def hear(
        self, slot: int, events: Sequence[Event], now: Seconds, *, rank: int = 0
    ) -> EventResult:
        """Apply KV-cache events of rank `rank` of the engine in `slot`. Return the block keys that
        were stored or removed, and whether the events contradict each other. If they do, drop all
        blocks that the rank reported.
        """
        told_rank = self._rank(slot, rank)
        known = self._slots[slot]
        changes: list[Changed] = []
        faults: list[Fault] = []
        cleared = Cleared in map(type, events)
        if cleared:
            # Events before a clear have no effect, because all tiers and groups are emptied.
            last = max(at for at, event in enumerate(events) if type(event) is Cleared)
            events = events[last + 1 :]
            self.clear(slot, rank=rank)
        place = told_rank.place or self._new_place(slot, rank)
        mirror = place.mirror
        cut = mirror.cut
        adapters_before = len(mirror.adapters)
        for event in events:
            if type(event) is Removed:
                mirror.remove(event, changes)
            elif type(event) is Stored:
                if self._sglang and event.adapter:
                    self._names.adapters_named((event.adapter,))
                    fault: Fault | None = Fault.KEYS
                else:
                    fault = mirror.store(event, changes, self._room(event, place))
                if fault is not None:
                    faults.append(fault)
        self._count_rows(place)
        self.statistics.evicted_told += self._apply(changes, place)
        if mirror.cut is not cut:
            self._exact = None
        if len(mirror.adapters) > adapters_before:
            self._names.adapters_told(mirror.adapters)
        unbalanced = bool(known.blocks_total) and mirror.unbalanced(self._blocks_left(known, place))
        if unbalanced:
            self.statistics.unbalanced += 1
            told_rank.counting = False
            self.silence(slot, rank=rank)
        return EventResult(
            cleared=cleared or unbalanced,
            changes=() if unbalanced else changes,
            engine_block_tokens=mirror.engine_block_tokens,
            faults=faults,
            unbalanced=unbalanced,
        )

    def clear(self, slot: int, *, rank: int | None = None) -> None:
        """Drop all blocks of the engine in `slot`, both reported and assumed from decisions. `rank`
        limits the reported blocks to those of one rank.
        """
        for one in range(self.ranks_at(slot)) if rank is None else (rank,):
            self.silence(slot, rank=one)
        self._recent.forget(slot)
        for number in self._slot(slot).placed.values():
            self._placed.forget(number)

    def change(
        self,
        slot: int,
        changes: Sequence[Changed],
        engine_block_tokens: int = 0,
        *,
        rank: int = 0,
    ) -> None:
        """Apply stored and removed block keys, as `hear` returns them, for a caller that does not
        have the events themselves.
        """
        place = self._rank(slot, rank).place or self._new_place(slot, rank)
        place.mirror.engine_block_tokens = engine_block_tokens
        place.mirror.adopt(changes)
        self._count_rows(place)
        self._apply(changes, place)

    def adapters_told(self, names: Collection[str]) -> None:
        """Add `names` to the names of LoRA adapters that engines are known to serve."""
        self._names.adapters_told(names)

    def set_stream(self, slot: int, state: StreamState, *, complete: bool, rank: int = 0) -> None:
        """Set the state of the event stream of `rank` at `slot`. `complete` is True if the rank
        reported all blocks that it has cached. Drop the last ranks of the endpoint while they have
        neither a stream nor blocks, except the first rank.
        """
        known = self._rank(slot, rank)
        known.state = state
        known.complete = complete
        if not complete or state not in COUNTS:
            self._await_nothing(slot)
        if known.place is None and state in COUNTS:
            self._new_place(slot, rank)
        ranks, placed = self._slots[slot].ranks, self._slots[slot].placed
        while len(ranks) > 1 and ranks[-1].is_gone:
            last = len(ranks) - 1
            self.silence(slot, rank=last)
            ranks.pop()
            if last in placed:
                self._placed.forget(placed[last])
        self._count_places()

    def ranks_at(self, slot: int) -> int:
        """Return the number of data-parallel ranks of the engine in `slot`; 1 if it sends no
        events.
        """
        return len(self._slots[slot].ranks) if slot < len(self._slots) else 1

    def held_by_ranks(self, request: InferenceRequest, slot: int, now: Seconds) -> list[int]:
        """Return the number of leading full blocks that each rank of `slot` has cached, as reported
        or by recent decisions.

        The numbers are summed over the prompts.
        """
        ranks = self.ranks_at(slot)
        held = np.zeros(ranks, dtype=np.int64)
        known = self._slots[slot] if slot < len(self._slots) else None
        places = known.places if known is not None else []
        alive = self._counted & sum(place.bit for place in places)
        rank_of = {place.number: place.rank for place in places}
        for number, chain in enumerate(self._chains(request)):
            blocks = len(chain) // HASH_BYTES
            tokens = self._tokens_of(request, number, blocks)
            usable = min(blocks, max(0, tokens - 1) // self.block_tokens)
            if usable:
                keys = array("Q", chain).tolist()[:usable]
                depths = np.zeros(ranks, dtype=np.int64)
                self._add_told(depths, request, number, keys, tokens, alive, rank_of)
                self._add_placed(depths, slot, chain, usable, now)
                held += depths
        found: list[int] = held.tolist()
        return found

    def silence(self, slot: int, *, rank: int = 0) -> None:
        """Drop the blocks that `rank` at `slot` reported. Blocks that are assumed from decisions
        stay. Stop waiting for events of the endpoint, and make earlier answers of `held` void.
        """
        known = self._rank(slot, rank)
        self._await_nothing(slot)
        self._slots[slot].void_tracked()
        place, known.place = known.place, None
        if place is None:
            return
        place.slot = self._slot_of[place.number] = -1
        self._forgotten.append(place)
        if len(place.mirror) <= SWEPT_AT_ONCE_MAX or len(self._forgotten) > self._ranks:
            self._sweep(place, len(place.mirror))
        if known.state in COUNTS:
            self._new_place(slot, rank)
        self._count_places()

    def held(self, request: InferenceRequest, slot: int) -> Held | None:
        """Return how much of the first prompt of `request` the engine in `slot` reported as cached.

        Return None if that is unknown: for example, because the engine's blocks are not all known,
        or a block depends on more than its tokens (an adapter or a salt). An answer with less than
        the whole prompt is updated once the engine reports the whole prompt, unless it is void.
        """
        known = self._slots[slot] if slot < len(self._slots) else None
        chains = request.token_chains.get(self.block_tokens)
        if known is None or not known.reported_all or not chains or not chains[0]:
            return None
        if any(rank.state is not StreamState.LIVE for rank in known.ranks):
            return None
        size = known.engine_block_tokens
        if not size or request.cache_salt or self._adapter_of(request) != "":
            return None
        keys = array("Q", chains[0])
        total = reported_blocks(len(keys), self.block_tokens, size)
        if not total:
            return None
        most = max(self._held_blocks(place, keys, total) for place in known.places)
        held = Held(most, total, self.block_tokens)
        return held if most == total else known.track(keys[total - 1], held)

    def _held_blocks(self, place: Place, keys: "array[int]", total: int) -> int:
        """Return how many of the first `total` of `keys` one engine rank, `place`, has cached,
        counted from the first key without a gap, provided that engines evict the end of a prompt
        before its beginning.
        """
        # The key of a block depends on the whole prompt up to its end.
        if self._rows.holds(place.bit, keys[total - 1]):
            return total
        # Engines evict the end of a prompt before its beginning.
        return bisect_left(
            range(total), True, key=lambda at: not self._rows.holds(place.bit, keys[at])
        )

    # Decisions of the scheduler.

    def record(
        self, request: InferenceRequest, slot: int, now: Seconds, *, rank: int | None = None
    ) -> Any:
        """Assume for a short time that `slot` has `request` cached, at `rank` if the engine has
        several ranks.

        Return the data that undoes this assumption. Do nothing and return None if the token ids or
        the adapter are unknown, or if `speculativeIndexing` is off.
        """
        chains = self._chains(request)
        if not chains:
            self._await_own(request, now)
        if not chains or not self._settings.speculative_indexing:
            return None
        self._awaited.sent(self._slot(slot), chains[0], now)
        recent = self._as_recent(chains)
        anywhere = self._recent.record(recent, slot, now)
        if rank is None or not 0 <= rank < self.ranks_at(slot) or self.ranks_at(slot) < 2:
            return anywhere
        number = self._number_of(slot, rank)
        return _Placed(anywhere, number, self._placed.record(recent, number, now))

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo the assumption that `slot` has `request` cached, because the request was not served
        there.
        """
        if recorded is not None:
            chains = request.token_chains.get(self.block_tokens, ())
            recent = self._as_recent(chains)
            if isinstance(recorded, _Placed):
                self._placed.retract(recent, recorded.number, recorded.there, now)
                recorded = recorded.anywhere
            self._recent.retract(recent, slot, recorded, now)
            if chains:
                self._awaited.not_sent(self._slot(slot), chains[0])

    def forget(self, slot: int) -> None:
        """Drop all blocks of `slot`, reported and assumed, because its endpoint left or restarted."""
        if slot >= len(self._slots):
            return
        known = self._slots[slot]
        for rank in known.ranks:
            rank.complete = False
            rank.counting = True
        known.blocks_total = 0
        self.clear(slot)

    def expire(self, now: Seconds) -> None:
        """Remove a bounded number of blocks: those of dropped mirrors, those above the memory
        limit, and those of old decisions. Check for KV-cache events that are awaited.
        """
        self._look_for_awaited(now)
        left = SWEPT_MAX
        while self._forgotten and left > 0:
            left -= self._sweep(self._forgotten[0], left)
        above = -self._spare
        if above > 0:
            self._give_up(min(SWEPT_MAX, above))
        self._recent.expire(now)
        self._placed.expire(now)

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Set the number of blocks in the KV cache of the engine in `slot`, 0 if unknown. If the
        engine's events store more blocks, they contradict each other.
        """
        self._slot(slot).blocks_total = max(0, blocks_total)

    # Keys and walks.

    def _chains(self, request: InferenceRequest) -> tuple[bytes, ...]:
        made = request.token_chains.get(self.block_tokens)
        if made is not None:
            return made
        adapter = self._adapter_of(request)
        if adapter is None or (self._sglang and (adapter or request.cache_salt)):
            # SGLang's hashes ignore adapter and salt, so its events do not distinguish these
            # prompts.
            return ()
        return request.token_chains_of(self.block_tokens, self._blocks_max, adapter=adapter)

    def _adapter_of(self, request: InferenceRequest) -> str | None:
        """Return the adapter that `request` names, "" if it names the base model, or None if that
        is unknown.
        """
        return self._names.adapter_of(request.model, self._rows.device)

    def _await_own(self, request: InferenceRequest, now: Seconds) -> None:
        """Begin to find out whether `request` names the base model, by watching whether an engine
        caches its prompt as the base model's.
        """
        names, prompts = self._names, request.token_ids
        if not prompts or self._sglang or any(request.moment.token_media):
            return
        if names.awaits(request.model, now):
            return
        chain = hash_tokens(
            prompts[0],
            seed=token_seed("", request.cache_salt),
            block_tokens=self.block_tokens,
            blocks_max=self._blocks_max,
        )
        if chain:
            # The last key is the one that the fewest other prompts share.
            names.asked(request.model, array("Q", chain)[-1], self._rows.device, now)

    def _as_recent(self, chains: tuple[bytes, ...]) -> InferenceRequest:
        block_bytes = self.block_tokens * TOKEN_BYTES
        return InferenceRequest(request_id="", chains={block_bytes: chains})

    def _tokens_of(self, request: InferenceRequest, number: int, blocks: int) -> int:
        """Return the number of tokens of the prompt at index `number` of `request`. If its token
        ids were dropped, estimate it from the request, or from `blocks`, its number of full blocks.
        """
        prompts = request.token_ids
        if prompts:
            return len(prompts[number]) // TOKEN_BYTES
        least = blocks * self.block_tokens
        if len(request.token_chains.get(self.block_tokens, ())) > 1:
            return least
        tokens = request.known_tokens or request.prompt_tokens
        return min(max(least, tokens), least + self.block_tokens - 1)

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
        self._add_told(depths, request, number, keys, tokens, self._counted, self._slot_of)
        return depths

    def _limit_to_one_rank(
        self, matched: Ints, request: InferenceRequest, chains: tuple[bytes, ...], now: Seconds
    ) -> None:
        """Limit `matched` at each endpoint with several ranks to the blocks that its best single
        rank has cached, because one rank serves all prompts of a request. Blocks by recent
        decisions for the endpoint count for any rank.
        """
        slots = len(matched)
        ranked = [at for at, one in enumerate(self._slots[:slots]) if len(one.ranks) > 1]
        if not ranked:
            return
        decided = np.zeros(slots, dtype=np.int64)
        if self._settings.speculative_indexing and self._recent.entries:
            decided = self._recent.match(self._as_recent(chains), slots, now).matched
        for slot in ranked:
            told = max(self.held_by_ranks(request, slot, now))
            matched[slot] = min(matched.item(slot), max(decided.item(slot), told))

    def _add_told(
        self,
        depths: Ints,
        request: InferenceRequest,
        number: int,
        keys: list[int],
        tokens: int,
        alive: int,
        at_of: Sequence[int] | Mapping[int, int],
    ) -> None:
        """Raise each of `depths` to the match of its place (an engine rank): the number of leading
        `keys` that the place reported as cached, weighted by tier and rounded down. Only places
        with a bit in `alive` count.

        A match is cut to whole blocks of the engine, and to a position that all cache groups of a
        hybrid model have. `at_of` gives the position in `depths` of each place, by the place's
        number. `number` is the position of the prompt with these keys in `request`, and `tokens`
        the length of that prompt.
        """
        found, lost = self._rows.walk(keys, alive)
        steps: Sequence[int] = ()
        for place_number, blocks in found.items():
            place, at = self._places[place_number], at_of[place_number]
            if place is None or not 0 <= at < len(depths):
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
            depths[at] = max(depths.item(at), weighed)

    def _add_placed(self, depths: Ints, slot: int, chain: bytes, usable: int, now: Seconds) -> None:
        """Raise `depths`, one number for each rank of `slot`, to the leading blocks of `chain` that
        recent decisions sent to the rank.
        """
        if not self._placed.entries or not self._slot(slot).placed:
            return
        known = self._placed.match(self._as_recent((chain,)), self._numbers, now).matched
        for rank, number in self._slot(slot).placed.items():
            if rank < len(depths):
                depths[rank] = max(depths.item(rank), min(known.item(number), usable))

    def _number_of(self, slot: int, rank: int) -> int:
        """Return the number that stands for `rank` of `slot` in the index of decisions for ranks.
        Assign the next free number if the rank has none.
        """
        placed = self._slot(slot).placed
        number = placed.get(rank)
        if number is None:
            number = placed[rank] = self._numbers
            self._numbers += 1
        return number

    def _add_host_blocks(self, host: Floats, keys: list[int]) -> None:
        """Add to `host`, float64 by slot, the number of leading `keys` that each endpoint has
        cached in host memory.
        """
        most: dict[int, int] = {}
        for place_number, blocks in walk_one(self._rows.tiers[HOST], keys, self._counted).items():
            place = self._places[place_number]
            if place is not None and 0 <= place.slot < len(host):
                most[place.slot] = max(most.get(place.slot, 0), blocks)
        for slot, blocks in most.items():
            host[slot] += blocks

    def _exact_of(self, slots: int) -> Floats:
        """Return a column with 1.0 for each slot whose endpoint reported all its cached blocks in
        time, and all of them are stored here; 0.0 otherwise.
        """
        exact = self._exact
        if exact is None or len(exact) < slots:
            exact = self._exact = np.zeros(max(slots, len(self._slots)))
            for slot, known in enumerate(self._slots):
                exact[slot] = not known.overdue and known.reported_all
        return exact[:slots]

    def _steps(self, request: InferenceRequest, number: int) -> Sequence[int]:
        """Return the chained hashes of the prompt at index `number` of `request`, one for each step
        of the mirrors. Return () if its token ids were dropped.
        """
        step_tokens = next(place.mirror.step_tokens for place in self._places if place is not None)
        if not request.token_ids:
            return ()
        adapter = self._adapter_of(request) or ""
        chains = request.token_chains_of(step_tokens, TOKENS_MAX, adapter=adapter)
        return array("Q", chains[number])

    # Delay of events.

    def _look_for_awaited(self, now: Seconds) -> None:
        """Look for KV-cache events that are awaited. Lengthen or shorten the time to live of recent
        decisions as the delay of these events requires.
        """
        ttl_s = float(self._settings.speculative_ttl)
        if self._awaited.look(self._slots, now, ttl_s, self._stretch):
            self._exact = None

    def _stretch(self, slot: int, known: SlotState, factor: float) -> None:
        self._recent.stretch(slot, factor)
        for number in known.placed.values():
            self._placed.stretch(number, factor)

    def _await_nothing(self, slot: int) -> None:
        """Stop waiting for the KV-cache events of all prompts that were sent to `slot` so far."""
        known = self._slots[slot]
        known.awaited.clear()
        if known.overdue:
            known.overdue = False
            self._exact = None

    # Rows and places.

    def _slot(self, number: int) -> SlotState:
        slots = self._slots
        while number >= len(slots):
            slots.append(SlotState())
        return slots[number]

    def _rank(self, slot: int, rank: int) -> RankState:
        """Return the state of one rank of `slot`. Raises `ValueError` if the rank is not below
        `RANKS_MAX`.
        """
        if not 0 <= rank < RANKS_MAX:
            raise ValueError(f"rank is {rank}; it must be at least 0 and below {RANKS_MAX}")
        ranks = self._slot(slot).ranks
        while rank >= len(ranks):
            ranks.append(RankState())
            # The new rank has reported nothing yet.
            self._exact = None
        return ranks[rank]

    @property
    def _ranks(self) -> int:
        """Return the total number of data-parallel ranks of all endpoints."""
        return sum(len(known.ranks) for known in self._slots)

    def _blocks_left(self, known: SlotState, place: Place) -> int:
        """Return the maximum number of blocks that the rank of `place` can have cached: the
        engine's number of blocks less those of its other ranks.
        """
        if len(known.ranks) == 1:
            return known.blocks_total
        held = sum(other.mirror.copies for other in known.places if other is not place)
        return known.blocks_total - held

    def _new_place(self, slot: int, rank: int) -> Place:
        known = self._rank(slot, rank)
        number = next(
            (at for at, place in enumerate(self._places) if place is None), len(self._places)
        )
        if number == len(self._places):
            self._places.append(None)
            self._slot_of.append(slot)
        self._slot_of[number] = slot
        mirror = Mirror(self.block_tokens)
        mirror.counting = known.counting
        place = known.place = self._places[number] = Place(number, slot, rank, mirror)
        self._count_places()
        return place

    def _count_places(self) -> None:
        """Determine again which places (engine ranks) count in a match, after a change of an event
        stream or of a place.
        """
        self._exact = None
        self._counted = 0
        for known in self._slots:
            for rank in known.ranks:
                if rank.place is not None and rank.state in COUNTS:
                    self._counted |= rank.place.bit

    def _apply(self, changes: Iterable[Changed], place: Place) -> int:
        """Apply stored and removed block keys to the rows of one engine rank, `place`. Return how
        many of its keys were removed.
        """
        known = self._slots[place.slot] if place.slot >= 0 else None
        return self._rows.apply(changes, place.bit, known)

    # Memory.

    def _sweep(self, place: Place, blocks_max: int) -> int:
        """Remove `blocks_max` blocks of `place`, which was dropped, or all if it has fewer. Return
        how many blocks were removed, or 1 if there were none.
        """
        changes: list[Changed] = []
        given = place.mirror.give_up(blocks_max, changes)
        self._count_rows(place)
        self.statistics.evicted_forgotten += self._apply(changes, place)
        if not len(place.mirror):
            self._forgotten.remove(place)
            self._places[place.number] = None
        return max(1, given)

    def _count_rows(self, place: Place) -> None:
        """Update the total size of all mirrors with the present size of the mirror of `place`."""
        rows, numbers = place.mirror.rows, place.mirror.numbers
        self._mirror_rows += rows - place.mirror_rows
        self._mirror_numbers += numbers - place.mirror_numbers
        place.mirror_rows, place.mirror_numbers = rows, numbers

    @property
    def _spare(self) -> int:
        """Return the number of blocks that the exact prefix index may still store below its memory
        limit. It is below 0 if the index stores too many.
        """
        return (self._memory_max_bytes - self.bytes_estimated) // (2 * ROW_BYTES)

    @property
    def _fair_blocks(self) -> int:
        """Return the number of blocks that each engine rank may store if all ranks share the memory
        limit evenly.
        """
        return self._memory_max_bytes // (2 * ROW_BYTES) // max(1, self._ranks)

    def _room(self, stored: Stored, place: Place) -> int:
        """Return how many more blocks the mirror of `place` may store within the memory limit. Drop
        blocks of the largest mirror if those of `stored` do not fit and `place` is below its even
        share.
        """
        mirror = place.mirror
        wanted = mirror.tail_blocks * len(stored.hashes)
        # Runs that waited for this one are stored together with it.
        floating = mirror.floating_runs
        if wanted > self._known_spare or floating:
            self._count_rows(place)
            free = self._spare
            if free < wanted and len(mirror) + wanted <= self._fair_blocks:
                self._give_up(wanted - free)
                free = self._spare
            self._known_spare = max(0, free)
        room = self._known_spare
        self._known_spare = 0 if floating else min(max(0, room - wanted), KNOWN_SPARE_MAX)
        return room

    def _give_up(self, blocks: int) -> None:
        """Drop `blocks` blocks of the engine rank with the most blocks, or all if it has fewer, to
        meet the memory limit. Drop a share of the rank's blocks if that is more, so that this is
        not needed again at once.
        """
        places = [place for place in self._places if place is not None and place.slot >= 0]
        if not places or not blocks:
            return
        largest = max(places, key=lambda place: len(place.mirror))
        changes: list[Changed] = []
        largest.mirror.give_up(max(blocks, len(largest.mirror) // GIVEN_UP_SHARE), changes)
        self._count_rows(largest)
        self.statistics.evicted_memory += self._apply(changes, largest)
        self._exact = None
