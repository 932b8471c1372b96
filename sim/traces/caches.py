"""Model of a prefix cache without an engine, for estimates of hit rates."""

from collections import OrderedDict
from collections.abc import Sequence


class LruCache:
    """A cache of the most recently used parts, `tokens_max` tokens in total; tails are evicted
    first.
    """

    __slots__ = ("_held_tokens", "_parts", "tokens_max")

    def __init__(self, tokens_max: float) -> None:
        """Create an empty cache. `tokens_max` may be infinite."""
        self.tokens_max = tokens_max
        self._held_tokens = 0
        self._parts: OrderedDict[int, int] = OrderedDict()
        """Cached tokens by hash of the part; least recently used first."""

    def match(self, parts: Sequence[int], tokens: Sequence[int]) -> int:
        """Return the length in tokens of the longest cached prefix of a prompt."""
        held, matched = self._parts, 0
        for part, wanted in zip(parts, tokens, strict=True):
            found = held.get(part, 0)
            if found < wanted:
                return matched + found
            matched += wanted
        return matched

    def insert(self, parts: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a prompt to the cache; its head becomes the most recently used part."""
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
