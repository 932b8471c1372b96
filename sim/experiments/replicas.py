"""The command `sim replicas`: how much hit rate and latency get worse if several pickers serve one
pool, depending on what they share.

Each row of the table is a number of pickers and what they share; each block of rows is a workload.
A generated workload is drawn again for each seed. A trace in a file has the same requests for all
seeds. The seed then varies only random choices during the run, for example which picker a request
reaches.
"""

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct, structs

from epp.configuration.config import DEFAULT_CONFIG, DEFAULT_SOURCE
from epp.core.types import Seconds
from sim.cluster.assignment import Assignment
from sim.cluster.built_in import DEFAULT_POLICY
from sim.cluster.peering import PeerSettings
from sim.cluster.policies import PolicySource
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.jobs import Experiment, Result, Results, add_experiment_options
from sim.experiments.run import RunSettings
from sim.measurement.measures import mean, percentile, rounded
from sim.measurement.summaries import Range, ReplicasRow, ReplicasSummary
from sim.output import open_folder
from sim.reports.report import markdown_table, seconds, share, table
from sim.traces.capture import CaptureWriter
from sim.traces.standard import STANDARD
from sim.traces.workloads import OpenLoad, Stage, arrivals

PODS: Final = 8
ONE_PICKER: Final = "one picker"
NOTHING: Final = "nothing"
AGREEMENT: Final = "agreement"
PEERS: Final[Mapping[str, PeerSettings]] = {
    "peers, 5 ms": PeerSettings(delay_s=0.005),
    "peers, 200 ms": PeerSettings(delay_s=0.2),
    "peers, 1 s": PeerSettings(delay_s=1.0),
    "peers, 10 s": PeerSettings(delay_s=10.0),
    "peers, 5 ms, 10 % lost": PeerSettings(delay_s=0.005, loss=0.1),
    "peers, 5 ms, 50 % lost": PeerSettings(delay_s=0.005, loss=0.5),
}
NEAR: Final = next(iter(PEERS))

_SCORER: Final = "- type: added-time-scorer\n"
_WITHOUT: Final = DEFAULT_CONFIG.replace(_SCORER, _SCORER + "  parameters: {peerBelief: 0}\n")


class Arm(Struct, frozen=True, kw_only=True):
    """A row of the table of `sim replicas`: a number of pickers, what they share, and how requests
    are assigned to them.
    """

    replicas: int
    sharing: str
    assignment: Assignment = Assignment.RANDOM

    @property
    def policy(self) -> PolicySource:
        """Policy of the row: the default configuration; in rows with `NOTHING`, with `peerBelief`
        0.
        """
        text = _WITHOUT if self.sharing == NOTHING else DEFAULT_CONFIG
        return PolicySource(name=DEFAULT_POLICY, text=text, source=DEFAULT_SOURCE)

    def cluster(self, kind: PodKind) -> ClusterSettings:
        """Return the cluster settings of the row: `PODS` pods of this kind and the row's
        pickers.
        """
        return ClusterSettings(
            pods=(kind,) * PODS,
            replicas=self.replicas,
            assignment=self.assignment,
            peers=PEERS.get(self.sharing),
        )


ARMS: Final = (
    Arm(replicas=1, sharing=ONE_PICKER),
    *(
        Arm(replicas=replicas, sharing=sharing)
        for replicas, sharing in product((2, 4, 8), (NOTHING, AGREEMENT, *PEERS))
    ),
    *(
        Arm(replicas=4, sharing=sharing, assignment=assignment)
        for assignment, sharing in product((Assignment.STICKY, Assignment.SKEWED), (NOTHING, NEAR))
    ),
)


class Traffic(Struct, frozen=True, kw_only=True):
    """A workload of the table of `sim replicas`: a standard workload at one rate, or the trace in
    `file`.
    """

    name: str
    profile: str = DEFAULT_PROFILE
    rate_per_s: float = 0.0
    duration_s: Seconds = 0.0
    file: str = ""

    def trace(self, folder: Path, seed: int) -> str:
        """Return the path of the workload's trace for a seed. A standard workload is generated into
        `folder`; a trace in a file is used as it is.
        """
        if self.file:
            return self.file
        stage = Stage(rate_per_s=self.rate_per_s, duration_s=self.duration_s)
        workload = structs.replace(STANDARD[self.name], load=OpenLoad(stages=(stage,)))
        path = folder / f"{self.name}-{seed}.jsonl"
        with path.open("wb") as file:
            writer = CaptureWriter(file, source=f"{self.name}, seed {seed}")
            for arrival in arrivals(workload, seed):
                writer.write_arrival(arrival)
        return str(path)


