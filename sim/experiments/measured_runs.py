"""Runs by their configuration and traffic, replayed on all cores, each only once across restarts."""

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
    """A half of the requests of a trace."""

    TUNING = "tuning"
    HOLD_OUT = "hold-out"


class Sample(Struct, frozen=True, kw_only=True):
    """The traffic of a run, which is the same for all configurations."""

    half: Half
    share: float = 1.0
    """Share of the half, from its beginning."""
    load: float = 1.0
    """Factor by which requests arrive faster."""
    repetition: int = 0
    """Repetition; 0 is the trace as it is, and others are other traffic like it."""


class MeasuredRuns:
    """A source of results that first looks into the journal and then runs what is missing."""

    def __init__(
        self,
        crew: Crew,
        journal: RunJournal,
        base: RunSettings,
        halves: Mapping[Half, range],
        advance: Callable[[], None],
    ) -> None:
        """Create the source. `halves` are the positions of their requests; `advance` is called
        after each run.
        """
        self._crew = crew
        self._journal = journal
        self._base = base
        self._halves = halves
        self._advance = advance
        self._hashes: dict[str, str] = {}
        """Hash of each configuration, by its text, because computing it is slow."""

    def of(self, wanted: Sequence[tuple[PolicySource, Sample]]) -> list[KeptRun]:
        """Return the runs for `wanted`, in order. Raises `StoppedError`, and `JobError` if one
        fails.
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
