"""Record recent decisions, refusals and their outcomes in memory.

The record of a request contains its id, model and numbers, the names of flows if it waited in the
queue (which a header may give), and that of a refusal also the path without query. No part of a
prompt, an answer or another header is recorded. Rows for pages are computed on request.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import Struct, structs

from epp.core.decision.account import Leg, Queued, runner_up_of
from epp.core.decision.scheduler import Decision
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.shadow import ShadowVerdict
from epp.core.knowledge.candidates import Candidates, Floats, Ints
from epp.core.knowledge.inflight import Outcome
from epp.core.knowledge.pool import EndpointPool
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.session import Exchange
from epp.core.types import Refusal, Seconds
from epp.journal.decision_record import (
    DECIDED,
    PACKED_FROM,
    REFUSED,
    SERVED,
    Decided,
    DecidedLeg,
    Ended,
    Refused,
    Scores,
    Served,
    end_of,
    ended_head,
    kept_at_s,
    kept_text,
    predicted_at,
    record_of,
    scores_at_of,
    scores_of,
    served_at,
    unpack_decided,
    unpack_refused,
    unpack_scores,
    unpack_served,
)
from epp.journal.decisions import Context
from epp.journal.frames import ended_frame, frame_of
from epp.journal.past import PastDecision, PastRefusal, Setting
from epp.journal.records import (
    SETTINGS_MAX,
    STATES_MAX,
    States,
    ToldSetting,
    ToldStates,
    told_plugin,
)
from epp.shell.operators.decisions.decision_rows import (
    Members,
    Remembered,
    Row,
    expected_first_token_s,
    is_called,
    observed_first_token_s,
    row_of,
)
from epp.shell.operators.decisions.record_ring import RecordRing
from epp.shell.operators.journal import DecisionsFolder

BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum size of all records of decisions in memory, in bytes."""
_SCORES_SHARE: Final = 4
"""Divisor of the memory for records: one fourth of it stores the scores of all candidates, which
only the newest decisions keep.
"""
KEEP_S: Final = 900.0
OUTPUT_TIMES_MAX: Final = 8_192
"""Maximum number of decisions whose observed time per output token is remembered."""
_MEMBERSHIPS_MAX: Final = 64
"""Maximum number of remembered lists of the pool's endpoints, one for each change of the pool; each
list is as long as the pool.
"""
_OPEN_MAX: Final = 65_536
"""Maximum number of decisions whose request may still end; it exceeds the default maximum of open
streams (20,000).
"""
WAITING_MAX: Final = 64
"""Maximum number of decisions, refusals and ends of requests that wait to be recorded.

Recording them together uses the processor's cache better. With its array of scores each takes 40 KB
in a pool of a thousand.
"""
_EXPIRED_PER_CALL_MAX: Final = 2_000
COMPARED_MAX: Final = 8
"""Maximum number of requests whose time to first token is compared with the expectation per call of
`first_tokens`; each takes 0.1 ms.
"""
_FAILED_FROM: Final = 500
_FOUND_PER_TURN: Final = 8
"""Number of rows of decisions that are created between two turns of the event loop."""
_ROWS_PER_TURN: Final = 500
"""Number of records that are examined between two turns of the event loop, which takes well below 1
ms.
"""
_PROFILES_MAX: Final = 8
"""Maximum number of profiles for which the number of their recorded setting is remembered; a
configuration has fewer profiles.
"""
_Known = TypeVar("_Known")
_BY_BLOCKS: Final = "prefix-cache-scorer"
"""Type of the scorer whose score is the share of matched prefix blocks."""


class _Deciding(Struct, frozen=True, gc=False):
    """A decision that waits to be recorded in memory and files."""

    at_s: float
    told: Decided
    picked: int
    slot: Ints
    scores: Floats
    """Unweighted scores of the candidates as float64[scorers, candidates]."""
    dropped: Mapping[str, Ints]
    shadow: ShadowVerdict | None


class _Ending(Struct, frozen=True, gc=False):
    """The end of a decision's request, which waits to be recorded."""

    number: int
    head: bytes
    output_seen: bool
    """True if the time of the request's first output is known and the chosen endpoint served the
    request.
    """


class _Other(Struct, frozen=True, gc=False):
    """A refusal, or the use of another endpoint than the chosen one, which waits to be recorded."""

    at_s: float
    kind: bytes
    told: Refused | Served


