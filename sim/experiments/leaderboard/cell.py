"""A cell of the leaderboard: the run of one case with one strategy and one seed. Its figures do not
depend on the machine.
"""

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
    """The parameters of one run of the leaderboard, small enough to be sent to another machine."""

    case: Case
    policy: PolicySource
    seed: int
    repetition: int
    """Position of `seed` among the seeds of the board. At 0, a recorded trace is replayed
    unchanged; otherwise it is resampled.
    """
    requests: int
    inputs: str = ""
    """Hash of everything on which the cell's figures depend, as `inputs_of` returned it on the
    machine that created the cell.
    """

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.policy.name}, seed {self.seed}"


class CellResult(Struct, frozen=True, kw_only=True):
    """The summary of a cell's run, with the hash of the inputs that it depends on."""

    summary: RunSummary
    inputs: str
    """Hash of everything on which the figures depend, as `inputs_of` returned it for the cell that
    was run.
    """


def inputs_of(cell: Cell) -> str:
    """Return a hash of everything on which the figures of a cell depend: its parameters, trace file
    and code.

    Raises `OSError` for an unreadable trace, and what `PolicySource.load` raises.
    """
    case = cell.case
    told = {
        # The path of the file has no influence.
        "case": replace(case, file="", says=""),
        "file": _file_hash(case.file) if case.file else "",
        # The other strategies of the board have no influence either.
        "policy": (cell.policy.name if not cell.policy.text else "", cell.policy.text),
        "seed": cell.seed,
        "repetition": cell.repetition,
        "requests": cell.requests,
        "code": code_hash(),
        "plugins": plugins_hash(cell.policy),
    }
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


def run_cell(cell: Cell) -> CellResult:
    """Run the simulation of a cell. Raises what `inputs_of` and `run_job` raise, and `JobError` if
    this machine's code, plug-ins or trace file differ from those of the machine that created the
    cell.
    """
    if inputs_of(cell) != cell.inputs:
        raise JobError(
            "the worker has other code, plugins or another trace file than the machine that sent the "
            "cell: expected the same"
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
        # Each seed draws its own traffic, which the intermediate file does not show.
        summary = replace(summary, traffic=Traffic(generated=True, resampled=None))
    return CellResult(inputs=cell.inputs, summary=summary)


class _Drawn(Struct, frozen=True):
    """Generated traffic of a case and a seed. All strategies receive the same traffic."""

    trace: HeldTrace
    span_s: Seconds
    """Time of the last arrival in the generated traffic, in seconds after its start."""


@lru_cache(maxsize=1)
def _drawn(case: Case, seed: int, requests: int) -> _Drawn:
    """Return the first `requests` requests of a case with a seed. They are generated once for
    consecutive cells with the same case and seed.
    """
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        path = Path(folder) / f"{case.name}.jsonl"
        span_s = _write_traffic(path, case, seed, requests)
        return _Drawn(HeldTrace(open_trace(path, ReadOptions(seed=seed))), span_s)


def _write_traffic(path: Path, case: Case, seed: int, requests: int) -> Seconds:
    """Write the traffic of a case with a seed to `path` as a capture, which rounds times. Return
    the time of the last arrival.
    """
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
