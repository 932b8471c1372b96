"""Consistent hashing: endpoints own arcs of a ring, a key belongs to the next point clockwise.

Points are made of the endpoints' identities, so pickers that know the same endpoints have the same
ring, and one that comes or leaves moves only the keys of its own arcs.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import xxhash
from msgspec import Struct

from epp.plugins.contract import (
    Bools,
    Candidates,
    Hashes,
    Ints,
    rendezvous_weights,
)

_RINGS_MAX: Final = 8
"""Sets of endpoints of which the ring is kept: at 1,000 of 256 points each it has 4 MB."""


class Ring(Struct, frozen=True):
    """m points of n candidates."""

    points: Hashes
    """uint64[m], ascending."""
    owners: Ints
    """int64[m], positions among the candidates."""

    def first(self, key: int, accepted: Bools) -> int:
        """The first candidate clockwise from `key`, 64 bits, that is in `accepted`; -1: none is.

        `accepted` is bool[n].
        """
        suitable = accepted[self.owners]
        start = int(np.searchsorted(self.points, np.uint64(key)))
        at = start + int(suitable[start:].argmax()) if start < len(suitable) else start
        if at == len(suitable) or not suitable[at]:
            at = int(suitable.argmax())
        return int(self.owners[at]) if suitable[at] else -1


def ring_of(candidates: Candidates, points: int) -> Ring:
    """The ring of `candidates`, at least one, with so many `points` each."""
    # One for one with the identities.
    return _ring(candidates.rendezvous(0).tobytes(), points)


@lru_cache(_RINGS_MAX)
def _ring(identities: bytes, points: int) -> Ring:
    """A pure function, remembered: of 100 endpoints it takes milliseconds, a decision a fraction."""
    known = np.frombuffer(identities, dtype=np.uint64)
    numbers = (number.to_bytes(4, "little") for number in range(points))
    placed = np.concatenate(
        [rendezvous_weights(known, xxhash.xxh64_intdigest(number)) for number in numbers]
    )
    order = np.argsort(placed, kind="stable")
    return Ring(placed[order], np.tile(np.arange(len(known)), points)[order])


def within_bound(inflight: Ints, load_factor: float) -> Bools:
    """bool[n]: who has at most `load_factor`, 1 or more, times the mean with one more request.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The load of an
    endpoint is without the request that is to be placed; while nothing is in flight all are within.
    """
    within: Bools = inflight <= (int(inflight.sum()) + 1) / len(inflight) * load_factor
    return within
