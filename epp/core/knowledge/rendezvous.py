"""Rendezvous hashing: an order of endpoints for a key, which is equal in every process that has the
same key and endpoints.

Each endpoint's weight is a hash of the key and of its identity, and the highest wins. The scheme is
by Thaler and Ravishankar ("Using name-based mappings to increase hit rates", 1998). It needs no
memory and no communication. An endpoint that leaves changes only the keys that it had won.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

Hashes: TypeAlias = npt.NDArray[np.uint64]

# Factors and order are those of the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
# splittable pseudorandom number generators", 2014). Its first and last steps are left out, because
# keys and identities are hashes already and the upper bits decide. The constants are arrays without
# dimensions, because numpy scalars cost twice as much in each step.
_FACTOR_1: Final = np.array(0xBF58476D1CE4E5B9, dtype=np.uint64)
_SHIFT: Final = np.array(32, dtype=np.uint64)
_FACTOR_2: Final = np.array(0x94D049BB133111EB, dtype=np.uint64)


def identity_hash(name: str) -> int:
    """Return a 64-bit hash of an endpoint id or of a session id, which is the same in every
    process.
    """
    return xxhash.xxh64_intdigest(name.encode("utf-8", "surrogatepass"))


def rendezvous_weights(identities: Hashes, key: int) -> Hashes:
    """Return uint64[n]: the weight for the 64-bit `key` of each of the n `identities`; a new array."""
    weights = identities ^ np.array(key, dtype=np.uint64)
    weights *= _FACTOR_1
    weights ^= weights >> _SHIFT
    weights *= _FACTOR_2
    return weights
