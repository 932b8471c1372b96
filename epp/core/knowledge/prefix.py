"""The approximate prefix index: which endpoint is believed to hold which head of a prompt.

It is told nothing by the engines. It assumes that an endpoint holds what was routed there, until
that is older than the TTL, pushed out by newer prompts, or the endpoint restarts (design D5).

**A compressed tree.** A block's hash is chained (`core/prompt/blocks`), so it names the whole prompt up to
that block, and one flat dict from the first hash of each run of blocks to its node is the children
table of every node at once. A node holds a run of consecutive hashes and, by endpoint slot, the
stamp of the last prompt that went through it. A slot holds all of a run or nothing of it: where a
prompt ends or turns off inside a run, the node is split. A look-up is therefore one dict access and
one comparison of bytes a node, not a block; and because the holders of a node are among those of
its parent, overwriting each slot's depth on the way down leaves exactly what it holds without gap.

**Recency.** Stamps increase with every prompt recorded, and a prompt stamps its whole path, so
along any path they never increase downwards. Each slot keeps a queue of (stamp, deepest node of
that prompt). The oldest content of a slot is found at the front: the nodes that still carry that
stamp, from that deepest node upwards; all that lies below them is older, hence gone already. A
newer prompt through the same nodes makes the entry stale; stale entries are skipped and, when they
are the majority, swept out. Eviction so takes tails before heads, and exactly as many blocks as
needed.

**Peers.** What a peer recorded is learnt under the stamp that it had there, into its place among
the others: any order of the same records leaves the same belief. What only a peer has told is marked
until it is recorded here.

**Corrections.** Where engines count what they find (`hit_accuracy`), capacity and TTL of an endpoint follow
by small steps within bounds: too much was predicted, and both shrink, the capacity from what is held, so
that it counts at once; too little, and what bound it since the last step grows, be it the one or the other.

**No cycles.** Nodes point to their parent only. They are invisible to the garbage collector, which
a million tracked objects would otherwise stop for tens of milliseconds.
"""

import bisect
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta, Struct

from epp.core.abilities import Abilities, Origin
from epp.core.duration import Duration, check_above_zero
from epp.core.knowledge.candidates import Affinity, Ints
from epp.core.knowledge.hit_accuracy import Correction
from epp.core.knowledge.index import AffinityIndex, IndexMeasures
from epp.core.prompt.blocks import HASH_BYTES, HASH_SCHEME
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, Seconds

BLOCK_TOKENS_MIN: Final = 64
"""Smaller blocks cost memory and gain nothing; the reference picker has the same floor."""

CHAIN_BLOCKS_MAX: Final = 65_536
"""Longest chain that is looked at when the limits are off: 4 million tokens in blocks of 64.

Bounds the depth of the tree, which Python frees recursively (8 MB of stack end at 110,000)."""

# Bytes of process memory on CPython 3.11, fitted to the growth that `bench/index.py` measures:
# "estimate / memory" there is 1.02 to 1.05 for prompts of 4 to 128 blocks.
_NODE_BYTES: Final = 430
"""A node, its run without the hashes, its table of up to five holders, its row in the dict."""
_HOLDING_BYTES: Final = 40
"""One slot in a node's table."""
_RECORD_BYTES: Final = 42
"""One entry of a slot's queue, with its stamp."""

_SHRINK_HOLDINGS_MAX: Final = 512
"""Holdings that one `record` gives up at most for the memory limit; more than it ever adds."""
_SEARCHED_MAX: Final = 4_096
"""Prompts of an endpoint among which `retract` looks for one that it must not cut."""

CORRECTION_MAX: Final = 8.0
"""Capacity and TTL are at most so many times what they are without corrections, and at least one part
of as many. What an engine says that it can hold is never exceeded."""
CORRECTION_STEP_MAX: Final = 0.2
"""By so much of themselves they change at most with one window."""
ERROR_TOLERATED: Final = 0.02
"""Of the prompt tokens; by less nothing is corrected."""
CORRECTED_BLOCKS_MAX: Final = 4_096
"""That one correction makes an endpoint forget; the next one goes on."""

_SINGLE_BITS_MAX: Final = 12
"""Up to so many slots are cheaper to write one by one than as an array of bits."""


