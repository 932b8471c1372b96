"""`sim size`: how few pods keep what a service promises, of which kind, and what they cost."""

import argparse
import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from epp import __version__
from sim.cluster.built_in import DEFAULT_POLICY
from sim.engine.profiles import DEFAULT_PROFILE, Profile, find_profile
from sim.experiments.demand import TraceDemand, demand_of
from sim.experiments.executors import EXECUTOR_HELP, LOCAL, workers_at
from sim.experiments.jobs import (
    JobError,
    Workers,
    add_experiment_options,
    run_job,
    varied_between,
)
from sim.experiments.leaderboard.sources import code_hash, plugins_hash
from sim.experiments.mean_traffic import MeanTraffic
from sim.experiments.run import RunSettings
from sim.experiments.run_journal import RunJournal, StoppedError
from sim.experiments.run_options import (
    POLICY_HELP,
    add_run_options,
    conditions,
    named_policies,
    run_settings,
    tell_warnings,
)
from sim.experiments.scenario_file import PODS_MAX
from sim.experiments.sizing import (
    GROWTH,
    ONE_LOST,
    Option,
    Sizing,
    SizingTask,
    bounds_of,
)
from sim.experiments.warm_up import WarmUp, warm_up_of
from sim.interrupts import INTERRUPTED, interrupts_call
from sim.measurement.assumptions import assumptions_of
from sim.measurement.intervals import REPETITIONS_NEEDED, Varied
from sim.measurement.measures import six_digits
from sim.measurement.objectives import Bound, ObjectiveError, bounds_in
from sim.measurement.summaries import (
    AutoscalingSummary,
    EveryCountSummary,
    HeadroomSummary,
    KeptRun,
    NamedRun,
    RunSummary,
    SizedSummary,
    SizeSummary,
    as_json,
)
from sim.output import (
    AUTOSCALING,
    RUNS,
    TRAFFIC,
    OutputError,
    open_folder,
    progress_bar,
    write_whole,
)
from sim.reports.autoscaling_manifests import autoscaling_manifests
from sim.reports.size_report import size_page, size_report, size_table
from sim.traces.arrival import TraceError
from sim.traces.formats import open_trace
from sim.traces.reading import content_hash
from sim.traces.variation import varied

