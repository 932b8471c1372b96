"""Share of the event loop that receiving KV-cache events takes: `python -m bench kv_events`.

Each step of an engine sends one message, as vLLM writes it: a run of stored blocks and as many
removed ones. The measurement begins with the message in the subscription and ends with the index;
sockets are not included. A hundred engines alternate, so that the data of each is not in the
processor's cache. A share of a core is the CPU time of one change (a stored or removed block) times
the changes per second.
"""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from bench.timing import best_us
from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.kv_events.payload import read_payload
from epp.core.subscription import Subscription
from epp.core.types import Endpoint

ENGINES = 100
CHANGES_PER_S = 1_000
"""Stored and removed blocks (of 16 tokens) of each engine per second: the maximum in the published
ladders.
"""
KEPT_BLOCKS = 500
"""Number of blocks in the cache of each simulated engine when it is full."""
MESSAGES = 400
"""Number of messages with KV-cache events in a measured batch."""
BATCHES = 30
SHAPES = {
    "a step of a prompt": (16, 13),
    "a step of a batch that decodes": (16, 3),
    "in blocks of 64": (64, 13),
}
"""Shapes of messages: name -> (tokens in a block of the engine, blocks that a message stores)."""
DOCUMENT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: 64}
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
"""


class Engine:
    """An engine that continues one conversation for ever, and removes the oldest blocks once its
    cache is full.
    """

    def __init__(self, random: Random, block_tokens: int, blocks: int) -> None:
        self._random = random
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._held: list[int] = []
        self._parent: int | None = None
        self.sequence = itertools.count()

    def message(self) -> bytes:
        """Return the payload of the engine's next message of KV-cache events."""
        hashes = [self._random.getrandbits(64) for _ in range(self._blocks)]
        self._held += hashes
        removed = self._held[: max(0, len(self._held) - KEPT_BLOCKS)]
        del self._held[: len(removed)]
        events: list[dict[str, Any]] = [
            {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
            for block in removed
        ]
        size = self._block_tokens * self._blocks
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": self._parent,
                "token_ids": [self._random.getrandbits(17) for _ in range(size)],
                "block_size": self._block_tokens,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * self._blocks,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        self._parent = hashes[-1]
        return msgspec.msgpack.encode([1_700_000_000.0, events, 0])


def subscriptions() -> list[Subscription]:
    """Return one live subscription to KV-cache events for each engine."""
    scheduler = Scheduler(build_settings(load_config(DOCUMENT, "bench", plugin_tables())), seed=1)
    pool = [
        Endpoint(endpoint_id=f"uid-{at}", name=f"pod-{at}", address=f"10.0.0.{at}:8000")
        for at in range(ENGINES)
    ]
    scheduler.take(PoolReplaced(pool), 0.0)
    found = [Subscription(scheduler, slot, replays=False, now=0.0) for slot in range(ENGINES)]
    for subscription in found:
        subscription.connected(0.0)
    return found


def rows_of(name: str, block_tokens: int, blocks: int) -> list[tuple[str, str]]:
    """Return rows (what, how much) with the CPU time of receiving messages of one shape."""
    random = Random(f"bench:{name}")
    heard = subscriptions()
    engines = [Engine(random, block_tokens, blocks) for _ in range(ENGINES)]
    pairs = itertools.cycle(zip(engines, heard, strict=True))

    def messages(count: int) -> Iterator[tuple[Subscription, int, bytes]]:
        for engine, subscription in itertools.islice(pairs, count):
            yield subscription, next(engine.sequence), engine.message()

    def hear(given: tuple[Subscription, int, bytes]) -> None:
        subscription, number, payload = given
        subscription.received(number, payload, 0.0)
        while subscription.works:
            subscription.work(0.0)

    for given in messages(ENGINES * (KEPT_BLOCKS // blocks + 1)):
        hear(given)
    message_us = best_us(hear, lambda: messages(MESSAGES), batches=BATCHES)
    decode_us = best_us(
        lambda given: read_payload(given[2]), lambda: list(messages(MESSAGES)), batches=BATCHES
    )
    changes = 2 * blocks
    share = message_us / changes * 1e-6 * ENGINES * CHANGES_PER_S
    return [
        (
            f"{name}, {changes} changes a message",
            f"{message_us:.1f} us, {message_us / changes:.2f} a change",
        ),
        ("  of that to read it", f"{decode_us:.1f} us"),
        (f"  {ENGINES} engines, {CHANGES_PER_S:,} changes a second each", f"{share:.2f} of a core"),
    ]


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the CPU time of receiving KV-cache events."""
    return [row for name, shape in SHAPES.items() for row in rows_of(name, *shape)]