class PrefixIndexSettings(
    Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """`approx-prefix-cache-producer`; parameters as in the reference picker, and three of ours."""

    type_name: ClassVar[str] = "approx-prefix-cache-producer"
    abilities: ClassVar[Abilities] = Abilities(
        origin=Origin.DECIDED,
        counts_blocks=True,
        shares=True,
        corrected=True,
        limits_memory=True,
        measures=True,
    )

    auto_tune: bool = True
    """Take the capacity of each endpoint from its engine's metrics where they tell it."""
    block_size_tokens: Annotated[int, Meta(ge=1)] = BLOCK_TOKENS_MIN
    """Tokens in a block; less than 64 becomes 64."""
    block_size: Annotated[int, Meta(ge=1)] | None = None
    """Deprecated name; counts while `blockSizeTokens` is at its default."""
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 31_250
    """Blocks that an endpoint is believed to hold at most, unless tuned."""
    max_prefix_tokens_to_match: Annotated[int, Meta(ge=0)] = 131_072
    """Tokens of a prompt that are looked at; 0: as `maxPrefixBlocksToMatch` says."""
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=0)] = 2_048
    """Blocks of a prompt that are looked at if the tokens are 0; both 0: no limit but 65,536."""
    ttl: Duration = Duration(300.0)
    """A block is forgotten this long after it was last routed to an endpoint."""
    memory_max_bytes: Annotated[int, Meta(ge=1)] = 268_435_456
    """Estimated memory of the whole index; above it the oldest content goes first."""
    correct_by_engine: bool = False
    """Correct capacity and TTL of each endpoint by what its engine counts of its cache."""

    def __post_init__(self) -> None:
        check_above_zero("ttl", self.ttl)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block, in effect."""
        size = self.block_size_tokens
        if self.block_size is not None and size == BLOCK_TOKENS_MIN:
            size = self.block_size
        return max(BLOCK_TOKENS_MIN, size)

    @property
    def blocks_max(self) -> int:
        """Blocks of one prompt that are looked at, in effect."""
        limit = self.max_prefix_blocks_to_match or CHAIN_BLOCKS_MAX
        if self.max_prefix_tokens_to_match:
            limit = self.max_prefix_tokens_to_match // self.block_tokens
        return min(limit, CHAIN_BLOCKS_MAX)

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return PrefixIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply to a running index all but the block size; False if that differs."""
        return isinstance(index, PrefixIndex) and index.configure(self)


class PrefixStatistics(Struct):
    """Counts since the index was opened. Evictions count (block, endpoint) pairs."""

    lookups: int = 0
    """Requests with at least one full block; each is one of the three kinds of hits."""
    full_hits: int = 0
    """Some endpoint held all full blocks (of each prompt)."""
    partial_hits: int = 0
    no_hits: int = 0
    evicted_capacity: int = 0
    """More was routed to the endpoint than it can hold."""
    evicted_ttl: int = 0
    evicted_memory: int = 0
    """The index as a whole was too large."""
    evicted_forgotten: int = 0
    """The endpoint left or restarted."""
    retracted: int = 0
    """Another endpoint served than the one that was recorded."""
    known_from_peers: int = 0
    """Prompts recorded where the deepest block held before was known from a peer alone."""


class _Node(Struct, gc=False, eq=False):
    """A run of blocks, all of which each of `holders` holds.

    Free of reference cycles, as `gc=False` demands: it points upwards only.
    """

    run: bytes
    parent: "_Node | None"
    holders: dict[int, Seconds]
    """Slot -> stamp of the last prompt that was recorded through here; a subset of the parent's."""
    mask: int
    """The keys of `holders` as bits."""
    oldest: Seconds
    """A lower bound of the values of `holders`."""
    children: int = 0
    learnt: int = 0
    """Of `mask`: the slots of which only a peer has told."""


class _Slot:
    """What one endpoint holds: its size and its queue of prompts, oldest first."""

    __slots__ = (
        "blocks",
        "bytes_per_token",
        "capacity_blocks",
        "capacity_bound",
        "capacity_factor",
        "ends",
        "engine_tokens",
        "live",
        "number",
        "queued",
        "stamps",
        "ttl_bound",
        "ttl_factor",
    )

    def __init__(self, number: int, capacity_blocks: int) -> None:
        self.number = number
        self.capacity_blocks = capacity_blocks
        self.engine_tokens = 0
        """What the engine says that its cache holds; 0: it did not, or is not to be asked."""
        self.uncorrected()
        self.blocks = 0
        self.stamps: deque[Seconds] = deque()
        self.ends: deque[_Node] = deque()
        """The deepest node of the prompt with the stamp at the same position."""
        self.live = 0
        """Entries left when stale ones were last swept out."""
        self.queued = False
        """It has its place in the heap of slots by oldest stamp."""

    def uncorrected(self) -> None:
        """Nothing was learnt of its engine."""
        self.capacity_factor = 1.0
        self.ttl_factor = 1.0
        self.bytes_per_token = float(BYTES_PER_TOKEN)
        self.capacity_bound = self.ttl_bound = False
        """Since the last correction blocks went for it."""


