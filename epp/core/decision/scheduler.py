"""The scheduler: one function that places a request, and handlers for every other event.

A shell calls only `take`, with an input (`core/decision/inputs`), and `schedule`. Both run to
completion and receive the time as `now`. The same calls with the same seed therefore give the same
decisions, in production and in the simulator.

The scheduler connects parts that do the work:

- `pool`: the endpoints, their scraped state, and which of them are ready.
- `indexes`: what endpoints have cached (`core/knowledge/indexes`).
- `choose`: the choice of one endpoint by a profile (`core/decision/choice`).
- `ledger`: the requests in flight. `outliers`, `full`, `accuracy` and `answer_lengths` learn from
  the same requests and pages.

If there are peers, `core/peers` reads `sent` and `indexes.shared`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final, Protocol

import numpy as np
from msgspec import Struct, structs

from epp.core.decision.account import Account, Leg, Route, costs_to_keep, predicted_tokens
from epp.core.decision.choice import (
    Choice,
    ProfileState,
    Staleness,
    choose,
    nobody_left,
    nobody_ready,
    reached,
    saturated,
)
from epp.core.decision.decision import Decision
from epp.core.decision.if_available import PREFER_HEADER
from epp.core.decision.inputs import (
    NO_EFFECTS,
    BlocksChanged,
    Effects,
    EventsHeard,
    EventsVoided,
    IndexMemoryLimited,
    Input,
    LoadReported,
    OutputStarted,
    PageScraped,
    PeerRecorded,
    PeersUnheard,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ResponseStarted,
    ScrapeFailed,
    ServedBy,
    StreamChanged,
    Tick,
)
from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.profile import FilterResult, SchedulingProfile
from epp.core.decision.rank_choice import RankChoice
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import Shadow, ShadowTotals
from epp.core.decision.staged_choice import (
    StagedChoice,
    decode_first,
    one_request,
    prefill_first,
)
from epp.core.decision.stages import Order, PrefillEnd, rotation_of
from epp.core.failures import PluginFailures
from epp.core.flow.gate import Gate
from epp.core.knowledge.answer_lengths import AnswerLengths
from epp.core.knowledge.availability import Available, available
from epp.core.knowledge.candidates import PREDICTED_LATENCY, Affinity, Candidates, Ints
from epp.core.knowledge.fullness import FullEndpoints
from epp.core.knowledge.hit_accuracy import NO_INDEXES, HitAccuracy, expected_hit
from epp.core.knowledge.index import Held
from epp.core.knowledge.indexes import Indexes
from epp.core.knowledge.inflight import MAY_BE_FULL, Ending, InflightLedger, Lease, Outcome
from epp.core.knowledge.latency import LatencyModel, LatencyPrediction, Predicted
from epp.core.knowledge.load_report import read_load_report
from epp.core.knowledge.outliers import Outlier, Outliers
from epp.core.knowledge.overdue_prefills import OverduePrefills, prefill_of
from epp.core.knowledge.pair_failures import PairFailures
from epp.core.knowledge.peer_load import PeerLoads
from epp.core.knowledge.pool import EndpointPool, Standing
from epp.core.knowledge.refused_pairs import RefusedPairs
from epp.core.knowledge.sessions import SessionReturns
from epp.core.moment import Moment
from epp.core.prompt.blocks import KnownSegments
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, Endpoint, Refusal, Seconds, Stage

__all__ = ["Decision", "Scheduler", "Sent", "Witness"]

_FALLBACK: Final = "fallback"
SENT_MAX: Final = 16_384
"""Maximum number of decisions queued for peers; the oldest are dropped when the queue is full."""


class Sent(Struct, frozen=True, gc=False):
    """A decision to share with peers: `request` was sent to the endpoint in `slot` at `at_s`."""

    request: InferenceRequest
    slot: int
    at_s: Seconds
    left_out: tuple[str, ...] = ()
    """Names of the indexes that did not record this decision, so that it is not shared for them."""


class Witness(Protocol):
    """An observer of every input and decision of a scheduler, in order. Its methods must not raise."""

    def asked(self, request: InferenceRequest) -> None:
        """Record that `schedule` is about to decide; `request` still has its prompt."""
        ...

    def decided(
        self, request: InferenceRequest, decision: Decision | Refusal, now: Seconds
    ) -> None: ...
    def took(self, given: Input, effects: Effects, now: Seconds) -> None:
        """Record that the scheduler has applied the input `given`."""
        ...


class Scheduler:
    """A scheduler for one pool of endpoints: one profile for each stage, the indexes that they read
    and the requests in flight.
    """

    def __init__(self, settings: SchedulerSettings, *, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.failures = PluginFailures()
        """Failures of plugins and indexes; decisions continue without those that failed."""
        self.pool = EndpointPool()
        self.indexes = Indexes(self.failures)
        """Affinity indexes by name; an index that could not be opened is missing."""
        self.ledger = InflightLedger(self.pool.columns, self.indexes.release)
        self.outliers = Outliers(self.pool.columns)
        """Detector of endpoints that are slower or fail more often than the others. It ejects such
        endpoints if its settings allow.
        """
        self.outlying: dict[int, Outlier] = {}
        """Reason why each endpoint that was an outlier at the last tick was one, by slot."""
        self.pairs = PairFailures()
        """Failures of requests that several endpoints served, from which the endpoint at fault is
        found.
        """
        self._refused_pairs = RefusedPairs()
        self.overdue_prefills = OverduePrefills()
        """Prefill stages that neither ended nor failed in time."""
        self.full = FullEndpoints()
        """Endpoints that are full because they refused requests for lack of capacity; they receive
        fewer requests for a while.
        """
        self.accuracy = HitAccuracy()
        """Comparison of the cache hits that decisions predict with the hits that engines count."""
        self.answer_lengths = AnswerLengths()
        self.latency: LatencyModel | None = None
        """Predictions of latencies and their errors, or None if no latency is predicted."""
        self.replicas_unheard = 0
        """Number of other pickers that serve this pool and do not share their decisions."""
        self.decisions = self.load_reports = 0
        """Numbers of decisions, and of load reports of engines that were read from response headers."""
        self.load_reports_unread = 0
        """Number of load reports in response headers that were ignored, because they were
        malformed, or because their endpoint was never scraped, has left or has restarted.
        """
        self.rank_choices: dict[RankChoice, int] = {}
        """Number of requests that were sent to endpoints with several data-parallel ranks, by the
        outcome of the choice of the rank. Empty if no plugin selects ranks.
        """
        self.may_hold = False
        """True if any plugin of a profile can make requests wait."""
        self.gate: Gate | None = None
        """Estimate of the endpoints' room, or None without flow control."""
        self.changed: Callable[[], None] | None = None
        """Function that is called after each input, set by a queue while requests wait in it."""
        self.shadow_totals = ShadowTotals()
        self.shadow_failures = PluginFailures()
        self.keeps_costs = False
        """True if a reader will request the costs of decisions. The scheduler then stores the costs
        of those decisions for which they cannot be computed later.
        """
        self.sent: deque[Sent] | None = None
        """Decisions to share with peers, oldest first, or None if the scheduler has no peers."""
        self.witness: Witness | None = None
        self._session_returns = SessionReturns()
        self._random = Random(f"{seed}:picker")  # noqa: S311  not for security
        self.segments = KnownSegments(
            secret=Random(f"{seed}:segments").getrandbits(64)  # noqa: S311  used for routing only
        )
        self.indexes.configure(settings.index_settings)
        self._read_profile()

    def __repr__(self) -> str:
        return (
            f"<Scheduler [{self.decisions} decisions, {self.ledger.open_leases} open leases, "
            f"seed {self.seed}] {self.pool!r}>"
        )

    def take(self, given: Input, now: Seconds) -> Effects:
        """Apply the input event `given` to the scheduler's state. Return the consequences on which
        the caller must act.
        """
        effects = _HANDLERS[type(given)](self, given, now) or NO_EFFECTS
        if self.witness is not None:
            self.witness.took(given, effects, now)
        if self.changed is not None:
            self.changed()
        return effects

    def schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        """Choose an endpoint for `request` and count the request there as running from now on.
        Return a refusal if no endpoint may serve it.
        """
        if self.witness is None:
            return self._schedule(request, now)
        self.witness.asked(request)
        decision = self._schedule(request, now)
        self.witness.decided(request, decision, now)
        return decision

    def holds(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether a plugin wants `request` to wait in the queue. `schedule` does not check
        this and places the request in any case.

        Return False if no endpoint is ready, because `schedule` then refuses the request at once.
        """
        if not self.may_hold:
            return False
        ready = self.pool.ready(request.subset, now)
        if not len(ready):
            return False
        offered = available(ready, self.pool.columns, self.outliers.ejection, self.full, now)
        candidates = self._candidates(offered.with_room, {}, request, now)
        profiles = self.settings.stages.profiles()
        return any(one.holds(request, candidates, self.failures) for _, one in profiles)

    def has_room(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether `request` need not wait, because an endpoint has room for it and no plugin
        holds it. `schedule` does not check this.

        Return True if no endpoint of the pool may serve it, because `schedule` then refuses it at
        once.
        """
        gate = self.gate
        if gate is not None and not gate.certainly_open(request):
            if not len(self.pool.ready(None, now)):
                # Requests may wait for the first endpoint.
                return False
            if not gate.has_room(self._of_stages(request, now), request):
                return False
        return not self.may_hold or not self.holds(request, now)

    def why_full(self, request: InferenceRequest, now: Seconds) -> str:
        """Return a phrase about the endpoints that have no room for `request`."""
        if self.gate is None:
            return "a plugin held it"
        for stage, candidates in self._of_stages(request, now):
            if not self.gate.has_room([(stage, candidates)], request):
                return self.gate.why_full(candidates, lambda slot: self.pool.endpoint_in(slot).name)
        return "requests before it take the room of the endpoints"

    def _of_stages(
        self, request: InferenceRequest, now: Seconds
    ) -> list[tuple[Stage | None, Candidates]]:
        """Return the candidates of each stage that `request` may need, by their roles, before any
        other filter. The stage is None if there is only one.
        """
        ready = self.pool.ready(request.subset, now)
        offered = available(ready, self.pool.columns, self.outliers.ejection, self.full, now)
        candidates = self._candidates(offered.with_room, {}, request, now)
        stages = self.settings.stages
        if self._alone:
            return [(None, self._of_role(self._decode, request, candidates))]
        named = [(Stage.DECODE, stages.decode), (Stage.PREFILL, stages.prefill)]
        return [
            (stage, self._of_role(profile, request, candidates))
            for stage, profile in named
            if profile is not None
        ]

    def _of_role(
        self, profile: SchedulingProfile, request: InferenceRequest, candidates: Candidates
    ) -> Candidates:
        if not len(candidates) or not profile.of_role.filters:
            return candidates
        return profile.of_role.filter(request, candidates, self.failures).candidates

    def endpoint_of(self, lease: Lease) -> Endpoint | None:
        """Return the endpoint at which the request of `lease` runs, or None if the request ended or
        the endpoint left or restarted.
        """
        return self.pool.endpoint_in(lease.slot) if self.ledger.is_live(lease) else None

    def standings(self, now: Seconds) -> dict[int, Standing]:
        """Return the standing of each endpoint by slot: ready, or the reason why it is not
        preferred for new requests.
        """
        return self.pool.standings(now, self.settings.metrics_staleness_s)

    def held(self, request: InferenceRequest, endpoint: Endpoint) -> Held | None:
        """Return how much of the first prompt of `request` the engine of `endpoint` reported as
        cached.

        `request` is the prompt-free request of a lease. Return None if no index receives the
        engine's events, or if the amount is unknown.
        """
        slot = self.pool.slot_of(endpoint)
        return None if slot is None else self.indexes.held(request, slot)

    def tell_peers(self) -> None:
        """Begin to collect decisions for peers in `sent`, and to count the requests that peers have
        in flight.
        """
        self.sent = deque(maxlen=SENT_MAX)
        self.pool.columns.peers = PeerLoads()

    # A decision, step by step.

    def _schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        settings, columns, rotation = self.settings, self.pool.columns, self.decisions
        ready = self.pool.ready(request.subset, now)
        count = len(ready)
        if not count:
            return nobody_ready(request, len(self.pool))
        offered = Available(ready, ready, ready)
        if self.outliers.ejection.masked or self.full.by_slot:
            offered = available(ready, columns, self.outliers.ejection, self.full, now)
        if self.gate is not None and not self.gate.none_full(request):
            offered = self._below_ceiling(self.gate, offered, request, now)
        affinities = self.indexes.match(request, len(columns.endpoints), now)
        request = self._at_this_moment(request, affinities)
        slots = offered.with_room
        candidates = self._candidates(slots, affinities, request, now)
        if not self._alone:
            return self._schedule_stages(request, candidates, offered, affinities, now)
        if (
            request.priority < 0
            and self.gate is None
            and settings.saturation.saturation(candidates) >= 1.0
        ):
            return saturated(f"the pool is saturated and priority {request.priority} may be shed")
        predicted = None
        if self.latency is not None:
            predicted = self._predict(request, candidates, affinities)
            if request.priority < 0 and self.latency.is_hopeless(request, candidates):
                return saturated(
                    "no endpoint is predicted to meet the SLO of the request, and priority "
                    f"{request.priority} may be shed"
                )

        staleness = None
        if not self.pool.all_observed_since(now - settings.metrics_staleness_s):
            staleness = Staleness(settings.metrics_staleness_s, columns.unreachable)
        profile, state = self._decode, self._profile_state
        choice = choose(profile, request, candidates, state, rotation, staleness)
        if isinstance(choice, Refusal):
            if slots is offered.in_service:
                return choice
            # All endpoints below their limit were dropped by filters, so full endpoints are tried
            # too.
            slots = offered.in_service
            candidates = self._candidates(slots, affinities, request, now)
            if self.latency is not None:
                predicted = self._predict(request, candidates, affinities)
            choice = choose(profile, request, candidates, state, rotation, staleness)
            if isinstance(choice, Refusal):
                return choice
        verdict = None
        if self.shadow is not None:
            verdict = self.shadow.judge(request, choice, rotation, staleness, self.pool.endpoint_in)

        if slots is not ready:
            dropped = offered.left_out(slots, columns) | choice.dropped
            choice = structs.replace(choice, dropped=dropped)
        leg = self._assume(request, choice, profile, count, now)
        if predicted is not None:
            leg.lease.latency = predicted.at(choice.slot)
        self.decisions = number = rotation + 1
        kept = leg.lease.request
        return Decision(
            account=Account(number=number, request=kept, legs=(leg,), shadow=verdict),
            leg=leg,
            markers=self._markers,
            request_markers=self._request_markers,
            offered=candidates if self._request_markers else None,
            primary_port=settings.primary_port,
            rank_chooser=self._rank_chooser,
        )

    def _below_ceiling(
        self, gate: Gate, offered: Available, request: InferenceRequest, now: Seconds
    ) -> Available:
        """Return `offered` with room only where the gate sees some, or unchanged if that is nowhere
        or if the stages of a request have different endpoints.
        """
        if not self._alone:
            return offered
        candidates = self._candidates(offered.with_room, {}, request, now)
        keep = gate.with_room(candidates, request)
        if keep.all() or not keep.any():
            return offered
        return structs.replace(offered, with_room=offered.with_room[keep])

    def _predict(
        self, request: InferenceRequest, candidates: Candidates, affinities: dict[str, Affinity]
    ) -> Predicted:
        """Predict the latency of `request` at each candidate. Store the predictions in
        `affinities`, which the candidates read.
        """
        assert self.latency is not None, "latencies are predicted"
        predicted = self.latency.predict(request, candidates, len(self.pool.columns.endpoints))
        affinities[PREDICTED_LATENCY] = predicted.affinity
        return predicted

    def _schedule_stages(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        offered: Available,
        affinities: Mapping[str, Affinity],
        now: Seconds,
    ) -> Decision | Refusal:
        """Choose an endpoint for each stage of `request`. All stages share one match of the
        indexes.
        """
        settings, rotation = self.settings, self.decisions
        stages = settings.stages
        staleness = None
        if not self.pool.all_observed_since(now - settings.metrics_staleness_s):
            staleness = Staleness(settings.metrics_staleness_s, self.pool.columns.unreachable)
        screened: dict[str, Ints] = {}
        if stages.screen is not None:
            in_service = self._candidates(offered.in_service, affinities, request, now)
            kept = stages.screen.filter(request, in_service, self.failures)
            if not len(kept.candidates):
                return nobody_left(kept, len(in_service))
            offered, screened = _screened(offered, kept), kept.dropped
            candidates = self._candidates(offered.with_room, affinities, request, now)

        def choose_for(stage: Stage, peer: int, named: str = "") -> Choice | Refusal:
            profile, state = self._stages[named or stage]
            turn = rotation if stage is Stage.DECODE else rotation_of(stage, rotation)
            near = candidates if peer < 0 else candidates.near(peer)
            choice = choose(profile, request, near, state, turn, staleness)
            if isinstance(choice, Refusal) and offered.with_room is not offered.in_service:
                wider = self._candidates(offered.in_service, affinities, request, now).near(peer)
                choice = choose(profile, request, wider, state, turn, staleness)
            if stages.fallback is None or stage is Stage.DECODE:
                return choice
            return reached(choice, staleness)

        def cached_at(choice: Choice) -> int:
            matched, _ = choice.ranked.prefix_match(choice.picked[0])
            return predicted_tokens(matched, settings.block_tokens, request.prompt_tokens)

        order = prefill_first if stages.order is Order.PREFILL_FIRST else decode_first
        if stages.named or PREFER_HEADER in request.headers:
            order = one_request
        chosen = order(stages, request, choose_for, cached_at)
        decode, route = stages.decode, None
        if isinstance(chosen, Refusal):
            if stages.fallback is None or chosen.stage in {None, Stage.DECODE}:
                return chosen
            alone = choose_for(Stage.DECODE, -1, _FALLBACK)
            if isinstance(alone, Refusal):
                return alone
            decode, route = stages.fallback, Route.AGGREGATED_FALLBACK
            chosen = StagedChoice(alone, cached_tokens=cached_at(alone))
        if chosen.profile:
            decode = stages.named[chosen.profile]
        if request.priority < 0 and self.gate is None:
            refusal = self._saturated_stage(request, chosen, decode)
            if refusal is not None:
                return refusal
        verdict = None
        # The shadow borrows from the decode profile, which does not act if another profile does.
        if self.shadow is not None and decode is stages.decode:
            endpoint_in = self.pool.endpoint_in
            verdict = self.shadow.judge(request, chosen.decode, rotation, staleness, endpoint_in)
        legs = self._assume_stages(request, chosen, decode, offered, screened, now)
        self.decisions = number = rotation + 1
        leg, *earlier = legs
        account = Account(
            number=number,
            request=leg.lease.request,
            legs=legs,
            shadow=verdict,
            route=route or chosen.route,
            uncached_tokens=request.prompt_tokens - chosen.cached_tokens,
        )
        return Decision(
            account=account,
            leg=leg,
            markers=self._markers_by_name.get(chosen.profile, self._markers),
            request_markers=self._request_markers,
            offered=chosen.decode.offered if self._request_markers else None,
            earlier=tuple(earlier),
            primary_port=settings.primary_port,
            rank_chooser=self._rank_chooser,
        )

    def _saturated_stage(
        self, request: InferenceRequest, chosen: StagedChoice, decode: SchedulingProfile
    ) -> Refusal | None:
        """Return the refusal of `request`, which may be shed, if the endpoints of any stage that it
        needs are saturated; else None.
        """
        stages = self.settings.stages
        for stage, profile, choice in (
            (Stage.DECODE, decode, chosen.decode),
            (Stage.PREFILL, stages.prefill, chosen.prefill),
            (Stage.ENCODE, stages.encode, chosen.encode),
        ):
            if profile is None or choice is None:
                continue
            of_role = profile.of_role.filter(request, choice.offered, self.failures).candidates
            if self.settings.saturation.saturation(of_role) >= 1.0:
                what = f"the endpoints of stage {stage} are saturated"
                return saturated(f"{what} and priority {request.priority} may be shed")
        return None

    def _assume_stages(
        self,
        request: InferenceRequest,
        chosen: StagedChoice,
        decode: SchedulingProfile,
        offered: Available,
        screened: dict[str, Ints],
        now: Seconds,
    ) -> tuple[Leg, ...]:
        """Count the request of a decision at the endpoints chosen for its stages, under one lease.
        Return the legs, decode first.

        `screened` are the slots that were dropped before any stage, by name of the filter.
        """
        stages = self.settings.stages
        legs: list[Leg] = []
        leases: list[Lease] = []
        for stage, profile, choice in (
            (Stage.PREFILL, stages.prefill, chosen.prefill),
            (Stage.ENCODE, stages.encode, chosen.encode),
            (Stage.DECODE, decode, chosen.decode),
        ):
            if profile is None or choice is None:
                continue
            dropped = choice.dropped
            if choice.offered.slot is not offered.ready:
                left_out = offered.left_out(choice.offered.slot, self.pool.columns) | screened
                choice = structs.replace(choice, dropped=left_out | dropped)  # noqa: PLW2901
            work = chosen.work if stage is Stage.DECODE else stage
            encodes = chosen.encode is not None or Stage.ENCODE in stages.named
            leg = self._assume(
                choice.request,
                choice,
                profile,
                len(offered.ready),
                now,
                stage=stage,
                prefills=work is not Stage.ENCODE
                and (work is Stage.PREFILL or not (chosen.prefill is not None or chosen.prefilled)),
                left_out=self._not_recorded[work, encodes],
            )
            legs.append(leg)
            leases.append(leg.lease)
            if stage is Stage.ENCODE:
                leases += [self._also_encode(leg.lease, slot, now) for slot in choice.others]
        *earlier, lease = leases
        counted = {lease.slot}
        for one in earlier:
            if one.slot in counted:
                self.ledger.join(one)
            counted.add(one.slot)
        lease.earlier = tuple(earlier)
        prefill = prefill_of(lease)
        if prefill is not None:
            self.overdue_prefills.watch(prefill, lease)
            sender = prefill.slot, prefill.generation
            self.ledger.receive(lease, float(request.prompt_tokens - chosen.cached_tokens), sender)
        return (legs[-1], *legs[:-1])

    def _also_encode(self, lease: Lease, slot: int, now: Seconds) -> Lease:
        """Count the request of `lease`, whose media an encode endpoint encodes, at a further encode
        endpoint, the one in `slot`. Return the lease there.
        """
        request = lease.request
        other = self.ledger.open(
            request, slot, matched_blocks=0, prefill_tokens=0.0, now=now, stage=Stage.ENCODE
        )
        self._count_sent(other, now, self._not_of_media)
        return other

    def _at_this_moment(
        self, request: InferenceRequest, affinities: dict[str, Affinity]
    ) -> InferenceRequest:
        """Return `request` with its moment, the picker's state that plugins may read. Store the
        joint match of the prefix indexes in `affinities`.
        """
        name, tokens = self.settings.prefix, request.prompt_tokens
        if self._counts_ids:
            alone = affinities.get(name)
            # An index that answers in place of the default prefix index counts bytes.
            if alone is not None and alone.total:
                tokens = request.known_tokens or tokens
        if self.indexes.joins:
            together = self.indexes.join(affinities)
            if together is not None:
                affinities[name] = together
        prefix = affinities.get(name)
        moment = Moment(
            replicas_unheard=self.replicas_unheard,
            sessions_return=self._session_returns.expected,
            answer_tokens=self.answer_lengths.tokens,
            session_tokens=self.settings.session_tokens,
            cold=prefix is None or not prefix.matched.item(prefix.matched.argmax()),
            token_ids=request.moment.token_ids,
            token_media=request.moment.token_media,
            known_tokens=request.moment.known_tokens,
        )
        if tokens == request.prompt_tokens:
            return structs.replace(request, moment=moment)
        return structs.replace(
            request,
            moment=moment,
            prompt_tokens=tokens,
            # The size in bytes stays what it was.
            prompt_bytes=request.prompt_bytes or request.prompt_tokens * BYTES_PER_TOKEN,
        )

    def _candidates(
        self,
        slots: Ints,
        affinities: Mapping[str, Affinity],
        request: InferenceRequest,
        now: Seconds,
    ) -> Candidates:
        return Candidates(
            self.pool.columns,
            slots,
            now,
            affinities=affinities,
            prefix=self.settings.prefix,
            block_tokens=self.settings.block_tokens,
            prompt_tokens=request.prompt_tokens,
        )

    def _assume(
        self,
        request: InferenceRequest,
        choice: Choice,
        profile: SchedulingProfile,
        ready: int,
        now: Seconds,
        *,
        stage: Stage = Stage.DECODE,
        prefills: bool = True,
        left_out: tuple[str, ...] = (),
    ) -> Leg:
        """Count the request at the endpoint that `profile` chose, in the same step that chooses it,
        so that the next decision sees it.

        `ready` is the number of ready endpoints. `prefills` is True if the chosen endpoint computes
        the prompt. Indexes named in `left_out` do not record the choice. Return the leg at the
        chosen endpoint.
        """
        settings, pool = self.settings, self.pool
        candidates, first = choice.ranked, choice.picked[0]
        slot = choice.slot
        endpoint = pool.columns.endpoints[slot]
        assert endpoint is not None, "a candidate is an endpoint"
        costs = None
        if self.keeps_costs:
            costs = costs_to_keep(profile, request, choice, pool.columns, self.failures, now)
        matched, total = candidates.prefix_match(first)
        block_tokens = settings.block_tokens
        cached = predicted_tokens(matched, block_tokens, request.prompt_tokens)
        uncached = float(request.prompt_tokens - cached) if prefills else 0.0
        lease = self.ledger.open(
            request, slot, matched_blocks=matched, prefill_tokens=uncached, now=now, stage=stage
        )
        if stage is not Stage.ENCODE:
            lease.expected = expected_hit(request, cached, candidates, first, settings.joined[1:])
        others: list[int] = []
        fallbacks: tuple[Endpoint, ...] = ()
        if settings.fallback_endpoints_max and stage is Stage.DECODE:
            others = choice.fallbacks(settings.fallback_endpoints_max)
            fallbacks = tuple(map(pool.endpoint_in, others))
        elif stage is Stage.ENCODE:
            fallbacks = tuple(map(pool.endpoint_in, choice.others))
        rank = None
        # The sidecar passes the header on to an endpoint that prefills, whose ranks are others.
        if self._rank_chooser is not None and stage is Stage.DECODE and prefills:
            rank = self._rank_chooser.place(
                lease, others, self.indexes, self.ledger, self.rank_choices, now
            )
        self._count_sent(lease, now, left_out)
        if self._session_reader is not None and stage is Stage.DECODE:
            session = self._session_reader.session_of(request)
            if session:
                self._session_returns.note(session)
        lease.request = request.without_prompts()
        if self.sent is not None:
            self.sent.append(Sent(lease.request, slot, now, left_out))
        return Leg(
            stage=stage,
            endpoint=endpoint,
            fallbacks=fallbacks,
            ready=ready,
            dropped=choice.dropped,
            candidates=candidates,
            picked=first,
            scorers=profile.scorer_names,
            scored=choice.scored,
            tellers=profile.tellers,
            lease=lease,
            matched_blocks=matched,
            total_blocks=total,
            block_tokens=block_tokens,
            rank=rank,
            costs=costs,
        )

    def _count_sent(self, lease: Lease, now: Seconds, left_out: tuple[str, ...] = ()) -> None:
        """Record in the indexes and the statistics that the request of `lease` is sent to its
        endpoint.
        """
        self.outliers.ejection.sent(lease)
        if self.full.by_slot:
            self.full.sent(lease.slot, now)
        if lease.expected is not None:
            self.accuracy.decided(lease.slot, lease.request.model, lease.expected)
        if self.gate is not None:
            self.gate.sent(lease)
        self.indexes.record(lease, now, left_out)

    # The course of a request.

    def _move(self, given: ServedBy, now: Seconds) -> Effects:
        """Move the lease and the index entries of a request to the endpoint that serves it. If that
        endpoint is not in the pool, close the lease and undo the entries.
        """
        lease, slot = given.lease, self.pool.slot_at(given.address)
        if lease.slot < 0 or slot == lease.slot:
            return NO_EFFECTS
        self.outliers.left(lease)
        left_out = self._left_out_by(lease)
        if self.ledger.is_live(lease):
            self.accuracy.withdrawn(lease.slot, lease.expected, lease.opened_at_s)
            self.indexes.undo(lease, lease.slot, now, tuple(lease.recorded))
        lease.recorded.clear()
        if slot is None:
            lease.matched_blocks = 0
            self.ledger.close(lease, now)
            return Effects(moved=True)
        request = lease.request
        matched = self.indexes.matched_at(request, slot, len(self.pool.columns.endpoints), now)
        cached = predicted_tokens(matched, self.settings.block_tokens, request.prompt_tokens)
        lease.matched_blocks = matched
        if lease.expected is not None:
            lease.expected = structs.replace(
                lease.expected, predicted_tokens=cached, indexes=NO_INDEXES
            )
        # The endpoint that serves received the same headers, so prefill and encode stay elsewhere.
        prefills = lease.stage is not Stage.ENCODE and not any(
            one.stage is Stage.PREFILL for one in lease.earlier
        )
        uncached = float(request.prompt_tokens - cached) if prefills else 0.0
        sender = lease.sender
        self.ledger.move(lease, slot, uncached, now)
        if sender[0] >= 0:
            self.ledger.receive(lease, float(request.prompt_tokens - cached), sender)
        self._count_sent(lease, now, left_out)
        if self.sent is not None:
            self.sent.append(Sent(request, slot, now, left_out))
        return Effects(moved=True)

    def _left_out_by(self, lease: Lease) -> tuple[str, ...]:
        """Return the names of the indexes that must not record the request of `lease`, because they
        are for a stage on which another endpoint works.
        """
        if lease.stage is Stage.DECODE:
            encodes = any(one.stage is Stage.ENCODE for one in lease.earlier)
            return self._not_recorded[Stage.DECODE, encodes]
        return tuple(name for name in self.indexes if name not in lease.recorded)

    def _end_prefill(self, given: ResponseStarted | OutputStarted, now: Seconds) -> None:
        """Close the leases of the prefill and encode endpoints of a request, because its response
        headers or its first output arrived.
        """
        lease = given.lease
        present = [one for one in (lease, *lease.earlier) if self.ledger.is_live(one)]
        self.pairs.succeeded([one.slot for one in present])
        for one in present:
            if one.probe and one is not lease:
                self.outliers.passed(one, now)
        self.ledger.close_earlier(lease, now)

    def _start_response(self, given: ResponseStarted, now: Seconds) -> None:
        if self.settings.stages.prefill_end is PrefillEnd.HEADERS:
            self._end_prefill(given, now)

    def _start_output(self, given: OutputStarted, now: Seconds) -> None:
        if given.lease.earlier:
            self._end_prefill(given, now)
        if self.latency is not None:
            self._learn_first_output(given.lease, now)
        self.ledger.first_output(given.lease, now)

    def _learn_first_output(self, lease: Lease, now: Seconds) -> None:
        """Compare the predicted time to first token with the first output of `lease`.

        The first chunk of an answer that is not streamed is its end, and says nothing.
        """
        placed = lease.latency
        fresh = lease.first_output_at_s is None and lease.request.stream
        if self.latency is not None and placed is not None and fresh and self.ledger.is_live(lease):
            self.latency.first_output(lease.slot, placed, now - lease.opened_at_s)

    def _learn_end(self, lease: Lease, outcome: Outcome, now: Seconds) -> None:
        """Compare the predicted time per output token with a complete answer."""
        placed, first_s, tokens = lease.latency, lease.first_output_at_s, outcome.output_tokens
        if placed is None or first_s is None or tokens is None or tokens < 2:
            return
        if self.latency is not None and outcome.answered and lease.request.stream:
            self.latency.ended(lease.slot, placed, (now - first_s) / (tokens - 1))

    def _read_load(self, given: LoadReported, now: Seconds) -> None:
        lease, report = given.lease, read_load_report(given.header)
        if (
            report is not None
            and self.ledger.is_live(lease)
            and self.pool.report(lease.slot, report)
        ):
            self.load_reports += 1
        else:
            self.load_reports_unread += 1

    def _end(self, given: RequestEnded, now: Seconds) -> Effects:
        lease, outcome = given.lease, given.outcome
        slot = lease.slot
        if slot < 0:
            return NO_EFFECTS
        set_aside = None
        live = self.ledger.is_live(lease)
        if live and self.latency is not None:
            self._learn_end(lease, outcome, now)
        if lease.earlier:
            set_aside = self._end_together(lease, outcome, now)
        elif live:
            self.outliers.ended(lease, outcome, now)
            if outcome.status is not None and self._responded(lease, outcome, outcome.status, now):
                set_aside = self.pool.endpoint_in(slot)
        if outcome.ending is Ending.UNSEEN:
            self.ledger.close_later(lease, now, self.settings.lease_ttl_without_response_phase_s)
        else:
            self.ledger.close(lease, now, answered=outcome.answered)
        if live and outcome.unserved:
            # The prompt was not computed there.
            self.accuracy.withdrawn(slot, lease.expected, lease.opened_at_s)
            self.indexes.undo(lease, slot, now, self.settings.beliefs)
        return NO_EFFECTS if set_aside is None else Effects(set_aside=set_aside)

    def _end_together(self, lease: Lease, outcome: Outcome, now: Seconds) -> Endpoint | None:
        """Apply the outcome of the request of `lease` to the endpoints that served it together.

        Return the endpoint that is set aside because of it, or None. A status of 500 or more may be
        that of any of them, so none is blamed before it failed with two different partners. A
        refusal for lack of capacity may be that of any of them too, and is ignored.
        """
        present = [one for one in (lease, *lease.earlier) if self.ledger.is_live(one)]
        earlier = [one for one in present if one is not lease]
        status = outcome.status
        failed = status is not None and status >= 500 and not outcome.full
        if outcome.unserved:
            for one in earlier:
                self.accuracy.withdrawn(one.slot, one.expected, one.opened_at_s)
                self.indexes.undo(one, one.slot, now, self.settings.beliefs)
        if (failed or outcome.full) and not outcome.by_gateway:
            return self._blame(present, lease, status, now) if failed else None
        for one in earlier:
            self.outliers.left(one)
        if not self.ledger.is_live(lease):
            return None
        self.outliers.ended(lease, outcome, now)
        if status is not None and self._responded(lease, outcome, status, now):
            return self.pool.endpoint_in(lease.slot)
        return None

    def _blame(
        self, present: list[Lease], lease: Lease, status: int | None, now: Seconds
    ) -> Endpoint | None:
        """Find the endpoint that explains the failure of the request of `lease`, and eject it.
        `present` are the leases of the request whose endpoints are in the pool. Return the endpoint
        that is set aside, or None.
        """
        for one in present:
            self.outliers.left(one)
        # The partner may be to blame that has left.
        if len(present) <= len(lease.earlier):
            return None
        slots = [one.slot for one in present]
        count_of, sent_at_s = self.outliers.rejections_of, lease.opened_at_s
        if status == 503 and self._refused_pairs.wait(slots, count_of, sent_at_s, now):
            return None
        return self._blame_pair(slots, now)

    def _blame_pair(self, slots: Sequence[int], now: Seconds) -> Endpoint | None:
        """Eject the endpoint of `slots` that explains their failures, if any. Return the endpoint
        that is set aside, or None.
        """
        set_aside = None
        for slot in self.pairs.failed(slots):
            self.outliers.blame(slot, now)
            if self.pool.set_aside(slot, now):
                set_aside = self.pool.endpoint_in(slot)
        return set_aside

    def _responded(self, lease: Lease, outcome: Outcome, status: int, now: Seconds) -> bool:
        """Record the HTTP status of a response. Return whether it makes the pool exclude the
        endpoint until its next good scrape.
        """
        if status in MAY_BE_FULL and outcome.full:
            self.full.refused(lease.slot, lease.opened_at_s, outcome.retry_after_s, now)
            return False
        if self.full.by_slot and status < 300:
            self.full.served(lease.slot, lease.opened_at_s)
        return self.pool.responded(lease.slot, status, now, by_gateway=outcome.by_gateway)

    # Endpoints, peers and time.

    def _replace(self, given: PoolReplaced, now: Seconds) -> None:
        for slot in self.pool.replace(given.endpoints, now):
            self._forget(slot)
        self.ledger.set_speeds(self.pool.endpoints(), self.settings.prefill_speed_of, now)

    def _observe(self, given: PageScraped, now: Seconds) -> None:
        slot, metrics = given.slot, given.metrics
        if self.pool.observe(slot, metrics, now):
            self._forget(slot)
        self.ledger.scraped(slot, metrics, now)
        if self.gate is not None:
            self.gate.scraped(slot, metrics, now)
        self.outliers.observed(slot, metrics, now)
        self.answer_lengths.scraped(slot, metrics)
        correction = self.accuracy.scraped(slot, metrics, now)
        if correction is not None:
            self.indexes.correct(correction)
        self.indexes.scraped(slot, metrics)

    def _forget(self, slot: int) -> None:
        """Drop all knowledge about the endpoint in `slot`, because it left or restarted."""
        self.ledger.forget(slot)
        self.outliers.forget(slot)
        self.pairs.forget(slot)
        self._refused_pairs.forget(slot)
        self.overdue_prefills.forget(slot)
        self.full.forget(slot)
        if self.gate is not None:
            self.gate.forget(slot)
        self.accuracy.forget(slot)
        self.answer_lengths.forget(slot)
        if self.latency is not None:
            self.latency.forget(slot)
        self.outlying.pop(slot, None)
        self.shadow_totals.picks.pop(slot, None)
        self.indexes.forget(slot)

    def _learn(self, given: PeerRecorded, now: Seconds) -> None:
        self.indexes.learn(given.index, given.keys, given.slot, given.stamp, now)
        if given.index == next(iter(self.indexes.shared)):
            self.accuracy.peer_decided(given.slot, given.stamp)

    def _note_unheard(self, given: PeersUnheard, now: Seconds) -> None:
        self.replicas_unheard = given.replicas

    def _tick(self, given: Tick, now: Seconds) -> None:
        self.ledger.close_due(now)
        for refused in self._refused_pairs.due(self.outliers.rejections_of, now):
            for slot in refused.full:
                self.full.refused(slot, refused.sent_at_s, None, now)
            if not refused.full:
                self._blame_pair(refused.slots, now)
        self.overdue_prefills.tick(self.ledger, self.settings.stages.prefill_deadline_s, now)
        self.outliers.tick(now)
        self.full.tick(now)
        self.answer_lengths.tick()
        if self.gate is not None and self.answer_lengths.tokens is not None:
            self.gate.rooms.answer_tokens = self.answer_lengths.tokens
        self.outlying = dict(self.outliers.detected(now))
        self.indexes.expire(now)

    # Settings.

    def _configure(self, given: Reconfigured, now: Seconds) -> Effects:
        self.settings = settings = given.settings
        self.failures.retain(settings.plugin_names)
        restarted = self.indexes.configure(settings.index_settings)
        self.ledger.set_speeds(self.pool.endpoints(), self.settings.prefill_speed_of, now)
        self._read_profile()
        return Effects(restarted=restarted)

    def _read_profile(self) -> None:
        """Create from new settings the objects that decisions use, so that a decision need not
        create them.
        """
        settings, profile, failures = self.settings, self.settings.profile, self.failures
        self.pool.columns.prefill_alike = not settings.labelled_speeds
        self.pool.columns.topology = settings.topology
        prefix = settings.indexes.get(settings.prefix)
        self._counts_ids = prefix is not None and prefix.abilities.reads_token_ids
        self._decode, self._alone = profile, settings.stages.alone
        self._profile_state = ProfileState(self._random, failures, KeptScores.of(profile.scorers))
        if settings.flow is None:
            self.gate = None
        elif self.gate is None:
            self.gate = Gate(settings.flow, self.pool.columns)
        else:
            self.gate.configure(settings.flow)
        self.may_hold = any(one.holders for _, one in settings.stages.profiles())
        self._read_stages()
        self._session_reader = profile.session_reader(failures)
        self._markers = profile.markers(failures)
        self._request_markers = profile.request_markers(failures)
        self._rank_chooser = profile.rank_chooser(failures)
        if self._rank_chooser is not None:
            self.rank_choices = dict.fromkeys(RankChoice, 0) | self.rank_choices
        self._configure_latency(settings.latency)
        self.outliers.configure(settings.ejection)
        self.shadow = Shadow.of(settings, self.seed, self.shadow_totals, self.shadow_failures)

    def _configure_latency(self, settings: LatencyPrediction | None) -> None:
        """Begin or stop predicting latencies. What is learned stays while the estimator stays."""
        if settings is None:
            self.latency = None
        elif self.latency is None or self.latency.settings.estimator != settings.estimator:
            self.latency = LatencyModel(settings)
        else:
            self.latency.settings = settings

    def _read_stages(self) -> None:
        """Create from the settings the objects that decisions of requests with several stages use."""
        settings = self.settings
        stages = settings.stages
        named = (
            (Stage.DECODE, stages.decode),
            (Stage.PREFILL, stages.prefill),
            (Stage.ENCODE, stages.encode),
            (_FALLBACK, stages.fallback),
            *stages.named.items(),
        )
        self._stages = {
            stage: (
                profile,
                ProfileState(
                    self._random, self.failures, KeptScores.of(profile.scorers), own_cold=True
                ),
            )
            for stage, profile in named
            if profile is not None and not self._alone
        }
        self._markers_by_name = {
            name: profile.markers(self.failures) for name, profile in stages.named.items()
        }
        abilities = {name: index.abilities for name, index in settings.indexes.items()}
        of_media = tuple(name for name, of in abilities.items() if of.caches_media)
        of_sessions = tuple(name for name, of in abilities.items() if of.names_sessions)
        self._not_of_media = tuple(name for name in abilities if name not in of_media)
        # An index of sessions records only the endpoint that the gateway sends the request to. An
        # index of media records the endpoint that encodes them.
        self._not_recorded = {
            (Stage.DECODE, False): (),
            (Stage.DECODE, True): of_media,
            (Stage.PREFILL, False): of_sessions,
            (Stage.PREFILL, True): of_media + of_sessions,
            (Stage.ENCODE, False): self._not_of_media,
            (Stage.ENCODE, True): self._not_of_media,
        }
        """Names of the indexes that do not record the endpoint of a stage, by (stage, whether
        another endpoint encodes).
        """


def _screened(offered: Available, kept: FilterResult) -> Available:
    """Return `offered` without the endpoints that the filters before all stages dropped."""
    in_service = kept.candidates.slot
    if offered.with_room is offered.in_service:
        return Available(offered.ready, in_service, in_service)
    with_room = in_service[np.isin(in_service, offered.with_room)]
    return Available(offered.ready, in_service, with_room if len(with_room) else in_service)


_HANDLERS: Final[Mapping[type[Input], Callable[[Scheduler, Any, Seconds], Effects | None]]] = {
    PoolReplaced: Scheduler._replace,
    PageScraped: Scheduler._observe,
    ScrapeFailed: lambda its, given, now: its.pool.observe_failure(
        given.slot, answered=given.answered
    ),
    LoadReported: Scheduler._read_load,
    ResponseStarted: Scheduler._start_response,
    OutputStarted: Scheduler._start_output,
    ServedBy: Scheduler._move,
    RequestEnded: Scheduler._end,
    Reconfigured: Scheduler._configure,
    IndexMemoryLimited: lambda its, given, now: its.indexes.limit_memory(given.share),
    PeerRecorded: Scheduler._learn,
    PeersUnheard: Scheduler._note_unheard,
    EventsHeard: lambda its, given, now: Effects(
        heard=its.indexes.hear(given.slot, given.events, now, rank=given.rank)
    ),
    BlocksChanged: lambda its, given, now: its.indexes.change(
        given.slot,
        given.changes,
        given.engine_block_tokens,
        rank=given.rank,
        cleared=given.cleared,
    ),
    StreamChanged: lambda its, given, now: its.indexes.set_stream(
        given.slot, given.state, complete=given.complete, rank=given.rank
    ),
    EventsVoided: lambda its, given, now: its.indexes.silence(given.slot, rank=given.rank),
    Tick: Scheduler._tick,
}
"""Function that applies each input, by type of the input: a method of the scheduler, or a call of
the part that the input is for.
"""
