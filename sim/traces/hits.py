"""What caches would hold of prompts if requests were placed by simple schemes, and what they hit.

See `sim/traces/inspection` for what the ratios mean.
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
"""Uses of a part before it may count as common."""


class Parts(Struct, frozen=True):
    """Stretches of text: what each is known by, and its length in tokens."""

    hashes: list[int]
    tokens: list[int]


def parts_of(arrival: Arrival) -> tuple[Parts, Parts]:
    """(the prompt as far as others may share it, what a cache holds of the request)."""
    bases = PromptHashes(arrival).bases
    tokens = [size for _, size in arrival.spans()]
    prompt = Parts(bases[: len(tokens)], tokens)
    held = Parts(prompt.hashes.copy(), tokens.copy())
    if own := arrival.prompt_tokens - arrival.shareable_tokens:
        held.hashes.append(bases[len(tokens)])
        # A cache of blocks spends a whole one on the rest.
        held.tokens.append(
            math.ceil(own / (arrival.block_tokens or 1)) * (arrival.block_tokens or 1)
        )
    if arrival.answer is not None:
        held.hashes.append(bases[-1])
        held.tokens.append(arrival.output_tokens)
    return prompt, held


class Hits:
    """Takes request by request; the counts are tokens of prompts."""

    def __init__(
        self,
        *,
        pods: int,
        kv_tokens: int,
        seed: int,
        placements: Collection[str] = PLACEMENTS,
        together: bool = True,
    ) -> None:
        """`kv_tokens` of each pod. What is not among `placements`, or `together`, counts nothing."""
        self._pods = pods
        self._random = Random(f"{seed}:placement")
        self._slot_of: dict[int, int] = {}
        self.tokens, self.uses = array("I"), array("I")
        """Of each distinct part, by its slot: the most of its tokens that came, and how often."""
        self.requests = 0
        self.load = [0] * pods
        """Requests of each pod when placed by affinity."""
        self.one_cache_tokens = 0
        """Hit by one cache without end."""
        self.together_tokens = 0
        """Hit by one cache with the room of all pods."""
        self.placements = {name: Placement(pods, kv_tokens) for name in placements}
        self._together = LruCache(kv_tokens * pods) if together else None

    def add(self, arrival: Arrival) -> list[int]:
        """Place the request; the slots of its prompt's parts, and of an answer that comes again."""
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
            # A later prompt contains it, and who generated it holds it.
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
        """The first part that is not shared by more requests than half a pod should get."""
        common = max(_COMMON_MIN, self.requests / (2 * self._pods))
        for slot, part in zip(slots, prompt.hashes, strict=True):
            if self.uses[slot] <= common:
                return part
        return xxhash.xxh64_intdigest(index.to_bytes(8, "little"))


class Placement:
    """Pods under one way to place requests: caches without end, and caches of their size."""

    def __init__(self, pods: int, kv_tokens: int) -> None:
        self.masks: list[int] = []
        """Slot -> bit p says that pod p has seen the part."""
        self.hit_tokens = 0
        self.lru_hit_tokens = 0
        self._lru = [LruCache(kv_tokens) for _ in range(pods)]

    def match(self, pod: int, slots: Sequence[int], prompt: Parts, known: Sequence[int]) -> None:
        """Count what `pod` holds; `known` tokens of a part are held where it is held."""
        masks, bit = self.masks, 1 << pod
        for slot, size in zip(slots, prompt.tokens, strict=True):
            have = known[slot] if masks[slot] & bit else 0
            if have < size:
                self.hit_tokens += have
                break
            self.hit_tokens += size
        self.lru_hit_tokens += self._lru[pod].match(prompt.hashes, prompt.tokens)

    def hold(self, pod: int, slots: Sequence[int], held: Parts) -> None:
        """From now on `pod` holds these."""
        masks, bit = self.masks, 1 << pod
        for slot in slots:
            masks[slot] |= bit
        self._lru[pod].insert(held.hashes, held.tokens)
