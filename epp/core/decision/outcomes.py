"""The judgement of endpoints by the responses and the ends of the requests that they served."""

from collections.abc import Sequence

from epp.core.decision.inputs import (
    NO_EFFECTS,
    Effects,
    OutputStarted,
    RequestEnded,
    ResponseStarted,
)
from epp.core.decision.pool_state import PoolState
from epp.core.decision.stages import PrefillEnd
from epp.core.knowledge.inflight import MAY_BE_FULL, Ending, Lease, Outcome
from epp.core.types import Endpoint, Seconds


class Outcomes:
    """A judge of endpoints by the requests that they serve: it closes leases, learns speeds and
    failures, and sets endpoints aside.
    """

    def __init__(self, state: PoolState) -> None:
        self._state = state

    def response_started(self, given: ResponseStarted, now: Seconds) -> None:
        """End the prefill of a request at its response headers, if the settings say that the headers
        mark the end of a prefill.
        """
        if self._state.settings.stages.prefill_end is PrefillEnd.HEADERS:
            self._end_prefill(given.lease, now)

    def output_started(self, given: OutputStarted, now: Seconds) -> None:
        """Record the first output of a request: it ends the prefill, closes the leases of prefill
        and encode endpoints, and corrects the predicted latency.
        """
        state, lease = self._state, given.lease
        if lease.earlier:
            self._end_prefill(lease, now)
        if state.latency is not None:
            self._learn_first_output(lease, now)
        state.ledger.first_output(lease, now)

    def ended(self, given: RequestEnded, now: Seconds) -> Effects:
        """Close the leases of a request, and judge its endpoints by its outcome. Do nothing if its
        lease is closed.

        If the gateway did not show the response, the leases close when the request has probably
        ended. If the prompt was not computed, undo what the indexes recorded of it.
        """
        state, lease, outcome = self._state, given.lease, given.outcome
        slot = lease.slot
        if slot < 0:
            return NO_EFFECTS
        set_aside = None
        live = state.ledger.is_live(lease)
        if live and state.latency is not None:
            self._learn_end(lease, outcome, now)
        if lease.earlier:
            set_aside = self._end_together(lease, outcome, now)
        elif live:
            state.outliers.ended(lease, outcome, now)
            if outcome.status is not None and self._responded(lease, outcome, outcome.status, now):
                set_aside = state.pool.endpoint_in(slot)
        if outcome.ending is Ending.UNSEEN:
            ttl_s = state.settings.lease_ttl_without_response_phase_s
            state.ledger.close_later(lease, now, ttl_s)
        else:
            state.ledger.close(lease, now, answered=outcome.answered)
        if live and outcome.unserved:
            self._not_computed(lease, slot, now)
        return NO_EFFECTS if set_aside is None else Effects(set_aside=set_aside)

    def tick(self, now: Seconds) -> None:
        """Close leases whose time is over. Judge the responses 503 of requests that several endpoints
        served: pages now tell which endpoint was full, or else one of them failed.
        """
        state = self._state
        state.ledger.close_due(now)
        for refused in state.refused_pairs.due(state.outliers.rejections_of, now):
            for slot in refused.full:
                state.full.refused(slot, refused.sent_at_s, None, now)
            if not refused.full:
                self._blame_pair(refused.slots, now)

    def _end_prefill(self, lease: Lease, now: Seconds) -> None:
        """Close the leases of the prefill and encode endpoints of a request, and count it as a
        success of all its endpoints, because its response headers or its first output arrived.
        """
        state = self._state
        present = self._present(lease)
        state.pairs.succeeded([one.slot for one in present])
        for one in present:
            if one.probe and one is not lease:
                state.outliers.passed(one, now)
        state.ledger.close_earlier(lease, now)

    def _present(self, lease: Lease) -> list[Lease]:
        """Return the open leases of the request of `lease` whose endpoints have neither left nor
        restarted since.
        """
        is_live = self._state.ledger.is_live
        return [one for one in (lease, *lease.earlier) if is_live(one)]

    def _learn_first_output(self, lease: Lease, now: Seconds) -> None:
        """Compare the predicted time to first token with the first output of `lease`.

        The first chunk of an answer that is not streamed is its end, and says nothing about this
        time.
        """
        state, placed = self._state, lease.latency
        fresh = lease.first_output_at_s is None and lease.request.stream
        if state.latency is None or placed is None or not fresh:
            return
        if state.ledger.is_live(lease):
            state.latency.first_output(lease.slot, placed, now - lease.opened_at_s)

    def _learn_end(self, lease: Lease, outcome: Outcome, now: Seconds) -> None:
        """Compare the predicted time per output token with a complete, streamed answer. Do nothing
        if the answer has fewer than two tokens, or if these are not counted.
        """
        latency = self._state.latency
        placed, first_s, tokens = lease.latency, lease.first_output_at_s, outcome.output_tokens
        if placed is None or first_s is None or tokens is None or tokens < 2:
            return
        if latency is not None and outcome.answered and lease.request.stream:
            latency.ended(lease.slot, placed, (now - first_s) / (tokens - 1))

    def _not_computed(self, lease: Lease, slot: int, now: Seconds) -> None:
        """Undo what was recorded of the request of `lease` at the endpoint in `slot`, which did not
        compute its prompt. The lease may be closed.
        """
        state = self._state
        state.accuracy.withdrawn(slot, lease.expected, lease.opened_at_s)
        state.indexes.undo(lease, slot, now, state.settings.beliefs)

    def _end_together(self, lease: Lease, outcome: Outcome, now: Seconds) -> Endpoint | None:
        """Apply the outcome of the request of `lease` to the endpoints that served it together.

        Return the endpoint that is set aside because of it, or None. A status of 500 or more may be
        that of any of them, so none is blamed before it failed with two different partners. A
        refusal for lack of capacity may be that of any of them too, and only ends their probes.
        """
        state, present = self._state, self._present(lease)
        earlier = [one for one in present if one is not lease]
        status = outcome.status
        failed = status is not None and status >= 500 and not outcome.full
        if outcome.unserved:
            for one in earlier:
                self._not_computed(one, one.slot, now)
        unclear = (failed or outcome.full) and not outcome.by_gateway
        for one in present if unclear else earlier:
            state.outliers.left(one)
        if unclear:
            return self._blame(present, lease, status, now) if failed else None
        if not state.ledger.is_live(lease):
            return None
        state.outliers.ended(lease, outcome, now)
        if status is not None and self._responded(lease, outcome, status, now):
            return state.pool.endpoint_in(lease.slot)
        return None

    def _blame(
        self, present: list[Lease], lease: Lease, status: int | None, now: Seconds
    ) -> Endpoint | None:
        """Find the endpoint that explains the failure of the request of `lease`. Eject it, and set
        it aside in the pool, each if its own limits allow it. Return the endpoint if it is newly set
        aside, else None.

        `present` are the open leases of the request whose endpoints have neither left nor restarted
        since. A status 503 waits for the next pages first, if any of the endpoints counts refusals.
        Nothing is blamed if an endpoint of the request has left.
        """
        state = self._state
        # The endpoint at fault may be one that has left.
        if len(present) <= len(lease.earlier):
            return None
        slots = [one.slot for one in present]
        count_of, sent_at_s = state.outliers.rejections_of, lease.opened_at_s
        if status == 503 and state.refused_pairs.wait(slots, count_of, sent_at_s, now):
            return None
        return self._blame_pair(slots, now)

    def _blame_pair(self, slots: Sequence[int], now: Seconds) -> Endpoint | None:
        """Find the endpoints of `slots` that explain their failures. Eject each, and set it aside in
        the pool, each if its own limits allow it. Return the last endpoint that is newly set aside,
        or None.
        """
        state, set_aside = self._state, None
        for slot in state.pairs.failed(slots):
            state.outliers.blame(slot, now)
            if state.pool.set_aside(slot, now):
                set_aside = state.pool.endpoint_in(slot)
        return set_aside

    def _responded(self, lease: Lease, outcome: Outcome, status: int, now: Seconds) -> bool:
        """Record the HTTP status of a response. Return whether it makes the pool set the endpoint
        aside. A refusal for lack of capacity makes the endpoint full
        instead.
        """
        state = self._state
        if status in MAY_BE_FULL and outcome.full:
            state.full.refused(lease.slot, lease.opened_at_s, outcome.retry_after_s, now)
            return False
        if state.full.by_slot and status < 300:
            state.full.served(lease.slot, lease.opened_at_s)
        return state.pool.responded(lease.slot, status, now, by_gateway=outcome.by_gateway)
