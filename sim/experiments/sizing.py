"""Search for the smallest number of pods that keeps the bounds of an SLO.

The search covers each option (a GPU profile with a scheduler configuration), the headroom of the
cheapest option, and an autoscaler. Completed runs determine which runs are needed next. This module
does not know whether a run is executed here or on another machine, or comes from an earlier start.
"""

import math
from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from epp.core.types import Seconds
from sim.cluster.autoscaler import AutoscalerSettings, ScaledBy
from sim.cluster.incidents import Leave
from sim.cluster.policies import PolicySource
from sim.cluster.prefill_rules import DECODE, PREFILL
from sim.cluster.settings import ClientSettings
from sim.engine.profiles import Profile
from sim.experiments.demand import TraceDemand, guessed_pods
from sim.experiments.pod_search import Step, next_step, smallest_of_all
from sim.experiments.pool_split import Split
from sim.experiments.repetitions import varied_between
from sim.experiments.run import RunSettings
from sim.experiments.scenario_file import PODS_MAX, Scenario
from sim.experiments.warm_up import WarmUp
from sim.measurement.measures import rounded, six_digits
from sim.measurement.objectives import Bound, bound_summaries, cannot_be_kept
from sim.measurement.summaries import BoundSummary, CountSummary, KeptRun

ONE_LOST: Final = "one pod lost"
GROWTH: Final = "more traffic"
LOST_AFTER: Final = 0.1
"""Share of the simulated time after which a pod is lost, in the runs that test the headroom.

The loss is early because the figures cover the whole time, and the time before the loss improves
them.
"""
TARGET_SHARES: Final = (1.0, 0.8, 0.6, 0.4)
"""Autoscaler targets that are tried, as shares of the mean number of requests in flight on a pod of
the smallest sufficient pool.

An autoscaler with the full number as its target scales up too late, by the start-up time of a pod.
"""
LOADS: Final = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Factors on the request rate at which a pool with a split is compared with one without."""
_TARGET_MIN: Final = 0.1
_TARGETS_AT_ONCE: Final = 2
_COUNTS_EXPECTED: Final = 6
"""Estimate, for the progress bar, of how many numbers of pods are tried for each option. Half of
them are assumed to be run with every seed.
"""


class Option(Struct, frozen=True, kw_only=True):
    """One of the alternatives that a sizing compares: a profile (model and GPU) with a scheduler
    configuration and a price.
    """

    profile: Profile
    policy: PolicySource
    price_per_hour: float | None
    settings: RunSettings
    """Settings of a run with one pod, or with one of each role; `with_pods` derives those with
    more.
    """
    split: Split | None = None
    """Division into prefill and decode pods, or None if every pod serves whole requests."""


class SizingTask(Struct, frozen=True, kw_only=True):
    """The input of a sizing: bounds of the SLO, options, traffic, and the extent of the search."""

    bounds: tuple[Bound, ...]
    seeds: int
    """Number of repetitions of each run, each with its own traffic."""
    generated: bool
    """True if each repetition is generated with another seed, False if all but the first are
    resamples of a recorded trace.
    """
    pods_max: int
    growth: float
    """Factor on the request rate for which the headroom is determined."""
    pod_startup_s: Seconds
    answer_only: bool
    """True to leave out the headroom and the simulated autoscaler."""
    every_count: bool
    """True to run also every number of pods up to `pods_max`, which checks the search."""
    demand: TraceDemand
    warm_up: WarmUp
    options: list[Option]

    @property
    def span_s(self) -> Seconds:
        """Length of the stretch of the trace that is sized for, in seconds of the trace's clock."""
        return self.demand.sized_for.end_s - self.demand.sized_for.start_s

    @property
    def runs_expected(self) -> int:
        """Estimated number of runs of the whole sizing, for the progress bar."""
        counts = len(self.options) * _COUNTS_EXPECTED
        searched = counts // 2 * (1 + self.seeds)
        besides = 0 if self.answer_only else 6 * self.seeds
        besides += 2 * len(LOADS) if any(option.split for option in self.options) else 0
        every = len(self.options) * self.pods_max * self.seeds if self.every_count else 0
        return searched + besides + every