_PROFILE: Final = "qwen3-32b-h100-tp2"
TRAFFIC: Final = (
    Traffic(name="b2b", profile=_PROFILE, rate_per_s=15, duration_s=60),
    Traffic(name="multi-turn", profile=_PROFILE, rate_per_s=6, duration_s=120),
    Traffic(name="hot-spot", profile=_PROFILE, rate_per_s=30, duration_s=60),
)
"""Workloads that run by default. The first is a published workload that just fits the pods' caches;
the other two leave room in the caches.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim replicas`."""
    parser = subparsers.add_parser(
        "replicas",
        help="measure how much hit rate and latency get worse with several pickers, by what they share",
        description=f"Standard workloads over {PODS} pods and 1 to 8 pickers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "traces",
        nargs="*",
        metavar="TRACE",
        help="trace files to run in addition to the standard workloads",
    )
    add(
        "--workload",
        action="append",
        choices=[workload.name for workload in TRAFFIC],
        help="run only this standard workload; may be repeated",
    )
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim replicas` and return its exit code.

    0: done. 130: interrupted; the results up to then are written. Raises errors that `sim` prints.
    """
    seeds = range(options.seed, options.seed + options.seeds)
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    wanted = options.workload
    standard = [one for one in TRAFFIC if wanted is None or one.name in wanted]
    files = (Traffic(name=Path(path).stem, file=path) for path in options.traces)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sim-replicas-")))
        experiment = replicas_experiment((*standard, *files), ARMS, seeds, folder)
        return experiment.carry_out(open_folder(options), workers=options.workers)


def replicas_experiment(
    traffic: Iterable[Traffic], arms: Sequence[Arm], seeds: Sequence[int], folder: Path
) -> Experiment[ReplicasSummary]:
    """Return the experiment that runs every workload with every row of the table and all seeds.

    Traces of generated workloads are written to `folder`. The first of `arms` is the reference for
    the others.
    """
    cells: list[tuple[Traffic, Arm]] = []
    jobs: list[RunSettings] = []
    for workload in traffic:
        kind = PodKind.of(find_profile(workload.profile))
        traces = [workload.trace(folder, seed) for seed in seeds]
        for arm in arms:
            for trace, seed in zip(traces, seeds, strict=True):
                cells.append((workload, arm))
                cluster = arm.cluster(kind)
                jobs.append(RunSettings(trace=trace, policy=arm.policy, cluster=cluster, seed=seed))

    def summary(results: Results, complete: bool) -> ReplicasSummary:
        rows: list[ReplicasRow] = []
        for (workload, arm), found in _by_cell(cells, results).items():
            measured = [_measured(one) for one in found]
            told = {name: _range([one[name] for one in measured]) for name in measured[0]}
            rows.append(
                ReplicasRow(
                    workload=workload.name,
                    replicas=arm.replicas,
                    sharing=arm.sharing,
                    assignment=str(arm.assignment),
                    seeds=len(found),
                    **told,
                )
            )
        return ReplicasSummary(
            complete=complete, first_seed=seeds[0], seeds=len(seeds), pods=PODS, rows=rows
        )

    return Experiment(
        title="replicas",
        jobs=jobs,
        summary=summary,
        table=lambda told: table(_rows(told)),
        reports=lambda told, _: {"report.md": markdown_table(_rows(told)) + "\n"},
    )


def _by_cell(
    cells: Sequence[tuple[Traffic, Arm]], results: Results
) -> Mapping[tuple[Traffic, Arm], list[Result]]:
    """Return the completed runs by workload and row of the table of `sim replicas`, in its
    order.
    """
    found: dict[tuple[Traffic, Arm], list[Result]] = {}
    for number, cell in enumerate(cells):
        if number in results:
            found.setdefault(cell, []).append(results[number])
    return found


def _measured(result: Result) -> dict[str, float]:
    series, busiest = result.series, result.summary.imbalance.requests.max_over_mean
    prompt_tokens = float(series.prompt_tokens.sum())
    return {
        "hit_rate": float(series.cached_tokens.sum()) / prompt_tokens,
        "ttft_mean_s": mean(series.ttft_s),
        "ttft_p90_s": percentile(series.ttft_s, 90),
        "busiest_pod_over_mean": math.nan if busiest is None else busiest,
    }


def _range(values: Sequence[float]) -> Range:
    return Range(
        mean=rounded(float(np.mean(values))), low=rounded(min(values)), high=rounded(max(values))
    )


def _rows(summary: ReplicasSummary) -> list[list[str]]:
    """Return the lines of the table of `sim replicas`, with means over seeds. The hit rate also has
    its minimum and maximum over seeds.
    """
    head = (
        "workload, pickers, sharing, requests reach pickers, hit rate, of one picker's, TTFT mean, "
        "of one picker's, TTFT p90, busiest pod over mean"
    )
    lines = [head.split(", ")]
    reference: dict[str, tuple[float, float]] = {}
    for row in summary.rows:
        hits, hit_rate = row.hit_rate, row.hit_rate.mean or 0.0
        ttft_s = row.ttft_mean_s.mean or 0.0
        one, one_s = reference.setdefault(row.workload, (hit_rate, ttft_s))
        lines.append(
            [
                row.workload,
                str(row.replicas),
                row.sharing,
                row.assignment,
                f"{share(hits.mean)} ({share(hits.low)} to {share(hits.high)})",
                share(hit_rate / one) if one else "",
                seconds(ttft_s),
                f"{ttft_s / one_s:.2f} times" if one_s else "",
                seconds(row.ttft_p90_s.mean),
                f"{row.busiest_pod_over_mean.mean or math.nan:.2f}",
            ]
        )
    return lines
