"""Co-scheduling of bursts: requests with a common prefix that arrive together go to the same
endpoint.

Source: llm-d/llm-d-router, `requestcontrol/dataproducer/burstprefix`.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins.contract import (
    BYTES_PER_TOKEN,
    Abilities,
    Affinity,
    AffinityIndex,
    HeldBlocks,
    InferenceRequest,
    Ints,
    Parameters,
    Seconds,
    block_lists,
)

_UNLIMITED: Final = -1
_BLOCK_TOKENS_MIN: Final = 64
_PREFIX_BLOCKS_MAX: Final = 2_048
_BATCH_MAX: Final = 65_536
"""Maximum number of requests in a burst window if the parameters set no limit."""
_PLACED_BLOCKS_MAX: Final = 262_144
"""Maximum number of (block, endpoint) pairs stored for a burst window, about 20 MB.

A full window accepts no more requests.
"""


class BalanceBy(StrEnum):
    """The quantity that is shared evenly between endpoints within a burst window."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    UNSET = ""
    """Empty text, which means the same as `requests`."""


class BurstSettings(Parameters, frozen=True):
    """`burst-prefix-cache-producer`: an index that lets equal prompts that arrive within a short
    window be prefilled once.

    A match of a request at an endpoint makes scorers of cached prefixes prefer this endpoint. A
    request whose blocks equal those of an earlier request of its window (a group of equal prompts)
    matches fully at the endpoint of that request. At most `max_per_replica` requests of one group
    match fully at the same endpoint. Further requests of the group match at the endpoint with the smallest
    load of the window. A request also matches if it has at least `min_colocate_blocks` leading
    blocks in common with others of the window. Such a request matches at the endpoint with the most
    leading blocks in common, among those whose load is below ceil(load / endpoints) (a fair share),
    and of several at the one with the smallest load. If none of them is below, it matches at the
    endpoint with the smallest load of the window. All other requests match nowhere.

    Parameters and defaults of this index are those of llm-d-router. The implementation of
    llm-d-router holds requests until their window is over, and then places all of them, largest
    groups and longest prompts first. Homing's index places each request as it arrives, so the first
    request of a group goes where other scorers route it, and a fair share is a share of the
    requests that have arrived so far. The load counts all requests of the window, also those that
    have no prefix in common with others. Where llm-d-router takes the least loaded endpoint, the
    match of this index is graded by load, because an index does not know the candidates. A window
    with the maximum number of requests gives no further matches; in llm-d-router it is an error.
    """

    type_name: ClassVar[str] = "burst-prefix-cache-producer"
    abilities: ClassVar[Abilities] = Abilities(
        counts_blocks=True,
        differs="requests of a window are not held back and placed together; each is placed as it "
        "arrives",
    )

    window_duration_ms: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Length of a burst window in milliseconds. A window begins with its first request."""
    max_per_replica: Annotated[int, Meta(ge=_UNLIMITED)] = _UNLIMITED
    """Maximum number of requests with equal prompts for which one endpoint matches within a burst
    window; -1 for no limit.
    """
    block_size_tokens: Annotated[int, Meta(ge=1)] = _BLOCK_TOKENS_MIN
    """Number of tokens in a block; values below 64 become 64."""
    max_prefix_tokens_to_match: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of tokens of a prompt to compare with others, at most 2,048 blocks; a value
    below one block, such as 0, stands for 2,048 blocks.
    """
    min_colocate_blocks: Annotated[int, Meta(ge=0)] = 0
    """Minimum number of leading blocks that prompts of a burst window must have in common to be
    placed together; at 0, only equal prompts are.
    """
    max_batch_size: Annotated[int, Meta(ge=_UNLIMITED, le=_BATCH_MAX)] = 1_000
    """Maximum number of requests in a burst window; -1 for 65,536."""
    balance_by: BalanceBy = BalanceBy.REQUESTS
    """Quantity that is shared evenly between endpoints within a burst window; empty means
    `requests`.
    """

    def __post_init__(self) -> None:
        for name, value in (
            ("maxPerReplica", self.max_per_replica),
            ("maxBatchSize", self.max_batch_size),
        ):
            if value == 0:
                raise ValueError(f"{name} is 0; it must be -1 or more than 0")

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens in a block: `block_size_tokens`, but at least 64."""
        return max(_BLOCK_TOKENS_MIN, self.block_size_tokens)

    @property
    def blocks_max(self) -> int:
        """Return the maximum number of blocks of a prompt to compare, which is at most 2,048."""
        wanted = self.max_prefix_tokens_to_match // self.block_tokens
        return min(wanted, _PREFIX_BLOCKS_MAX) if wanted else _PREFIX_BLOCKS_MAX

    def open(self) -> AffinityIndex:
        """Return a new index with these settings, whose first burst window has not started."""
        return BurstIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Return True if `index`, the running index, already has these settings. Return False if it
        must be replaced.

        A replaced index loses only its current window.
        """
        return isinstance(index, BurstIndex) and index.settings == self


