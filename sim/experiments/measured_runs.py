"""Runs by what they are of: replayed on all cores, each once, also over several starts."""

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
    """Of the requests of a trace."""

    TUNING = "tuning"
    HOLD_OUT = "hold-out"


class Sample(Struct, frozen=True, kw_only=True):
    """The requests of a run. The same for every configuration that it is of."""

    half: Half
    share: float = 1.0
    """Of the half, from its beginning."""
    load: float = 1.0
    """Times as fast as otherwise."""
    repetition: int = 0
    """0: the trace as it is; any other: other traffic like it."""


class MeasuredRuns:
    """Asks the journal first, the crew for the rest."""

    def __init__(
        self,
        crew: Crew,
        journal: RunJournal,
        base: RunSettings,
        halves: Mapping[Half, range],
        advance: Callable[[], None],
    ) -> None:
        """`halves`: places of their requests. `advance` is called for each run that there is."""
        self._crew = crew
        self._journal = journal
        self._base = base
        self._halves = halves
        self._advance = advance
        self._hashes: dict[str, str] = {}
        """Text of a configuration -> its hash, which takes longer than to ask a hundred times."""

    def of(self, wanted: Sequence[tuple[PolicySource, Sample]]) -> list[KeptRun]:
        """One for each, in order. Raises `StoppedError`, and `JobError` for one that cannot be."""
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
