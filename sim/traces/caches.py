"""Model of a prefix cache without an engine, for estimates of hit rates."""

from collections import OrderedDict
from collections.abc import Sequence


class LruCache:
    """A simulated cache of prompt parts that evicts the least recently used part above `tokens_max`
    tokens in total. The end of a prompt is evicted before its beginning.
    """

    __slots__ = ("_held_tokens", "_parts", "tokens_max")

    def __init__(self, tokens_max: float) -> None:
        """Create an empty cache. `tokens_max` may be infinite."""
        self.tokens_max = tokens_max
        self._held_tokens = 0
        self._parts: OrderedDict[int, int] = OrderedDict()
        """Number of cached tokens of each part, by the part's hash; the least recently used part is
        first.
        """

    def match(self, parts: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many tokens of the prompt, from its beginning, are cached.

        `tokens` are the lengths of `parts`.
        """
        held, matched = self._parts, 0
        for part, wanted in zip(parts, tokens, strict=True):
            found = held.get(part, 0)
            if found < wanted:
                return matched + found
            matched += wanted
        return matched

    def insert(self, parts: Sequence[int], tokens: Sequence[int]) -> None:
        """Add the parts of a prompt, and evict other parts if the cache is then too large.

        The first part of the prompt becomes the most recently used one.
        """
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
