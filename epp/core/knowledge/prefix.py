"""The approximate prefix index: estimates of the prompt prefixes that each endpoint has cached.

The index receives nothing from the engines. It assumes that an endpoint holds the prompts that were
routed to it (design D5). A prompt is dropped when it is older than the TTL, when newer prompts
displace it, when the endpoint did not serve it, or when the endpoint leaves or restarts.

**A compressed tree.** A block's hash is chained (`core/prompt/blocks`), so it identifies the whole
prompt up to that block. One flat dict from the first hash of each run of blocks to its node
therefore serves as the table of children of all nodes. A node holds a run of consecutive hashes
and, by endpoint slot, the stamp of the last prompt through it. A slot holds all of a run or nothing
of it. If a prompt ends or branches off inside a run, the node is split. A look-up takes one dict
access and one comparison of bytes per node, not per block. The holders of a node are among those of
its parent. Overwriting each slot's depth on the way down therefore leaves exactly the blocks that
it holds without a gap.

**Recency.** Stamps increase with every recorded prompt. A prompt stamps its whole path, so stamps
never increase on the way down. Each slot has a queue of (stamp, deepest node of that prompt). The
oldest content of a slot belongs to the front of its queue: the nodes that still carry that stamp,
from that deepest node upwards. Everything below them is older, and therefore already gone. A newer
prompt through the same nodes makes the entry stale. Stale entries are skipped, and removed when
they are the majority. Eviction thus removes the ends of prompts before their beginnings, and
exactly as many blocks as needed.

**Peers.** A peer's record is inserted with its own stamp at its position among the others. The same
records in any order give the same estimates. Content that only a peer has recorded is marked until
it is recorded here.

**Corrections.** If engines count their cache hits (`hit_accuracy`), the capacity and the TTL of an
endpoint are adapted in small steps within bounds. If too much was predicted, both shrink; the
capacity starts from the current content, so that it has an effect at once. If too little was
predicted, each limit that removed content since the last step grows.

**No cycles.** Nodes point only to their parents. They are invisible to the garbage collector, which
would otherwise pause for tens of milliseconds on a million tracked objects.
"""

import bisect
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
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
"""Minimum number of tokens in a block of the approximate prefix index; smaller blocks use more
memory without a gain. The reference picker has the same limit.
"""

CHAIN_BLOCKS_MAX: Final = 65_536
"""Maximum number of blocks of a prompt that are looked up, even if the settings give a higher limit
or none: 4 million tokens in blocks of 64. It bounds the depth of the tree, which Python frees
recursively (a stack of 8 MB ends at 110,000).
"""

# Bytes of process memory on CPython 3.11, fitted to the growth that `bench/index.py` measures.
# "estimate / memory" there is 1.02 to 1.05 for prompts of 4 to 128 blocks.
_NODE_BYTES: Final = 430
"""Memory in bytes of a tree node, its run without the hashes, its table of up to five holders, and
its row in the dict.
"""
_HOLDING_BYTES: Final = 40
"""Memory in bytes of one entry in a tree node's table of the slots that have it cached."""
_RECORD_BYTES: Final = 42
"""Memory in bytes of one entry in an endpoint's queue of prompts, with its stamp."""

_SHRINK_HOLDINGS_MAX: Final = 512
"""Number of (node, slot) pairs after whose removal the record of one prompt stops to meet the
memory limit. Most prompts add fewer pairs; `expire` removes the rest.
"""
_SEARCHED_MAX: Final = 4_096
"""Maximum number of an endpoint's prompts that one `retract` searches for content that it must not
remove.
"""

CORRECTION_MAX: Final = 8.0
"""Largest factor by which corrections raise or lower the capacity and the TTL of an endpoint. The
capacity never exceeds the cache size that the engine reported.
"""
CORRECTION_STEP_MAX: Final = 0.2
"""Largest relative change of an endpoint's capacity and TTL by one correction, which follows from
one window of the comparison of cache hits. A reduction of the capacity starts from the current
content if that is less.
"""
ERROR_TOLERATED: Final = 0.02
"""Error of the predicted cache hits, as a share of the prompt tokens, up to which capacity and TTL
are not corrected.
"""
CORRECTED_BLOCKS_MAX: Final = 4_096
"""Maximum number of blocks that one correction removes from an endpoint; the next correction
continues.
"""

