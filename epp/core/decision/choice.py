"""The choice of one endpoint among candidates by one profile.

`choose` runs the four placement steps: it filters, prefers endpoints with fresh metrics, scores and
picks. The acting profile, the shadow profile and each stage of a request that several endpoints
serve use it. It does not place the request: its caller decides what follows from a choice.
"""

from collections.abc import Mapping
from random import Random

import numpy as np
from msgspec import Struct, structs

from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.profile import FilterResult, SchedulingProfile, Scored
from epp.core.failures import PluginFailures
from epp.core.knowledge.candidates import Bools, Candidates, Floats, Ints
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Refusal, RefusalReason, Seconds


class ProfileState(Struct):
    """The state that one scheduling profile carries from one decision to the next."""

    random: Random
    """Random generator that the picker plugin of the profile uses."""
    failures: PluginFailures
    """Failures so far of the profile's plugins, and of other plugins that share this object."""
    kept_scores: KeptScores | None = None
    """Cache of the scores of the profile's scorers. None if no score can be cached, or borrowed
    from the acting profile.
    """
    filters_alike: bool = False
    """True if the profile has the very same filters as the acting profile, so that their result
    need not be computed again.
    """
    own_cold: bool = False
    """True if `request.moment.cold` must say whether any candidate of this profile has a part of the
    prompt, not whether any endpoint of the pool has.
    """


class Staleness(Struct, frozen=True):
    """The two properties that make an endpoint the last choice: metrics older than a limit, and
    scrapes that get no answer. An endpoint with old metrics is chosen before one without an answer.
    """

    age_s_max: Seconds
    """Age in seconds above which the metrics of an endpoint count as stale."""
    unreachable: Bools
    """True for each endpoint, by slot, whose scrapes get no answer."""


class Choice(Struct, frozen=True, gc=False):
    """The endpoint that a profile chose for one request, with the candidates and scores that led to
    the choice.
    """

    offered: Candidates
    """Candidates of the decision before filters."""
    ranked: Candidates
    """Candidates that the filters of the profile left, which were then scored."""
    dropped: dict[str, Ints]
    """Slots of the endpoints that were not scored, by reason: the name of the filter that dropped
    them, "stale-metrics", "unreachable", or why they were no candidates, such as "full".
    """
    scored: Scored
    """Scores of the candidates in `ranked`, and their weighted sums."""
    picked: list[int]
    """Positions of the picker plugin's choices among the ranked candidates, the destination first;
    at least one.
    """
    sound: bool
    """True if none of the profile's plugins failed in this decision."""
    request: InferenceRequest
    """Request as the profile sees it. With `ProfileState.own_cold`, its `moment.cold` is about the
    candidates of this profile.
    """
    slot: int
    """Slot of the chosen endpoint."""
    matched_blocks: int
    """Number of leading full blocks of the prompt that the chosen endpoint is estimated to have
    cached.
    """
    total_blocks: int
    """Number of full blocks of the prompt that were looked up."""
    cached_tokens: int
    """Number of prompt tokens in `matched_blocks`."""

    @property
    def others(self) -> list[int]:
        """Return the slots of the endpoints that the picker plugin chose besides the first one."""
        others: list[int] = self.ranked.slot[self.picked[1:]].tolist()
        return others

    def fallbacks(self, most: int) -> list[int]:
        """Return the slots of up to `most` fallback endpoints: the picker plugin's other choices,
        then the remaining candidates by their sums, highest first.
        """
        first, *others = self.picked
        order = others + np.argsort(-self.scored.total, kind="stable").tolist()
        wanted = list(dict.fromkeys(at for at in order if at != first))[:most]
        return self.ranked.slot[wanted].tolist() if wanted else []


