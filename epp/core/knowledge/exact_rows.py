"""The rows of the exact prefix index: for each key, a bit mask of the places (engine ranks) that
have it cached.
"""

from collections.abc import Callable, Iterable, Iterator

from epp.core.knowledge.exact_slots import SlotState
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import DEVICE


class Rows:
    """The rows of the exact index in all tiers. A place is a bit of a mask; a tier has a weight
    from 0 to 1.
    """

    def __init__(self) -> None:
        self.tiers: dict[str, dict[int, int]] = {DEVICE: {}}
        """Bit mask of the places (engine ranks) that have a key cached, by tier, then by key."""
        self.entries = 0
        """Number of (key, engine rank) pairs in all tiers, that is, of cached keys of all ranks."""
        self._weights: dict[str, float] = {DEVICE: 1.0}
        self._weight_of: Callable[[str], float] = lambda _: 1.0

    @property
    def device(self) -> dict[int, int]:
        """Return the rows of the device tier, which is the GPU: the bit mask of each key by key."""
        return self.tiers[DEVICE]

    @property
    def keys(self) -> int:
        """Return the number of rows of all tiers; a key has a row in each tier in which it is
        cached.
        """
        return sum(map(len, self.tiers.values()))

    def weigh(self, weight_of: Callable[[str], float]) -> None:
        """Use `weight_of`, which returns the weight of a tier from 0 to 1, for each tier from now
        on.
        """
        self._weight_of = weight_of
        self._weights = {tier: weight_of(tier) for tier in self.tiers}

    def holds(self, bit: int, key: int) -> bool:
        """Return whether the engine rank with the bit `bit` has `key` cached in any tier."""
        return any(rows.get(key, 0) & bit for rows in self.tiers.values())

    def apply(self, changes: Iterable[Changed], bit: int, known: SlotState | None) -> int:
        """Apply stored and removed block keys to the rows of the place (engine rank) with the bit
        `bit`. Return how many of its keys were removed.

        `known` is the state of the place's endpoint, or None if the place was dropped.
        """
        new = gone = 0
        for changed in changes:
            rows = self.tiers.get(changed.tier)
            if rows is None:
                rows = self.tiers[changed.tier] = {}
                self._weights[changed.tier] = self._weight_of(changed.tier)
            keys = changed.keys
            if changed.held:
                for key in keys:
                    mask = rows.get(key)
                    if mask is None:
                        # The place's own integer is shared by all keys that only this place holds.
                        rows[key] = bit
                        new += 1
                    elif not mask & bit:
                        rows[key] = mask | bit
                        new += 1
                if known is not None and known.tracked:
                    known.complete_tracked(keys)
                continue
            for key in keys:
                mask = rows.get(key, 0)
                if mask == bit:
                    del rows[key]
                    gone += 1
                elif mask & bit:
                    rows[key] = mask ^ bit
                    gone += 1
        self.entries += new - gone
        return gone

    def walk(self, keys: list[int], alive: int) -> tuple[dict[int, int], dict[int, float]]:
        """Return the number of leading `keys` that each place with a bit in `alive` has cached, by
        the place's number.

        The second result is the number of blocks to deduct because some are only in tiers with a
        weight below 1, by the place's number.
        """
        if self._weights[DEVICE] < 1.0 or any(
            rows for tier, rows in self.tiers.items() if tier != DEVICE
        ):
            return self._walk_tiers(keys, alive)
        return walk_one(self.device, keys, alive), {}

    def _walk_tiers(self, keys: list[int], alive: int) -> tuple[dict[int, int], dict[int, float]]:
        """Return the results of `walk` if any tier other than the device has keys, or the weight
        of the device is below 1. A block counts by the tier with the largest weight that has it.
        """
        found: dict[int, int] = {}
        lost: dict[int, float] = {}
        tiers = sorted(self.tiers.items(), key=lambda tier: -self._weights[tier[0]])
        # Number of blocks by (mask, deduction per block); the pair rarely changes from block to
        # block.
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


def walk_one(rows: dict[int, int], keys: list[int], alive: int) -> dict[int, int]:
    """Return the number of leading `keys` that each place (engine rank) with a bit in `alive` has
    cached in the tier of `rows`, by the place's number.
    """
    found: dict[int, int] = {}
    for depth, key in enumerate(keys):
        mask = rows.get(key, 0) & alive
        if mask != alive:
            _note(found, alive & ~mask, depth)
            alive = mask
            if not alive:
                return found
    _note(found, alive, len(keys))
    return found


def _note(found: dict[int, int], mask: int, depth: int) -> None:
    """Store in `found` that each place (engine rank) in `mask` has `depth` leading blocks cached.
    Do nothing if `depth` is 0.
    """
    if depth:
        found.update(dict.fromkeys(_places_in(mask), depth))


def _places_in(mask: int) -> Iterator[int]:
    """Yield the number of each bit that is set in `mask`, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
