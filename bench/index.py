"""Memory and time of the prefix index.

`python -m bench.index` prints the table. Memory is the growth of the resident set of a fresh
process per (block, endpoint) pair in the index. Times are medians without hashing.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

from epp.core.knowledge.prefix import PrefixIndex, PrefixIndexSettings
from epp.core.prompt.request import InferenceRequest

ENDPOINTS = 100
CAPACITY_BLOCKS = 31_250
SHARED_BY = 8
BLOCK_BYTES = 256


def request_of(*chains: bytes) -> InferenceRequest:
    """Return a request whose prompts are already hashed to `chains`."""
    return InferenceRequest(request_id="", chains={BLOCK_BYTES: chains})


def fill(
    index: PrefixIndex,
    endpoints: int,
    run_blocks: tuple[int, int],
    random: Random,
    now: float = 0.0,
) -> None:
    """Fill `index` to 99.9 %: a quarter of the prompts are recorded at eight endpoints each, the
    others at one.

    All prompts are distinct and `run_blocks` (from, to) blocks long, so nothing is saved by sharing
    within an endpoint.
    """
    turn = prompts = 0
    while index.entries < 0.999 * endpoints * CAPACITY_BLOCKS:
        chain = random.randbytes(8 * random.randint(*run_blocks))
        prompts += 1
        for _ in range(SHARED_BY if prompts % 4 == 0 else 1):
            index.record(request_of(chain), turn % endpoints, now + prompts * 1e-4)
            turn += 1


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the median time in microseconds of one of `calls` calls of `call`."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times) * 1e6


def full_index(shortest: int, longest: int) -> dict[str, float]:
    """Fill an index in this process and return its memory in bytes, the times of its operations in
    microseconds, and its size.

    Prompts are `shortest` to `longest` blocks long.
    """
    random = Random(1)
    index = PrefixIndex(PrefixIndexSettings(memory_max_bytes=1 << 40))
    gc.collect()
    before = resident_bytes()
    fill(index, ENDPOINTS, (shortest, longest), random)
    gc.collect()
    resident = resident_bytes()
    figures: dict[str, float] = {
        "pairs": index.entries,
        "grown": resident - before,
        "resident": resident,
        "estimated": index.bytes_estimated,
        "collect_us": microseconds(gc.collect, 5),
    }

    def newcomer() -> None:
        request = request_of(random.randbytes(8 * 32))
        index.match(request, ENDPOINTS, 1_000.0)
        index.record(request, random.randrange(ENDPOINTS), 1_000.0)

    figures["newcomer_us"] = microseconds(newcomer, 2_000)
    started = time.perf_counter()
    index.forget(0)
    figures["forget_us"] = (time.perf_counter() - started) * 1e6
    figures["expire_us"] = microseconds(lambda: index.expire(1e9), 5)
    return figures


def full_rows() -> list[tuple[str, str]]:
    """Return rows (what, how much) about a full index, from one new process for each length of
    prompts.
    """
    rows = []
    for shortest, longest in ((32, 32), (128, 128), (4, 8)):
        command = [sys.executable, "-m", "bench.index", "full", str(shortest), str(longest)]
        root = Path(__file__).resolve().parent.parent
        answer = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        full = json.loads(answer.stdout)
        length = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        what = f"full index, {ENDPOINTS} x {CAPACITY_BLOCKS:,} blocks, prompts of {length}: "
        rows += [
            (what + "memory a pair", f"{full['grown'] / full['pairs']:.1f} B"),
            (what + "process", f"{full['resident'] / 1e6:.0f} MB"),
            (what + "estimate / memory", f"{full['estimated'] / full['grown']:.2f}"),
            (what + "garbage collector's pause", f"{full['collect_us'] / 1e3:.1f} ms"),
            (what + "match + record of 32 new blocks", f"{full['newcomer_us']:.1f} us"),
            (what + "expire, one call", f"{full['expire_us'] / 1e3:.1f} ms"),
            (what + "forget an endpoint", f"{full['forget_us'] / 1e3:.1f} ms"),
        ]
    return rows


def chat(blocks: int, endpoints: int, random: Random) -> tuple[PrefixIndex, list[bytes]]:
    """Return a prefix index and the prompts of the conversations whose beginnings are recorded in
    it.

    A system prompt of a quarter of the blocks is at all endpoints, all but an eighth of each
    conversation at one, and half of it at another one.
    """
    index = PrefixIndex(PrefixIndexSettings())
    system = random.randbytes(8 * (blocks // 4))
    for slot in range(endpoints):
        index.record(request_of(system), slot, 0.0)
    chains = [system + random.randbytes(8 * (blocks - blocks // 4)) for _ in range(200)]
    for number, chain in enumerate(chains):
        index.record(request_of(chain[: -8 * (blocks // 8)]), number % endpoints, 0.0)
        index.record(request_of(chain[: len(chain) // 2]), (number + 1) % endpoints, 0.0)
    return index, chains


def spread(blocks: int, endpoints: int, random: Random) -> tuple[PrefixIndex, list[bytes]]:
    """Return an index and its only prompt, the worst case: every endpoint has cached a random
    number of the first blocks of the prompt.
    """
    index = PrefixIndex(PrefixIndexSettings())
    chain = random.randbytes(8 * blocks)
    for slot in range(endpoints):
        index.record(request_of(chain[: 8 * random.randint(1, blocks)]), slot, 0.0)
    return index, [chain]


def decide(index: PrefixIndex, chains: list[bytes], endpoints: int) -> Callable[[], None]:
    """Return a function that matches and records the next of the prompts `chains`, at the next of
    eight endpoints.
    """
    turns = iter(range(10**9))

    def call() -> None:
        turn = next(turns)
        request = request_of(chains[turn % len(chains)])
        index.match(request, endpoints, 1.0)
        index.record(request, turn % 8, 1.0)

    return call


def decision_rows() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the time of `match` and `record` of one request, by length,
    endpoints and sharing.
    """
    rows = []
    for endpoints in (100, 1_000):
        for sharing, world in (("chat", chat), ("every endpoint another depth", spread)):
            for blocks in (8, 32, 128, 1_024):
                index, chains = world(blocks, endpoints, Random(2))
                took_us = microseconds(decide(index, chains, endpoints), 300)
                what = f"match + record, {blocks:,} blocks, {endpoints:,} endpoints, {sharing}"
                rows.append((what, f"{took_us:.1f} us"))
    return rows


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the memory and the times of the prefix index."""
    return full_rows() + decision_rows()


if __name__ == "__main__":
    if sys.argv[1:2] == ["full"]:
        print(json.dumps(full_index(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        for what, figure in run():
            print(f"{what:95} {figure:>10}")