def choose(
    profile: SchedulingProfile,
    request: InferenceRequest,
    candidates: Candidates,
    state: ProfileState,
    rotation: int,
    staleness: Staleness | None = None,
    acting: Choice | None = None,
) -> Choice | Refusal:
    """Return the profile's choice among `candidates`, or a refusal if its filters leave none.

    The result depends on the arguments alone. Only `state` changes. `rotation` counts decisions and
    breaks ties round robin. `staleness` is None if no candidate is stale or unreachable. `acting`
    is the choice of another profile for the same request and candidates, in which no plugin failed,
    or None. Results of plugins that both profiles have may be taken from it.
    """
    failures = state.failures
    failed_before = failures.so_far
    if acting is not None and state.filters_alike:
        ranked, dropped = acting.ranked, acting.dropped
    else:
        kept = profile.filter(request, candidates, failures)
        ranked, dropped = kept.candidates, kept.dropped
        if not len(ranked):
            return nobody_left(kept, len(candidates))
        if staleness is not None:
            ranked, dropped = _fresh_first(kept, staleness)
    # A prompt that no endpoint of the pool has is cold for every profile.
    may_be_cold = state.own_cold and not request.moment.cold
    if may_be_cold and profile.reads_cold:
        request = _with_own_cold(request, ranked)
    known: Floats | None = None
    if acting is not None and (
        ranked is acting.ranked or np.array_equal(ranked.slot, acting.ranked.slot)
    ):
        known = acting.scored.scores
    scored = profile.score(request, ranked, failures, state.kept_scores, known)
    picks = profile.pick(scored.total, ranked, state.random, rotation, failures)
    sound = failures.so_far == failed_before
    picked: list[int] = picks.tolist()
    slot = ranked.slot.item(picked[0])
    matched, total = ranked.prefix_match(picked[0])
    # The indexes read the request too, but later. The prompt is not cold if the chosen candidate has
    # a part of it.
    if may_be_cold and not profile.reads_cold and not matched:
        request = _with_own_cold(request, ranked)
    cached = predicted_tokens(matched, ranked.block_tokens, request.prompt_tokens)
    return Choice(
        candidates, ranked, dropped, scored, picked, sound, request, slot, matched, total, cached
    )


def predicted_tokens(matched_blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """Return the number of prompt tokens in `matched_blocks` cached blocks, at most
    `prompt_tokens`.
    """
    tokens = matched_blocks * block_tokens
    return tokens if tokens < prompt_tokens else prompt_tokens  # noqa: FURB136  a call takes longer


def _with_own_cold(request: InferenceRequest, ranked: Candidates) -> InferenceRequest:
    """Return `request`, some of whose prompt an endpoint of the pool has, with `moment.cold` True
    if no candidate in `ranked` has any.
    """
    if ranked.matched_most():
        return request
    return structs.replace(request, moment=structs.replace(request.moment, cold=True))


def _fresh_first(kept: FilterResult, staleness: Staleness) -> tuple[Candidates, dict[str, Ints]]:
    """Return the candidates of `kept` and the slots that were dropped, by reason. Unreachable
    endpoints are dropped if any other is left; of the reachable ones, stale ones are dropped if any
    is fresh.
    """
    unreachable = staleness.unreachable[kept.candidates.slot]
    stale = kept.candidates.metrics_age_s > staleness.age_s_max
    first = ~(stale | unreachable)
    if not first.any():
        first = ~unreachable
    if first.all() or not first.any():
        return kept.candidates, kept.dropped
    dropped = dict(kept.dropped)
    for name, gone in (
        ("stale-metrics", stale & ~unreachable & ~first),
        ("unreachable", unreachable),
    ):
        if gone.any():
            dropped[name] = kept.candidates.slot[gone]
    return kept.candidates.take(first), dropped


def nobody_ready(request: InferenceRequest, members: int) -> Refusal:
    """Return the refusal (status 503) of `request` if none of the pool's `members` endpoints is
    ready for it.
    """
    where = "" if request.subset is None else " in the subset that the gateway allows"
    return Refusal(
        reason=RefusalReason.NO_ENDPOINTS,
        status=503,
        message=f"no endpoint{where} is ready: 0 of {members}",
    )


def reached(choice: Choice | Refusal, staleness: Staleness | None) -> Choice | Refusal:
    """Return `choice`, or a refusal (status 503) if its endpoint is unreachable.

    A profile only chooses an unreachable endpoint if its filters left no other.
    """
    if isinstance(choice, Refusal) or staleness is None or not staleness.unreachable[choice.slot]:
        return choice
    return Refusal(
        reason=RefusalReason.NO_ENDPOINTS,
        status=503,
        message=f"none of {len(choice.ranked)} endpoints can be reached",
    )


def saturated(message: str, eliminated: Mapping[str, int] | None = None) -> Refusal:
    """Return the refusal (status 429) of a request that the endpoints are too busy to serve.
    `eliminated` is the number of endpoints that each filter dropped.
    """
    return Refusal(
        reason=RefusalReason.SATURATED, status=429, message=message, eliminated=eliminated or {}
    )


def nobody_left(kept: FilterResult, ready: int) -> Refusal:
    """Return the refusal of a request for which the filters left none of `ready` endpoints: status
    429 if load is the reason, else 503.
    """
    dropped = ", ".join(f"{count} by {name}" for name, count in kept.eliminated.items())
    message = f"no endpoint is left: 0 of {ready} after dropping {dropped}"
    if kept.shed_by:
        return saturated(message, kept.eliminated)
    return Refusal(
        reason=RefusalReason.NO_ENDPOINTS,
        status=503,
        message=message,
        eliminated=kept.eliminated,
    )
