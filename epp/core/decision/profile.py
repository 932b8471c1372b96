"""A scheduling profile: filters, scorers with weights, and a picker.

A plugin that fails loses only its own contribution. A filter that fails keeps every candidate. A
scorer that fails gives every candidate an unknown score. If the picker fails, the highest sum wins.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from operator import mul
from random import Random
from typing import Final, cast

import numpy as np
from msgspec import Struct, structs
from numpy import ndarray

from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.plugin import (
    PEER_READS,
    ChoosesRanks,
    Filter,
    GoesBySessions,
    HoldsRequests,
    MarksRequests,
    MarksResponses,
    Picker,
    Scorer,
    TellsCost,
)
from epp.core.decision.rank_choice import RankChooser
from epp.core.failures import (
    BOOLS,
    FLOATS,
    PluginFailures,
    array_fault,
    headers_fault,
    kind_of,
    positions_fault,
)
from epp.core.knowledge.candidates import Bools, Candidates, Floats, Ints
from epp.core.parameters import Plugin
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint

UNKNOWN: Final = 0.5
"""Score that every candidate gets from a scorer that failed, or whose value is unknown for all
candidates.
"""

_TIE: Final = 1.0 - 1e-9
"""Factor of the highest weighted sum. Another sum of at least this product counts as a tie, because
the two differ only by rounding.
"""

_LEAST: Final = np.zeros(())
_MOST: Final = np.ones(())


class NamedFilter(Struct, frozen=True):
    """A filter with its name in the configuration."""

    name: str
    plugin: Filter


class WeightedScorer(Struct, frozen=True):
    """A scorer with its name in the configuration and its weight.

    Raises `ValueError` for a weight that is negative or not finite.
    """

    name: str
    plugin: Scorer
    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(
                f"the weight of scorer {self.name} is {self.weight}; it must be finite and at "
                "least 0"
            )


class NamedResponder(Struct, frozen=True):
    """A plugin that is in no profile's list and may set headers on responses or requests, with its
    name in the configuration.
    """

    name: str
    plugin: MarksResponses | MarksRequests | ChoosesRanks


class Marker(Struct, frozen=True):
    """A plugin that sets headers on responses, with its name in the configuration."""

    name: str
    plugin: MarksResponses
    failures: PluginFailures

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str
    ) -> Mapping[str, str]:
        """Return the headers that the plugin sets on the response, or {} if the plugin fails."""
        return _headers(
            self,
            "response_headers",
            lambda: self.plugin.response_headers(request, endpoint, served),
            headers_fault,
        )


class RequestMarker(Struct, frozen=True):
    """A plugin that sets headers on requests, with its name in the configuration."""

    name: str
    plugin: MarksRequests
    failures: PluginFailures

    def request_headers(
        self, request: InferenceRequest, candidates: Candidates, endpoint: Endpoint
    ) -> Mapping[str, str]:
        """Return the headers that the plugin sets on the request, or {} if the plugin fails."""
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
        return "a header that is not in its own_headers"


class SessionReader(Struct, frozen=True):
    """A scorer that may use sessions, with its name in the configuration."""

    name: str
    plugin: GoesBySessions
    failures: PluginFailures

    def session_of(self, request: InferenceRequest) -> str:
        """Return the session that the plugin finds in `request`, or "" if it finds none or fails."""
        try:
            found: object = self.plugin.session_of(request)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(self.name, "session_of", error)
            return ""
        if not found:
            return ""
        if type(found) is str:
            return found
        self.failures.returned(self.name, "session_of", f"{kind_of(found)}, expected str")
        return ""


def _headers(
    marker: Marker | RequestMarker,
    method: str,
    ask: Callable[[], Mapping[str, str]],
    fault_of: Callable[[object], str],
) -> Mapping[str, str]:
    """Return the headers that `ask` returns, or {} if it raises or returns something else.
    `fault_of` describes such a fault.
    """
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


class FilterResult(Struct, frozen=True, gc=False):
    """The candidates that are left after the filters, and the endpoints that each filter dropped."""

    candidates: Candidates
    dropped: dict[str, Ints]
    """Slots of the endpoints that each filter dropped, by name of the filter."""
    shed_by: str = ""
    """Name of the filter that dropped the last candidate, if it is one that sheds load; otherwise
    "".
    """

    @property
    def eliminated(self) -> dict[str, int]:
        """Return the number of endpoints that each filter dropped, by name of the filter."""
        return {name: len(slots) for name, slots in self.dropped.items()}


class Scored(Struct, frozen=True, gc=False):
    """The scores of n candidates by the scorers of one profile, and their weighted sums."""

    total: Floats
    """Weighted sum of the scores of each candidate, float64[n]."""
    scores: Floats
    """Score of each candidate by each scorer, in [0, 1]: float64[scorers, n], in the order of the
    profile.
    """
    weights: Floats
    """Weight of each scorer of the profile, float64[scorers], in the order of the rows of `scores`.
    """

    @classmethod
    def of(cls, scores: Floats, weights: Floats) -> "Scored":
        """Return `scores`, which must have no NaN, together with their weighted sums."""
        return cls(weighted_sums(weights, scores), scores, weights)

    @property
    def parts(self) -> Floats:
        """Return float64[scorers, n]: the weighted score of each candidate by each scorer."""
        return self.scores * self.weights[:, np.newaxis]

    def parts_of(self, position: int) -> list[float]:
        """Return the weighted score of the candidate at `position` by each scorer."""
        if len(self.scores) == 1:
            # The only part is the sum.
            return [self.total.item(position)]
        # A profile has few scorers, so that Python multiplies in half the time of numpy.
        return list(map(mul, self.scores[:, position].tolist(), self.weights.tolist()))


class SchedulingProfile(Struct, frozen=True, kw_only=True, dict=True):
    """A scheduling profile: it runs its filters in order, adds up weighted scores and lets its
    picker plugin choose.

    Raises `ValueError` if all weights are 0, because such a profile has no preference.
    """

    name: str
    filters: tuple[NamedFilter, ...]
    scorers: tuple[WeightedScorer, ...]
    picker_name: str
    picker: Picker
    responders: tuple[NamedResponder, ...] = ()

    def __post_init__(self) -> None:
        if self.scorers and not any(scorer.weight > 0 for scorer in self.scorers):
            raise ValueError(
                f"all weights of profile {self.name} are 0; at least one must be above 0"
            )

    @cached_property
    def of_role(self) -> "SchedulingProfile":
        """Return this profile with those filters alone that read only labels, such as roles."""
        filters = tuple(
            named for named in self.filters if named.plugin.abilities.reads == ("labels",)
        )
        return structs.replace(self, filters=filters)

    @property
    def members(self) -> tuple[NamedFilter | WeightedScorer, ...]:
        """Return the filters and then the scorers, each in the order in which they run."""
        return (*self.filters, *self.scorers)

    @property
    def plugin_names(self) -> tuple[str, ...]:
        """Return the configured names of the filters, scorers, picker and responders."""
        others = (responder.name for responder in self.responders)
        return (*(member.name for member in self.members), self.picker_name, *others)

    def markers(self, failures: PluginFailures) -> tuple[Marker, ...]:
        """Return the plugins of this profile that set headers on responses."""
        return tuple(
            Marker(member.name, cast("MarksResponses", member.plugin), failures)
            for member in (*self.members, *self.responders)
            if member.plugin.abilities.marks_responses
        )

    def request_markers(self, failures: PluginFailures) -> tuple[RequestMarker, ...]:
        """Return the plugins of this profile that set headers on requests."""
        return tuple(
            RequestMarker(member.name, cast("MarksRequests", member.plugin), failures)
            for member in (*self.members, *self.responders)
            if member.plugin.abilities.marks_requests
        )

    def session_reader(self, failures: PluginFailures) -> SessionReader | None:
        """Return the first scorer of this profile that may use sessions, or None if there is none."""
        return next(
            (
                SessionReader(one.name, cast("GoesBySessions", one.plugin), failures)
                for one in self.scorers
                if one.plugin.abilities.goes_by_sessions
            ),
            None,
        )

    def rank_chooser(self, failures: PluginFailures) -> RankChooser | None:
        """Return the first plugin of this profile that selects data-parallel ranks, or None if
        there is none.
        """
        return next(
            (
                RankChooser(one.name, cast("ChoosesRanks", one.plugin), failures)
                for one in self.responders
                if one.plugin.abilities.chooses_ranks
            ),
            None,
        )

    @cached_property
    def scorer_names(self) -> tuple[str, ...]:
        """Return the name of each scorer in the configuration, in the order in which the scorers
        run.
        """
        return tuple(scorer.name for scorer in self.scorers)

    @cached_property
    def tellers(self) -> tuple[TellsCost | None, ...]:
        """Return a tuple with each scorer that computes costs, and None in place of each that does
        not.
        """
        plugins = [scorer.plugin for scorer in self.scorers]
        return tuple(
            cast("TellsCost", one) if one.abilities.tells_cost else None for one in plugins
        )

    @cached_property
    def reads_cold(self) -> bool:
        """Return whether any scorer may read `request.moment.cold`."""
        return _may_read((one.plugin for one in self.scorers), frozenset({"cold"}))

    @cached_property
    def reads_peer(self) -> bool:
        """Return whether a scorer that computes costs may read the endpoint of another stage."""
        plugins = (one.plugin for one in self.scorers if one.plugin.abilities.tells_cost)
        return _may_read(plugins, frozenset({"peer_candidates"}))

    @cached_property
    def knows_peer(self) -> bool:
        """Return whether any plugin of this profile may read what depends on the endpoint of another
        stage.
        """
        plugins = [one.plugin for one in (*self.members, *self.responders)]
        return _may_read((*plugins, self.picker), PEER_READS)

    @cached_property
    def holders(self) -> tuple[tuple[str, HoldsRequests], ...]:
        """Return (name, filter) for each filter that can delay requests."""
        return tuple(
            (named.name, cast("HoldsRequests", named.plugin))
            for named in self.filters
            if named.plugin.abilities.holds_requests
        )

    def holds(
        self, request: InferenceRequest, candidates: Candidates, failures: PluginFailures
    ) -> bool:
        """Return whether any filter of this profile delays `request`; a filter that fails does not."""
        for name, plugin in self.holders:
            try:
                found: object = plugin.holds(request, candidates)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                failures.raised(name, "holds", error)
                continue
            # A numpy comparison returns np.bool_.
            if not isinstance(found, bool | np.bool_):
                failures.returned(name, "holds", f"{type(found).__name__}, expected bool")
            elif found:
                return True
        return False

    def filter(
        self, request: InferenceRequest, candidates: Candidates, failures: PluginFailures
    ) -> FilterResult:
        """Return the candidates that all filters keep; the filters after one that leaves none do
        not run. A filter that fails keeps every candidate.
        """
        gone: dict[str, Ints] = {}
        for named in self.filters:
            try:
                keep = named.plugin.keep(request, candidates)
                # An array of another type would be used as positions.
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
                return FilterResult(candidates, gone, shed_by)
        return FilterResult(candidates, gone)

    def score(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        failures: PluginFailures,
        kept: KeptScores | None = None,
        acting: Floats | None = None,
    ) -> Scored:
        """Return the scores of `candidates` by all scorers, clamped to [0, 1], and their weighted
        sums. A score of NaN is replaced by the median of the scorer's other scores, or by `UNKNOWN`
        if all are NaN.

        If a scorer fails, all its scores are `UNKNOWN`, and the failure is counted in `failures`.
        `kept` is this profile's cache: its valid scores are not computed again. `acting` are scores
        of another profile for the same request and candidates, and the cache may borrow from them.
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
            # Inlined, because a call for the usual case would cost half as much again.
            if type(found) is ndarray and found.dtype == FLOATS and found.shape == shape:
                scores[row] = found
                computed.append(row)
                continue
            scores[row] = UNKNOWN
            if found is None:
                computed.append(row)
            else:
                failures.returned(scorer.name, "score", array_fault(found, FLOATS, n))
        # argmin and argmax return the position of a NaN if there is one, so a NaN fails this
        # comparison. Together they take less time than one comparison of all scores.
        if scores.size and not (
            scores.item(scores.argmin()) >= 0.0 and scores.item(scores.argmax()) <= 1.0
        ):
            # np.clip costs four times as much for arrays as long as a pool, and Python floats as
            # bounds cost twice as much.
            np.maximum(scores, _LEAST, out=scores)
            np.minimum(scores, _MOST, out=scores)
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
        """Return the positions of the candidates that the picker plugin chooses by `scores`, their
        weighted sums, the destination first; at least one.

        If the picker plugin fails, the highest sum is picked, round robin among ties.
        """
        try:
            # The picker gets a copy, because the sums explain the decision later.
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


