"""A scheduler that tells of everything that it is told, so that it can be done again.

Telling costs a few microseconds a request; what is told is hashed and written elsewhere. A witness
that fails costs no decision: from the first failure on it is told nothing more.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from epp.core.capture.events import (
    Asked,
    Completed,
    Decided,
    Ended,
    FirstOutput,
    Learnt,
    MemoryLimited,
    Note,
    Replaced,
    Reported,
    Rescheduled,
    Scheduled,
    Seen,
    Ticked,
    Unanswered,
    member_of,
)
from epp.core.decision.scheduler import Decision, Scheduler, SchedulerSettings
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.knowledge.load_report import read_load_report
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, Endpoint, EndpointMetrics, Refusal, Seconds

SESSION_HEADER: Final = "x-session-id"
"""Of clients that name their session, unless an index of the configuration goes by another."""
_BLOCKS_MAX: Final = 2_048
"""Of a prompt where no index hashes it: as many as the default index looks at."""
PROMPTS_MAX: Final = 256
"""Of a request with several; more are not captured."""
NAME_CHARACTERS_MAX: Final = 256
"""Of models, sessions and salts, which clients choose: what is longer is told apart so far."""
_HASHES: Final = 2**64


class Sample:
    """Which requests are captured: whole sessions, else whole conversations.

    By the session that the client names; else by all up to the end of the user's first message,
    which is the same at each turn; else by the first block. What a session shares with itself so
    stays together, and of what sessions share with each other a fair part is left.
    """

    def __init__(self, share: float, secret: int) -> None:
        """`share` of the sessions, 0 to 1; `secret` of 64 bits decides which."""
        self.share = share
        self._secret = secret
        self._below = int(share * _HASHES)

    def takes(self, session: str, request: InferenceRequest, block_bytes: int) -> bool:
        """Asked before the prompt is dropped."""
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


class WitnessedScheduler(Scheduler):
    """A `Scheduler`; `tell` hears what it is told and what it decides."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        seed: int,
        sample: Sample,
        tell: Callable[[Note], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`failed` is called once, if `tell` or what is made for it raises."""
        super().__init__(settings, seed=seed)
        self._sample = sample
        self._tell = tell
        self._witness_failed = failed
        self._numbers: dict[Lease, int] = {}
        """Of the open leases that are captured."""
        self._next_number = 0
        self._learnt = 0
        """What peers told since the last tick."""
        self._session_headers = _session_headers(settings)

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> None:
        super().replace(endpoints, now)
        members = tuple(member_of(slot, endpoint) for slot, endpoint in self.pool.endpoints())
        self._note(lambda: Replaced(at_s=now, members=members))

    def observe(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        super().observe(slot, metrics, now)
        self._note(lambda: Seen(now, slot, metrics))

    def observe_failure(self, slot: int, *, answered: bool) -> None:
        super().observe_failure(slot, answered=answered)
        self._note(lambda: Unanswered(at_s=0.0, slot=slot, answered=answered))

    def schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        session = self._taken(request)
        decision = super().schedule(request, now)
        if session is not None:
            self._note(lambda: self._decided(request, session, decision, now))
        return decision

    def reported(self, lease: Lease, header: str) -> None:
        super().reported(lease, header)
        number = self._numbers.get(lease)
        if number is not None:
            self._note(lambda: _reported(number, header))

    def first_output(self, lease: Lease, now: Seconds) -> None:
        super().first_output(lease, now)
        number = self._numbers.get(lease)
        if number is not None:
            self._note(lambda: FirstOutput(at_s=now, request=number))

    def reschedule(self, lease: Lease, served: str, now: Seconds) -> None:
        slot = self.pool.slot_at(served)
        moves = lease.slot >= 0 and slot != lease.slot
        super().reschedule(lease, served, now)
        number = self._numbers.get(lease)
        if moves and number is not None:
            at = -1 if slot is None else slot
            self._note(lambda: Rescheduled(at_s=now, request=number, slot=at))

    def complete(self, lease: Lease, outcome: Outcome, now: Seconds) -> Endpoint | None:
        set_aside = super().complete(lease, outcome, now)
        number = self._numbers.pop(lease, None)
        if number is not None:
            self._note(lambda: _ended(number, outcome, now))
        return set_aside

    def configure(self, settings: SchedulerSettings, now: Seconds) -> list[str]:
        self._session_headers = _session_headers(settings)
        return super().configure(settings, now)

    def limit_memory(self, share: float) -> None:
        super().limit_memory(share)
        self._note(lambda: MemoryLimited(at_s=0.0, share=share))

    def tick(self, now: Seconds) -> None:
        super().tick(now)
        self._note(lambda: Ticked(at_s=now))
        if self._learnt:
            records, self._learnt = self._learnt, 0
            self._note(lambda: Learnt(at_s=now, records=records))

    def learn(
        self, name: str, keys: Sequence[bytes], slot: int, stamp: Seconds, now: Seconds
    ) -> None:
        super().learn(name, keys, slot, stamp, now)
        self._learnt += 1

    def _note(self, make: Callable[[], Note]) -> None:
        try:
            self._tell(make())
        except Exception as error:  # noqa: BLE001  the boundary of a part that costs what it adds
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Half a story is none: nothing more is told."""
        self._tell = _ignored
        self._sample = Sample(0.0, 0)
        self._numbers.clear()
        failed, self._witness_failed = self._witness_failed, _ignored
        failed(error)

    def _taken(self, request: InferenceRequest) -> str | None:
        """The session of `request`, "" if it names none; None: it is not captured."""
        try:
            session = self._session_of(request)
            block_bytes = self.settings.block_tokens * BYTES_PER_TOKEN
            if not self._sample.takes(session, request, block_bytes):
                return None
            if not self.settings.prefix:
                # No index will, and afterwards the prompt is gone.
                request.chains_of(block_bytes, _BLOCKS_MAX)
        except Exception as error:  # noqa: BLE001  as in `_note`
            self._stop(error)
            return None
        return session

    def _session_of(self, request: InferenceRequest) -> str:
        if request.session_id:
            return request.session_id
        for name in self._session_headers:
            session = request.headers.get(name, "")
            if session:
                return session
        return ""

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
            request.chains.get(self.settings.block_tokens * BYTES_PER_TOKEN, ())[:PROMPTS_MAX],
        )
        subset = None
        if request.subset is not None:
            subset = tuple(self.pool.ready(request.subset, now).tolist())
        routed = decision if isinstance(decision, Decision) else None
        event = Scheduled(
            at_s=now,
            request=number,
            slot=-1 if routed is None else routed.lease.slot,
            decision=0 if routed is None else routed.number,
            matched_blocks=0 if routed is None else routed.matched_blocks,
            ready=0 if routed is None else routed.ready,
            refused=decision.reason.value if isinstance(decision, Refusal) else "",
            api=request.api,
            stream=request.stream,
            subset=subset,
            replicas_unheard=request.replicas_unheard,
        )
        if routed is None:
            return Decided(event, asked, "")
        self._numbers[routed.lease] = number
        return Decided(event, asked, routed.endpoint.name)


def _ignored(_: object) -> None:
    pass


def _session_headers(settings: SchedulerSettings) -> tuple[str, ...]:
    """By which indexes of the configuration tell sessions apart."""
    named = (getattr(index, "header_name", "") for index in settings.indexes.values())
    return tuple(dict.fromkeys([*(name.lower() for name in named if name), SESSION_HEADER]))


def _ended(number: int, outcome: Outcome, now: Seconds) -> Ended:
    event = Completed(
        at_s=now,
        request=number,
        ending=outcome.ending.value,
        status=outcome.status,
        by_gateway=outcome.by_gateway,
    )
    return Ended(event, outcome.output_tokens, outcome.cached_tokens)


def _reported(number: int, header: str) -> Reported:
    """In numbers: the text is the engine's, or whoever's answered for it."""
    report = read_load_report(header)
    if report is None:
        return Reported(at_s=0.0, request=number)
    told = (report.waiting_requests, report.running_requests, report.kv_cache_usage)
    waiting, running, usage = (None if math.isnan(value) else value for value in told)
    return Reported(
        at_s=0.0,
        request=number,
        waiting_requests=waiting,
        running_requests=running,
        kv_cache_usage=usage,
    )