_MEANS: Final = ("--requests-per-s", "--prompt-tokens", "--output-tokens")
_TOKENS_MAX: Final = 10_000_000


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command line of `sim size`."""
    parser = subparsers.add_parser(
        "size",
        help="the smallest number of pods that meets an SLO, per GPU type, with its cost",
        usage="sim size [TRACE] --slo NAME=LIMIT,... --out DIR [flags]",
        description="Find the smallest number of pods that meets --slo on TRACE and on other traffic "
        "like it, for every --profile under every --config. Without TRACE the traffic is described "
        "by --requests-per-s, --prompt-tokens and --output-tokens. The same command continues where "
        "it was stopped.",
        allow_abbrev=False,
    )
    _add_answer_options(parser)
    _add_mean_options(parser)
    add_run_options(parser, trace_required=False)
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    """What is looked for, and among what."""
    add = parser.add_argument_group("Answer").add_argument
    add("--slo", type=_bounds, required=True, metavar="NAME=LIMIT,...",
        help="limits to meet: ttft-p90=2, itl-p99=0.1 or e2e-p95=60 in seconds, goodput=0.99 or "
        "lost=0.01 as shares of the requests")  # fmt: skip
    add("--config", action="append", metavar="FILE|NAME",
        help=f"scheduler configuration; repeat to compare ({DEFAULT_POLICY}): {POLICY_HELP}")  # fmt: skip
    add("--price", type=_price, action="append", default=[], metavar="PROFILE=P",
        help="cost of a pod of PROFILE for an hour, in your currency; once for each profile")  # fmt: skip
    add("--pods-max", type=_pods, default=64, metavar="N", help="largest number of pods tried (64)")
    add("--stretch", type=_seconds, default=3600.0, metavar="S",
        help="of a longer trace only its busiest S seconds are simulated, the same at every --speed (3600)")  # fmt: skip
    add("--growth", type=_factor, default=1.3, metavar="X",
        help="headroom: the pods needed for X times the traffic (1.3)")  # fmt: skip
    add("--pod-startup", type=_seconds, default=120.0, metavar="S",
        help="seconds from an autoscaler's decision until a new pod serves (120)")  # fmt: skip
    add("--answer-only", action="store_true",
        help="leave out headroom, and how an autoscaler would have done")  # fmt: skip
    add("--every-count", action="store_true",
        help="also run every number of pods, to check the search: slow")  # fmt: skip
    add("--executor", default=LOCAL, metavar="WHERE", help=f"{EXECUTOR_HELP} ({LOCAL})")


def _add_mean_options(parser: argparse.ArgumentParser) -> None:
    """Traffic that is described by its means."""
    add = parser.add_argument_group("Traffic without a trace").add_argument
    add("--requests-per-s", type=_rate, metavar="R", help="mean number of requests a second")
    add("--prompt-tokens", type=_tokens, metavar="N", help="mean length of a prompt, in tokens")
    add("--output-tokens", type=_tokens, metavar="N", help="mean length of an output, in tokens")


def run(options: argparse.Namespace) -> int:
    """0: done, whether or not any number is enough. 2: usage. 130: interrupted, what is done is kept.

    Raises what is told by `sim`.
    """
    problem = _problem_of(options)
    if problem:
        print(f"sim: {problem}", file=sys.stderr)
        return 2
    folder, task = _opened(options)
    if task.sizing.warm_up.warning:
        print(f"Warning: {task.sizing.warm_up.warning}")
    with RunJournal(folder / RUNS, task.about) as journal:
        going_on = f", going on from {len(journal):,} runs" if len(journal) else ""
        seeds = f"seeds {options.seed} to {options.seed + options.seeds - 1}"
        count = len(task.sizing.options)
        options_told = f"{count} option{'' if count == 1 else 's'}"
        print(f"{seeds}, {options_told}{going_on}", flush=True)
        bar = progress_bar("size")
        at = bar.add_task("runs", total=task.sizing.runs_expected)
        with (
            workers_at(options.executor, options.workers) as workers,
            interrupts_call(workers.stop),
        ):
            runs = SizedRuns(workers, journal, task.trace_hash, lambda: bar.advance(at))
            sizing = Sizing(task.sizing, runs)
            # What is known when it is stopped is told all the same.
            with bar, contextlib.suppress(StoppedError):
                sizing.carry_out()
            summary = _Told(task, sizing).summary()
            _write(folder, summary)
            print(size_table(summary))
            print(f"results are in {folder}")
    if sizing.complete:
        return 0
    print(
        f"sim: interrupted, {len(journal):,} runs are kept: the same command goes on from there",
        file=sys.stderr,
    )
    return INTERRUPTED


def _opened(options: argparse.Namespace) -> tuple[Path, "_Task"]:
    """Return the folder of the results and what is to be found out.

    Traffic that is described by means becomes a trace in that folder. Raises what is told by `sim`.
    """
    if options.trace is not None:
        task = _Task(options)
        folder = open_folder(options, goes_on=RUNS)
        assert folder is not None
        return folder, task
    traffic = MeanTraffic(
        requests_per_s=options.requests_per_s,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    document = traffic.document(_profiles(options))
    folder = open_folder(options, goes_on=TRAFFIC)
    assert folder is not None
    trace = folder / TRAFFIC
    if trace.exists() and trace.read_bytes() != document:
        raise OutputError(
            f"{trace} is other traffic than these numbers describe; choose another --out or begin "
            "anew with --force"
        )
    write_whole(trace, document)
    told = argparse.Namespace(**(vars(options) | {"trace": str(trace)}))
    return folder, _Task(told, str(traffic))


def _profiles(options: argparse.Namespace) -> list[Profile]:
    return options.profile or [find_profile(DEFAULT_PROFILE)]


class Probe(Struct, frozen=True, kw_only=True):
    """A run that may be sent to another machine."""

    settings: RunSettings
    inputs: str
    """A hash of trace, code and plugins where it was asked for."""


def run_probe(probe: Probe) -> RunSummary:
    """Run it. Raises as `run_job`, and `JobError` where code or trace are others."""
    settings = probe.settings
    if _inputs_of(settings, _trace_hash(settings.trace)) != probe.inputs:
        raise JobError(
            "the machine that was to run it has other code, plugins or another trace file than the "
            "one that asked: expected the same"
        )
    return run_job(settings).summary


class SizedRuns:
    """Asks the journal first, the workers for the rest."""

    def __init__(
        self, workers: Workers, journal: RunJournal, trace_hash: str, advance: Callable[[], None]
    ) -> None:
        """`advance` is called for each run that there is."""
        self._workers = workers
        self._journal = journal
        self._trace_hash = trace_hash
        self._advance = advance

    def of(self, wanted: Sequence[RunSettings]) -> list[KeptRun]:
        """One for each, in order. Raises `StoppedError`, and `JobError` for one that cannot be."""
        keyed = [(_key(settings), settings) for settings in wanted]
        return self._journal.runs(keyed, self._measured, self._advance)

    def _measured(self, wanted: Sequence[RunSettings]) -> Iterator[tuple[int, RunSummary]]:
        probes = [
            Probe(
                # Workers elsewhere were started in another folder.
                settings=replace(settings, trace=str(Path(settings.trace).absolute())),
                inputs=_inputs_of(settings, self._trace_hash),
            )
            for settings in wanted
        ]
        for place, outcome in self._workers.outcomes(run_probe, probes):
            if isinstance(outcome, JobError):
                raise outcome
            yield place, outcome


class _Task:
    """What the command line asks for, read and checked."""

    def __init__(self, options: argparse.Namespace, described: str = "") -> None:
        """`described`: the traffic in words, if it is no trace of the user's.

        Raises what is told by `sim`.
        """
        self.first_seed: int = options.seed
        profiles = _profiles(options)
        prices: Mapping[str, float] = dict(options.price)
        policies = named_policies(options.config or [DEFAULT_POLICY])
        found: list[tuple[Profile, RunSettings]] = []
        for profile in profiles:
            asked = argparse.Namespace(**(vars(options) | {"profile": [profile], "pods": 1}))
            found += [(profile, run_settings(asked, policy, options.seed)) for policy in policies]
        first = found[0][1]
        demand = _demand(first, options.stretch)
        part = demand.sized_for.places
        generated = _is_generated(first, part, options.seeds)
        warm_up = _warm_up(first, part, generated=generated)
        tell_warnings(found[0][1])
        told = conditions(*(settings for _, settings in found))
        self.conditions = told | {
            "trace": described or told["trace"],
            "warm_up_s": warm_up.seconds / first.speed,
            "pods": f"1 to {options.pods_max}",
            "profiles": [profile.name for profile in profiles],
            "prices": prices or None,
        }
        self.trace_hash = _trace_hash(first.trace)
        self.sizing = SizingTask(
            bounds=options.slo,
            seeds=options.seeds,
            generated=generated,
            pods_max=options.pods_max,
            growth=options.growth,
            pod_startup_s=options.pod_startup,
            answer_only=options.answer_only,
            every_count=options.every_count,
            demand=demand,
            warm_up=warm_up,
            options=[
                Option(
                    profile=profile,
                    policy=settings.policy,
                    price_per_hour=prices.get(profile.name),
                    settings=replace(
                        settings,
                        jitter_s=told["jitter_s"],
                        requests_from=part.start,
                        requests_max=len(part),
                        warm_up_s=warm_up.seconds / settings.speed,
                        busiest_s=warm_up.busiest_s / settings.speed,
                    ),
                )
                for profile, settings in found
            ],
        )

    @property
    def about(self) -> dict[str, str]:
        """What may not change between two starts; runs of other flags are told apart by their keys."""
        return {
            "version": __version__,
            "trace": self.trace_hash[:12],
            "code": code_hash()[:12],
        }


class _Told:
    """A sizing, as far as it has come, as summary.json has it.

    The same task gives the same bytes, however often it was stopped.
    """

    def __init__(self, task: _Task, sizing: Sizing) -> None:
        self._task = task
        self._sizing = sizing
        self._chosen = sizing.chosen

    def summary(self) -> SizeSummary:
        """All of it."""
        sizing, chosen = self._sizing, self._chosen
        task, demand = sizing.task, sizing.task.demand
        longest = sizing.longest
        between = varied_between(longest)
        runs = [] if chosen is None else sizing.found_runs(chosen)
        busiest = max(one.demand.work for one in demand.over_time)
        return SizeSummary(
            complete=sizing.complete,
            version=__version__,
            first_seed=self._task.first_seed,
            seeds=max(len(longest), 1),
            varied=between.over if len(longest) > 1 else "",
            generated=task.generated,
            conditions=self._task.conditions,
            assumptions=assumptions_of(option.profile for option in task.options),
            pods_max=task.pods_max,
            bounds=[f"{bound.name}={bound.limit:g}" for bound in task.bounds],
            trace=demand.whole.summary(demand.whole.demand.work),
            sized_for=demand.sized_for.summary(demand.sized_for.demand.work),
            over_time=[one.summary(busiest) for one in demand.over_time],
            warm_up=task.warm_up.summary(),
            options=_with_front([self._option(at) for at in range(len(task.options))]),
            chosen=chosen,
            why_none=sizing.why_none,
            headroom=[] if chosen is None else self._headroom(task.options[chosen].price_per_hour),
            autoscaling=None if chosen is None else self._autoscaling(chosen),
            runs=[
                NamedRun(
                    config=task.options[chosen or 0].policy.name,
                    seed=self._task.first_seed + repetition,
                    run=one,
                )
                for repetition, one in enumerate(runs)
            ],
        )

    def _option(self, at: int) -> SizedSummary:
        task, sought = self._sizing.task, self._sizing.options[at]
        option, pods, demand = task.options[at], sought.pods, task.demand.sized_for.demand
        price = option.price_per_hour
        counts = sought.counts(price)
        cost = None if pods is None or price is None else pods * price
        hours = task.span_s / option.settings.speed / 3600

        def for_a_million(tokens: int) -> float | None:
            return None if cost is None or not tokens else six_digits(cost * hours / tokens * 1e6)

        return SizedSummary(
            profile=option.profile.name,
            config=option.policy.name,
            price_per_hour=price,
            pods=pods,
            pods_perhaps=sought.perhaps,
            used=next((one.used for one in counts if one.pods == pods), None),
            cost_per_hour=None if cost is None else six_digits(cost),
            cost_per_million_tokens=for_a_million(demand.prompt_tokens + demand.output_tokens),
            cost_per_million_output_tokens=for_a_million(demand.output_tokens),
            on_front=False,
            counts=counts,
            runs=sum(one.runs for one in counts),
            every_count=self._every_count(at),
        )

    def _every_count(self, at: int) -> EveryCountSummary | UnsetType:
        if not self._sizing.complete or not self._sizing.task.every_count:
            return UNSET
        counts = self._sizing.every[at].counts()
        return EveryCountSummary(
            pods=self._sizing.every_smallest(at),
            runs=sum(one.runs for one in counts),
            counts=counts,
        )

    def _headroom(self, price: float | None) -> list[HeadroomSummary]:
        says = {
            ONE_LOST: "gone for good after a tenth of the time, its requests being sent again a second "
            "later",
            GROWTH: f"requests come {self._sizing.task.growth:g} times as fast",
        }
        return [
            HeadroomSummary(
                case=case,
                says=says[case],
                pods=sought.pods,
                cost_per_hour=None
                if price is None or sought.pods is None
                else six_digits(price * sought.pods),
                counts=sought.counts(price),
            )
            for case, sought in self._sizing.headroom.items()
        ]

    def _autoscaling(self, chosen: int) -> AutoscalingSummary | None:
        if self._sizing.autoscaled is None:
            return None
        task, (settings, runs) = self._sizing.task, self._sizing.autoscaled
        between = varied_between(runs)
        told = bounds_of(task.bounds, runs)
        pool, pods = runs[0].pool, self._sizing.options[chosen].pods
        assert pool is not UNSET
        assert pods is not None
        hours = (pool.pod_hours or 0.0) / pool.pods_mean if pool.pods_mean else None
        return AutoscalingSummary(
            metric=str(settings.metric),
            target=settings.target,
            pods_min=settings.pods_min,
            pods_max=settings.pods_max,
            startup_s=settings.startup_s,
            whole_trace=task.demand.cut,
            runs=len(runs),
            varied=between.over if len(runs) > 1 else "",
            pods_mean=pool.pods_mean,
            pods_highest=pool.pods_max,
            pod_hours=pool.pod_hours,
            fixed_pod_hours=None if hours is None else six_digits(pods * hours),
            kept=None if between.lacking else all(one.kept for one in told),
            bounds=told,
        )


def _with_front(options: list[SizedSummary]) -> list[SizedSummary]:
    """With those marked that no other beats in both cost and what is left of the bounds.

    Pods of one kind are their own price.
    """
    alike = len({one.profile for one in options}) == 1
    costs = [
        float(one.pods)
        if alike and one.pods is not None and one.price_per_hour is None
        else one.cost_per_hour
        for one in options
    ]
    places = [
        (cost, one.used) if one.used is not None and cost is not None else None
        for one, cost in zip(options, costs, strict=True)
    ]
    known = [place for place in places if place is not None]

    def beaten(place: tuple[float, float]) -> bool:
        return any(
            other != place and other[0] <= place[0] and other[1] <= place[1] for other in known
        )

    return [
        replace(one, on_front=place is not None and not beaten(place))
        for one, place in zip(options, places, strict=True)
    ]


def _demand(settings: RunSettings, stretch_s: float) -> TraceDemand:
    """Return what the trace asks for; `stretch_s` is of the trace, so that it is one at every speed.

    Raises as the reading of the trace does.
    """
    trace = open_trace(Path(settings.trace), settings.read)
    arrivals = islice(trace, settings.requests_max)
    try:
        return demand_of(arrivals, sized_s_max=stretch_s)
    except ValueError as problem:
        if str(problem) != "no requests":
            raise
        raise trace.without_requests() from None


def _warm_up(settings: RunSettings, part: range, *, generated: bool) -> WarmUp:
    """Return what is excluded of `part` of the trace at every load. Raises as its reading does."""
    trace = open_trace(Path(settings.trace), settings.read)
    given_s = None if settings.warm_up_s is None else settings.warm_up_s * settings.speed
    arrivals = islice(trace, part.start, part.stop)
    return warm_up_of(arrivals, generated=generated, given_s=given_s)


def _is_generated(settings: RunSettings, part: range, seeds: int) -> bool:
    """Whether repetitions draw the trace anew. Raises `TraceError` if they could show nothing."""
    trace = open_trace(Path(settings.trace), settings.read)
    if settings.requests_max is None:
        # Read once here, so that no process has to.
        trace.keep()
    if trace.generated() is not None:
        return True
    blocks = varied(
        trace, 1, seed=settings.seed, requests_from=part.start, requests_max=len(part)
    ).blocks
    assert blocks is not None
    lacking = Varied(
        repetitions=seeds, generated=False, blocks=blocks.count, cut=str(blocks)
    ).lacking
    if lacking:
        raise TraceError(settings.trace, 0, "", f"Nothing could be sure: {lacking}")
    return False


def _key(settings: RunSettings) -> str:
    """Of a run in the journal: all that its figures depend on, but trace and code."""
    pods = len(settings.cluster.pods)
    policy = replace(settings.policy, name="", source="")
    bare = replace(settings, trace="", policy=policy, read=replace(settings.read, kept_in=""))
    told = msgspec.json.encode(bare, enc_hook=repr, order="deterministic")
    digest = hashlib.sha256(told + plugins_hash(settings.policy).encode()).hexdigest()
    profile = settings.cluster.pods[0].profile.name
    return (
        f"{profile}, {settings.policy.name}, {pods} pods, repetition {settings.repetition}, "
        f"{digest[:16]}"
    )


def _inputs_of(settings: RunSettings, trace_hash: str) -> str:
    told = f"{trace_hash} {code_hash()} {plugins_hash(settings.policy)}"
    return hashlib.sha256(told.encode()).hexdigest()


@cache
def _trace_hash(path: str) -> str:
    return content_hash(Path(path))


def _write(folder: Path, summary: SizeSummary) -> None:
    """Reports, and an autoscaler's manifests if there are any; none of an earlier start remains."""
    write_whole(folder / "summary.json", as_json(summary))
    write_whole(folder / "report.md", size_report(summary).encode())
    write_whole(folder / "report.html", size_page(summary).encode())
    if summary.autoscaling is not None:
        write_whole(folder / AUTOSCALING, autoscaling_manifests(summary.autoscaling).encode())
    else:
        (folder / AUTOSCALING).unlink(missing_ok=True)


