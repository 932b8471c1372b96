"""A prefix index that also reports the load of each endpoint in blocks: those of running requests,
and recent misses.
"""

from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta, Struct

from epp.plugins import contract
from epp.plugins.contract import Abilities, Affinity, AffinityIndex, InferenceRequest, Seconds


class BlockLoadSettings(contract.PrefixIndexSettings, frozen=True, kw_only=True):
    """`block-load-producer`: an `approx-prefix-cache-producer` that also reports three columns of
    load for each endpoint.

    - `active_blocks`: number of blocks of the requests in flight at the endpoint; a block that
      several share counts once;
    - `new_blocks`: number of blocks of this prompt that would be added to `active_blocks`;
    - `recent_miss_blocks`: number of blocks that prompts sent to the endpoint missed, multiplied by
      `miss_decay` with every later request to any endpoint.

    Blocks of this index have 64 tokens or more, where engines count blocks of 16 or 32. Blocks of
    answers are not included.
    """

    type_name: ClassVar[str] = "block-load-producer"
    abilities: ClassVar[Abilities] = Abilities(
        origin=contract.Origin.DECIDED,
        counts_blocks=True,
        shares=True,
        counts_inflight=True,
        corrected=True,
        limits_memory=True,
        measures=True,
    )

    miss_decay: Annotated[float, Meta(ge=0, le=1)] = 0.97
    active_blocks_max: Annotated[int, Meta(ge=1)] = 500_000
    """Number of counted blocks of running requests at all endpoints together, about 80 bytes each,
    from which on the blocks of further requests are not counted.
    """

    def open(self) -> AffinityIndex:
        """Return a new, empty index of cached blocks and load, with these settings as its
        parameters.
        """
        return BlockLoadIndex(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply all parameters except the block size to the running index `index`.

        Return False, and change nothing, if the block size differs, or if `index` has another type.
        """
        return isinstance(index, BlockLoadIndex) and index.adopt(self)


class _Load(Struct):
    """The load that one recorded request added to its endpoint."""

    generation: int
    missed: int
    pick: int
    lengths: list[int]
    """Number of blocks of each of the request's prompts that count as running; empty if the limit
    of running blocks was reached.
    """
    ended: bool = False


class BlockLoadIndex(contract.PrefixIndex):
    """An `AffinityIndex` of cached blocks and of the load of endpoints in blocks, which also
    `CountsInflight`.
    """

    def __init__(self, settings: BlockLoadSettings) -> None:
        super().__init__(settings)
        self._load_settings = settings
        self.active = contract.HeldBlocks()
        self._generations: dict[int, int] = {}
        """Number of times that the load of each slot (endpoint) was dropped, by slot.

        Requests that were sent to the slot before the last time count no longer.
        """
        self._missed = np.zeros(0)
        """Number of missed blocks at each slot, reduced by `miss_decay` with each later request."""
        self._picks = 0

    def adopt(self, settings: BlockLoadSettings) -> bool:
        """Apply settings as `PrefixIndex.configure` does; a smaller limit of running blocks applies
        only to new requests.
        """
        if not self.configure(settings):
            return False
        self._load_settings = settings
        return True

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return the estimated cached prefix of the prompts at each slot, with the columns of the
        slots' load.
        """
        known = super().match(request, slots, now)
        active = self.active.held(slots)
        added = np.full(slots, float(known.total))
        for prompt in self._prompts(request):
            for slot, blocks in self.active.leading(prompt).items():
                if slot < slots:
                    added[slot] -= blocks
        missed = np.zeros(slots)
        missed[: len(self._missed)] = self._missed[:slots]
        columns = {"active_blocks": active, "new_blocks": added, "recent_miss_blocks": missed}
        return Affinity(known.matched, known.total, columns)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Record that the blocks of `request` are cached and running at `slot`, and that it missed
        those not cached there before. Earlier misses at all slots fade by `miss_decay`.

        The blocks do not count as running if the limit of running blocks was reached.
        """
        recorded = super().record(request, slot, now)
        missed = sum(map(len, self.share(request))) // contract.HASH_BYTES - sum(recorded.held)
        prompts = self._prompts(request)
        lengths = [len(prompt) for prompt in prompts]
        self._picks += 1
        if slot >= len(self._missed):
            self._missed = np.append(self._missed, np.zeros(slot + 1 - len(self._missed)))
        self._missed *= self._load_settings.miss_decay
        self._missed[slot] += missed
        counted = self.active.blocks < self._load_settings.active_blocks_max
        if counted:
            for prompt in prompts:
                self.active.add(slot, prompt)
        generation = self._generations.get(slot, 0)
        return recorded, _Load(generation, missed, self._picks, lengths if counted else [])

    def release(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Record that `request` at `slot` has ended, so that its blocks no longer count
        as running.
        """
        self._end(request, slot, recorded[1])

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Undo `record` of `request` at `slot`: its cached blocks, and its running blocks and
        misses unless the request has ended or the slot was forgotten meanwhile.
        """
        held, load = recorded
        super().retract(request, slot, held, now)
        if self._end(request, slot, load):
            faded = load.missed * self._load_settings.miss_decay ** (self._picks - load.pick)
            self._missed[slot] = max(0.0, self._missed[slot] - faded)

    def forget(self, slot: int) -> None:
        """Drop the cached blocks, the running requests and the misses of `slot`."""
        super().forget(slot)
        self.active.forget(slot)
        self._missed[slot : slot + 1] = 0.0
        self._generations[slot] = self._generations.get(slot, 0) + 1

    def _end(self, request: InferenceRequest, slot: int, load: "_Load") -> bool:
        """Stop counting the blocks of `request` as running at `slot`, and return True. Return False
        if they did not count any more.
        """
        if load.ended or load.generation != self._generations.get(slot, 0):
            return False
        load.ended = True
        # The limit of examined blocks may have changed meanwhile; the chains have not.
        chains = request.chains_of(
            self.block_tokens * contract.BYTES_PER_TOKEN, self._load_settings.blocks_max
        )
        for chain, length in zip(chains, load.lengths, strict=False):
            self.active.remove(slot, contract.block_lists([chain], length)[0])
        return True

    def _prompts(self, request: InferenceRequest) -> list[list[int]]:
        return contract.block_lists(self.share(request), self._load_settings.blocks_max)
