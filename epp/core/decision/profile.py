"""A scheduling profile: which filters, which scorers with which weights, which picker."""

import math
from functools import cached_property
from random import Random
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.decision.plugin import Filter, Picker, Scorer
from epp.core.knowledge.candidates import Bools, Candidates, Floats, Ints
from epp.core.prompt.request import InferenceRequest

UNKNOWN: Final = 0.5
"""The score of everybody where a scorer knows nothing of anybody."""

_LEAST: Final = np.zeros(())
_MOST: Final = np.ones(())


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
    """Scores of n candidates."""

    total: Floats
    """float64[n], the weighted sums."""
    scores: Floats
    """float64[scorers, n] in [0, 1], in profile order."""
    weights: Floats
    """float64[scorers]."""

    @property
    def parts(self) -> Floats:
        """float64[scorers, n]: what each scorer adds to each sum."""
        return self.scores * self.weights[:, np.newaxis]

    def parts_of(self, position: int) -> list[float]:
        """What each scorer adds to the sum of one candidate."""
        parts: list[float] = (self.scores[:, position] * self.weights).tolist()
        return parts


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
        scores = np.empty((len(self.scorers), n))
        for row, scorer in enumerate(self.scorers):
            found = scorer.plugin.score(request, candidates)
            if found is None:
                scores[row] = UNKNOWN
            else:
                assert found.shape == (n,), f"{scorer.name} returned {found.shape}"
                scores[row] = found
        # At the length of a pool np.clip, the function, costs four times as much, and floats twice.
        scores.clip(_LEAST, _MOST, out=scores)
        total = self._add_up(scores)
        # Where there is a NaN, argmax leads to it: one cheap test of every score.
        if n and math.isnan(total[total.argmax()]):
            for one in scores:
                fill_unknown(one)
            total = self._add_up(scores)
        return Scored(total, scores, self._weights)

    def _add_up(self, scores: Floats) -> Floats:
        # Not a product of matrices: BLAS rounds differently from machine to machine.
        total: Floats = np.einsum("i,ij->j", self._weights, scores)
        return total

    @cached_property
    def _weights(self) -> Floats:
        return np.array([scorer.weight for scorer in self.scorers])

    def pick(self, scores: Floats, candidates: Candidates, random: Random, rotation: int) -> Ints:
        """Positions among the candidates, the destination first."""
        picked = self.picker.pick(scores, candidates, random, rotation)
        assert len(picked) > 0, f"{self.picker_name} picked nobody"
        return picked


def fill_unknown(scores: Floats) -> None:
    """Replace NaN in place by the median of the rest; by `UNKNOWN` if there is no rest."""
    unknown: Bools = np.isnan(scores)
    if unknown[unknown.argmin()]:
        scores.fill(UNKNOWN)
        return
    known = scores[~unknown]
    # At the length of a pool numpy's median costs twenty times as much.
    known.sort()
    middle = len(known) // 2
    scores[unknown] = (known[middle] + known[-1 - middle]) / 2
