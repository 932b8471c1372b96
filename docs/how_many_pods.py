"""Test the answers of `sim size` on further traffic: `python -m docs.how_many_pods TRACES --out
DIR`.

TRACES is a folder with azure_2023_code.csv and mooncake_conversation.jsonl. The command writes two
tables into docs/capacity.md: the number of pods at 1, 1.3 and 2 times the traffic, by the search
and by every number of pods, and how many of 20 new draws of the traffic meet the SLO with the
answered number. If it was stopped, the same command continues.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct

from docs.sizes import checked, with_rows
from sim.__main__ import main as sim
from sim.cluster.built_in import DEFAULT_POLICY
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.jobs import Crew
from sim.experiments.run import RunSettings
from sim.measurement.objectives import bounds_in
from sim.measurement.summaries import RunSummary, SizedSummary, WarmUpSummary
from sim.reports.size_report import number_of_pods

PAGE: Final = Path(__file__).with_name("capacity.md")
LOADS: Final = (1.0, 1.3, 2.0)
SEEDS: Final = 4
STRETCH_S: Final = 120.0
"""Length in seconds of the period of a recording that is sized for. Every number of pods takes one
run per seed at each load, so longer periods would take hours.
"""
DRAWS: Final = 20
FRESH_SEED: Final = 1_001
"""First seed of the new draws of the traffic; no sizing uses these seeds."""


class Case(Struct, frozen=True, kw_only=True):
    """A trace to size for, and the SLO that the pods must meet."""

    generate: str = ""
    """Arguments of `sim trace generate`; "" if the trace is recorded."""
    recorded: str = ""
    """File name of a recorded trace, of which the busiest `STRETCH_S` are sized for; "" if the
    trace is generated.
    """
    slo: str
    pods_max: int
    fresh: bool = False
    """True if the answer is also tested on new draws of the traffic."""

    @property
    def name(self) -> str:
        """Arguments of the generator or name of the recording, which identify the case."""
        return self.generate or self.recorded


CASES: Final = (
    Case(generate="interactive-chat --rate 6 --duration 60", slo="ttft-p90=0.3", pods_max=8, fresh=True),
    Case(generate="multi-turn --rate 4 --duration 100", slo="ttft-p90=0.3", pods_max=6),
    Case(generate="interactive-chat --rate 2 --duration 120 --steady", slo="ttft-p90=0.4", pods_max=6, fresh=True),
    Case(generate="shared-prefix --rate 30 --duration 30", slo="ttft-p90=0.15,itl-p99=0.03", pods_max=6, fresh=True),
    Case(generate="zero-reuse --rate 12 --duration 45", slo="ttft-p90=0.25", pods_max=6),
    Case(recorded="azure_2023_code.csv", slo="ttft-p90=1", pods_max=8),
    Case(recorded="mooncake_conversation.jsonl", slo="ttft-p90=3", pods_max=11),
)  # fmt: skip


class Sized(Struct, frozen=True, kw_only=True):
    """The parts of a sizing's summary.json that the tables need."""

    conditions: dict[str, Any]
    warm_up: WarmUpSummary
    options: list[SizedSummary]


class Fresh(Struct, frozen=True, kw_only=True):
    """The number `met` of new draws of one generator's traffic that met the SLO with the answered
    number of pods.
    """

    case: Case
    pods: int
    met: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sizings and write both tables into docs/capacity.md. Return 0, or the exit code of a
    sizing that failed.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.how_many_pods", description=__doc__)
    parser.add_argument("traces", type=Path, metavar="TRACES", help="folder of the recordings")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the results of runs"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (1)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    answers: list[list[Sized]] = []
    for case in CASES:
        trace = _trace(case, options.traces, options.out)
        answers.append([])
        for load in LOADS:
            folder = options.out / f"{_file_name(case)}-{load:g}"
            code = sim(
                ["size", str(trace), "--slo", case.slo, "--speed", f"{load:g}", "--pods-max",
                 str(case.pods_max), "--seeds", str(SEEDS), "--answer-only", "--every-count",
                 *(["--stretch", f"{STRETCH_S:g}"] if case.recorded else []), "--workers", str(options.workers), "--out", str(folder)]
            )  # fmt: skip
            if code:
                return code
            answers[-1].append(
                msgspec.json.decode((folder / "summary.json").read_bytes(), type=Sized)
            )
    fresh = [
        _fresh(case, sized[0], options.out, options.workers)
        for case, sized in zip(CASES, answers, strict=True)
        if case.fresh
    ]
    page = PAGE.read_text(encoding="utf-8")
    page = with_table(page, "loads", load_rows(CASES, answers))
    page = with_table(page, "draws", draw_rows(fresh))
    PAGE.write_text(page, encoding="utf-8")
    return 0


