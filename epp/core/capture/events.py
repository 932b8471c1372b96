"""What a scheduler was told and decided, one event a line, in the order in which it was.

Fed to a scheduler with the same seed in the same order, they make it decide the same again: it has
no clock and no dice of its own. What is not told is what clients wrote: models, sessions and salts
are keyed hashes, and so are the blocks of the requests, which are in the lines of the capture.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct, field

from epp.core.capture.lines import Salt, pack_blocks, packed_chain
from epp.core.decision.inputs import IndexMemoryLimited, Input, Tick
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import DEVICE
from epp.core.kv_events.stream import StreamState
from epp.core.types import (
    AdapterReport,
    ApiKind,
    Endpoint,
    EndpointMetrics,
    MetricsTarget,
    Seconds,
)

EVENTS_FORMAT: Final = "homing-events"
EVENTS_VERSION: Final = 1
_UNDECIDING: Final = frozenset({"ttft_sum_s", "tier_hit_tokens"})
"""What a scrape tells and nothing is decided by."""


class _Event(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    gc=False,
    tag_field="event",
    tag=str.lower,
):
    at_s: Seconds = 0.0
    """By the clock of the picker, exactly."""


class Configured(_Event, frozen=True, kw_only=True):
    """What is in force from here on: the document, and the flags that decide with it."""

    generation: int
    hash: str
    document: str
    block_tokens: int = 64
    """Of the blocks of the requests that follow."""
    metrics_staleness_s: Seconds
    refresh_interval_s: Seconds
    fallback_endpoints_max: int = 0
    lease_ttl_without_response_phase_s: Seconds = 60.0
    indexes_bytes: int | None = None
    """What all prefix indexes together may take; None: what the document says."""


class Member(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An endpoint of the pool."""

    slot: int
    endpoint_id: str
    name: str
    address: str
    incarnation: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    scraped: bool = True
    ready_after_s: float = 0.0


class Replaced(_Event, frozen=True, kw_only=True):
    """The pool is these from now on."""

    members: tuple[Member, ...]


class Observed(_Event, frozen=True, kw_only=True):
    """A good scrape."""

    slot: int
    page: EndpointMetrics | None = None
    """As of `page_of`; None: as this endpoint's last one in this file."""


class Opened(_Event, frozen=True, kw_only=True):
    """The first line of a file. What follows `decisions` is for who has not read the file before."""

    format: str
    version: int
    origin: str
    """Of the process; its files are numbered from 0."""
    file: int
    seed: int
    salt: str
    """`Salt.identity`."""
    share: float
    """Of the sessions that are captured."""
    unix_s: float
    """What is to be added to `at_s` for the time since 1970."""
    decisions: int = 0
    """Of the scheduler, before this file."""
    configured: Configured | None = None
    replaced: Replaced | None = None
    observed: tuple[Observed, ...] = ()
    """The last of each endpoint."""


class Unanswered(_Event, frozen=True, kw_only=True):
    """A scrape in vain."""

    slot: int
    answered: bool


class Scheduled(_Event, frozen=True, kw_only=True):
    """A request was asked for, and this was decided."""

    request: int
    """Its number; from 0, of those that are captured."""
    slot: int
    """Where it went; -1: nowhere."""
    decision: int = 0
    """Its number; 0: it was refused."""
    matched_blocks: int = 0
    """What the endpoint was believed to hold."""
    ready: int = 0
    refused: str = ""
    """The reason."""
    api: ApiKind = ApiKind.OPAQUE
    stream: bool = False
    subset: tuple[int, ...] | None = None
    """Slots that the gateway allowed and that were ready; None: it allowed all."""
    replicas_unheard: int = 0


class Reported(_Event, frozen=True, kw_only=True):
    """A response said how loaded its endpoint is."""

    request: int
    waiting_requests: float | None = None
    running_requests: float | None = None
    kv_cache_usage: float | None = None


class FirstOutput(_Event, frozen=True, kw_only=True):
    request: int


class Rescheduled(_Event, frozen=True, kw_only=True):
    """The gateway says that another endpoint serves it."""

    request: int
    slot: int
    """-1: none of the pool."""


class Completed(_Event, frozen=True, kw_only=True):
    request: int
    ending: str
    status: int | None = None
    by_gateway: bool = False
    retry_after_s: Seconds | None = None
    """What a 429 or 503 asked for; None: it did not say."""


class Ticked(_Event, frozen=True, kw_only=True):
    """Housekeeping."""


class MemoryLimited(_Event, frozen=True, kw_only=True):
    share: float


PLAIN: Final[Mapping[type[Input], type[_Event]]] = {
    IndexMemoryLimited: MemoryLimited,
    Tick: Ticked,
}
"""Inputs that are noted as they are -> their events, which have the same fields and the time. Nothing
that clients wrote may be in them."""


def plain_event(given: Input, now: Seconds) -> "Event | None":
    """What is noted of an input that is `PLAIN`; None: it is another."""
    kind = PLAIN.get(type(given))
    if kind is None:
        return None
    event: Event = kind(at_s=now, **msgspec.structs.asdict(given))  # type: ignore[assignment]
    return event


def plain_input(event: "Event") -> Input | None:
    """The input again; None: the event is of another."""
    kind = _PLAIN_INPUTS.get(type(event))
    if kind is None:
        return None
    fields = msgspec.structs.asdict(event)
    del fields["at_s"]
    return kind(**fields)


_PLAIN_INPUTS: Final = {event: given for given, event in PLAIN.items()}


class Learnt(_Event, frozen=True, kw_only=True):
    """Peers told so much since the last of these; what it was is not noted."""

    records: int


