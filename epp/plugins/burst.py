"""Bursts of prompts that share: those that come at one time are sent together to where it is cold.

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
"""Requests of a window where the batch is said to be unlimited."""
_PLACED_BLOCKS_MAX: Final = 262_144
"""(block, endpoint) pairs of a window, about 20 MB; a window that has them takes no more."""


class BalanceBy(StrEnum):
    """What is shared out fairly within a window."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    UNSET = ""
    """As `requests`."""


class BurstSettings(Parameters, frozen=True):
    """`burst-prefix-cache-producer`: the samples of one prompt are prefilled once.

    A request whose blocks are those of an earlier one of its window matches fully where that one
    went, up to `max_per_replica` of them there, then on the endpoint with the least of the window's
    load. With `min_colocate_blocks` one that shares so many leading blocks with others of the
    window matches where the most of it was placed, as long as less than ceil(load / endpoints) was
    placed there, and else where the least was. All others match nowhere.

    Parameters and defaults are the field's. Differs: there requests wait until their window is over
    and are then placed at once, the largest groups and longest prompts first. Here none waits, each
    is placed as it comes: the first of a group goes wherever other scorers send it, a fair share is
    one of the requests so far, and the load counts all requests of the window, those that share
    nothing too. Where the field takes the least loaded endpoint the match here is graded by load,
    because an index does not know who is a candidate. A window that is full matches nothing more;
    there it is an error.
    """

    type_name: ClassVar[str] = "burst-prefix-cache-producer"
    abilities: ClassVar[Abilities] = Abilities(
        counts_blocks=True,
        differs="requests of a window are not held back to be placed together, each is placed as it comes",
    )

    window_duration_ms: Annotated[int, Meta(ge=1, le=10_000)] = 100
    """Of a burst, from its first request on."""
    max_per_replica: Annotated[int, Meta(ge=_UNLIMITED)] = _UNLIMITED
    """Of one group; -1: no limit."""
    block_size_tokens: Annotated[int, Meta(ge=1)] = _BLOCK_TOKENS_MIN
    """Tokens in a block; less than 64 becomes 64."""
    max_prefix_tokens_to_match: Annotated[int, Meta(ge=0)] = 0
    """0: 2,048 blocks."""
    min_colocate_blocks: Annotated[int, Meta(ge=0)] = 0
    """0: only prompts that are equal belong together."""
    max_batch_size: Annotated[int, Meta(ge=_UNLIMITED, le=_BATCH_MAX)] = 1_000
    """Requests of one window; -1: 65,536."""
    balance_by: BalanceBy = BalanceBy.REQUESTS
    """What is shared out fairly; empty: as `requests`."""

    def __post_init__(self) -> None:
        for name, value in (
            ("maxPerReplica", self.max_per_replica),
            ("maxBatchSize", self.max_batch_size),
        ):
            if value == 0:
                raise ValueError(f"{name} must be -1 or more than 0, is 0")

    @property
    def block_tokens(self) -> int:
        """Tokens in a block, in effect."""
        return max(_BLOCK_TOKENS_MIN, self.block_size_tokens)

    @property
    def blocks_max(self) -> int:
        """Blocks of one prompt that are looked at, in effect."""
        wanted = self.max_prefix_tokens_to_match // self.block_tokens
        return min(wanted, _PREFIX_BLOCKS_MAX) if wanted else _PREFIX_BLOCKS_MAX

    def open(self) -> AffinityIndex:
        """A new index, whose first window has not begun."""
        return BurstIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Nothing that lasts is lost: the index starts anew unless nothing changed."""
        return isinstance(index, BurstIndex) and index.settings == self


class BurstIndex:
    """`AffinityIndex`; the unit is a block, and a match is of all blocks, or graded by load."""

    def __init__(self, settings: BurstSettings) -> None:
        self.settings: Final = settings
        self._batch_max = _BATCH_MAX if settings.max_batch_size < 0 else settings.max_batch_size
        self._places = settings.min_colocate_blocks > 0 or settings.balance_by is BalanceBy.TOKENS
        self._ends_at_s: Seconds = -math.inf
        self._window = 0
        self._vacant: set[int] = set()
        """Slots that were left and have not been heard of since."""
        self._clear()

    def _clear(self) -> None:
        """Begin a window."""
        self._window += 1
        self.requests = 0
        """Of the window."""
        self._groups: dict[bytes, dict[int, int]] = {}
        """Digest of all blocks -> slot -> members there, in the order in which they came."""
        self._load: dict[int, int] = {}
        self._placed = HeldBlocks()

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Where the window wants `request` to go."""
        prompts = self._prompts(request)
        total = sum(map(len, prompts))
        matched = np.zeros(slots, dtype=np.int64)
        if total and now < self._ends_at_s and not self._full:
            self._place(prompts, self._groups.get(_digest(prompts), {}), matched, total)
        return Affinity(matched, total)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """`request` is one of the window, at `slot`; the first after a window begins the next."""
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
        """`request` did not go to `slot`."""
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
        """A window that placed something at `slot` begins anew: what it placed is no plan any more."""
        if slot in self._load:
            self._clear()
        self._vacant.add(slot)

    def expire(self, now: Seconds) -> None:
        """A window that is over is nobody's business."""
        if self.requests and now >= self._ends_at_s:
            self._clear()

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Somebody is there; how large its cache is does not matter."""
        self._vacant.discard(slot)

    @property
    def placed_blocks(self) -> int:
        """(block, endpoint) pairs of the window."""
        return self._placed.blocks

    @property
    def _full(self) -> bool:
        return self.requests >= self._batch_max or self._placed.blocks >= _PLACED_BLOCKS_MAX

    def _place(
        self, prompts: list[list[int]], group: dict[int, int], matched: Ints, total: int
    ) -> None:
        """Write into `matched`, by slot, how much the window wants each, up to `total`."""
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
        """Slot -> leading blocks of the prompts placed there, where they are enough."""
        least = self.settings.min_colocate_blocks
        if not least:
            return {}
        shared: dict[int, int] = {}
        for prompt in prompts:
            for slot, held in self._placed.leading(prompt).items():
                shared[slot] = shared.get(slot, 0) + held
        return {slot: held for slot, held in shared.items() if held >= least and slot < slots}

    def _least_loaded(self, matched: Ints, total: int, *, avoid: dict[int, int]) -> None:
        """`total` where nothing is placed, 0 where the most is; `avoid` comes after all others.

        Whoever is a candidate, the least loaded of them matches most.
        """
        loads = np.zeros(len(matched))
        for slot, load in self._load.items():
            if slot < len(loads):
                loads[slot] = load
        last = np.array([slot in avoid for slot in range(len(matched))], dtype=np.bool_)
        # Those to be avoided begin where the others end.
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
    """16 bytes for all blocks of all prompts, and where each prompt ends."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little"))
        digest.update(np.array(prompt, dtype=np.uint64).tobytes())
    return digest.digest()
