"""The re-enactment of a captured scheduler: a scheduler receives the same inputs in the same order,
and each decision is compared.

After each decision, the scheduler is set to the live one's state: a request that went elsewhere is
moved. Every decision is therefore judged by the knowledge of the live picker at that time, and one
difference usually does not cause further ones. Only a request that the re-enactment refuses, and a
leg that it does not choose, are missing in its state.
"""

import math
from array import array
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, field

from epp.core.decision.inputs import (
    BlocksChanged,
    EventsVoided,
    Input,
    LoadReported,
    OutputStarted,
    PageScraped,
    PeersUnheard,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ResponseStarted,
    ScrapeFailed,
    ServedBy,
    StreamChanged,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.journal.events import (
    Completed,
    Configured,
    Event,
    FirstOutput,
    Learnt,
    Lost,
    Observed,
    Opened,
    Replaced,
    Reported,
    Rescheduled,
    Responding,
    Scheduled,
    Shape,
    Streamed,
    Told,
    Unanswered,
    Voided,
    changes_of,
    endpoint_of,
    plain_input,
)
from epp.core.journal.lines import packed_chain
from epp.core.knowledge.inflight import Ending, Lease, Outcome
from epp.core.knowledge.latency import Slo
from epp.core.moment import Moment
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, Endpoint, EndpointMetrics, Refusal

DIFFERENCES_SHOWN_MAX: Final = 10
_NOWHERE: Final = ""
"""Address that stands for an endpoint that the re-enactment does not know; no endpoint has it."""


class Difference(StrEnum):
    """The reason why a repeated decision differs from the live one. The value names the first
    difference in what was known, or "the same was known". If either is a refusal, it is `REFUSAL`.
    """

    REFUSAL = "only one of the two refused the request, or the reasons differ"
    KNOWLEDGE = "the index knew another number of blocks"
    CANDIDATES = "another number of endpoints was ready"
    CHOICE = "the same was known"


class Compared(Struct, frozen=True, kw_only=True):
    """A repeated decision that differs from the live one. Endpoints are given by name, a refusal by
    its reason. If several endpoints work on the request, that of the decode stage is first.
    """

    request: int
    live: str
    again: str
    difference: Difference


class Reenacted(Struct, kw_only=True):
    """The result of a re-enactment: numbers of repeated decisions, refusals included, and of
    missing events.
    """

    decisions: int = 0
    same: int = 0
    differences: dict[Difference, int] = field(default_factory=dict)
    first: list[Compared] = field(default_factory=list)
    """Repeated decisions that differ from the live ones: the first `DIFFERENCES_SHOWN_MAX` of them.
    """
    unknown: int = 0
    """Number of decisions that were not repeated, because their requests are missing in the
    capture.
    """
    lost: int = 0
    """Number of events that the capture should contain but does not, and of those that come before
    its first configuration.
    """
    gaps: int = 0
    """Number of segments of the capture that are missing between other segments."""
    learnt: int = 0
    """Number of records that peers shared with the live picker; their content is not captured."""
    begins_late: bool = False
    """True if the live picker had events before the first segment, so that the indexes of the
    re-enactment start empty.
    """
    share: float = 1.0
    coarse: bool = False
    """True if the block size of some index is not a multiple of the captured block size, so that
    prompts have no blocks in it.
    """

    @property
    def changed(self) -> int:
        return self.decisions - self.same

    def caveats(self) -> list[str]:
        """Return one sentence for each reason why repeated decisions may differ even with an
        unchanged configuration.
        """
        told = {
            f"{self.unknown:,} decisions are left out, because their requests are missing": self.unknown,
            f"{self.lost:,} events are missing": self.lost,
            f"{self.gaps:,} segments are missing": self.gaps,
            f"{self.learnt:,} records shared by peers are not captured": self.learnt,
            "the capture begins after the picker started, so its index begins empty": self.begins_late,
            f"{self.share:.0%} of the sessions are captured; requests in flight of the others are "
            "unknown": self.share < 1.0,
            "an index has blocks that are not a multiple of the captured blocks": self.coarse,
        }
        return [sentence for sentence, holds in told.items() if holds]


class Reenactment:
    """A re-enactment of the captured events of one picker process, which are fed in order."""

    def __init__(self, settings_of: Callable[[Configured], SchedulerSettings]) -> None:
        """Start a re-enactment. `settings_of` returns the scheduler's settings for a configuration
        event, and may raise.
        """
        self._settings_of = settings_of
        self._scheduler: Scheduler | None = None
        self._seed = 0
        self._decisions = 0
        self._segment = -1
        self._endpoints: dict[int, Endpoint] = {}
        """Endpoint in each slot of the live picker, by slot."""
        self._pages: dict[int, EndpointMetrics] = {}
        self._leases: dict[int, Lease] = {}
        """Lease of each running request, by the number of the request in the capture."""
        self._block_tokens = 64
        self.result = Reenacted()

    @property
    def scheduler(self) -> Scheduler | None:
        """Return the scheduler that repeats the decisions, or None before the first configuration
        event.
        """
        return self._scheduler

    def feed(self, event: Event) -> Difference | None:
        """Apply the captured `event`; repeat the decision if it is one.

        Return why the repeated decision differs, or None if it is the same or none was repeated.
        """
        match event:
            case Opened():
                self._open(event)
            case Configured():
                self._configure(event)
            case Lost(events=events):
                self.result.lost += events
            case Learnt(records=records):
                self.result.learnt += records
            case _ if self._scheduler is None:
                self.result.lost += 1
            case Scheduled():
                return self._schedule(self._scheduler, event)
            case _:
                self._tell(self._scheduler, event)
        return None

    def _open(self, opened: Opened) -> None:
        after, self._segment = self._segment, opened.segment
        self._seed = opened.seed
        self._decisions = opened.decisions
        self.result.share = opened.share
        if after < 0:
            self.result.begins_late = bool(opened.context)
        else:
            self.result.gaps += opened.segment - after - 1

    def _configure(self, event: Configured) -> None:
        settings = self._settings_of(event)
        self._block_tokens = event.block_tokens
        sizes = _block_sizes(settings)
        self.result.coarse = any(size % event.block_tokens for size in sizes)
        if self._scheduler is None:
            self._scheduler = Scheduler(settings, seed=self._seed)
            self._scheduler.decisions = self._decisions
        else:
            self._scheduler.take(Reconfigured(settings), event.at_s)

    def _tell(self, scheduler: Scheduler, event: Event) -> None:
        match event:
            case Replaced(at_s=at_s, members=members):
                self._endpoints = {member.slot: endpoint_of(member) for member in members}
                scheduler.take(PoolReplaced(tuple(self._endpoints.values())), at_s)
            case Observed(at_s=at_s, slot=slot, page=page):
                page = self._pages[slot] = page or self._pages.get(slot, EndpointMetrics())
                own = self._own_slot(scheduler, slot)
                if own is not None:
                    scheduler.take(PageScraped(own, page), at_s)
            case Unanswered(at_s=at_s, slot=slot, answered=answered):
                own = self._own_slot(scheduler, slot)
                if own is not None:
                    scheduler.take(ScrapeFailed(slot=own, answered=answered), at_s)
            case Told() | Streamed() | Voided():
                own = self._own_slot(scheduler, event.slot)
                if own is not None:
                    scheduler.take(_of_engine(event, own), event.at_s)
            case (
                Reported(request=request)
                | Responding(request=request)
                | FirstOutput(request=request)
                | Rescheduled(request=request)
                | Completed(request=request)
            ):
                if request in self._leases:
                    self._follow(scheduler, self._leases[request], event)
            case _:
                given = plain_input(event)
                if given is not None:
                    scheduler.take(given, event.at_s)

    def _follow(
        self,
        scheduler: Scheduler,
        lease: Lease,
        event: Reported | Responding | FirstOutput | Rescheduled | Completed,
    ) -> None:
        match event:
            case Reported(at_s=at_s):
                scheduler.take(LoadReported(lease, _header(event)), at_s)
            case Responding(at_s=at_s):
                scheduler.take(ResponseStarted(lease), at_s)
            case FirstOutput(at_s=at_s):
                scheduler.take(OutputStarted(lease), at_s)
            case Rescheduled(at_s=at_s, slot=slot):
                scheduler.take(ServedBy(lease, self._address(slot)), at_s)
            case Completed():
                del self._leases[event.request]
                outcome = Outcome(
                    ending=Ending(event.ending),
                    status=event.status,
                    by_gateway=event.by_gateway,
                    retry_after_s=event.retry_after_s,
                )
                scheduler.take(RequestEnded(lease, outcome), event.at_s)

    def _schedule(self, scheduler: Scheduler, event: Scheduled) -> Difference | None:
        result, shape = self.result, event.shape
        if shape is None:
            result.unknown += 1
            return None
        if event.decision:
            # Some pickers depend on the number of the decision, and some decisions may be missing.
            scheduler.decisions = event.decision - 1
        scheduler.take(PeersUnheard(event.replicas_unheard), event.at_s)
        decision = scheduler.schedule(self._request(scheduler, event, shape), event.at_s)
        result.decisions += 1
        live = self._endpoints.get(event.slot)
        if isinstance(decision, Refusal):
            same = decision.reason.value == event.refused
            again = decision.reason.value
        else:
            same = (
                live is not None
                and decision.endpoint.endpoint_id == live.endpoint_id
                and self._same_legs(event, decision)
            )
            again = _places(decision.endpoint, *(leg.endpoint for leg in decision.earlier))
        difference = None
        if same:
            result.same += 1
        else:
            difference = self._difference(event, decision)
            result.differences[difference] = result.differences.get(difference, 0) + 1
            if len(result.first) < DIFFERENCES_SHOWN_MAX:
                told = event.refused if live is None else self._live_places(live, event)
                result.first.append(
                    Compared(request=event.request, live=told, again=again, difference=difference)
                )
        if isinstance(decision, Decision):
            if not same:
                self._move(scheduler, event, decision)
            self._leases[event.request] = decision.lease
        return difference

    def _same_legs(self, event: Scheduled, decision: Decision) -> bool:
        """Return whether `decision` has the same endpoints for the prefill and encode stages as the
        live decision in `event`.
        """
        again = {leg.stage: leg.endpoint.address for leg in decision.earlier}
        return again == {leg.stage: self._address(leg.slot) for leg in event.earlier}

    def _live_places(self, live: Endpoint, event: Scheduled) -> str:
        earlier = (self._endpoints.get(leg.slot) for leg in event.earlier)
        return _places(live, *(one for one in earlier if one is not None))

    def _move(self, scheduler: Scheduler, event: Scheduled, decision: Decision) -> None:
        """Move each leg of `decision` to the endpoint of the live decision.

        A leg without counterpart in the live decision is closed. A leg of the live decision without
        counterpart is left out.
        """
        live = {leg.stage: leg.slot for leg in event.earlier}
        scheduler.take(ServedBy(decision.lease, self._address(event.slot)), event.at_s)
        for leg in decision.earlier:
            address = self._address(live.get(leg.stage, -1))
            scheduler.take(ServedBy(leg.lease, address), event.at_s)

    def _difference(self, event: Scheduled, decision: Decision | Refusal) -> Difference:
        if isinstance(decision, Refusal) or event.refused:
            return Difference.REFUSAL
        if decision.leg.ready != event.ready:
            return Difference.CANDIDATES
        live = self._endpoints.get(event.slot)
        for position, endpoint in enumerate(decision.leg.candidates.endpoints):
            if live is not None and endpoint.endpoint_id == live.endpoint_id:
                matched, _ = decision.leg.candidates.prefix_match(position)
                if matched != event.matched_blocks:
                    return Difference.KNOWLEDGE
        return Difference.CHOICE

    def _request(self, scheduler: Scheduler, event: Scheduled, shape: Shape) -> InferenceRequest:
        chains = tuple(map(packed_chain, shape.chains or (b"",)))
        subset = None if event.subset is None else tuple(map(self._address, event.subset))
        return InferenceRequest(
            request_id=str(event.request),
            api=event.api,
            model=shape.model,
            prompt_tokens=shape.prompt_tokens,
            cache_salt=shape.cache_salt,
            subset=subset,
            priority=shape.priority,
            stream=event.stream,
            output_tokens_max=shape.output_tokens_max,
            session_id=shape.session,
            headers=Slo(shape.ttft_slo_s, shape.tpot_slo_s).headers(),
            chains={
                size * BYTES_PER_TOKEN: tuple(
                    _every(chain, size, self._block_tokens) for chain in chains
                )
                for size in _block_sizes(scheduler.settings)
            },
            token_chains={self._block_tokens: tuple(map(packed_chain, shape.token_chains))}
            if shape.token_chains
            else {},
            media=[_items(shape.media)],
            moment=Moment(known_tokens=shape.known_tokens),
        )

    def _own_slot(self, scheduler: Scheduler, slot: int) -> int | None:
        endpoint = self._endpoints.get(slot)
        return None if endpoint is None else scheduler.pool.slot_of(endpoint)

    def _address(self, slot: int) -> str:
        endpoint = self._endpoints.get(slot)
        return _NOWHERE if endpoint is None else endpoint.address


def _places(decode: Endpoint, *earlier: Endpoint) -> str:
    """Return the names of the endpoints of a request, that of the decode stage first."""
    return ", ".join([decode.name, *(endpoint.name for endpoint in earlier)])


def _items(media: bytes) -> tuple[bytes, ...]:
    return tuple(media[at : at + HASH_BYTES] for at in range(0, len(media), HASH_BYTES))


def _of_engine(event: Told | Streamed | Voided, slot: int) -> Input:
    match event:
        case Told():
            size = event.engine_block_tokens
            return BlocksChanged(slot, changes_of(event), event.cleared, size, event.rank)
        case Streamed(state=state, complete=complete, rank=rank):
            return StreamChanged(slot, state, complete, rank)
        case Voided(rank=rank):
            return EventsVoided(slot, rank)


def _block_sizes(settings: SchedulerSettings) -> list[int]:
    """Return `settings.block_tokens` and the block sizes, in tokens, of all indexes that count
    blocks, without repetition.
    """
    indexes: list[Any] = [*settings.indexes.values()]
    sizes = [index.block_tokens for index in indexes if index.abilities.counts_blocks]
    return list(dict.fromkeys([settings.block_tokens, *sizes]))


def _every(chain: bytes, tokens: int, chained_tokens: int) -> bytes:
    """Return the chain of blocks of `tokens` tokens, made from a chain of blocks of
    `chained_tokens` tokens. Return b"" if `tokens` is not a multiple of that.
    """
    step, rest = divmod(tokens, chained_tokens)
    if rest or not step:
        return b""
    return array("Q", chain)[step - 1 :: step].tobytes()


def _header(event: Reported) -> str:
    told = {
        "num_requests_waiting": event.waiting_requests,
        "num_requests_running": event.running_requests,
        "kv_cache_usage_perc": event.kv_cache_usage,
    }
    pairs = [
        f"named_metrics.{name}={value!r}"
        for name, value in told.items()
        if value is not None and math.isfinite(value)
    ]
    return f"TEXT {', '.join(pairs)}"
