"""SimHash of a prompt as the key of a hash ring: similar prompts should reach the same endpoint, as
production-stack #239 proposes.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Ints, Parameters
from homing_rivals.narrowing import least_of, only, with_room

_BITS: Final = 64
_SHINGLE_BYTES: Final = 4


class Locality(StrEnum):
    """The part of a SimHash that is used as the key of the hash ring."""

    HASHED = "hashed"
    """Key of the hash ring: a hash of all bits of the SimHash."""
    BAND = "band"
    """Key of the hash ring: a hash of only the first bits of the SimHash."""


def simhash(features: Ints) -> int:
    """Return the SimHash of `features`, uint64[k] with k >= 1: 64 bits, each 1 if it is 1 in more
    than half of them.

    Source: Charikar, "Similarity estimation techniques from rounding algorithms" (2002).
    """
    octets = features.astype(">u8").view(np.uint8).reshape(len(features), contract.HASH_BYTES)
    votes = np.unpackbits(octets, axis=1).sum(axis=0, dtype=np.int64)
    return int.from_bytes(np.packbits(2 * votes > len(features)).tobytes(), "big")


class SimHashRing(Parameters, frozen=True):
    """Prefer the endpoint to which a hash ring assigns the SimHash of the first 512 bytes of the
    prompt.

    The features of the SimHash are hashes of all runs of 4 bytes. The key on the hash ring is a
    hash of the SimHash with `hashed`, and a hash of its first `band_bits` bits with `band`. Source:
    production-stack #239, never merged.

    Different from the proposal: the SimHash is that of bytes of the canonical prompt, where the
    original takes JSON text of the messages; hashes are xxh64 instead of md5; the owner of a key is
    found by rendezvous hashing. A replayed trace has no text, so the features of its prompts are
    the hashes of the blocks within the first 512 bytes. A prompt with neither text nor blocks goes
    to the endpoint with the fewest requests. Kept by `hashed`: hashing the SimHash again destroys
    its property that similar prompts have similar values. Two prompts whose SimHashes differ in one
    bit have unrelated keys with `hashed`; only prompts with equal SimHashes have the same key.
    Prompts with the same first 512 bytes share one owner, unless a `load_factor` makes the ring
    continue to the next endpoint. The proposal's own test of load is omitted, because it is
    inverted: it keeps the busiest tenth of the endpoints.
    """

    type_name: ClassVar[str] = "simhash-ring-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"
    producer: ClassVar[str] = ""

    text_bytes: Annotated[int, Meta(ge=1, le=65_536)] = 512
    locality: Locality = Locality.HASHED
    band_bits: Annotated[int, Meta(ge=1, le=_BITS)] = 6
    load_factor: Annotated[float, Meta(ge=1)] | None = None
    """Factor of the mean requests in flight, with this request and rounded up, above which an
    endpoint is skipped; None for no limit.
    """

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        inflight = candidates.inflight_requests
        features = self._features(request, candidates.block_tokens)
        if not len(features):
            return only(least_of(inflight))
        weights = candidates.rendezvous(self._key(simhash(features)))
        if self.load_factor is not None:
            weights[~with_room(inflight, self.load_factor)] = 0
        owner = np.zeros(len(weights))
        owner[weights.argmax()] = 1.0
        return owner

    def _features(self, request: InferenceRequest, block_tokens: int) -> Ints:
        """Return the features of the prompt, uint64[k]: hashes of its runs of 4 bytes, or of its
        blocks if it has no text.

        k is 0 if it has neither.
        """
        if request.prompts and request.prompts[0]:
            text = request.prompts[0][: self.text_bytes]
            shingles = range(max(1, len(text) - _SHINGLE_BYTES + 1))
            return np.array(
                [xxhash.xxh64_intdigest(text[at : at + _SHINGLE_BYTES]) for at in shingles],
                dtype=np.uint64,
            )
        block_bytes = block_tokens * contract.BYTES_PER_TOKEN
        chains = request.chains.get(block_bytes)
        blocks = max(1, self.text_bytes // block_bytes)
        chain = chains[0][: blocks * contract.HASH_BYTES] if chains else b""
        return np.frombuffer(chain, dtype=np.uint64)

    def _key(self, fingerprint: int) -> int:
        if self.locality is Locality.BAND:
            fingerprint >>= _BITS - self.band_bits
        return xxhash.xxh64_intdigest(str(fingerprint).encode())


SCORERS: Final = (SimHashRing,)

STRATEGIES: Final = (
    contract.Strategy(
        name="production-stack-simhash",
        idea=(
            "production-stack #239: the endpoint that a hash ring assigns to a hash of the "
            "prompt's SimHash."
        ),
        omissions=(
            "the proposal's test of load, which keeps the busiest; JSON text of messages; its "
            "formula ignores adapters"
        ),
        config=contract.config_of(contract.step(SimHashRing.type_name)),
    ),
    contract.Strategy(
        name="production-stack-simhash-fixed",
        idea=(
            "SimHash by its first bits, so that similar prompts reach the same endpoint, within "
            "1.25 times the mean load."
        ),
        omissions="JSON text of messages; its formula ignores adapters",
        config=contract.config_of(
            contract.step(SimHashRing.type_name, locality="band", loadFactor=1.25)
        ),
    ),
)
