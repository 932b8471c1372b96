"""Estimates of cache hits for simple placements of requests: random, round robin, and by affinity.

`sim/traces/inspection` explains the hit ratios.
"""

import math
from array import array
from collections.abc import Collection, Sequence
from random import Random
from typing import Final

import xxhash
from msgspec import Struct

from sim.traces.arrival import Arrival
from sim.traces.caches import LruCache
from sim.traces.prompts import PromptHashes

RANDOM: Final = "random"
ROUND_ROBIN: Final = "round_robin"
AFFINITY: Final = "affinity"
PLACEMENTS: Final = (RANDOM, ROUND_ROBIN, AFFINITY)

_COMMON_MIN: Final = 16
"""Number of earlier uses up to which a part of a prompt never counts as common text."""


class Parts(Struct, frozen=True):
    """The parts of one prompt in their order: their hashes and their lengths in tokens."""

    hashes: list[int]
    tokens: list[int]


def parts_of(arrival: Arrival) -> tuple[Parts, Parts]:
    """Return the parts of the prompt that other requests may share, and all parts that a cache
    stores for the request. The second adds the unique rest of the prompt, in whole blocks, and the
    answer if a later prompt contains it.
    """
    bases = PromptHashes(arrival).bases
    tokens = [size for _, size in arrival.spans()]
    prompt = Parts(bases[: len(tokens)], tokens)
    held = Parts(prompt.hashes.copy(), tokens.copy())
    if own := arrival.prompt_tokens - arrival.shareable_tokens:
        held.hashes.append(bases[len(tokens)])
        # A cache of blocks uses a whole block for the rest.
        held.tokens.append(
            math.ceil(own / (arrival.block_tokens or 1)) * (arrival.block_tokens or 1)
        )
    if arrival.answer is not None:
        held.hashes.append(bases[-1])
        held.tokens.append(arrival.output_tokens)
    return prompt, held


class Hits:
    """Counters of the prompt tokens that caches would hit.

    They count one cache for all requests, unlimited or as large as all pods' caches together, and
    the pods' caches under each placement of requests (such as random or by affinity). `add` counts
    one request and adds it to the caches.
    """

    def __init__(
        self,
        *,
        pods: int,
        kv_tokens: int,
        seed: int,
        placements: Collection[str] = PLACEMENTS,
        together: bool = True,
    ) -> None:
        """Create the counters for a pool of `pods`, each with a cache of `kv_tokens`.

        Only the placements in `placements` are counted. If `together` is False, the hits of one
        cache with the size of all pods together are not counted.
        """
        self._pods = pods
        self._random = Random(f"{seed}:placement")
        self._slot_of: dict[int, int] = {}
        self.tokens, self.uses = array("I"), array("I")
        """Largest length in tokens (`tokens`) and number of uses (`uses`) of each distinct part of
        prompts, by the part's slot (number).
        """
        self.requests = 0
        self.load = [0] * pods
        """Number of requests that each pod receives under placement by affinity."""
        self.one_cache_tokens = 0
        """Number of prompt tokens that one unlimited cache would hit."""
        self.together_tokens = 0
        """Number of prompt tokens that one cache with the size of all pods' caches together would
        hit.
        """
        self.placements = {name: Placement(pods, kv_tokens) for name in placements}
        self._together = LruCache(kv_tokens * pods) if together else None

    def add(self, arrival: Arrival) -> list[int]:
        """Count the hits of a request under each placement, and add it to the caches.

        Return the slots (numbers) of the parts of its prompt, then that of its answer if a later
        prompt contains it.
        """
        prompt, held = parts_of(arrival)
        slots = self._slots(prompt.hashes)
        affinity = self._key(slots, prompt, arrival.index) % self._pods
        self.load[affinity] += 1
        pods = {
            RANDOM: self._random.randrange(self._pods),
            ROUND_ROBIN: self.requests % self._pods,
            AFFINITY: affinity,
        }
        self.requests += 1
        known = self.tokens
        for slot, size in zip(slots, prompt.tokens, strict=True):
            if known[slot] < size:
                self.one_cache_tokens += known[slot]
                break
            self.one_cache_tokens += size
        if self._together is not None:
            self.together_tokens += self._together.match(prompt.hashes, prompt.tokens)
            self._together.insert(held.hashes, held.tokens)
        for name, placement in self.placements.items():
            placement.match(pods[name], slots, prompt, known)
        sizes = prompt.tokens
        if arrival.answer is not None:
            # A later prompt contains the answer, and the pod that generated it has it in its cache.
            slots += self._slots(held.hashes[-1:])
            sizes = [*sizes, arrival.output_tokens]
        for slot, size in zip(slots, sizes, strict=True):
            self.uses[slot] += 1
            known[slot] = max(known[slot], size)
        for name, placement in self.placements.items():
            placement.hold(pods[name], slots, held)
        return slots

    def _slots(self, parts: Sequence[int]) -> list[int]:
        slot_of = self._slot_of
        slots = [slot_of.setdefault(part, len(slot_of)) for part in parts]
        fresh = len(slot_of) - len(self.tokens)
        if fresh:
            self.tokens.extend([0] * fresh)
            self.uses.extend([0] * fresh)
            for placement in self.placements.values():
                placement.masks.extend([0] * fresh)
        return slots

    def _key(self, slots: Sequence[int], prompt: Parts, index: int) -> int:
        """Return the hash by which affinity places a request: the first part of its prompt that is
        not common. A part is common above 16 earlier uses and above half of a pod's fair share of
        the requests. If all parts are common, it is a hash of the request's index.
        """
        common = max(_COMMON_MIN, self.requests / (2 * self._pods))
        for slot, part in zip(slots, prompt.hashes, strict=True):
            if self.uses[slot] <= common:
                return part
        return xxhash.xxh64_intdigest(index.to_bytes(8, "little"))


class Placement:
    """The pods' caches under one placement of requests, once unlimited and once with their real
    size.
    """

    def __init__(self, pods: int, kv_tokens: int) -> None:
        self.masks: list[int] = []
        """Pods that have received each part of a prompt, as a bit mask, by the part's slot
        (number).
        """
        self.hit_tokens = 0
        self.lru_hit_tokens = 0
        self._lru = [LruCache(kv_tokens) for _ in range(pods)]

    def match(self, pod: int, slots: Sequence[int], prompt: Parts, known: Sequence[int]) -> None:
        """Count the prompt tokens that the caches of `pod` hit. `known` is the longest length of
        each part so far.
        """
        masks, bit = self.masks, 1 << pod
        for slot, size in zip(slots, prompt.tokens, strict=True):
            have = known[slot] if masks[slot] & bit else 0
            if have < size:
                self.hit_tokens += have
                break
            self.hit_tokens += size
        self.lru_hit_tokens += self._lru[pod].match(prompt.hashes, prompt.tokens)

    def hold(self, pod: int, slots: Sequence[int], held: Parts) -> None:
        """Add the parts of a request to the caches of `pod`."""
        masks, bit = self.masks, 1 << pod
        for slot in slots:
            masks[slot] |= bit
        self._lru[pod].insert(held.hashes, held.tokens)
