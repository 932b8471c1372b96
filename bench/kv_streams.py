"""Cost of a hundred engines that send KV-cache events at once, for ten seconds: `python -m bench
kv_streams`.

The engines are one process that is not measured, each with a port of ZMTP at an address of its own.
The receiver is that of `epp serve`, sockets included. Each engine sends one message per step, with
as many blocks stored as removed; the steps are spread over time. The delay of the event loop is
sampled every five milliseconds. A period in which the engines send nothing shows the machine's own
delay.

Engines that get no CPU send less than they should. The blocks that the picker has applied are
therefore compared with those sent by then, and the latter with those that were due.

A processor that sleeps between turns of the loop is slow when it wakes, more so if other virtual
machines use it: by a third in one minute and by nothing in the next. Everything is measured a
second time while processes of the lowest priority keep every processor awake. That is the cost of a
turn on a processor that also serves requests.
"""

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Semaphore
from random import Random
from typing import Final, cast

import msgspec
import numpy as np

from bench.kv_events import CHANGES_PER_S, DOCUMENT, ENGINES, KEPT_BLOCKS, Engine
from bench.place import free_ports
from bench.pods import allow_open_files
from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.kv_events.stream import StreamState
from epp.core.types import Endpoint
from epp.shell.engines.kv_events import KVEventListener
from epp.shell.process.event_loop import loop_factory
from epp.shell.process.garbage import (
    GARBAGE_THRESHOLDS,
    GarbageCollection,
    exempt_existing_objects,
)

MEASURED_S: Final = 10.0
QUIET_S: Final = 4.0
BLOCK_TOKENS: Final = 16
BLOCKS: Final = 13
"""Number of KV blocks that each message reports as stored; it reports as many as removed."""
FILLED: Final = KEPT_BLOCKS // BLOCKS + 1
"""Number of messages that an engine sends until its KV cache is full."""
MESSAGES: Final = int(MEASURED_S * CHANGES_PER_S / (2 * BLOCKS))
"""Number of messages that an engine sends in each measurement."""
ASKED_EVERY_S: Final = 0.005
READY_S_MAX: Final = 240.0
TIMES: Final = 2
"""Number of measurements: one with the machine as it is, one with every processor kept awake."""
_TOPIC: Final = b"kv@bench"
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


def hosts() -> list[str]:
    """Return an address of the loopback interface for each engine."""
    return [f"127.0.1.{at + 1}" for at in range(ENGINES)]


# --- engines, in a process of their own --------------------------------------------------------


def _frame(part: bytes, more: int) -> bytes:
    if len(part) > 255:
        return bytes([2 | more]) + len(part).to_bytes(8, "big") + part
    return bytes([more, len(part)]) + part


def _messages(number: int, count: int) -> list[bytes]:
    """Return the first `count` messages of engine `number`, in the frames in which it
    sends them.
    """
    engine = Engine(Random(f"bench:kv_streams:{number}"), BLOCK_TOKENS, BLOCKS)
    found = []
    for sequence in range(count):
        counted = sequence.to_bytes(8, "big")
        found.append(_frame(_TOPIC, 1) + _frame(counted, 1) + _frame(engine.message(), 0))
    return found


class _Publisher(asyncio.Protocol):
    """An engine's side of the connection to the picker, over which it sends its KV-cache events."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(_GREETING + _READY)


def _itself(publisher: _Publisher) -> _Publisher:
    """Return `publisher`: asyncio calls this factory for the only connection that an engine gets."""
    return publisher


async def _publish(port: int, told: Connection, sent_messages: "Synchronized[int]") -> None:
    loop = asyncio.get_running_loop()
    streams = [_messages(number, FILLED + TIMES * MESSAGES) for number in range(ENGINES)]
    publishers = [_Publisher() for _ in range(ENGINES)]
    for host, publisher in zip(hosts(), publishers, strict=True):
        await loop.create_server(partial(_itself, publisher), host, port)
    told.send("ready")

    def send(number: int, at: int) -> None:
        transport = publishers[number].transport
        assert transport is not None, "the picker has connected"
        transport.write(streams[number][at])

    # The picker receives all engines by the time it says so.
    await asyncio.to_thread(told.recv)
    for at in range(FILLED):
        for number in range(ENGINES):
            send(number, at)
        await asyncio.sleep(0.05)
    for first in range(FILLED, FILLED + TIMES * MESSAGES, MESSAGES):
        await asyncio.to_thread(told.recv)
        began_s = loop.time()
        for sent in range(MESSAGES * ENGINES):
            due_s = began_s + sent * MEASURED_S / (MESSAGES * ENGINES)
            if due_s > loop.time():
                await asyncio.sleep(due_s - loop.time())
            turn, number = divmod(sent, ENGINES)
            send(number, first + turn)
            sent_messages.value = sent + 1
    await asyncio.to_thread(told.recv)


def _engines(port: int, told: Connection, sent_messages: "Synchronized[int]") -> None:
    allow_open_files()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_publish(port, told, sent_messages))


def _stay_awake(started: Semaphore) -> None:
    """Use one processor at the lowest priority until the process is terminated."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    started.release()
    while True:
        pass


