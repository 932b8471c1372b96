"""Consistent hashing: endpoints own arcs of a ring, and a key belongs to the next point clockwise.

Points are computed from the endpoints' identities, so pickers that know the same endpoints have the
same ring. An endpoint that joins or leaves moves only the keys of its own arcs.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import xxhash
from msgspec import Struct

from epp.plugins.contract import Bools, Candidates, Hashes, Ints, rendezvous_weights

_RINGS_MAX: Final = 8
"""Sets of endpoints whose ring is stored; 1,000 endpoints with 256 points each take 4 MB."""


class Ring(Struct, frozen=True):
    """A ring of m points of n candidates."""

    points: Hashes
    """Positions of the points, uint64[m], ascending."""
    owners: Ints
    """Owners of the points, int64[m], positions among the candidates."""

    def first(self, key: int, accepted: Bools) -> int:
        """Return the first candidate clockwise from `key`, 64 bits, that is in `accepted`; -1 if
        none is.

        `accepted` is bool[n].
        """
        suitable = accepted[self.owners]
        start = int(np.searchsorted(self.points, np.uint64(key)))
        at = start + int(suitable[start:].argmax()) if start < len(suitable) else start
        if at == len(suitable) or not suitable[at]:
            at = int(suitable.argmax())
        return int(self.owners[at]) if suitable[at] else -1


def ring_of(candidates: Candidates, points: int) -> Ring:
    """Return the ring of `candidates`, at least one, with `points` points each."""
    # Candidates and identities have the same order.
    return _ring(candidates.rendezvous(0).tobytes(), points)


@lru_cache(_RINGS_MAX)
def _ring(identities: bytes, points: int) -> Ring:
    """Return the ring; it is cached because it takes milliseconds for 100 endpoints, a decision a
    fraction.
    """
    known = np.frombuffer(identities, dtype=np.uint64)
    numbers = (number.to_bytes(4, "little") for number in range(points))
    placed = np.concatenate(
        [rendezvous_weights(known, xxhash.xxh64_intdigest(number)) for number in numbers]
    )
    order = np.argsort(placed, kind="stable")
    return Ring(placed[order], np.tile(np.arange(len(known)), points)[order])


def within_bound(inflight: Ints, load_factor: float) -> Bools:
    """Return bool[n]: candidates with at most `load_factor`, 1 or more, times the mean with one
    more request.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The load of an
    endpoint excludes the request to be placed; all are within the bound while nothing is in flight.
    """
    within: Bools = inflight <= (int(inflight.sum()) + 1) / len(inflight) * load_factor
    return within