_SINGLE_BITS_MAX: Final = 12
"""Number of slots up to which it is faster to write their numbers of cached blocks one by one than
through an array of bits.
"""
_MARKS_KEPT_MAX: Final = 64
"""Maximum number of sets of slots that are kept as arrays: half a megabyte for 1,000 endpoints."""


class PrefixIndexSettings(
    Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """`approx-prefix-cache-producer`: an index that estimates the cached prefixes of each endpoint.

    It uses past decisions. Parameters are those of the reference picker, and three additional ones.
    """

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
    """True if the capacity of each endpoint follows the cache size on its engine's metrics page, if
    reported.
    """
    block_size_tokens: Annotated[int, Meta(ge=1)] = BLOCK_TOKENS_MIN
    """Number of tokens in a block; values below 64 become 64."""
    block_size: Annotated[int, Meta(ge=1)] | None = None
    """Deprecated name of `blockSizeTokens`; it applies while that one has its default."""
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 31_250
    """Maximum number of blocks that an endpoint is assumed to have cached, if its engine reports no
    cache size or `autoTune` is off.
    """
    max_prefix_tokens_to_match: Annotated[int, Meta(ge=0)] = 131_072
    """Maximum number of prompt tokens to look up; 0 to use `maxPrefixBlocksToMatch` instead."""
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=0)] = 2_048
    """Maximum number of prompt blocks to look up if the token limit is 0; if both are 0, 65,536."""
    ttl: Duration = Duration(300.0)
    """Time since a block's prompt was last sent to an endpoint after which the block is no longer
    assumed to be cached there.
    """
    memory_max_bytes: Annotated[int, Meta(ge=1)] = 268_435_456
    """Maximum estimated memory of the whole index in bytes; above it, the oldest content is dropped
    first.
    """
    correct_by_engine: bool = False
    """True if capacity and TTL of each endpoint are corrected when its engine counts fewer or more
    cache hits than predicted.
    """

    def __post_init__(self) -> None:
        check_above_zero("ttl", self.ttl)

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens in a block that results from these settings."""
        size = self.block_size_tokens
        if self.block_size is not None and size == BLOCK_TOKENS_MIN:
            size = self.block_size
        return max(BLOCK_TOKENS_MIN, size)

    @property
    def blocks_max(self) -> int:
        """Return the maximum number of blocks of a prompt to look up that results from these
        settings.
        """
        limit = self.max_prefix_blocks_to_match or CHAIN_BLOCKS_MAX
        if self.max_prefix_tokens_to_match:
            limit = self.max_prefix_tokens_to_match // self.block_tokens
        return min(limit, CHAIN_BLOCKS_MAX)

    def open(self) -> AffinityIndex:
        """Return a new, empty prefix index."""
        return PrefixIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to `index`, which keeps its content. Return False, without a change,
        if it is an index of another kind or its block size differs.
        """
        return isinstance(index, PrefixIndex) and index.configure(self)


class PrefixStatistics(Struct):
    """Counts since the approximate prefix index was opened. Evictions count (block, endpoint)
    pairs.
    """

    lookups: int = 0
    """Number of calls of `match` for requests with at least one full block; each counts as a full
    hit, a partial hit or no hit.
    """
    full_hits: int = 0
    """Number of look-ups in which each prompt of the request had all its full blocks cached at some
    endpoint.
    """
    partial_hits: int = 0
    no_hits: int = 0
    evicted_capacity: int = 0
    """Number of blocks evicted because they exceeded the capacity of their endpoint."""
    evicted_ttl: int = 0
    evicted_memory: int = 0
    """Number of blocks evicted because the memory of the index was above its limit."""
    evicted_forgotten: int = 0
    """Number of blocks dropped because their endpoint left or restarted."""
    retracted: int = 0
    """Number of blocks removed again because the endpoint did not serve the request after all."""
    known_from_peers: int = 0
    """Number of prompts that this picker routed to an endpoint where the prompt's last cached block
    was known only from a peer's decision.
    """


class _Prompts(Struct, frozen=True, gc=False):
    """The prompts of a request that were recorded for a slot. The lease of the request stores this,
    and the garbage collector does not examine it.
    """

    since: Seconds
    """Last stamp of the index before the prompts were recorded."""
    until: Seconds
    """Last stamp of the index afterwards."""
    held: tuple[int, ...]
    """Number of blocks of each prompt that the slot had before."""