class Runs(Protocol):
    """Source of the results of simulation runs, executed or stored."""

    def of(self, wanted: Sequence[RunSettings]) -> list[KeptRun]:
        """Return the result of the run for each of the settings in `wanted`, in the same order."""
        ...


class PodSearch:
    """The search for the smallest sufficient number of pods under one set of settings, with its
    completed runs.
    """

    def __init__(
        self,
        settings: RunSettings,
        task: SizingTask,
        start: int,
        *,
        lowest: int = 1,
        split: Split | None = None,
    ) -> None:
        """Create a search that begins at `start` pods.

        `settings` describe a run; the search replaces its number of pods. Fewer pods than `lowest`
        are known to be too few. `split` divides the pods into roles; a split pool has two or more.
        """
        self._lowest = lowest if split is None else max(lowest, 2)
        self._split = split
        self._settings = settings
        self._task = task
        self._start = start
        self.runs: dict[int, list[KeptRun]] = {}

    @property
    def known(self) -> dict[int, bool]:
        """Verdict by number of pods, for all numbers whose runs decide it: True if the number is
        sufficient.
        """
        decided = ((pods, self.verdict(pods)) for pods in self.runs)
        return {pods: verdict for pods, verdict in decided if verdict is not None}

    @property
    def pods(self) -> int | None:
        """Smallest sufficient number of pods, or None if the search has not ended or no number up to
        the maximum is sufficient.
        """
        return self._step.found

    @property
    def ended(self) -> bool:
        """True if the search for the number of pods has ended."""
        return self._step.ask is None

    @property
    def perhaps(self) -> int | None:
        """Smallest number of pods below the result (any number if there is no result) that was run
        with every seed and whose figures keep all bounds, although their 95 % confidence limits do
        not. None if there is none.
        """
        pods = self.pods
        return min(
            (
                one.pods
                for one in self.counts()
                if one.runs == self._task.seeds
                and not one.kept
                and all(bound.kept_by_figure for bound in one.bounds)
                and (pods is None or one.pods < pods)
            ),
            default=None,
        )

    def wanted(self) -> list[tuple[int, RunSettings]]:
        """Return the runs that the next step of the search needs, as (number of pods, settings).
        Empty if the search has ended.

        The first repetition of a number of pods runs alone, because it may already decide.
        """
        pods = self._step.ask
        if pods is None:
            return []
        done = len(self.runs.get(pods, ()))
        repetitions = range(done, self._task.seeds) if done else range(1)
        return [(pods, self.settings(pods, repetition)) for repetition in repetitions]

    def settings(self, pods: int, repetition: int) -> RunSettings:
        """Return the settings of one repetition with `pods` pods."""
        return repeated(with_pods(self._settings, pods, self._split), repetition)

    def verdict(self, pods: int) -> bool | None:
        """Return whether `pods` pods are sufficient, or None if the completed runs do not decide it
        yet.
        """
        task, runs = self._task, self.runs.get(pods, [])
        if cannot_be_kept(task.bounds, runs, repetitions=task.seeds, generated=task.generated):
            return False
        if len(runs) < task.seeds:
            return None
        return all(bound.kept for bound in bounds_of(task.bounds, runs))

    def counts(self, price_per_hour: float | None = None) -> list[CountSummary]:
        """Return a summary of the runs for each tried number of pods, in ascending order. Costs are
        None without `price_per_hour`.
        """
        found = []
        for pods, runs in sorted(self.runs.items()):
            bounds = bounds_of(self._task.bounds, runs)
            found.append(
                CountSummary(
                    pods=pods,
                    runs=len(runs),
                    kept=self.verdict(pods),
                    cost_per_hour=None
                    if price_per_hour is None
                    else six_digits(pods * price_per_hour),
                    used=used_share(bounds),
                    bounds=bounds,
                )
            )
        return found

    def used(self) -> float:
        """Return the largest used share of the bounds at the smallest sufficient number of pods;
        infinity if that number is not found or the share is unknown.
        """
        told = (one.used for one in self.counts() if one.pods == self.pods)
        return next((used for used in told if used is not None), math.inf)

    @property
    def _step(self) -> Step:
        highest = self._task.pods_max
        return next_step(self.known, start=self._start, lowest=self._lowest, highest=highest)


