"""The input events of a scheduler, for `Scheduler.take(input, now)`.

Inputs are values, so they can be logged and replayed in a loop. Both shells, the trial of a
configuration and the re-enactment of captured traffic create them. The capture records each of
them.

A new input needs its struct, its row of `_HANDLERS` in `scheduler` and a test.
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
    """The pool consists of `endpoints` from now on."""

    endpoints: Sequence[Endpoint]


class PageScraped(Struct, frozen=True, gc=False):
    """A successful scrape of the endpoint in `slot`."""

    slot: int
    metrics: EndpointMetrics


class ScrapeFailed(Struct, frozen=True, gc=False, kw_only=True):
    """A failed scrape of the endpoint in `slot`. `answered` is False if no response came in time."""

    slot: int
    answered: bool


class LoadReported(Struct, frozen=True, gc=False):
    """A load report: the value of `header` in the response of `lease`, sent by the endpoint that
    served it.
    """

    lease: Lease
    header: str


class ResponseStarted(Struct, frozen=True, gc=False):
    """The headers of a successful response arrived for `lease`, which several endpoints serve."""

    lease: Lease


class OutputStarted(Struct, frozen=True, gc=False):
    """The first chunk of the answer arrived, so the prompt of `lease` is prefilled."""

    lease: Lease


class ServedBy(Struct, frozen=True, gc=False):
    """The gateway reports that the endpoint at `address` ("ip:port") serves the request of `lease`."""

    lease: Lease
    address: str


class RequestEnded(Struct, frozen=True, gc=False):
    """The request of `lease` ended. A second such input for the lease has no effect."""

    lease: Lease
    outcome: Outcome


class Reconfigured(Struct, frozen=True, gc=False):
    """The scheduler uses `settings` from the next request on.

    An index that can adopt its new settings keeps its content. The pool, leases and counters stay.
    """

    settings: SchedulerSettings


class IndexMemoryLimited(Struct, frozen=True, gc=False):
    """Memory is scarce: each index that can limit its memory uses at most `share` of its configured
    maximum.
    """

    share: float


class PeerRecorded(Struct, frozen=True, gc=False):
    """A peer recorded `keys` for `slot` at `stamp`, in its counterpart of our `index`."""

    index: str
    keys: Sequence[bytes]
    slot: int
    stamp: Seconds


class PeersUnheard(Struct, frozen=True, gc=False):
    """The number of other pickers that serve this pool and do not share their decisions."""

    replicas: int


class EventsHeard(Struct, frozen=True, gc=False):
    """KV-cache events of the engine in `slot`: blocks that its rank `rank` stored or removed."""

    slot: int
    events: Sequence[Event]
    rank: int = 0


class BlocksChanged(Struct, frozen=True, gc=False):
    """The block changes that followed from `EventsHeard`, for a reader that has no tokens, such as
    a capture.
    """

    slot: int
    changes: Sequence[Changed]
    cleared: bool = False
    """True if all blocks of the rank were cleared before these changes."""
    engine_block_tokens: int = 0
    """Largest number of tokens in a block of the engine."""
    rank: int = 0


class StreamChanged(Struct, frozen=True, gc=False):
    """A new state of the KV event stream from one rank of the engine in `slot`.

    `complete` is True if the engine reported all blocks that the rank has cached. A rank other than
    the first is removed when its stream ends.
    """

    slot: int
    state: StreamState
    complete: bool
    rank: int = 0


class EventsVoided(Struct, frozen=True, gc=False):
    """The events received so far from one rank of the engine in `slot` are invalid; recorded
    decisions stay.
    """

    slot: int
    rank: int = 0


class Tick(Struct, frozen=True, gc=False):
    """About a second passed; the scheduler does bounded housekeeping."""


Input: TypeAlias = (
    PoolReplaced
    | PageScraped
    | ScrapeFailed
    | LoadReported
    | ResponseStarted
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
    """The consequences of an input that the caller must act on."""

    set_aside: Endpoint | None = None
    """Endpoint that reached the failure limit with this outcome, or None. It receives no requests
    until its next successful scrape.
    """
    restarted: tuple[str, ...] = ()
    """Names of the indexes that were reset."""
    moved: bool = False
    """True if the request now counts for another endpoint, or for none."""
    heard: Heard | None = None
    """Result of KV-cache events in the first index that receives them, or None."""


NO_EFFECTS = Effects()