class Wanted(Struct, frozen=True, kw_only=True):
    """Criteria that select decisions and refusals; "" matches any value."""

    request_id: str = ""
    endpoint: str = ""
    """Name (with or without namespace) or address of an endpoint that was chosen for any stage of
    the request.
    """
    model: str = ""
    refused: str = ""
    """"true" selects refusals, "false" decisions, and a reason the refusals with that reason."""

    def texts(self) -> tuple[bytes, ...]:
        """Return texts that the packed record of every selected decision or refusal contains."""
        wanted = (self.request_id, self.endpoint, self.model)
        return tuple(kept_text(text).encode() for text in wanted if text)

    def has(self, told: Decided | Refused) -> bool:
        if self.request_id and told.request_id != kept_text(self.request_id):
            return False
        if self.model and told.model != kept_text(self.model):
            return False
        if isinstance(told, Refused):
            return not self.endpoint and self.refused in {"", "true", told.reason}
        places: list[Decided | DecidedLeg] = [told, *told.earlier]
        called = any(is_called(self.endpoint, one.endpoint, one.address) for one in places)
        return self.refused in {"", "false"} and (not self.endpoint or called)


class RecentSums(Struct, kw_only=True):
    """Sums over the decisions and refusals from `since_s` to `until_s`, in Unix time. `since_s` is
    later than requested if older records were dropped, or if not all were examined.
    """

    since_s: float
    until_s: float
    decided: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of refused requests by reason."""
    endpoints: dict[str, "EndpointSums"] = msgspec.field(default_factory=dict)
    """Sums of the decisions for each endpoint, by the endpoint's name."""


class EndpointSums(Struct):
    """Sums over the decisions of a period for one endpoint."""

    requests: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    """Number of prompt tokens that were estimated as cached at this endpoint."""
    compared_tokens: int = 0
    """Number of tokens in `predicted_tokens` that belong to requests whose response reported the
    cached tokens.
    """
    compared_prompt_tokens: int = 0
    """Number of tokens in `prompt_tokens` that belong to requests whose response reported the
    cached tokens.
    """
    cached_tokens: int = 0
    failed: int = 0
    """Number of requests to this endpoint whose status was 500 or more."""


