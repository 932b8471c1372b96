"""The decision record: the chosen endpoint of a request, and the reasons for the choice.

A decision keeps the arrays that it was computed from. Derived values are computed when they are
first read. The log line, the decision pages, spans, response headers and the simulator's
`decisions.jsonl` are projections of one record, so they cannot disagree. The endpoints' numbers are
available only until the next decision.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from epp.core.decision.choice import Choice, predicted_tokens
from epp.core.decision.costs import Cost, computed_costs
from epp.core.decision.decisive import decisive
from epp.core.decision.plugin import TellsCost
from epp.core.decision.profile import SchedulingProfile, Scored
from epp.core.decision.shadow import ShadowVerdict
from epp.core.failures import PluginFailures
from epp.core.knowledge.candidates import REPORTED_S_MAX, Candidates, Columns, Ints
from epp.core.knowledge.inflight import Lease
from epp.core.knowledge.rebuilt import numbers_before
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Seconds, Stage

_Found = TypeVar("_Found")


class _CachedProperty(Generic[_Found]):
    """A property that is computed once, without a lock.

    Up to Python 3.11, `functools.cached_property` takes a lock. That costs more than the values
    that are computed here.
    """

    def __init__(self, find: Callable[[Any], _Found]) -> None:
        self._find: Final = find
        self._name: Final = find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, at: Any, kind: object = None) -> _Found:
        found = at.__dict__[self._name] = self._find(at)
        return found


class Route(StrEnum):
    """The stages of a request that have an endpoint of their own: decode always, prefill and encode
    only if they run elsewhere. The values are those of llm-d-router.
    """

    DECODE_ONLY = "decode-only"
    PREFILL_DECODE = "prefill-decode"
    ENCODE_DECODE = "encode-decode"
    ENCODE_PREFILL_DECODE = "encode-prefill-decode"
    AGGREGATED_FALLBACK = "aggregated-fallback"
    """One endpoint serves the whole request, because no endpoint was left for a prefill or encode
    stage that had to run.
    """


class Ranking(Struct, frozen=True, kw_only=True, dict=True):
    """The scores of all candidates for one request, made during a decision or read from stored
    arrays.
    """

    scorers: tuple[str, ...]
    scored: Scored
    """Score of each candidate by each scorer: a row for each of `scorers`, a column for each
    candidate.
    """
    picked: int
    """Position of the chosen endpoint among the candidates that were scored."""

    @property
    def total(self) -> float:
        """Return the sum of the chosen endpoint's weighted scores."""
        return float(self.scored.total[self.picked])

    @_CachedProperty
    def parts(self) -> list[float]:
        """Return the weighted score of the chosen endpoint by each scorer, in the order of
        `scorers`.
        """
        return self.scored.parts_of(self.picked)

    @_CachedProperty
    def runner_up(self) -> int | None:
        """Return the position of the best candidate other than the chosen one, or None if there was
        only one candidate.
        """
        return runner_up_of(self.scored, self.picked)

    @_CachedProperty
    def decided_by(self) -> tuple[str, ...]:
        """Return the names of the fewest scorers without whose weighted scores the chosen endpoint
        would not be ahead of the runner-up, the largest lead first. Return () if it is not ahead,
        or if there is no runner-up.
        """
        if self.runner_up is None:
            return ()
        return decided_by(self.scorers, self.parts, self.scored.parts_of(self.runner_up))

    def best(self, most: int) -> list[int]:
        """Return the positions of up to `most` candidates with the highest weighted sums, highest
        first. The chosen candidate is always included.
        """
        order: list[int] = (-self.scored.total).argsort(kind="stable")[:most].tolist()
        if self.picked not in order:
            order[-1] = self.picked
        return order


class Leg(Ranking, frozen=True, kw_only=True, dict=True):
    """A leg of a request: the endpoint that was chosen for one part of the request, with the scores
    and numbers that explain the choice.
    """

    stage: Stage = Stage.DECODE
    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...]
    """Endpoints that were chosen for the same stage besides `endpoint`. In the decode stage they
    are fallback endpoints; in the encode stage they encode media as well.
    """
    ready: int
    """Number of endpoints that were ready and in the gateway's subset, before filters."""
    dropped: Mapping[str, Ints]
    """Slots of the endpoints that were not scored in this decision, by reason: the name of the filter
    that dropped them, or why they were not available.
    """
    candidates: Candidates
    """Candidates that were scored in this decision: the ready endpoints that `dropped` does not
    name.
    """
    tellers: tuple[TellsCost | None, ...]
    lease: Lease
    matched_blocks: int
    """Number of leading full blocks of the prompt that `endpoint` is estimated to have cached."""
    total_blocks: int
    block_tokens: int
    rank: int | None = None
    """Data-parallel rank of `endpoint` that must serve the request, or None if the engine chooses
    or has one rank.
    """
    costs: tuple[Cost, ...] | None = None
    """Costs that the scorers computed during the decision, a `Cost` for each scorer that has costs
    and did not fail. None if they can be computed later from the stored numbers of the chosen
    endpoint and the runner-up, or if no reader may request them (`Placements.keeps_costs`).
    """

    @property
    def request(self) -> InferenceRequest:
        return self.lease.request

    @property
    def eliminated(self) -> Mapping[str, int]:
        """Return the number of endpoints that were not scored in this decision, by reason: the name
        of the filter that dropped them, or why they were not available.
        """
        dropped = self.dropped
        # Usually no filter drops anything, and every decision reads this property.
        return {name: len(slots) for name, slots in dropped.items()} if dropped else {}

    @_CachedProperty
    def numbers(self) -> tuple[float, ...]:
        """Return the `NUMBERS` of the chosen endpoint after the decision, which include this
        request. Valid until the next decision.
        """
        return self.candidates.numbers_of(self.picked)

    @_CachedProperty
    def runner_up_numbers(self) -> tuple[float, ...]:
        """Return the `NUMBERS` of the best candidate that was not chosen, or () if there is none."""
        return () if self.runner_up is None else self.candidates.numbers_of(self.runner_up)

    @_CachedProperty
    def numbers_before(self) -> list[float]:
        """Return the `NUMBERS` of the chosen endpoint as the scorers saw them before the decision,
        without this request.
        """
        return numbers_before(
            self.numbers,
            prompt_tokens=self.request.prompt_tokens,
            prefill_tokens=self.lease.prefill_tokens,
            matched_blocks=self.matched_blocks,
        )

    @property
    def predicted_tokens(self) -> int:
        """Return the number of prompt tokens that the chosen endpoint is estimated to have cached."""
        return predicted_tokens(self.matched_blocks, self.block_tokens, self.request.prompt_tokens)


