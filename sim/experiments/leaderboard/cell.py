"""A cell of the leaderboard: one case, one strategy, one seed; the same figures wherever it runs."""

import hashlib
import tempfile
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from sim.cluster.policies import PolicySource
from sim.experiments.jobs import JobError, run_job
from sim.experiments.leaderboard.cases import Case
from sim.experiments.leaderboard.sources import code_hash, plugins_hash
from sim.experiments.run import RunSettings
from sim.measurement.summaries import RunSummary, Traffic
from sim.traces.capture import CaptureWriter
from sim.traces.reading import ReadOptions, content_hash


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
        return _told(cell, cell.case.file, span_s=0.0)
    with tempfile.TemporaryDirectory(prefix="sim-leaderboard-") as folder:
        path = Path(folder) / f"{cell.case.name}.jsonl"
        span_s = 0.0
        with path.open("wb") as file:
            writer = CaptureWriter(file, source=cell.name)
            for arrival in cell.case.arrivals(cell.seed, cell.requests):
                writer.write_arrival(arrival)
                span_s = max(span_s, arrival.time_s)
        return _told(cell, str(path), span_s=span_s)


def _told(cell: Cell, trace: str, *, span_s: float) -> CellResult:
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
    summary = run_job(settings).summary
    if case.workload is not None:
        # Each seed draws the traffic anew; the file that it went through says nothing of that.
        summary = replace(summary, traffic=Traffic(generated=True, resampled=None))
    return CellResult(inputs=cell.inputs, summary=summary)


@cache
def _file_hash(path: str) -> str:
    return content_hash(Path(path))