class Sizing:
    """A whole sizing: the search for each option, the headroom of the cheapest one, and its
    autoscaler.
    """

    def __init__(self, task: SizingTask, runs: Runs) -> None:
        self.task = task
        self._runs = runs
        self.options = [
            PodSearch(
                option.settings,
                task,
                guessed_pods(task.demand.sized_for, option.profile, option.settings.speed),
                split=option.split,
            )
            for option in task.options
        ]
        self.headroom: dict[str, PodSearch] = {}
        """Searches for the pods that the chosen option needs with headroom, by case (`ONE_LOST` or
        `GROWTH`).
        """
        self.every: list[PodSearch] = []
        """One search for each option in which every number of pods is run, if the task requests
        it.
        """
        self.autoscaled: tuple[AutoscalerSettings, list[KeptRun]] | None = None
        self.loads: list[tuple[int, int, float, KeptRun]] = []
        """Runs of the best pool without and with a split at several loads: position of the option,
        number of pods, load as a factor, and run.
        """
        self.complete = False

    def carry_out(self) -> None:
        """Run the whole sizing, and set `complete` at its end. Raises what `Runs` raises; the
        results so far remain available.
        """
        self._search(self.options)
        chosen = self.chosen
        if chosen is not None and not self.task.answer_only:
            self._search_headroom(chosen)
            if self.task.options[chosen].split is None:
                self._autoscale(chosen)
        self._compare_loads()
        if self.task.every_count:
            self._run_every_count()
        self.complete = True

    @property
    def chosen(self) -> int | None:
        """Index of the cheapest option in `options`; of equally cheap ones, that which uses less of
        its bounds.

        None while an option's search has not ended, or if no option can be called the cheapest.
        """
        enough = self._enough()
        if not enough or not all(search.ended for search in self.options) or self.why_none:
            return None
        return min(enough, key=lambda at: (self._cost(at), self.options[at].used(), at))

    @property
    def why_none(self) -> str:
        """Reason why no option can be called the cheapest; "" if one can, or while an option's
        search has not ended.
        """
        task = self.task
        if not all(search.ended for search in self.options):
            return ""
        enough = self._enough()
        if not enough:
            return f"No option keeps all bounds with up to {task.pods_max:,} pods."
        profiles = {task.options[at].profile.name for at in enough}
        unpriced = any(task.options[at].price_per_hour is None for at in enough)
        if len(profiles) > 1 and unpriced:
            return (
                "Pods of different profiles are compared by --price; give a price for each of them."
            )
        return ""

    @property
    def longest(self) -> list[KeptRun]:
        """Runs of the number of pods that has the most repetitions, over all options. Reports use
        them to describe how repetitions differ.
        """
        of_counts = [runs for search in self.options for runs in search.runs.values()]
        return max(of_counts, key=len, default=[])

    def found_runs(self, at: int) -> list[KeptRun]:
        """Return the runs of the option at index `at` with its smallest sufficient number of
        pods.
        """
        pods = self.options[at].pods
        assert pods is not None
        return self.options[at].runs[pods]

    def every_smallest(self, at: int) -> int | None:
        """Return the smallest number of pods of the option at index `at` from which on every number
        up to the maximum is sufficient, according to the runs of every number. None if the maximum
        is not sufficient.
        """
        return smallest_of_all(self.every[at].known)

    def _search(self, searches: Sequence[PodSearch]) -> None:
        """Run several searches concurrently to their ends: each round runs the next runs of all of
        them together.
        """
        while True:
            wanted = [(one, *each) for one in searches for each in one.wanted()]
            if not wanted:
                return
            found = self._runs.of([settings for _, _, settings in wanted])
            for (one, pods, _), run_found in zip(wanted, found, strict=True):
                one.runs.setdefault(pods, []).append(run_found)

    def _search_headroom(self, chosen: int) -> None:
        task, pods = self.task, self.options[chosen].pods
        assert pods is not None
        settings, split = task.options[chosen].settings, task.options[chosen].split
        at_s = LOST_AFTER * task.span_s / settings.speed
        roles = ("",) if split is None else (PREFILL, DECODE)
        leaving = tuple(Leave(at_s=at_s, pods=(0,), role=role) for role in roles)
        lost = Scenario(file=ONE_LOST, incidents=leaving)
        # Without a retry, the requests in flight there would be lost with any number of pods.
        again = replace(settings.cluster, clients=ClientSettings(retries=1))
        self.headroom = {
            # A pool with headroom must also serve the present traffic, and one pod less is not
            # enough for that.
            ONE_LOST: PodSearch(
                replace(settings, scenario=lost, cluster=again),
                task,
                pods + len(roles),
                lowest=pods,
                split=split,
            ),
            GROWTH: PodSearch(
                at_load(settings, task.growth),
                task,
                math.ceil(pods * task.growth),
                lowest=pods,
                split=split,
            ),
        }
        self._search(list(self.headroom.values()))

    def _compare_loads(self) -> None:
        """Run the best option without a split and the best one with a split once at each of
        `LOADS`, with the same number of pods: the larger one of those that they need.

        Do nothing if there is no option with a split, or if one kind has no sufficient number.
        """
        enough = self._enough()
        kinds = [
            [at for at in enough if (self.task.options[at].split is None) is whole]
            for whole in (True, False)
        ]
        if not all(kinds):
            return
        best = [min(of, key=lambda at: (self._cost(at), self.options[at].used())) for of in kinds]
        pods = max(self.options[at].pods or 0 for at in best)
        asked = [(at, load) for load in LOADS for at in best]
        found = self._runs.of(
            [at_load(self.options[at].settings(pods, 0), load) for at, load in asked]
        )
        self.loads = [(at, pods, load, one) for (at, load), one in zip(asked, found, strict=True)]

    def _autoscale(self, chosen: int) -> None:
        """Find the highest target among `TARGET_SHARES` with which an autoscaler keeps the bounds,
        and store its settings and runs in `autoscaled`. If none does, the lowest target remains the
        result.
        """
        task = self.task
        repetitions = range(1 if task.demand.cut else task.seeds)
        inflight = self._inflight_of_pod(chosen)
        # One run of a whole day takes as long as a dozen runs of its stretch, on one core. Two
        # targets in parallel therefore take no longer than one.
        at_once = _TARGETS_AT_ONCE if len(repetitions) == 1 else 1
        for first in range(0, len(TARGET_SHARES), at_once):
            tried = [
                self._autoscaler(chosen, max(_TARGET_MIN, six_digits(share * inflight)))
                for share in TARGET_SHARES[first : first + at_once]
            ]
            found = self._runs.of(
                [
                    self._autoscaled(chosen, settings, repetition)
                    for settings in tried
                    for repetition in repetitions
                ]
            )
            for at, settings in enumerate(tried):
                runs = found[at * len(repetitions) : (at + 1) * len(repetitions)]
                self.autoscaled = settings, runs
                told = bounds_of(task.bounds, runs)
                if all(one.kept_by_figure if len(runs) == 1 else one.kept for one in told):
                    return

    def _autoscaler(self, chosen: int, target: float) -> AutoscalerSettings:
        task, pods = self.task, self.options[chosen].pods
        assert pods is not None
        shares = [task.demand.share_of_sized(one) for one in task.demand.over_time]
        lowest = min(max(1, math.ceil(pods * min(shares))), pods)
        with_one_lost = self.headroom[ONE_LOST].pods
        return AutoscalerSettings(
            metric=ScaledBy.INFLIGHT_REQUESTS,
            target=target,
            pods_min=lowest,
            pods_max=min(max(pods + 1, with_one_lost or 0), PODS_MAX),
            startup_s=task.pod_startup_s,
        )

    def _autoscaled(
        self, chosen: int, settings: AutoscalerSettings, repetition: int
    ) -> RunSettings:
        task, pods = self.task, self.options[chosen].pods
        assert pods is not None
        first = math.ceil(pods * task.demand.share_of_sized(task.demand.over_time[0]))
        begins = min(max(first, settings.pods_min), settings.pods_max)
        whole = task.demand.whole.places
        return repeated(
            replace(
                with_pods(task.options[chosen].settings, begins),
                requests_from=whole.start,
                requests_max=len(whole),
                scenario=Scenario(file="an autoscaler", autoscalers=(settings,)),
            ),
            repetition,
        )

    def _inflight_of_pod(self, chosen: int) -> float:
        """Return the mean number of requests in flight on each pod at the smallest sufficient
        number of pods, by Little's law, limited to the requests sent divided by the pods.
        """
        runs, pods = self.found_runs(chosen), self.options[chosen].pods
        assert pods is not None
        told = []
        for one in runs:
            inflight = (one.requests_per_s or 0.0) * (one.e2e_s.mean or 0.0)
            # The law holds over a long time. In a short run, the number of requests is the limit.
            told.append(min(inflight, one.requests.sent) / pods)
        return sum(told) / len(told) if self.task.generated else told[0]

    def _run_every_count(self) -> None:
        """Run every number of pods up to `pods_max` with every repetition, for each option,
        independently of the search.
        """
        task = self.task
        for option in task.options:
            search = PodSearch(option.settings, task, start=1, split=option.split)
            wanted = [
                (pods, search.settings(pods, repetition))
                for pods in range(1 if option.split is None else 2, task.pods_max + 1)
                for repetition in range(task.seeds)
            ]
            found = self._runs.of([settings for _, settings in wanted])
            for (pods, _), one in zip(wanted, found, strict=True):
                search.runs.setdefault(pods, []).append(one)
            self.every.append(search)

    def _enough(self) -> list[int]:
        return [at for at, search in enumerate(self.options) if search.pods is not None]

    def _cost(self, at: int) -> float:
        """Return the number by which options are compared: cost per hour, or number of pods for an
        option without a price.
        """
        pods, price = self.options[at].pods, self.task.options[at].price_per_hour
        assert pods is not None
        return pods * (1.0 if price is None else price)


