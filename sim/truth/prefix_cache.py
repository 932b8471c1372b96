"""Kind `prefix_cache`: requests one after the other; every hit and every block must be the same.

`sequential.jsonl`: a request a line, with the tokens of prompt and answer and the `cached_tokens`
that the server reported. `kv_events.jsonl`: the KV events of the run, one ZMQ message a line.
"""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, Profile, find_profile
from sim.engine.request import EngineRequest
from sim.pods.tokens import encode_ids, hash_chain
from sim.truth.judgement import (
    Judgement,
    Told,
    TruthError,
    all_of,
    converted,
    is_there,
    lines_of,
)

Event: TypeAlias = tuple[str, list[int]]
"""("stored" or "removed", the hashes of the blocks)."""


class Description(Struct, frozen=True, kw_only=True):
    """`engine.toml`."""

    block_size_tokens: int
    num_gpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int = 2048


class Recorded(Struct, frozen=True, kw_only=True):
    """A line of `sequential.jsonl`."""

    request: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    cached_tokens: int


class WrittenEvents:
    """A `PoolWatcher` of chains with a key a block: what vLLM tells in its KV events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def stored(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        self.events.append(("stored", list(keys[start:end])))

    def forgotten(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        self.events += [("removed", [keys[at]]) for at in range(end - 1, start - 1, -1)]

    def cleared(self) -> None:
        raise AssertionError("nobody resets a cache of the truth")


def judge(
    folder: Path, description: dict[str, Any], told: Told, given: Profile | None = None
) -> Iterator[Judgement]:
    """`cached_tokens` of each request, then the KV events, all to agree. Raises TruthError.

    Blocks do not depend on times; a `given` profile stands in the place of the default one.
    """
    shape = converted(folder, description, Description)
    recorded = lines_of(folder / "sequential.jsonl", Recorded)
    settings = EngineSettings(
        blocks_total=shape.num_gpu_blocks,
        block_size_tokens=shape.block_size_tokens,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
    )
    engine = Engine(settings, given or find_profile(DEFAULT_PROFILE))
    engine.pool.watcher = written = WrittenEvents()
    now: Seconds = 0.0
    agreed = 0
    for number, row in enumerate(recorded):
        told(number / len(recorded))
        tokens = encode_ids(row.prompt_token_ids + row.output_token_ids)
        request = EngineRequest(
            str(row.request),
            prompt_tokens=len(row.prompt_token_ids),
            output_tokens=len(row.output_token_ids),
            chain=hash_chain(tokens, block_size_tokens=shape.block_size_tokens),
        )
        engine.submit(request, now)
        # Pass by pass: a step of many passes evicts for all of them before it registers a block.
        while (step := engine.step(now)) is not None:
            now = step.ends_at
        agreed += request.cached_tokens == row.cached_tokens
    yield all_of(folder.name, "requests with the recorded cached_tokens", len(recorded), agreed)
    events = folder / "kv_events.jsonl"
    if is_there(events):
        expected = list(recorded_events(events, shape.block_size_tokens))
        same = sum(ours == theirs for ours, theirs in zip(written.events, expected, strict=False))
        # Events too many are as wrong as events too few.
        total = max(len(expected), len(written.events))
        yield all_of(folder.name, "blocks stored and removed, in order", total, same)


def recorded_events(file: Path, block_size_tokens: int) -> Iterator[Event]:
    """The recorded KV events, with our hashes in the place of the engine's. Raises TruthError."""
    ours: dict[Any, int] = {None: 0}
    for _, _, payload in lines_of(file, tuple[str, str, str]):
        try:
            _, events, *_ = msgspec.msgpack.decode(base64.b64decode(payload))
            for event in events:
                hashes = event["block_hashes"]
                if event["type"] == "BlockRemoved":
                    yield "removed", [ours[block] for block in hashes]
                elif event["type"] == "BlockStored":
                    chain = hash_chain(
                        encode_ids(event["token_ids"]),
                        block_size_tokens=block_size_tokens,
                        seed=ours[event.get("parent_block_hash")],
                    )
                    ours.update(zip(hashes, chain, strict=True))
                    yield "stored", chain
        except (KeyError, TypeError, ValueError, msgspec.DecodeError) as problem:
            raise TruthError(
                f"{file}: not the KV events that were expected: {problem!r}."
            ) from problem
