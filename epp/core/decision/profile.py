"""A scheduling profile: which filters, which scorers with which weights, which picker.

A plugin that fails costs only what it adds: its filter keeps everybody, its score is unknown for
everybody, in place of its picker the highest sum is taken.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from random import Random
from typing import Final, cast

import numpy as np
from msgspec import Struct
from numpy import ndarray

from epp.core.decision.failures import (
    BOOLS,
    FLOATS,
    PluginFailures,
    array_fault,
    headers_fault,
    positions_fault,
)
from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.plugin import (
    ChoosesRanks,
    Filter,
    HoldsRequests,
    MarksRequests,
    MarksResponses,
    Picker,
    Scorer,
    TellsCost,
)
from epp.core.decision.rank_choice import RankChooser
from epp.core.knowledge.candidates import Bools, Candidates, Floats, Ints
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint

UNKNOWN: Final = 0.5
"""The score of everybody where a scorer knows nothing of anybody."""

_TIE: Final = 1.0 - 1e-9
"""Sums closer than this to the best are the same preference: they differ by rounding."""

_LEAST: Final = np.zeros(())
_MOST: Final = np.ones(())


class NamedFilter(Struct, frozen=True):
    """A filter under the name it has in the configuration."""

    name: str
    plugin: Filter


class WeightedScorer(Struct, frozen=True):
    """A scorer under its name in the configuration, with its weight.

    Raises `ValueError` for a weight that is none.
    """

    name: str
    plugin: Scorer
    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(
                f"the weight of scorer {self.name} must be finite and at least 0, is {self.weight}"
            )


class NamedResponder(Struct, frozen=True):
    """What only sets headers, on responses or on requests, under the name it has in the configuration."""

    name: str
    plugin: MarksResponses | MarksRequests | ChoosesRanks


class Marker(Struct, frozen=True):
    """A plugin that sets headers on responses, under its name in the configuration."""

    name: str
    plugin: MarksResponses
    failures: PluginFailures

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str
    ) -> Mapping[str, str]:
        """As of `MarksResponses`; none, if the plugin fails."""
        return _headers(
            self,
            "response_headers",
            lambda: self.plugin.response_headers(request, endpoint, served),
            headers_fault,
        )


class RequestMarker(Struct, frozen=True):
    """A plugin that sets headers on requests, under its name in the configuration."""

    name: str
    plugin: MarksRequests
    failures: PluginFailures

    def request_headers(
        self, request: InferenceRequest, candidates: Candidates, endpoint: Endpoint
    ) -> Mapping[str, str]:
        """As of `MarksRequests`; none, if the plugin fails."""
        return _headers(
            self,
            "request_headers",
            lambda: self.plugin.request_headers(request, candidates, endpoint),
            self._fault,
        )

    def _fault(self, found: object) -> str:
        fault = headers_fault(found)
        if fault or set(cast(Mapping[str, str], found)) <= set(self.plugin.own_headers):
            return fault
        return "a header that is none of its own"


def _headers(
    marker: Marker | RequestMarker,
    method: str,
    ask: Callable[[], Mapping[str, str]],
    fault_of: Callable[[object], str],
) -> Mapping[str, str]:
    """What `ask` of the plugin gives; none, if it raises or gives what has a fault."""
    try:
        found = ask()
        fault = fault_of(found)
    except BaseException as error:  # noqa: BLE001  the boundary of a plugin
        marker.failures.raised(marker.name, method, error)
        return {}
    if fault:
        marker.failures.returned(marker.name, method, fault)
        return {}
    return found


class Kept(Struct, frozen=True, gc=False):
    """What the filters left, and whom each of them dropped."""

    candidates: Candidates
    dropped: dict[str, Ints]
    """Name of the filter -> slots of the endpoints that it dropped."""
    shed_by: str = ""
    """The filter that left nobody and sheds load, if one did."""

    @property
    def eliminated(self) -> dict[str, int]:
        """How many each of them dropped."""
        return {name: len(slots) for name, slots in self.dropped.items()}


class Scored(Struct, frozen=True, gc=False):
    """Scores of n candidates."""

    total: Floats
    """float64[n], the weighted sums."""
    scores: Floats
    """float64[scorers, n] in [0, 1], in profile order."""
    weights: Floats
    """float64[scorers]."""

    @classmethod
    def of(cls, scores: Floats, weights: Floats) -> "Scored":
        """Of scores without unknown ones."""
        return cls(weighted_sums(weights, scores), scores, weights)

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
    responders: tuple[NamedResponder, ...] = ()

    def __post_init__(self) -> None:
        if self.scorers and not any(scorer.weight > 0 for scorer in self.scorers):
            raise ValueError(f"the weights of profile {self.name} are all 0: no scorer counts")

    @property
    def members(self) -> tuple[NamedFilter | WeightedScorer, ...]:
        """Filters and scorers, in the order in which they run."""
        return (*self.filters, *self.scorers)

    @property
    def plugin_names(self) -> tuple[str, ...]:
        """Of filters, scorers, the picker and what answers, as in the configuration."""
        others = (responder.name for responder in self.responders)
        return (*(member.name for member in self.members), self.picker_name, *others)

    def markers(self, failures: PluginFailures) -> tuple[Marker, ...]:
        """The filters, scorers and others that set headers on responses."""
        return tuple(
            Marker(member.name, cast("MarksResponses", member.plugin), failures)
            for member in (*self.members, *self.responders)
            if member.plugin.abilities.marks_responses
        )

    def request_markers(self, failures: PluginFailures) -> tuple[RequestMarker, ...]:
        """The filters, scorers and others that set headers on requests."""
        return tuple(
            RequestMarker(member.name, cast("MarksRequests", member.plugin), failures)
            for member in (*self.members, *self.responders)
            if member.plugin.abilities.marks_requests
        )

    def rank_chooser(self, failures: PluginFailures) -> RankChooser | None:
        """The first that chooses ranks; None: engines do."""
        return next(
            (
                RankChooser(one.name, cast("ChoosesRanks", one.plugin), failures)
                for one in self.responders
                if one.plugin.abilities.chooses_ranks
            ),
            None,
        )

    @cached_property
    def tellers(self) -> tuple[TellsCost | None, ...]:
        """Those of the scorers that can say what their cost is made of, None in the place of others."""
        plugins = [scorer.plugin for scorer in self.scorers]
        return tuple(
            cast("TellsCost", one) if one.abilities.tells_cost else None for one in plugins
        )

    @cached_property
    def holders(self) -> tuple[tuple[str, HoldsRequests], ...]:
        """The filters that have requests wait, with their names."""
        return tuple(
            (named.name, cast("HoldsRequests", named.plugin))
            for named in self.filters
            if named.plugin.abilities.holds_requests
        )

    def holds(
        self, request: InferenceRequest, candidates: Candidates, failures: PluginFailures
    ) -> bool:
        """Whether any filter has `request` wait; one that fails does not."""
        for name, plugin in self.holders:
            try:
                found: object = plugin.holds(request, candidates)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                failures.raised(name, "holds", error)
                continue
            # What numpy compares to is as good.
            if not isinstance(found, bool | np.bool_):
                failures.returned(name, "holds", f"{type(found).__name__}, expected bool")
            elif found:
                return True
        return False

    def filter(
        self, request: InferenceRequest, candidates: Candidates, failures: PluginFailures
    ) -> Kept:
        """Run the filters; stop when nobody is left. One that fails keeps everybody."""
        gone: dict[str, Ints] = {}
        for named in self.filters:
            try:
                keep = named.plugin.keep(request, candidates)
                # Of another type it would be taken for positions.
                fault = array_fault(keep, BOOLS, len(candidates))
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                failures.raised(named.name, "keep", error)
                continue
            if fault:
                failures.returned(named.name, "keep", fault)
                continue
            if keep.item(keep.argmin()):
                continue
            dropped = candidates.slot[~keep]
            before = gone.get(named.name)
            gone[named.name] = dropped if before is None else np.concatenate((before, dropped))
            candidates = candidates.take(keep)
            if not len(candidates):
                shed_by = named.name if named.plugin.abilities.sheds_load else ""
                return Kept(candidates, gone, shed_by)
        return Kept(candidates, gone)

    def score(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        failures: PluginFailures,
        kept: KeptScores | None = None,
        acting: Floats | None = None,
    ) -> Scored:
        """Clamp each score to [0, 1], give the unknown the median of the known, weigh, add up.

        To a scorer that fails everybody is unknown. What is in `kept`, which is of this profile, is
        not asked for again, nor what it can take over of `acting`: the scores that another profile
        found of the same request and candidates.
        """
        n = len(candidates)
        shape = (n,)
        scorers = self.scorers
        rows: Iterable[int]
        if kept is None:
            scores, rows = np.empty((len(scorers), n)), range(len(scorers))
        elif acting is None:
            scores, rows = kept.recall(request, candidates)
        else:
            scores, rows = kept.take_over(request, candidates, acting)
        computed: list[int] = []
        for row in rows:
            scorer = scorers[row]
            try:
                found: object = scorer.plugin.score(request, candidates)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                failures.raised(scorer.name, "score", error)
                scores[row] = UNKNOWN
                continue
            # Spelt out: a call for what is nearly always right would cost half as much again.
            if type(found) is ndarray and found.dtype == FLOATS and found.shape == shape:
                scores[row] = found
                computed.append(row)
                continue
            scores[row] = UNKNOWN
            if found is None:
                computed.append(row)
            else:
                failures.returned(scorer.name, "score", array_fault(found, FLOATS, n))
        # At the length of a pool np.clip, the function, costs four times as much, and floats twice.
        np.maximum(scores, _LEAST, out=scores)
        np.minimum(scores, _MOST, out=scores)
        total = weighted_sums(self._weights, scores)
        # Where there is a NaN, argmax leads to it: one cheap test of every score.
        if n and math.isnan(total.item(total.argmax())):
            for one in scores:
                fill_unknown(one)
            total = weighted_sums(self._weights, scores)
        if kept is not None:
            kept.keep(computed, request, candidates, scores)
        return Scored(total, scores, self._weights)

    @cached_property
    def _weights(self) -> Floats:
        return np.array([scorer.weight for scorer in self.scorers])

    def pick(
        self,
        scores: Floats,
        candidates: Candidates,
        random: Random,
        rotation: int,
        failures: PluginFailures,
    ) -> Ints:
        """Positions among the candidates, the destination first; at least one.

        In place of a picker that fails the highest sum is taken, in turn where several tie for it.
        """
        try:
            # A copy: the sums explain the decision later, whatever the picker does to them.
            picked = self.picker.pick(scores.copy(), candidates, random, rotation)
            fault = positions_fault(picked, len(scores))
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            failures.raised(self.picker_name, "pick", error)
        else:
            if not fault:
                return picked
            failures.returned(self.picker_name, "pick", fault)
        tied = highest(scores)
        first = rotation % len(tied)
        return tied[first : first + 1]


def weighted_sums(weights: Floats, scores: Floats) -> Floats:
    """float64[n] of `scores`, float64[scorers, n]."""
    if len(scores) == 1:
        # The same numbers, at a third of what einsum takes at the length of a pool.
        alone: Floats = scores[0] if weights.item() == 1.0 else scores[0] * weights
        return alone
    # Not a product of matrices: BLAS rounds differently from machine to machine.
    total: Floats = np.einsum("i,ij->j", weights, scores)
    return total


def highest(scores: Floats) -> Ints:
    """Positions of all that tie for the highest of `scores`, ascending; at least one."""
    best = scores.item(scores.argmax())
    tied: Ints = (scores >= best * _TIE).nonzero()[0]
    return tied


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
