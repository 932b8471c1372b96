"""Decisions about requests whose stages may run on different endpoints."""

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Final

import numpy as np
from msgspec import Struct, structs

from epp.core.decision.account import Account, Leg, Route
from epp.core.decision.choice import (
    Choice,
    ProfileState,
    Staleness,
    choose,
    nobody_left,
    reached,
    saturated,
)
from epp.core.decision.decision import Decision
from epp.core.decision.if_available import PREFER_HEADER
from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.placements import Placements
from epp.core.decision.pool_state import PoolState
from epp.core.decision.profile import FilterResult, Marker, RequestMarker, SchedulingProfile
from epp.core.decision.shadow import Shadow
from epp.core.decision.staged_choice import (
    StagedChoice,
    decode_first,
    one_request,
    prefill_first,
)
from epp.core.decision.stages import Order, rotation_of
from epp.core.knowledge.availability import Available
from epp.core.knowledge.candidates import Affinity, Candidates, Ints
from epp.core.knowledge.inflight import Lease
from epp.core.knowledge.overdue_prefills import prefill_of
from epp.core.prompt.request import InferenceRequest
from epp.core.types import DECODE, ENCODE, PREFILL, Refusal, Seconds, Stage

_FALLBACK: Final = "fallback"


class Offer(Struct, frozen=True):
    """The endpoints that one decision may choose from, and what is known about them."""

    available: Available
    candidates: Candidates
    """Candidates of the decision: the endpoints in `available` that have room."""
    affinities: Mapping[str, Affinity]
    """Matches of the indexes, by name, which all stages share."""
    staleness: Staleness | None
    rotation: int
    """Number of decisions before this one, by which ties are broken round robin."""
    now: Seconds
    screened: Mapping[str, Ints] = {}
    """Slots of the endpoints that filters dropped before any stage chose, by name of the filter."""


