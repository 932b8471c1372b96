"""Consistent hashing: endpoints have points on a ring, and a key belongs to the endpoint of the
next point clockwise.

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
"""Maximum number of rings that are cached, one for each set of endpoints; a ring of 1,000 endpoints
with 256 points each takes 4 MB.
"""


class Ring(Struct, frozen=True):
    """A hash ring of n candidates, which has m points in total."""

    points: Hashes
    """Positions of the points on the ring, uint64[m], ascending."""
    owners: Ints
    """Candidates to which the points belong, int64[m], as positions among the candidates."""

    def first(self, key: int, accepted: Bools) -> int:
        """Return the position of the first candidate clockwise from `key` (64 bits) that is in
        `accepted`, or -1 if there is none.

        `accepted` is bool[n].
        """
        suitable = accepted[self.owners]
        start = int(np.searchsorted(self.points, np.uint64(key)))
        at = start + int(suitable[start:].argmax()) if start < len(suitable) else start
        if at == len(suitable) or not suitable[at]:
            at = int(suitable.argmax())
        return int(self.owners[at]) if suitable[at] else -1


def ring_of(candidates: Candidates, points: int) -> Ring:
    """Return the hash ring of `candidates`, which must not be empty, with `points` points each."""
    # Candidates and identities have the same order.
    return _ring(candidates.rendezvous(0).tobytes(), points)


@lru_cache(_RINGS_MAX)
def _ring(identities: bytes, points: int) -> Ring:
    """Return the hash ring of candidates with these `identities`.

    It is cached because it takes milliseconds for 100 endpoints, while a decision takes a fraction
    of one.
    """
    known = np.frombuffer(identities, dtype=np.uint64)
    numbers = (number.to_bytes(4, "little") for number in range(points))
    placed = np.concatenate(
        [rendezvous_weights(known, xxhash.xxh64_intdigest(number)) for number in numbers]
    )
    order = np.argsort(placed, kind="stable")
    return Ring(placed[order], np.tile(np.arange(len(known)), points)[order])


def within_bound(inflight: Ints, load_factor: float) -> Bools:
    """Return bool[n]: True for candidates with at most `load_factor` times (total + 1) / n requests
    in flight; the factor is 1 or more.

    Source: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). The
    load of an endpoint excludes the request to be placed; all are within the bound while nothing is
    in flight.
    """
    within: Bools = inflight <= (int(inflight.sum()) + 1) / len(inflight) * load_factor
    return within