def _problem_of(options: argparse.Namespace) -> str:
    """What makes the flags no task, in a sentence; "": nothing."""
    if options.out is None:
        return "--out DIR is needed: runs are kept there to go on from"
    if options.seeds < REPETITIONS_NEEDED:
        return (
            f"--seeds: {REPETITIONS_NEEDED} are needed to be sure of anything, got {options.seeds}"
        )
    if options.pods is not None:
        return "--pods is what is looked for; --pods-max says how far"
    if options.scenario is not None:
        return "--scenario does not go with sim size: traffic is the trace, and pods are looked for"
    if options.faults_per_hour:
        return "--faults-per-hour does not go with sim size: one pod lost is told besides"
    if problem := _traffic_problem_of(options):
        return problem
    names = [profile.name for profile in _profiles(options)]
    priced = [name for name, _ in options.price]
    for flag, given in (("--profile", names), ("--price", priced)):
        twice = [name for at, name in enumerate(given) if name in given[:at]]
        if twice:
            return f"{flag}: {twice[0]} is given twice"
    unknown = [name for name in priced if name not in names]
    if unknown:
        return f"--price {unknown[0]}: expected one of the profiles {', '.join(sorted(names))}"
    return ""


def _traffic_problem_of(options: argparse.Namespace) -> str:
    """Return why the flags describe no traffic, as a sentence; "" if they do."""
    means = {name: getattr(options, name[2:].replace("-", "_")) for name in _MEANS}
    missing = [name for name, value in means.items() if value is None]
    if options.trace is not None:
        given = [name for name in _MEANS if name not in missing]
        return f"{given[0]} does not go with TRACE: give one of them" if given else ""
    if len(missing) == len(_MEANS):
        return f"TRACE is missing; without a trace, give {', '.join(_MEANS)}"
    if missing:
        return f"{missing[0]} is missing: traffic without a trace needs {', '.join(_MEANS)}"
    return ""


def _bounds(text: str) -> tuple[Bound, ...]:
    try:
        return bounds_in(text)
    except ObjectiveError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def _price(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not PROFILE=PRICE")
    return name, _between(number, 0.0, 1e9)


def _pods(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= PODS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {PODS_MAX:,}")
    return number


def _seconds(text: str) -> float:
    # An autoscaler takes no longer, and a shorter stretch would hold hardly a request.
    return _between(text, 1.0, 86_400.0)


def _rate(text: str) -> float:
    return _between(text, 0.001, 10_000.0)


def _tokens(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= number <= _TOKENS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {_TOKENS_MAX:,}")
    return number


def _factor(text: str) -> float:
    return _between(text, 1.0, 100.0)


def _between(text: str, lowest: float, highest: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not lowest <= number <= highest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {lowest:g} to {highest:g}")
    return number
