"""Search for the smallest number of pods that keeps the bounds.

The search covers each option, the headroom of the cheapest option, and an autoscaler. Completed runs
determine which runs are needed next. This module does not know whether a run is executed here or on
another machine, or comes from an earlier start.
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
from sim.cluster.settings import ClientSettings
from sim.engine.profiles import Profile
from sim.experiments.demand import TraceDemand, guessed_pods
from sim.experiments.pod_search import Step, next_step, smallest_of_all
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
"""Share of the stretch after which the pod is lost.

The loss is early because the figures cover the whole stretch, and the time before the loss improves
them."""
TARGET_SHARES: Final = (1.0, 0.8, 0.6, 0.4)
"""Tried targets, as shares of a pod's requests in flight at the smallest sufficient number of pods.

An autoscaler with the full target scales up too late, by the start-up time of a pod."""
_TARGET_MIN: Final = 0.1
_TARGETS_AT_ONCE: Final = 2
_COUNTS_EXPECTED: Final = 6
"""Estimated numbers of pods tried per option, half of them with every repetition; for the progress
bar."""


class Option(Struct, frozen=True, kw_only=True):
    """A profile with a scheduler configuration."""

    profile: Profile
    policy: PolicySource
    price_per_hour: float | None
    settings: RunSettings
    """Settings of a run with one pod."""


class SizingTask(Struct, frozen=True, kw_only=True):
    """The input of a search."""

    bounds: tuple[Bound, ...]
    seeds: int
    """Number of repetitions, each with its own traffic."""
    generated: bool
    """Each repetition is a random draw of the traffic; otherwise it is a resample of the trace."""
    pods_max: int
    growth: float
    """Factor of the traffic for the headroom."""
    pod_startup_s: Seconds
    answer_only: bool
    """Leave out the headroom and the autoscaler."""
    every_count: bool
    """Also run every number of pods."""
    demand: TraceDemand
    warm_up: WarmUp
    options: list[Option]

    @property
    def span_s(self) -> Seconds:
        """Length of the stretch that is sized for, in the trace's time."""
        return self.demand.sized_for.end_s - self.demand.sized_for.start_s

    @property
    def runs_expected(self) -> int:
        """Estimated number of runs."""
        counts = len(self.options) * _COUNTS_EXPECTED
        searched = counts // 2 * (1 + self.seeds)
        besides = 0 if self.answer_only else 6 * self.seeds
        every = len(self.options) * self.pods_max * self.seeds if self.every_count else 0
        return searched + besides + every


class Runs(Protocol):
    """Executes runs."""

    def of(self, wanted: Sequence[RunSettings]) -> list[KeptRun]:
        """Return the runs in the order of `wanted`."""
        ...


