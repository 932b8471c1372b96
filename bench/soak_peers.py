"""Pickers that are killed and frozen while they have much to share: `python -m bench.soak --peers`.

Three pickers (`epp serve`, a process each, with one secret) run behind the real Envoy, with six
pods, ordinary load and bursts. These faults come at random, each just after a burst, so that frames
wait on every side:

- A picker is killed (SIGKILL) and started again, or stopped for three seconds (SIGSTOP, SIGCONT).
- A pod is killed or stopped in the same way.
- A broken replica with the secret, and strangers without one, flood a picker and are killed.

The first picker is never killed, so its memory covers the whole time. A run fails if a picker ends
by itself or reports "Assertion failed". It also fails if the memory of the first grows by 10 % or
more after the first fifth, or if a picker is not ready, or a peer is not received, after some quiet
seconds. The report splits lost requests by cause, and lists missed and repeated messages of peers.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from bench.effect import (
    OBSERVED_S_MAX,
    ClosedPort,
    StoppedProcess,
    effects_alone,
    listens,
    require_effect,
    within,
)
from bench.envoy import EnvoyPorts, running_envoy, write_bootstrap
from bench.place import ROOT, Pods, client_session, free_ports, write_endpoints

PICKERS: Final = 3
PODS: Final = 6
RATE_PER_S: Final = 60.0
BURST_REQUESTS: Final = 150
CONVERSATIONS: Final = 300
PROMPT_WORDS: Final = 400
STALL_S: Final = 3.0
AWAY_S: Final = 2.0
FLOOD_S: Final = 1.5
STRANGERS: Final = 300
ASK_S_MAX: Final = 30.0
READY_S_MAX: Final = 60.0
SETTLE_S_MAX: Final = 40.0
GROWTH_MAX: Final = 0.10
WEIGH_S: Final = 1.0
_ESTABLISHED: Final = "01"
_ABORT: Final = "Assertion failed"
_COUNTED: Final = {
    "homing_peer_frames_lost_total": "frames missed",
    "homing_peer_frames_asked_again_total": "frames requested again",
    "homing_peer_frames_recovered_total": "frames that then arrived",
    "homing_peer_records_total": "records learnt",
    "homing_peer_claims_cut_total": "claims cut",
}
"""Counters of the picker and their names in the table of results.

