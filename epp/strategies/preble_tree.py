"""The state of AIBrix's Preble variant: a radix tree of blocks that knows what its nodes cost.

**The tree.** A chained hash names a whole prompt up to its block, so one dict from the first hash
of each run of blocks is the children table of every node at once. A prompt that turns off inside a
run splits it; the endpoint that gets the prompt is put on every node of its path. The dict is also
the order of use, children before their parents, so that what is oldest is always a leaf.

**The window.** The node where a prompt ends counts it for some minutes. What such nodes cost is
added up by endpoint as they change, because a decision cannot visit them all.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta, Struct

from epp.core.duration import check_above_zero
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import BYTES_PER_TOKEN
from epp.plugins.contract import (
    Abilities,
    Affinity,
    AffinityIndex,
    Duration,
    Floats,
    InferenceRequest,
    Origin,
    Parameters,
    Seconds,
)
from epp.strategies.holder_bits import slots_of
from epp.strategies.preble_prefill import Gpu, prefill_s

TREE_BLOCKS: Final = "tree_blocks"
"""Column, the same for all: leading blocks that the tree knows, whoever holds them."""
REQUESTS: Final = "requests"
"""Column: requests of the window that end in nodes which it holds."""
COST_S: Final = "cost_s"
"""Column: what those nodes cost."""

_DECODE_S_PER_TOKEN: Final = 0.15
"""Of an answer, at any load; what is measured is never fed back."""
_EXPIRED_PER_CALL_MAX: Final = 4_096
"""Nodes or requests that one `expire` drops at most."""
_WINDOW_MAX: Final = 262_144
"""Requests that are counted at most; of more the oldest leave the window early."""


class PrebleTreeSettings(Parameters, frozen=True):
    """AIBrix's constants, but for the size of a block and the limits of the tree: it has none."""

    type_name: ClassVar[str] = "preble-tree-producer"
    abilities: ClassVar[Abilities] = Abilities(origin=Origin.DECIDED, counts_blocks=True)

    block_tokens: Annotated[int, Meta(ge=1)] = 16
    """Tokens in a block; AIBrix's tree is by the token."""
    prompt_blocks_max: Annotated[int, Meta(ge=1, le=65_536)] = 8_192
    blocks_max: Annotated[int, Meta(ge=1)] = 131_072
    """Blocks in the tree; above it the longest unused prompts go."""
    ttl: Duration = Duration(300.0)
    window: Duration = Duration(180.0)
    gpu: Gpu = Gpu.V100
    decode_tokens: Annotated[int, Meta(ge=0)] = 45
    """Length that every answer is taken to have."""
    shares_cost: bool = False
    """The endpoints of a node share its prefill cost; AIBrix divides by the models there: by 1."""
    evicts_from_parents: bool = True
    """With a node its endpoints are forgotten all the way up, as AIBrix does."""

    def __post_init__(self) -> None:
        check_above_zero("ttl", self.ttl)
        check_above_zero("window", self.window)

    def open(self) -> AffinityIndex:
        """A new, empty tree."""
        return PrebleTree(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """A tree with other settings starts anew: its sums are of the old ones."""
        return isinstance(index, PrebleTree) and index.settings == self


class _Node(Struct, eq=False):
    """A run of blocks; it points upwards only."""

    run: bytes
    parent: "_Node | None"
    start: int
    """Blocks before it."""
    at_s: Seconds
    holders: int = 0
    """Slots as bits."""
    children: int = 0
    requests: int = 0
    """Of the window, that end here."""
    hit_blocks: int = 0
    prompt_blocks: int = 0
    cost_s: Seconds = 0.0
    """As it was added to each holder."""
    gone: bool = False

    @property
    def blocks(self) -> int:
        return len(self.run) // HASH_BYTES


class _Counted(Struct, eq=False):
    """A request in the window."""

    at_s: Seconds
    node: _Node
    hit_blocks: int
    prompt_blocks: int
    counts: bool = True


class PrebleTree:
    """The unit is a block of the first prompt of a request, up to the deepest node that a slot has.

    `TREE_BLOCKS`, `REQUESTS` and `COST_S` are columns. To forget an endpoint takes a look at every
    node.
    """

    def __init__(self, settings: PrebleTreeSettings) -> None:
        self.settings: Final = settings
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        """First hash of a run -> its node; the longest unused first."""
        self._window: deque[_Counted] = deque()
        self._requests: Floats = np.zeros(8)
        self._cost_s: Floats = np.zeros(8)
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """How deep each slot's deepest node on the way of `request` reaches."""
        matched = np.zeros(slots, dtype=np.int64)
        depth = 0
        chain = self._chain(request)
        for node, shared in self._path(chain):
            if node.at_s < now - self.settings.ttl:
                break
            depth = node.start + shared
            for slot in slots_of(node.holders):
                if slot < slots:
                    matched[slot] = depth
        columns = {
            TREE_BLOCKS: np.full(slots, float(depth)),
            REQUESTS: _fitted(self._requests, slots),
            COST_S: _fitted(self._cost_s, slots),
        }
        return Affinity(matched, len(chain) // HASH_BYTES, columns)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """The path of `request` is held by `slot`, and its end counts one request more."""
        chain = self._chain(request)
        if not chain:
            return None
        self._make_room(slot)
        end = self._inserted(chain, now)
        joined: list[_Node] = []
        node: _Node | None = end
        while node is not None:
            # Who held it before it expired, unswept, holds it no more.
            holders = node.holders if node.at_s >= now - self.settings.ttl else 0
            if not holders >> slot & 1:
                joined.append(node)
            self._change(node, holders | 1 << slot)
            node.at_s = now
            # The end first, so that parents are always younger than their children.
            self._nodes.move_to_end(node.run[:HASH_BYTES])
            node = node.parent
        counted = _Counted(now, end, end.start, end.start + end.blocks)
        self._change(end, end.holders, counted, 1)
        self._window.append(counted)
        if len(self._window) > _WINDOW_MAX:
            self._uncount(self._window.popleft())
        while self._blocks > self.settings.blocks_max:
            self._remove(next(iter(self._nodes.values())))
        return counted, joined

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """`slot` is taken from the nodes that it came to, and the request from its end."""
        if recorded is None:
            return
        counted, joined = recorded
        self._uncount(counted)
        for node in joined:
            if not node.gone:
                self._change(node, node.holders & ~(1 << slot))

    def forget(self, slot: int) -> None:
        """No node is held by `slot`."""
        for node in self._nodes.values():
            if node.holders >> slot & 1:
                self._change(node, node.holders ^ 1 << slot)
        if slot < len(self._cost_s):
            self._requests[slot] = self._cost_s[slot] = 0.0

    def expire(self, now: Seconds) -> None:
        """Count no more what left the window, and drop what was not used for the TTL."""
        for _ in range(_EXPIRED_PER_CALL_MAX):
            if not self._window or self._window[0].at_s > now - self.settings.window:
                break
            self._uncount(self._window.popleft())
        for _ in range(_EXPIRED_PER_CALL_MAX):
            oldest = next(iter(self._nodes.values()), None)
            if oldest is None or oldest.at_s >= now - self.settings.ttl:
                break
            self._remove(oldest)

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The tree does not know how large caches are."""

    # The tree.

    def _chain(self, request: InferenceRequest) -> bytes:
        settings = self.settings
        block_bytes = settings.block_tokens * BYTES_PER_TOKEN
        chains = request.chains_of(block_bytes, settings.prompt_blocks_max)
        return chains[0][: settings.prompt_blocks_max * HASH_BYTES] if chains else b""

    def _path(self, chain: bytes) -> Iterator[tuple[_Node, int]]:
        """(node, blocks of it that `chain` shares) on the way; of the last one perhaps not all."""
        at = 0
        while at < len(chain):
            node = self._nodes.get(chain[at : at + HASH_BYTES])
            if node is None:
                return
            end = at + len(node.run)
            if chain[at:end] == node.run:
                yield node, node.blocks
                at = end
                continue
            one = np.frombuffer(node.run, dtype=np.uint64)
            other = np.frombuffer(chain[at:end], dtype=np.uint64)
            least = min(len(one), len(other))
            differs = np.flatnonzero(one[:least] != other[:least])
            yield node, int(differs[0]) if len(differs) else least
            return

    def _inserted(self, chain: bytes, now: Seconds) -> _Node:
        """The node in which `chain` ends, which is made if it is not there."""
        last: _Node | None = None
        at = 0
        for node, shared in self._path(chain):
            last = node if shared == node.blocks else self._split(node, shared)
            at += shared * HASH_BYTES
        if at < len(chain):
            new = _Node(chain[at:], last, at // HASH_BYTES, now)
            if last is not None:
                last.children += 1
            self._nodes[new.run[:HASH_BYTES]] = new
            self._blocks += new.blocks
            last = new
        assert last is not None, "a chain has blocks"
        return last

    def _split(self, node: _Node, blocks: int) -> _Node:
        """Make the first `blocks` of `node` its parent, held by the same, and return that."""
        cut = blocks * HASH_BYTES
        upper = _Node(
            node.run[:cut], node.parent, node.start, node.at_s, holders=node.holders, children=1
        )
        self._nodes[upper.run[:HASH_BYTES]] = upper
        self._change(node, node.holders, shortened_by=blocks)
        node.parent = upper
        self._nodes[node.run[:HASH_BYTES]] = node
        return upper

    def _remove(self, node: _Node) -> None:
        """Drop a leaf."""
        assert not node.children, "the longest unused node has no children"
        holders = node.holders
        self._change(node, 0)
        node.gone = True
        del self._nodes[node.run[:HASH_BYTES]]
        self._blocks -= node.blocks
        parent = node.parent
        if parent is not None:
            parent.children -= 1
        while self.settings.evicts_from_parents and parent is not None:
            self._change(parent, parent.holders & ~holders)
            parent = parent.parent

    # What nodes cost.

    def _uncount(self, counted: _Counted) -> None:
        if counted.counts and not counted.node.gone:
            self._change(counted.node, counted.node.holders, counted, -1)
        counted.counts = False

    def _change(
        self,
        node: _Node,
        holders: int,
        counted: _Counted | None = None,
        times: int = 0,
        shortened_by: int = 0,
    ) -> None:
        """Change `node`, and with it what its holders have in all."""
        self._weigh(node, -1)
        node.holders = holders
        if shortened_by:
            node.start += shortened_by
            node.run = node.run[shortened_by * HASH_BYTES :]
        if counted is not None:
            node.requests += times
            node.hit_blocks += times * counted.hit_blocks
            node.prompt_blocks += times * counted.prompt_blocks
        node.cost_s = self._cost_of(node)
        self._weigh(node, 1)

    def _weigh(self, node: _Node, sign: int) -> None:
        if not node.requests:
            return
        for slot in slots_of(node.holders):
            self._requests[slot] += sign * node.requests
            # Rounding must not leave a cost where nothing is.
            self._cost_s[slot] += sign * node.cost_s
            if not self._requests[slot]:
                self._cost_s[slot] = 0.0

    def _cost_of(self, node: _Node) -> Seconds:
        if not node.requests:
            return 0.0
        settings = self.settings
        missed = 1.0 - node.hit_blocks / node.prompt_blocks
        tokens = node.blocks * settings.block_tokens
        context = (node.start + node.blocks) * settings.block_tokens
        prefill = missed * node.requests * prefill_s(settings.gpu, tokens, context)
        if settings.shares_cost:
            prefill /= max(1, node.holders.bit_count())
        return prefill + settings.decode_tokens * _DECODE_S_PER_TOKEN

    def _make_room(self, slot: int) -> None:
        if slot >= len(self._cost_s):
            self._requests = _fitted(self._requests, 2 * slot)
            self._cost_s = _fitted(self._cost_s, 2 * slot)


def _fitted(column: Floats, slots: int) -> Floats:
    """The first `slots` of `column`, 0 where it has none; a new array."""
    fitted = np.zeros(slots)
    known = min(slots, len(column))
    fitted[:known] = column[:known]
    return fitted