class Sought:
    """The search for one number of pods, with its completed runs."""

    def __init__(
        self, settings: RunSettings, task: SizingTask, start: int, *, lowest: int = 1
    ) -> None:
        """Create a search that begins at `start` pods.

        `settings` are those of a run with any number of pods. Fewer pods than `lowest` are known to
        be too few.
        """
        self._lowest = lowest
        self._settings = settings
        self._task = task
        self._start = start
        self.runs: dict[int, list[KeptRun]] = {}

    @property
    def known(self) -> dict[int, bool]:
        """Verdict by number of pods, for all decided numbers: True if the number is enough."""
        decided = ((pods, self.verdict(pods)) for pods in self.runs)
        return {pods: verdict for pods, verdict in decided if verdict is not None}

    @property
    def pods(self) -> int | None:
        """Smallest sufficient number of pods, or None if none is found yet."""
        return self._step.found

    @property
    def ended(self) -> bool:
        """True if the search has ended."""
        return self._step.ask is None

    @property
    def perhaps(self) -> int | None:
        """Smallest number below the found one whose figures keep all bounds, but whose 95 % limits
        do not. None if there is none.
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
        """Return the runs needed for the next step, with their numbers of pods.

        The first repetition runs alone, because it may already decide.
        """
        pods = self._step.ask
        if pods is None:
            return []
        done = len(self.runs.get(pods, ()))
        repetitions = range(done, self._task.seeds) if done else range(1)
        return [(pods, self.settings(pods, repetition)) for repetition in repetitions]

    def settings(self, pods: int, repetition: int) -> RunSettings:
        """Return the settings of one run with `pods` pods."""
        return repeated(with_pods(self._settings, pods), repetition)

    def verdict(self, pods: int) -> bool | None:
        """Return whether `pods` pods are enough. None if the runs do not decide it yet."""
        task, runs = self._task, self.runs.get(pods, [])
        if cannot_be_kept(task.bounds, runs, repetitions=task.seeds, generated=task.generated):
            return False
        if len(runs) < task.seeds:
            return None
        return all(bound.kept for bound in bounds_of(task.bounds, runs))

    def counts(self, price_per_hour: float | None = None) -> list[CountSummary]:
        """Return all tried numbers of pods, in ascending order."""
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
                    used=_used(bounds),
                    bounds=bounds,
                )
            )
        return found

    def used(self) -> float:
        """Return the used share of the bounds with the found number of pods; infinity if none is
        found.
        """
        told = (one.used for one in self.counts() if one.pods == self.pods)
        return next((used for used in told if used is not None), math.inf)

    @property
    def _step(self) -> Step:
        highest = self._task.pods_max
        return next_step(self.known, start=self._start, lowest=self._lowest, highest=highest)


class Sizing:
    """The whole search: options, headroom and autoscaler."""

    def __init__(self, task: SizingTask, runs: Runs) -> None:
        self.task = task
        self._runs = runs
        self.options = [
            Sought(
                option.settings,
                task,
                guessed_pods(task.demand.sized_for, option.profile, option.settings.speed),
            )
            for option in task.options
        ]
        self.headroom: dict[str, Sought] = {}
        """Searches for the headroom of the chosen option, by case."""
        self.every: list[Sought] = []
        """Searches in which every number of pods is run, one per option."""
        self.autoscaled: tuple[AutoscalerSettings, list[KeptRun]] | None = None
        self.complete = False

    def carry_out(self) -> None:
        """Run the search. Raises what `Runs` raises; the results until then remain available."""
        self._search(self.options)
        chosen = self.chosen
        if chosen is not None and not self.task.answer_only:
            self._search_headroom(chosen)
            self._autoscale(chosen)
        if self.task.every_count:
            self._run_every_count()
        self.complete = True

    @property
    def chosen(self) -> int | None:
        """Index of the cheapest option.

        None while a search has not ended, or if no option can be called the cheapest.
        """
        enough = self._enough()
        if not enough or not all(sought.ended for sought in self.options) or self.why_none:
            return None
        return min(enough, key=lambda at: (self._cost(at), self.options[at].used(), at))

    @property
    def why_none(self) -> str:
        """Reason why no option is the cheapest; "" if one is, or if a search has not ended."""
        task = self.task
        if not all(sought.ended for sought in self.options):
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
        """Runs of the number of pods with the most repetitions. They show what was varied."""
        of_counts = [runs for sought in self.options for runs in sought.runs.values()]
        return max(of_counts, key=len, default=[])

    def found_runs(self, at: int) -> list[KeptRun]:
        """Return the runs of an option with its found number of pods."""
        pods = self.options[at].pods
        assert pods is not None
        return self.options[at].runs[pods]

    def every_smallest(self, at: int) -> int | None:
        """Return the smallest sufficient number by the runs of every number; None if none is enough."""
        return smallest_of_all(self.every[at].known)

    def _search(self, sought: Sequence[Sought]) -> None:
        """Run all searches concurrently, so that none waits for another."""
        while True:
            wanted = [(one, *each) for one in sought for each in one.wanted()]
            if not wanted:
                return
            found = self._runs.of([settings for _, _, settings in wanted])
            for (one, pods, _), run_found in zip(wanted, found, strict=True):
                one.runs.setdefault(pods, []).append(run_found)

    def _search_headroom(self, chosen: int) -> None:
        task, pods = self.task, self.options[chosen].pods
        assert pods is not None
        settings = task.options[chosen].settings
        at_s = LOST_AFTER * task.span_s / settings.speed
        lost = Scenario(file=ONE_LOST, incidents=(Leave(at_s=at_s, pods=(0,)),))
        # Without a retry, the requests in flight there would be lost with any number of pods.
        again = replace(settings.cluster, clients=ClientSettings(retries=1))
        self.headroom = {
            # A pool with headroom must also serve the present traffic, and one pod less is not
            # enough for that.
            ONE_LOST: Sought(
                replace(settings, scenario=lost, cluster=again), task, pods + 1, lowest=pods
            ),
            GROWTH: Sought(
                at_load(settings, task.growth), task, math.ceil(pods * task.growth), lowest=pods
            ),
        }
        self._search(list(self.headroom.values()))

    def _autoscale(self, chosen: int) -> None:
        """Find the highest of the tried targets that keeps the bounds."""
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
                scenario=Scenario(file="an autoscaler", autoscaler=settings),
            ),
            repetition,
        )

    def _inflight_of_pod(self, chosen: int) -> float:
        """Return the mean requests in flight of a pod at the found number, by Little's law."""
        runs, pods = self.found_runs(chosen), self.options[chosen].pods
        assert pods is not None
        told = []
        for one in runs:
            inflight = (one.requests_per_s or 0.0) * (one.e2e_s.mean or 0.0)
            # The law holds over a long time. In a short run, the number of requests is the limit.
            told.append(min(inflight, one.requests.sent) / pods)
        return sum(told) / len(told) if self.task.generated else told[0]

    def _run_every_count(self) -> None:
        """Run each number of pods with every repetition, regardless of the search."""
        task = self.task
        for option in task.options:
            sought = Sought(option.settings, task, start=1)
            wanted = [
                (pods, sought.settings(pods, repetition))
                for pods in range(1, task.pods_max + 1)
                for repetition in range(task.seeds)
            ]
            found = self._runs.of([settings for _, settings in wanted])
            for (pods, _), one in zip(wanted, found, strict=True):
                sought.runs.setdefault(pods, []).append(one)
            self.every.append(sought)

    def _enough(self) -> list[int]:
        return [at for at, sought in enumerate(self.options) if sought.pods is not None]

    def _cost(self, at: int) -> float:
        """Return the compared cost: money, or pods if all pods have the same profile and no price."""
        pods, price = self.options[at].pods, self.task.options[at].price_per_hour
        assert pods is not None
        return pods * (1.0 if price is None else price)


