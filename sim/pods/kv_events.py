"""The KV-cache events of a simulated engine in the format of vLLM 0.32. This module does no I/O.

The cache changes of an engine step form one frame, which is sent when the step has ended. Blocks
are thus reported as cached only after the engine has computed them. A reset of the cache while
nothing runs is reported with the next step, as in vLLM.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from epp.core.types import Seconds
from sim.pods.tokens import TOKEN_BYTES, chain_seed, decode_ids, hash_chain

FRAMES_KEPT_MAX: Final = 10_000
"""Maximum number of frames of KV events that are stored for replays; vLLM calls it `buffer_steps`."""
_DEVICE: Final = "GPU"
_KIND: Final = "full_attention"


class TokenChain(list[int]):
    """The hashes of the full blocks of a token sequence, together with the tokens, adapter and
    salt.
    """

    __slots__ = ("adapter", "cache_salt", "tokens")

    def __init__(
        self, tokens: bytes, *, block_size_tokens: int, adapter: str, cache_salt: str
    ) -> None:
        """Compute the block hashes of the sequence `tokens`, in which each token is 4 little-endian
        bytes.
        """
        seed = chain_seed(adapter, cache_salt)
        super().__init__(hash_chain(tokens, block_size_tokens=block_size_tokens, seed=seed))
        self.tokens = tokens
        self.adapter = adapter
        self.cache_salt = cache_salt

    def extra_keys(self, start: int, end: int) -> list[list[str] | None]:
        """Return what identifies each block from `start` to `end` besides its tokens: the adapter,
        and for the first block of the sequence the cache salt. The element of a block that has
        neither is None.
        """
        usual = [self.adapter] if self.adapter else None
        extra: list[list[str] | None] = [usual] * (end - start)
        if start == 0 and self.cache_salt:
            extra[0] = [*(usual or ()), self.cache_salt]
        return extra


class KVEvents:
    """A watcher of the cache of one rank of a pod that turns its changes into frames of KV events,
    numbered from 0.

    The keys of the cache must be `TokenChain`s. The last frames are stored for replays, and `send`
    receives each frame when it is complete.
    """

    def __init__(
        self, block_size_tokens: int, *, rank: int = 0, kept_max: int = FRAMES_KEPT_MAX
    ) -> None:
        self.send: Callable[[int, bytes], None] | None = None
        """Function (frame number, payload) that sends a frame of KV events to subscribers, or None
        while the sockets for them are closed.
        """
        self._rank = rank
        self._block_size_tokens = block_size_tokens
        self._events: list[dict[str, Any]] = []
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_max)
        self._next = 0

    def stored(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Record blocks `start` to `end` of a chain as stored, in one event."""
        assert isinstance(keys, TokenChain), (
            "a pod with KV events gives its engine chains with tokens"
        )
        block_bytes = self._block_size_tokens * TOKEN_BYTES
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": keys[start:end],
            "parent_block_hash": keys[start - 1] if start else None,
            "token_ids": decode_ids(keys.tokens[start * block_bytes : end * block_bytes]),
            "block_size": self._block_size_tokens,
            "medium": _DEVICE,
            "extra_keys": keys.extra_keys(start, end),
            "group_idx": 0,
            "kv_cache_spec_kind": _KIND,
        }
        if keys.adapter:
            event["lora_name"] = keys.adapter
        self._events.append(event)

    def forgotten(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        """Record blocks `start` to `end` of a chain as removed, in one event for each block as in
        vLLM.
        """
        self._events += [
            {"type": "BlockRemoved", "block_hashes": [key], "medium": _DEVICE, "group_idx": 0}
            for key in reversed(keys[start:end])
        ]

    def cleared(self) -> None:
        """Record that the engine's whole cache was cleared. The event is sent with those of the next
        engine step.
        """
        self._events.append({"type": "AllBlocksCleared"})

    def end_step(self, at_s: Seconds) -> None:
        """Store the events of a step that ended at `at_s` (Unix time) as one frame for replays, and
        send the frame. Do nothing if there are no events.
        """
        if not self._events:
            return
        payload = msgspec.msgpack.encode([at_s, self._events, self._rank])
        self._events = []
        frame = (self._next, payload)
        self._next += 1
        self._kept.append(frame)
        if self.send is not None:
            self.send(*frame)

    def kept_from(self, first: int) -> list[tuple[int, bytes]]:
        """Return the stored frames of KV events from frame number `first` on, as (number, payload)."""
        return [frame for frame in self._kept if frame[0] >= first]