def bounds_of(bounds: Sequence[Bound], runs: Sequence[KeptRun]) -> list[BoundSummary]:
    """Return, for each bound of the SLO, the figures of `runs` and whether they keep it. `runs` are
    repetitions with the same settings.
    """
    return bound_summaries(bounds, runs, varied_between(runs))


def at_load(settings: RunSettings, factor: float) -> RunSettings:
    """Return the settings of the same run at `factor` times the request rate.

    The lengths of the warm-up and the busiest part are divided by `factor`, so that they cover the
    same part of the trace.
    """
    warm_up_s, busiest_s = settings.warm_up_s, settings.busiest_s
    return replace(
        settings,
        speed=settings.speed * factor,
        warm_up_s=None if warm_up_s is None else warm_up_s / factor,
        busiest_s=None if busiest_s is None else busiest_s / factor,
    )


def with_pods(settings: RunSettings, pods: int, split: Split | None = None) -> RunSettings:
    """Return the settings of the same run with `pods` pods, all like its first pod, or divided by
    `split`.
    """
    kinds = settings.cluster.pods
    divided = kinds[:1] * pods if split is None else split.divided(pods, kinds)
    cluster = replace(settings.cluster, pods=divided)
    return replace(settings, cluster=cluster)


def repeated(settings: RunSettings, repetition: int) -> RunSettings:
    """Return the settings of a repetition of the run. Repetition 0 replays the trace unchanged;
    others replay similar traffic with other seeds.
    """
    return replace(
        settings,
        seed=settings.seed + repetition,
        read=replace(settings.read, seed=settings.read.seed + repetition),
        repetition=repetition,
    )


def used_share(bounds: Sequence[BoundSummary]) -> float | None:
    """Return the largest used share among the bounds (`BoundSummary.used`). It exceeds 1 if a bound
    is broken. None if the share of a bound is unknown.
    """
    told = [bound.used for bound in bounds]
    known = [one for one in told if one is not None]
    return rounded(max(known)) if known and len(known) == len(told) else None