def bounds_of(bounds: Sequence[Bound], runs: Sequence[KeptRun]) -> list[BoundSummary]:
    """Return each bound with the figures of repeated runs of one setting."""
    return bound_summaries(bounds, runs, varied_between(runs))


def at_load(settings: RunSettings, factor: float) -> RunSettings:
    """Return the same run with requests `factor` times as fast.

    The same part of the trace is excluded, and the busiest part is as long in the trace.
    """
    warm_up_s, busiest_s = settings.warm_up_s, settings.busiest_s
    return replace(
        settings,
        speed=settings.speed * factor,
        warm_up_s=None if warm_up_s is None else warm_up_s / factor,
        busiest_s=None if busiest_s is None else busiest_s / factor,
    )


def with_pods(settings: RunSettings, pods: int) -> RunSettings:
    """Return the same run with `pods` pods of its profile."""
    cluster = replace(settings.cluster, pods=settings.cluster.pods[:1] * pods)
    return replace(settings, cluster=cluster)


def repeated(settings: RunSettings, repetition: int) -> RunSettings:
    """Return the same run on other traffic like it. Repetition 0 is the trace itself."""
    return replace(
        settings,
        seed=settings.seed + repetition,
        read=replace(settings.read, seed=settings.read.seed + repetition),
        repetition=repetition,
    )


def _used(bounds: Sequence[BoundSummary]) -> float | None:
    """Return the largest used share of all bounds, which exceeds 1 if a bound is broken.

    None if a share is unknown.
    """
    told = [bound.used for bound in bounds]
    known = [one for one in told if one is not None]
    return rounded(max(known)) if known and len(known) == len(told) else None
