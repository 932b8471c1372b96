"""The command `sim tune`: find better weights and thresholds for the traffic of a trace, and test
whether the improvement is significant.
"""

import argparse
import contextlib
import hashlib
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from epp import __version__
from epp.configuration.document import nearest
from sim.cluster.built_in import DEFAULT_POLICY
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettingsError
from sim.experiments import run_options
from sim.experiments.jobs import Crew, add_experiment_options
from sim.experiments.measured_runs import Half, MeasuredRuns
from sim.experiments.power import PILOTS
from sim.experiments.repetitions import varied_between
from sim.experiments.run import RunSettings
from sim.experiments.run_journal import RunJournal, StoppedError, print_interrupted
from sim.experiments.search import FINALISTS, RUNGS, Search, Trial, runs_expected
from sim.experiments.space import Space
from sim.experiments.tuning import GUARDS, LOADS, Guard, Objective, Tuning
from sim.interrupts import interrupts_call
from sim.measurement.assumptions import assumptions_of
from sim.measurement.intervals import REPETITIONS_NEEDED
from sim.measurement.measures import six_digits
from sim.measurement.summaries import (
    DimensionSummary,
    NamedRun,
    TrialSummary,
    TunedTrace,
    TuneSummary,
    as_json,
)
from sim.output import (
    BEST_SO_FAR,
    RUNS,
    TUNED,
    TUNED_CONFIG_MAP,
    open_folder,
    progress_bar,
    write_whole,
)
from sim.reports.compare_report import HIGHER_IS_BETTER, LABELS
from sim.reports.tune_report import comment, power_sentence, tune_page, tune_report, tune_table
from sim.reports.tuned_config import config_map, with_comment
from sim.traces.arrival import TraceError
from sim.traces.formats import open_trace
from sim.traces.reading import content_hash

