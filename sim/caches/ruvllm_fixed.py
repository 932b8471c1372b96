"""RuvLLM's prefix cache as its proposal (ADR-011) intends it: a radix tree that shares the
beginnings of prompts.
"""

from typing import ClassVar

from msgspec import Struct

from epp.core.types import Seconds
from sim.caches.behaviour import UnhashedPool, parts_of
from sim.caches.ruvllm_faithful import RuvllmParameters, Statistics
from sim.engine.blocks import BlockPool
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest


class RuvllmFixed(RuvllmParameters, frozen=True):
    """RuvLLM ADR-011 with its two faults repaired: prompts share every common beginning, and the
    memory budget holds.

    Each edge of this cache's tree of prompts has its own part of the KV cache. The common
    beginning of several prompts is therefore stored once, and any beginning of a stored prompt is
    found. If there is too little room, leaves of the tree that no request uses are evicted: those
    with the fewest hits first, and among these the least recently used. If a prompt still does not
    fit, only the parts (messages) at its beginning that fit are stored.
    """

    type_name: ClassVar[str] = "ruvllm-fixed"

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "RadixTree":
        """Return a cache with an empty radix tree."""
        return RadixTree(
            bytes_max=self.bytes_max(profile),
            bytes_per_token=profile.kv_bytes_per_token,
            min_cache_tokens=self.min_cache_tokens,
        )


class _Node(Struct, eq=False):
    """A node of the radix tree: the text of one part of a prompt, after the text of the node's
    parent.
    """

    key: int
    parent: "_Node | None"
    last_access_s: Seconds
    tokens: int = 0
    """Number of this node's tokens that are stored, counted from the beginning of its part."""
    children: int = 0
    hits: int = 0
    users: int = 0


class RadixTree:
    """RuvLLM's prefix cache in one engine, repaired: a radix tree whose nodes are parts of prompts.
    A key stands for the text of its part and all text before it.
    """

    def __init__(self, *, bytes_max: int, bytes_per_token: int, min_cache_tokens: int) -> None:
        self.statistics = Statistics()
        self._bytes_max = bytes_max
        self._bytes_per_token = bytes_per_token
        self._min_cache_tokens = min_cache_tokens
        self._nodes: dict[int, _Node] = {}
        self._leaves: dict[_Node, None] = {}
        self._using: dict[EngineRequest, dict[_Node, None]] = {}

    def pool(self, blocks_total: int) -> BlockPool:
        """Return a pool in which no block can be hit, because beginnings of prompts are copied on
        write.
        """
        return UnhashedPool(blocks_total)

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the longest beginning of the request's prompt in the tree; restoring it takes no
        time. The nodes of that beginning count as in use until the request leaves. The look-up is
        counted in `statistics`.
        """
        parts = parts_of(request)
        found = start = 0
        path: dict[_Node, None] = {}
        for key, end in zip(parts.keys[: parts.messages], parts.ends, strict=False):
            node = self._nodes.get(key)
            if node is None:
                break
            self._use(node, path, now)
            node.hits += 1
            found = start + min(node.tokens, end - start)
            if found < end:
                break
            start = end
        self._using[request] = path
        self.statistics.count(found, request.prompt_tokens)
        return Found(found)

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the computed prompt in the tree, from its beginning as far as there is room, and
        evict idle leaves for it. Do nothing if it is too short. Writing takes no time.
        """
        if request.prompt_tokens < self._min_cache_tokens:
            return 0.0
        parts, path = parts_of(request), self._using[request]
        parent, start = None, 0
        for key, end in zip(parts.keys[: parts.messages], parts.ends, strict=False):
            node = self._nodes.get(key)
            missing = end - start - (node.tokens if node else 0)
            if node is None:
                if not self._make_room(missing):
                    break
                node = self._grown(key, parent, now)
            self._use(node, path, now)
            if missing > 0:
                if not self._make_room(missing):
                    break
                node.tokens += missing
                self.statistics.memory_bytes += missing * self._bytes_per_token
            parent, start = node, end
        return 0.0

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Release the nodes of the tree that the request used. Those that no other request uses may
        be evicted.
        """
        for node in self._using.pop(request, ()):
            node.users -= 1
        return 0.0

    def _use(self, node: _Node, path: dict[_Node, None], now: Seconds) -> None:
        node.last_access_s = now
        if node not in path:
            node.users += 1
            path[node] = None

    def _grown(self, key: int, parent: _Node | None, now: Seconds) -> _Node:
        node = self._nodes[key] = _Node(key, parent, now)
        self._leaves[node] = None
        if parent is not None:
            parent.children += 1
            self._leaves.pop(parent, None)
        return node

    def _make_room(self, tokens: int) -> bool:
        """Evict idle leaves of the tree until `tokens` more tokens fit. Return False if too few
        leaves are idle.
        """
        room = self._bytes_max - tokens * self._bytes_per_token
        while self.statistics.memory_bytes > room:
            idle = (node for node in self._leaves if not node.users)
            leaf = min(idle, key=lambda node: (node.hits, node.last_access_s), default=None)
            if leaf is None:
                return False
            self._evict(leaf)
        return True

    def _evict(self, leaf: _Node) -> None:
        del self._nodes[leaf.key]
        del self._leaves[leaf]
        self.statistics.evictions += 1
        self.statistics.memory_bytes -= leaf.tokens * self._bytes_per_token
        parent = leaf.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._leaves[parent] = None