Only records of peers that were applied are counted.
"""


class Ports(Struct, frozen=True):
    """The ports on which one picker listens."""

    grpc: int
    health: int
    metrics: int
    peer: int


class Picker:
    """One picker of the soak test: a process of `epp serve`, started again after each kill."""

    def __init__(self, number: int, ports: Ports, command: Sequence[str], folder: Path) -> None:
        self.number = number
        self.ports = ports
        self.log = folder / f"picker-{number}.log"
        self.resident: list[tuple[float, int]] = []
        self.counted: Counter[str] = Counter()
        """Increase of each counter over all processes of this picker, as far as its metrics page
        showed it before each end.
        """
        self.failures: list[str] = []
        """Sentences about processes of this picker that ended by themselves."""
        self.lives = 0
        self._command = tuple(command)
        self._seen: Counter[str] = Counter()
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._ours = False
        """True while the harness ends the process, so that its end is no failure."""

    @property
    def pages(self) -> str:
        return f"http://127.0.0.1:{self.ports.metrics}"

    @property
    def pid(self) -> int:
        """Process id of the picker's present process, which must have been started."""
        assert self._process is not None, "the picker was started"
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        self.lives += 1
        self._ours = False
        self._seen = Counter()
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=ROOT,
            )
        self._watch = asyncio.create_task(self._watched(self._process), name="picker")

    async def _watched(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self._ours:
            self.failures.append(f"picker {self.number} ended by itself with code {code}")

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def end(self, number: signal.Signals) -> None:
        """End the picker's process on purpose with the signal `number`, and wait until it has
        ended.
        """
        self._ours = self._ours or self.runs
        self.send_signal(number)
        if self._watch is not None:
            await self._watch

    def weigh(self) -> None:
        """Record the resident memory of the picker's process, if it runs."""
        if self._process is None or not self.runs:
            return
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    self.resident.append((time.monotonic(), int(line.split()[1]) * 1024))

    def count(self, page: str) -> None:
        """Add to the counts how much the counters on the metrics page `page` have risen since the
        previous page of the same process.
        """
        seen = _counters(page)
        self.counted.update({what: n - self._seen[what] for what, n in seen.items()})
        self._seen = seen


def _counters(page: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            what = _COUNTED.get(sample.name)
            if what and sample.labels.get("outcome", "applied") == "applied":
                found[what] += int(sample.value)
    return found


class PeerSoak:
    """The state of a soak test with several pickers: the load, the faults, and the
    results so far.
    """

    def __init__(
        self, gateway: str, pods: Pods, pickers: Sequence[Picker], secret: Path, seed: int
    ) -> None:
        self.told: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        self.gateway = gateway
        self._pods = pods
        self._pickers = pickers
        self._secret = secret
        self._random = Random(seed)
        self._asking: set[asyncio.Task[None]] = set()
        self._prompts = prompts(self._random, CONVERSATIONS, PROMPT_WORDS)

    # Load.

    async def load(self, session: ClientSession, lasts_s: float) -> None:
        """Send `RATE_PER_S` requests a second through Envoy for `lasts_s` seconds."""
        started_s = time.monotonic()
        for number in itertools.count():
            due_s = started_s + number / RATE_PER_S
            if due_s > started_s + lasts_s:
                return
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.ask(session)

    def burst(self, session: ClientSession) -> None:
        """Send `BURST_REQUESTS` requests at once, so that messages between pickers wait on every
        side.
        """
        for _ in range(BURST_REQUESTS):
            self.ask(session)

    def ask(self, session: ClientSession) -> None:
        task = asyncio.create_task(self._ask(session))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, session: ClientSession) -> None:
        prompt = self._random.choice(self._prompts)
        headers = {"x-takes-s": f"{self._random.expovariate(1 / 0.1):.3f}"}
        try:
            async with session.post(
                f"{self.gateway}/v1/completions",
                json={"model": "m", "prompt": prompt},
                headers=headers,
            ) as response:
                text = await response.text()
                self.told[fault(response.status, text)] += 1
        except (ClientError, TimeoutError) as error:
            self.told[f"gateway: {type(error).__name__}"] += 1

    async def answered(self) -> None:
        """Wait until every request has an answer or has failed."""
        while self._asking:
            await asyncio.wait(tuple(self._asking))

    # Faults.

    async def trouble(self, session: ClientSession, stop: asyncio.Event) -> None:
        """Inject one random fault after the other, each just after a burst, until `stop`.

        The last fault is undone too.
        """
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "picker killed": self._kill_picker,
            "picker stopped": self._stop_picker,
            "picker stopped, its peer killed": self._stop_and_kill,
            "pod killed": self._kill_pod,
            "pod stopped": self._stop_pod,
            "flooded by a replica": self._flood,
            "flooded by a replica while stopped": self._flood_stopped,
            "flooded by strangers": self._strangers,
        }
        while not stop.is_set():
            await asyncio.sleep(self._random.uniform(0.5, 2.5))
            kind = self._random.choice(list(kinds))
            self.burst(session)
            await asyncio.sleep(self._random.uniform(0.0, 0.1))
            await kinds[kind]()
            self.changes[kind] += 1

    async def _kill_picker(self, besides: Picker | None = None) -> None:
        victim = self._random.choice([one for one in self._pickers[1:] if one is not besides])
        await victim.end(signal.SIGKILL)
        await ClosedPort("killed picker", victim.ports.metrics).during()
        await asyncio.sleep(self._random.uniform(0.1, AWAY_S))
        await victim.start()

    async def _stop_picker(self) -> None:
        victim = self._random.choice(self._pickers)
        async with _stopped(victim.pid, victim.send_signal):
            await asyncio.sleep(STALL_S)

    async def _stop_and_kill(self) -> None:
        """Stop a picker, and kill another one whose frames wait at the stopped picker."""
        victim = self._random.choice(self._pickers)
        async with _stopped(victim.pid, victim.send_signal):
            await asyncio.sleep(self._random.uniform(0.1, 1.0))
            await self._kill_picker(besides=victim)
            await asyncio.sleep(STALL_S)

    async def _kill_pod(self) -> None:
        port = self._random.choice(self._pods.ports)
        await self._pods.kill(port)
        await ClosedPort("killed pod", port).during()
        await asyncio.sleep(self._random.uniform(0.1, AWAY_S))
        await self._pods.start(port)

    async def _stop_pod(self) -> None:
        port = self._random.choice(self._pods.ports)
        pid = self._pods.pid(port)
        async with _stopped(pid, lambda number: self._pods.send_signal(port, number)):
            await asyncio.sleep(STALL_S)

    async def _listening_picker(self) -> Picker:
        """Return a random picker once other replicas can connect to it, `READY_S_MAX` at most.

        The picker may have been killed just before, and still be starting.
        """
        picker = self._random.choice(self._pickers)
        await within(READY_S_MAX, lambda: listens(picker.ports.peer))
        return picker

    async def _flood(self, victim: Picker | None = None) -> None:
        victim = victim or await self._listening_picker()
        arguments = ("-m", "bench.peer_flood", str(victim.ports.peer), str(self._secret))
        flood = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            cwd=ROOT,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            # The kernel counts the connections of a stopped picker too.
            async def flooding() -> bool:
                return connections_from(flood.pid, victim.ports.peer) > 0

            began_s = time.monotonic()
            floods = await within(OBSERVED_S_MAX, flooding)
            ended = "" if flood.returncode is None else f", which ended with {flood.returncode}"
            require_effect(
                floods,
                f"flood of picker {victim.number}",
                observed=f"no connection of the flooding process{ended}",
                expected="at least 1",
            )
            await asyncio.sleep(max(0.0, began_s + FLOOD_S + 0.5 - time.monotonic()))
        finally:
            flood.kill()
            await flood.wait()

    async def _flood_stopped(self) -> None:
        """Let a broken replica flood a picker, stop the picker meanwhile, and end the flood."""
        victim = await self._listening_picker()
        flooding = asyncio.create_task(self._flood(victim))
        await asyncio.sleep(FLOOD_S)
        async with _stopped(victim.pid, victim.send_signal):
            await flooding
            await asyncio.sleep(STALL_S)

    async def _strangers(self) -> None:
        """Open connections to a picker's peer port that send nothing, send invalid data, or close
        at once.
        """
        victim = await self._listening_picker()
        writers: list[asyncio.StreamWriter] = []
        for number in range(STRANGERS):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", victim.ports.peer)
                writers.append(writer)
                if number % 3 == 0:
                    writer.write(self._random.randbytes(10_000))
                elif number % 3 == 1:
                    writer.transport.abort()
        require_effect(
            len(writers) > STRANGERS / 2,
            f"strangers at picker {victim.number}",
            observed=f"{len(writers)} connections that the picker's system accepted",
            expected=f"more than {STRANGERS / 2:g}",
        )
        await asyncio.sleep(1.0)
        for writer in writers:
            writer.transport.abort()

    async def watch(self, session: ClientSession) -> None:
        """Record the pickers' memory and counters once a second, until cancelled."""
        while True:
            await asyncio.gather(*(self.look_at(session, picker) for picker in self._pickers))
            await asyncio.sleep(WEIGH_S)

    async def look_at(self, session: ClientSession, picker: Picker) -> None:
        picker.weigh()
        with contextlib.suppress(ClientError, TimeoutError, OSError):
            async with session.get(
                f"{picker.pages}/metrics", timeout=ClientTimeout(total=5.0)
            ) as response:
                picker.count(await response.text())


