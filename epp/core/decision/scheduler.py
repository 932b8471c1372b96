"""The scheduler: one function that places a request, and handlers for every other event.

A shell calls only `take`, with an input (`core/decision/inputs`), and `schedule`. If there are
peers, `core/peers` also calls `share`. Both functions run to completion and receive the time as
`now`. The same calls with the same seed therefore give the same decisions, in production and in the
simulator.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final, Protocol, cast

import numpy as np
from msgspec import Struct, structs

from epp.core.abilities import Abilities
from epp.core.decision.account import Account, Leg, predicted_tokens, runner_up_of
from epp.core.decision.costs import FRESH_S_MAX, Cost, cost_of
from epp.core.decision.failures import PluginFailures, affinity_fault
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
    ScrapeFailed,
    ServedBy,
    StreamChanged,
    Tick,
)
from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.plugin import GoesBySessions
from epp.core.decision.profile import Kept, Marker, RequestMarker, Scored
from epp.core.decision.rank_choice import RankChoice, RankChooser
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import Acted, Shadow, ShadowTotals, ShadowVerdict
from epp.core.knowledge.answer_lengths import AnswerLengths
from epp.core.knowledge.candidates import Affinity, Candidates, Ints
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.fullness import FULL, NO_SLOTS, FullEndpoints
from epp.core.knowledge.hit_accuracy import NO_INDEXES, Correction, Expected, HitAccuracy
from epp.core.knowledge.index import (
    AffinityIndex,
    AffinityIndexSettings,
    CorrectedIndex,
    CountsInflight,
    Heard,
    HearsEngines,
    Held,
    IndexStanding,
    LimitsMemory,
    MeasuresItself,
    SharedIndex,
    joined,
    missing_verbs,
)
from epp.core.knowledge.inflight import MAY_BE_FULL, Ending, InflightLedger, Lease, Outcome
from epp.core.knowledge.load_report import read_load_report
from epp.core.knowledge.outliers import Outlier, Outliers
from epp.core.knowledge.peer_load import PeerLoads
from epp.core.knowledge.pool import EndpointPool, Standing
from epp.core.knowledge.prefill_speed import (
    speed_by_labels,
)
from epp.core.knowledge.sessions import SessionReturns
from epp.core.moment import Moment
from epp.core.prompt.blocks import KnownSegments
from epp.core.prompt.request import InferenceRequest
from epp.core.types import (
    BYTES_PER_TOKEN,
    Endpoint,
    Refusal,
    RefusalReason,
    Seconds,
)

SENT_MAX: Final = 16_384
"""Maximum number of decisions queued for peers; the oldest are dropped when the queue is full."""


class Decision(Struct, frozen=True, kw_only=True, gc=False):
    """The placement of a request, and the headers that go with it."""

    account: Account
    """Record of the decision, with its reasons."""
    leg: Leg
    """First of the record's legs: the endpoint that the gateway sends the request to."""
    markers: tuple[Marker, ...] = ()
    """Plugins that set headers on the response."""
    request_markers: tuple[RequestMarker, ...] = ()
    """Plugins that set headers on the request."""
    offered: Candidates | None = None
    """Candidates before filtering, or None if no plugin needs them."""
    rank_chooser: RankChooser | None = None
    """Plugin that selects a data-parallel rank, or None if none is configured."""

    @property
    def number(self) -> int:
        """Return the number of the decision; the scheduler counts its decisions from 1."""
        return self.account.number

    @property
    def endpoint(self) -> Endpoint:
        return self.leg.endpoint

    @property
    def lease(self) -> Lease:
        return self.leg.lease

    @property
    def predicted_tokens(self) -> int:
        """Return the prompt tokens that the current endpoint was estimated to have cached when the
        request was placed.
        """
        leg = self.leg
        tokens = leg.request.prompt_tokens
        return predicted_tokens(leg.lease.matched_blocks, leg.block_tokens, tokens)

    @property
    def rank(self) -> int | None:
        """Return the data-parallel rank that must serve the request, or None if the engine chooses."""
        return self.leg.rank

    @property
    def marks_requests(self) -> bool:
        """Return whether any plugin sets headers on requests, even if not on this one."""
        return bool(self.request_markers) or self.rank_chooser is not None

    def request_headers(self) -> dict[str, str]:
        """Return the headers to set on the request. Call this before the scheduler decides again."""
        found: dict[str, str] = {}
        if self.offered is not None:
            for marker in self.request_markers:
                request = self.lease.request
                found.update(marker.request_headers(request, self.offered, self.endpoint))
        if self.rank_chooser is not None and self.rank is not None:
            found[self.rank_chooser.plugin.rank_header] = str(self.rank)
        return found

    @property
    def own_request_headers(self) -> frozenset[str]:
        """Return the names of request headers that only plugins may set; a client's are removed."""
        names = {name for marker in self.request_markers for name in marker.plugin.own_headers}
        if self.rank_chooser is not None:
            names.add(self.rank_chooser.plugin.rank_header)
        return frozenset(names)

    def response_headers(self, served: str) -> dict[str, str]:
        """Return the headers to set on the response, e.g. the session token.

        `served` is the address that the gateway reports as the origin of the response, or "" if it
        reports none.
        """
        found: dict[str, str] = {}
        for marker in self.markers:
            found.update(marker.response_headers(self.lease.request, self.endpoint, served))
        return found


