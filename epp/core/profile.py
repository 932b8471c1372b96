"""A scheduling profile: which filters, which scorers with which weights, which picker."""

import math
from functools import cached_property
from random import Random

import numpy as np
from msgspec import Struct

from epp.core.candidates import Bools, Candidates, Floats, Ints
from epp.core.plugin import Filter, Picker, Scorer
from epp.core.types import InferenceRequest


class NamedFilter(Struct, frozen=True):
    """A filter under the name it has in the configuration."""

    name: str
    plugin: Filter


class WeightedScorer(Struct, frozen=True):
    """A scorer under its name in the configuration, with its weight."""

    name: str
    plugin: Scorer
    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(
                f"the weight of scorer {self.name} must be finite and at least 0, is {self.weight}"
            )


class Kept(Struct, frozen=True):
    """What the filters left, and how many each of them dropped."""

    candidates: Candidates
    eliminated: dict[str, int]
    shed_by: str = ""
    """The filter that left nobody and sheds load, if one did."""


class Scored(Struct, frozen=True):
    """Scores of n candidates. `parts` is float64[scorers, n], weighted, in profile order."""

    total: Floats
    parts: Floats


class SchedulingProfile(Struct, frozen=True, kw_only=True, dict=True):
    """Filters run in order, scores are added up weighted, the picker chooses.

    Raises `ValueError` when no scorer has a weight above 0: such a profile prefers nobody.
    """

    name: str
    filters: tuple[NamedFilter, ...]
    scorers: tuple[WeightedScorer, ...]
    picker_name: str
    picker: Picker

    def __post_init__(self) -> None:
        if self.scorers and not any(scorer.weight > 0 for scorer in self.scorers):
            raise ValueError(f"the weights of profile {self.name} are all 0: no scorer counts")

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Kept:
        """Run the filters; stop when nobody is left."""
        eliminated: dict[str, int] = {}
        for named in self.filters:
            keep = named.plugin.keep(request, candidates)
            # Of another type it would be taken for positions.
            assert keep.shape == (len(candidates),), f"{named.name} returned {keep.shape}"
            assert keep.dtype == np.bool_, f"{named.name} returned {keep.dtype}"
            dropped = len(candidates) - int(np.count_nonzero(keep))
            if not dropped:
                continue
            eliminated[named.name] = eliminated.get(named.name, 0) + dropped
            candidates = candidates.take(keep)
            if not len(candidates):
                shed_by = named.name if named.plugin.sheds_load else ""
                return Kept(candidates, eliminated, shed_by)
        return Kept(candidates, eliminated)

    def score(self, request: InferenceRequest, candidates: Candidates) -> Scored:
        """Clamp each score to [0, 1], give the unknown the median of the known, weigh, add up."""
        n = len(candidates)
        if not self.scorers:
            return Scored(np.zeros(n), np.empty((0, n)))
        rows = []
        for scorer in self.scorers:
            scores = scorer.plugin.score(request, candidates)
            assert scores.shape == (n,), f"{scorer.name} returned {scores.shape}"
            rows.append(scores)
        parts: Floats = np.concatenate(rows, dtype=np.float64).reshape(len(rows), n)
        # The method: at the length of a pool the function np.clip costs twice as much.
        parts.clip(0.0, 1.0, out=parts)
        # A sum is NaN if one member is: one cheap test of every row.
        for row, known in enumerate(np.add.reduce(parts, axis=1).tolist()):
            if math.isnan(known):
                fill_unknown(parts[row])
        parts *= self._weights
        return Scored(np.add.reduce(parts, axis=0), parts)

    @cached_property
    def _weights(self) -> Floats:
        """float64[scorers, 1]."""
        return np.array([scorer.weight for scorer in self.scorers]).reshape(-1, 1)

    def pick(self, scores: Floats, candidates: Candidates, random: Random, rotation: int) -> Ints:
        """Positions among the candidates, the destination first."""
        picked = self.picker.pick(scores, candidates, random, rotation)
        assert len(picked) > 0, f"{self.picker_name} picked nobody"
        return picked


def fill_unknown(scores: Floats) -> None:
    """Replace NaN in place by the median of the rest; by 0.5 if there is no rest."""
    unknown: Bools = np.isnan(scores)
    if unknown[unknown.argmin()]:
        # Nobody is known: every decision comes here where no engine reports adapters.
        scores.fill(0.5)
        return
    known = scores[~unknown]
    # At the length of a pool numpy's median costs twenty times as much.
    known.sort()
    middle = len(known) // 2
    scores[unknown] = (known[middle] + known[-1 - middle]) / 2
