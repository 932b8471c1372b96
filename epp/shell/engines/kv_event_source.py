"""The source of the KV events of one rank of an endpoint, and what operators see of it."""

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
    """The reception of one endpoint's events, for operators; with several ranks the worst one."""

    endpoint: str
    state: StreamState
    complete: bool = False
    silent: bool = False
    problem: str = ""
    """Reason in words why no events are received; "" if they are, or soon will be."""
    place: str = ""
    """Address where it publishes, as far as known."""
    lag_s: Seconds | None = None
    """Age of the last frame in seconds, by the clocks of engine and picker."""
    sequence: int | None = None
    """Engine's sequence number up to which every frame was processed."""


class KVEventsSnapshot(Struct, frozen=True, kw_only=True):
    """The reception of all endpoints' events, for metrics; counts are since the start."""

    states: Mapping[str, int]
    """Number of endpoints by state."""
    incomplete: int = 0
    """Number of live endpoints that did not report all cached blocks."""
    silent: int = 0
    events: Mapping[str, int]
    """Number of events by type."""
    faults: Mapping[str, int]
    """Number of unknown events and payloads by reason."""
    streams: Mapping[str, int]
    """Number of gaps, replays and similar, by kind."""


class Source:
    """The source of one rank; the first rank represents the endpoint."""

    def __init__(
        self, endpoint: Endpoint, slot: int, *, rank: int = 0, first: "Source | None" = None
    ) -> None:
        self.endpoint = endpoint
        self.slot = slot
        self.rank = rank
        self.first = first
        """Source of the first rank, or None if this is the first."""
        self.others: list[Source] = []
        """Sources of the other ranks in order; only the first rank has them."""
        self.lives = 0
        """Number of restarts when the endpoint was last requested for its sources."""
        self.asking: asyncio.Task[None] | None = None
        """Task that requests the sources again."""
        self.subscription: Subscription | None = None
        self.place: Place | None = None
        """Address where the rank publishes, or None if unknown."""
        self.heard_at: Place | None = None
        """Address of the open connection `lines`, whichever side opened it."""
        self.problem = ""
        self.rank_said: int | None = None
        """Rank in the payloads of an engine that connected and should have one rank."""
        self.refused = ""
        """Reason why an engine that connects is ignored."""
        self.lines: ZmtpLines | None = None
        self.task: asyncio.Task[None] | None = None
        self.replay: asyncio.Task[None] | None = None
        self.named_silent = False

    @property
    def ranks(self) -> tuple["Source", ...]:
        """All ranks of the endpoint; valid for the first rank."""
        return (self, *self.others)

    def worst_row(self, unix_time_s: Seconds, unconnected: str) -> SourceRow:
        """Return the row of the endpoint; with several ranks that of the worst one.

        Only the first rank represents the endpoint. `unconnected` is the problem of a rank without
        subscription that has no other problem.
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
    """Return the name for the log, with the rank if there are several."""
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
