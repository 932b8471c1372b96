"""The legs of disaggregated requests in one engine, apart from those that run.

An engine has `Legs` if it has a `KVConnector`. It serves legs besides usual requests, as vLLM does
with its NIXL connector. It transfers nothing itself and knows no lease: its owner calls it when a
transfer ends (`sim/cluster/handovers.py`).

- A prefill leg (`EngineRequest.hands_over`) has one output token. When it finishes, its blocks stay
  held until they are released.
- A decode leg (`EngineRequest.fetches`) needs the blocks of its whole prompt, minus local hits, at
  once. They are taken when the leg is at the head of the queue and there is room. `reserved` then
  lists it, and its transfer may begin. Until then it blocks the queue like any other request. A leg
  in transfer counts neither as running nor against `max_num_seqs`. When its blocks have arrived,
  they can be hit. The next pass computes the last token of its prompt again, and then the leg
  decodes.
"""

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.blocks import BlockPool
from sim.engine.request import EngineRequest


class KVConnector(Struct, frozen=True, kw_only=True):
    """The connector that hands KV blocks to other engines: `--kv-transfer-config`.

    The defaults are those of vLLM's NIXL connector.
    """

    lease_s: Seconds = 30.0
    """Time in seconds that the blocks of a finished prefill leg are held for a decode engine that
    has not read them, unless its heartbeats extend it: `kv_lease_duration`.
    """

    @property
    def heartbeat_s(self) -> Seconds:
        """Interval in seconds of a decode engine's heartbeats while it has a decode leg: a sixth of
        the lease.
        """
        return self.lease_s / 6

    @property
    def renewal_s(self) -> Seconds:
        """Minimum time in seconds, from a heartbeat on, to which the heartbeat extends the lease:
        two thirds of the lease.
        """
        return self.lease_s * 2 / 3


class Legs:
    """The prefill and decode legs of one engine that have KV blocks and do not run."""

    def __init__(self, pool: BlockPool, block_size_tokens: int) -> None:
        self._pool = pool
        self._block_size_tokens = block_size_tokens
        self.fetching: dict[EngineRequest, None] = {}
        """Decode legs whose blocks are reserved and have not arrived, the oldest first. An aborted
        one stays until its transfer ends."""
        self.fetched: deque[EngineRequest] = deque()
        """Decode legs whose blocks have arrived and that no pass has computed yet."""
        self.held: dict[EngineRequest, None] = {}
        """Finished prefill legs whose blocks are held for a decode engine, the oldest first."""
        self.reserved: list[EngineRequest] = []
        """Decode legs that reserved their KV blocks since the engine's owner last cleared this
        list.
        """
        self.stalled = False
        """True if requests wait and no pass can compute anything, until the engine's owner changes
        something, for example when a transfer ends.
        """
        self.shared_blocks = 0
        """Sum of `shared_blocks` over all legs in `fetching`, `fetched` and `held`."""

    def __iter__(self) -> Iterator[EngineRequest]:
        """Yield the legs in `fetching`, `fetched` and `held`: all legs that have KV blocks and do
        not run.
        """
        yield from self.fetching
        yield from self.fetched
        yield from self.held

    def has(self, request: EngineRequest) -> bool:
        """Return whether KV blocks are kept for `request`, by a transfer in progress (decode leg)
        or by a lease (prefill leg).
        """
        return request in self.fetching or request in self.held

    @property
    def waiting(self) -> int:
        """Number of decode legs that have KV blocks and count as waiting, with the reason
        `deferred`: those in transfer, and those whose blocks have arrived.
        """
        return self.fetching_now + len(self.fetched)

    @property
    def fetching_now(self) -> int:
        """Number of decode legs in transfer, without aborted ones."""
        return sum(not request.gone for request in self.fetching)

    def reserve(self, request: EngineRequest, hit: int, hit_free: int) -> None:
        """Take the blocks of a decode leg's whole prompt, of which `hit` are cached, for its
        transfer.

        `hit_free` of the cached blocks have no holder. The pool must have enough free blocks.
        """
        size = self._block_size_tokens
        request.holding = self._pool.hold(request.chain, request.chain_ends, hit)
        request.shared_blocks = hit - hit_free
        self.shared_blocks += request.shared_blocks
        missing = -(-request.prompt_tokens // size) - hit
        self._pool.take(missing)
        request.holding.open_blocks += missing
        request.cached_tokens = hit * size
        request.fetched_tokens = request.prompt_tokens - hit * size
        self.fetching[request] = None
        self.reserved.append(request)

    def received(self, request: EngineRequest) -> None:
        """Let a leg in `fetching` continue, because its blocks have arrived. An aborted leg
        leaves.
        """
        if request.gone:
            self.give_up(request)
            return
        del self.fetching[request]
        full = request.prompt_tokens // self._block_size_tokens
        self._pool.register(request.holding, request.chain, request.chain_ends, full)
        request.computed_tokens = request.prompt_tokens - 1
        request.fetches = False
        self.fetched.append(request)

    def give_up(self, request: EngineRequest) -> None:
        """Remove a decode leg in `fetching`, and release the blocks reserved for it."""
        del self.fetching[request]
        self._free(request)

    def continued(self, request: EngineRequest) -> None:
        """Stop counting the shared blocks of a decode leg that was taken from `fetched` and runs
        now.
        """
        self.shared_blocks -= request.shared_blocks

    def hold(self, request: EngineRequest) -> None:
        """Hold the KV blocks of a prefill leg that has finished, for the decode engine."""
        self.held[request] = None
        self.shared_blocks += request.shared_blocks

    def release(self, request: EngineRequest) -> None:
        """Release the blocks of a prefill leg in `held`. The blocks stay cached."""
        del self.held[request]
        self._free(request)

    def abort(self, request_id: str) -> bool:
        """Remove a decode leg in `fetched` or `fetching`; return False if there is none with this
        id, or if it was aborted before.

        A leg in transfer keeps its blocks until `received` or `give_up`, because the transfer
        writes to them.
        """
        for request in self.fetched:
            if request.request_id == request_id:
                self.fetched.remove(request)
                self._free(request)
                return True
        for request in self.fetching:
            if request.request_id == request_id and not request.gone:
                request.gone = True
                return True
        return False

    def check(self) -> None:
        """Raise AssertionError if the count of shared blocks or the blocks of a leg are wrong."""
        shared = sum(request.shared_blocks for request in self)
        assert shared == self.shared_blocks, "shared blocks of legs are counted"
        size = self._block_size_tokens
        for request in (*self.fetching, *self.fetched):
            assert request.holding.blocks == -(-request.prompt_tokens // size), "blocks for all"

    def _free(self, request: EngineRequest) -> None:
        self.shared_blocks -= request.shared_blocks
        self._pool.release(request.holding)