def with_table(page: str, name: str, rows: list[list[str]]) -> str:
    """Return the page with the table between the marks of `name` replaced by `rows`."""
    begin, end = f"<!-- {name}, by `python -m docs.how_many_pods` -->", f"<!-- end of {name} -->"
    return with_rows(page, begin, end, rows)


def load_rows(cases: Sequence[Case], answers: Sequence[Sequence[Sized]]) -> list[list[str]]:
    """Return the rows of the first table, one for each trace: the number of pods by the search and
    by every number, for each load.
    """
    heads = [f"load {load:g}" for load in LOADS]
    rows = [["trace", "SLO", *heads, *(f"{head}, every number" for head in heads)]]
    for case, sized in zip(cases, answers, strict=True):
        found = [number_of_pods(one.options[0].pods) for one in sized]
        every = [number_of_pods(checked(one.options[0]).pods) for one in sized]
        rows.append([f"`{case.name}`", f"`{case.slo}`", *found, *every])
    return rows


def draw_rows(fresh: Sequence[Fresh]) -> list[list[str]]:
    """Return the rows of the second table, one for each generator: how many new draws meet the SLO,
    both on all traffic and on its busiest part.
    """
    rows = [["traffic", "SLO", "pods", "fresh draws", "draws that meet the SLO"]]
    rows += [
        [f"`{one.case.name}`", f"`{one.case.slo}`", f"{one.pods}", f"{DRAWS}", f"{one.met}"]
        for one in fresh
    ]
    return rows


def meets(slo: str, run: RunSummary) -> bool:
    """Return whether a run is within each SLO bound, both on all of its traffic and on its busiest
    part.
    """
    assert run.busiest is not UNSET, "a run with `busiest_s` tells its busiest part"
    parts = (run, run.busiest)
    return all(bound.kept_by(bound.value_of(part)) for bound in bounds_in(slo) for part in parts)


def _trace(case: Case, recordings: Path, out: Path, seed: int = 1) -> Path:
    """Return the path of the trace of a case. A generated trace is generated if the file does not
    exist yet.
    """
    if not case.generate:
        return recordings / case.name
    path = out / f"{_file_name(case)}-seed-{seed}.jsonl"
    if not path.exists():
        code = sim(["trace", "generate", *case.generate.split(), "--seed", str(seed), "--out", str(path)])  # fmt: skip
        if code:
            raise SystemExit(code)
    return path


def _fresh(case: Case, sized: Sized, out: Path, workers: int) -> Fresh:
    """Simulate new draws of a generator's traffic with the number of pods that the sizing found."""
    pods = sized.options[0].pods
    assert pods is not None, case.name
    kinds = (PodKind.of(find_profile(DEFAULT_PROFILE)),) * pods
    jobs = [
        RunSettings(
            trace=str(_trace(case, out, out, seed)),
            policy=policy_source(DEFAULT_POLICY),
            cluster=ClusterSettings(pods=kinds),
            seed=seed,
            warm_up_s=sized.warm_up.seconds,
            busiest_s=sized.warm_up.busiest_s,
        )
        for seed in range(FRESH_SEED, FRESH_SEED + DRAWS)
    ]
    with Crew(workers) as crew:
        runs = [result.summary for _, result in crew.results(jobs)]
    return Fresh(case=case, pods=pods, met=sum(meets(case.slo, run) for run in runs))


def _file_name(case: Case) -> str:
    return re.sub(r"[^\w.]+", "-", case.name)


if __name__ == "__main__":
    raise SystemExit(main())
