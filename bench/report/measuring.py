"""The rounds of the performance report: in each, every server gets the same load, one after the
other.

Servers run on one core, the generator and the pods' pages on another. All servers of a comparison
run during the whole comparison; the others are idle. The order rotates by one from round to round.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from bench.pods import Pages
from bench.report import workloads
from bench.report.accounting import Disturbance, Watch, forget_peak, memory_bytes
from bench.report.contestants import (
    GO,
    GO_ANYWHERE,
    Contestant,
    Pool,
    Settings,
    doing_nothing,
    floors,
    serving_homing,
    transports,
)
from bench.report.generator import Load, Measured, serve
from bench.report.operators import collecting, operated
from bench.report.pages import pages
from bench.report.verdicts import quantile
from bench.report.workloads import Workload

WARM_S: Final = 0.3
_SETTLE_S: Final = 2.0


class Plan(Struct, frozen=True, kw_only=True):
    """The extent of the performance report's measurements."""

    rounds: int = 5
    duration_share: float = 1.0
    """Factor by which the duration of each measurement is multiplied, under load or idle; warm-ups
    excepted.
    """
    names: tuple[str, ...] = workloads.NAMES


class Sample(Struct, frozen=True, kw_only=True):
    """The result of one server under one load in one round."""

    workload: str
    contestant: str
    round: int
    completed: int
    failed: dict[str, int]
    cpu_us: float | None
    """CPU time of the server in microseconds per completed request; None if none was completed."""
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    late_p99_ms: float
    """99th percentile in milliseconds of the generator's delay for streams that were due."""
    generator_cpu_us: float | None
    generator_share: float
    """Share of its processor core that the generator used, from 0 to 1."""
    disturbance: Disturbance


class Reading(Struct, frozen=True, kw_only=True):
    """One measured value of a picker: the memory that a large body adds, in units of the body's
    size, or the CPU use without load, in cores.
    """

    name: str
    contestant: str
    round: int
    value: float
    disturbance: Disturbance
    note: str = ""


class Results(Struct, kw_only=True):
    """All results of the performance report's measurements."""

    samples: list[Sample]
    readings: list[Reading]
    missing: list[str]
    """A sentence for each server that could not be measured."""


class Generator:
    """The separate process of the load generator, as a context manager that starts and ends it."""

    def __init__(self, core: frozenset[int]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, core), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def play(self, load: Load) -> Measured:
        """Let the generator play a load until its last stream has ended or counts as failed, and
        return its results. If the generator fails, the only result is one failure with the
        generator's message.
        """
        pipe: Pipe = self._pipe
        pipe.send(load)
        told = pipe.recv()
        if isinstance(told, Measured):
            return told
        return Measured(
            completed=0,
            failed={str(told): 1},
            latencies_s=[],
            late_s=[],
            duration_s=0.0,
            generator_cpu_s=0.0,
        )


def cores() -> tuple[frozenset[int], frozenset[int]]:
    """Return the servers' core and the core of everything else, as sets; they are equal if there is
    only one core.
    """
    allowed = sorted(os.sched_getaffinity(0))
    return frozenset(allowed[:1]), frozenset(allowed[1:2] or allowed[:1])


