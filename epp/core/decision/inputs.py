"""What can happen to a scheduler, beside being asked to schedule: `Scheduler.take(input, now)`.

Inputs are values, so that a log of them is a log, and a replay is a loop. Both shells, the trial of a
configuration and the doing again of captured traffic make them; the capture hears each of them.
A new one costs its struct, its handler in `Scheduler` and its test.
"""

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.index import Heard
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import Event
from epp.core.kv_events.stream import StreamState
from epp.core.types import Endpoint, EndpointMetrics, Seconds


class PoolReplaced(Struct, frozen=True, gc=False):
    """The pool is `endpoints` from now on."""

    endpoints: Sequence[Endpoint]


class PageScraped(Struct, frozen=True, gc=False):
    """A good scrape of the endpoint in `slot`."""

    slot: int
    metrics: EndpointMetrics


class ScrapeFailed(Struct, frozen=True, gc=False, kw_only=True):
    """The endpoint in `slot` was scraped in vain. Not `answered`: nobody was there in time."""

    slot: int
    answered: bool


class LoadReported(Struct, frozen=True, gc=False):
    """The response of `lease` says in `header` how loaded the endpoint that served it is."""

    lease: Lease
    header: str


class OutputStarted(Struct, frozen=True, gc=False):
    """A first chunk of the answer was seen: the prompt of `lease` is prefilled."""

    lease: Lease


class ServedBy(Struct, frozen=True, gc=False):
    """The gateway says that the endpoint at `address` ("ip:port") serves the request of `lease`."""

    lease: Lease
    address: str


class RequestEnded(Struct, frozen=True, gc=False):
    """The request of `lease` ended, one way or another; a second time does nothing."""

    lease: Lease
    outcome: Outcome


class Reconfigured(Struct, frozen=True, gc=False):
    """Decide by `settings` from the next request on.

    Indexes that can take their new settings keep what they know. Pool, leases and counters stay.
    """

    settings: SchedulerSettings


class IndexMemoryLimited(Struct, frozen=True, gc=False):
    """Memory is scarce: indexes that can limit theirs take at most `share` of what they may."""

    share: float


class PeerRecorded(Struct, frozen=True, gc=False):
    """A peer noted `keys` for `slot` at `stamp`, in its index that is like `index` of ours."""

    index: str
    keys: Sequence[bytes]
    slot: int
    stamp: Seconds


class PeersUnheard(Struct, frozen=True, gc=False):
    """So many other pickers serve this pool and do not tell what they decide."""

    replicas: int


class EventsHeard(Struct, frozen=True, gc=False):
    """The engine in `slot` says which blocks its rank `rank` holds from now on, or not any more."""

    slot: int
    events: Sequence[Event]
    rank: int = 0


class BlocksChanged(Struct, frozen=True, gc=False):
    """What came of `EventsHeard`, for whoever knows no more: a capture has no tokens."""

    slot: int
    changes: Sequence[Changed]
    cleared: bool = False
    """Before that, all that it held was gone."""
    engine_block_tokens: int = 0
    """The most that a block of the engine has."""
    rank: int = 0


class StreamChanged(Struct, frozen=True, gc=False):
    """How much counts what the engine in `slot` says of one of its ranks.

    `complete`: it told all that it holds there. A rank after the first of which there is no stream any
    more is gone.
    """

    slot: int
    state: StreamState
    complete: bool
    rank: int = 0


class EventsVoided(Struct, frozen=True, gc=False):
    """What the engine in `slot` said so far of one of its ranks does not hold; what was decided does."""

    slot: int
    rank: int = 0


class Tick(Struct, frozen=True, gc=False):
    """About a second has passed: time for bounded housekeeping."""


Input: TypeAlias = (
    PoolReplaced
    | PageScraped
    | ScrapeFailed
    | LoadReported
    | OutputStarted
    | ServedBy
    | RequestEnded
    | Reconfigured
    | IndexMemoryLimited
    | PeerRecorded
    | PeersUnheard
    | EventsHeard
    | BlocksChanged
    | StreamChanged
    | EventsVoided
    | Tick
)


class Effects(Struct, frozen=True):
    """What came of an input, as far as whoever gave it must act on that."""

    set_aside: Endpoint | None = None
    """This outcome was one failure too many: the endpoint gets nothing until its next good scrape."""
    restarted: tuple[str, ...] = ()
    """Names of the indexes that had to start anew."""
    moved: bool = False
    """The request is counted somewhere else now, or nowhere."""
    heard: Heard | None = None
    """What came of events, in the first index that hears engines."""


NO_EFFECTS = Effects()
