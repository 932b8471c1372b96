"""Recordings of kind `prefix_cache`: requests in sequence, for which all cache hits and KV events
must be equal.

`sequential.jsonl` has one request per line, with the tokens of prompt and answer and the
`cached_tokens` that the server reported. `kv_events.jsonl` has the KV events of the run, one ZMQ
message per line.
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
    ReportProgress,
    TruthError,
    all_of,
    converted,
    is_there,
    lines_of,
)

Event: TypeAlias = tuple[str, list[int]]
"""A change of an engine's KV cache: "stored" or "removed", and the hashes of the blocks."""


class Description(Struct, frozen=True, kw_only=True):
    """The content of a prefix-cache recording's `engine.toml`."""

    block_size_tokens: int
    num_gpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int = 2048


class Recorded(Struct, frozen=True, kw_only=True):
    """A recorded request: a line of `sequential.jsonl`."""

    request: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    cached_tokens: int


class WrittenEvents:
    """A `PoolWatcher` that collects the changes of a simulated cache as vLLM reports them in KV
    events. Its chains have one key per block.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def stored(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        self.events.append(("stored", list(keys[start:end])))

    def forgotten(self, keys: Sequence[int], ends: Sequence[int], start: int, end: int) -> None:
        self.events += [("removed", [keys[at]]) for at in range(end - 1, start - 1, -1)]

    def cleared(self) -> None:
        raise AssertionError("recordings contain no reset of a cache")


def judge(
    folder: Path, description: dict[str, Any], report: ReportProgress, given: Profile | None = None
) -> Iterator[Judgement]:
    """Compare a prefix-cache recording with its simulation: yield the results for the
    `cached_tokens` of all requests and, if the recording has `kv_events.jsonl`, for all KV events.
    Raises `TruthError`.

    Cached blocks do not depend on times. A `given` profile replaces the default one.
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
        report(number / len(recorded))
        tokens = encode_ids(row.prompt_token_ids + row.output_token_ids)
        request = EngineRequest(
            str(row.request),
            prompt_tokens=len(row.prompt_token_ids),
            output_tokens=len(row.output_token_ids),
            chain=hash_chain(tokens, block_size_tokens=shape.block_size_tokens),
        )
        engine.submit(request, now)
        # The engine runs pass by pass, because a step of many passes evicts for all of them first.
        while (step := engine.step(now)) is not None:
            now = step.ends_at
        agreed += request.cached_tokens == row.cached_tokens
    yield all_of(folder.name, "requests with the recorded cached_tokens", len(recorded), agreed)
    events = folder / "kv_events.jsonl"
    if is_there(events):
        expected = list(recorded_events(events, shape.block_size_tokens))
        same = sum(ours == theirs for ours, theirs in zip(written.events, expected, strict=False))
        # Additional events are as wrong as missing ones.
        total = max(len(expected), len(written.events))
        yield all_of(folder.name, "blocks stored and removed, in order", total, same)


def recorded_events(file: Path, block_size_tokens: int) -> Iterator[Event]:
    """Yield the recorded KV events with the simulator's block hashes in place of the engine's.
    Raises `TruthError`.
    """
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
                f"{file}: expected KV events in vLLM's format: {problem!r}."
            ) from problem