def prompts(random: Random, count: int, words: int) -> list[str]:
    """Return `count` prompts that begin with the same `words` words and end with as many words of
    their own.
    """
    known = [f"word{number}" for number in range(1000)]
    beginning = " ".join(random.choices(known, k=words))
    return [beginning + " ".join(random.choices(known, k=words)) for _ in range(count)]


def fault(status: int, text: str) -> str:
    """Return the cause to which a response with `status` and `text` is counted: "served", the
    picker or the pods.
    """
    if status == 200:
        return "served"
    if '"code"' in text:
        return f"picker: refused with {status}"
    if status == 500 and not text:
        return "picker: empty 500"
    return f"pods: {status}"


@contextlib.asynccontextmanager
async def _stopped(pid: int, send: Callable[[signal.Signals], None]) -> AsyncIterator[None]:
    """Stop the process `pid` during the context, by signals given to `send`.

    Raise `NoEffectError` on entry if the process does not stop.
    """
    send(signal.SIGSTOP)
    try:
        await StoppedProcess(pid).during()
        yield
    finally:
        send(signal.SIGCONT)


def connections_from(pid: int, port: int) -> int:
    """Return the number of established connections of the process `pid` to `port` of the loopback
    interface.

    Source: proc_pid_fd(5) and the table of sockets in proc_pid_net(5).
    """
    inodes = set()
    # A process that has ended has no connection.
    with contextlib.suppress(OSError):
        inodes = {str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    peer = f":{port:04X}"
    return sum(
        row[2].endswith(peer) and row[3] == _ESTABLISHED and f"socket:[{row[9]}]" in inodes
        for row in rows
    )


# Start, end and report.


@contextlib.asynccontextmanager
async def _everything(folder: Path, seed: int) -> AsyncIterator[tuple[PeerSoak, list[Picker]]]:
    drawn = free_ports(3 + PODS + 4 * PICKERS)
    gateway = EnvoyPorts(*drawn[:3])
    ports = [Ports(*drawn[at : at + 4]) for at in range(3, 3 + 4 * PICKERS, 4)]
    pod_ports = drawn[3 + 4 * PICKERS :]
    endpoints, secret = folder / "endpoints.json", folder / "secret"
    write_endpoints(endpoints, pod_ports)
    secret.write_text("soak" * 16)
    peers = ",".join(f"127.0.0.1:{one.peer}" for one in ports)
    pickers = [
        Picker(
            number,
            one,
            (
                *(sys.executable, "-m", "epp", "serve"),
                *("--endpoints-file", str(endpoints), "--secure-serving=false"),
                *("--grpc-port", str(one.grpc), "--grpc-health-port", str(one.health)),
                *("--metrics-port", str(one.metrics), "--seed", str(number)),
                *("--peers", peers, "--peer-port", str(one.peer), "--replicas", str(PICKERS)),
                *("--peer-bind-address", "127.0.0.1", "--peer-secret-file", str(secret)),
            ),
            folder,
        )
        for number, one in enumerate(ports)
    ]
    async with contextlib.AsyncExitStack() as started:
        pods = await started.enter_async_context(Pods(folder, pod_ports))
        for picker in pickers:
            await picker.start()
            started.push_async_callback(picker.end, signal.SIGKILL)
        bootstrap = folder / "envoy.yaml"
        await write_bootstrap(bootstrap, gateway, [f"127.0.0.1:{one.grpc}" for one in ports])
        await started.enter_async_context(running_envoy(bootstrap))
        yield PeerSoak(gateway.url, pods, pickers, secret, seed), pickers


async def _settled(
    session: ClientSession, gateway: str, pickers: Sequence[Picker], wait_s: float
) -> list[str]:
    """Wait until Envoy serves requests, and each picker has all pods and receives all other
    pickers.

    Return sentences about what is missing after `wait_s` seconds; empty if nothing is.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        missing = [
            sentence for picker in pickers if (sentence := await _unsettled(session, picker))
        ]
        if not await _serves(session, gateway):
            missing.append("the gateway serves nothing")
        if not missing or time.monotonic() > deadline_s:
            return missing
        await asyncio.sleep(0.2)


async def _serves(session: ClientSession, gateway: str) -> bool:
    try:
        async with session.post(
            f"{gateway}/v1/completions", json={"model": "m", "prompt": "ready?"}
        ) as response:
            return response.status == 200
    except (ClientError, TimeoutError):
        return False


async def _unsettled(session: ClientSession, picker: Picker) -> str:
    try:
        async with session.get(f"{picker.pages}/debug/endpoints?format=json") as response:
            states = [row["state"] for row in (await response.json())["endpoints"]]
        async with session.get(f"{picker.pages}/debug/peers?format=json") as response:
            peers = (await response.json())["peers"]
    except (ClientError, TimeoutError, OSError) as error:
        return f"picker {picker.number} does not answer: {type(error).__name__}"
    ready = states.count("ready")
    heard = sum(1 for row in peers if row["connected_s"] is not None)
    if ready < PODS or heard < PICKERS - 1:
        return f"picker {picker.number} has {ready} pods ready and {heard} peers"
    return ""


async def soak(minutes: float, seed: int, folder: Path) -> "Outcome":
    """Run the soak test of several pickers for `minutes`, with its files in `folder`, and return
    the results.
    """
    async with (
        _everything(folder, seed) as (running, pickers),
        client_session(ASK_S_MAX) as session,
    ):
        missing = await _settled(session, running.gateway, pickers, READY_S_MAX)
        assert not missing, f"it never began: {missing}"
        began_at_s = time.monotonic()
        stop = asyncio.Event()
        with effects_alone():
            async with asyncio.TaskGroup() as tasks:
                trouble = tasks.create_task(running.trouble(session, stop), name="trouble")
                watch = tasks.create_task(running.watch(session), name="watch")
                await running.load(session, minutes * 60)
                stop.set()
                await trouble
                await running.answered()
                watch.cancel()
        missing = await _settled(session, running.gateway, pickers, SETTLE_S_MAX)
        await asyncio.gather(*(running.look_at(session, picker) for picker in pickers))
        return _outcome(running, pickers, missing, time.monotonic() - began_at_s)


class Outcome(Struct, frozen=True, kw_only=True):
    """The results of a soak test of several pickers."""

    seconds: float
    requests: dict[str, int]
    """Number of requests by their result, which is "served" or the cause of a loss."""
    trouble: dict[str, int]
    lives: list[int]
    """Number of processes that each picker had."""
    aborts: list[str]
    """Sentences about processes of pickers that ended by themselves, and lines of their logs about
    failed assertions.
    """
    unsettled: list[str]
    resident_mb: list[tuple[float, float, float]]
    """Resident memory of each picker in MB: first, last, maximum."""
    growth: float
    """Relative growth of the memory of the picker that is never killed, after the first fifth of
    the time.
    """
    peers: dict[str, int]
    """Numbers of frames and records that pickers exchanged, by what became of them, summed over all
    pickers.
    """

    @property
    def held(self) -> bool:
        return not self.aborts and not self.unsettled and self.growth < GROWTH_MAX


def _outcome(
    running: PeerSoak, pickers: Sequence[Picker], missing: list[str], seconds: float
) -> Outcome:
    aborts = [sentence for picker in pickers for sentence in picker.failures]
    for picker in pickers:
        lines = picker.log.read_text(errors="replace").splitlines()
        aborts += [f"picker {picker.number}: {line[:200]}" for line in lines if _ABORT in line]
    peers: Counter[str] = Counter()
    for picker in pickers:
        peers.update(picker.counted)
    resident = [[count / 1e6 for _, count in picker.resident] for picker in pickers]
    return Outcome(
        seconds=seconds,
        requests=dict(running.told),
        trouble=dict(running.changes),
        lives=[picker.lives for picker in pickers],
        aborts=aborts,
        unsettled=missing,
        resident_mb=[(mb[0], mb[-1], max(mb)) for mb in resident if mb],
        growth=_growth(resident[0]),
        peers={what: peers[what] for what in _COUNTED.values()},
    )


def _growth(resident: Sequence[float]) -> float:
    """Return the relative growth of the memory `resident`: the mean of the last tenth over that of
    the first, after a fifth of the time.
    """
    warm = resident[len(resident) // 5 :]
    share = max(1, len(warm) // 10)
    return sum(warm[-share:]) / sum(warm[:share]) - 1 if warm else 0.0


def table(outcome: Outcome) -> str:
    """Return the results of the soak test as a table for people."""
    total = sum(outcome.requests.values())
    lines = [
        f"{outcome.seconds / 60:.1f} minutes, {PICKERS} pickers, {total:,} requests",
        *(f"  {what:44} {count:>9,}" for what, count in sorted(outcome.requests.items())),
        *(f"  {what:44} {count:>9,} times" for what, count in sorted(outcome.trouble.items())),
        *(f"  {what:44} {count:>9,}" for what, count in outcome.peers.items()),
        f"  {'lives of the pickers':44} {', '.join(map(str, outcome.lives)):>9}",
    ]
    lines += [
        f"  picker {number}: resident {first:.0f} MB at first, {last:.0f} MB at last, at most {most:.0f} MB"
        for number, (first, last, most) in enumerate(outcome.resident_mb)
    ]
    lines += [
        f"  growth of picker 0 after the first fifth: {outcome.growth:+.1%} (must be below {GROWTH_MAX:.0%})",
        f"  aborts: {len(outcome.aborts)} (must be 0)",
        *(f"    {sentence}" for sentence in outcome.aborts),
        *(f"  not well at the end: {sentence}" for sentence in outcome.unsettled),
    ]
    return "\n".join(lines)


def run(minutes: float, seed: int, report: Path | None) -> int:
    """Run the soak test, print its table and write its results as JSON to `report`. Return the exit
    code.

    If `report` is None, the JSON is printed.
    """
    with tempfile.TemporaryDirectory(prefix="homing-soak-") as name:
        outcome = asyncio.run(soak(minutes, seed, Path(name)))
        if not outcome.held:
            for log in sorted(Path(name).glob("picker-*.log")):
                print(
                    f"--- {log.name}\n{log.read_text(errors='replace')[-5_000:]}", file=sys.stderr
                )
    print(table(outcome))
    told = json.dumps({f: getattr(outcome, f) for f in outcome.__struct_fields__}, indent=2)
    if report is None:
        print(told)
    else:
        report.write_text(told + "\n")
    return 0 if outcome.held else 1
