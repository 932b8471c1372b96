"""A cell of the leaderboard: one case, one strategy, one seed; the same figures wherever it runs."""

import hashlib
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from epp.core.types import Seconds
from sim.cluster.policies import PolicySource
from sim.experiments.jobs import JobError, run_job
from sim.experiments.leaderboard.cases import Case
from sim.experiments.leaderboard.sources import code_hash, plugins_hash
from sim.experiments.run import RunSettings
from sim.measurement.summaries import RunSummary, Traffic
from sim.traces.capture import CaptureWriter
from sim.traces.formats import open_trace
from sim.traces.held import HELD_REQUESTS_MAX, HeldTrace
from sim.traces.reading import ReadOptions, content_hash

_FOLDER: Final = "sim-leaderboard-"


class Cell(Struct, frozen=True, kw_only=True):
    """What is run; small enough to be sent to another machine."""

    case: Case
    policy: PolicySource
    seed: int
    repetition: int
    """0 for the first seed: of a file it is the trace as it is."""
    requests: int
    inputs: str = ""
    """`inputs_of` this, where it was made."""

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.policy.name}, seed {self.seed}"


class CellResult(Struct, frozen=True, kw_only=True):
    """What a cell has shown."""

    summary: RunSummary
    inputs: str
    """Of the cell."""


def inputs_of(cell: Cell) -> str:
    """A hash of all that the figures depend on: cell, trace file, code.

    Raises `OSError` for a trace that cannot be read, and as `PolicySource.load` does.
    """
    case = cell.case
    told = {
        # Where the file is does not matter.
        "case": replace(case, file="", says=""),
        "file": _file_hash(case.file) if case.file else "",
        # Who else is on the board does not either.
        "policy": (cell.policy.name if not cell.policy.text else "", cell.policy.text),
        "seed": cell.seed,
        "repetition": cell.repetition,
        "requests": cell.requests,
        "code": code_hash(),
        "plugins": plugins_hash(cell.policy),
    }
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


def run_cell(cell: Cell) -> CellResult:
    """Run it. Raises as `run_job`, and `JobError` where code or trace are not those of `cell`."""
    if inputs_of(cell) != cell.inputs:
        raise JobError(
            "the machine that was to run it has other code, plugins or another trace file than the "
            "one that asked: expected the same"
        )
    if cell.case.file:
        return _result(cell, cell.case.file, span_s=0.0)
    if cell.requests <= HELD_REQUESTS_MAX:
        drawn = _drawn(cell.case, cell.seed, cell.requests)
        return _result(cell, str(drawn.trace.path), span_s=drawn.span_s, held=drawn.trace)
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        path = Path(folder) / f"{cell.case.name}.jsonl"
        span_s = _write_traffic(path, cell.case, cell.seed, cell.requests)
        return _result(cell, str(path), span_s=span_s)


def _result(
    cell: Cell, trace: str, *, span_s: Seconds, held: HeldTrace | None = None
) -> CellResult:
    case = cell.case
    cluster, scenario = case.cluster(), case.scenario(span_s)
    if scenario is not None:
        scenario.check(kinds=cluster.pods, pickers=cluster.replicas)
    settings = RunSettings(
        trace=trace,
        policy=cell.policy,
        cluster=cluster,
        seed=cell.seed,
        repetition=cell.repetition if case.file else 0,
        read=ReadOptions(seed=cell.seed),
        requests_max=cell.requests,
        targets=case.targets,
        scenario=scenario,
    )
    summary = run_job(settings, held).summary
    if case.workload is not None:
        # Each seed draws the traffic anew; the file that it went through says nothing of that.
        summary = replace(summary, traffic=Traffic(generated=True, resampled=None))
    return CellResult(inputs=cell.inputs, summary=summary)


class _Drawn(Struct, frozen=True):
    """The traffic of a case and a seed, which all strategies get."""

    trace: HeldTrace
    span_s: Seconds
    """The latest arrival."""


@lru_cache(maxsize=1)
def _drawn(case: Case, seed: int, requests: int) -> _Drawn:
    """The traffic is drawn once for the cells of a case and a seed, which follow each other."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        path = Path(folder) / f"{case.name}.jsonl"
        span_s = _write_traffic(path, case, seed, requests)
        return _Drawn(HeldTrace(open_trace(path, ReadOptions(seed=seed))), span_s)


def _write_traffic(path: Path, case: Case, seed: int, requests: int) -> Seconds:
    """Write the traffic to `path` as a capture, which rounds times: return the latest arrival."""
    span_s = 0.0
    with path.open("wb") as file:
        writer = CaptureWriter(file, source=f"{case.name}, seed {seed}")
        for arrival in case.arrivals(seed, requests):
            writer.write_arrival(arrival)
            span_s = max(span_s, arrival.time_s)
    return span_s


@cache
def _file_hash(path: str) -> str:
    return content_hash(Path(path))
