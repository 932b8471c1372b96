"""Derivation of past decisions from a journal that recorded only the scheduler's inputs.

The result lacks request ids, scores and states of endpoints, which only `--decisions-dir` records.
Models are keyed hashes.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from epp.configuration.build import plugin_tables
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import diff_configs
from epp.core.journal.events import (
    Completed,
    Configured,
    Event,
    FirstOutput,
    Lost,
    Member,
    Opened,
    Replaced,
    Rescheduled,
    Scheduled,
    ScheduledLeg,
    Shape,
)
from epp.core.knowledge.candidates import NUMBERS
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import Seconds
from epp.journal.decision_record import Decided, DecidedLeg, Ended, Refused, Served
from epp.journal.past import (
    NO_SETTING,
    OPEN_MAX,
    Past,
    PastChange,
    PastDecision,
    PastLoss,
    PastRefusal,
)
from epp.journal.records import Applied

_UNKNOWN: Final = (math.nan,) * len(NUMBERS)
_NOWHERE: Final = Member(slot=-1, endpoint_id="", name="", address="")


class _Open(Struct):
    """A past decision whose request has not ended, while its journal is read."""

    at_s: Seconds
    decided: PastDecision
    first_output_s: Seconds | None = None


def derived(events: Iterable[Event]) -> Iterator[Past]:
    """Yield the past events of one picker process from its scheduler's inputs. A decision follows
    when its end is found; a decision without an end follows after many later ones, or last.
    """
    deriving = _Deriving()
    for event in events:
        yield from deriving.feed(event)
    yield from (one.decided for one in deriving.open.values())


class _Deriving:
    def __init__(self) -> None:
        self.open: dict[int, _Open] = {}
        """Decisions whose end was not read yet, by the number of their request, oldest first."""
        self._picker = ""
        self._unix_s: Seconds = 0.0
        self._configured: Configured | None = None
        self._members: dict[int, Member] = {}
        """Endpoints of the pool by their slot."""

    def feed(self, event: Event) -> Iterator[Past]:
        at_s = event.at_s + self._unix_s
        match event:
            case Opened():
                self._picker, self._unix_s = event.picker, event.unix_s
            case Configured():
                before, self._configured = self._configured, event
                if before is None or before.generation != event.generation:
                    change = _applied(before, event, at_s)
                    yield PastChange(at_s=at_s, picker=self._picker, change=change)
            case Replaced(members=members):
                self._members = {member.slot: member for member in members}
            case Scheduled(shape=Shape() as shape):
                yield from self._scheduled(event, shape, at_s)
            case FirstOutput(request=request) if request in self.open:
                self.open[request].first_output_s = event.at_s - self.open[request].at_s
            case Rescheduled(request=request, slot=slot) if request in self.open:
                self.open[request].decided.served = self._served(request, slot)
            case Completed(request=request) if request in self.open:
                yield _ended(self.open.pop(request), event)
            case Lost(events=records):
                yield PastLoss(at_s=at_s, picker=self._picker, records=records)

    def _scheduled(self, event: Scheduled, shape: Shape, at_s: float) -> Iterator[Past]:
        if event.refused:
            told = Refused("", shape.model, "", shape.priority, event.refused, 0, {}, 0)
            yield PastRefusal(at_s=at_s, picker=self._picker, told=told, states={})
            return
        member = self._members.get(event.slot, _NOWHERE)
        block_tokens = 64 if self._configured is None else self._configured.block_tokens
        decided = Decided(
            number=event.decision,
            setting=0,
            request_id="",
            model=shape.model,
            priority=shape.priority,
            prompt_tokens=shape.prompt_tokens,
            output_tokens_max=shape.output_tokens_max,
            endpoint=member.name,
            address=member.address,
            fallbacks=(),
            matched_blocks=event.matched_blocks,
            total_blocks=len(shape.chains[0]) // HASH_BYTES if shape.chains else 0,
            block_tokens=block_tokens,
            ready=event.ready,
            eliminated={},
            candidates=event.ready,
            parts=[],
            prefill_tokens=math.nan,
            numbers=_UNKNOWN,
            members=0,
            states=0,
            route=event.route,
            uncached_tokens=event.uncached_tokens,
            earlier=tuple(map(self._leg, event.earlier)),
        )
        past = PastDecision(
            at_s=at_s,
            picker=self._picker,
            told=decided,
            setting=NO_SETTING,
            states={},
            leg_settings=(NO_SETTING,) * len(event.earlier),
        )
        self.open[event.request] = _Open(event.at_s, past)
        if len(self.open) > OPEN_MAX:
            yield self.open.pop(next(iter(self.open))).decided

    def _leg(self, leg: ScheduledLeg) -> DecidedLeg:
        member = self._members.get(leg.slot, _NOWHERE)
        others = [self._members.get(slot, _NOWHERE).address for slot in leg.others]
        return DecidedLeg(
            stage=leg.stage.value,
            endpoint=member.name,
            address=member.address,
            others=tuple(others),
            setting=0,
            matched_blocks=leg.matched_blocks,
            eliminated={},
            candidates=0,
            parts=[],
            prefill_tokens=math.nan,
            numbers=(),
        )

    def _served(self, request: int, slot: int) -> Served:
        member = self._members.get(slot, _NOWHERE)
        return Served(self.open[request].decided.told.number, member.address, member.name)


def _applied(before: Configured | None, event: Configured, at_s: float) -> Applied:
    """Return the record of a configuration change. Its `changes` are () for the first
    configuration, and one sentence that says that they are unknown if one of both documents does
    not load.
    """
    changes: tuple[str, ...] = ()
    if before is not None:
        plugins = plugin_tables()
        try:
            was, now = (load_config(one.document, "", plugins) for one in (before, event))
            changes = tuple(diff_configs(was, now))
        except ConfigError:
            changes = ("its differences cannot be computed",)
    return Applied(generation=event.generation, hash=event.hash, at_s=at_s, changes=changes)


def _ended(one: _Open, event: Completed) -> PastDecision:
    one.decided.end = Ended(
        ending=event.ending,
        failure=None,
        status=event.status,
        by_gateway=event.by_gateway,
        duration_s=round(event.at_s - one.at_s, 4),
        response_headers_s=None,
        first_output_s=None if one.first_output_s is None else round(one.first_output_s, 4),
        cached_tokens=event.cached_tokens,
    )
    return one.decided