class PrefixIndex:
    """`AffinityIndex` over prompt prefixes; the unit is one full block of `block_tokens` tokens.

    Depends on nothing but its arguments: the same calls give the same answers in any process.
    """

    def __init__(self, settings: PrefixIndexSettings, *, sweep_holdings_max: int = 4_096) -> None:
        """`sweep_holdings_max`: runs that `expire` takes from slots in one call, about 2 us each."""
        self.block_tokens: Final = settings.block_tokens
        self.statistics: Final = PrefixStatistics()
        self.entries = 0
        """(block, endpoint) pairs held, expired ones that were not yet swept included."""
        self._sweep_holdings_max = sweep_holdings_max
        self._first: dict[bytes, _Node] = {}
        self._slots: list[_Slot] = []
        self._fronts: list[tuple[Seconds, int]] = []
        """Heap of (a lower bound of the slot's oldest stamp, slot): who is to be swept next."""
        self._stamp: Seconds = -math.inf
        self._nodes = 0
        self._holdings = 0
        self._run_blocks = 0
        self._records = 0
        self._memory_share = 1.0
        self._ttl_least_s = math.inf
        self._ttls_alike = True
        self._swept = 0
        """The slot with which the next sweep begins, where they differ."""
        self.configure(settings)

    def configure(self, settings: PrefixIndexSettings) -> bool:
        """Adopt capacity, TTL, limits and tuning; False and no change if the block size differs.

        A smaller capacity or memory limit takes effect with the next prompts and sweeps.
        """
        if settings.block_tokens != self.block_tokens:
            return False
        self._settings = settings
        self._ttl_s = float(settings.ttl)
        self.limit_memory(self._memory_share)
        self._blocks_max = settings.blocks_max
        for slot in self._slots:
            if not settings.auto_tune:
                slot.engine_tokens = 0
            if not settings.correct_by_engine:
                slot.uncorrected()
            slot.capacity_blocks = self._capacity_of(slot)
        self._compare_ttls()
        return True

    def limit_memory(self, share: float) -> None:
        """Take `share` of `memoryMaxBytes` at most; what is above goes with prompts and sweeps."""
        self._memory_share = share
        self._memory_max_bytes = int(share * self._settings.memory_max_bytes)

    # What is known.

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Leading full blocks that each slot holds, summed over the prompts of the request."""
        chains = self._chains(request)
        size = max(slots, len(self._slots), 1)
        if len(chains) == 1:
            path = self._path(chains[0], now)
            deepest, total = path[-1][1] if path else 0, len(chains[0]) // HASH_BYTES
            if total:
                self._count_lookup(best=deepest, full=deepest == total)
            return Affinity(self._depths(path, size)[:slots], total)
        paths: dict[tuple[tuple[int, int], ...], int] = {}
        best = 0
        full = True
        for chain in chains:
            path = self._path(chain, now)
            deepest = path[-1][1] if path else 0
            best += deepest
            full = full and deepest == len(chain) // HASH_BYTES
            if path:
                # Prompts of one batch have much in common, and most of the cost is an array a path.
                paths[path] = paths.get(path, 0) + 1
        matched = np.zeros(size, dtype=np.int64)
        for path, prompts in paths.items():
            matched += prompts * self._depths(path, size)
        total = sum(map(len, chains)) // HASH_BYTES
        if total:
            self._count_lookup(best=best, full=full)
        return Affinity(matched[:slots], total)

    def first_holder(self, request: InferenceRequest, now: Seconds) -> int:
        """The slot to which what is known of the first prompt was first routed; -1: nothing is.

        Of the node that it reaches deepest, wholly or in part, and of those that hold it still. What
        peers routed counts from when it was learnt here.
        """
        chains = self._chains(request)
        chain = chains[0] if chains else b""
        deepest: _Node | None = None
        node = self._first.get(chain[:HASH_BYTES])
        at = 0
        while node is not None and node.parent is deepest and self._live(node, now):
            deepest = node
            if chain[at : at + len(node.run)] != node.run:
                break
            at += len(node.run)
            node = self._first.get(chain[at : at + HASH_BYTES])
        if deepest is None:
            return -1
        # A table keeps the order of joining: a newer stamp changes nothing, a split copies it.
        return next(iter(deepest.holders))

    def measures(self) -> IndexMeasures:
        """For the metrics; `MeasuresItself`."""
        told = self.statistics
        return IndexMeasures(
            entries=self.entries,
            memory_bytes=self.bytes_estimated,
            lookups={"full": told.full_hits, "partial": told.partial_hits, "none": told.no_hits},
            known_from_peers=told.known_from_peers,
            evictions={
                "capacity": told.evicted_capacity,
                "ttl": told.evicted_ttl,
                "memory": told.evicted_memory,
                "forgotten": told.evicted_forgotten,
            },
        )

    @property
    def bytes_estimated(self) -> int:
        """Process memory of the index, from measured constants: within a fifth of what is measured."""
        return (
            self._nodes * _NODE_BYTES
            + self._holdings * _HOLDING_BYTES
            + self._records * _RECORD_BYTES
            + self._run_blocks * HASH_BYTES
        )

    def blocks_held(self, slot: int) -> int:
        """Blocks that `slot` is believed to hold, expired ones that were not yet swept included."""
        return self._slots[slot].blocks if slot < len(self._slots) else 0

    def capacity_blocks(self, slot: int) -> int:
        """Blocks that `slot` may hold."""
        if slot < len(self._slots):
            return self._slots[slot].capacity_blocks
        return self._settings.lru_capacity_per_server

    # What changes it.

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Assume from `now` on that `slot` holds every full block of `request`.

        Returns (stamp before, stamp after, the blocks that the slot held of each prompt).
        """
        to = self._slot(slot)
        since = self._stamp
        held: list[int] = []
        for chain in self._chains(request):
            # Up to Python 3.11 a comprehension is one more call, and every request passes here.
            held.append(self._record_chain(chain, to, now))  # noqa: PERF401
        return since, self._stamp, held

    # What peers are told, and tell.

    @property
    def signature(self) -> str:
        """Chains mean the same to whoever has the same; `SharedIndex`."""
        return f"prefix:{self.block_tokens}:{HASH_SCHEME}"

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """The chains that `record` of `request` assumes."""
        return self._chains(request)

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """A peer has assumed since `stamp` that `slot` holds the chains `keys`.

        Any order of the same calls, with any repeated, leaves the same matches, but for what they
        push out. Nothing is learnt of what is older than the TTL.
        """
        to = self._slot(slot)
        if stamp < now - self._ttl_s * to.ttl_factor:
            return
        longest = self._blocks_max * HASH_BYTES
        for chain in keys:
            whole = min(len(chain), longest) // HASH_BYTES * HASH_BYTES
            self._learn_chain(chain[:whole], to, min(stamp, now))

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """(slot, stamp, keys) of all that is held, oldest first; each what `learn` takes.

        What changes while it is read may be told as it was or as it is.
        """
        entries = [
            (stamp, slot.number, end)
            for slot in self._slots
            for stamp, end in zip(slot.stamps, slot.ends, strict=True)
            if end.holders.get(slot.number) == stamp
        ]
        entries.sort(key=itemgetter(0))
        for stamp, number, end in entries:
            if end.holders.get(number) == stamp:
                yield number, stamp, (_chain_to(end),)

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Take back what a `record` of `request` added to `slot`.

        What the slot had held before stays, and so does what was recorded there again since.
        """
        since, until, held = recorded
        before = self.entries
        chains = self._chains(request)[: len(held)]
        # Last prompt first: what two prompts share carries the stamp of the last.
        for chain, blocks in zip(reversed(chains), reversed(held), strict=False):
            self._retract_chain(chain, self._slots[slot], blocks, since, until)
        self.statistics.retracted += before - self.entries

    def forget(self, slot: int) -> None:
        """The endpoint in `slot` left or restarted: it holds nothing, its capacity is unknown."""
        if slot >= len(self._slots):
            return
        gone = self._slots[slot]
        while gone.stamps:
            self.statistics.evicted_forgotten += self._evict_oldest_of(gone, gone.blocks)
        assert gone.blocks == 0, f"slot {slot} still holds {gone.blocks} blocks"
        gone.live = 0
        gone.engine_tokens = 0
        gone.uncorrected()
        gone.capacity_blocks = self._capacity_of(gone)
        self._compare_ttls()

    def expire(self, now: Seconds) -> None:
        """Drop what was last routed longer ago than the TTL, oldest first, a bounded number."""
        floor = self._holdings - self._sweep_holdings_max
        if self._ttls_alike:
            cutoff = now - self._ttl_least_s
            for _ in range(self._sweep_holdings_max):
                oldest = self._oldest()
                if oldest is None or oldest.stamps[0] >= cutoff or self._holdings <= floor:
                    break
                self._evict_expired(oldest)
        else:
            self._expire_each(now, floor)
        self._shrink(self._sweep_holdings_max)

    def correct(self, correction: Correction) -> None:
        """With `correctByEngine`: hold less of an endpoint of which too much was predicted, or more."""
        if not self._settings.correct_by_engine:
            return
        slot = self._slot(correction.slot)
        slot.bytes_per_token = correction.bytes_per_token
        error = correction.error
        if error > ERROR_TOLERATED:
            step = 1.0 - min(error, CORRECTION_STEP_MAX)
            held = slot.blocks / self._uncorrected_capacity_of(slot)
            # An endpoint of which all is forgotten says nothing of how much it can hold.
            factor = min(slot.capacity_factor, held) if held else slot.capacity_factor
            slot.capacity_factor = _bounded(factor * step)
            slot.ttl_factor = _bounded(slot.ttl_factor * step)
        elif error < -ERROR_TOLERATED:
            step = 1.0 + min(-error, CORRECTION_STEP_MAX)
            if slot.capacity_bound:
                most = 1.0 if slot.engine_tokens else CORRECTION_MAX
                slot.capacity_factor = min(most, _bounded(slot.capacity_factor * step))
            if slot.ttl_bound:
                slot.ttl_factor = _bounded(slot.ttl_factor * step)
        slot.capacity_bound = slot.ttl_bound = False
        least = slot.blocks - CORRECTED_BLOCKS_MAX
        slot.capacity_blocks = max(self._capacity_of(slot), least)
        self._compare_ttls()
        self._fit(slot)
        # What its own correction takes says nothing of the next window.
        slot.capacity_bound = False

    def stretch(self, slot: int, factor: float) -> None:
        """From now on what was routed to `slot` counts for `factor` times the TTL."""
        stretched = self._slot(slot)
        if stretched.ttl_factor != factor:
            stretched.ttl_factor = factor
            self._compare_ttls()

    def _uncorrected_capacity_of(self, slot: _Slot) -> int:
        """In blocks, by the engine's word or else by the configuration."""
        if not slot.engine_tokens:
            return self._settings.lru_capacity_per_server
        tokens = int(slot.engine_tokens * slot.bytes_per_token) // BYTES_PER_TOKEN
        return max(1, tokens // self.block_tokens)

    def _capacity_of(self, slot: _Slot) -> int:
        return max(1, int(self._uncorrected_capacity_of(slot) * slot.capacity_factor))

    def _compare_ttls(self) -> None:
        """How old the oldest is that counts at every endpoint."""
        factors = {slot.ttl_factor for slot in self._slots} or {1.0}
        self._ttls_alike = len(factors) == 1
        self._ttl_least_s = self._ttl_s * min(factors)

    def _expire_each(self, now: Seconds, floor: int) -> None:
        """As `expire`, of endpoints whose TTLs differ; the next time it goes on where it stopped."""
        left = self._sweep_holdings_max
        for _ in range(len(self._slots)):
            slot = self._slots[self._swept % len(self._slots)]
            cutoff = now - self._ttl_s * slot.ttl_factor
            while slot.stamps and slot.stamps[0] < cutoff:
                if not left or self._holdings <= floor:
                    return
                left -= 1
                self._evict_expired(slot)
            self._swept += 1

    def _evict_expired(self, slot: _Slot) -> None:
        slot.ttl_bound = True
        self.statistics.evicted_ttl += self._evict_oldest_of(slot, slot.blocks)

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """With `autoTune`: the endpoint holds as many tokens as its engine's KV cache."""
        if not self._settings.auto_tune or blocks_total <= 0 or block_size_tokens <= 0:
            return
        tuned = self._slot(slot)
        tuned.engine_tokens = blocks_total * block_size_tokens
        tuned.capacity_factor = min(tuned.capacity_factor, 1.0)
        tuned.capacity_blocks = self._capacity_of(tuned)
        self._fit(tuned)

    # Looking up.

    def _chains(self, request: InferenceRequest) -> Sequence[bytes]:
        chains = request.chains_of(self.block_tokens * BYTES_PER_TOKEN, self._blocks_max)
        longest = self._blocks_max * HASH_BYTES
        for chain in chains:
            # A replayed trace brings its own chains, and the limit may have been lowered.
            if len(chain) > longest:
                return [chain[:longest] for chain in chains]
        return chains

    def _depths(self, path: tuple[tuple[int, int], ...], size: int) -> Ints:
        """The depth of the last node of `path` that each of `size` slots holds."""
        depths = np.zeros(size, dtype=np.int64)
        deeper = 0
        for mask, depth in reversed(path):
            fresh = mask & ~deeper
            if fresh.bit_count() > _SINGLE_BITS_MAX:
                octets = np.frombuffer(fresh.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
                bits = np.unpackbits(octets, count=size, bitorder="little")
                np.copyto(depths, depth, where=bits.view(np.bool_))
            else:
                while fresh:
                    lowest = fresh & -fresh
                    depths[lowest.bit_length() - 1] = depth
                    fresh ^= lowest
            deeper = mask
        return depths

    def _path(self, chain: bytes, now: Seconds) -> tuple[tuple[int, int], ...]:
        """(mask of the slots whose stamp is not too old, depth in blocks) a node, from the top.

        Stamps never increase downwards: each mask is part of the one before it.
        """
        first = self._first
        node = first.get(chain[:HASH_BYTES])
        if node is None:
            return ()
        cutoff = now - self._ttl_least_s
        path: list[tuple[int, int]] = []
        parent = None
        at = 0
        # A node found under another parent is a collision of hashes, not what this prompt says.
        while node is not None and node.parent is parent:
            run = node.run
            end = at + len(run)
            if chain[at:end] == run:
                depth = end // HASH_BYTES
            else:
                depth = at // HASH_BYTES + _common_blocks(run, chain, at)
                end = len(chain)
            mask = node.mask if node.oldest >= cutoff else self._live(node, now)
            if not mask:
                break
            path.append((mask, depth))
            parent = node
            at = end
            node = first.get(chain[at : at + HASH_BYTES])
        return tuple(path)

    def _live(self, node: _Node, now: Seconds) -> int:
        """The slots that hold `node` with a stamp that is not too old, as bits."""
        node.oldest = min(node.holders.values())
        cutoff = now - self._ttl_least_s
        if node.oldest >= cutoff:
            return node.mask
        if self._ttls_alike:
            return sum(1 << slot for slot, stamp in node.holders.items() if stamp >= cutoff)
        ttl_s, slots = self._ttl_s, self._slots
        return sum(
            1 << slot
            for slot, stamp in node.holders.items()
            if stamp >= now - ttl_s * slots[slot].ttl_factor
        )

    def _count_lookup(self, *, best: int, full: bool) -> None:
        statistics = self.statistics
        statistics.lookups += 1
        if full:
            statistics.full_hits += 1
        elif best:
            statistics.partial_hits += 1
        else:
            statistics.no_hits += 1

    # Recording.

    def _slot(self, number: int) -> _Slot:
        slots = self._slots
        while number >= len(slots):
            slots.append(_Slot(len(slots), self._settings.lru_capacity_per_server))
            if self._ttl_least_s != self._ttl_s:
                self._compare_ttls()
        return slots[number]

    def _record_chain(self, chain: bytes, slot: _Slot, now: Seconds) -> int:
        """Stamp the path of `chain`, adding what is missing; return the blocks held before."""
        if len(chain) > slot.capacity_blocks * HASH_BYTES:
            chain = chain[: slot.capacity_blocks * HASH_BYTES]
        if not chain:
            return 0
        stamp = self._stamp = max(now, math.nextafter(self._stamp, math.inf))
        number = slot.number
        first = self._first
        parent: _Node | None = None
        held = at = learnt = 0
        while at < len(chain):
            node = first.get(chain[at : at + HASH_BYTES])
            if node is None:
                parent = self._append(parent, chain[at:], slot, stamp)
                break
            if node.parent is parent and chain[at : at + len(node.run)] != node.run:
                node = self._split(node, _common_blocks(node.run, chain, at))
            if node is None or node.parent is not parent:
                break  # Two blocks of one hash: what follows is not recorded.
            end = at + len(node.run)
            if number in node.holders:
                held = end
                if node.learnt:
                    learnt = node.learnt >> number & 1
                    node.learnt &= ~(1 << number)
                else:
                    learnt = 0
            else:
                self._hold(node, slot)
            node.holders[number] = stamp
            parent = node
            at = end
        if parent is None:
            return 0
        self.statistics.known_from_peers += learnt
        self._enqueue(slot, stamp, parent)
        if slot.blocks > slot.capacity_blocks:
            self._fit(slot)
        if self.bytes_estimated > self._memory_max_bytes:
            self._shrink(_SHRINK_HOLDINGS_MAX)
        return held // HASH_BYTES

    def _hold(self, node: _Node, slot: _Slot) -> None:
        """`slot`, which holds its parent, holds `node` too; its stamp is still to be set."""
        blocks = len(node.run) // HASH_BYTES
        node.mask |= 1 << slot.number
        self._holdings += 1
        self.entries += blocks
        slot.blocks += blocks

    def _learn_chain(self, chain: bytes, slot: _Slot, stamp: Seconds) -> None:
        """As `_record_chain`, for what was recorded elsewhere at `stamp`, be it late or again."""
        if len(chain) > slot.capacity_blocks * HASH_BYTES:
            chain = chain[: slot.capacity_blocks * HASH_BYTES]
        if not chain:
            return
        number = slot.number
        stamp = _unused(slot.stamps, stamp)
        # Own prompts are newer than all that came before them.
        self._stamp = max(self._stamp, stamp)
        first = self._first
        parent: _Node | None = None
        changed: _Node | None = None
        at = 0
        while at < len(chain):
            node = first.get(chain[at : at + HASH_BYTES])
            if node is None:
                parent = changed = self._append(parent, chain[at:], slot, stamp)
                parent.learnt |= 1 << number
                break
            if node.parent is parent and chain[at : at + len(node.run)] != node.run:
                node = self._split(node, _common_blocks(node.run, chain, at))
            if node is None or node.parent is not parent:
                break  # Two blocks of one hash: what follows is not learnt.
            known = node.holders.get(number)
            if known is None:
                self._hold(node, slot)
                node.learnt |= 1 << number
            if known is None or known < stamp:
                node.holders[number] = stamp
                node.oldest = min(node.oldest, stamp)
                changed = node
            parent = node
            at += len(node.run)
        if changed is None:
            return
        self._enqueue_late(slot, stamp, changed)
        self._fit(slot)
        self._shrink(_SHRINK_HOLDINGS_MAX)

    def _append(self, parent: _Node | None, run: bytes, slot: _Slot, stamp: Seconds) -> _Node:
        """Put `run`, which only `slot` holds, below `parent`; return the node it is in."""
        blocks = len(run) // HASH_BYTES
        self.entries += blocks
        self._run_blocks += blocks
        slot.blocks += blocks
        # A conversation that stays on one endpoint stays one node, unless it is told out of turn.
        alone = 1 << slot.number
        if (
            parent is not None
            and not parent.children
            and parent.mask == alone
            and parent.holders[slot.number] == stamp
        ):
            parent.run += run
            return parent
        if parent is not None:
            parent.children += 1
        self._nodes += 1
        self._holdings += 1
        node = _Node(run, parent, {slot.number: stamp}, alone, stamp)
        self._first[run[:HASH_BYTES]] = node
        return node

    def _split(self, node: _Node, blocks: int) -> _Node | None:
        """Cut `node` after `blocks` of its blocks; return the head, `node` itself is the tail.

        The tail keeps its identity because queues point to the deepest node of a prompt. None, and
        nothing done, if its first hash already leads to another node: a collision of hashes.
        """
        cut = blocks * HASH_BYTES
        if node.run[cut : cut + HASH_BYTES] in self._first:
            return None
        head = _Node(
            node.run[:cut], node.parent, dict(node.holders), node.mask, node.oldest, 1, node.learnt
        )
        self._first[head.run[:HASH_BYTES]] = head
        node.run = node.run[cut:]
        node.parent = head
        self._first[node.run[:HASH_BYTES]] = node
        self._nodes += 1
        self._holdings += len(head.holders)
        return head

    def _enqueue(self, slot: _Slot, stamp: Seconds, end: _Node) -> None:
        slot.stamps.append(stamp)
        slot.ends.append(end)
        self._records += 1
        if not slot.queued:
            heapq.heappush(self._fronts, (stamp, slot.number))
            slot.queued = True
        if len(slot.stamps) > 2 * slot.live + 64:
            self._sweep_stale(slot)

    def _enqueue_late(self, slot: _Slot, stamp: Seconds, end: _Node) -> None:
        """As `_enqueue`, for a stamp that may be older than others of `slot`."""
        if not slot.stamps or stamp > slot.stamps[-1]:
            self._enqueue(slot, stamp, end)
            return
        position = bisect.bisect(slot.stamps, stamp)
        slot.stamps.insert(position, stamp)
        slot.ends.insert(position, end)
        self._records += 1
        if not position:
            # What the heap says of this slot must not be above its front.
            self._fronts = [(at, number) for at, number in self._fronts if number != slot.number]
            self._fronts.append((stamp, slot.number))
            heapq.heapify(self._fronts)
        if len(slot.stamps) > 2 * slot.live + 64:
            self._sweep_stale(slot)

    def _sweep_stale(self, slot: _Slot) -> None:
        """Drop the entries whose nodes a newer prompt has stamped since: O(1) a prompt recorded."""
        number = slot.number
        live = [
            (stamp, end)
            for stamp, end in zip(slot.stamps, slot.ends, strict=True)
            if end.holders.get(number) == stamp
        ]
        self._records -= len(slot.stamps) - len(live)
        slot.stamps = deque(stamp for stamp, _ in live)
        slot.ends = deque(end for _, end in live)
        slot.live = len(live)

    # Giving up.

    def _fit(self, slot: _Slot) -> None:
        """Evict from `slot` exactly what is above its capacity."""
        while slot.blocks > slot.capacity_blocks:
            excess = slot.blocks - slot.capacity_blocks
            slot.capacity_bound = True
            self.statistics.evicted_capacity += self._evict_oldest_of(slot, excess)

    def _shrink(self, holdings_max: int) -> None:
        """Evict the oldest of all until the memory limit is kept, or `holdings_max` are gone."""
        floor = self._holdings - holdings_max
        while self.bytes_estimated > self._memory_max_bytes and self._holdings > floor:
            oldest = self._oldest()
            if oldest is None:
                break
            self.statistics.evicted_memory += self._evict_oldest_of(oldest, oldest.blocks)

    def _oldest(self) -> _Slot | None:
        """The slot whose queue has the oldest front; None if all are empty."""
        fronts = self._fronts
        while fronts:
            stamp, number = fronts[0]
            slot = self._slots[number]
            if not slot.stamps:
                heapq.heappop(fronts)
                slot.queued = False
            elif slot.stamps[0] != stamp:
                heapq.heapreplace(fronts, (slot.stamps[0], number))
            else:
                return slot
        return None

    def _evict_oldest_of(self, slot: _Slot, blocks_max: int) -> int:
        """Take from `slot`, tail first, what only its oldest prompt used; return the blocks.

        At most `blocks_max`; then the entry stays in the queue and points to what is left.
        """
        stamp = slot.stamps[0]
        node: _Node | None = slot.ends[0]
        before = slot.blocks
        while node is not None and node.holders.get(slot.number) == stamp:
            left = blocks_max - (before - slot.blocks)
            if left <= 0:
                slot.ends[0] = node
                return before - slot.blocks
            parent = node.parent
            keep = len(node.run) // HASH_BYTES - left
            if keep > 0:
                node = self._cut(node, slot, keep) or parent
            else:
                self._release(node, slot)
                node = parent
        slot.stamps.popleft()
        slot.ends.popleft()
        self._records -= 1
        return before - slot.blocks

    def _cut(self, node: _Node, slot: _Slot, keep: int) -> _Node | None:
        """Leave `slot` the first `keep` blocks of `node`, nothing below; return their node.

        None if a collision of hashes forbids to split: then `slot` keeps nothing of it.
        """
        if len(node.holders) > 1:
            head = self._split(node, keep)
            self._release(node, slot)
            return head
        assert not node.children, "the holders of a node are among those of its parent"
        dropped = len(node.run) // HASH_BYTES - keep
        node.run = node.run[: keep * HASH_BYTES]
        slot.blocks -= dropped
        self.entries -= dropped
        self._run_blocks -= dropped
        return node

    def _release(self, node: _Node, slot: _Slot) -> None:
        """`slot` no longer holds `node`, and nothing below it."""
        blocks = len(node.run) // HASH_BYTES
        del node.holders[slot.number]
        node.mask ^= 1 << slot.number
        node.learnt &= node.mask
        slot.blocks -= blocks
        self.entries -= blocks
        self._holdings -= 1
        if node.holders:
            return
        assert not node.children, "the holders of a node are among those of its parent"
        del self._first[node.run[:HASH_BYTES]]
        if node.parent is not None:
            node.parent.children -= 1
        self._nodes -= 1
        self._run_blocks -= blocks
        # Stale entries may point here for long; they need neither.
        node.run = b""
        node.parent = None

    def _retract_chain(
        self, chain: bytes, slot: _Slot, held: int, since: Seconds, until: Seconds
    ) -> None:
        """Take from `slot` what is deeper than `held` blocks and stamped in (since, until]."""
        path: list[tuple[int, _Node]] = []
        parent = None
        at = 0
        node = self._first.get(chain[:HASH_BYTES])
        while node is not None and node.parent is parent and slot.number in node.holders:
            path.append((at // HASH_BYTES, node))
            parent = node
            at += len(node.run)
            node = self._first.get(chain[at : at + HASH_BYTES])
        while path:
            start, node = path.pop()
            if not since < node.holders[slot.number] <= until:
                return
            if node.children and self._holds_below(node, slot):
                self._reattach(node, slot)
                return
            if start < held:
                keep = held - start
                left = node if keep * HASH_BYTES >= len(node.run) else self._cut(node, slot, keep)
                if left is not None:
                    self._reattach(left, slot)
                    return
            else:
                self._release(node, slot)

    def _holds_below(self, node: _Node, slot: _Slot) -> bool:
        """Whether `slot` holds what goes on behind `node`: a peer may have told of it late.

        With more prompts than can be searched in a turn of the loop it is taken to do so.
        """
        if len(slot.ends) > _SEARCHED_MAX:
            return True
        for stamp, end in zip(slot.stamps, slot.ends, strict=True):
            if end.holders.get(slot.number) == stamp:
                above = end.parent
                while above is not None:
                    if above is node:
                        return True
                    above = above.parent
        return False

    def _reattach(self, node: _Node, slot: _Slot) -> None:
        """Let the entry of the stamp of `node` end there, unless it still ends deeper."""
        stamp = node.holders[slot.number]
        position = _position(slot.stamps, stamp)
        if slot.ends[position].holders.get(slot.number) != stamp:
            slot.ends[position] = node


def _chain_to(end: _Node) -> bytes:
    """The hashes from the first block to the last of `end`."""
    runs: list[bytes] = []
    node: _Node | None = end
    while node is not None:
        runs.append(node.run)
        node = node.parent
    return b"".join(reversed(runs))


def _unused(stamps: deque[Seconds], stamp: Seconds) -> Seconds:
    """The first instant from `stamp` on that is not among the ascending `stamps`."""
    if not stamps or stamp > stamps[-1]:
        return stamp
    position = bisect.bisect_left(stamps, stamp)
    while position < len(stamps) and stamps[position] == stamp:
        stamp = math.nextafter(stamp, math.inf)
        position += 1
    return stamp


def _position(stamps: deque[Seconds], stamp: Seconds) -> int:
    """Where `stamp` is in the ascending `stamps`; most likely near the end."""
    position = len(stamps) - 1
    while stamps[position] > stamp:
        position -= 1
    assert stamps[position] == stamp, "every stamp in the tree has its entry in the queue"
    return position


def _bounded(factor: float) -> float:
    """Within what corrections may come to."""
    return min(max(factor, 1.0 / CORRECTION_MAX), CORRECTION_MAX)


def _common_blocks(run: bytes, chain: bytes, at: int) -> int:
    """Blocks that `run` and `chain` from byte `at` share: the first, but not the whole run.

    Chained hashes that are equal at one block are equal at all before it: a binary search.
    """
    low = 1
    high = min(len(run) - HASH_BYTES, len(chain) - at) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES
        if run[end - HASH_BYTES : end] == chain[at + end - HASH_BYTES : at + end]:
            low = middle
        else:
            high = middle - 1
    return low
