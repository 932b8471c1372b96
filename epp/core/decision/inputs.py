"""The input events of a scheduler, which a caller passes to `Scheduler.take(input, now)`.

Inputs are values, so they can be logged and replayed in a loop. Both shells, the trial of a
configuration and the re-enactment of captured traffic create them. The capture records most of
them.

A new input needs its struct, its row in `Scheduler._handlers_by_input` and a test.
"""

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.index import EventResult
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import Event
from epp.core.kv_events.stream import StreamState
from epp.core.types import Endpoint, EndpointMetrics, Seconds


class PoolReplaced(Struct, frozen=True, gc=False):
    """An event after which the pool consists of exactly `endpoints`."""

    endpoints: Sequence[Endpoint]


class PageScraped(Struct, frozen=True, gc=False):
    """A successful scrape of the metrics of the endpoint in `slot`."""

    slot: int
    metrics: EndpointMetrics


class ScrapeFailed(Struct, frozen=True, gc=False, kw_only=True):
    """A failed scrape of the metrics of the endpoint in `slot`. `answered` is False if there was no
    connection, or no response in time.
    """

    slot: int
    answered: bool


class LoadReported(Struct, frozen=True, gc=False):
    """A report of the engine's load in a response: `header` is the value of the response header,
    `lease` that of the request.
    """

    lease: Lease
    header: str


class ResponseStarted(Struct, frozen=True, gc=False):
    """The arrival of the headers of a successful response to the request of `lease`, which several
    endpoints serve.
    """

    lease: Lease


class OutputStarted(Struct, frozen=True, gc=False):
    """The arrival of the first chunk of the answer to the request of `lease`, which shows that its
    prompt is prefilled.
    """

    lease: Lease


class ServedBy(Struct, frozen=True, gc=False):
    """A report of the gateway that the endpoint at `address` ("ip:port") serves the request of
    `lease`.
    """

    lease: Lease
    address: str


class RequestEnded(Struct, frozen=True, gc=False):
    """The end of the request of `lease`. It has no effect if the lease is already closed."""

    lease: Lease
    outcome: Outcome


class Reconfigured(Struct, frozen=True, gc=False):
    """New settings, which the scheduler uses from the next request on.

    An index that can adopt its new settings keeps its content. The pool, leases and counters stay.
    """

    settings: SchedulerSettings


class IndexMemoryLimited(Struct, frozen=True, gc=False):
    """A limit on the memory of the indexes: each that supports it uses at most `share` of its
    configured maximum from now on.
    """

    share: float


class PeerRecorded(Struct, frozen=True, gc=False):
    """A decision of a peer: the peer recorded the index keys `keys` for the endpoint in `slot` at
    the time `stamp`, in its index with the same name as `index`.
    """

    index: str
    keys: Sequence[bytes]
    slot: int
    stamp: Seconds


class PeersUnheard(Struct, frozen=True, gc=False):
    """The number of other pickers that are expected in this pool and from which this picker receives
    nothing at present, so that their decisions are unknown.
    """

    replicas: int


class EventsHeard(Struct, frozen=True, gc=False):
    """KV-cache events of rank `rank` of the engine in `slot`, for example that it stored or removed
    blocks.
    """

    slot: int
    events: Sequence[Event]
    rank: int = 0


class BlocksChanged(Struct, frozen=True, gc=False):
    """The changes of cached block keys that followed from an `EventsHeard`, for a reader that has
    no token ids, such as the re-enactment of a capture.
    """

    slot: int
    changes: Sequence[Changed]
    cleared: bool = False
    """True if all blocks of the engine's rank were dropped before these changes."""
    engine_block_tokens: int = 0
    """Number of tokens in the largest block of the engine; 0 if unknown."""
    rank: int = 0


class StreamChanged(Struct, frozen=True, gc=False):
    """A new state of the KV event stream from one rank of the engine in `slot`.

    `complete` is True if the engine reported all blocks that the rank has cached. The rank with the
    highest number is removed if it has neither a stream nor reported blocks, unless it is rank 0.
    """

    slot: int
    state: StreamState
    complete: bool
    rank: int = 0


class EventsVoided(Struct, frozen=True, gc=False):
    """The KV-cache events received so far from one rank of the engine in `slot` are invalid. Blocks
    that are assumed from decisions stay.
    """

    slot: int
    rank: int = 0


class Tick(Struct, frozen=True, gc=False):
    """A call for the scheduler's bounded housekeeping, which the caller sends about once a second."""


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
    """The consequences of one input on which the caller of `Scheduler.take` must act."""

    set_aside: Endpoint | None = None
    """Endpoint that is set aside because of failed requests with this input, or None. It receives
    no requests until its next successful scrape, or for a fixed time if it serves no metrics.
    """
    restarted: tuple[str, ...] = ()
    """Names of the affinity indexes that start empty, because they are new or cannot adopt the new
    settings.
    """
    moved: bool = False
    """True if the request that this input is about now counts for another endpoint, or for none."""
    heard: EventResult | None = None
    """Result of applying KV-cache events in the first index that receives them and does not fail.
    None for other inputs, if no index receives events, or if all that do failed.
    """


NO_EFFECTS = Effects()