class BurstIndex:
    """An `AffinityIndex` of the requests in the current burst window, counted in blocks.

    A match covers all blocks of the prompt, or is graded by load.
    """

    def __init__(self, settings: BurstSettings) -> None:
        self.settings: Final = settings
        self._batch_max = _BATCH_MAX if settings.max_batch_size < 0 else settings.max_batch_size
        self._places = settings.min_colocate_blocks > 0 or settings.balance_by is BalanceBy.TOKENS
        self._ends_at_s: Seconds = -math.inf
        self._window = 0
        self._vacant: set[int] = set()
        """Slots whose endpoint left the pool or restarted, until a request is routed there or an
        endpoint there reports the size of its cache.
        """
        self._clear()

    def _clear(self) -> None:
        """Drop the requests of the current burst window."""
        self._window += 1
        self.requests = 0
        """Number of requests recorded in the current burst window."""
        self._groups: dict[bytes, dict[int, int]] = {}
        """Number of requests of the window with equal prompts at each slot, by a digest of the
        prompts, then by slot in order of arrival.
        """
        self._load: dict[int, int] = {}
        self._placed = HeldBlocks()

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return, as a match, how much the burst window prefers each slot for `request`. All blocks
        match at the preferred slots, or fewer at slots with a higher load. No block matches
        anywhere if the window is over or full.
        """
        prompts = self._prompts(request)
        total = sum(map(len, prompts))
        matched = np.zeros(slots, dtype=np.int64)
        if total and now < self._ends_at_s and not self._full:
            self._place(prompts, self._groups.get(_digest(prompts), {}), matched, total)
        return Affinity(matched, total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Add `request`, which was routed to `slot`, to the burst window.

        The first request after the end of a window starts the next one. Return the data that
        `retract` needs, or None if the window is full, so that the request is not added.
        """
        if now >= self._ends_at_s:
            self._clear()
            self._ends_at_s = now + self.settings.window_duration_ms / 1_000
        self._vacant.discard(slot)
        if self._full:
            return None
        prompts = self._prompts(request)
        digest = _digest(prompts)
        group = self._groups.setdefault(digest, {})
        group[slot] = group.get(slot, 0) + 1
        before = self._placed.blocks
        if self._places:
            for prompt in prompts:
                self._placed.add(slot, prompt)
        tokens = self.settings.balance_by is BalanceBy.TOKENS
        load = self._placed.blocks - before if tokens else 1
        self._load[slot] = self._load.get(slot, 0) + load
        self.requests += 1
        return self._window, digest, load

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Remove `request` at `slot` from the burst window. Do nothing if its window is over."""
        if recorded is None:
            return
        window, digest, load = recorded
        group = self._groups.get(digest, {})
        if window != self._window or slot not in group:
            return
        group[slot] -= 1
        if not group[slot]:
            del group[slot]
        self._load[slot] -= load
        self.requests -= 1
        if self._places:
            for prompt in self._prompts(request):
                self._placed.remove(slot, prompt)

    def forget(self, slot: int) -> None:
        """Drop all requests of the burst window if one of them was placed at `slot`, because the
        endpoint there left or restarted.
        """
        if slot in self._load:
            self._clear()
        self._vacant.add(slot)

    def expire(self, now: Seconds) -> None:
        """Drop the requests of the burst window if it is over."""
        if self.requests and now >= self._ends_at_s:
            self._clear()

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Record that an endpoint occupies `slot` again; the size of its cache does not matter to
        this index.
        """
        self._vacant.discard(slot)

    @property
    def placed_blocks(self) -> int:
        """Return the number of (block, endpoint) pairs stored for the burst window."""
        return self._placed.blocks

    @property
    def _full(self) -> bool:
        return self.requests >= self._batch_max or self._placed.blocks >= _PLACED_BLOCKS_MAX

    def _place(
        self, prompts: list[list[int]], group: dict[int, int], matched: Ints, total: int
    ) -> None:
        """Write into `matched`, by slot, how much the burst window prefers each slot for the
        request with `prompts`, from 0 to `total`.
        """
        slots = len(matched)
        most = self.settings.max_per_replica
        if group:
            for slot, members in group.items():
                if slot < slots and (most < 0 or members < most):
                    matched[slot] = total
                    return
            self._least_loaded(matched, total, avoid=group)
            return
        shared = self._shared(prompts, slots)
        if not shared:
            return
        share = math.ceil((sum(self._load.values()) + self._own(total)) / self._endpoints(slots))
        below = {slot: held for slot, held in shared.items() if self._load.get(slot, 0) < share}
        if not below:
            self._least_loaded(matched, total, avoid={})
            return
        longest = max(below.values())
        tied = [slot for slot, held in below.items() if held == longest]
        least = min(self._load.get(slot, 0) for slot in tied)
        for slot in tied:
            if self._load.get(slot, 0) == least:
                matched[slot] = total

    def _shared(self, prompts: list[list[int]], slots: int) -> dict[int, int]:
        """Return the number of leading blocks that `prompts` have in common with prompts that the
        burst window placed at each slot, by slot. Slots below `min_colocate_blocks` are omitted.
        """
        least = self.settings.min_colocate_blocks
        if not least:
            return {}
        shared: dict[int, int] = {}
        for prompt in prompts:
            for slot, held in self._placed.leading(prompt).items():
                shared[slot] = shared.get(slot, 0) + held
        return {slot: held for slot, held in shared.items() if held >= least and slot < slots}

    def _least_loaded(self, matched: Ints, total: int, *, avoid: dict[int, int]) -> None:
        """Set `matched` by the load of each slot in the burst window: to `total` without load, and
        linearly down to 0 at the slot that ranks last, in whole blocks.

        The load of a slot in `avoid` counts as higher by the largest load plus 1, so that it ranks
        after all others. The least loaded candidate has the largest match, whatever the set of
        candidates is.
        """
        loads = np.zeros(len(matched))
        for slot, load in self._load.items():
            if slot < len(loads):
                loads[slot] = load
        last = np.array([slot in avoid for slot in range(len(matched))], dtype=np.bool_)
        # Slots to avoid rank after the most loaded of the others.
        ranks = loads + last * (loads.max() + 1.0)
        matched[:] = np.rint(total * (1.0 - ranks / max(float(ranks.max()), 1.0)))

    def _own(self, total: int) -> int:
        return total if self.settings.balance_by is BalanceBy.TOKENS else 1

    def _endpoints(self, slots: int) -> int:
        return max(1, slots - sum(slot < slots for slot in self._vacant))

    def _prompts(self, request: InferenceRequest) -> list[list[int]]:
        settings = self.settings
        chains = request.chains_of(settings.block_tokens * BYTES_PER_TOKEN, settings.blocks_max)
        return block_lists(chains, settings.blocks_max)


def _digest(prompts: list[list[int]]) -> bytes:
    """Return a digest of 16 bytes of all blocks of all prompts, including where each
    prompt ends.
    """
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little"))
        digest.update(np.array(prompt, dtype=np.uint64).tobytes())
    return digest.digest()
