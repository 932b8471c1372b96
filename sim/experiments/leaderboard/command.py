"""The command `sim leaderboard`: run routing strategies on cases, with the same requests for all
strategies of a case and a seed.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from sim.cluster.built_in import (
    DEFAULT_POLICY,
    RIVALS_MISSING,
    rivals_installed,
    strategies,
)
from sim.cluster.policies import BASELINES, PolicyNameError, PolicySource, built_in
from sim.experiments.executors import EXECUTOR_HELP, LOCAL, workers_at
from sim.experiments.jobs import JobError, Workers
from sim.experiments.leaderboard.cases import (
    CASES,
    FURTHER_CASES,
    LADDERS,
    OVERLOAD_CASES,
    STAGED_CASES,
    Case,
    Ladder,
)
from sim.experiments.leaderboard.cell import Cell, CellResult, inputs_of, run_cell
from sim.experiments.leaderboard.folder import CellFolder
from sim.experiments.leaderboard.standings import Runs, case_rows
from sim.experiments.run_options import count_of_runs, named_policies
from sim.experiments.strategies import idea_of
from sim.interrupts import INTERRUPTED, interrupts_call
from sim.measurement.measures import six_digits
from sim.measurement.ranking import scopes_of, totals
from sim.measurement.summaries import (
    CaseSummary,
    FailedCell,
    LadderSummary,
    LeaderboardSummary,
    StandingSummary,
    StrategySummary,
    as_json,
)
from sim.output import OutputError, progress_bar, write_whole
from sim.reports.leaderboard_report import (
    leaderboard_page,
    leaderboard_report,
    leaderboard_table,
)

SIZES: Final[Mapping[str, int]] = {"small": 400, "full": 2_000}
"""Number of requests in each cell (run) of the leaderboard, by the name that `--size` takes."""
LEADING: Final = (
    *("homing", "weighted-scores", "smetric", "lmetric", "production-stack-load-aware"),
    *("dynamo-two-tier", "dynamo", "dynamo-first-token", "smg-cache-aware-4", "preble"),
    *("sticky-until-saturated", "sticky-until-saturated-first-token", "llm-d-3-2-2"),
    *("llm-d-approximate-lora", "lpwl", "kubeai-chwbl", "round-robin-live"),
)
"""Names of the strategies that `sim leaderboard --size full` runs by default: the best of each
family with `--size small`, and well-known ones. On two cores these take less than an hour; all
strategies would take two and a half hours.
"""
_REQUESTS_MAX: Final = 1_000_000
_ALL: Final = "all"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim leaderboard`."""
    parser = subparsers.add_parser(
        "leaderboard",
        help="compare strategies on all cases, with confidence intervals",
        description="Run strategies on cases, each with the same requests for all. With --out, the "
        "command reuses the cells in DIR and resumes where it stopped.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("Cells").add_argument
    add("--strategies", type=_names, metavar="A,B,...",
        help=f"names of sim strategies, or files with EndpointPickerConfigs; {_ALL} for all names "
        f"(default: {_ALL}; with --size full the {len(LEADING)} leading ones)")  # fmt: skip
    add("--cases", type=_names, metavar="A,B,...",
        help=f"names of cases to run, or {_ALL} for all but the further cases of --list (default: {_ALL}, "
        "or no named case if --trace is given)")  # fmt: skip
    add("--list", action="store_true", help="list the strategies and cases, and exit")
    add("--trace", action="append", type=Path, default=[], metavar="FILE",
        help="trace to add as a case, on four pods of the default profile; repeatable")  # fmt: skip
    add("--size", choices=SIZES, default="small", help="number of requests in each run: "
        + ", ".join(f"{name} {count:,}" for name, count in SIZES.items()) + " (default: small)")  # fmt: skip
    add("--requests", type=_requests, metavar="N",
        help="number of requests in each run, instead of --size")  # fmt: skip
    add("--seeds", type=count_of_runs, default=3, metavar="K",
        help="number of seeds, each with its own traffic and random choices (default: 3)")  # fmt: skip
    add("--seed", type=int, default=1, help="first seed; the others follow it (default: 1)")
    cores = len(os.sched_getaffinity(0))
    add = parser.add_argument_group("Execution and output").add_argument
    add("--executor", default=LOCAL, metavar="WHERE",
        help=f"where to run: {EXECUTOR_HELP} (default: {LOCAL})")  # fmt: skip
    add("--workers", type=count_of_runs, default=cores, metavar="N",
        help=f"processes on this machine (default: all {cores} cores)")  # fmt: skip
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the results to DIR, and reuse results of the same cells that are there",
    )
    add("--force", action="store_true", help="run all cells again, even those with results in DIR")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim leaderboard` and return its exit code.

    0: done. 1: a cell failed. 2: wrong command line. 130: interrupted; with --out, completed cells
    are stored. Raises errors that `sim` prints.
    """
    if options.list:
        print(_list())
        return 0
    policies = named_policies(list(_strategies(options.strategies, options.size)))
    wanted = options.cases or (() if options.trace else (_ALL,))
    cases = _cases(tuple(CASES) if wanted == (_ALL,) else wanted, options.trace)
    seeds = range(options.seed, options.seed + options.seeds)
    cells = cells_of(cases, policies, seeds, options.requests or SIZES[options.size])
    print(
        f"{len(cases)} cases, {len(policies)} strategies, seeds {seeds[0]} to {seeds[-1]}: "
        f"{len(cells):,} cells",
        flush=True,
    )
    folder = None if options.out is None else CellFolder(options.out, anew=options.force)
    board = Board(cells, folder)
    with (
        workers_at(options.executor, min(options.workers, max(1, len(board.left)))) as workers,
        interrupts_call(workers.stop),
    ):
        board.play(workers)
    summary = board.summary()
    print(leaderboard_table(summary))
    if options.out is not None:
        write_whole(options.out / "summary.json", as_json(summary))
        write_whole(options.out / "report.md", leaderboard_report(summary).encode())
        write_whole(options.out / "report.html", leaderboard_page(summary).encode())
        print(f"results are in {options.out}")
    for cell, problem in board.failed.items():
        print(f"sim: {cells[cell].name}: {problem}", file=sys.stderr)
    if len(board.results) + len(board.failed) < len(cells):
        print(
            f"sim: interrupted, {len(board.results):,} of {len(cells):,} cells are done",
            file=sys.stderr,
        )
        return INTERRUPTED
    if board.failed:
        print(f"sim: {len(board.failed):,} of {len(cells):,} cells failed", file=sys.stderr)
    return 1 if board.failed else 0


class Board:
    """The cells of a leaderboard and their results so far. Dictionaries are keyed by position in
    `cells`.
    """

    def __init__(self, cells: Sequence[Cell], folder: CellFolder | None) -> None:
        """Create the board with the results of its cells that are already stored in `folder`."""
        self.cells = cells
        self.failed: dict[int, str] = {}
        self.results: dict[int, CellResult] = {}
        self._folder = folder
        for number, cell in enumerate(cells):
            known = folder.stored(cell) if folder else None
            if known is not None:
                self.results[number] = known
        self.taken = len(self.results)
        """Number of cells whose result was already stored in the folder, so that they do not run
        again.
        """
        self.left = [number for number in range(len(cells)) if number not in self.results]

    def play(self, workers: Workers) -> None:
        """Run the cells of the leaderboard that have no result yet, and store each result in the
        folder, if there is one. A cell that fails is recorded in `failed`, and the others go on.
        Raises `OSError`.
        """
        jobs = [self.cells[number] for number in self.left]
        with progress_bar("leaderboard") as bar:
            outcomes = workers.outcomes(run_cell, jobs)
            for at, outcome in bar.track(outcomes, total=len(jobs)):
                number = self.left[at]
                if isinstance(outcome, JobError):
                    self.failed[number] = str(outcome)
                    continue
                self.results[number] = outcome
                if self._folder is not None:
                    self._folder.store(self.cells[number], outcome)

    def summary(self) -> LeaderboardSummary:
        """Return the content of summary.json for the results so far. The same results give the same
        bytes.
        """
        cases = list(dict.fromkeys(cell.case for cell in self.cells))
        policies = {cell.policy.name: cell.policy for cell in self.cells}
        first = self.cells[0]
        rows = [row for case in cases for row in self._rows(case.name, first.seed)]
        told = [_case_summary(case) for case in cases]
        return LeaderboardSummary(
            complete=len(self.results) == len(self.cells),
            first_seed=first.seed,
            seeds=len({cell.seed for cell in self.cells}),
            requests=first.requests,
            cells=len(self.cells),
            cases=told,
            strategies=[_strategy_summary(policy) for policy in policies.values()],
            ladders=[_ladder_summary(ladder, {row.case for row in rows}) for ladder in LADDERS],
            totals=totals(rows, scopes_of(told)),
            rows=rows,
            failed=[
                FailedCell(
                    case=self.cells[number].case.name,
                    strategy=self.cells[number].policy.name,
                    seed=self.cells[number].seed,
                    problem=problem,
                )
                for number, problem in sorted(self.failed.items())
            ],
        )

    def _rows(self, case: str, first_seed: int) -> list[StandingSummary]:
        of_case = [at for at, cell in enumerate(self.cells) if cell.case.name == case]
        names = dict.fromkeys(self.cells[at].policy.name for at in of_case)
        runs = []
        for name in names:
            mine = [at for at in of_case if self.cells[at].policy.name == name]
            runs.append(
                Runs(
                    strategy=name,
                    by_seed={
                        self.cells[at].seed: self.results[at] for at in mine if at in self.results
                    },
                    failed=any(at in self.failed for at in mine),
                )
            )
        return case_rows(case, runs, first_seed)


def cells_of(
    cases: Sequence[Case], policies: Sequence[PolicySource], seeds: range, requests: int
) -> list[Cell]:
    """Return a cell for each case, seed and strategy. All strategies of a case and seed are
    consecutive, so that an interrupted board has complete rows.

    Raises what `inputs_of` raises.
    """
    made = [
        Cell(case=case, policy=policy, seed=seed, repetition=repetition, requests=requests)
        for case in cases
        for repetition, seed in enumerate(seeds)
        for policy in policies
    ]
    return [replace(cell, inputs=inputs_of(cell)) for cell in made]


def _cases(names: Sequence[str], traces: Sequence[Path]) -> list[Case]:
    """Return the cases with the given names, then a case for each trace file. Raises `OutputError`
    for an unknown name, or for a trace file that is called like a case.
    """
    known = {**CASES, **FURTHER_CASES, **STAGED_CASES, **OVERLOAD_CASES}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise OutputError(f"--cases {unknown}: expected some of {', '.join(known)}")
    cases = [known[name] for name in dict.fromkeys(names)]
    for path in traces:
        name = path.name.partition(".")[0]
        if name in known or any(case.name == name for case in cases):
            raise OutputError(f"--trace {path}: there is a case {name} already; rename the file")
        cases.append(Case(name=name, says=f"{path.name}, as recorded", file=str(path.absolute())))
    return cases


def _case_summary(case: Case) -> CaseSummary:
    cluster = case.cluster()
    speeds = dict.fromkeys(six_digits(kind.prefill_tokens_per_s) for kind in cluster.pods)
    return CaseSummary(
        name=case.name,
        says=case.says,
        hold_out=case.hold_out,
        trace=Path(case.file).name or None,
        profile=case.profile,
        pods=case.pods,
        max_loras=case.max_loras,
        replicas=case.replicas,
        scrape_interval_s=cluster.refresh_interval_s,
        happens=case.happens or None,
        engines=case.engines or None,
        scrapes=case.scrapes or None,
        response_chunks=case.response_chunks,
        prefill_tokens_per_s=list(speeds),
        believed_prefill_tokens_per_s=six_digits(cluster.prefill_tokens_per_s),
        ttft_target_s=case.targets.ttft_s,
        tpot_target_s=case.targets.tpot_s,
    )


def _ladder_summary(ladder: Ladder, there: set[str]) -> LadderSummary:
    """Return a ladder's entry in the leaderboard's summary, restricted to the cases in `there`. A
    ladder is a group of cases that differ in one number.
    """
    steps = [(number, case) for number, case in ladder.steps if case in there]
    return LadderSummary(title=ladder.title, unit=ladder.unit, steps=steps)


def _strategy_summary(policy: PolicySource) -> StrategySummary:
    """Return a strategy's entry in the leaderboard's summary. Its description is omitted unless
    `policy` is a built-in strategy or baseline, with the configuration of that name.
    """
    strategy = strategies().get(policy.name)
    known = strategy is not None and strategy.config == policy.text
    return StrategySummary(
        name=policy.name,
        idea=idea_of(policy.name) if known or policy.name in BASELINES else None,
        omissions=strategy.omissions or None if strategy is not None and known else None,
        config_hash=policy.hash,
    )


def _strategies(wanted: tuple[str, ...] | None, size: str) -> tuple[str, ...]:
    """Return the names of the strategies to run: `wanted`, all of them if that is the name `all`,
    or the default for `--size` if `wanted` is None.

    The default configuration has two names and runs only under one of them. Raises
    `PolicyNameError` if strategies are not named and those of other projects are not installed.
    """
    if wanted is not None and wanted != (_ALL,):
        return wanted
    if not rivals_installed():
        raise PolicyNameError(
            f"a leaderboard has strategies of other routers unless --strategies names others, but {RIVALS_MISSING}"
        )
    if wanted is None and size == "full":
        return LEADING
    return tuple(name for name in built_in() if name != DEFAULT_POLICY)


def _list() -> str:
    names = "\n".join(f"  {name}" for name in built_in())
    width = max(map(len, CASES))
    cases, further = (
        "\n".join(
            f"  {case.name:<{width}}  {'hold-out, ' if case.hold_out else ''}{case.says}"
            for case in table.values()
        )
        for table in (CASES, {**FURTHER_CASES, **STAGED_CASES, **OVERLOAD_CASES})
    )
    return (
        f"strategies:\n{names}\n\ncases:\n{cases}\n\n"
        f"further cases, which run only if they are named:\n{further}"
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return names


def _requests(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= _REQUESTS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {_REQUESTS_MAX:,}")
    return number
