"""The record of placements: each request counts where it is sent, in the step that chooses it."""

from collections import deque
from typing import Final

from msgspec import Struct, structs

from epp.core.decision.account import Leg, costs_to_keep
from epp.core.decision.choice import Choice, predicted_tokens
from epp.core.decision.inputs import NO_EFFECTS, Effects, ServedBy
from epp.core.decision.pool_state import PoolState
from epp.core.decision.profile import SchedulingProfile, SessionReader
from epp.core.decision.rank_choice import RankChoice, RankChooser
from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.hit_accuracy import NO_INDEXES, expected_hit
from epp.core.knowledge.inflight import Lease
from epp.core.knowledge.peer_load import PeerLoads
from epp.core.knowledge.sessions import SessionReturns
from epp.core.prompt.request import InferenceRequest
from epp.core.types import DECODE, ENCODE, Endpoint, Seconds, Stage

SENT_MAX: Final = 16_384
"""Maximum number of decisions queued for peers; the oldest are dropped when the queue is full."""


class Sent(Struct, frozen=True, gc=False):
    """A decision to share with peers: `request` was sent to the endpoint in `slot` at `at_s`."""

    request: InferenceRequest
    slot: int
    at_s: Seconds
    left_out: tuple[str, ...] = ()
    """Names of the indexes that did not record this decision, so that it is not shared for them."""