REQUESTS_MIN: Final = 40
"""Minimum number of requests of a trace for `sim tune`, which splits it into halves."""
_TRIALS_MAX: Final = 10_000
_GUARDED: Final = tuple(measure for measure in LABELS if measure != "pod_hours")
"""Names of the measures that `--guard` accepts: those that every run has."""
_CONFIG_MAP_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim tune`."""
    parser = subparsers.add_parser(
        "tune",
        help="find better weights and thresholds for a trace, judged on its hold-out half",
        description="Try configurations on the first half of TRACE, judge the best on the second, "
        "and write it as a ConfigMap if it beats the present one. The same command resumes where "
        "it was stopped.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("Search").add_argument
    add(
        "--config",
        default=DEFAULT_POLICY,
        metavar="FILE|NAME",
        help="present configuration, which is varied. " + run_options.POLICY_HELP,
    )
    add(
        "--space",
        type=Path,
        metavar="FILE.toml",
        help="file with dimensions to vary in addition to the default ones (weights, and numbers with "
        "bounds), or instead of them",
    )
    add(
        "--objective",
        type=Objective,
        choices=tuple(Objective),
        default=Objective.THROUGHPUT,
        metavar="|".join(Objective),
        help="second objective beside TTFT p90 (default: throughput)",
    )
    add(
        "--tolerance",
        type=_tolerance,
        default=0.02,
        metavar="P",
        help="share of an objective that may be lost for the other (default: 0.02)",
    )
    add(
        "--guard",
        type=_guard,
        action="append",
        metavar="MEASURE[=P]",
        help="measure that may not become worse by more than the share P, or none for no guards; "
        "repeatable (default: e2e_mean_s and itl_mean_s with P of 0, except an objective)",
    )
    add(
        "--trials",
        type=_trials,
        default=60,
        metavar="N",
        help="number of configurations to try (default: 60)",
    )
    add(
        "--config-map",
        type=_config_map_name,
        default="homing-config",
        metavar="NAME",
        help="name of the written ConfigMap (default: homing-config, as in the chart's release homing)",
    )
    run_options.add_run_options(parser)
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim tune` and return its exit code.

    0: done, whether or not a better configuration was found. 2: wrong command line. 130:
    interrupted; completed runs are stored. Raises errors that `sim` prints.
    """
    if options.out is None:
        print(
            "sim: --out DIR is needed: it stores runs, so that the command can resume",
            file=sys.stderr,
        )
        return 2
    if options.seeds < REPETITIONS_NEEDED:
        print(
            f"sim: --seeds is {options.seeds}; expected at least {REPETITIONS_NEEDED}, which "
            "confidence intervals need",
            file=sys.stderr,
        )
        return 2
    guards = _guards(options)
    task = _Task(options)
    folder = open_folder(options, goes_on=RUNS)
    assert folder is not None
    with RunJournal(folder / RUNS, task.about) as journal:
        going_on = f", resuming after {len(journal):,} runs" if len(journal) else ""
        seeds = f"seeds {options.seed} to {options.seed + options.seeds - 1}"
        print(f"{seeds}, {len(task.space.dimensions)} things to vary{going_on}", flush=True)
        bar = progress_bar("tune")
        at = bar.add_task("runs", total=task.runs_expected)
        with Crew(options.workers) as crew, interrupts_call(crew.stop):
            tuning = Tuning(
                Search(
                    task.space,
                    trials=options.trials,
                    seed=options.seed,
                    tolerance=options.tolerance,
                ),
                MeasuredRuns(crew, journal, task.base, task.halves, lambda: bar.advance(at)),
                task.space.policy,
                measures=options.objective.measures,
                tolerance=options.tolerance,
                seeds=options.seeds,
                requests=task.requests,
                guards=guards,
            )
            # The results so far are reported even after an interruption.
            with contextlib.suppress(StoppedError):
                with bar:
                    tuning.estimate_power()
                if tuning.power is not None:
                    print(power_sentence(tuning.power), flush=True)
                with bar:
                    tuning.run()
            summary = task.summary(tuning)
            _write(folder, summary, tuning, options.config_map)
            print(tune_table(summary))
            print(f"results are in {folder}")
    if tuning.complete:
        return 0
    return print_interrupted(journal)


class _Task:
    """The tuning that the command line of `sim tune` describes, checked."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the options, read the configuration and the trace, and print likely mistakes in the
        trace as warnings. Raises errors that `sim` prints.
        """
        self._options = options
        policy = policy_source(options.config)
        base = run_options.run_settings(options, policy, options.seed)
        self.space = Space(base.policy, pickers=base.cluster.replicas, file=options.space)
        if base.scenario is not None and base.scenario.configures:
            raise ClusterSettingsError(
                f"{options.scenario} configures pickers, which would overwrite the tried configurations"
            )
        run_options.print_trace_warnings(base)
        self.halves = _halves(base)
        self._conditions = run_options.conditions(base)
        # The jitter is determined once, because halves and their beginnings have the clock of the
        # whole trace.
        self.base = replace(base, jitter_s=self._conditions["jitter_s"])
        self._trace_hash = content_hash(Path(base.trace))

    @property
    def about(self) -> dict[str, str]:
        """Conditions that must be the same when the command is started again on the same folder, as
        text by name: version, trace, present configuration, and all settings on which the figures of
        runs depend.
        """
        told = {
            "version": __version__,
            "trace": self._trace_hash[:12],
            "configuration": str(self.base.policy.hash),
            "first seed": str(self._options.seed),
        }
        named = {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in self._conditions.items()
            if value is not None and name not in ("trace", "config_hashes")
        }
        # Some conditions only name a file, such as a profile or a scenario; the hash covers its
        # content.
        bare = replace(
            self.base, trace="", policy=replace(self.base.policy, name="", text="", source="")
        )
        encoded = msgspec.json.encode(bare, enc_hook=repr, order="deterministic")
        return told | named | {"profile or scenario": hashlib.sha256(encoded).hexdigest()[:12]}

    @property
    def runs_expected(self) -> int:
        """Approximate number of simulation runs of the tuning, for the progress bar."""
        seeds: int = self._options.seeds
        compared = PILOTS + FINALISTS + len(LOADS)
        return runs_expected(self._options.trials) + 2 * seeds * compared

    @property
    def requests(self) -> int:
        """Number of requests in both halves of the trace together."""
        return sum(map(len, self.halves.values()))

    def summary(self, tuning: Tuning) -> TuneSummary:
        """Return the content of summary.json. A complete tuning gives the same bytes, however often
        it was stopped.
        """
        options, search = self._options, tuning.search
        pairs = [*tuning.held_out.values(), *(against for _, against in tuning.finals)]
        varied = varied_between(pairs[0].present) if pairs else None
        shown = pairs[:1]
        best = None if tuning.complete else tuning.best
        # Two columns of one name could not be told apart.
        tuned_name = "tuned" if tuning.present.name != "tuned" else "tuned anew"
        return TuneSummary(
            complete=tuning.complete,
            version=__version__,
            first_seed=options.seed,
            seeds=options.seeds,
            varied=varied.over if varied else "",
            generated=bool(varied and varied.generated),
            config=tuning.present.name,
            config_hash=tuning.present.hash,
            tuned_name=tuned_name,
            trace=TunedTrace(
                name=Path(self.base.trace).name,
                sha256=self._trace_hash,
                requests=self.requests,
                tuning=len(self.halves[Half.TUNING]),
                hold_out=len(self.halves[Half.HOLD_OUT]),
            ),
            conditions=self._conditions,
            assumptions=assumptions_of(kind.profile for kind in self.base.cluster.pods),
            objective=list(tuning.measures),
            tolerance=tuning.tolerance,
            guards={one.measure: one.allowed for one in tuning.guards},
            power=tuning.power,
            higher_is_better=sorted(HIGHER_IS_BETTER & set(tuning.measures)),
            rungs=list(RUNGS),
            space=[
                DimensionSummary(name=one.name, span=str(one.span), present=one.present)
                for one in self.space.dimensions
            ],
            trials=[self._tried(one) for one in search.trials],
            front=[one.number for one in search.front()],
            finalists=[
                replace(against.summary(tuning.tolerance, tuning.guards), trial=trial.number)
                for trial, against in tuning.finals
            ],
            chosen=None if tuning.chosen is None else self._tried(tuning.chosen),
            best_so_far=None if best is None else self._tried(best),
            hold_out=[
                replace(against.summary(tuning.tolerance, tuning.guards), load=load)
                for load, against in tuning.held_out.items()
            ],
            beats=tuning.beats,
            runs=[
                NamedRun(config=name, seed=options.seed + repetition, run=run)
                for against in shown
                for name, runs in (
                    (tuning.present.name, against.present),
                    (tuned_name, against.other),
                )
                for repetition, run in enumerate(runs)
            ],
        )

    def _tried(self, trial: Trial) -> TrialSummary:
        return TrialSummary(
            trial=trial.number,
            hash=trial.hash or None,
            refused=trial.refused,
            values={one.name: one.written(trial.values[one.name]) for one in self.space.dimensions},
            costs=[[six_digits(cost) for cost in costs] for costs in trial.costs],
            cost=six_digits(trial.cost) if trial.costs else None,
        )


def _halves(base: RunSettings) -> dict[Half, range]:
    """Return the positions of the requests in each half of the trace. Raises what reading the trace
    raises, and `TraceError` if it has fewer than `REQUESTS_MIN` requests.
    """
    trace = open_trace(Path(base.trace), base.read)
    count = sum(1 for _ in islice(trace, base.requests_max))
    if count < REQUESTS_MIN:
        raise TraceError(
            base.trace,
            0,
            "",
            f"Expected at least {REQUESTS_MIN} requests, to tune on one half and judge on the other, "
            f"got {count}",
        )
    return {Half.TUNING: range(count // 2), Half.HOLD_OUT: range(count // 2, count)}


def _write(folder: Path, summary: TuneSummary, tuning: Tuning, config_map_name: str) -> None:
    """Write the reports of a tuning. Write the tuned configuration if it beats the present one, or
    the best so far after an interruption; remove configuration files of an earlier start.
    """
    write_whole(folder / "summary.json", as_json(summary))
    write_whole(folder / "report.md", tune_report(summary).encode())
    write_whole(folder / "report.html", tune_page(summary).encode())
    texts: dict[str, str] = {}
    if tuning.best is not None:
        text = with_comment(comment(summary), tuning.best.policy.text)
        if not tuning.complete:
            texts = {BEST_SO_FAR: text}
        elif tuning.beats:
            texts = {TUNED: text, TUNED_CONFIG_MAP: config_map(config_map_name, text)}
    for name in (TUNED, TUNED_CONFIG_MAP, BEST_SO_FAR):
        if name in texts:
            write_whole(folder / name, texts[name].encode())
        else:
            (folder / name).unlink(missing_ok=True)


def _guards(options: argparse.Namespace) -> tuple[Guard, ...]:
    """Return the guards that `--guard` names, or the default ones without the objectives. Raises
    `ClusterSettingsError` for contradictions.
    """
    objectives = options.objective.measures
    if options.guard is None:
        return tuple(one for one in GUARDS if one.measure not in objectives)
    if None in options.guard:
        if len(options.guard) > 1:
            raise ClusterSettingsError("--guard none leaves out all guards: expected no other")
        return ()
    for one in options.guard:
        if one.measure in objectives:
            raise ClusterSettingsError(
                f"--guard {one.measure}: it is an objective; --tolerance sets how much of it may be lost"
            )
    return tuple({one.measure: one for one in options.guard}.values())


def _guard(text: str) -> Guard | None:
    """Parse the argument of `--guard`, for argparse. Return the guard, or None for the text
    "none".
    """
    if text == "none":
        return None
    measure, equals, share = text.partition("=")
    if measure not in _GUARDED:
        hint = nearest(measure, _GUARDED)
        raise argparse.ArgumentTypeError(
            f"expected none or one of {', '.join(_GUARDED)}, got {measure!r}{hint}"
        )
    return Guard(measure=measure, allowed=_tolerance(share) if equals else 0.0)


def _trials(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _TRIALS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {_TRIALS_MAX}")
    return number


def _tolerance(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to below 1")
    return share


def _config_map_name(text: str) -> str:
    if not _CONFIG_MAP_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name of a ConfigMap: at most 63 of a-z, 0-9 and -, "
            "with a letter or a digit at both ends"
        )
    return text
