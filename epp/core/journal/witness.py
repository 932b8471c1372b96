"""A witness that records the inputs and the decisions of a scheduler, for re-enactment. It may
record the requests of a sample of sessions only.

A record costs a few microseconds per request; hashing and writing happen elsewhere. A witness that
fails does not affect decisions. After its first failure, it records nothing more.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import xxhash

from epp.core.decision.account import Leg
from epp.core.decision.inputs import (
    BlocksChanged,
    Effects,
    EventsHeard,
    EventsVoided,
    Input,
    LoadReported,
    OutputStarted,
    PageScraped,
    PeerRecorded,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ResponseStarted,
    ScrapeFailed,
    ServedBy,
    StreamChanged,
    Tick,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.journal.events import (
    Asked,
    Completed,
    Decided,
    FirstOutput,
    Heard,
    Learnt,
    Note,
    Replaced,
    Reported,
    Rescheduled,
    Responding,
    Scheduled,
    ScheduledLeg,
    Seen,
    Streamed,
    Unanswered,
    Voided,
    member_of,
    plain_event,
)
from epp.core.knowledge.affinity import SESSION_HEADER
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.knowledge.latency import Slo
from epp.core.knowledge.load_report import read_load_report
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, Refusal, Seconds

_BLOCKS_MAX: Final = 2_048
"""Maximum number of recorded blocks of a prompt, used if no index hashes prompts. It is the number
that the default index looks up.
"""
PROMPTS_MAX: Final = 256
"""Maximum number of recorded prompts of one request."""
NAME_CHARACTERS_MAX: Final = 256
"""Maximum length in characters of recorded models, sessions and salts, which clients choose; longer
ones are cut.
"""
_HASHES: Final = 2**64


class Sample:
    """A sample of the requests to record, drawn by whole sessions or whole conversations.

    The key is the session that the client names. Without one, it is the text up to the end of the
    user's first message, which is the same at each turn. Without such a message, it is the first
    block, and without a prompt the request's id. All requests of a session are thus recorded
    together, and a fair part of the content that sessions share remains.
    """

    def __init__(self, share: float, secret: int) -> None:
        """Create a sample of `share` of the sessions, 0 to 1. `secret`, a number of 64 bits,
        determines which ones.
        """
        self.share = share
        self._secret = secret
        self._below = int(share * _HASHES)

    def takes(self, session: str, request: InferenceRequest, block_bytes: int) -> bool:
        """Return whether the sample includes `request`, whose session is `session` or "". Call this
        before its prompt is dropped.
        """
        if self.share >= 1.0:
            return True
        if session:
            family = session.encode("utf-8", "surrogatepass")
        else:
            family = self._opening(request, block_bytes)
        return xxhash.xxh64_intdigest(family, self._secret) < self._below

    def _opening(self, request: InferenceRequest, block_bytes: int) -> bytes:
        opening = request.opening()
        if opening is not None:
            return opening[1].to_bytes(8, "little")
        prompt = request.prompts[0] if request.prompts else b""
        return bytes(prompt[:block_bytes]) or request.request_id.encode("utf-8", "surrogatepass")


class CaptureWitness:
    """A `Witness` of a scheduler that passes notes of inputs and decisions to `tell`. Requests
    outside the sample are left out.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        sample: Sample,
        tell: Callable[[Note], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Create a witness of `scheduler`. `failed` is called once, at the first error of
        this witness or of `tell`.
        """
        self._scheduler = scheduler
        self._sample = sample
        self._tell = tell
        self._witness_failed = failed
        self._numbers: dict[Lease, int] = {}
        """Number of each recorded request that has not ended, by its lease."""
        self._next_number = 0
        self._learnt = 0
        """Number of records that peers shared with this picker since the last tick."""
        self._session: str | None = None
        """Session of the request that is being decided. It is "" if the request names none, and
        None if the request is not recorded.
        """
        self._sessions_named = _sessions_named(scheduler.settings)

    def asked(self, request: InferenceRequest) -> None:
        """Determine whether `request` is recorded, while it still has its prompt. Hash the prompt of
        a recorded request if no index does.
        """
        self._session = self._taken(request)

    def decided(
        self, request: InferenceRequest, decision: Decision | Refusal, now: Seconds
    ) -> None:
        """Record the decision about the request that `asked` received last, if the request is
        recorded.
        """
        session = self._session
        if session is not None:
            self._note(lambda: self._decided(request, session, decision, now))

    def took(self, given: Input, effects: Effects, now: Seconds) -> None:
        """Record the input `given`, without content that must not be written. Inputs about requests
        that are not recorded and new settings are left out, and records of peers are only counted.
        """
        match given:
            case (
                ResponseStarted(lease)
                | OutputStarted(lease)
                | LoadReported(lease)
                | ServedBy(lease)
                | RequestEnded(lease)
            ):
                number = self._numbers.get(lease)
                if number is not None:
                    self._note(lambda: self._followed(number, given, effects, now))
            case PageScraped(slot, metrics):
                self._note(lambda: Seen(now, slot, metrics))
            case ScrapeFailed(slot=slot, answered=answered):
                self._note(lambda: Unanswered(at_s=now, slot=slot, answered=answered))
            case PoolReplaced():
                members = tuple(member_of(*found) for found in self._scheduler.pool.endpoints())
                self._note(lambda: Replaced(at_s=now, members=members))
            case Reconfigured(settings):
                self._sessions_named = _sessions_named(settings)
            case EventsHeard() | BlocksChanged() | StreamChanged() | EventsVoided():
                self._note(lambda: _of_engine(given, effects, now))
            case PeerRecorded():
                self._learnt += 1
            case _:
                self._note(lambda: plain_event(given, now))
        if self._learnt and type(given) is Tick:
            records, self._learnt = self._learnt, 0
            self._note(lambda: Learnt(at_s=now, records=records))

    def _followed(self, number: int, given: Input, effects: Effects, now: Seconds) -> Note | None:
        """Return the note of the input `given` about the recorded request `number`, or None if
        nothing of it is to be recorded.
        """
        match given:
            case ResponseStarted():
                return Responding(at_s=now, request=number)
            case OutputStarted():
                return FirstOutput(at_s=now, request=number)
            case LoadReported(_, header):
                return _reported(number, header, now)
            case ServedBy(lease) if effects.moved:
                return Rescheduled(at_s=now, request=number, slot=lease.slot)
            case RequestEnded(lease, outcome):
                del self._numbers[lease]
                return _ended(number, outcome, now)
        return None

    def _note(self, make: Callable[[], Note | None]) -> None:
        try:
            note = make()
            if note is not None:
                self._tell(note)
        except Exception as error:  # noqa: BLE001  a failing witness must not affect decisions
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Stop recording after a failure, because an incomplete capture is useless."""
        self._tell = _ignored
        self._sample = Sample(0.0, 0)
        self._numbers.clear()
        failed, self._witness_failed = self._witness_failed, _ignored
        failed(error)

    def _taken(self, request: InferenceRequest) -> str | None:
        """Return the session of `request`, "" if it names none, or None if the request is not
        recorded.
        """
        try:
            session = self._session_in(request)
            block_bytes = self._scheduler.settings.block_tokens * BYTES_PER_TOKEN
            if not self._sample.takes(session, request, block_bytes):
                return None
            if not self._scheduler.settings.prefix or self._scheduler.indexes.hearing:
                # No index hashes the prompt, which is dropped afterwards.
                request.chains_of(block_bytes, _BLOCKS_MAX)
        except Exception as error:  # noqa: BLE001  as in `_note`
            self._stop(error)
            return None
        return session

    def _session_in(self, request: InferenceRequest) -> str:
        for session_in in self._sessions_named:
            if session := session_in(request):
                return session
        return request.session_id or request.headers.get(SESSION_HEADER, "")

    def _decided(
        self, request: InferenceRequest, session: str, decision: Decision | Refusal, now: Seconds
    ) -> Decided:
        number = self._next_number
        self._next_number += 1
        asked = Asked(
            request.model[:NAME_CHARACTERS_MAX],
            request.cache_salt[:NAME_CHARACTERS_MAX],
            session[:NAME_CHARACTERS_MAX],
            request.prompt_tokens,
            request.output_tokens_max,
            request.priority,
            request.chains.get(self._scheduler.settings.block_tokens * BYTES_PER_TOKEN, ())[
                :PROMPTS_MAX
            ],
            request.token_chains.get(self._scheduler.settings.block_tokens, ())[:PROMPTS_MAX],
            request.media[0] if request.media else (),
            request.known_tokens,
            Slo.of(request),
        )
        subset = None
        if request.subset is not None:
            subset = tuple(self._scheduler.pool.ready(request.subset, now).tolist())
        account = None if isinstance(decision, Refusal) else decision.account
        leg = None if account is None else account.leg
        event = Scheduled(
            at_s=now,
            request=number,
            slot=-1 if leg is None else leg.lease.slot,
            decision=0 if account is None else account.number,
            matched_blocks=0 if leg is None else leg.matched_blocks,
            ready=0 if leg is None else leg.ready,
            refused=decision.reason.value if isinstance(decision, Refusal) else "",
            api=request.api,
            stream=request.stream,
            subset=subset,
            replicas_unheard=self._scheduler.state.replicas_unheard,
            route="" if account is None or account.route is None else account.route.value,
            uncached_tokens=0 if account is None else account.uncached_tokens,
            earlier=() if account is None else tuple(map(self._leg, account.legs[1:])),
        )
        if leg is not None:
            self._numbers[leg.lease] = number
        return Decided(event, asked)

    def _leg(self, leg: Leg) -> ScheduledLeg:
        slots = map(self._scheduler.pool.slot_of, leg.fallbacks)
        return ScheduledLeg(
            stage=leg.stage,
            slot=leg.lease.slot,
            matched_blocks=leg.matched_blocks,
            others=tuple([slot for slot in slots if slot is not None]),
        )


def _ignored(_: object) -> None:
    pass


def _sessions_named(
    settings: SchedulerSettings,
) -> tuple[Callable[[InferenceRequest], str], ...]:
    """Return the functions with which the configured indexes read the session of a request."""
    indexes: list[Any] = [*settings.indexes.values()]
    return tuple(index.session_in for index in indexes if index.abilities.names_sessions)


def _of_engine(
    given: EventsHeard | BlocksChanged | StreamChanged | EventsVoided,
    effects: Effects,
    now: Seconds,
) -> Note | None:
    """Return the note of an engine's report, without its tokens, or None if the report changed
    nothing.
    """
    match given:
        case EventsHeard(slot=slot, rank=rank):
            heard = effects.heard
            if heard is None or not (heard.cleared or heard.changes):
                return None
            size = heard.engine_block_tokens
            return Heard(now, slot, heard.cleared, size, heard.changes, rank)
        case BlocksChanged(slot, changes, cleared, size, rank):
            return Heard(now, slot, cleared, size, changes, rank)
        case StreamChanged(slot, state, complete, rank):
            return Streamed(at_s=now, slot=slot, state=state, complete=complete, rank=rank)
        case EventsVoided(slot, rank):
            return Voided(at_s=now, slot=slot, rank=rank)


def _ended(number: int, outcome: Outcome, now: Seconds) -> Completed:
    return Completed(
        at_s=now,
        request=number,
        ending=outcome.ending.value,
        status=outcome.status,
        by_gateway=outcome.by_gateway,
        retry_after_s=outcome.retry_after_s,
        output_tokens=outcome.output_tokens,
        cached_tokens=outcome.cached_tokens,
    )


def _reported(number: int, header: str, now: Seconds) -> Reported:
    """Return the event for a load report, with its numbers only, because the header's text may come
    from any server.
    """
    report = read_load_report(header)
    if report is None:
        return Reported(at_s=now, request=number)
    told = (report.waiting_requests, report.running_requests, report.kv_cache_usage)
    waiting, running, usage = (None if math.isnan(value) else value for value in told)
    return Reported(
        at_s=now,
        request=number,
        waiting_requests=waiting,
        running_requests=running,
        kv_cache_usage=usage,
    )