class RecentDecisions:
    """The last decisions and refusals of the picker, as far as they fit into memory and are not
    older than `keep_s` seconds.
    """

    def __init__(
        self,
        pool: EndpointPool,
        *,
        rows_bytes_max: int = BYTES_MAX - BYTES_MAX // _SCORES_SHARE,
        scores_bytes_max: int = BYTES_MAX // _SCORES_SHARE,
        keep_s: Seconds = KEEP_S,
        clock: Callable[[], Seconds] = time.time,
        could_not: Callable[[str, Exception], None] = lambda *_: None,
        history: DecisionsFolder | None = None,
    ) -> None:
        """Allocate memory for the records.

        `clock` returns Unix time. `could_not` is called with "recent" and the error if a record
        cannot be stored. `history`, if any, receives the same records to store them longer.
        """
        self._pool = pool
        self.keep_s = keep_s
        self._rows = RecordRing(rows_bytes_max)
        self._scores = RecordRing(scores_bytes_max)
        self._clock = clock
        self._could_not = could_not
        self._history = history
        self._waiting: list[_Deciding | _Ending | _Other] = []
        self._output_times_s: dict[int, Seconds] = {}
        """Observed time per output token by the number of the decision, oldest first."""
        self._memberships: dict[int, Members] = {}
        """Members of the pool by the pool's generation, oldest first."""
        self._generation = -1
        self._slot: object = None
        """Array with the slots of the last decision's candidates. It is immutable, so that it is
        compared by identity.
        """
        self._slot_bytes = b""
        self._context = Context()
        self._setting = 0
        self._settings_told = 0
        """Number of the setting (scorers and weights) that was recorded last."""
        self._weights: object = None
        """Weights of the last decision, compared by identity; `_setting` is the number of their
        recorded setting.
        """
        self._numbered: dict[int, tuple[object, int]] = {}
        """Weights of each profile and the number of their recorded setting, by identity of the
        weights.
        """
        self._configured: tuple[int, SchedulerSettings | None] = (0, None)
        self._states_told = 0
        self._displaced = 0
        self._complete_since_s = -math.inf
        """Unix time of the oldest record when newer records were last seen to have displaced older
        ones. `_displaced` is the number of displaced records at that time.
        """
        self._open: dict[int, int] = {}
        """Positions in memory of decisions whose request has not ended, by the decision's number,
        oldest first.
        """
        self._to_compare: list[int] = []
        """Positions in memory of decisions whose expected time to first token can be compared: the
        request has ended, the time of its first output is known, and the chosen endpoint served it.
        """
        self.shed = 0
        """Number of streams that were rejected unread; nothing else about these streams is
        recorded.
        """
        self.unparsed: Counter[str] = Counter()
        """Number of requests since the start whose body was not fully understood, by reason."""

    def __len__(self) -> int:
        self.fold()
        return len(self._rows)

    def configured(self, generation: int, settings: SchedulerSettings) -> None:
        """Record later decisions with `settings`, which belong to the configuration document
        `generation`.
        """
        self._configured = (generation, settings)
        self._weights = None
        self._numbered.clear()

    def know_states(self, states: States) -> None:
        """Set the states of all endpoints that are not ready or have a problem, for later
        decisions, and store them in the history if there is one.
        """
        self._states_told += 1
        _remember(self._context.states, self._states_told, states, STATES_MAX)
        if self._history is not None:
            told = ToldStates(number=self._states_told, at_s=self._clock(), states=dict(states))
            self._history.tell(frame_of(told))

    def decided(self, decision: Decision) -> None:
        """Record a decision. The pool and its load must not have changed since it was made."""
        if self._pool.generation != self._generation:
            self._remember_members()
        account, leg = decision.account, decision.leg
        request, candidates, scored = account.request, leg.candidates, leg.scored
        slot = candidates.slot
        if scored.weights is not self._weights:
            self._weights, self._setting = scored.weights, self._setting_of(leg)
        # These three values are rarely needed again, so `leg` does not cache them.
        second = runner_up_of(scored, leg.picked)
        numbers = candidates.numbers_of(leg.picked)
        others = () if second is None else candidates.numbers_of(second)
        # The greatest match matters only if one of the two endpoints has waiting requests.
        waits = numbers[0] != 0.0 or (others and others[0] != 0.0)
        kept = Decided(
            account.number,
            self._setting,
            kept_text(request.request_id),
            kept_text(request.model),
            request.priority,
            request.prompt_tokens,
            request.output_tokens_max,
            leg.endpoint.name,
            leg.endpoint.address,
            tuple([other.address for other in leg.fallbacks]) if leg.fallbacks else (),
            leg.matched_blocks,
            leg.total_blocks,
            leg.block_tokens,
            leg.ready,
            leg.eliminated if leg.dropped else {},
            slot.size,
            leg.parts,
            leg.lease.prefill_tokens,
            numbers,
            self._generation,
            self._states_told,
            "" if second is None else candidates.name_of(second),
            b"" if second is None else scored.scores[:, second].tobytes(),
            others,
            answer_tokens=request.moment.answer_tokens,
            matched_most=candidates.matched_most() if waits else 0,
            costs=leg.costs,
            route="" if account.route is None else account.route.value,
            uncached_tokens=account.uncached_tokens,
            earlier=tuple([self._told_leg(one) for one in decision.earlier])
            if decision.earlier
            else (),
            queued=None if account.queued is None else account.queued.fields(),
            predicted=() if leg.lease.latency is None else _predicted(candidates, leg.picked),
        )
        self._wait(
            _Deciding(
                *(self._clock(), kept, leg.picked, slot, scored.scores),
                *(leg.dropped, account.shadow),
            )
        )

    def _told_leg(self, leg: Leg) -> DecidedLeg:
        """Return what is recorded about the choice of the endpoint for a prefill or encode stage."""
        second = leg.runner_up
        return DecidedLeg(
            leg.stage.value,
            leg.endpoint.name,
            leg.endpoint.address,
            tuple([other.address for other in leg.fallbacks]),
            self._setting_of(leg),
            leg.matched_blocks,
            leg.eliminated,
            len(leg.candidates),
            leg.parts,
            leg.lease.prefill_tokens,
            leg.candidates.numbers_of(leg.picked),
            "" if second is None else leg.candidates.name_of(second),
            b"" if second is None else leg.scored.scores[:, second].tobytes(),
        )

    def refused(
        self,
        refusal: Refusal,
        request: InferenceRequest | None,
        *,
        request_id: str = "",
        path: str = "",
        queued: Queued | None = None,
    ) -> None:
        """Record a refused request; `request` is None if the request was not understood. `queued` is
        its wait in the queue, or None if it did not wait.
        """
        told = Refused(
            kept_text(request.request_id if request else request_id),
            kept_text(request.model) if request else "",
            kept_text(path),
            request.priority if request else 0,
            refusal.reason.value,
            refusal.status,
            refusal.eliminated,
            self._states_told,
            None if queued is None else queued.fields(),
        )
        self._wait(_Other(self._clock(), REFUSED, told))

    def served(self, exchange: Exchange) -> None:
        """Record which endpoint the gateway used for the request `exchange`, if it is not the
        chosen one.
        """
        decision = exchange.decision
        if decision is None:
            return
        leg = decision.leg
        if leg.lease.slot == leg.candidates.slot[leg.picked]:
            return
        there = exchange.endpoint
        told = Served(
            decision.number,
            kept_text(exchange.served),
            "" if there is None else there.name,
            0 if there is None else decision.lease.matched_blocks,
        )
        self._wait(_Other(self._clock(), SERVED, told))

    def completed(self, exchange: Exchange, outcome: Outcome, now: Seconds) -> None:
        """Record how the request of a decision ended."""
        decision = exchange.decision
        if decision is not None:
            leg = decision.leg
            # The estimate applies only to the chosen endpoint, not to another one that served.
            seen = (
                exchange.first_output_at_s is not None
                and leg.lease.slot == leg.candidates.slot.item(leg.picked)
            )
            if seen and leg.lease.latency is not None:
                self._remember_output_time(exchange, decision.number, now)
            self._wait(_Ending(decision.number, ended_head(exchange, outcome, now), seen))

    def _remember_output_time(self, exchange: Exchange, number: int, now: Seconds) -> None:
        """Remember the observed time per output token of decision `number`, if the engine counted
        the tokens of a streamed answer.
        """
        usage, first_s, request = exchange.usage, exchange.first_output_at_s, exchange.request
        tokens = usage.completion_tokens if usage else None
        if first_s is None or tokens is None or tokens < 2 or not (request and request.stream):
            return
        _remember(self._output_times_s, number, (now - first_s) / (tokens - 1), OUTPUT_TIMES_MAX)

    def fold(self) -> None:
        """Store the decisions, refusals and ends that wait to be recorded, in order. Every read
        calls this first.

        A record that cannot be stored does not affect others.
        """
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            try:
                self._fold(one)
            except Exception as error:  # noqa: BLE001  telemetry never fails a request, and this one belongs to another request
                self._could_not("recent", error)

    def expire(self) -> None:
        """Store the records that wait, and drop those older than `keep_s` seconds, at most
        `_EXPIRED_PER_CALL_MAX` per call. Call it about once a second.
        """
        self.fold()
        self._note_displaced()
        before_s = self._clock() - self.keep_s
        self._rows.drop_oldest(lambda record: kept_at_s(record) < before_s, _EXPIRED_PER_CALL_MAX)

    def first_tokens(self) -> list[tuple[Seconds, Seconds]]:
        """Return pairs of the expected and the observed time to first token in seconds, at most
        `COMPARED_MAX`.

        The pairs belong to requests that ended since the last call and were served by the chosen
        endpoint. The expected time counts from the decision, the observed one from the request
        headers, without the wait in the queue.
        """
        self.fold()
        places, self._to_compare = self._to_compare, []
        found: list[tuple[Seconds, Seconds]] = []
        for place in places:
            record = self._rows.get(place)
            end = None if record is None else end_of(record)
            if record is None or end is None:
                continue
            past = self._context.past(record)
            assert isinstance(past, PastDecision), "the record is a decision"
            expected_s = expected_first_token_s(past.told, past.setting)
            observed_s = observed_first_token_s(past.told, end)
            if expected_s is not None and observed_s is not None:
                found.append((expected_s, observed_s))
        return found

    async def rows(self, count: int, wanted: Wanted, why_not: str = "") -> list[Row]:
        """Return the rows of the last `count` decisions and refusals that `wanted` selects, newest
        first.

        `why_not` is the name, with or without namespace, or the address of an endpoint. Rows then
        explain why that one was not chosen.
        """
        found: list[Row] = []
        texts = wanted.texts()
        served: dict[int, Served] = {}
        async for record in self._newest_first():
            packed = record[PACKED_FROM:]
            if record[:1] == SERVED:
                told = unpack_served(packed)
                served.setdefault(told.number, told)
            elif all(text in packed for text in texts):
                row = self._wanted_row(record, wanted, served, why_not)
                if row is not None:
                    found.append(row)
                    if len(found) == count:
                        break
                    if len(found) % _FOUND_PER_TURN == 0:
                        await asyncio.sleep(0)
        return found

    async def lately(self, window_s: Seconds, records_max: int) -> RecentSums:
        """Return the sums over the last `window_s` seconds of decisions, from at most `records_max`
        records.
        """
        self.fold()
        self._note_displaced()
        until_s = self._clock()
        since_s = max(until_s - min(window_s, self.keep_s), self._complete_since_s)
        lately = RecentSums(since_s=since_s, until_s=until_s)
        looked_at = 0
        oldest_s = math.inf
        served: dict[int, Served] = {}
        async for record in self._newest_first():
            at_s = kept_at_s(record)
            if at_s < lately.since_s or looked_at == records_max:
                break
            looked_at += 1
            oldest_s = at_s
            if record[:1] == DECIDED:
                told = unpack_decided(record[PACKED_FROM:])
                _add(lately, told, served.pop(told.number, None), end_of(record))
            elif record[:1] == SERVED:
                elsewhere = unpack_served(record[PACKED_FROM:])
                served.setdefault(elsewhere.number, elsewhere)
            elif record[:1] == REFUSED:
                reason = unpack_refused(record[PACKED_FROM:]).reason
                lately.refused[reason] = lately.refused.get(reason, 0) + 1
        if looked_at == records_max:
            lately.since_s = oldest_s
        return lately

    @property
    def oldest_at_s(self) -> float | None:
        """Unix time of the oldest record of a decision, a refusal or a use of another endpoint, or
        None if there is none.
        """
        self.fold()
        oldest = self._rows.oldest()
        return None if oldest is None else kept_at_s(oldest)

    async def _newest_first(self) -> AsyncIterator[bytes]:
        """Yield the records that are not older than `keep_s`, newest first. The event loop runs
        after every few hundred.
        """
        self.fold()
        before_s = self._clock() - self.keep_s
        for looked_at, record in enumerate(self._rows.newest_first(), 1):
            if kept_at_s(record) < before_s:
                return
            yield record
            if looked_at % _ROWS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _note_displaced(self) -> None:
        """Note the time of the oldest record if newer records displaced older ones meanwhile."""
        oldest = self._rows.oldest()
        if oldest is not None and self._rows.displaced != self._displaced:
            self._displaced, self._complete_since_s = self._rows.displaced, kept_at_s(oldest)

    def _wait(self, one: _Deciding | _Ending | _Other) -> None:
        self._waiting.append(one)
        if len(self._waiting) >= WAITING_MAX:
            self.fold()

    def _fold(self, one: _Deciding | _Ending | _Other) -> None:
        if isinstance(one, _Ending):
            place = self._open.pop(one.number, None)
            if place is not None:
                self._rows.overwrite(place, one.head)
                if one.output_seen and len(self._to_compare) < COMPARED_MAX:
                    self._to_compare.append(place)
            if self._history is not None:
                self._history.tell(ended_frame(one.number, one.head))
        elif isinstance(one, _Other):
            self._append(record_of(one.kind, one.at_s, one.told))
        else:
            if one.slot is not self._slot:
                self._slot, self._slot_bytes = one.slot, one.slot.tobytes()
            dropped = {name: slots.tobytes() for name, slots in one.dropped.items()}
            scores = Scores(one.picked, self._slot_bytes, one.scores.tobytes(), dropped)
            scores_at = self._scores.append(scores_of(scores))
            told = one.told
            if one.shadow is not None:
                told = structs.replace(told, shadow=one.shadow.fields())
            record = record_of(DECIDED, one.at_s, told, scores_at)
            self._open[one.told.number] = self._append(record)
            if len(self._open) > _OPEN_MAX:
                del self._open[next(iter(self._open))]

    def _append(self, record: bytes) -> int:
        place = self._rows.append(record)
        if self._history is not None:
            self._history.tell(record)
        return place

    def _remember_members(self) -> None:
        self._generation = self._pool.generation
        members = tuple(self._pool.columns.endpoints)
        _remember(self._memberships, self._generation, members, _MEMBERSHIPS_MAX)

    def _setting_of(self, leg: Leg) -> int:
        """Return the number under which the scorers and weights that chose `leg` are recorded;
        record them first if they are new.
        """
        weights = leg.scored.weights
        known = self._numbered.get(id(weights))
        if known is not None:
            return known[1]
        self._settings_told += 1
        # The entry keeps the weights, so that their identity is not reused.
        _remember(self._numbered, id(weights), (weights, self._settings_told), _PROFILES_MAX)
        self._remember_setting(leg, self._settings_told)
        return self._settings_told

    def _remember_setting(self, leg: Leg, number: int) -> None:
        generation, settings = self._configured
        profiles = settings.stages.profiles() if settings else ()
        plugins = {one.name: one.plugin for _, profile in profiles for one in profile.scorers}
        scorers = [plugins.get(name) for name in leg.scorers]
        told = Setting(
            generation,
            leg.scorers,
            tuple(leg.scored.weights.tolist()),
            tuple(
                name
                for name, scorer in zip(leg.scorers, scorers, strict=True)
                if scorer is not None and scorer.type_name == _BY_BLOCKS
            ),
            leg.tellers,
        )
        _remember(self._context.settings, number, told, SETTINGS_MAX)
        if self._history is not None:
            setting = ToldSetting(
                number=number,
                generation=generation,
                scorers=told.scorers,
                weights=told.weights,
                by_blocks=told.by_blocks,
                costs=tuple(
                    told_plugin(scorer.type_name, scorer) if scorer and teller else None
                    for scorer, teller in zip(scorers, leg.tellers, strict=False)
                ),
            )
            self._history.tell(frame_of(setting))

    def _wanted_row(
        self, record: bytes, wanted: Wanted, served: Mapping[int, Served], why_not: str
    ) -> Row | None:
        past = self._context.past(record)
        if not wanted.has(past.told):
            return None
        if isinstance(past, PastRefusal):
            return row_of(past, self._clock(), why_not)
        past = structs.replace(past, served=served.get(past.told.number))
        packed_scores = self._scores.get(scores_at_of(record))
        remembered = Remembered(
            None if packed_scores is None else unpack_scores(packed_scores),
            self._memberships.get(past.told.members),
            self._output_times_s.get(past.told.number),
        )
        return row_of(past, self._clock(), why_not, remembered)


