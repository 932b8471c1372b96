"""Runs by what they are of: replayed on all cores, each once, also over several starts."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from sim.cluster.policies import PolicySource
from sim.experiments.jobs import Crew
from sim.experiments.run import RunSettings
from sim.experiments.run_journal import RunJournal
from sim.measurement.summaries import KeptRun


class StoppedError(Exception):
    """Ctrl-C: there will be no more runs."""


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
        keys = [self._key(policy, sample) for policy, sample in wanted]
        new = {
            key: one
            for key, one in zip(keys, wanted, strict=True)
            if self._journal.get(key) is None
        }
        for _ in range(len(keys) - len(new)):
            self._advance()
        names = list(new)
        jobs = [self._settings(policy, sample) for policy, sample in new.values()]
        for number, result in self._crew.results(jobs):
            self._journal.add(names[number], result.summary)
            self._advance()
        found = [one for key in keys if (one := self._journal.get(key)) is not None]
        if len(found) < len(keys):
            raise StoppedError
        return found

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
