"""Number of function calls that a chat costs the picker, from its bytes to the serialised answers.

Timings of the same code vary by 30 % on a shared machine; the number of calls does not.
`sys.setprofile` counts it, as the mean of 60 chats of 450 KB or of 300 smaller ones (design D34). Calls of Python
functions and of functions written in C are counted separately. Operators, constructors of types
written in C, and numpy's universal functions are not counted, because CPython does not report them.

The chats are those of `bench.decision`. Opening and driving a session is included.
"""

import sys
from collections import Counter
from random import Random
from types import FrameType
from typing import Any, Final

from msgspec import Struct

from bench.decision import (
    BLOCK_BYTES,
    Chats,
    Decisions,
    Pool,
    Silent,
    stages_config,
    telemetry_observer,
)
from epp.configuration.build import plugin_tables
from epp.configuration.config import DEFAULT_CONFIG, PickerConfig, load_config
from epp.core.prompt.request import InferenceRequest
from epp.core.types import ApiKind

ENDPOINTS: Final = 100
SIZES: Final = {
    "2 KB": (2_000, 3, 100),
    "8 KB": (8_000, 5, 100),
    "450 KB": (450_000, 288, 20),
}
"""Sizes of the chats: name -> (bytes of the body, number of messages, chats per batch)."""
BATCHES: Final = 3


class Calls(Struct, frozen=True):
    """Mean number of function calls that one chat costs the picker, of Python functions and of C
    functions.
    """

    python: float
    c: float
    files: frozenset[str]
    """Source files of the Python functions that the picker called to serve the chats."""


def calls_of_chat(
    size: str,
    *,
    telemetry: bool,
    queue: bool = False,
    idle: bool = False,
    competing: bool = False,
) -> Calls:
    """Return the mean number of function calls that the picker makes for a chat of one of `SIZES`.

    With `telemetry`, metrics, the sampled log line and the record of recent decisions are included.
    With `queue`, flow control is on, and every request has room. With `idle`, the engines report no
    requests, so that every endpoint has room. With `competing`, another flow sends requests too.
    """
    # Played once before, the same chats find the caches of the codec alike in every process.
    _played(size, telemetry=telemetry, queue=queue, idle=idle, competing=competing)
    return _played(size, telemetry=telemetry, queue=queue, idle=idle, competing=competing)


def _played(size: str, *, telemetry: bool, queue: bool, idle: bool, competing: bool) -> Calls:
    size_bytes, messages, batch = SIZES[size]
    pool = Pool(ENDPOINTS, _with_queue() if queue else None, idle=idle)
    gate = pool.scheduler.state.gate
    observer = telemetry_observer(pool) if telemetry else Silent()
    decisions = Decisions(pool, Chats(size_bytes, messages), observer, batch)
    counted: Counter[str] = Counter()
    files: set[str] = set()

    def count(frame: FrameType, event: str, _: Any) -> None:
        counted[event] += 1
        if event == "call":
            files.add(frame.f_code.co_filename)

    # The first batch fills the caches of headers and labels.
    for number in range(BATCHES + 1):
        chats_of_batch = list(decisions.messages())
        if competing and gate is not None:
            for flow in ("other", ""):
                gate.rivalry.met(flow, 0, pool.now, 1)
        for chat in chats_of_batch:
            if number:
                sys.setprofile(count)
            decisions.serve(chat)
            sys.setprofile(None)
        decisions.close()
    chats = BATCHES * batch
    # The call of `sys.setprofile` that ends the count is counted itself.
    return Calls(counted["call"] / chats, counted["c_call"] / chats - 1, frozenset(files))


def _with_queue() -> PickerConfig:
    """Return the default configuration with the queue on, in which flows take turns."""
    queue = (
        "featureGates: [flowControl]\n"
        "flowControl: {defaultPriorityBand: {fairnessPolicyRef: token-fairness-policy}}\n"
    )
    text = DEFAULT_CONFIG.replace("plugins:", f"{queue}plugins:", 1)
    return load_config(text, "queue on", plugin_tables())


def calls_of_decision(*stages: str, endpoints: int = 1_000) -> int:
    """Return the number of function calls that one routing decision with the scheduling stages
    `stages` takes, of Python and of C functions together.
    """
    pool = Pool(endpoints, stages_config(*stages))
    random = Random("bench:calls")
    counted: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _: Any) -> None:
        counted[event] += 1

    # The first decisions fill caches.
    for number in range(3):
        request = InferenceRequest(
            request_id="bench",
            api=ApiKind.CHAT,
            model="llama",
            prompts=(random.randbytes(30 * BLOCK_BYTES),),
            prompt_tokens=30 * 64,
        )
        if number == 2:
            sys.setprofile(count)
        pool.scheduler.schedule(request, pool.now)
        sys.setprofile(None)
    return counted["call"] + counted["c_call"]


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much): how many Python functions and C functions the picker calls to
    serve one chat.
    """
    rows = []
    for size in SIZES:
        for telemetry, how in ((False, "unobserved"), (True, "with telemetry and log")):
            calls = calls_of_chat(size, telemetry=telemetry)
            what = f"{size} chat over {ENDPOINTS} endpoints, {how}: calls of Python, of C functions"
            rows.append((what, f"{calls.python:.1f}, {calls.c:.1f}"))
    return rows
