"""The source of the KV-cache events of one rank of an endpoint, and the row that operators see of
it.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from epp.core.kv_events.stream import StreamState
from epp.core.subscription import Subscription
from epp.core.types import Endpoint, Seconds
from epp.shell.engines.kv_event_places import Place, spelt
from epp.shell.engines.zmtp_lines import ZmtpLines

_WORST_FIRST: Final = (
    StreamState.NONE,
    StreamState.CONNECTING,
    StreamState.STALE,
    StreamState.REPLAYING,
    StreamState.LIVE,
)


class SourceRow(Struct, frozen=True, kw_only=True):
    """The reception of one endpoint's KV-cache events, for operators.

    With several ranks, `state`, `problem`, `place` and `sequence` are those of the worst rank. An
    endpoint is complete if every rank is, and silent if any rank is. `lag_s` is the largest one.
    """

    endpoint: str
    state: StreamState
    complete: bool = False
    silent: bool = False
    problem: str = ""
    """Reason in words why no events are received from the endpoint or, with several ranks, why a
    rank's stream is not live; "" if there is no such reason or it is unknown.
    """
    place: str = ""
    """Address where the endpoint publishes its events or from which its engine connected, or "" if
    unknown.
    """
    lag_s: Seconds | None = None
    """Seconds since the engine sent the last frame of events that was decoded, by the clocks of
    engine and picker; None if unknown.
    """
    sequence: int | None = None
    """The engine's sequence number up to which every frame of events was processed, or None if none
    was.
    """


class KVEventsSnapshot(Struct, frozen=True, kw_only=True):
    """The reception of all endpoints' KV-cache events, for metrics. `events`, `faults` and
    `streams` count since the picker started; the other fields describe the present.
    """

    states: Mapping[str, int]
    """Number of endpoints by the state of their stream of KV-cache events."""
    incomplete: int = 0
    """Number of endpoints with a live event stream that have not reported all of their cached
    blocks.
    """
    silent: int = 0
    events: Mapping[str, int]
    """Number of KV-cache events that were applied to the indexes, by their type."""
    faults: Mapping[str, int]
    """Number of events and payloads that could not be used, and of rejected connections and
    messages of engines, by reason.
    """
    streams: Mapping[str, int]
    """Number of applied frames, gaps, replays and other incidents of the streams of KV-cache
    events, by kind.
    """


class Source:
    """The source of the KV-cache events of one rank. The source of the first rank represents the
    endpoint.
    """

    def __init__(
        self, endpoint: Endpoint, slot: int, *, rank: int = 0, first: "Source | None" = None
    ) -> None:
        self.endpoint = endpoint
        self.slot = slot
        self.rank = rank
        self.first = first
        """Source of the endpoint's first rank, or None if this is the first rank."""
        self.others: list[Source] = []
        """Sources of the endpoint's other ranks in order; empty for every rank but the first."""
        self.lives = 0
        """Number of the engine's restarts that were known when the endpoint was last asked where it
        publishes its events, or when `rank_said` was last reset.
        """
        self.asking: asyncio.Task[None] | None = None
        """Latest task that asks the endpoint again where it publishes its events, which may have
        ended; None if there was none.
        """
        self.subscription: Subscription | None = None
        self.place: Place | None = None
        """Address where the rank publishes its events, or None if unknown."""
        self.heard_at: Place | None = None
        """Address of the engine on the latest connection with events of this rank, whether picker
        or engine opened it; None before the first one.
        """
        self.problem = ""
        self.rank_said: int | None = None
        """Data-parallel rank in the payloads of an engine that connected, if one rank is
        configured; None until a payload names its rank.
        """
        self.refused = ""
        """Reason why messages of an engine that connects are ignored, or "" if they are not."""
        self.lines: ZmtpLines | None = None
        self.task: asyncio.Task[None] | None = None
        self.replay: asyncio.Task[None] | None = None
        self.named_silent = False

    @property
    def ranks(self) -> tuple["Source", ...]:
        """The sources of KV events of all data-parallel ranks of this endpoint, one per rank. Use
        it only on the source of the first rank.
        """
        return (self, *self.others)

    def worst_row(self, unix_time_s: Seconds, unconnected: str) -> SourceRow:
        """Return the endpoint's row for operators.

        Call it only on the first rank's source. `unconnected` is the problem that the row shows for
        a rank that has neither a subscription nor a problem of its own.
        """
        if not self.others:
            return self._row(unix_time_s, unconnected)
        rows = [one._row(unix_time_s, unconnected) for one in self.ranks]
        rank, worst = min(enumerate(rows), key=lambda row: _WORST_FIRST.index(row[1].state))
        problem = worst.problem
        if not problem and worst.state is not StreamState.LIVE:
            problem = f"is {worst.state}"
        lags = [row.lag_s for row in rows if row.lag_s is not None]
        return msgspec.structs.replace(
            worst,
            complete=all(row.complete for row in rows),
            silent=any(row.silent for row in rows),
            problem=f"rank {rank} of {len(rows)}: {problem}" if problem else "",
            lag_s=max(lags, default=None),
        )

    def _row(self, unix_time_s: Seconds, unconnected: str) -> SourceRow:
        subscription = self.subscription
        if subscription is None:
            return SourceRow(
                endpoint=self.endpoint.name,
                state=StreamState.NONE,
                problem=self.problem or unconnected,
                place=spelt(self.place),
            )
        told_at_s = subscription.engine_clock_s
        heard = self.lines is not None and self.lines.is_ready
        return SourceRow(
            endpoint=self.endpoint.name,
            state=subscription.state,
            complete=subscription.complete,
            silent=subscription.stream.silent,
            problem="" if heard else self.problem,
            place=spelt(self.heard_at),
            lag_s=None if told_at_s is None else unix_time_s - told_at_s,
            sequence=subscription.noted,
        )


def same_process(known: Source, endpoint: Endpoint, slot: int) -> bool:
    return (known.endpoint.address, known.endpoint.incarnation, known.slot) == (
        endpoint.address,
        endpoint.incarnation,
        slot,
    )


def name_of(source: Source) -> str:
    """Return the name of the source's endpoint for log messages, with the rank if there are
    several.
    """
    several = source.first is not None or source.others
    return f"{source.endpoint.name} rank {source.rank}" if several else source.endpoint.name


def counts_of(subscription: Subscription) -> dict[tuple[str, str], int]:
    streams = msgspec.structs.asdict(subscription.stream.counts)
    streams["unreadable"] = subscription.unreadable
    return {
        **{("events", name): count for name, count in subscription.events.items()},
        **{("faults", fault.value): count for fault, count in subscription.faults.items()},
        **{("streams", name): count for name, count in streams.items()},
    }
