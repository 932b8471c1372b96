"""smg's hash index: who was sent this very head of a prompt within the last three minutes."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.core.duration import Duration, check_above_zero
from epp.core.prompt.blocks import HASH_BYTES, HASH_SCHEME
from epp.core.types import BYTES_PER_TOKEN
from epp.plugins.contract import (
    Abilities,
    Affinity,
    AffinityIndex,
    Candidates,
    Floats,
    InferenceRequest,
    Origin,
    Parameters,
    Seconds,
)
from epp.strategies.narrowing import most_of
from epp.strategies.smg_cache_aware import kv_pressure, shortest_wait
from epp.strategies.strategy import Strategy, config_of, producer, step

_EXPIRED_MAX: Final = 4_096
"""Heads that one `expire` lets go."""


class PlacementMapSettings(Parameters, frozen=True):
    """`placement-map-producer`: heads of a few lengths, each with a few endpoints."""

    type_name: ClassVar[str] = "placement-map-producer"
    abilities: ClassVar[Abilities] = Abilities(
        origin=Origin.DECIDED, counts_blocks=True, shares=True
    )

    boundaries_tokens: tuple[Annotated[int, Meta(ge=1)], ...] = (2_048, 8_192)
    """Lengths of heads, ascending multiples of the block size. smg has no default; its own tests
    take these."""
    block_size_tokens: Annotated[int, Meta(ge=1)] = 64
    ttl: Duration = Duration(180.0)
    holders_max: Annotated[int, Meta(ge=1)] = 3
    """Endpoints of one head; of more the one that got it longest ago is forgotten."""
    heads_max: Annotated[int, Meta(ge=1)] = 262_144
    """Of more those routed longest ago are forgotten."""

    def __post_init__(self) -> None:
        check_above_zero("ttl", self.ttl)
        boundaries = self.boundaries_tokens
        if not boundaries or list(boundaries) != sorted(set(boundaries)):
            raise ValueError(f"boundariesTokens must ascend, are {list(boundaries)}")
        if any(boundary % self.block_size_tokens for boundary in boundaries):
            raise ValueError(
                f"boundariesTokens must be multiples of blockSizeTokens {self.block_size_tokens}, "
                f"are {list(boundaries)}"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.block_size_tokens

    def open(self) -> AffinityIndex:
        """A new, empty map."""
        return PlacementMap(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply to a running map all but lengths and block size; False if those differ."""
        return isinstance(index, PlacementMap) and index.configure(self)