def _predicted(candidates: Candidates, picked: int) -> tuple[float, ...]:
    """Return `Decided.predicted` for the candidate at position `picked`."""
    return (
        candidates.predicted_ttft_s.item(picked),
        candidates.predicted_tpot_s.item(picked),
        candidates.predicted_ttft_error.item(picked),
        candidates.predicted_tpot_error.item(picked),
    )


def recent_decisions(
    pool: EndpointPool,
    bytes_max: int,
    keep_s: Seconds,
    could_not: Callable[[str, Exception], None],
    history: DecisionsFolder | None = None,
) -> RecentDecisions:
    """Return a `RecentDecisions` that uses `bytes_max` of memory, or almost none if `keep_s` is
    0.
    """
    if not keep_s:
        return RecentDecisions(
            pool, rows_bytes_max=64, scores_bytes_max=64, keep_s=0.0, history=history
        )
    scores_bytes = bytes_max // _SCORES_SHARE & -4
    rows_bytes = bytes_max - scores_bytes & -4
    return RecentDecisions(
        pool,
        rows_bytes_max=rows_bytes,
        scores_bytes_max=scores_bytes,
        keep_s=keep_s,
        could_not=could_not,
        history=history,
    )


def _remember(known: dict[int, _Known], number: int, one: _Known, count_max: int) -> None:
    """Add the entry `one` under `number` to `known`, and drop the oldest entry if there are more
    than `count_max`.
    """
    known[number] = one
    if len(known) > count_max:
        del known[next(iter(known))]


def _add(lately: RecentSums, told: Decided, served: Served | None, end: Ended | None) -> None:
    lately.decided += 1
    name, predicted = served_at(told, served), predicted_at(told, served)
    there = lately.endpoints.get(name)
    if there is None:
        there = lately.endpoints[name] = EndpointSums()
    there.requests += 1
    there.prompt_tokens += told.prompt_tokens
    there.predicted_tokens += predicted
    if end is None:
        return
    there.failed += (end.status or 0) >= _FAILED_FROM
    if end.cached_tokens is not None:
        there.compared_tokens += predicted
        there.compared_prompt_tokens += told.prompt_tokens
        there.cached_tokens += end.cached_tokens