def _may_read(plugins: Iterable[Plugin], names: frozenset[str]) -> bool:
    """Return whether any of `plugins` may read any of `names`, columns or fields of the request."""
    reads = (one.abilities.reads for one in plugins)
    return any(read is None or not names.isdisjoint(read) for read in reads)


def weighted_sums(weights: Floats, scores: Floats) -> Floats:
    """Return float64[n]: for each candidate, the sum of its `scores`, float64[scorers, n], weighted
    by `weights`.
    """
    if len(scores) == 1:
        # This gives the same numbers in a third of the time that einsum takes for arrays as long as
        # a pool.
        alone: Floats = scores[0] if weights.item() == 1.0 else scores[0] * weights
        return alone
    # A matrix product is avoided, because BLAS rounds differently on different machines.
    total: Floats = np.einsum("i,ij->j", weights, scores)
    return total


def highest(scores: Floats) -> Ints:
    """Return the positions of the highest of `scores` and of all others that tie with it,
    ascending; at least one.
    """
    best = scores.item(scores.argmax())
    # A Python float as bound would cost twice as much.
    tied: Ints = (scores >= np.array(best * _TIE)).nonzero()[0]
    return tied


def fill_unknown(scores: Floats) -> None:
    """Replace each NaN in `scores`, in place, by the median of the other scores, or by `UNKNOWN` if
    all are NaN.
    """
    unknown: Bools = np.isnan(scores)
    if unknown[unknown.argmin()]:
        scores.fill(UNKNOWN)
        return
    known = scores[~unknown]
    # numpy's median takes twenty times as long for arrays as long as a pool.
    known.sort()
    middle = len(known) // 2
    scores[unknown] = (known[middle] + known[-1 - middle]) / 2