class PlacementMap:
    """Head of a prompt -> endpoints that were sent it; the unit is a block.

    `matched` is the longest head that an endpoint was sent within the TTL. Of several prompts the
    first decides.
    """

    def __init__(self, settings: PlacementMapSettings) -> None:
        self._heads: OrderedDict[bytes, dict[int, tuple[Seconds, int]]] = OrderedDict()
        """Chained hash of the head -> slot -> (when it was sent there, generation of the slot); the
        head that was sent longest ago first."""
        self._generations: dict[int, int] = {}
        """How often a slot was forgotten: what bears an older number is void."""
        self._settings = settings
        self.configure(settings)

    def configure(self, settings: PlacementMapSettings) -> bool:
        """Adopt `settings`; False and no change if they are about other heads."""
        now, before = settings, self._settings
        if (now.boundaries_tokens, now.block_tokens) != (
            before.boundaries_tokens,
            before.block_tokens,
        ):
            return False
        self._settings = settings
        self._ends = [
            boundary // settings.block_tokens * HASH_BYTES for boundary in now.boundaries_tokens
        ]
        self._fit()
        return True

    def __len__(self) -> int:
        return len(self._heads)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Blocks of the longest head of `request` that each slot was sent lately."""
        matched = np.zeros(slots, dtype=np.int64)
        chain = self._chain(request)
        cutoff = now - float(self._settings.ttl)
        for end in self._ends:
            holders = self._heads.get(chain[end - HASH_BYTES : end]) if end <= len(chain) else None
            for slot, (sent_at, generation) in (holders or {}).items():
                if slot < slots and sent_at >= cutoff and self._is_current(slot, generation):
                    matched[slot] = end // HASH_BYTES
        return Affinity(matched, len(chain) // HASH_BYTES)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """From now on `slot` is among the holders of every head of `request`."""
        sent = now, self._generations.get(slot, 0)
        noted = [(head, self._place(head, slot, sent)) for head in self.share(request)]
        self._fit()
        return sent, noted

    @property
    def signature(self) -> str:
        """Heads mean the same to whoever has the same; `SharedIndex`."""
        return f"placement:{self._ends}:{self._settings.block_tokens}:{HASH_SCHEME}"

    def share(self, request: InferenceRequest) -> Sequence[bytes]:
        """The heads of `request`, the shortest first."""
        chain = self._chain(request)
        return [chain[end - HASH_BYTES : end] for end in self._ends if end <= len(chain)]

    def learn(self, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds) -> None:
        """A peer sent the heads `keys` to `slot` at `stamp`; the latest counts."""
        if stamp < now - float(self._settings.ttl):
            return
        sent = min(stamp, now), self._generations.get(slot, 0)
        for head in keys:
            before = self._heads.get(head, {}).get(slot)
            known = before is not None and self._is_current(slot, before[1])
            if len(head) == HASH_BYTES and not (before and known and before[0] >= stamp):
                self._place(head, slot, sent)
        self._fit()

    def known(self) -> Iterator[tuple[int, Seconds, Sequence[bytes]]]:
        """Every head and each of its endpoints, the head that was sent longest ago first."""
        for head, holders in tuple(self._heads.items()):
            for slot, (sent_at, generation) in tuple(holders.items()):
                if self._is_current(slot, generation):
                    yield slot, sent_at, (head,)

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`slot` did not get `request`; it holds what it was sent before."""
        sent, noted = recorded
        for head, before in noted:
            holders = self._heads.get(head)
            if holders is None or holders.get(slot) is not sent:
                continue  # Another request has been sent there since, or it is forgotten.
            if before is not None:
                holders[slot] = before
                continue
            del holders[slot]
            if not holders:
                del self._heads[head]

    def forget(self, slot: int) -> None:
        """`slot` holds nothing; what says otherwise is void."""
        self._generations[slot] = self._generations.get(slot, 0) + 1

    def expire(self, now: Seconds) -> None:
        """Let go heads that nobody was sent within the TTL, a bounded number."""
        cutoff = now - float(self._settings.ttl)
        for _ in range(_EXPIRED_MAX):
            oldest = next(iter(self._heads.values()), None)
            if oldest is None or any(sent_at >= cutoff for sent_at, _ in oldest.values()):
                return
            self._heads.popitem(last=False)

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The size of an engine's cache does not matter here."""

    def _is_current(self, slot: int, generation: int) -> bool:
        return generation == self._generations.get(slot, 0)

    def _place(
        self, head: bytes, slot: int, sent: tuple[Seconds, int]
    ) -> tuple[Seconds, int] | None:
        """Note `slot` among the holders of `head`; return what was noted of it before."""
        holders = self._heads.setdefault(head, {})
        before = holders.get(slot)
        holders[slot] = sent
        while len(holders) > self._settings.holders_max:
            del holders[min(holders, key=holders.__getitem__)]
        self._heads.move_to_end(head)
        return before

    def _chain(self, request: InferenceRequest) -> bytes:
        blocks_max = self._ends[-1] // HASH_BYTES
        block_bytes = self._settings.block_tokens * BYTES_PER_TOKEN
        chains = request.chains_of(block_bytes, blocks_max)
        return chains[0][: self._ends[-1]] if chains else b""

    def _fit(self) -> None:
        while len(self._heads) > self._settings.heads_max:
            self._heads.popitem(last=False)


class PlacementMapAffinity(Parameters, frozen=True):
    """The shortest expected wait among those that were sent the longest known head, if not too full.

    Source: smg-project/smg #2213, `--cache-index hash`. Too full and what follows then are those of
    the fourth cache-aware generation; so is KV pressure. A prompt that is shorter than the first
    head, or of which no head is known, goes to the shortest expected wait.

    Differs: heads are hashes of full blocks; as the fourth generation and `expected_wait`.
    """

    type_name: ClassVar[str] = "placement-map-scorer"
    producer_type: ClassVar[str] = PlacementMapSettings.type_name

    balance_abs: Annotated[float, Meta(ge=0)] = 64.0
    balance_rel: Annotated[float, Meta(ge=1)] = 1.5
    kv_overload: Annotated[float, Meta(ge=0, le=1)] = 1.0
    kv_balance: Annotated[float, Meta(ge=0, le=1)] = 1.0

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        matched = candidates.affinity(self.producer_type).matched
        holders = most_of(matched, matched > 0)
        if kv_pressure(candidates, overload=self.kv_overload, balance=self.kv_balance):
            holders = np.zeros(len(candidates), dtype=np.bool_)
        return shortest_wait(
            candidates, holders, balance_abs=self.balance_abs, balance_rel=self.balance_rel
        )


INDEXES: Final = (PlacementMapSettings,)

SCORERS: Final = (PlacementMapAffinity,)

STRATEGIES: Final = (
    Strategy(
        name="smg-hash-index",
        idea="smg hash index: who was sent this head of 2,048 or 8,192 tokens within 180 s.",
        config=config_of(
            producer(PlacementMapSettings.type_name, boundariesTokens=[2_048, 8_192]),
            step(PlacementMapAffinity.type_name),
        ),
    ),
)
