"""The command `sim size`: find the smallest number of pods that meets an SLO, per GPU type, with
its cost.
"""

import argparse
import contextlib
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from epp import __version__
from epp.configuration.document import ConfigError
from sim.cluster.built_in import DEFAULT_POLICY
from sim.cluster.policies import policy_source
from sim.cluster.prefill_rules import DECODE, PREFILL
from sim.engine.profiles import DEFAULT_PROFILE, Profile, find_profile
from sim.experiments import run_options
from sim.experiments.demand import TraceDemand, demand_of
from sim.experiments.executors import EXECUTOR_HELP, LOCAL, workers_at
from sim.experiments.jobs import JobError, Workers, add_experiment_options, run_job
from sim.experiments.leaderboard.sources import code_hash, plugins_hash
from sim.experiments.mean_traffic import MeanTraffic
from sim.experiments.pool_split import Split, splits_for
from sim.experiments.repetitions import varied_between
from sim.experiments.run import RunSettings
from sim.experiments.run_journal import RunJournal, StoppedError, print_interrupted
from sim.experiments.scenario_file import PODS_MAX
from sim.experiments.sizing import (
    GROWTH,
    ONE_LOST,
    Option,
    Sizing,
    SizingTask,
    bounds_of,
    used_share,
)
from sim.experiments.warm_up import WarmUp, warm_up_of
from sim.interrupts import interrupts_call
from sim.measurement.assumptions import assumptions_of
from sim.measurement.intervals import REPETITIONS_NEEDED, Varied
from sim.measurement.measures import six_digits
from sim.measurement.objectives import Bound, ObjectiveError, bounds_in
from sim.measurement.summaries import (
    AutoscalingSummary,
    EveryCountSummary,
    HeadroomSummary,
    KeptRun,
    LoadSummary,
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
    """Add the command line of `sim size`."""
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
    run_options.add_run_options(parser, trace_required=False)
    add_experiment_options(parser)
    parser.set_defaults(run=run)


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that define the SLO, the compared configurations and prices, and the extent of
    the search.
    """
    add = parser.add_argument_group("Answer").add_argument
    add("--slo", type=_bounds, required=True, metavar="NAME=LIMIT,...",
        help="limits to meet: ttft-p90=2, itl-p99=0.1 or e2e-p95=60 in seconds, goodput=0.99 or "
        "lost=0.01 as shares of the requests")  # fmt: skip
    add("--config", action="append", metavar="FILE|NAME",
        help=f"scheduler configuration; repeat to compare (default: {DEFAULT_POLICY}): {run_options.POLICY_HELP}")  # fmt: skip
    add("--split", metavar="FILE|NAME",
        help="also try pools that are split into prefill and decode pods, with this configuration, which "
        f"must have stages, or {DEFAULT_POLICY} for the default by role; --kv-link and --kv-nics describe "
        "their network (default: no split)")  # fmt: skip
    add("--price", type=_price, action="append", default=[], metavar="PROFILE=P",
        help="cost of a pod of PROFILE for an hour, in your currency; once for each profile")  # fmt: skip
    add("--pods-max", type=_pods, default=64, metavar="N",
        help="largest number of pods to try (default: 64)")  # fmt: skip
    add("--stretch", type=_seconds, default=3600.0, metavar="S",
        help="simulate only the busiest S seconds of a longer trace, the same at every --speed "
        "(default: 3600)")  # fmt: skip
    add("--growth", type=_factor, default=1.3, metavar="X",
        help="headroom: also find the pods needed for X times the traffic (default: 1.3)")  # fmt: skip
    add("--pod-startup", type=_seconds, default=120.0, metavar="S",
        help="seconds from an autoscaler's decision until a new pod serves (default: 120)")  # fmt: skip
    add("--answer-only", action="store_true",
        help="leave out the headroom and the simulated autoscaler")  # fmt: skip
    add("--every-count", action="store_true",
        help="also run every number of pods, to check the search; this is slow")  # fmt: skip
    add("--executor", default=LOCAL, metavar="WHERE",
        help=f"where to run: {EXECUTOR_HELP} (default: {LOCAL})")  # fmt: skip


def _add_mean_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe traffic by its mean request rate and mean lengths."""
    add = parser.add_argument_group("Traffic without a trace").add_argument
    add("--requests-per-s", type=_rate, metavar="R", help="mean number of requests a second")
    add("--prompt-tokens", type=_tokens, metavar="N", help="mean length of a prompt, in tokens")
    add("--output-tokens", type=_tokens, metavar="N", help="mean length of an output, in tokens")


def run(options: argparse.Namespace) -> int:
    """Run `sim size` and return its exit code.

    The code is 0 if the search ended, with or without a sufficient number of pods; 2 for a usage
    error; 130 if it was interrupted, and then completed runs are stored. Raises errors that `sim`
    reports.
    """
    problem = _problem_of(options)
    if problem:
        print(f"sim: {problem}", file=sys.stderr)
        return 2
    folder, task = _opened(options)
    if task.sizing.warm_up.warning:
        print(f"Warning: {task.sizing.warm_up.warning}")
    with RunJournal(folder / RUNS, task.about) as journal:
        going_on = f", resuming after {len(journal):,} runs" if len(journal) else ""
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
            # An interrupted search reports the results that it has.
            with bar, contextlib.suppress(StoppedError):
                sizing.carry_out()
            summary = _SummaryBuilder(task, sizing).summary()
            _write(folder, summary)
            print(size_table(summary))
            print(f"results are in {folder}")
    if sizing.complete:
        return 0
    return print_interrupted(journal)


def _opened(options: argparse.Namespace) -> tuple[Path, "_Task"]:
    """Return the folder of the results and the sizing task of the command line.

    Traffic that is described by means becomes a trace in that folder. Raises errors that `sim`
    reports.
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
            f"{trace} is other traffic than these numbers describe; choose another --out or start "
            "again with --force"
        )
    write_whole(trace, document)
    told = argparse.Namespace(**(vars(options) | {"trace": str(trace)}))
    return folder, _Task(told, str(traffic))


def _profiles(options: argparse.Namespace) -> list[Profile]:
    return options.profile or [find_profile(DEFAULT_PROFILE)]


class Probe(Struct, frozen=True, kw_only=True):
    """A simulation run for another process or machine, with a hash of what its result depends
    on.
    """

    settings: RunSettings
    inputs: str
    """Hash of the trace, the code and the plug-ins on the machine that requests the run."""


def run_probe(probe: Probe) -> RunSummary:
    """Run the simulation that another machine or process requests, and return its summary.

    Raises what `run_job` raises, and `JobError` if this machine's code, plug-ins or trace differ
    from those of the requesting machine.
    """
    settings = probe.settings
    if _inputs_of(settings, _trace_hash(settings.trace)) != probe.inputs:
        raise JobError(
            "the executing machine has other code, plugins or another trace file than the "
            "requesting machine: expected the same"
        )
    return run_job(settings).summary


class SizedRuns:
    """Implementation of `Runs` that reads completed runs from the journal, has workers execute the
    missing ones, and adds these to the journal.
    """

    def __init__(
        self, workers: Workers, journal: RunJournal, trace_hash: str, advance: Callable[[], None]
    ) -> None:
        """Create the source of runs. `trace_hash` is the hash of the trace's content; `advance` is
        called once for each available run.
        """
        self._workers = workers
        self._journal = journal
        self._trace_hash = trace_hash
        self._advance = advance

    def of(self, wanted: Sequence[RunSettings]) -> list[KeptRun]:
        """Return the run for each of the settings in `wanted`, in the same order.

        Raises `StoppedError` after an interruption, and `JobError` for a run that failed.
        """
        keyed = [(_key(settings), settings) for settings in wanted]
        return self._journal.runs(keyed, self._measured, self._advance)

    def _measured(self, wanted: Sequence[RunSettings]) -> Iterator[tuple[int, RunSummary]]:
        probes = [
            Probe(
                # Workers on other machines have another working directory.
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
    """The sizing that the command line of `sim size` describes, checked."""

    def __init__(self, options: argparse.Namespace, described: str = "") -> None:
        """Check the options, determine demand and warm-up from the trace, and print likely mistakes
        in the trace as warnings. Raises errors that `sim` reports.

        `described` is a description of synthetic traffic for reports, or "" if the user gave a
        trace.
        """
        self.first_seed: int = options.seed
        profiles = _profiles(options)
        prices: Mapping[str, float] = dict(options.price)
        policies = run_options.named_policies(options.config or [DEFAULT_POLICY])
        found: list[tuple[Profile, RunSettings, Split | None]] = []
        for profile in profiles:
            changes = {"profile": [profile], "pods": 1, "kv_link": None, "kv_nics": None}
            asked = argparse.Namespace(**(vars(options) | changes))
            found += [
                (profile, run_options.run_settings(asked, policy, options.seed), None)
                for policy in policies
            ]
        first = found[0][1]
        demand = _demand(first, options.stretch)
        for profile in profiles if options.split is not None else ():
            settings = _split_settings(options, profile)
            found += [(profile, settings, split) for split in splits_for(demand.sized_for, profile)]
        part = demand.sized_for.places
        generated = _is_generated(first, part, options.seeds)
        warm_up = _warm_up(first, part, generated=generated)
        run_options.print_trace_warnings(found[0][1])
        told = run_options.conditions(*(settings for _, settings, _ in found))
        self.conditions = told | {
            "trace": described or told["trace"],
            "warm_up_s": warm_up.seconds / first.speed,
            "pods": f"1 to {options.pods_max}",
            "profiles": [profile.name for profile in profiles],
            "prices": prices or None,
            **_split_conditions(found[-1][1]),
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
                    split=split,
                    settings=replace(
                        settings,
                        jitter_s=told["jitter_s"],
                        requests_from=part.start,
                        requests_max=len(part),
                        warm_up_s=warm_up.seconds / settings.speed,
                        busiest_s=warm_up.busiest_s / settings.speed,
                    ),
                )
                for profile, settings, split in found
            ],
        )

    @property
    def about(self) -> dict[str, str]:
        """Values that must be the same when `sim size` is started again on the same folder, as text
        by name.

        Flags may change, because the key of a run contains those on which its figures depend.
        """
        return {
            "version": __version__,
            "trace": self.trace_hash[:12],
            "code": code_hash()[:12],
        }


class _SummaryBuilder:
    """Builder of summary.json for a sizing, complete or interrupted.

    A complete sizing gives the same bytes, however often it was interrupted.
    """

    def __init__(self, task: _Task, sizing: Sizing) -> None:
        self._task = task
        self._sizing = sizing
        self._chosen = sizing.chosen

    def summary(self) -> SizeSummary:
        """Return the content of summary.json for the results so far."""
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
            loads=self._loads(),
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
        task, search = self._sizing.task, self._sizing.options[at]
        option, pods, demand = task.options[at], search.pods, task.demand.sized_for.demand
        price = option.price_per_hour
        counts = search.counts(price)
        cost = None if pods is None or price is None else pods * price
        hours = task.span_s / option.settings.speed / 3600

        def for_a_million(tokens: int) -> float | None:
            return None if cost is None or not tokens else six_digits(cost * hours / tokens * 1e6)

        return SizedSummary(
            profile=option.profile.name,
            config=option.policy.name,
            price_per_hour=price,
            pods=pods,
            pods_perhaps=search.perhaps,
            used=next((one.used for one in counts if one.pods == pods), None),
            cost_per_hour=None if cost is None else six_digits(cost),
            cost_per_million_tokens=for_a_million(demand.prompt_tokens + demand.output_tokens),
            cost_per_million_output_tokens=for_a_million(demand.output_tokens),
            on_front=False,
            counts=counts,
            runs=sum(one.runs for one in counts),
            prefill_share=UNSET if option.split is None else option.split.prefill_share,
            prefill_pods=UNSET
            if option.split is None
            else None
            if pods is None
            else option.split.prefill_pods(pods),
            every_count=self._every_count(at),
        )

    def _loads(self) -> list[LoadSummary] | UnsetType:
        task = self._sizing.task
        if not any(option.split for option in task.options):
            return UNSET
        return [
            LoadSummary(
                option=at,
                pods=pods,
                load=load,
                used=used_share(bounds_of(task.bounds, [one])),
                ttft_p90_s=one.ttft_s.p90,
                itl_mean_s=one.itl_s.mean,
                e2e_mean_s=one.e2e_s.mean,
            )
            for at, pods, load, one in self._sizing.loads
        ]

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
        chosen = self._sizing.chosen
        split = chosen is not None and self._sizing.task.options[chosen].split is not None
        what = "a pod of each role fails" if split else "a pod fails"
        says = {
            ONE_LOST: f"{what} after a tenth of the time and does not come back; its requests are "
            "sent again a second later",
            GROWTH: f"requests come {self._sizing.task.growth:g} times as fast",
        }
        return [
            HeadroomSummary(
                case=case,
                says=says[case],
                pods=search.pods,
                cost_per_hour=None
                if price is None or search.pods is None
                else six_digits(price * search.pods),
                counts=search.counts(price),
            )
            for case, search in self._sizing.headroom.items()
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
            runs=len(runs),
            varied=between.over if len(runs) > 1 else "",
            pods_mean=pool.pods_mean,
            pods_highest=pool.pods_max,
            pod_hours=pool.pod_hours,
            fixed_pod_hours=None if hours is None else six_digits(pods * hours),
            kept=None if between.lacking else all(one.kept for one in told),
            bounds=told,
        )


def _split_settings(options: argparse.Namespace, profile: Profile) -> RunSettings:
    """Return the settings of a run with one prefill pod and one decode pod of `profile`. Raises
    `ConfigError` if the configuration of `--split` has no prefill stage.
    """
    policy = policy_source(options.split)
    changes = {"profile": [profile], "pods": None, "roles": (PREFILL, DECODE)}
    asked = argparse.Namespace(**(vars(options) | changes))
    settings = run_options.run_settings(asked, policy, options.seed)
    opened = settings.cluster.opener(policy)(0).settings
    if opened is None or opened.stages.prefill is None:
        raise ConfigError(
            [f"--split {options.split}: expected a configuration with a prefill stage"]
        )
    return settings


def _split_conditions(settings: RunSettings) -> dict[str, Any]:
    """Return the conditions of the network of split pools; empty if no pool is split."""
    transfer = settings.cluster.kv_transfer
    if transfer is None:
        return {}
    nics = {kind.nics for kind in settings.cluster.pods}
    return {"kv_link": transfer.link.name, "kv_nics": max(nics)}


def _with_front(options: list[SizedSummary]) -> list[SizedSummary]:
    """Return the options with `on_front` set to whether each is on the Pareto front.

    An option is on the front if no other one is better in cost or in the used share of the bounds
    and no worse in the other. An option whose cost or used share is unknown is not on it. If all
    options have the same profile and no price, the number of pods is the cost.
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
    """Return the demand of the trace of `settings`; if the trace is longer than `stretch_s`, only
    its busiest stretch of that length is sized.

    `stretch_s` is in the trace's time, so it selects the same stretch at every --speed. Raises what
    reading the trace raises.
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
    """Return the warm-up that the figures of all runs exclude, at any load: that of `--warm-up`, or
    one that is determined from the requests at the positions `part` of the trace. Raises what
    reading the trace raises.
    """
    trace = open_trace(Path(settings.trace), settings.read)
    given_s = None if settings.warm_up_s is None else settings.warm_up_s * settings.speed
    arrivals = islice(trace, part.start, part.stop)
    return warm_up_of(arrivals, generated=generated, given_s=given_s)


def _is_generated(settings: RunSettings, part: range, seeds: int) -> bool:
    """Return True if each repetition of the trace is generated with another seed, False if all but
    the first are resamples of a recorded trace. Without --requests, a big trace is cached on disk,
    so that workers need not parse it.

    Raises `TraceError` if a recorded trace can be cut into too few blocks, or there are too few
    `seeds`, for confidence intervals.
    """
    trace = open_trace(Path(settings.trace), settings.read)
    if settings.requests_max is None:
        # This process reads the trace once, so that the workers need not.
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
        raise TraceError(settings.trace, 0, "", f"There is not enough data: {lacking}")
    return False


def _key(settings: RunSettings) -> str:
    """Return the key under which the journal stores the run with these settings.

    The key covers everything on which the figures depend, except trace and code.
    """
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
    """Write the summary and the reports of a sizing, and the autoscaler's manifests if it has an
    autoscaler.

    Without an autoscaler, manifests that an earlier start of the command wrote are removed.
    """
    write_whole(folder / "summary.json", as_json(summary))
    write_whole(folder / "report.md", size_report(summary).encode())
    write_whole(folder / "report.html", size_page(summary).encode())
    if summary.autoscaling is not None:
        write_whole(folder / AUTOSCALING, autoscaling_manifests(summary.autoscaling).encode())
    else:
        (folder / AUTOSCALING).unlink(missing_ok=True)


def _problem_of(options: argparse.Namespace) -> str:
    """Return one sentence about the first contradiction or missing value among the flags of `sim
    size`, or "" if the flags are valid.
    """
    if options.out is None:
        return "--out DIR is needed: it stores runs, so that the command can resume"
    if options.seeds < REPETITIONS_NEEDED:
        return (
            f"--seeds is {options.seeds}; expected at least {REPETITIONS_NEEDED}, which confidence "
            "intervals need"
        )
    if options.pods is not None:
        return "--pods is the result of sim size: leave it out; --pods-max limits it"
    if options.roles is not None:
        return "--roles is the result of sim size: leave it out; --split lets it propose roles"
    if options.scenario is not None:
        return "--scenario does not work with sim size, which defines traffic and pods itself"
    if options.split is None and (options.kv_link is not None or options.kv_nics is not None):
        return "--kv-link and --kv-nics describe the network of split pools: give --split too"
    if options.faults_per_hour:
        return (
            "--faults-per-hour does not work with sim size; its headroom covers the loss of a pod"
        )
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
    """Return one sentence about what is missing or contradictory in the flags that describe the
    traffic, or "" if they are valid.
    """
    means = {name: getattr(options, name[2:].replace("-", "_")) for name in _MEANS}
    missing = [name for name, value in means.items() if value is None]
    if options.trace is not None:
        given = [name for name in _MEANS if name not in missing]
        return f"{given[0]} does not work with TRACE: give one of them" if given else ""
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
    # No autoscaler takes longer than a day, and a stretch below a second has hardly any request.
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