class Blocks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keys over token ids, of one tier; keyed hashes, eight bytes each, as blocks of requests are."""

    held: bool = True
    """From here on; False: not any more."""
    tier: str = DEVICE
    keys: bytes


class Told(_Event, frozen=True, kw_only=True):
    """An engine said what it holds, or holds no more."""

    slot: int
    cleared: bool = False
    """Before that, all that it held was gone."""
    engine_block_tokens: int = 0
    blocks: tuple[Blocks, ...] = ()
    rank: int = 0


class Streamed(_Event, frozen=True, kw_only=True):
    """How much counts what an engine says."""

    slot: int
    state: StreamState
    complete: bool = False
    rank: int = 0


class Voided(_Event, frozen=True, kw_only=True):
    """What an engine said so far does not hold."""

    slot: int
    rank: int = 0


class Lost(_Event, frozen=True, kw_only=True):
    """So many events before this one are missing."""

    events: int


Event: TypeAlias = (
    Opened
    | Configured
    | Replaced
    | Observed
    | Unanswered
    | Scheduled
    | Reported
    | FirstOutput
    | Rescheduled
    | Completed
    | Ticked
    | MemoryLimited
    | Learnt
    | Told
    | Streamed
    | Voided
    | Lost
)


class Asked(Struct, frozen=True, gc=False):
    """What a request asks, as far as it decides where it goes."""

    model: str
    cache_salt: str
    session: str
    prompt_tokens: int
    output_tokens_max: int | None
    priority: int
    chains: tuple[bytes, ...]
    """Of the block size that is captured: one a prompt, native byte order."""
    token_chains: tuple[bytes, ...] = ()
    """The same over token ids, where they are known."""
    media: tuple[bytes, ...] = ()
    """Of images and the like, where an index goes by them."""
    known_tokens: int = 0
    """As `prompt_tokens`, by the token ids of the prompts; 0: they are not known."""


class Seen(Struct, frozen=True, gc=False):
    """`Observed`, before names of adapters are hashed."""

    at_s: Seconds
    slot: int
    metrics: EndpointMetrics


class Ended(Struct, frozen=True, gc=False):
    """`Completed`, and what the engine said it took."""

    event: Completed
    output_tokens: int | None
    cached_tokens: int | None


class Decided(Struct, frozen=True, gc=False):
    """`Scheduled`, what was asked, and the name of the endpoint where it went."""

    event: Scheduled
    asked: Asked
    endpoint: str


class Heard(Struct, frozen=True, gc=False):
    """`Told`, before keys are hashed."""

    at_s: Seconds
    slot: int
    cleared: bool
    engine_block_tokens: int
    changes: Sequence[Changed]
    rank: int


Note: TypeAlias = Event | Seen | Decided | Ended | Heard
"""What a witness tells; what clients wrote is in it as they wrote it."""


def told_of(heard: Heard, salt: Salt) -> Told:
    """What can be written of what an engine said."""
    return Told(
        at_s=heard.at_s,
        slot=heard.slot,
        cleared=heard.cleared,
        engine_block_tokens=heard.engine_block_tokens,
        rank=heard.rank,
        blocks=tuple(
            Blocks(
                held=changed.held,
                tier=changed.tier,
                keys=salt.blocks(pack_blocks(changed.keys)),
            )
            for changed in heard.changes
        ),
    )


def changes_of(told: Told) -> list[Changed]:
    """The same again, with the keys that are written."""
    return [
        Changed(blocks.held, blocks.tier, array("Q", packed_chain(blocks.keys)).tolist())
        for blocks in told.blocks
    ]


def page_of(metrics: EndpointMetrics, salt: Salt) -> EndpointMetrics:
    """What is written of a scrape: what decides and is told, and nothing else; adapters by keyed hashes."""
    page: dict[str, Any] = {
        name: default if value != value or name in _UNDECIDING else value  # noqa: PLR0124  NaN
        for name, default, value in zip(
            EndpointMetrics.__struct_fields__,
            EndpointMetrics.__struct_defaults__,
            msgspec.structs.astuple(metrics),
            strict=True,
        )
    }
    if metrics.adapters is not None:
        page["adapters"] = _salted(metrics.adapters, salt)
    return EndpointMetrics(**page)


def same_page(one: EndpointMetrics, other: EndpointMetrics) -> bool:
    """Whether two of `page_of` tell the same: what they do not tell is the very same NaN."""
    return one is other or msgspec.structs.astuple(one) == msgspec.structs.astuple(other)


def member_of(slot: int, endpoint: Endpoint) -> Member:
    """What can be written of an endpoint: all but where it is scraped."""
    return Member(
        slot=slot,
        endpoint_id=endpoint.endpoint_id,
        name=endpoint.name,
        address=endpoint.address,
        incarnation=endpoint.incarnation,
        labels=endpoint.labels,
        scraped=endpoint.metrics is not None,
        ready_after_s=endpoint.ready_after_s,
    )


def endpoint_of(member: Member) -> Endpoint:
    """The endpoint again."""
    return Endpoint(
        endpoint_id=member.endpoint_id,
        name=member.name,
        address=member.address,
        incarnation=member.incarnation,
        labels=member.labels,
        metrics=MetricsTarget(port=1) if member.scraped else None,
        ready_after_s=member.ready_after_s,
    )


def _salted(report: AdapterReport, salt: Salt) -> AdapterReport:
    told = (report.active, report.gpu, report.cpu, report.pinned)
    active, gpu, cpu, pinned = (frozenset(map(salt.name, names)) for names in told)
    return msgspec.structs.replace(report, active=active, gpu=gpu, cpu=cpu, pinned=pinned)