@contextmanager
def kept_awake() -> Iterator[None]:
    """Keep every processor awake during the context, with processes that yield to all others."""
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Semaphore(0)
    processes = [
        spawn.Process(target=_stay_awake, args=(started,), daemon=True)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        for process in processes:
            process.start()
        for _ in processes:
            started.acquire()
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


# --- the picker ---------------------------------------------------------------------------------


class Lateness:
    """A sampler of the event loop's delay in seconds."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._due_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._ask_at(asyncio.get_running_loop().time() + ASKED_EVERY_S)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _ask_at(self, due_s: float) -> None:
        self._due_s = due_s
        self._handle = asyncio.get_running_loop().call_at(due_s, self._come)

    def _come(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self.late_s.append(now_s - self._due_s)
        self._ask_at(max(self._due_s, now_s) + ASKED_EVERY_S)


class Measured(msgspec.Struct, frozen=True):
    """The picker's CPU use and loop delays in one period of measurement."""

    cores: float
    blocks: int
    """Number of stored and removed blocks that the picker applied to its index in the period."""
    late_s: Sequence[float]

    def late_ms(self) -> str:
        """Return the median, the 99th percentile and the maximum of the loop's delay in
        milliseconds.
        """
        return " / ".join(f"{1e3 * np.quantile(self.late_s, at):.1f}" for at in (0.5, 0.99, 1.0))


async def _measure(blocks: Callable[[], int], for_s: float) -> Measured:
    lateness = Lateness()
    lateness.start()
    began_s, cpu_s, before = time.monotonic(), time.process_time(), blocks()
    await asyncio.sleep(for_s)
    elapsed_s = time.monotonic() - began_s
    cores = (time.process_time() - cpu_s) / elapsed_s
    lateness.stop()
    return Measured(cores, blocks() - before, lateness.late_s)


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`. Raise `TimeoutError` if it is not true within `READY_S_MAX`."""
    async with asyncio.timeout(READY_S_MAX):
        while not condition():  # noqa: ASYNC110  it tells nobody
            await asyncio.sleep(0.01)


def _listener(port: int) -> tuple[KVEventListener, list[Endpoint]]:
    at_port = f"kvEventsConfig: {{podDiscoveryConfig: {{socketPort: {port}}}}}"
    document = DOCUMENT.replace("tokenProcessorConfig:", f"{at_port}\n    tokenProcessorConfig:")
    settings = build_settings(load_config(document, "bench", plugin_tables()))
    scheduler = Scheduler(settings, seed=1)
    pool = [
        Endpoint(endpoint_id=f"uid-{at}:8000", name=f"pod-{at}", address=f"{host}:8000")
        for at, host in enumerate(hosts())
    ]
    scheduler.take(PoolReplaced(pool), time.monotonic())
    listener = KVEventListener(scheduler, seed=1)
    listener.replace(pool)
    return listener, pool


async def _hear(
    port: int, engines: Connection, sent_messages: "Synchronized[int]"
) -> list[tuple[str, str]]:
    listener, pool = _listener(port)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    exempt_existing_objects()
    running = asyncio.gather(listener.run(), GarbageCollection().run())

    def blocks() -> int:
        return sum(heard.blocks_heard for _, heard in listener.subscriptions())

    await _until(lambda: all(row.state is StreamState.LIVE for row in listener.rows()))
    engines.send("fill")
    before = len(pool) * (2 * FILLED * BLOCKS - KEPT_BLOCKS)
    await _until(lambda: blocks() >= before)
    said = len(pool) * MESSAGES * 2 * BLOCKS

    async def rows(what: str) -> list[tuple[str, str]]:
        quiet = await _measure(blocks, QUIET_S)
        noted = blocks()
        engines.send("go")
        busy = await _measure(blocks, MEASURED_S)
        said_meanwhile = 2 * BLOCKS * sent_messages.value
        await _until(lambda: blocks() >= noted + said)
        return _rows_of(what, quiet, busy, said_meanwhile, said)

    found = await rows("")
    with kept_awake():
        found += await rows(", no processor asleep")
    engines.send("end")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return found


def _rows_of(
    what: str, quiet: Measured, busy: Measured, said_meanwhile: int, said: int
) -> list[tuple[str, str]]:
    """Return rows (what, how much) about one measurement of a hundred engines' KV-cache events.

    `said_meanwhile` is the number of blocks that the engines had sent at the end of the
    measurement, `said` the number that they should have sent.
    """
    per_change_us = busy.cores * MEASURED_S / busy.blocks * 1e6
    return [
        (
            f"{ENGINES} engines, {CHANGES_PER_S:,} changes a second each, {MEASURED_S:.0f} s{what}: cores",
            f"{busy.cores:.2f}, quiet {quiet.cores:.2f}, {per_change_us:.2f} us a change",
        ),
        (
            "  how late the loop is: median / p99 / most",
            f"{busy.late_ms()} ms, quiet {quiet.late_ms()} ms",
        ),
        (
            "  of what they had said by then, taken note of",
            f"{busy.blocks / max(1, said_meanwhile):.1%}, said {said_meanwhile / said:.1%} of what was due",
        ),
    ]


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the CPU use and the event loop's delay while the picker
    receives the KV-cache events of a hundred engines.
    """
    (port,) = free_ports(1)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    sent_messages = spawn.Value("q", 0)
    process = spawn.Process(target=_engines, args=(port, theirs, sent_messages), daemon=True)
    process.start()
    allow_open_files()
    try:
        ours.recv()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_hear(port, ours, sent_messages))
    finally:
        process.terminate()
        process.join()
