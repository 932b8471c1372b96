"""Caches without an engine: what could be hit, and what room there is for it."""

from collections import OrderedDict
from collections.abc import Sequence


class LruCache:
    """Holds the most recently used parts, `tokens_max` tokens together, tails evicted first."""

    __slots__ = ("_held_tokens", "_parts", "tokens_max")

    def __init__(self, tokens_max: float) -> None:
        """`tokens_max` may be infinite."""
        self.tokens_max = tokens_max
        self._held_tokens = 0
        self._parts: OrderedDict[int, int] = OrderedDict()
        """Hash of a part -> how many of its tokens are held; least recently used first."""

    def match(self, parts: Sequence[int], tokens: Sequence[int]) -> int:
        """Tokens of the longest held head of a prompt."""
        held, matched = self._parts, 0
        for part, wanted in zip(parts, tokens, strict=True):
            found = held.get(part, 0)
            if found < wanted:
                return matched + found
            matched += wanted
        return matched

    def insert(self, parts: Sequence[int], tokens: Sequence[int]) -> None:
        """Hold a prompt: its head becomes the most recently used."""
        held, held_tokens = self._parts, self._held_tokens
        get, move_to_end = held.get, held.move_to_end
        for part, wanted in zip(reversed(parts), reversed(tokens), strict=True):
            found = get(part)
            if found is None:
                held[part] = wanted
                held_tokens += wanted
                continue
            move_to_end(part)
            if wanted > found:
                held[part] = wanted
                held_tokens += wanted - found
        while held_tokens > self.tokens_max:
            held_tokens -= held.popitem(last=False)[1]
        self._held_tokens = held_tokens