class Measuring:
    """All measurements of the performance report, inside the context `running`.

    `tell` is called with a line for each finished step.
    """

    def __init__(
        self, plan: Plan, generator: Generator, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._generator = generator
        self._folder = folder
        self._tell = tell
        self._server_core, self._other_core = cores()
        commands, missing = floors()
        self._floors = commands
        self.results = Results(samples=[], readings=[], missing=missing)

    @classmethod
    @contextlib.contextmanager
    def running(cls, plan: Plan, tell: Callable[[str], None]) -> Iterator["Measuring"]:
        """Start the generator, create a folder for the servers' files, and yield the
        measurements.
        """
        with tempfile.TemporaryDirectory(prefix="homing-report-") as folder:
            allowed = os.sched_getaffinity(0)
            with Generator(cores()[1]) as generator:
                # This process uses the generator's core, so its waiting costs the servers nothing.
                os.sched_setaffinity(0, cores()[1])
                try:
                    measuring = cls(plan, generator, Path(folder), tell)
                    os.sched_setaffinity(0, allowed)
                    yield measuring
                finally:
                    os.sched_setaffinity(0, allowed)

    def everything(self) -> Results:
        """Measure everything that the plan names, and return the results."""
        names = self._plan.names
        loads = [each for each in workloads.LOADS if each.name in names]
        if loads:
            self._loads(loads)
        if "endpoints" in names:
            self._endpoints()
        if "operators" in names:
            self._operators()
        if "memory" in names:
            self._memory()
        if "idle" in names:
            self._idle()
        return self.results

    def _loads(self, loads: Sequence[Workload]) -> None:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            served = enter(pages(self._other_core, large=False))
            pool = Pool(pages_port=served.port)
            doing = [
                enter(doing_nothing(name, command, self._server_core))
                for name, command in self._floors.items()
            ]
            if GO in self._floors:
                anywhere = frozenset(os.sched_getaffinity(0))
                doing.append(enter(doing_nothing(GO_ANYWHERE, self._floors[GO], anywhere)))
            picking = [
                enter(serving_homing(each, pool, self._folder, self._server_core))
                for each in transports()
            ]
            for load in loads:
                reference = doing if load.floors else [each for each in doing if each.name == GO]
                self._rounds(load, [*reference, *picking], served)

    def _endpoints(self) -> None:
        """Measure pickers with different numbers of endpoints.

        They have no metrics pages, because reading a thousand pages would count as cost of
        requests.
        """
        with contextlib.ExitStack() as stack:
            contestants = [
                stack.enter_context(
                    serving_homing(
                        transport,
                        Pool(endpoints=endpoints),
                        self._folder,
                        self._server_core,
                        Settings(name=f"{endpoints:,} endpoints"),
                    )
                )
                for transport in transports()
                for endpoints in workloads.ENDPOINTS
            ]
            load = Workload(
                name="endpoints", title="8 KB, request phase", shape=workloads.REQUEST.shape
            )
            self._rounds(load, contestants, None)

    def _operators(self) -> None:
        """Measure features for operators, on one transport, because their cost does not depend on
        it.
        """
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            served = enter(pages(self._other_core, large=False))
            collector = enter(collecting())
            contestants = [
                enter(
                    serving_homing(
                        workloads.LEAN,
                        Pool(endpoints=workloads.OPERATED_ENDPOINTS, pages_port=served.port),
                        self._folder,
                        self._server_core,
                        settings,
                    )
                )
                for settings in operated(self._folder, collector)
            ]
            for load in workloads.OPERATED:
                self._rounds(load, contestants, served)

    def _rounds(
        self, load: Workload, contestants: Sequence[Contestant], served: Pages | None
    ) -> None:
        ours = [each.pid for each in contestants] + ([served.pid] if served else [])
        for contestant in contestants:
            self._play(load, contestant, ours, number=-1)
        for number in range(self._plan.rounds):
            first = number % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                self.results.samples.append(self._play(load, contestant, ours, number=number))
            self._tell(f"{load.name}: round {number + 1} of {self._plan.rounds}")

    def _play(
        self, load: Workload, contestant: Contestant, ours: Sequence[int], *, number: int
    ) -> Sample:
        """Play a load at one server and return the result; round -1 is a shorter warm-up at the
        same pace.
        """
        warms = number < 0
        share = min(1.0, WARM_S / load.duration_s) if warms else self._plan.duration_share
        watch = Watch((os.getpid(), self._generator.pid, *ours))
        before_s = contestant.cpu_s()
        measured = self._generator.play(
            Load(
                port=contestant.port,
                shape=load.shape,
                connections=load.connections,
                streams=load.streams,
                duration_s=load.duration_s * share,
                rate_per_s=load.rate_per_s,
                at_once=load.at_once // 10 if warms else load.at_once,
                seed=number,
            )
        )
        cpu_s, completed = contestant.cpu_s() - before_s, measured.completed
        lasted_s = measured.duration_s or float("inf")
        return Sample(
            workload=load.name,
            contestant=contestant.name,
            round=number,
            completed=completed,
            failed=measured.failed,
            cpu_us=cpu_s / completed * 1e6 if completed else None,
            requests_per_s=completed / lasted_s,
            p50_ms=quantile(measured.latencies_s, 0.5) * 1e3,
            p99_ms=quantile(measured.latencies_s, 0.99) * 1e3,
            late_p99_ms=quantile(measured.late_s, 0.99) * 1e3,
            generator_cpu_us=measured.generator_cpu_s / completed * 1e6 if completed else None,
            generator_share=measured.generator_cpu_s / lasted_s,
            disturbance=watch.passed(),
        )

    def _memory(self) -> None:
        """Measure by how much a large body raises the memory of an idle picker, in units of the
        body's size.
        """
        load = workloads.LARGE
        for transport in transports():
            with (
                pages(self._other_core, large=False) as served,
                serving_homing(
                    transport, Pool(pages_port=served.port), self._folder, self._server_core
                ) as picker,
            ):
                time.sleep(WARM_S)
                idle_bytes = memory_bytes(picker.pid)
                for number in range(self._plan.rounds):
                    forget_peak(picker.pid)
                    sample = self._play(load, picker, (picker.pid, served.pid), number=number)
                    above_bytes = memory_bytes(picker.pid, "VmHWM") - idle_bytes
                    self.results.readings.append(
                        Reading(
                            name="memory",
                            contestant=picker.name,
                            round=number,
                            value=above_bytes / workloads.BODY_BYTES_LARGE,
                            disturbance=sample.disturbance,
                            note=f"{idle_bytes / 1e6:.0f} MB idle, {sample.completed} bodies",
                        )
                    )
            self._tell(f"memory: {picker.name}")

    def _idle(self) -> None:
        """Measure the CPU use of an idle picker, on the last transport, because scraping does not
        depend on it.
        """
        transport = transports()[-1]
        lasts_s = workloads.IDLE_S * self._plan.duration_share
        for refresh in workloads.IDLE_CORES_MAX:
            with (
                pages(self._other_core, large=True) as served,
                serving_homing(
                    transport,
                    Pool(pages_port=served.port, refresh=refresh),
                    self._folder,
                    self._server_core,
                ) as picker,
            ):
                time.sleep(_SETTLE_S)
                for number in range(self._plan.rounds):
                    watch = Watch((os.getpid(), self._generator.pid, picker.pid, served.pid))
                    sent, cpu_s, at_s = served.sent.value, picker.cpu_s(), time.monotonic()
                    time.sleep(lasts_s)
                    used_s = picker.cpu_s() - cpu_s
                    passed_s = time.monotonic() - at_s
                    read = max(1, served.sent.value - sent)
                    self.results.readings.append(
                        Reading(
                            name=idle_name(refresh),
                            contestant=picker.name,
                            round=number,
                            value=used_s / passed_s,
                            disturbance=watch.passed(),
                            note=f"{read / passed_s:.0f} pages/s, {used_s / read * 1e6:.0f} µs a page",
                        )
                    )
            self._tell(f"idle: {refresh or 'default interval'}")


def idle_name(refresh: str) -> str:
    """Return the name of the readings of an idle picker whose scrape interval is `refresh`."""
    return f"idle, {refresh or 'default interval'}"