class Queued(Struct, frozen=True, kw_only=True, gc=False):
    """The wait of one request in the picker's queue before its decision."""

    waited_s: Seconds
    flow: str
    """Id of the request's flow, or "" if the request named none. Flows take turns in the queue."""
    priority: int
    ahead: int
    """Number of requests that waited already when this one began to."""
    behind: str
    """Id of the flow of the same band that had most waiting requests when this one began to wait;
    "" if those requests named none.
    """
    behind_requests: int
    """Number of waiting requests of the flow `behind`; 0 if none of the band waited."""
    charged_tokens: float
    """Tokens that the flow was charged for the request; 0 if it was not placed."""
    why: str
    """Phrase about the reason of the wait, as it was when the wait began."""

    def fields(self) -> dict[str, object]:
        """Return the wait as plain values, for logs and stored records."""
        return {
            "waited_s": round(self.waited_s, 3),
            "flow": self.flow,
            "ahead": self.ahead,
            "behind": self.behind,
            "behind_requests": self.behind_requests,
            "charged_tokens": round(self.charged_tokens),
            "why": self.why,
        }


class Account(Struct, frozen=True, kw_only=True, gc=False):
    """The record of one decision of the scheduler: the request, the chosen endpoint with the
    reasons, and the shadow profile's verdict.
    """

    number: int
    request: InferenceRequest
    legs: tuple[Leg, ...]
    """The leg of the endpoint that the gateway sends the request to, then those of prefill and of
    encode, if other endpoints do these.
    """
    shadow: ShadowVerdict | None
    route: Route | None = None
    """Route of the request through the stages, or None if one profile alone chooses among all
    candidates (`Stages.alone`).
    """
    uncached_tokens: int = 0
    """Number of prompt tokens that the endpoint of the first leg is estimated not to have cached; 0
    if one profile alone chooses among all candidates.
    """
    queued: Queued | None = None
    """Wait of the request in the picker's queue, or None if it did not wait there."""

    @property
    def leg(self) -> Leg:
        """Return the leg whose endpoint receives the request from the gateway."""
        return self.legs[0]


def runner_up_of(scored: Scored, picked: int) -> int | None:
    """Return the position of the candidate with the highest weighted sum of scores, without the
    candidate at `picked`. Return None if there is no other candidate.
    """
    if scored.total.size < 2:
        return None
    rest = scored.total.copy()
    rest[picked] = -math.inf
    return int(rest.argmax())


def costs_to_keep(
    profile: SchedulingProfile,
    request: InferenceRequest,
    choice: Choice,
    columns: Columns,
    failures: PluginFailures,
    now: Seconds,
) -> tuple[Cost, ...] | None:
    """Return the costs of the chosen endpoint and the runner-up, or None if they can be computed
    later from the stored numbers of these two endpoints.

    A cost depends on more than these numbers if the endpoint of another stage is part of it, if an
    endpoint reports LoRA adapters or if a peer does not share its decisions. It also does if a load
    report is missing or old, because a scorer then uses the median of other endpoints.
    """
    load = columns.last_load
    if not (
        columns.adapters_reported
        or request.moment.replicas_unheard
        or now - columns.observed_since_s > REPORTED_S_MAX
        or (load is not None and not load[2].complete)
        or (choice.ranked.peer >= 0 and profile.reads_peer)
    ):
        return None
    first = choice.picked[0]
    second = runner_up_of(choice.scored, first)
    positions = (first,) if second is None else (first, second)
    scorers = zip(profile.scorer_names, profile.tellers, strict=True)
    return computed_costs(scorers, request, choice.ranked, positions, failures)


def decided_by(
    scorers: Sequence[str], parts: Sequence[float], others: Sequence[float]
) -> tuple[str, ...]:
    """Return the names of the scorers that decided for the chosen endpoint, as `Ranking.decided_by`
    does.

    `parts` are the chosen endpoint's weighted scores, `others` those of the runner-up, both in the
    order of `scorers`.
    """
    return tuple([scorers[at] for at in decisive(parts, others)])


def rounded_parts(scorers: Sequence[str], parts: Sequence[float]) -> dict[str, float]:
    """Return `parts`, the weighted score of a candidate by each of `scorers`, rounded to four
    digits, by name of the scorer.
    """
    return {scorer: round(part, 4) for scorer, part in zip(scorers, parts, strict=True)}
