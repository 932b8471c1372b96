"""A small engine that tells what it caches as vLLM does, and a publisher that keeps its last frames."""

import hashlib
from collections import OrderedDict, deque
from itertools import count

import msgspec


class FakeEngine:
    """Blocks of `block_tokens`; who was used longest ago goes first, of a prompt the tail."""

    def __init__(self, blocks, block_tokens, *, form="map", digests=False, seed=b"", hybrid=0):
        """`hybrid`: tokens of a second group's window; 0: there is no such group."""
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.form = form
        self.digests = digests
        self.seed = seed
        self.window = hybrid
        self.free = OrderedDict()
        """Number of a physical block -> the hash of what it holds; the next to go first."""
        self.numbers = count()
        self.events = []
        self.rank = 0

    def hashes_of(self, tokens, salt=""):
        parent = hashlib.sha256(self.seed + salt.encode()).digest()
        found = []
        for end in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            block = tokens[end - self.block_tokens : end]
            parent = hashlib.sha256(parent + repr(block).encode()).digest()
            found.append(parent)
        return found

    def cached_tokens(self, tokens, salt=""):
        held = set(self.free.values())
        usable = (len(tokens) - 1) // self.block_tokens
        hit = 0
        for block in self.hashes_of(tokens, salt)[:usable]:
            if block not in held:
                break
            hit += 1
        return hit * self.block_tokens

    def serve(self, tokens, *, salt="", twins=1):
        """Cache `tokens`, as often as they come in one step; return how many were cached."""
        cached = self.cached_tokens(tokens, salt)
        hashes = self.hashes_of(tokens, salt)[: self.blocks // twins]
        hit = cached // self.block_tokens
        used = []
        for number, block in [*self.free.items()]:
            if block in hashes[:hit] and block not in [self.free[each] for each in used]:
                used.append(number)
        kept = {number: self.free.pop(number) for number in used}
        for _ in range(twins):
            new = hashes[hit:]
            room = self.blocks - len(self.free) - len(kept)
            while room < len(new) and self.free:
                _, gone = self.free.popitem(last=False)
                self.remove([gone])
                room += 1
            new = new[:room]
            if new:
                self.store(new, hashes[hit - 1] if hit else None, tokens, hit, salt)
            kept |= {next(self.numbers): block for block in new}
        order = {block: at for at, block in enumerate(hashes)}
        for number, block in sorted(kept.items(), key=lambda item: -order[item[1]]):
            self.free[number] = block
        return cached

    def clear(self):
        self.free.clear()
        self.events.append(
            ["AllBlocksCleared"] if self.form == "array" else {"type": "AllBlocksCleared"}
        )

    def name(self, digest):
        return digest if self.digests else int.from_bytes(digest[-8:], "big")

    def store(self, hashes, parent, tokens, start, salt):
        size = self.block_tokens
        event = {
            "type": "BlockStored",
            "block_hashes": [*map(self.name, hashes)],
            "parent_block_hash": None if parent is None else self.name(parent),
            "token_ids": tokens[start * size : (start + len(hashes)) * size],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [
                [salt] if salt and not (start + at) else None for at in range(len(hashes))
            ],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        self.tell(event)

    def remove(self, hashes):
        self.tell(
            {
                "type": "BlockRemoved",
                "block_hashes": [*map(self.name, hashes)],
                "medium": "GPU",
                "group_idx": 0,
            }
        )

    def tell(self, event):
        self.events.append([*event.values()] if self.form == "array" else event)

    def step(self):
        """The payload of all that happened since the last one."""
        events, self.events = self.events, []
        return msgspec.msgpack.encode([1_000.0, events, self.rank])


class FakePublisher:
    """Numbers frames from 0 and keeps the last `kept`."""

    def __init__(self, kept=10_000):
        self.kept = deque(maxlen=kept)
        self.next = 0

    def publish(self, payload):
        frame = (self.next, payload)
        self.kept.append(frame)
        self.next += 1
        return frame

    def replay(self, first):
        return [frame for frame in self.kept if frame[0] >= first]

    def restart(self):
        self.kept.clear()
        self.next = 0