class _Node(Struct, gc=False, eq=False):
    """A node of the prefix tree: a run of consecutive blocks, all of which each slot in `holders`
    has cached.

    It has no reference cycles, as `gc=False` requires, because it points only upwards.
    """

    run: bytes
    parent: "_Node | None"
    holders: dict[int, Seconds]
    """Stamp of the last prompt that was recorded through this node, by the slot of the endpoint.
    The slots are among those of the parent.
    """
    mask: int
    """Bit mask of the slots that have this tree node cached, which are the keys of `holders`."""
    oldest: Seconds
    """Lower bound of the stamps in `holders`. Lower stamps are older."""
    children: int = 0
    learnt: int = 0
    """Bit mask of the slots for which only a peer has recorded this tree node."""


class _Slot:
    """The blocks that one endpoint is estimated to have cached, and the queue of the prompts from
    which they come, oldest first.
    """

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
        """Cache size in tokens that the endpoint's engine reported; 0 if it reported none or if
        `autoTune` is off.
        """
        self.uncorrected()
        self.blocks = 0
        self.stamps: deque[Seconds] = deque()
        self.ends: deque[_Node] = deque()
        """Deepest tree node of each prompt in the queue, at the same position as the prompt's stamp
        in `stamps`.
        """
        self.live = 0
        """Number of entries of the endpoint's queue of prompts that were left when outdated entries
        were last removed.
        """
        self.queued = False
        """True if this slot is in the heap that orders slots by their oldest stamp."""

    def uncorrected(self) -> None:
        """Reset the corrected capacity, TTL and bytes per token to their configured values."""
        self.capacity_factor = 1.0
        self.ttl_factor = 1.0
        self.bytes_per_token = float(BYTES_PER_TOKEN)
        self.capacity_bound = self.ttl_bound = False
        """`capacity_bound` is True if the capacity has removed blocks of this slot since the last
        correction, `ttl_bound` if the TTL has.
        """


