"""smg's policy `manual`: a map from routing keys to workers that remembers a second one.

Source: lightseekorg/smg and smg-project/smg, `policies/manual` (2026-08).
"""

import math
from collections import OrderedDict
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.core.duration import check_above_zero
from epp.plugins.contract import (
    Abilities,
    Affinity,
    AffinityIndex,
    Candidates,
    Duration,
    Floats,
    InferenceRequest,
    Parameters,
    Seconds,
)
from epp.strategies.cost import scores_of_cost
from epp.strategies.strategy import Strategy, config_of, step

KEYS: Final = "keys"
"""Column: routing keys that have requests in flight there."""

_ENDPOINTS_PER_KEY_MAX: Final = 2
_EXPIRED_PER_CALL_MAX: Final = 4_096


class Assignment(StrEnum):
    """Who gets a key that nobody has."""

    RANDOM = "random"
    MIN_LOAD = "min_load"
    MIN_GROUP = "min_group"


class RoutingKeysSettings(Parameters, frozen=True):
    """Keys that are idle for `idle` are forgotten; smg sweeps them every minute."""

    type_name: ClassVar[str] = "routing-keys-producer"
    abilities: ClassVar[Abilities] = Abilities(names_sessions=True, counts_inflight=True)

    header_name: Annotated[str, Meta(min_length=1)] = "x-smg-routing-key"
    idle: Duration = Duration(4 * 3_600.0)
    keys_max: Annotated[int, Meta(ge=1)] = 10_000
    """Above it the key that was idle for longest is forgotten."""

    def __post_init__(self) -> None:
        check_above_zero("idle", self.idle)

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        return RoutingKeys(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply everything to a running index."""
        return isinstance(index, RoutingKeys) and index.configure(self)


class RoutingKeys:
    """Key -> up to two slots; `matched` is 2 for the first of the key, 1 for the second, of 2.

    A request without a key gets 0 of 0.
    """

    def __init__(self, settings: RoutingKeysSettings) -> None:
        self._keys: OrderedDict[bytes, tuple[tuple[int, ...], Seconds]] = OrderedDict()
        """Hash of the key -> (slots, when it was last used); the longest idle first."""
        self._active: dict[int, dict[bytes, int]] = {}
        """Slot -> key -> its requests in flight there."""
        self.configure(settings)

    def configure(self, settings: RoutingKeysSettings) -> bool:
        """Adopt `settings`; what is too much for them goes at once."""
        self._header_name = settings.header_name.lower()
        self._idle_s = float(settings.idle)
        self._keys_max = settings.keys_max
        self._fit()
        return True

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """The slots of the key of `request`."""
        matched = np.zeros(slots, dtype=np.int64)
        keys = np.zeros(slots)
        for slot, active in self._active.items():
            if slot < slots:
                keys[slot] = len(active)
        key = self._key_of(request)
        known, used_at = self._keys.get(key, ((), -math.inf))
        if used_at >= now - self._idle_s:
            for rank, slot in enumerate(known):
                if slot < slots:
                    matched[slot] = _ENDPOINTS_PER_KEY_MAX - rank
        return Affinity(matched, _ENDPOINTS_PER_KEY_MAX if key else 0, {KEYS: keys})

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """The key was used at `slot`; a third slot takes the place of the first."""
        key = self._key_of(request)
        if not key:
            return None
        known, used_at = self._keys.get(key, ((), -math.inf))
        if used_at < now - self._idle_s:
            known = ()
        before = known
        active = self._active.setdefault(slot, {})
        # Whoever never ends its requests shall not fill the memory.
        if key in active or len(active) < self._keys_max:
            active[key] = active.get(key, 0) + 1
        if slot not in known:
            self._put(key, (*known, slot)[-_ENDPOINTS_PER_KEY_MAX:], now)
        else:
            self._put(key, known, now)
        self._fit()
        return before

    def release(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """One request of the key less is in flight at `slot`; the key keeps it."""
        key = self._key_of(request)
        active = self._active.get(slot, {})
        left = active.pop(key, 0) - 1
        if left > 0:
            active[key] = left

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """The key did not go to `slot`; whom it pushed out does not come back."""
        if recorded is None:
            return
        self.release(request, slot, recorded, now)
        key = self._key_of(request)
        if slot in recorded or key not in self._keys:
            return
        known, used_at = self._keys[key]
        left = tuple(one for one in known if one != slot)
        if left:
            self._put(key, left, used_at)
        else:
            del self._keys[key]

    def forget(self, slot: int) -> None:
        """No key has `slot` any more."""
        for key, (known, used_at) in tuple(self._keys.items()):
            if slot not in known:
                continue
            left = tuple(one for one in known if one != slot)
            if left:
                # In its place: nobody used it.
                self._keys[key] = (left, used_at)
            else:
                del self._keys[key]
        self._active.pop(slot, None)

    def expire(self, now: Seconds) -> None:
        """Drop keys that are idle for too long, a bounded number a call."""
        for _ in range(_EXPIRED_PER_CALL_MAX):
            oldest = next(iter(self._keys.items()), None)
            if oldest is None or oldest[1][1] >= now - self._idle_s:
                return
            del self._keys[oldest[0]]

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The size of an engine's cache does not matter here."""

    def _key_of(self, request: InferenceRequest) -> bytes:
        """16 bytes; b"": it has none."""
        key = request.headers.get(self._header_name, "") or request.session_id
        return xxhash.xxh3_128_digest(key.encode("utf-8", "surrogatepass")) if key else b""

    def _put(self, key: bytes, slots: tuple[int, ...], now: Seconds) -> None:
        self._keys[key] = (slots, now)
        self._keys.move_to_end(key)

    def _fit(self) -> None:
        while len(self._keys) > self._keys_max:
            del self._keys[next(iter(self._keys))]


class ManualRouting(Parameters, frozen=True):
    """The first endpoint of the key, else its second, else a new one by `assignment`.

    `random`: anybody; `min_load`: argmin of requests in flight; `min_group`: argmin of keys that
    have requests in flight. So goes what has no key. The key is header `X-SMG-Routing-Key`, or the
    session where it is not sent.

    Kept: a key has no bound, however busy its endpoint is.

    Differs: an endpoint that left is forgotten, where smg goes back to the first of two when it
    comes back under the same address; one that is only not ready keeps its keys, as there.
    """

    type_name: ClassVar[str] = "manual-routing-scorer"
    producer_type: ClassVar[str] = RoutingKeysSettings.type_name

    assignment: Assignment = Assignment.RANDOM

    @property
    def producer(self) -> str | None:
        return self.producer_type

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        known = candidates.affinity(self.producer_type)
        most = int(known.matched.max())
        if most > 0:
            first: Floats = (known.matched == most).astype(np.float64)
            return first
        if self.assignment is Assignment.RANDOM:
            return np.ones(len(candidates))
        if self.assignment is Assignment.MIN_LOAD:
            return scores_of_cost(candidates.inflight_requests.astype(np.float64))
        return scores_of_cost(known.columns.get(KEYS, np.zeros(len(candidates))))


INDEXES: Final = (RoutingKeysSettings,)
SCORERS: Final = (ManualRouting,)

_RANDOM_TIE: Final = step("random-tie-picker")

STRATEGIES: Final = (
    Strategy(
        name="smg-manual",
        idea="smg, manual: each routing key has an endpoint and a spare, drawn at first.",
        config=config_of(step(ManualRouting.type_name), picker=_RANDOM_TIE),
    ),
    Strategy(
        name="smg-manual-min-load",
        idea="smg, manual: a new routing key goes to the fewest requests in flight.",
        config=config_of(
            step(ManualRouting.type_name, assignment=Assignment.MIN_LOAD.value),
            picker=_RANDOM_TIE,
        ),
    ),
    Strategy(
        name="smg-manual-min-group",
        idea="smg, manual: a new routing key goes to the fewest keys in flight.",
        config=config_of(
            step(ManualRouting.type_name, assignment=Assignment.MIN_GROUP.value),
            picker=_RANDOM_TIE,
        ),
    ),
)
