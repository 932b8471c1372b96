"""The events of a journal at the level of inputs: what a scheduler received and decided, in order.

A scheduler with the same seed that receives all of them in the same order decides the same again, if
no peers share records with it. It has no clock and no unseeded randomness. Text written by clients is
not in the events. Models, sessions, salts and the blocks of prompts are keyed hashes.
"""

from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import isnan
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Struct, field

from epp.core.decision.inputs import IndexMemoryLimited, Input, Tick
from epp.core.journal.lines import Salt, pack_blocks, packed_chain
from epp.core.knowledge.latency import Slo
from epp.core.kv_events.mirror import Changed
from epp.core.kv_events.payload import DEVICE
from epp.core.kv_events.stream import StreamState
from epp.core.prompt.blocks import HASH_BYTES
from epp.core.types import (
    AdapterReport,
    ApiKind,
    Endpoint,
    EndpointMetrics,
    KvTransfers,
    MetricsTarget,
    Seconds,
    Stage,
)

JOURNAL_FORMAT: Final = "homing-journal"
JOURNAL_VERSION: Final = 1
_PROMPT_TOKENS_MAX: Final = 10_000_000
_UNDECIDING: Final = frozenset({"ttft_sum_s", "tier_hit_tokens"})
"""Names of scraped values that no decision depends on, which the journal omits."""

_DECIDING_TRANSFERS: Final = ("received_tokens", "received_bytes", "ended", "ended_s")
"""Names of the values of `KvTransfers` on which decisions depend."""


class Level(StrEnum):
    """The level of detail of a journal."""

    DECISIONS = "decisions"
    """The journal records decisions and refusals with their scores, outcomes, and the states of
    endpoints.
    """
    INPUTS = "inputs"
    """The journal records what a scheduler needs to make the same decisions again, except for records
    that peers share and for requests outside the sample.
    """


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
    """Exact time of the event by the monotonic clock of the picker, in seconds."""


class Configured(_Event, frozen=True, kw_only=True):
    """The configuration that applies to the following events: the document, and the flags that
    affect decisions.
    """

    generation: int
    hash: str
    document: str
    block_tokens: int = 64
    """Number of tokens in a block of the requests that follow this event."""
    metrics_staleness_s: Seconds
    refresh_interval_s: Seconds
    fallback_endpoints_max: int = 0
    lease_ttl_without_response_phase_s: Seconds = 60.0
    indexes_bytes: int | None = None
    """Maximum memory in bytes of all prefix indexes together, or None if the document sets the
    limits.
    """