class _Offered(Struct, frozen=True, gc=False):
    """The endpoints that were available before the ranking."""

    ready: int
    dropped: dict[str, Ints]
    candidates: Candidates | None
    """Candidates before filtering, or None if no plugin needs them."""


class Sent(Struct, frozen=True, gc=False):
    """A decision to share with peers: `request` went to the endpoint in `slot` at `at_s`."""

    request: InferenceRequest
    slot: int
    at_s: Seconds


class Witness(Protocol):
    """An observer of everything that happens to a scheduler, in order. Its methods must not raise."""

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
    """A scheduler for one pool of endpoints: one profile, the indexes that it reads and the
    requests in flight.
    """

    def __init__(  # noqa: PLR0915  one line per attribute
        self, settings: SchedulerSettings, *, seed: int
    ) -> None:
        self.settings = settings
        self.seed = seed
        self.pool = EndpointPool()
        self.ledger = InflightLedger(self.pool.columns, self._ended)
        self.outliers = Outliers(self.pool.columns)
        """Detector of endpoints that are slower or fail more often than the others, which it can
        eject.
        """
        self.full = FullEndpoints()
        """Endpoints that refused requests because they are full; they receive fewer requests for a
        while.
        """
        self.accuracy = HitAccuracy()
        """Comparison of predicted cache hits with the hits that engines count."""
        self.answer_lengths = AnswerLengths()
        self.outlying: dict[int, Outlier] = {}
        """Causes by slot of the endpoints that were outliers at the last tick."""
        self.failures = PluginFailures()
        """Plugins that failed; decisions continue without them."""
        self._memory_share = 1.0
        self._sizes: dict[int, tuple[int | None, int | None]] = {}
        """Cache size that each engine reports, by slot, if all indexes have accepted it."""
        self.indexes: dict[str, AffinityIndex] = {}
        """Indexes that could be opened."""
        self.shared: dict[str, SharedIndex] = {}
        """Indexes that can be shared with peers, in the order in which they match."""
        self._counting: dict[str, CountsInflight] = {}
        """Indexes that are notified when a request ends."""
        self._measuring: dict[str, MeasuresItself] = {}
        """Indexes that report their size and their hits."""
        self._limited: dict[str, LimitsMemory] = {}
        self.hearing: dict[str, HearsEngines] = {}
        """Indexes that receive KV-cache events from engines."""
        self.lives: dict[int, int] = {}
        """Number of times that the knowledge about a slot's endpoint was dropped, because it left
        or restarted.
        """
        self._asleep: set[int] = set()
        """Slots whose engine is in sleep mode. Maintained only if an index receives KV-cache
        events.
        """
        for name in settings.indexes:
            self._open(name)
        self.replicas_unheard = 0
        """Number of other pickers that serve this pool and do not share their decisions."""
        self.decisions = 0
        self._session_returns = SessionReturns()
        self.shadow: Shadow | None = None
        self.shadow_totals = ShadowTotals()
        self.shadow_failures = PluginFailures()
        self.load_reports = 0
        """Number of load reports read from response headers."""
        self.load_reports_unread = 0
        """Number of load reports ignored: malformed, or their endpoint was never scraped or has
        restarted.
        """
        self.rank_choices: dict[RankChoice, int] = {}
        """Outcomes for requests at endpoints with several ranks; empty if no plugin selects ranks."""
        self.keeps_costs = False
        """True if a reader will request the costs of decisions. The scheduler then stores the costs
        of those decisions for which they cannot be computed later.
        """
        self.sent: deque[Sent] | None = None
        """Decisions to share with peers, oldest first, or None if there are no peers."""
        self.witness: Witness | None = None
        self._random = Random(f"{seed}:picker")  # noqa: S311  not for security
        secret = Random(f"{seed}:segments").getrandbits(64)  # noqa: S311  used for routing only
        self.segments = KnownSegments(secret=secret)
        self._read_profile()

    def __repr__(self) -> str:
        return (
            f"<Scheduler [{self.decisions} decisions, {self.ledger.open_leases} open leases, "
            f"seed {self.seed}] {self.pool!r}>"
        )

    def take(self, given: Input, now: Seconds) -> Effects:
        """Apply one input event to the scheduler's state."""
        effects = _HANDLERS[type(given)](self, given, now) or NO_EFFECTS
        if self.witness is not None:
            self.witness.took(given, effects, now)
        return effects

    def schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        """Choose an endpoint for `request` and count the request as running there from now on."""
        if self.witness is None:
            return self._schedule(request, now)
        self.witness.asked(request)
        decision = self._schedule(request, now)
        self.witness.decided(request, decision, now)
        return decision

    @property
    def may_hold(self) -> bool:
        """Return whether any plugin can delay requests."""
        return bool(self.settings.profile.holders)

    def holds(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether a plugin delays `request` in the waiting line; `schedule` places it all
        the same.

        Return False if no endpoint is ready, because `schedule` then refuses the request at once.
        """
        if not self.may_hold:
            return False
        slots = self.pool.ready(request.subset, now)
        if not len(slots):
            return False
        if self.outliers.ejection.masked:
            slots = self._not_ejected(slots)
        if self.full.by_slot:
            slots, _ = self._with_room(slots, now)
        candidates = self._candidates(slots, {}, request, now)
        return self.settings.profile.holds(request, candidates, self.failures)

    def _replace(self, given: PoolReplaced, now: Seconds) -> None:
        for slot in self.pool.replace(given.endpoints, now):
            self._forget(slot)
        self._set_speeds(now)

    def _observe(self, given: PageScraped, now: Seconds) -> None:
        slot, metrics = given.slot, given.metrics
        if self.pool.observe(slot, metrics, now):
            self._forget(slot)
        size = (metrics.blocks_total, metrics.block_size_tokens)
        self.ledger.scraped(slot, metrics, now)
        self.outliers.observed(slot, metrics, now)
        self.answer_lengths.scraped(slot, metrics)
        correction = self.accuracy.scraped(slot, metrics, now)
        if correction is not None:
            self._correct(correction)
        # Every scrape reports the size, so only a change matters.
        if size != self._sizes.get(slot):
            self._resize(slot, *size)
        if self.hearing:
            self._note_sleep(slot, asleep=metrics.asleep)
            adapters = metrics.adapters
            if adapters is not None and adapters.serves_adapters:
                for name, hearing in self.hearing.items():
                    told = hearing.adapters_told
                    self.failures.call(name, "adapters_told", told, adapters.names)

    def _correct(self, correction: Correction) -> None:
        """Pass on a comparison of predicted hits with an engine's count to the index that made the
        prediction.
        """
        prefix = self.settings.prefix
        # A joint prediction of several indexes does not show which of them was wrong.
        if self._joins:
            return
        corrected: Mapping[str, CorrectedIndex] = self._able(lambda abilities: abilities.corrected)
        if prefix in corrected:
            self.failures.call(prefix, "correct", corrected[prefix].correct, correction)

    def _observe_failure(self, given: ScrapeFailed, now: Seconds) -> None:
        self.pool.observe_failure(given.slot, answered=given.answered)

    def _schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        slots = allowed = self.pool.ready(request.subset, now)
        ready = len(slots)
        if not ready:
            return self._nobody_ready(request)
        if self.outliers.ejection.masked:
            slots = self._not_ejected(slots)
        in_service, full = slots, NO_SLOTS
        if self.full.by_slot:
            slots, full = self._with_room(slots, now)

        affinities: dict[str, Affinity] = {}
        for name, index in self.indexes.items():
            known = self._match(name, index, request, now)
            if known is not None:
                affinities[name] = known
        tokens = request.prompt_tokens
        if self._counts_ids:
            tokens = self._tokens_counted(request, affinities)
        if self._joins:
            known = self._joined(affinities)
            if known is not None:
                affinities[self.settings.prefix] = known
        request = self._at_this_moment(request, affinities, tokens)
        candidates = self._candidates(slots, affinities, request, now)
        if request.priority < 0 and self.settings.saturation.saturation(candidates) >= 1.0:
            return _saturated(f"the pool is saturated and priority {request.priority} may be shed")

        profile = self.settings.profile
        failed_before = self.failures.so_far
        kept = profile.filter(request, candidates, self.failures)
        left = len(kept.candidates)
        if not left and len(full):
            # All endpoints below their limit were dropped by filters, so full endpoints are tried
            # too.
            slots, full = in_service, NO_SLOTS
            candidates = self._candidates(slots, affinities, request, now)
            kept = profile.filter(request, candidates, self.failures)
            left = len(kept.candidates)
        if not left:
            return _nobody_left(kept, len(slots))
        ranked, dropped = self._fresh_first(kept, now)
        if full is not NO_SLOTS:
            dropped = {FULL: full, **dropped}
        if in_service is not allowed and len(in_service) < ready:
            away = allowed[self.pool.columns.ejected[allowed]]
            dropped = {OutlierEjection.type_name: away, **dropped}
        scored = profile.score(request, ranked, self.failures, self._kept_scores)
        picked = profile.pick(scored.total, ranked, self._random, self.decisions, self.failures)
        positions: list[int] = picked.tolist()
        verdict = None
        if self.shadow is not None:
            verdict = self.shadow.judge(
                request,
                Acted(
                    candidates,
                    ranked,
                    scored,
                    positions[0],
                    self.failures.so_far == failed_before,
                ),
                self.decisions,
                lambda kept: self._fresh_first(kept, now)[0],
                self._endpoint,
            )
        offered = _Offered(ready, dropped, candidates if self._request_markers else None)
        return self._assume(request, ranked, scored, positions, offered, verdict, now)

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

    def _release_prefill(self, given: OutputStarted, now: Seconds) -> None:
        self.ledger.first_output(given.lease, now)

    def _move(self, given: ServedBy, now: Seconds) -> Effects:
        """Move the index entries and the lease to the serving endpoint; end them if it is not in
        the pool.
        """
        lease, slot = given.lease, self.pool.slot_at(given.address)
        if lease.slot < 0 or slot == lease.slot:
            return NO_EFFECTS
        request = lease.request
        self.outliers.left(lease)
        if self.ledger.is_live(lease):
            self._withdraw(lease, lease.slot)
            for name in tuple(lease.recorded):
                self._retract(name, lease, lease.slot, now)
        lease.recorded.clear()
        if slot is None:
            lease.matched_blocks = 0
            self.ledger.close(lease, now)
            return Effects(moved=True)
        matched = self._matched_at(request, slot, now)
        for name, index in self.indexes.items():
            self._record(name, index, lease, slot, now)
        if self.sent is not None:
            self.sent.append(Sent(request, slot, now))
        lease.matched_blocks = matched
        uncached = max(0.0, request.prompt_tokens - matched * self.settings.block_tokens)
        if lease.expected is not None:
            predicted = predicted_tokens(matched, self.settings.block_tokens, request.prompt_tokens)
            lease.expected = expected = structs.replace(
                lease.expected, predicted_tokens=predicted, indexes=NO_INDEXES
            )
            self.accuracy.decided(slot, request.model, expected)
        self.ledger.move(lease, slot, uncached, now)
        self.outliers.ejection.sent(lease)
        if self.full.by_slot:
            self.full.sent(slot, now)
        return Effects(moved=True)

    def endpoint_of(self, lease: Lease) -> Endpoint | None:
        """Return the endpoint of the request of `lease`, or None if the request ended or the
        endpoint left or restarted.
        """
        return self._endpoint(lease.slot) if self.ledger.is_live(lease) else None

    def _end(self, given: RequestEnded, now: Seconds) -> Effects:
        lease, outcome = given.lease, given.outcome
        slot = lease.slot
        if slot < 0:
            return NO_EFFECTS
        set_aside = None
        live = self.ledger.is_live(lease)
        if live:
            self.outliers.ended(lease, outcome, now)
            if outcome.status is not None and self._responded(lease, outcome, outcome.status, now):
                set_aside = self._endpoint(slot)
        if outcome.ending is Ending.UNSEEN:
            self.ledger.close_later(lease, now, self.settings.lease_ttl_without_response_phase_s)
        else:
            self.ledger.close(lease, now, answered=outcome.answered)
        if live and outcome.unserved:
            self._unlearn(lease, slot, now)
        return NO_EFFECTS if set_aside is None else Effects(set_aside=set_aside)

    def _responded(self, lease: Lease, outcome: Outcome, status: int, now: Seconds) -> bool:
        """Record the status of a response. Return whether it excludes the endpoint until its next
        good scrape.
        """
        if status in MAY_BE_FULL and outcome.full:
            self.full.refused(lease.slot, lease.opened_at_s, outcome.retry_after_s, now)
            return False
        if self.full.by_slot and status < 300:
            self.full.served(lease.slot, lease.opened_at_s)
        return self.pool.responded(lease.slot, status, now, by_gateway=outcome.by_gateway)

    def _unlearn(self, lease: Lease, slot: int, now: Seconds) -> None:
        """Undo what was assumed for `lease` at `slot`, because its prompt was not computed there."""
        self._withdraw(lease, slot)
        for name in self.settings.beliefs:
            self._retract(name, lease, slot, now)

    def _expected(
        self, request: InferenceRequest, matched: int, position: int, candidates: Candidates
    ) -> Expected:
        """Return the cache hit that is predicted for the candidate at `position`."""
        settings, tokens = self.settings, request.prompt_tokens
        expected = Expected(
            prompt_tokens=tokens,
            predicted_tokens=predicted_tokens(matched, settings.block_tokens, tokens),
            prompt_bytes=_bytes_of(request),
            prompts=request.prompt_count,
        )
        if not self._joins:
            return expected
        indexes: dict[str, int] = {}
        for name in settings.joined[1:]:
            known = candidates.affinity(name)
            indexes[name] = tokens * known.matched.item(position) // max(1, known.total)
        return structs.replace(expected, indexes=indexes)

    def _costs(
        self, request: InferenceRequest, candidates: Candidates, scored: Scored, picked: int
    ) -> tuple[Cost, ...]:
        """Return the costs of the chosen endpoint and the runner-up, by each scorer that computes
        costs.

        A scorer that fails is counted and left out.
        """
        second = runner_up_of(scored, picked)
        positions = (picked,) if second is None else (picked, second)
        told: list[Cost] = []
        for name, teller in zip(self._scorer_names, self._tellers, strict=True):
            if teller is not None:
                try:
                    told.append(cost_of(name, teller, request, candidates, positions))
                except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                    self.failures.raised(name, "cost_parts", error)
        return tuple(told)

    def _withdraw(self, lease: Lease, slot: int) -> None:
        if lease.expected is not None:
            self.accuracy.withdrawn(slot, lease.expected, lease.opened_at_s)

    def _configure(self, given: Reconfigured, now: Seconds) -> Effects:
        settings = given.settings
        restarted: list[str] = []
        self._sizes.clear()
        before, self.indexes = self.indexes, {}
        self.settings = settings
        self.failures.retain(settings.plugin_names)
        for name, index_settings in settings.indexes.items():
            known = before.get(name)
            if known is not None and self._adopt(name, index_settings, known):
                self.indexes[name] = known
            else:
                restarted.append(name)
                self._open(name)
        self._read_abilities()
        self._set_speeds(now)
        self._read_profile()
        return Effects(restarted=tuple(restarted))

    def standings(self, now: Seconds) -> dict[int, Standing]:
        """Return, by slot, whether each endpoint is preferred for new requests, and the reason if
        not.
        """
        return self.pool.standings(now, self.settings.metrics_staleness_s)

    def index_standings(self) -> list[IndexStanding]:
        """Return the state of every configured index, in the configured order."""
        return [self._index_standing(name) for name in self.settings.indexes]

    def held(self, request: InferenceRequest, endpoint: Endpoint) -> Held | None:
        """Return how much of the first prompt of `request` the engine of `endpoint` reported as
        cached.

        `request` is the prompt-free request of a lease. Return None if no index receives the
        engine's events, or if the amount is unknown.
        """
        slot = self.pool.slot_of(endpoint)
        if slot is None:
            return None
        for name, hearing in self.hearing.items():
            try:
                return hearing.held(request, slot)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "held", error)
        return None

    def tell_peers(self) -> None:
        """Collect decisions for peers in `sent` from now on, and count the requests that peers have
        in flight.
        """
        self.sent = deque(maxlen=SENT_MAX)
        self.pool.columns.peers = PeerLoads()

    def share(self, name: str, request: InferenceRequest) -> Sequence[bytes]:
        """Return the keys of the shared index `name` for `request`, or () if the index fails."""
        try:
            return self.shared[name].share(request)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "share", error)
            return ()

    def _learn(self, given: PeerRecorded, now: Seconds) -> None:
        learn = self.shared[given.index].learn
        self.failures.call(given.index, "learn", learn, given.keys, given.slot, given.stamp, now)
        if given.index == next(iter(self.shared)):
            self.accuracy.peer_decided(given.slot, given.stamp)

    def _note_unheard(self, given: PeersUnheard, now: Seconds) -> None:
        self.replicas_unheard = given.replicas

    def _hear(self, given: EventsHeard, now: Seconds) -> Effects:
        heard: Heard | None = None
        for name, hearing in self.hearing.items():
            try:
                said = hearing.hear(given.slot, given.events, now, rank=given.rank)
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "hear", error)
            else:
                heard = heard or said
        return Effects(heard=heard)

    def _note_sleep(self, slot: int, *, asleep: bool) -> None:
        """Clear the engine's cached blocks when it starts to sleep.

        A sleeping engine drops its cache, but its KV-cache events report that only with its next
        request.
        """
        if not asleep:
            self._asleep.discard(slot)
        elif slot not in self._asleep:
            self._asleep.add(slot)
            for name, hearing in self.hearing.items():
                self.failures.call(name, "clear", partial(hearing.clear, rank=None), slot)

    def _change_blocks(self, given: BlocksChanged, now: Seconds) -> None:
        for name, hearing in self.hearing.items():
            if given.cleared:
                clear = partial(hearing.clear, rank=given.rank)
                self.failures.call(name, "clear", clear, given.slot)
            change = partial(hearing.change, rank=given.rank)
            told = (given.slot, given.changes, given.engine_block_tokens)
            self.failures.call(name, "change", change, *told)

    def _change_stream(self, given: StreamChanged, now: Seconds) -> None:
        for name, hearing in self.hearing.items():
            self._set_stream(name, hearing, given)

    def _set_stream(self, name: str, hearing: HearsEngines, given: StreamChanged) -> None:
        def change() -> None:
            hearing.set_stream(given.slot, given.state, complete=given.complete, rank=given.rank)

        self.failures.call(name, "set_stream", change)

    def _void_events(self, given: EventsVoided, now: Seconds) -> None:
        for name, hearing in self.hearing.items():
            silence = partial(hearing.silence, rank=given.rank)
            self.failures.call(name, "silence", silence, given.slot)

    def _limit_memory(self, given: IndexMemoryLimited, now: Seconds) -> None:
        self._memory_share = given.share
        for name in self.indexes:
            self._limit(name)

    def _limit(self, name: str) -> None:
        limited = self._limited.get(name)
        if limited is not None:
            self.failures.call(name, "limit_memory", limited.limit_memory, self._memory_share)

    def _tick(self, given: Tick, now: Seconds) -> None:
        self.ledger.close_due(now)
        self.outliers.tick(now)
        self.full.tick(now)
        self.answer_lengths.tick()
        self.outlying = dict(self.outliers.detected(now))
        for name, index in self.indexes.items():
            self.failures.call(name, "expire", index.expire, now)

    def _set_speeds(self, now: Seconds) -> None:
        """Set the prefill speed of each endpoint in the ledger."""
        settings = self.settings
        self.pool.columns.prefill_alike = not settings.labelled_speeds
        speed = settings.prefill_tokens_per_s
        for slot, endpoint in self.pool.endpoints():
            if settings.labelled_speeds:
                speed = speed_by_labels(
                    endpoint.labels, settings.labelled_speeds, settings.prefill_tokens_per_s
                )
            self.ledger.set_speed(slot, speed, now)

    def _read_profile(self) -> None:
        """Derive from the settings what every decision would otherwise derive again."""
        profile = self.settings.profile
        prefix = self.settings.indexes.get(self.settings.prefix)
        self._counts_ids = prefix is not None and prefix.abilities.reads_token_ids
        self._joins = len(self.settings.joined) > 1
        self._scorer_names = tuple(scorer.name for scorer in profile.scorers)
        self._markers = profile.markers(self.failures)
        self._request_markers = profile.request_markers(self.failures)
        self._rank_chooser = profile.rank_chooser(self.failures)
        if self._rank_chooser is not None:
            self.rank_choices = dict.fromkeys(RankChoice, 0) | self.rank_choices
        self._tellers = profile.tellers
        self.outliers.configure(self.settings.ejection)
        self._kept_scores = KeptScores.of(profile.scorers)
        self._by_sessions = next(
            (
                (scorer.name, cast("GoesBySessions", scorer.plugin))
                for scorer in profile.scorers
                if scorer.plugin.abilities.goes_by_sessions
            ),
            None,
        )
        shadow = self.settings.shadow
        self.shadow_failures.retain(() if shadow is None else shadow.plugin_names)
        self.shadow = None
        if shadow is not None:
            self.shadow = Shadow(
                shadow,
                acting=profile,
                seed=self.seed,
                share=self.settings.shadow_share,
                block_tokens=self.settings.block_tokens,
                totals=self.shadow_totals,
                failures=self.shadow_failures,
            )

    def _note_session(self, name: str, scorer: GoesBySessions, request: InferenceRequest) -> None:
        try:
            session = scorer.session_of(request)
            if session:
                self._session_returns.note(session)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "session_of", error)

    # Calls to indexes, and the reaction to their failures.

    def _open(self, name: str) -> None:
        """Open a new, empty index `name`. If that fails, the scheduler continues without it."""
        self._sizes.clear()
        try:
            settings = self.settings.indexes[name]
            index = settings.open()
            missing = missing_verbs(settings.abilities, index)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "open", error)
        else:
            if not missing:
                self.indexes[name] = index
                self._read_abilities()
                self._limit(name)
                return
            fault = f"{type(index).__name__}, expected an index with {', '.join(missing)}"
            self.failures.returned(name, "open", fault)
        self.indexes.pop(name, None)
        self._read_abilities()

    def _read_abilities(self) -> None:
        """Sort the open indexes by the abilities that their settings declare."""
        self.shared = self._able(lambda abilities: abilities.shares)
        self._measuring = self._able(lambda abilities: abilities.measures)
        self._counting = self._able(lambda abilities: abilities.counts_inflight)
        self._limited = self._able(lambda abilities: abilities.limits_memory)
        self.hearing = self._able(lambda abilities: abilities.hears_engines)

    def _able(self, ability: Callable[[Abilities], bool]) -> dict[str, Any]:
        """Return the open indexes with one of the abilities in `VERBS`, whose methods `_open`
        checked.
        """
        settings = self.settings.indexes
        return {
            name: index for name, index in self.indexes.items() if ability(settings[name].abilities)
        }

    def _index_standing(self, name: str) -> IndexStanding:
        settings: Any = self.settings.indexes[name]
        measures, measuring = None, self._measuring.get(name)
        if measuring is not None:
            try:
                measures = measuring.measures()
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                self.failures.raised(name, "measures", error)
        return IndexStanding(
            name=name,
            type_name=settings.type_name,
            origin=settings.abilities.origin,
            is_open=name in self.indexes,
            memory_max_bytes=settings.memory_max_bytes
            if settings.abilities.limits_memory
            else None,
            measures=measures,
        )

    def _adopt(self, name: str, settings: AffinityIndexSettings, index: AffinityIndex) -> bool:
        try:
            return bool(settings.adopt(index))
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "adopt", error)
            return False

    def _match(
        self, name: str, index: AffinityIndex, request: InferenceRequest, now: Seconds
    ) -> Affinity | None:
        """Return the index's match for `request`, or None if the index fails; it then prefers no
        endpoint.
        """
        slots = len(self.pool.columns.endpoints)
        try:
            known = index.match(request, slots, now)
            fault = affinity_fault(known, slots)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "match", error)
            return None
        if fault:
            self.failures.returned(name, "match", fault)
            return None
        return known

    def _tokens_counted(self, request: InferenceRequest, affinities: Mapping[str, Affinity]) -> int:
        """Return the prompt tokens of `request`, counted in the unit of the default prefix index.

        `affinities` are the matches of the indexes before any are joined.
        """
        known = affinities.get(self.settings.prefix)
        if known is None or not known.total:
            # An index that answers in place of the default prefix index counts bytes.
            return request.prompt_tokens
        return request.known_tokens or request.prompt_tokens

    def _at_this_moment(
        self, request: InferenceRequest, affinities: Mapping[str, Affinity], tokens: int
    ) -> InferenceRequest:
        prefix = affinities.get(self.settings.prefix)
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
            request, moment=moment, prompt_tokens=tokens, prompt_bytes=_bytes_of(request)
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

    def _not_ejected(self, slots: Ints) -> Ints:
        """Return `slots` without ejected endpoints, or all of `slots` if every endpoint is ejected."""
        left = slots[~self.pool.columns.ejected[slots]]
        return left if len(left) else slots

    def _with_room(self, slots: Ints, now: Seconds) -> tuple[Ints, Ints]:
        """Return `slots` without full endpoints, and the full ones. If all are full, return all and
        none.
        """
        full = self.full.without_room(slots, now)
        if not len(full) or len(full) == len(slots):
            return slots, NO_SLOTS
        return slots[~np.isin(slots, full)], full

    def _fresh_first(self, kept: Kept, now: Seconds) -> tuple[Candidates, dict[str, Ints]]:
        """Leave out stale endpoints if any fresh one is left, and unreachable ones if any other is
        left.
        """
        if self.pool.all_observed_since(now - self.settings.metrics_staleness_s):
            return kept.candidates, kept.dropped
        unreachable = self.pool.columns.unreachable[kept.candidates.slot]
        stale = kept.candidates.metrics_age_s > self.settings.metrics_staleness_s
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

    def _assume(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        scored: Scored,
        picked: list[int],
        offered: _Offered,
        verdict: ShadowVerdict | None,
        now: Seconds,
    ) -> Decision:
        """Record the choice in the same step that makes it, so that the next decision sees it."""
        first = picked[0]
        slot = candidates.slot.item(first)
        costs = None
        if self.keeps_costs:
            columns = self.pool.columns
            load = columns.last_load
            # A cost depends on more than the stored numbers of two endpoints in these cases: a
            # scorer uses the median of other endpoints if a report is missing or old. The code is
            # inlined, because every request runs it.
            if (
                columns.adapters_reported
                or self.replicas_unheard
                or now - columns.observed_since_s > FRESH_S_MAX
                or (load is not None and not load[2].complete)
            ):
                costs = self._costs(request, candidates, scored, first)
        matched, total = candidates.prefix_match(first)
        uncached = float(request.prompt_tokens - matched * self.settings.block_tokens)
        if uncached < 0.0:  # noqa: PLR1730  a comparison is faster than a call
            uncached = 0.0
        lease = self.ledger.open(
            request, slot, matched_blocks=matched, prefill_tokens=uncached, now=now
        )
        self.outliers.ejection.sent(lease)
        if self.full.by_slot:
            self.full.sent(slot, now)
        fallbacks: tuple[Endpoint, ...] = ()
        if self.settings.fallback_endpoints_max:
            fallbacks = self._fallbacks(candidates, scored, picked)
        rank = None
        if self._rank_chooser is not None:
            rank = self._rank_of(self._rank_chooser, lease, fallbacks, now)
        lease.expected = expected = self._expected(request, matched, first, candidates)
        self.accuracy.decided(slot, request.model, expected)
        for name, index in self.indexes.items():
            self._record(name, index, lease, slot, now)
        if self._by_sessions is not None:
            self._note_session(*self._by_sessions, request)
        kept = lease.request = request.without_prompts()
        if self.sent is not None:
            self.sent.append(Sent(kept, slot, now))
        self.decisions += 1
        leg = Leg(
            endpoint=self._endpoint(slot),
            fallbacks=fallbacks,
            ready=offered.ready,
            dropped=offered.dropped,
            candidates=candidates,
            picked=first,
            scorers=self._scorer_names,
            scored=scored,
            tellers=self._tellers,
            lease=lease,
            matched_blocks=matched,
            total_blocks=total,
            block_tokens=self.settings.block_tokens,
            rank=rank,
            costs=costs,
        )
        account = Account(number=self.decisions, request=kept, legs=(leg,), shadow=verdict)
        return Decision(
            account=account,
            leg=leg,
            markers=self._markers,
            request_markers=self._request_markers,
            offered=offered.candidates,
            rank_chooser=self._rank_chooser,
        )

    def _rank_of(
        self,
        chooser: RankChooser,
        lease: Lease,
        fallbacks: Sequence[Endpoint],
        now: Seconds,
    ) -> int | None:
        """Return the rank that must serve `lease`, and count the request there; None if the engine
        chooses.
        """
        name, index = next(iter(self.hearing.items()), ("", None))
        if index is None:
            return None
        try:
            ranks = index.ranks_at(lease.slot)
            if ranks < 2:
                return None
            rank, choice = self._choose_rank(chooser, name, index, lease, now)
            # An engine refuses a rank that it does not have. A fallback endpoint receives the same
            # headers as the endpoint that was picked.
            if rank is not None and rank >= self._fewest_ranks(index, fallbacks, ranks):
                rank, choice = None, RankChoice.FALLBACK
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "held_by_ranks", error)
            rank, choice = None, RankChoice.FAILED
        self.rank_choices[choice] += 1
        if rank is not None:
            self.ledger.place(lease, rank)
        return rank

    def _choose_rank(
        self, chooser: RankChooser, name: str, index: HearsEngines, lease: Lease, now: Seconds
    ) -> tuple[int | None, RankChoice]:
        held = index.held_by_ranks(lease.request, lease.slot, now)
        tokens = [blocks * self._block_tokens_of(name) for blocks in held]
        return chooser.choose(tokens, self.ledger.sent_to_ranks(lease.slot, len(tokens)))

    def _fewest_ranks(self, index: HearsEngines, endpoints: Sequence[Endpoint], ranks: int) -> int:
        """Return the smallest number of ranks among `endpoints`, at most `ranks`."""
        slots = [self.pool.slot_of(endpoint) for endpoint in endpoints]
        return min((index.ranks_at(slot) for slot in slots if slot is not None), default=ranks)

    def _fallbacks(
        self, candidates: Candidates, scored: Scored, picked: list[int]
    ) -> tuple[Endpoint, ...]:
        """Return fallback endpoints: the picker's other choices, then the best of the rest."""
        wanted = self.settings.fallback_endpoints_max
        order = picked[1:] + np.argsort(-scored.total, kind="stable").tolist()
        others = list(dict.fromkeys(at for at in order if at != picked[0]))
        return tuple(self._endpoint(int(candidates.slot[at])) for at in others[:wanted])

    def _endpoint(self, slot: int) -> Endpoint:
        endpoint = self.pool.columns.endpoints[slot]
        assert endpoint is not None, f"slot {slot} is empty"
        return endpoint

    def _joined(self, affinities: Mapping[str, Affinity]) -> Affinity | None:
        """Return the joint match of the indexes that fill `matched_blocks`, or None if all of them
        failed.
        """
        names = self.settings.joined or (self.settings.prefix,)
        known = [affinities[name] for name in names if name in affinities]
        if not known:
            return None
        return joined(known, [self._block_tokens_of(name) for name in names if name in affinities])

    def _block_tokens_of(self, name: str) -> int:
        counting: Any = self.settings.indexes[name]
        tokens: int = counting.block_tokens
        return tokens

    def _matched_at(self, request: InferenceRequest, slot: int, now: Seconds) -> int:
        """Return the number of blocks of `request` that the endpoint in `slot` is estimated to have
        cached.
        """
        affinities = {
            name: known
            for name in self.settings.joined or (self.settings.prefix,)
            if name in self.indexes
            and (known := self._match(name, self.indexes[name], request, now)) is not None
        }
        known = self._joined(affinities)
        return 0 if known is None else int(known.matched[slot])

    def _record(
        self, name: str, index: AffinityIndex, lease: Lease, slot: int, now: Seconds
    ) -> None:
        """Record in an index that the request of `lease` goes to `slot`, and store what undoes
        that.
        """
        try:
            hearing = None if lease.rank < 0 else self.hearing.get(name)
            if hearing is None:
                recorded = index.record(lease.request, slot, now)
            else:
                recorded = hearing.record(lease.request, slot, now, rank=lease.rank)
            lease.recorded[name] = index, recorded
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(name, "record", error)

    def _retract(self, name: str, lease: Lease, slot: int, now: Seconds) -> None:
        """Undo what the index `name` recorded for `lease`, unless the index was reset since then."""
        index, recorded = lease.recorded.pop(name, (None, None))
        known = self.indexes.get(name)
        if known is not None and known is index:
            self.failures.call(name, "retract", known.retract, lease.request, slot, recorded, now)

    def _ended(self, lease: Lease, now: Seconds) -> None:
        for name, counting in self._counting.items():
            index, recorded = lease.recorded.get(name, (None, None))
            if counting is index:
                given = (lease.request, lease.slot, recorded, now)
                self.failures.call(name, "release", counting.release, *given)

    def _resize(self, slot: int, blocks_total: int | None, block_size_tokens: int | None) -> None:
        """Report a cache size to every index. If one of them fails, the next scrape reports it
        again.
        """
        if not (blocks_total and block_size_tokens):
            return
        took = [
            self.failures.call(name, "resize", index.resize, slot, blocks_total, block_size_tokens)
            for name, index in self.indexes.items()
        ]
        if all(took):
            self._sizes[slot] = (blocks_total, block_size_tokens)

    def _forget(self, slot: int) -> None:
        self._sizes.pop(slot, None)
        self.lives[slot] = self.lives.get(slot, 0) + 1
        self.ledger.forget(slot)
        self.outliers.forget(slot)
        self.full.forget(slot)
        self.accuracy.forget(slot)
        self.answer_lengths.forget(slot)
        self.outlying.pop(slot, None)
        self.shadow_totals.picks.pop(slot, None)
        for name, index in tuple(self.indexes.items()):
            if not self.failures.call(name, "forget", index.forget, slot):
                # The index would apply the knowledge about the old endpoint to the next one in this
                # slot.
                self._open(name)

    def _nobody_ready(self, request: InferenceRequest) -> Refusal:
        members = len(self.pool)
        where = "" if request.subset is None else " in the subset that the gateway allows"
        return Refusal(
            reason=RefusalReason.NO_ENDPOINTS,
            status=503,
            message=f"no endpoint{where} is ready: 0 of {members}",
        )


_HANDLERS: Final[Mapping[type[Input], Callable[..., Effects | None]]] = {
    PoolReplaced: Scheduler._replace,
    PageScraped: Scheduler._observe,
    ScrapeFailed: Scheduler._observe_failure,
    LoadReported: Scheduler._read_load,
    OutputStarted: Scheduler._release_prefill,
    ServedBy: Scheduler._move,
    RequestEnded: Scheduler._end,
    Reconfigured: Scheduler._configure,
    IndexMemoryLimited: Scheduler._limit_memory,
    PeerRecorded: Scheduler._learn,
    PeersUnheard: Scheduler._note_unheard,
    EventsHeard: Scheduler._hear,
    BlocksChanged: Scheduler._change_blocks,
    StreamChanged: Scheduler._change_stream,
    EventsVoided: Scheduler._void_events,
    Tick: Scheduler._tick,
}


def _bytes_of(request: InferenceRequest) -> int:
    """Return the size of all prompts of `request`."""
    return request.prompt_bytes or request.prompt_tokens * BYTES_PER_TOKEN


def _saturated(message: str, eliminated: Mapping[str, int] | None = None) -> Refusal:
    return Refusal(
        reason=RefusalReason.SATURATED, status=429, message=message, eliminated=eliminated or {}
    )


def _nobody_left(kept: Kept, ready: int) -> Refusal:
    dropped = ", ".join(f"{count} by {name}" for name, count in kept.eliminated.items())
    message = f"no endpoint is left: 0 of {ready} after dropping {dropped}"
    if kept.shed_by:
        return _saturated(message, kept.eliminated)
    return Refusal(
        reason=RefusalReason.NO_ENDPOINTS,
        status=503,
        message=message,
        eliminated=kept.eliminated,
    )
