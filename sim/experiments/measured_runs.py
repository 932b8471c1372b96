"""Runs of a tuning, identified by configuration and traffic. Each is simulated only once, in one of
several processes, and then read from the journal even after a restart.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from sim.cluster.policies import PolicySource
from sim.experiments.jobs import Crew
from sim.experiments.run import RunSettings
from sim.experiments.run_journal import RunJournal
from sim.measurement.summaries import KeptRun, RunSummary


class Half(StrEnum):
    """One half of the requests of a trace: the first for the search, the second to judge its
    result.
    """

    TUNING = "tuning"
    HOLD_OUT = "hold-out"


class Sample(Struct, frozen=True, kw_only=True):
    """The part of a trace that a run replays, and how; it is the same for all configurations that
    are compared.
    """

    half: Half
    share: float = 1.0
    """Share of the requests of the trace's half that a run replays, counted from the beginning of
    the half; at least one request is replayed.
    """
    load: float = 1.0
    """Factor on the request rate of the tuning, in addition to `--speed`: at 2, requests arrive
    twice as fast.
    """
    repetition: int = 0
    """Number of the repetition. 0 replays the trace unchanged; others replay similar traffic,
    resampled or generated with another seed.
    """


class MeasuredRuns:
    """A source of run results that reads the journal first, simulates only the runs that are
    missing there, and adds these to it.
    """

    def __init__(
        self,
        crew: Crew,
        journal: RunJournal,
        base: RunSettings,
        halves: Mapping[Half, range],
        advance: Callable[[], None],
    ) -> None:
        """Create the source. `halves` maps each half to the positions of its requests in the trace;
        `advance` is called once for each available run.
        """
        self._crew = crew
        self._journal = journal
        self._base = base
        self._halves = halves
        self._advance = advance
        self._hashes: dict[str, str] = {}
        """Hash of each configuration, by the configuration's text. It is cached because computing
        it is slow.
        """

    def of(self, wanted: Sequence[tuple[PolicySource, Sample]]) -> list[KeptRun]:
        """Return the run of each (configuration, sample) in `wanted`, in the same order. Raises
        `StoppedError` after Ctrl-C, and `JobError` if a run fails.
        """
        keyed = [(self._key(policy, sample), (policy, sample)) for policy, sample in wanted]
        return self._journal.runs(keyed, self._measured, self._advance)

    def _measured(
        self, wanted: Sequence[tuple[PolicySource, Sample]]
    ) -> Iterator[tuple[int, RunSummary]]:
        jobs = [self._settings(policy, sample) for policy, sample in wanted]
        for place, result in self._crew.results(jobs):
            yield place, result.summary

    def _settings(self, policy: PolicySource, sample: Sample) -> RunSettings:
        base, half = self._base, self._halves[sample.half]
        return replace(
            base,
            policy=policy,
            seed=base.seed + sample.repetition,
            read=replace(base.read, seed=base.read.seed + sample.repetition),
            repetition=sample.repetition,
            requests_from=half.start,
            requests_max=max(1, round(len(half) * sample.share)),
            speed=base.speed * sample.load,
        )

    def _key(self, policy: PolicySource, sample: Sample) -> str:
        if policy.text not in self._hashes:
            self._hashes[policy.text] = str(policy.hash)
        return (
            f"{self._hashes[policy.text]} {sample.half} {sample.share:g} at {sample.load:g} times, "
            f"repetition {sample.repetition}"
        )