class PrefixIndex:
    """An `AffinityIndex` over prompt prefixes; the unit is one full block of `block_tokens` tokens.

    It depends only on its arguments: the same calls give the same answers in any process.
    """

    def __init__(self, settings: PrefixIndexSettings, *, sweep_holdings_max: int = 4_096) -> None:
        """Open an empty index. `sweep_holdings_max` is the number of removed (node, slot) pairs at
        which each of the two steps of `expire` stops; a pair takes about 2 µs.
        """
        self.block_tokens: Final = settings.block_tokens
        self.statistics: Final = PrefixStatistics()
        self.entries = 0
        """Number of (block, endpoint) pairs in the index, including expired ones that are not yet
        removed.
        """
        self._sweep_holdings_max = sweep_holdings_max
        self._first: dict[bytes, _Node] = {}
        self._slots: list[_Slot] = []
        self._fronts: list[tuple[Seconds, int]] = []
        """Heap of (lower bound of a slot's oldest stamp, slot), which gives the slot with the
        oldest content.
        """
        self._stamp: Seconds = -math.inf
        self._nodes = 0
        self._holdings = 0
        self._run_blocks = 0
        self._records = 0
        self._memory_share = 1.0
        self._ttl_least_s = math.inf
        self._ttls_alike = True
        self._swept = 0
        """Slot at which the next `expire` starts, if the TTLs of endpoints differ."""
        self.configure(settings)

    def configure(self, settings: PrefixIndexSettings) -> bool:
        """Apply capacity, TTL, limits and `autoTune` of `settings`. Return False, without a change,
        if the block size differs.

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
        """Limit the memory of the index to `share` of `memoryMaxBytes`; the excess is dropped with
        later prompts and sweeps.
        """
        self._memory_share = share
        self._memory_max_bytes = int(share * self._settings.memory_max_bytes)

    # Look-ups.

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return the number of leading full blocks that each slot is estimated to have cached,
        summed over the prompts of the request. Count the look-up in `statistics`.
        """
        chains = self._chains(request)
        size = max(slots, len(self._slots), 1)
        if len(chains) == 1:
            path = self._path(chains[0], now)
            deepest, total = path[-1][1] if path else 0, len(chains[0]) // HASH_BYTES
            if total:
                self._count_lookup(best=deepest, full=deepest == total)
            depths = self._depths(path, size)
            if size == slots:
                return Affinity(depths, total, most=deepest)
            return Affinity(depths[:slots], total)
        paths: dict[tuple[tuple[int, int], ...], int] = {}
        best = 0
        full = True
        for chain in chains:
            path = self._path(chain, now)
            deepest = path[-1][1] if path else 0
            best += deepest
            full = full and deepest == len(chain) // HASH_BYTES
            if path:
                # Prompts of one batch share most of their path, and creating an array per path is
                # the main cost.
                paths[path] = paths.get(path, 0) + 1
        matched = np.zeros(size, dtype=np.int64)
        for path, prompts in paths.items():
            matched += prompts * self._depths(path, size)
        total = sum(map(len, chains)) // HASH_BYTES
        if total:
            self._count_lookup(best=best, full=full)
        return Affinity(matched[:slots], total)

    def first_holder(self, request: InferenceRequest, now: Seconds) -> int:
        """Return the slot to which the part of the first prompt that is in this index was first
        sent. Return -1 if no part of it is.

        It is the first of the current holders of the deepest node that the prompt reaches, wholly
        or in part. A peer's decision counts from the time at which this picker received it.
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
        # A table keeps the order of joining: a newer stamp does not change it, and a split copies
        # it.
        return next(iter(deepest.holders))

    def measures(self) -> IndexMeasures:
        """Return the entries, the memory, the look-ups and the evictions of this index."""
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
        """Return the estimated memory of this index in bytes, from measured constants; the error is
        below 20 %.
        """
        return (
            self._nodes * _NODE_BYTES
            + self._holdings * _HOLDING_BYTES
            + self._records * _RECORD_BYTES
            + self._run_blocks * HASH_BYTES
        )

    def blocks_held(self, slot: int) -> int:
        """Return the number of blocks that `slot` is estimated to have cached, including expired
        ones that are not yet removed.
        """
        return self._slots[slot].blocks if slot < len(self._slots) else 0

    def capacity_blocks(self, slot: int) -> int:
        """Return the maximum number of blocks that the endpoint in `slot` is assumed to have
        cached.
        """
        if slot < len(self._slots):
            return self._slots[slot].capacity_blocks
        return self._settings.lru_capacity_per_server

    # Changes.

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Assume from `now` on that `slot` has every full block of `request` cached, up to its
        capacity. Older content is evicted if a limit is exceeded.

        Return the data with which `retract` undoes the call. Its `held` has the number of blocks of
        each prompt that the slot had before.
        """
        to = self._slot(slot)
        since = self._stamp
        chains = self._chains(request)
        # Nearly every request has one prompt. A comprehension costs a call up to Python 3.11.
        if len(chains) == 1:
            held: tuple[int, ...] = (self._record_chain(chains[0], to, now),)
        else:
            held = tuple([self._record_chain(chain, to, now) for chain in chains])
        return _Prompts(since, self._stamp, held)

    # Sharing with peers.

    @property
    def signature(self) -> str:
        """Return a text that describes the keys of this index. Pickers with equal signatures
        understand each other's hash chains.
        """
        return f"prefix:{self.block_tokens}:{HASH_SCHEME}"

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """Return the hash chains that `record` of `request` adds to this index."""
        return self._chains(request)

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """Record that a peer has assumed since `stamp` that `slot` holds the chains `keys`.

        The same calls in any order, with repetitions, give the same matches, except for what they
        displace. Records older than the TTL are ignored.
        """
        to = self._slot(slot)
        if stamp < now - self._ttl_s * to.ttl_factor:
            return
        longest = self._blocks_max * HASH_BYTES
        for chain in keys:
            whole = min(len(chain), longest) // HASH_BYTES * HASH_BYTES
            self._learn_chain(chain[:whole], to, min(stamp, now))

    def shared_entries(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Yield (slot, stamp, keys) of the whole content, oldest first, as arguments for `learn`.

        Content that changes meanwhile may be yielded in its old or its new state.
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
        """Undo what `record` of `request` added to `slot`. `recorded` is its result.

        Content that the slot had before stays, and so does content that was recorded again since
        then.
        """
        before, held = self.entries, recorded.held
        chains = self._chains(request)[: len(held)]
        # The last prompt comes first, because blocks that two prompts share carry the stamp of the
        # last.
        for chain, blocks in zip(reversed(chains), reversed(held), strict=False):
            self._retract_chain(chain, self._slots[slot], blocks, recorded.since, recorded.until)
        self.statistics.retracted += before - self.entries

    def forget(self, slot: int) -> None:
        """Drop the content and the capacity of `slot`, because its endpoint left or restarted."""
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
        """Remove content that was last sent to its endpoint longer ago than the TTL, oldest first,
        then content above the memory limit. Each step stops once `sweep_holdings_max` (node, slot)
        pairs are removed.
        """
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
        """Adapt the capacity and the TTL of an endpoint to the error of its predicted cache hits,
        if `correctByEngine` is set. Evict at most `CORRECTED_BLOCKS_MAX` blocks above the new
        capacity.
        """
        if not self._settings.correct_by_engine:
            return
        slot = self._slot(correction.slot)
        slot.bytes_per_token = correction.bytes_per_token
        error = correction.error
        if error > ERROR_TOLERATED:
            step = 1.0 - min(error, CORRECTION_STEP_MAX)
            held = slot.blocks / self._uncorrected_capacity_of(slot)
            # An endpoint without any content says nothing about its capacity.
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
        # Blocks removed by the correction itself must not count for the next window.
        slot.capacity_bound = False

    def stretch(self, slot: int, factor: float) -> None:
        """Use `factor` times the configured TTL for the content of `slot` from now on, instead of
        an earlier factor or correction.
        """
        stretched = self._slot(slot)
        if stretched.ttl_factor != factor:
            stretched.ttl_factor = factor
            self._compare_ttls()

    def _uncorrected_capacity_of(self, slot: _Slot) -> int:
        """Return the capacity of `slot` in blocks before corrections: the size that its engine
        reported, or the configured one.
        """
        if not slot.engine_tokens:
            return self._settings.lru_capacity_per_server
        tokens = int(slot.engine_tokens * slot.bytes_per_token) // BYTES_PER_TOKEN
        return max(1, tokens // self.block_tokens)

    def _capacity_of(self, slot: _Slot) -> int:
        return max(1, int(self._uncorrected_capacity_of(slot) * slot.capacity_factor))

    def _compare_ttls(self) -> None:
        """Compute the shortest TTL of all endpoints, and whether all TTLs are equal."""
        factors = {slot.ttl_factor for slot in self._slots} or {1.0}
        self._ttls_alike = len(factors) == 1
        self._ttl_least_s = self._ttl_s * min(factors)

    def _expire_each(self, now: Seconds, floor: int) -> None:
        """Remove expired content if endpoints have different TTLs; the next call continues at the
        slot where this one stopped.
        """
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
        """Set the capacity of `slot` to the tokens of its engine's KV cache, times its correction
        of at most 1, and evict the excess. Do nothing if `autoTune` is off or a number is not above
        0.
        """
        if not self._settings.auto_tune or blocks_total <= 0 or block_size_tokens <= 0:
            return
        tuned = self._slot(slot)
        tuned.engine_tokens = blocks_total * block_size_tokens
        tuned.capacity_factor = min(tuned.capacity_factor, 1.0)
        tuned.capacity_blocks = self._capacity_of(tuned)
        self._fit(tuned)

    # Look-up of paths.

    def _chains(self, request: InferenceRequest) -> Sequence[bytes]:
        chains = request.chains_of(self.block_tokens * BYTES_PER_TOKEN, self._blocks_max)
        longest = self._blocks_max * HASH_BYTES
        for chain in chains:
            # A replayed trace has its own chains, and the limit may have been lowered since.
            if len(chain) > longest:
                return [chain[:longest] for chain in chains]
        return chains

    def _depths(self, path: tuple[tuple[int, int], ...], size: int) -> Ints:
        """Return int64[size]: the number of leading blocks that each slot has cached, by its
        deepest node in `path`.
        """
        if path and path[0][0].bit_count() > _SINGLE_BITS_MAX:
            # The root of many prompts, such as a system prompt, has the same holders for long.
            mask, depth = path[0]
            depths: Ints = _kept_marks(mask, size) * np.array(depth)
            path = path[1:]
        else:
            depths = np.zeros(size, dtype=np.int64)
        deeper = 0
        for mask, depth in reversed(path):
            fresh = mask & ~deeper
            if fresh.bit_count() > _SINGLE_BITS_MAX:
                np.copyto(depths, depth, where=_marks(fresh, size).view(np.bool_))
            else:
                while fresh:
                    # The highest bit is found in fewer steps than the lowest, and the rest of the
                    # mask gets shorter.
                    highest = fresh.bit_length() - 1
                    depths[highest] = depth
                    fresh ^= 1 << highest
            deeper = mask
        return depths

    def _path(self, chain: bytes, now: Seconds) -> tuple[tuple[int, int], ...]:
        """Return (slots, depth) for each node on the path of `chain`, from the root. Slots are a
        bit mask of the endpoints that have the node with a recent stamp, and depth is the number of
        blocks up to the end of the node.

        Stamps never increase on the way down, so each mask is a subset of the one before it.
        """
        first = self._first
        node = first.get(chain[:HASH_BYTES])
        if node is None:
            return ()
        cutoff = now - self._ttl_least_s
        path: list[tuple[int, int]] = []
        parent = None
        at = 0
        # A node found under another parent is a hash collision, not a part of this prompt.
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
        """Return a bit mask of the slots that have `node` cached with a stamp within their TTL."""
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
        """Set the stamp of `slot` on the nodes of the path of `chain`, and add missing nodes.
        Return the number of blocks of the chain that the slot had before.
        """
        if len(chain) > slot.capacity_blocks * HASH_BYTES:
            chain = chain[: slot.capacity_blocks * HASH_BYTES]
        if not chain:
            return 0
        stamp = math.nextafter(self._stamp, math.inf)
        if stamp < now:  # noqa: PLR1730  a call takes longer
            stamp = now
        self._stamp = stamp
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
                break  # A hash collision: the rest is not recorded.
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
        """Add `slot`, which has the parent cached, to the holders of `node`. The caller sets the
        stamp.
        """
        blocks = len(node.run) // HASH_BYTES
        node.mask |= 1 << slot.number
        self._holdings += 1
        self.entries += blocks
        slot.blocks += blocks

    def _learn_chain(self, chain: bytes, slot: _Slot, stamp: Seconds) -> None:
        """Record a hash chain that another picker recorded for `slot` at `stamp`, possibly late or
        repeated.
        """
        if len(chain) > slot.capacity_blocks * HASH_BYTES:
            chain = chain[: slot.capacity_blocks * HASH_BYTES]
        if not chain:
            return
        number = slot.number
        stamp = _unused(slot.stamps, stamp)
        # The stamps of own prompts are newer than all earlier ones.
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
                break  # A hash collision: the rest is not learnt.
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
        """Add a node with `run`, which only `slot` holds, below `parent`, or append the run to the
        parent. Return the node with the run.
        """
        blocks = len(run) // HASH_BYTES
        self.entries += blocks
        self._run_blocks += blocks
        slot.blocks += blocks
        # A conversation that stays at one endpoint stays one node, unless its parts arrive out of
        # order.
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
        """Divide `node` after its first `blocks` blocks. Return the new upper node; `node` itself
        becomes the lower one.

        The lower node keeps its identity, because queues point to the deepest node of a prompt.
        Return None, without a change, if its first hash already leads to another node (a hash
        collision).
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
        """Insert the node `end` into the queue of `slot` at the position of `stamp`, which may be
        older than those of other entries.
        """
        if not slot.stamps or stamp > slot.stamps[-1]:
            self._enqueue(slot, stamp, end)
            return
        position = bisect.bisect(slot.stamps, stamp)
        slot.stamps.insert(position, stamp)
        slot.ends.insert(position, end)
        self._records += 1
        if not position:
            # The heap's bound for this slot must not be above its front.
            self._fronts = [(at, number) for at, number in self._fronts if number != slot.number]
            self._fronts.append((stamp, slot.number))
            heapq.heapify(self._fronts)
        if len(slot.stamps) > 2 * slot.live + 64:
            self._sweep_stale(slot)

    def _sweep_stale(self, slot: _Slot) -> None:
        """Drop the entries of the queue of `slot` whose nodes have a newer stamp. The cost is O(1)
        per recorded prompt.
        """
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

    # Eviction.

    def _fit(self, slot: _Slot) -> None:
        """Evict from `slot` exactly the blocks above its capacity."""
        while slot.blocks > slot.capacity_blocks:
            excess = slot.blocks - slot.capacity_blocks
            slot.capacity_bound = True
            self.statistics.evicted_capacity += self._evict_oldest_of(slot, excess)

    def _shrink(self, holdings_max: int) -> None:
        """Evict the oldest content of all slots until the memory limit is met or `holdings_max`
        (node, slot) pairs are removed.
        """
        floor = self._holdings - holdings_max
        while self.bytes_estimated > self._memory_max_bytes and self._holdings > floor:
            oldest = self._oldest()
            if oldest is None:
                break
            self.statistics.evicted_memory += self._evict_oldest_of(oldest, oldest.blocks)

    def _oldest(self) -> _Slot | None:
        """Return the slot whose queue has the oldest first entry, or None if all queues are empty."""
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
        """Evict from `slot` the blocks that only its oldest prompt used, the end of the prompt
        first. Return the number of evicted blocks.

        At most `blocks_max` blocks are evicted; then the entry stays in the queue and points to the
        rest.
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
        """Let `slot` have only the first `keep` blocks of `node` cached. Return the node with these
        blocks.

        Return None if a hash collision prevents the split of the node; `slot` then keeps nothing of
        it.
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
        """Remove `slot` from the holders of `node`. The slot must not be a holder of any node
        below.
        """
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
        # Stale entries may point to this node for long, and need neither of these values.
        node.run = b""
        node.parent = None

    def _retract_chain(
        self, chain: bytes, slot: _Slot, held: int, since: Seconds, until: Seconds
    ) -> None:
        """Remove `slot` from the holders of the part of `chain` beyond its first `held` blocks.
        Only nodes whose stamp is above `since` and at most `until` are affected.
        """
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
        """Return whether `slot` has a node below `node` cached, which a peer may have shared late.
        Return True without a search if `slot` has too many prompts to search in one turn of the
        event loop.
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
        """Let the entry of the queue of `slot` with the stamp of `node` point to `node`, unless it
        already points to a node with that stamp.
        """
        stamp = node.holders[slot.number]
        position = _position(slot.stamps, stamp)
        if slot.ends[position].holders.get(slot.number) != stamp:
            slot.ends[position] = node


def _chain_to(end: _Node) -> bytes:
    """Return the hash chain from the first block of a prompt to the last block of the tree node
    `end`.
    """
    runs: list[bytes] = []
    node: _Node | None = end
    while node is not None:
        runs.append(node.run)
        node = node.parent
    return b"".join(reversed(runs))


def _unused(stamps: deque[Seconds], stamp: Seconds) -> Seconds:
    """Return the earliest time, `stamp` or later, that is not among the ascending `stamps` yet."""
    if not stamps or stamp > stamps[-1]:
        return stamp
    position = bisect.bisect_left(stamps, stamp)
    while position < len(stamps) and stamps[position] == stamp:
        stamp = math.nextafter(stamp, math.inf)
        position += 1
    return stamp


def _position(stamps: deque[Seconds], stamp: Seconds) -> int:
    """Return the position of `stamp` in the ascending `stamps`, searched from the end, where it
    usually is.
    """
    position = len(stamps) - 1
    while stamps[position] > stamp:
        position -= 1
    assert stamps[position] == stamp, "every stamp in the tree has its entry in the queue"
    return position


def _bounded(factor: float) -> float:
    """Return the correction factor `factor`, limited to the range from 1/`CORRECTION_MAX` to
    `CORRECTION_MAX`.
    """
    return min(max(factor, 1.0 / CORRECTION_MAX), CORRECTION_MAX)


def _marks(mask: int, size: int) -> npt.NDArray[np.uint8]:
    """Return uint8[size]: 1 for each slot in the bit mask `mask`, else 0."""
    octets = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(octets, count=size, bitorder="little")


@lru_cache(maxsize=_MARKS_KEPT_MAX)
def _kept_marks(mask: int, size: int) -> Ints:
    """Return the result of `_marks` as int64[size]; readers must not change it."""
    return _marks(mask, size).astype(np.int64)


def _common_blocks(run: bytes, chain: bytes, at: int) -> int:
    """Return the number of leading blocks that `run` and the part of `chain` from byte `at` have in
    common, at least 1 and less than all of `run`.

    Chained hashes that are equal at one block are equal at all earlier ones, which allows a binary
    search.
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