class Placements:
    """A recorder of placed requests: in the ledger, in the indexes and statistics, and for peers."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self.keeps_costs = False
        """True if a reader may request the costs of decisions. Costs that cannot be computed later
        are then stored with the decision.
        """
        self.sent: deque[Sent] | None = None
        """Decisions to share with peers, oldest first, or None if this picker does not share with
        peers.
        """
        self.rank_choices: dict[RankChoice, int] = {}
        """Number of requests that were sent to endpoints with several data-parallel ranks that
        report KV events, by the outcome of the choice of the rank. Empty until a configuration has
        a plugin that selects ranks.
        """
        self.rank_chooser: RankChooser | None = None
        """Plugin that selects a data-parallel rank, or None if none is configured."""
        self.session_returns = SessionReturns()
        self._session_reader: SessionReader | None = None

    def configure(self, settings: SchedulerSettings) -> None:
        """Create from `settings` the objects that records of placements use."""
        failures = self._state.failures
        self._session_reader = settings.profile.session_reader(failures)
        self.rank_chooser = settings.profile.rank_chooser(failures)
        if self.rank_chooser is not None:
            self.rank_choices = dict.fromkeys(RankChoice, 0) | self.rank_choices
        abilities = {name: index.abilities for name, index in settings.indexes.items()}
        of_media = tuple(name for name, of in abilities.items() if of.caches_media)
        of_sessions = tuple(name for name, of in abilities.items() if of.names_sessions)
        not_of_media = tuple(name for name in abilities if name not in of_media)
        # An index of sessions records only the endpoint that the gateway sends the request to. An
        # index of media records the endpoint that encodes them.
        self._not_recorded = {
            (Stage.DECODE, False): (),
            (Stage.DECODE, True): of_media,
            (Stage.PREFILL, False): of_sessions,
            (Stage.PREFILL, True): of_media + of_sessions,
            (Stage.ENCODE, False): not_of_media,
            (Stage.ENCODE, True): not_of_media,
        }

    def tell_peers(self) -> None:
        """Begin to collect decisions for peers in `sent`, and to count the requests that peers have
        in flight.
        """
        self.sent = deque(maxlen=SENT_MAX)
        self._state.pool.columns.peers = PeerLoads()

    def not_recorded(self, work: Stage, *, encodes: bool) -> tuple[str, ...]:
        """Return the names of the indexes that do not record the endpoint of the stage `work`.
        `encodes` is True if another endpoint encodes the media of the request.
        """
        return self._not_recorded[work, encodes]

    def place(
        self,
        choice: Choice,
        profile: SchedulingProfile,
        ready: int,
        now: Seconds,
        *,
        stage: Stage = Stage.DECODE,
        prefills: bool = True,
        left_out: tuple[str, ...] = (),
        kept: InferenceRequest | None = None,
    ) -> Leg:
        """Count the request of `choice` at the endpoint that `profile` chose, in the same step that
        chooses it, so that the next decision sees it.

        `ready` is the number of ready endpoints. `prefills` is True if the chosen endpoint computes
        the prompt. Indexes named in `left_out` do not record the choice. `kept` is the request
        without its prompts if another stage has it already, else None. Return the leg at the chosen
        endpoint, whose lease has the request without its prompts.
        """
        state, request = self._state, choice.request
        settings, pool = state.settings, state.pool
        candidates, first = choice.ranked, choice.picked[0]
        slot = choice.slot
        endpoint = pool.columns.endpoints[slot]
        assert endpoint is not None, "a candidate is an endpoint"
        costs = None
        if self.keeps_costs:
            costs = costs_to_keep(profile, request, choice, pool.columns, state.failures, now)
        matched, cached = choice.matched_blocks, choice.cached_tokens
        uncached = float(request.prompt_tokens - cached) if prefills else 0.0
        lease = state.ledger.open(
            request, slot, matched_blocks=matched, prefill_tokens=uncached, now=now, stage=stage
        )
        if stage is not ENCODE:
            lease.expected = expected_hit(request, cached, candidates, first, settings.joined[1:])
        others: list[int] = []
        fallbacks: tuple[Endpoint, ...] = ()
        if settings.fallback_endpoints_max and stage is DECODE:
            others = choice.fallbacks(settings.fallback_endpoints_max)
            fallbacks = tuple(map(pool.endpoint_in, others))
        elif stage is ENCODE:
            fallbacks = tuple(map(pool.endpoint_in, choice.others))
        rank = None
        # The sidecar passes the header on to an endpoint that prefills, whose ranks are others.
        if self.rank_chooser is not None and stage is DECODE and prefills:
            rank = self.rank_chooser.place(
                lease, others, state.indexes, state.ledger, self.rank_choices, now
            )
        self._count(lease, now, left_out)
        if self._session_reader is not None and stage is DECODE:
            session = self._session_reader.session_of(request)
            if session:
                self.session_returns.note(session)
        lease.request = request.without_prompts() if kept is None else kept
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
            total_blocks=choice.total_blocks,
            block_tokens=settings.block_tokens,
            rank=rank,
            costs=costs,
        )

    def also_encode(self, lease: Lease, slot: int, now: Seconds) -> Lease:
        """Count the request of `lease`, whose media an encode endpoint encodes, at a further encode
        endpoint, the one in `slot`. Return the lease there.
        """
        request = lease.request
        other = self._state.ledger.open(
            request, slot, matched_blocks=0, prefill_tokens=0.0, now=now, stage=Stage.ENCODE
        )
        self._count(other, now, self._not_recorded[Stage.ENCODE, True])
        return other

    def move(self, given: ServedBy, now: Seconds) -> Effects:
        """Move the lease and the index entries of a request to the endpoint that serves it. If that
        endpoint is not in the pool, close the lease and undo the entries.
        """
        state = self._state
        lease, slot = given.lease, state.pool.slot_at(given.address)
        if lease.slot < 0 or slot == lease.slot:
            return NO_EFFECTS
        state.outliers.left(lease)
        left_out = self._left_out_by(lease)
        if state.ledger.is_live(lease):
            state.accuracy.withdrawn(lease.slot, lease.expected, lease.opened_at_s)
            state.indexes.undo(lease, lease.slot, now, tuple(lease.recorded))
        lease.recorded.clear()
        if slot is None:
            lease.matched_blocks = 0
            state.ledger.close(lease, now)
            return Effects(moved=True)
        self._place_again(lease, slot, left_out, now)
        return Effects(moved=True)

    def _place_again(
        self, lease: Lease, slot: int, left_out: tuple[str, ...], now: Seconds
    ) -> None:
        """Count the request of `lease` at the endpoint in `slot`, which serves it instead of the
        chosen one.
        """
        state, request = self._state, lease.request
        matched = state.indexes.matched_at(request, slot, len(state.pool.columns.endpoints), now)
        cached = predicted_tokens(matched, state.settings.block_tokens, request.prompt_tokens)
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
        state.ledger.move(lease, slot, uncached, now)
        if sender[0] >= 0:
            state.ledger.receive(lease, float(request.prompt_tokens - cached), sender)
        self._count(lease, now, left_out)
        if self.sent is not None:
            self.sent.append(Sent(request, slot, now, left_out))

    def _count(self, lease: Lease, now: Seconds, left_out: tuple[str, ...] = ()) -> None:
        """Record in the indexes and the statistics that the request of `lease` is sent to its
        endpoint.
        """
        state = self._state
        state.outliers.ejection.sent(lease)
        if state.full.by_slot:
            state.full.sent(lease.slot, now)
        if lease.expected is not None:
            state.accuracy.decided(lease.slot, lease.request.model, lease.expected)
        if state.gate is not None:
            state.gate.sent(lease)
        state.indexes.record(lease, now, left_out)

    def _left_out_by(self, lease: Lease) -> tuple[str, ...]:
        """Return the names of the indexes that must not record the request of `lease`, because they
        are for a stage on which another endpoint works.
        """
        if lease.stage is Stage.DECODE:
            encodes = any(one.stage is Stage.ENCODE for one in lease.earlier)
            return self._not_recorded[Stage.DECODE, encodes]
        return tuple(name for name in self._state.indexes if name not in lease.recorded)