class Member(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An endpoint of the pool, as the journal records it."""

    slot: int
    endpoint_id: str
    name: str
    address: str
    incarnation: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    scraped: bool = True
    ready_after_s: float = 0.0
    node: str = ""
    """IP address of the endpoint's Kubernetes node, or "" if unknown."""


class Replaced(_Event, frozen=True, kw_only=True):
    """A change of the pool: from now on, it consists of exactly these endpoints."""

    members: tuple[Member, ...]


class Observed(_Event, frozen=True, kw_only=True):
    """A successful scrape of the metrics of an endpoint."""

    slot: int
    page: EndpointMetrics | None = None
    """Scraped values as `page_of` returns them, or None if they equal the endpoint's previous ones."""


class Opened(_Event, frozen=True, kw_only=True):
    """The first record of a journal segment, which describes the segment."""

    format: str = JOURNAL_FORMAT
    version: int = JOURNAL_VERSION
    level: Level
    origin: str
    """Identifier of the picker process that wrote the segment. Its segments are numbered from 0."""
    segment: int
    picker: str = ""
    """Name of the picker's pod, or "" if there is none."""
    began_s: float = 0.0
    """Unix time in seconds that is not after any record of the segment, such as the time at which
    it began.
    """
    unix_s: float = 0.0
    """Number of seconds to add to `at_s` of the segment's events to get Unix time."""
    context: int = 0
    """Number of following records that repeat the state before the segment.

    They are for readers that have not read the previous segment completely.
    """
    missing: int = 0
    """Number of records that were lost between the previous segment and this one."""
    seed: int = 0
    salt: str = ""
    """Value of `Salt.identity` of the salt of the segment's keyed hashes, or "" at the level of
    decisions.
    """
    share: float = 1.0
    """Share of the sessions whose requests are recorded, 0 to 1."""
    decisions: int = 0
    """Number of the last decision that was recorded before this segment, as the scheduler counts its
    decisions; 0 if there was none, or at the level of decisions.
    """
    block_tokens: int = 64
    """Number of tokens in a block of the requests in this segment."""


class Unanswered(_Event, frozen=True, kw_only=True):
    """A failed scrape of the metrics of an endpoint. `answered` is False if there was no
    connection, or no response in time.
    """

    slot: int
    answered: bool


class Shape(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The parts of a request that affect its placement; all text is replaced by keyed hashes."""

    model: str = ""
    cache_salt: str = ""
    session: str = ""
    prompt_tokens: int
    output_tokens_max: int | None = None
    priority: int = 0
    chains: tuple[bytes, ...] = ()
    """Keyed hashes of the blocks of each prompt, eight bytes for each block, little-endian."""
    token_chains: tuple[bytes, ...] = ()
    """Keyed hashes of the blocks of each prompt over its token ids; () if the ids are unknown."""
    media: bytes = b""
    """Keyed hash of eight bytes of each distinct image, audio or video, if an index uses them."""
    known_tokens: int = 0
    """Number of prompt tokens counted by token ids, if it differs from `prompt_tokens`; 0 if
    unknown or equal.
    """
    ttft_slo_s: Seconds | None = None
    """Maximum time to first token that the client asked for, or None if it asked for none."""
    tpot_slo_s: Seconds | None = None
    """Maximum time per output token that the client asked for, or None if it asked for none."""


class ScheduledLeg(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The endpoint that was chosen for the prefill or encode stage of a request, as the journal
    records it.
    """

    stage: Stage
    slot: int
    """Slot of the endpoint that was chosen for the stage."""
    matched_blocks: int = 0
    """Number of blocks of the prompt that the endpoint was estimated to have cached."""
    others: tuple[int, ...] = ()
    """Slots of further endpoints that work on the same stage of the request."""


class Scheduled(_Event, frozen=True, kw_only=True):
    """A request and the decision about it: the chosen endpoint, or the refusal."""

    request: int
    """Number of the request among the recorded ones, from 0."""
    slot: int
    """Slot of the endpoint that the picker named to the gateway, or -1 if the request was refused.
    """
    decision: int = 0
    """Number of the decision, or 0 if the request was refused."""
    matched_blocks: int = 0
    """Number of blocks of the prompt that the chosen endpoint was estimated to have cached."""
    ready: int = 0
    refused: str = ""
    """Reason why the request was refused, or "" if it was not refused."""
    api: ApiKind = ApiKind.OPAQUE
    stream: bool = False
    subset: tuple[int, ...] | None = None
    """Slots of the ready endpoints to which the gateway limited the request, or None if it gave no
    limit.
    """
    replicas_unheard: int = 0
    shape: Shape | None = None
    """The parts of the request that affect its placement, or None if they were lost."""
    route: str = ""
    """Route of the request (`Route`), or "" if one profile alone chooses among all candidates, or if
    the request was refused.
    """
    uncached_tokens: int = 0
    """Number of prompt tokens that the endpoint in `slot` was estimated not to have cached. It is 0
    if one profile alone chooses among all candidates, or if the request was refused.
    """
    earlier: tuple[ScheduledLeg, ...] = ()
    """Legs of the prefill and encode stages, if other endpoints work on them."""


class Reported(_Event, frozen=True, kw_only=True):
    """A report of an engine's load in the response to a request. A value that the engine did not
    report is None.
    """

    request: int
    waiting_requests: float | None = None
    running_requests: float | None = None
    kv_cache_usage: float | None = None


class Responding(_Event, frozen=True, kw_only=True):
    """The beginning of a successful response to a request that several endpoints serve."""

    request: int


class FirstOutput(_Event, frozen=True, kw_only=True):
    request: int


class Rescheduled(_Event, frozen=True, kw_only=True):
    """A report of the gateway that another endpoint than the chosen one serves the request."""

    request: int
    slot: int
    """Slot of the endpoint that serves the request, or -1 if it is not in the pool."""


class Completed(_Event, frozen=True, kw_only=True):
    request: int
    ending: str
    status: int | None = None
    by_gateway: bool = False
    retry_after_s: Seconds | None = None
    """Pause in seconds that a response 429 or 503 requested, or None if it requested none."""
    output_tokens: int | None = None
    """Number of tokens of the answer, or None if the engine did not report this number."""
    cached_tokens: int | None = None
    """Number of prompt tokens that the engine found in its cache, or None if the engine did not
    report this number.
    """


class Ticked(_Event, frozen=True, kw_only=True):
    """A call for the scheduler's bounded housekeeping, about once a second."""


class MemoryLimited(_Event, frozen=True, kw_only=True):
    share: float


PLAIN: Final[Mapping[type[Input], type[_Event]]] = {
    IndexMemoryLimited: MemoryLimited,
    Tick: Ticked,
}
"""Event type for each type of input that is recorded unchanged; the event has the fields of the
input and the time.

These inputs must not contain text written by clients.
"""


def plain_event(given: Input, now: Seconds) -> "Event | None":
    """Return the event for an input whose type is in `PLAIN`, or None for another input."""
    kind = PLAIN.get(type(given))
    if kind is None:
        return None
    event: Event = kind(at_s=now, **msgspec.structs.asdict(given))  # type: ignore[assignment]
    return event


def plain_input(event: "Event") -> Input | None:
    """Return the input for an event whose type is in `PLAIN`, or None for another event."""
    kind = _PLAIN_INPUTS.get(type(event))
    if kind is None:
        return None
    fields = msgspec.structs.asdict(event)
    del fields["at_s"]
    return kind(**fields)


_PLAIN_INPUTS: Final = {event: given for given, event in PLAIN.items()}


class Learnt(_Event, frozen=True, kw_only=True):
    """The number of records that peers shared with the picker since the previous event of this
    type. The content of the records is not captured.
    """

    records: int


class Blocks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keys of blocks over token ids in one tier that an engine stored or removed. They are keyed
    hashes of eight bytes each, like the blocks of requests.
    """

    held: bool = True
    """True if the engine stored the blocks, False if it removed them."""
    tier: str = DEVICE
    keys: bytes


class Told(_Event, frozen=True, kw_only=True):
    """A report of an engine about blocks that it stored or removed, made from its KV-cache events."""

    slot: int
    cleared: bool = False
    """True if the engine dropped all cached blocks of the rank before these changes."""
    engine_block_tokens: int = 0
    blocks: tuple[Blocks, ...] = ()
    rank: int = 0


class Streamed(_Event, frozen=True, kw_only=True):
    """A change of the state of an engine's KV event stream."""

    slot: int
    state: StreamState
    complete: bool = False
    rank: int = 0


class Voided(_Event, frozen=True, kw_only=True):
    """A report that all KV-cache events of one rank of an engine so far became invalid."""

    slot: int
    rank: int = 0


class Lost(_Event, frozen=True, kw_only=True):
    """A gap in a journal: the writer lost `events` records at this place."""

    events: int


SchedulerEvent: TypeAlias = (
    Configured
    | Replaced
    | Observed
    | Unanswered
    | Scheduled
    | Reported
    | Responding
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
"""Any event of a scheduler, that is, an input or a decision, or a gap between events."""
Event: TypeAlias = Opened | SchedulerEvent
"""Any record of a journal at the level of inputs: an event of a scheduler, or the first record of a
segment.
"""


class Asked(Struct, frozen=True, gc=False):
    """The parts of a request that affect its placement, before text of the client is hashed."""

    model: str
    cache_salt: str
    session: str
    prompt_tokens: int
    output_tokens_max: int | None
    priority: int
    chains: tuple[bytes, ...]
    """Chain of block hashes of each prompt at the recorded block size, in native byte order."""
    token_chains: tuple[bytes, ...] = ()
    """Chain of block hashes of each prompt over its token ids; () if the ids are unknown."""
    media: tuple[bytes, ...] = ()
    """Hash of each distinct image, audio or video in the prompts, if an index uses them."""
    known_tokens: int = 0
    """Number of prompt tokens counted by token ids; 0 if unknown."""
    slo: Slo = Slo()


class Seen(Struct, frozen=True, gc=False):
    """A successful scrape as a `CaptureWitness` records it: an `Observed` event before adapter
    names are hashed.
    """

    at_s: Seconds
    slot: int
    metrics: EndpointMetrics


class Decided(Struct, frozen=True, gc=False):
    """A decision as a `CaptureWitness` records it: a `Scheduled` event, and the request before its
    text is hashed.
    """

    event: Scheduled
    asked: Asked


class Heard(Struct, frozen=True, gc=False):
    """The changes of an engine's cached blocks as a `CaptureWitness` records them: a `Told` event
    before its keys are hashed.
    """

    at_s: Seconds
    slot: int
    cleared: bool
    engine_block_tokens: int
    changes: Sequence[Changed]
    rank: int


Note: TypeAlias = Event | Seen | Decided | Heard
"""A record as a `CaptureWitness` makes it, in which text may still be as the client wrote it. A
`Transcript` converts it to an `Event`.
"""


def shape_of(asked: Asked, salt: Salt) -> Shape:
    """Return the recorded parts of a request, with keyed hashes in place of all text. The token
    counts of the prompt are clamped to the bounds of the capture format.
    """
    known = 0 if asked.known_tokens == asked.prompt_tokens else asked.known_tokens
    return Shape(
        model=salt.name(asked.model),
        cache_salt=salt.name(asked.cache_salt),
        session=salt.name(asked.session),
        prompt_tokens=min(max(1, asked.prompt_tokens), _PROMPT_TOKENS_MAX),
        output_tokens_max=asked.output_tokens_max or None,
        priority=asked.priority,
        chains=tuple([salt.blocks(packed_chain(chain)) for chain in asked.chains]),
        token_chains=tuple([salt.blocks(packed_chain(chain)) for chain in asked.token_chains]),
        media=salt.blocks(b"".join(item[:HASH_BYTES] for item in asked.media)),
        known_tokens=min(known, _PROMPT_TOKENS_MAX),
        ttft_slo_s=asked.slo.ttft_s,
        tpot_slo_s=asked.slo.tpot_s,
    )


def told_of(heard: Heard, salt: Salt) -> Told:
    """Return the `Told` event for `heard`, the changes of an engine's cached blocks, with keyed
    hashes in place of block keys.
    """
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
    """Return the changes of cached blocks in the journal event `told`. Their keys are keyed hashes."""
    return [
        Changed(blocks.held, blocks.tier, array("Q", packed_chain(blocks.keys)).tolist())
        for blocks in told.blocks
    ]


def page_of(metrics: EndpointMetrics, salt: Salt) -> EndpointMetrics:
    """Return the scraped values that affect decisions, with keyed hashes in place of adapter names."""
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
    if metrics.transfers is not None:
        page["transfers"] = _deciding(metrics.transfers)
    return EndpointMetrics(**page)


def _deciding(transfers: KvTransfers) -> KvTransfers | None:
    """Return the values of `transfers` on which decisions depend, or None if there are none."""
    values = {name: getattr(transfers, name) for name in _DECIDING_TRANSFERS}
    known = {name: value for name, value in values.items() if not isnan(value)}
    return KvTransfers(**known) if known else None


def same_page(one: EndpointMetrics, other: EndpointMetrics) -> bool:
    """Return whether two pages of scraped values, as from `page_of`, have equal values. Unknown
    values count as equal if both pages have the very same NaN object.
    """
    return one is other or msgspec.structs.astuple(one) == msgspec.structs.astuple(other)


def member_of(slot: int, endpoint: Endpoint) -> Member:
    """Return the journal's record of the endpoint in `slot`, without the address of its metrics."""
    return Member(
        slot=slot,
        endpoint_id=endpoint.endpoint_id,
        name=endpoint.name,
        address=endpoint.address,
        incarnation=endpoint.incarnation,
        labels=endpoint.labels,
        scraped=endpoint.metrics is not None,
        ready_after_s=endpoint.ready_after_s,
        node=endpoint.node_address,
    )


def endpoint_of(member: Member) -> Endpoint:
    """Return the endpoint of a journal's record. Its metrics target is a placeholder if the
    endpoint was scraped.
    """
    return Endpoint(
        endpoint_id=member.endpoint_id,
        name=member.name,
        address=member.address,
        incarnation=member.incarnation,
        labels=member.labels,
        metrics=MetricsTarget(port=1) if member.scraped else None,
        ready_after_s=member.ready_after_s,
        node_address=member.node,
    )


def _salted(report: AdapterReport, salt: Salt) -> AdapterReport:
    told = (report.active, report.gpu, report.cpu, report.pinned)
    active, gpu, cpu, pinned = (frozenset(map(salt.name, names)) for names in told)
    return msgspec.structs.replace(report, active=active, gpu=gpu, cpu=cpu, pinned=pinned)
