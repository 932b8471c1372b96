"""The scheduler: one function that places a request, and handlers for every other event.

A shell calls only `take`, with an input (`core/decision/inputs`), and `schedule`. Both run to
completion and receive the time as `now`. The same calls with the same seed therefore give the same
decisions, in production and in the simulator.

The scheduler connects parts that do the work:

- `state`: the endpoints, what they have cached, the requests in flight, and what was learned
  (`core/decision/pool_state`).
- `choose`: the choice of one endpoint by a profile (`core/decision/choice`).
- `staged`: the choice of one endpoint for each stage (`core/decision/staged_scheduler`).
- `placements`: the record of each placed request (`core/decision/placements`).
- `outcomes`: what responses and ends of requests say about endpoints (`core/decision/outcomes`).
- `admission`: whether a request should wait in a queue (`core/decision/admission`).

If there are peers, `core/peers` reads `placements.sent` and `indexes.shared`.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Protocol, TypeAlias

from msgspec import structs

from epp.core.decision.account import Account
from epp.core.decision.admission import Admission
from epp.core.decision.choice import (
    ProfileState,
    Staleness,
    choose,
    nobody_ready,
    saturated,
)
from epp.core.decision.decision import Decision
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
from epp.core.decision.outcomes import Outcomes
from epp.core.decision.placements import Placements
from epp.core.decision.pool_state import PoolState
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import Shadow, ShadowTotals
from epp.core.decision.staged_scheduler import Offer, StagedScheduler
from epp.core.failures import PluginFailures
from epp.core.knowledge.availability import Available, available
from epp.core.knowledge.candidates import PREDICTED_LATENCY, Affinity, Candidates
from epp.core.knowledge.index import Held
from epp.core.knowledge.latency import Predicted
from epp.core.knowledge.pool import Standing
from epp.core.moment import Moment
from epp.core.prompt.blocks import KnownSegments
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, Endpoint, Refusal, Seconds

__all__ = ["Decision", "Scheduler", "Witness"]

_Handler: TypeAlias = Callable[[Any, Seconds], Effects | None]


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
        self.state = state = PoolState(settings)
        self.failures, self.pool, self.indexes = state.failures, state.pool, state.indexes
        self.ledger, self.outliers, self.full = state.ledger, state.outliers, state.full
        self.accuracy, self.answer_lengths = state.accuracy, state.answer_lengths
        self.placements = Placements(state)
        self.admission = Admission(state)
        self._outcomes = Outcomes(state)
        self._staged = StagedScheduler(state, self.placements)
        self.decisions = 0
        """Number of requests that this scheduler has placed, which is also the number of the last
        decision. Refusals do not count.
        """
        self.changed: Callable[[], None] | None = None
        """Function that is called after each input, set by a queue while requests wait in it."""
        self.shadow_totals = ShadowTotals()
        self.shadow_failures = PluginFailures()
        self.witness: Witness | None = None
        self._random = Random(f"{seed}:picker")  # noqa: S311  not for security
        self.segments = KnownSegments(
            secret=Random(f"{seed}:segments").getrandbits(64)  # noqa: S311  used for routing only
        )
        self._handlers = self._handlers_by_input()
        self._configure(Reconfigured(settings), 0.0)

    def __repr__(self) -> str:
        return (
            f"<Scheduler [{self.decisions} decisions, {self.ledger.open_leases} open leases, "
            f"seed {self.seed}] {self.pool!r}>"
        )

    def take(self, given: Input, now: Seconds) -> Effects:
        """Apply the input event `given` to the scheduler's state. Return the consequences on which
        the caller must act.
        """
        effects = self._handlers[type(given)](given, now) or NO_EFFECTS
        if self.witness is not None:
            self.witness.took(given, effects, now)
        if self.changed is not None:
            self.changed()
        return effects

    def schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        """Choose an endpoint for `request` and count the request there as running from now on.
        Return a refusal if no endpoint may serve it, or if it is shed because of its priority. With
        several stages or profiles, also refuse it if too little of its prompt is cached for
        `Prefer: if-available`, or if its header names no profile.
        """
        if self.witness is None:
            return self._schedule(request, now)
        self.witness.asked(request)
        decision = self._schedule(request, now)
        self.witness.decided(request, decision, now)
        return decision

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

    # A decision, step by step.

    def _schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        state, columns, rotation = self.state, self.pool.columns, self.decisions
        ready = self.pool.ready(request.subset, now)
        count = len(ready)
        if not count:
            return nobody_ready(request, len(self.pool))
        offered = Available(ready, ready, ready)
        if self.outliers.ejection.masked or self.full.by_slot:
            offered = available(ready, columns, self.outliers.ejection, self.full, now)
        gate = state.gate
        # The conditions before the last one save most requests a call.
        if (
            gate is not None
            and (gate.restricts or gate.rivalry.holding)
            and gate.keeps_to_room(request, now)
        ):
            offered = self.admission.below_ceiling(gate, offered, request, now)
        affinities = self.indexes.match(request, len(columns.endpoints), now)
        request = self._at_this_moment(request, affinities)
        slots = offered.with_room
        candidates = state.candidates(slots, affinities, request, now)
        staleness, age_s_max = None, self.settings.metrics_staleness_s
        if not self.pool.all_observed_since(now - age_s_max):
            staleness = Staleness(age_s_max, columns.unreachable)
        admitter = self.settings.admitter
        if request.priority < 0 and admitter is not None:
            refused = admitter.refusal(candidates, self._random)
            if refused is not None:
                return refused
        if not self._alone:
            offer = Offer(offered, candidates, affinities, staleness, rotation, now)
            staged = self._staged.schedule(request, offer, self.shadow)
            self.decisions += isinstance(staged, Decision)
            return staged
        predicted = None
        if state.latency is not None:
            predicted = self._predict(request, candidates, affinities)
        if request.priority < 0 and (refusal := self._shed(request, candidates)):
            return refusal
        profile, profile_state = self._decode, self._profile_state
        choice = choose(profile, request, candidates, profile_state, rotation, staleness)
        if isinstance(choice, Refusal):
            if slots is offered.in_service:
                return choice
            # All endpoints below their limit were dropped by filters, so full endpoints are tried
            # too.
            slots = offered.in_service
            candidates = state.candidates(slots, affinities, request, now)
            if state.latency is not None:
                predicted = self._predict(request, candidates, affinities)
            choice = choose(profile, request, candidates, profile_state, rotation, staleness)
            if isinstance(choice, Refusal):
                return choice
        verdict = None
        if self.shadow is not None:
            verdict = self.shadow.judge(request, choice, rotation, staleness, self.pool.endpoint_in)
        if slots is not ready:
            left_out = offered.left_out(slots, columns)
            choice = structs.replace(choice, dropped=left_out | choice.dropped)
        leg = self.placements.place(choice, profile, count, now)
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
            primary_port=self.settings.primary_port,
            rank_chooser=self.placements.rank_chooser,
        )

    def _shed(self, request: InferenceRequest, candidates: Candidates) -> Refusal | None:
        """Return the refusal of `request`, whose priority is negative, if the pool is saturated and
        has no flow control, or if no candidate is predicted to meet its SLO; else None.
        """
        state, priority = self.state, request.priority
        if state.gate is None and self.settings.saturation.saturation(candidates) >= 1.0:
            return saturated(f"the pool is saturated and priority {priority} may be shed")
        if state.latency is not None and state.latency.is_hopeless(request, candidates):
            return saturated(
                "no endpoint is predicted to meet the SLO of the request, and priority "
                f"{priority} may be shed"
            )
        return None

    def _predict(
        self, request: InferenceRequest, candidates: Candidates, affinities: dict[str, Affinity]
    ) -> Predicted:
        """Predict the latency of `request` at each candidate. Store the predictions in
        `affinities`, which the candidates read.
        """
        assert self.state.latency is not None, "latencies are predicted"
        predicted = self.state.latency.predict(
            request, candidates, len(self.pool.columns.endpoints)
        )
        affinities[PREDICTED_LATENCY] = predicted.affinity
        return predicted

    def _at_this_moment(
        self, request: InferenceRequest, affinities: dict[str, Affinity]
    ) -> InferenceRequest:
        """Return `request` with its moment, the picker's state that plugins may read, and with the
        prompt length by its token ids if the prefix index counts these. Store the joint match of
        the prefix indexes in `affinities`.
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
        most = 0 if prefix is None else prefix.most
        if prefix is not None and most is None:
            most = prefix.matched.item(prefix.matched.argmax())
        moment = Moment(
            replicas_unheard=self.state.replicas_unheard,
            sessions_return=self.placements.session_returns.expected,
            answer_tokens=self.answer_lengths.tokens,
            session_tokens=self.settings.session_tokens,
            cold=not most,
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

    # Every other event.

    def _handlers_by_input(self) -> Mapping[type[Input], _Handler]:
        """Return the function that applies each input, by type of the input."""
        state, outcomes, indexes = self.state, self._outcomes, self.indexes
        return {
            PoolReplaced: self._replace,
            PageScraped: self._observe,
            ScrapeFailed: lambda given, _: self.pool.observe_failure(
                given.slot, answered=given.answered
            ),
            LoadReported: lambda given, _: state.read_load(given),
            ResponseStarted: outcomes.response_started,
            OutputStarted: outcomes.output_started,
            ServedBy: self.placements.move,
            RequestEnded: outcomes.ended,
            Reconfigured: self._configure,
            IndexMemoryLimited: lambda given, _: indexes.limit_memory(given.share),
            PeerRecorded: self._learn,
            PeersUnheard: self._note_unheard,
            EventsHeard: lambda given, now: Effects(
                heard=indexes.hear(given.slot, given.events, now, rank=given.rank)
            ),
            BlocksChanged: lambda given, _: indexes.change(
                given.slot,
                given.changes,
                given.engine_block_tokens,
                rank=given.rank,
                cleared=given.cleared,
            ),
            StreamChanged: lambda given, _: indexes.set_stream(
                given.slot, given.state, complete=given.complete, rank=given.rank
            ),
            EventsVoided: lambda given, _: indexes.silence(given.slot, rank=given.rank),
            Tick: self._tick,
        }

    def _replace(self, given: PoolReplaced, now: Seconds) -> None:
        for slot in self.state.replace(given.endpoints, now):
            self.shadow_totals.picks.pop(slot, None)

    def _observe(self, given: PageScraped, now: Seconds) -> None:
        if self.state.observe(given.slot, given.metrics, now):
            self.shadow_totals.picks.pop(given.slot, None)

    def _learn(self, given: PeerRecorded, now: Seconds) -> None:
        self.indexes.learn(given.index, given.keys, given.slot, given.stamp, now)
        if given.index == next(iter(self.indexes.shared)):
            self.accuracy.peer_decided(given.slot, given.stamp)

    def _note_unheard(self, given: PeersUnheard, now: Seconds) -> None:
        self.state.replicas_unheard = given.replicas

    def _tick(self, given: Tick, now: Seconds) -> None:
        self._outcomes.tick(now)
        self.state.tick(now)

    def _configure(self, given: Reconfigured, now: Seconds) -> Effects:
        """Apply settings as a whole, and create the objects that decisions use, so that a decision
        need not create them.
        """
        self.settings = settings = given.settings
        profile, failures = settings.profile, self.failures
        restarted = self.state.configure(settings, now)
        self.placements.configure(settings)
        self.admission.configure()
        self._staged.configure(self._random)
        prefix = settings.indexes.get(settings.prefix)
        self._counts_ids = prefix is not None and prefix.abilities.reads_token_ids
        self._decode, self._alone = profile, settings.stages.alone
        self._profile_state = ProfileState(self._random, failures, KeptScores.of(profile.scorers))
        self._markers = profile.markers(failures)
        self._request_markers = profile.request_markers(failures)
        self.shadow = Shadow.of(settings, self.seed, self.shadow_totals, self.shadow_failures)
        return Effects(restarted=restarted)