class StagedScheduler:
    """A scheduler of the requests of a pool with several stages. It chooses an endpoint for each
    stage with the profile of that stage, and counts the request at all of them.
    """

    def __init__(self, state: PoolState, placements: Placements) -> None:
        self._state = state
        self._placements = placements
        self._profiles: dict[str, tuple[SchedulingProfile, ProfileState]] = {}
        self._markers_by_name: dict[str, tuple[Marker, ...]] = {}
        self._markers: tuple[Marker, ...] = ()
        self._request_markers: tuple[RequestMarker, ...] = ()

    def configure(self, random: Random) -> None:
        """Create from the settings the objects that decisions use. `random` is the generator of the
        picker plugins.
        """
        stages, failures = self._state.settings.stages, self._state.failures
        named = (
            (DECODE, stages.decode),
            (PREFILL, stages.prefill),
            (ENCODE, stages.encode),
            (_FALLBACK, stages.fallback),
            *stages.named.items(),
        )
        alone = stages.alone
        self._profiles = {
            stage: (
                profile,
                ProfileState(random, failures, KeptScores.of(profile.scorers), own_cold=True),
            )
            for stage, profile in named
            if profile is not None and not alone
        }
        self._markers = stages.decode.markers(failures)
        self._request_markers = stages.decode.request_markers(failures)
        self._markers_by_name = {
            name: profile.markers(failures) for name, profile in stages.named.items()
        }

    def schedule(
        self, request: InferenceRequest, offer: Offer, shadow: Shadow | None
    ) -> Decision | Refusal:
        """Choose an endpoint of `offer` for each stage of `request`, and count the request there.
        Return a refusal if a stage that must run has no endpoint, if the request is shed, or if
        `one_request` refuses it.
        """
        state, stages = self._state, self._state.settings.stages
        if stages.screen is not None:
            screened = self._screen(stages.screen, request, offer)
            if isinstance(screened, Refusal):
                return screened
            offer = screened
        found = self._choose(request, offer)
        if isinstance(found, Refusal):
            return found
        decode, chosen, route = found
        if request.priority < 0 and state.gate is None:
            refusal = self._saturated(request, chosen, decode)
            if refusal is not None:
                return refusal
        verdict = None
        # The shadow profile may use scores that the decode profile computed, so it judges only if the
        # decode profile has acted.
        if shadow is not None and decode is stages.decode:
            verdict = shadow.judge(
                request, chosen.decode, offer.rotation, offer.staleness, state.pool.endpoint_in
            )
        legs = self._place(chosen, decode, offer)
        leg = legs[0]
        account = Account(
            number=offer.rotation + 1,
            request=leg.lease.request,
            legs=legs,
            shadow=verdict,
            route=route,
            uncached_tokens=request.prompt_tokens - chosen.decode.cached_tokens,
        )
        return Decision(
            account=account,
            leg=leg,
            markers=self._markers_by_name.get(chosen.profile, self._markers),
            request_markers=self._request_markers,
            offered=chosen.decode.offered if self._request_markers else None,
            earlier=legs[1:],
            primary_port=state.settings.primary_port,
            rank_chooser=self._placements.rank_chooser,
        )

    def _screen(
        self, screen: SchedulingProfile, request: InferenceRequest, offer: Offer
    ) -> Offer | Refusal:
        """Return `offer` without the endpoints that the filters before all stages drop, or a
        refusal if they drop all.
        """
        state, offered = self._state, offer.available
        in_service = state.candidates(offered.in_service, offer.affinities, request, offer.now)
        kept = screen.filter(request, in_service, state.failures)
        if not len(kept.candidates):
            return nobody_left(kept, len(in_service))
        available = _screened(offered, kept)
        return structs.replace(
            offer,
            available=available,
            screened=kept.dropped,
            candidates=state.candidates(available.with_room, offer.affinities, request, offer.now),
        )

    def _choose(
        self, request: InferenceRequest, offer: Offer
    ) -> tuple[SchedulingProfile, StagedChoice, Route] | Refusal:
        """Return the decode profile that acted, the endpoints of all stages and the route; or a
        refusal. If a prefill or encode stage that must run has no endpoint, the fallback profile
        chooses one for the whole request, if there is such a profile.
        """
        stages = self._state.settings.stages
        choose_for = partial(self._choose_for, request, offer)

        order = prefill_first if stages.order is Order.PREFILL_FIRST else decode_first
        if stages.named or PREFER_HEADER in request.headers:
            order = one_request
        chosen = order(stages, request, choose_for)
        if not isinstance(chosen, Refusal):
            decode = stages.named[chosen.profile] if chosen.profile else stages.decode
            return decode, chosen, chosen.route
        if stages.fallback is None or chosen.stage in {None, DECODE}:
            return chosen
        alone = choose_for(DECODE, -1, _FALLBACK)
        if isinstance(alone, Refusal):
            return alone
        return stages.fallback, StagedChoice(alone), Route.AGGREGATED_FALLBACK

    def _choose_for(
        self, request: InferenceRequest, offer: Offer, stage: Stage, peer: int, named: str = "", /
    ) -> Choice | Refusal:
        """Return the choice of an endpoint for `stage` (see `StageChoice`), also among full
        endpoints if filters dropped all others. With a fallback profile, return a refusal instead
        of an unreachable prefill or encode endpoint.
        """
        state, available, staleness = self._state, offer.available, offer.staleness
        profile, profile_state = self._profiles[named or stage]
        turn = offer.rotation if stage is DECODE else rotation_of(stage, offer.rotation)
        near = offer.candidates
        if peer >= 0 and profile.knows_peer:
            near = near.near(peer)
        choice = choose(profile, request, near, profile_state, turn, staleness)
        if isinstance(choice, Refusal) and available.with_room is not available.in_service:
            # All endpoints below their limit were dropped by filters, so full endpoints are tried
            # too.
            wider = state.candidates(available.in_service, offer.affinities, request, offer.now)
            choice = choose(profile, request, wider.near(peer), profile_state, turn, staleness)
        if state.settings.stages.fallback is None or stage is DECODE:
            return choice
        return reached(choice, staleness)

    def _saturated(
        self, request: InferenceRequest, chosen: StagedChoice, decode: SchedulingProfile
    ) -> Refusal | None:
        """Return the refusal of `request`, which may be shed, if the endpoints of any stage that it
        needs are saturated; else None.
        """
        settings = self._state.settings
        for stage, profile, choice in self._stages_of(chosen, decode):
            of_role = profile.of_role.filter(request, choice.offered, self._state.failures)
            if settings.saturation.saturation(of_role.candidates) >= 1.0:
                what = f"the endpoints of stage {stage} are saturated"
                refusal = saturated(f"{what} and priority {request.priority} may be shed")
                return structs.replace(refusal, stage=stage)
        return None

    def _stages_of(
        self, chosen: StagedChoice, decode: SchedulingProfile
    ) -> list[tuple[Stage, SchedulingProfile, Choice]]:
        """Return (stage, profile, choice) for each stage that runs, in the order prefill, encode,
        decode.
        """
        stages = self._state.settings.stages
        found = [(DECODE, decode, chosen.decode)]
        if stages.encode is not None and chosen.encode is not None:
            found.insert(0, (ENCODE, stages.encode, chosen.encode))
        if stages.prefill is not None and chosen.prefill is not None:
            found.insert(0, (PREFILL, stages.prefill, chosen.prefill))
        return found

    def _place(
        self, chosen: StagedChoice, decode: SchedulingProfile, offer: Offer
    ) -> tuple[Leg, ...]:
        """Count the request at the endpoints chosen for its stages, under one lease. Return the
        legs, decode first.
        """
        placements, now = self._placements, offer.now
        available, ready = offer.available, len(offer.available.ready)
        encodes = chosen.encode is not None or ENCODE in self._state.settings.stages.named
        elsewhere = chosen.prefill is not None or chosen.prefilled
        legs: list[Leg] = []
        leases: list[Lease] = []
        request = kept = None
        for stage, profile, choice in self._stages_of(chosen, decode):
            if choice.request is not request:
                request, kept = choice.request, None
            work = chosen.work if stage is DECODE else stage
            leg = placements.place(
                choice
                if choice.offered.slot is available.ready
                else self._with_left_out(choice, offer),
                profile,
                ready,
                now,
                stage=stage,
                prefills=work is PREFILL or (work is DECODE and not elsewhere),
                left_out=placements.not_recorded(work, encodes=encodes),
                kept=kept,
            )
            kept = leg.lease.request
            legs.append(leg)
            leases.append(leg.lease)
            if stage is ENCODE:
                leases += [placements.also_encode(leg.lease, slot, now) for slot in choice.others]
        lease = leases.pop()
        if leases:
            self._join(
                lease, leases, float(lease.request.prompt_tokens - chosen.decode.cached_tokens)
            )
        return (legs.pop(), *legs)

    def _with_left_out(self, choice: Choice, offer: Offer) -> Choice:
        """Return `choice` with the endpoints that it was not offered among those that were dropped."""
        columns = self._state.pool.columns
        left_out = offer.available.left_out(choice.offered.slot, columns)
        dropped = left_out | dict(offer.screened) | choice.dropped
        return structs.replace(choice, dropped=dropped)

    def _join(self, lease: Lease, earlier: list[Lease], uncached_tokens: float) -> None:
        """Make `earlier`, the leases of the prefill and encode endpoints, part of `lease`, whose
        endpoint has not cached `uncached_tokens` of the prompt.
        """
        state = self._state
        counted = {lease.slot}
        for one in earlier:
            if one.slot in counted:
                state.ledger.join(one)
            counted.add(one.slot)
        lease.earlier = tuple(earlier)
        prefill = prefill_of(lease)
        if prefill is not None:
            state.overdue_prefills.watch(prefill, lease)
            sender = prefill.slot, prefill.generation
            state.ledger.receive(lease, uncached_tokens, sender)


def _screened(offered: Available, kept: FilterResult) -> Available:
    """Return `offered` without the endpoints that the filters before all stages dropped."""
    in_service = kept.candidates.slot
    if offered.with_room is offered.in_service:
        return Available(offered.ready, in_service, in_service)
    with_room = in_service[np.isin(in_service, offered.with_room)]
    return Available(offered.ready, in_service, with_room if len(with_room) else in_service)
