"""The whole extension surface: a few small protocols.

A plugin is a frozen `msgspec.Struct`. Its fields are its parameters, spelt as in the
`EndpointPickerConfig` and checked on construction; `type_name` is its name there. It is a pure
function of its arguments: no clock, no dice, no files. State that outlives a request belongs to an
affinity index, which the scheduler owns and plugins only see as a column.

What a plugin does besides its verb it declares as `abilities` (`epp/core/abilities`); nothing finds it
out. Each protocol here below the verbs is one such ability.

n is the number of candidates. A column that a plugin asks for is its own, to use as scratch, and so
are the sums that a picker gets; `candidates.slot` cannot be written.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar, Final, Protocol

from msgspec import structs

from epp.core.abilities import Abilities
from epp.core.knowledge.candidates import VERSIONED, Bools, Candidates, Floats, Ints
from epp.core.moment import Moment
from epp.core.parameters import Parameters, Plugin
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint

MODEL: Final = "model"
KEPT_READS: Final = (*VERSIONED, MODEL)
"""What `reads` of a scorer may name whose scores are kept until one of them changes."""
PREFIX_READS: Final = ("matched_blocks", "total_blocks", "uncached_tokens", "cold")
"""What the default prefix index fills: it is made for whoever reads any of them."""
TOKEN_READS: Final = ("token_ids", "token_media", "known_tokens")
"""What a request has to wait for where a `token-producer` finds it out."""
READABLE: Final = tuple(
    dict.fromkeys(
        (
            *KEPT_READS,
            *(name for name, member in vars(Candidates).items() if isinstance(member, property)),
            "rendezvous",
            *InferenceRequest.__struct_fields__,
            *Moment.__struct_fields__,
        )
    )
)
"""What `reads` may name: columns of the candidates, fields of the request and of its moment."""


class Filter(Plugin, Protocol):
    """Says who may serve."""

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        """Return bool[n], true for each candidate that stays. Never called with n = 0."""
        ...


class HoldsRequests(Protocol):
    """A filter that has requests wait before they are placed, where there is a line to wait in."""

    def holds(self, request: InferenceRequest, candidates: Candidates, /) -> bool:
        """Whether `request` is to wait now. Never called with n = 0.

        `candidates`: all that are ready, before filters; no index was asked of them.
        """
        ...


class Scorer(Plugin, Protocol):
    """Says how much it prefers each."""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        """Return float64[n] in [0, 1]; NaN where the column it needs is unknown.

        None says the same as NaN for all, sooner. Never called with n = 0. The framework clamps,
        and gives an unknown candidate the median of the known ones, or 0.5 when none is known: a
        scorer only lets NaN through.
        """
        ...


class TellsCost(Protocol):
    """A scorer that prefers whoever costs least, and can say what the cost is made of.

    Its scores fall with the cost, by as much for each unit of it, wherever the cost is finite: so what
    any candidate cost can be told by its score and by the costs of two others.

    A class may also have `first_token_parts`, a tuple of names: of the parts that the request itself waits
    through before its first token. Their sum is then reported as the expected time to first token.
    """

    cost_unit: ClassVar[str]
    """Of all parts, such as "s"."""

    def cost_parts(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> Mapping[str, Floats]:
        """What adds up to the cost of each candidate: a name -> float64[n], in `cost_unit`.

        As a rule this is asked after the decision, of the chosen candidate and the next best, which are
        built again from the numbers that were kept of them (`NUMBERS`), and of a third that stands in for
        the one with the greatest match. The request then has its model and its numbers, and no prompt.
        Where a cost may depend on more than that (adapters, peers that are not heard, reports that are
        missing or old), it is asked of all candidates during the decision.
        """
        ...


class MarksResponses(Plugin, Protocol):
    """A filter, a scorer, or what is nothing else, that wants headers on the response."""

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        """Headers to set on the response to `request`, which was sent to `endpoint`.

        `served`: the address that the gateway says it is from, "" if it does not say.
        """
        ...


class MarksRequests(Plugin, Protocol):
    """A filter, a scorer, or what is nothing else, that wants headers on the request."""

    own_headers: ClassVar[tuple[str, ...]]
    """Lower-case names of those that it sets: a client's are removed."""

    def request_headers(
        self, request: InferenceRequest, candidates: Candidates, endpoint: Endpoint, /
    ) -> Mapping[str, str]:
        """Of `own_headers` those to set on `request`, which is sent to `endpoint`.

        `candidates`: all that were ready, before filters. Of the request there is no prompt any more.
        """
        ...


class ChoosesRanks(Plugin, Protocol):
    """Says which rank of an endpoint with several serves a request, in a header for its engine."""

    rank_header: ClassVar[str]
    """Lower-case name of the header that it sets: a client's is removed."""

    def rank_of(self, held_tokens: Sequence[int], sent: Sequence[int], /) -> int | None:
        """The rank of the endpoint that was picked; None: its engine is to choose.

        `held_tokens`: of the prompt, that each rank is believed to hold. `sent`: requests that this picker
        has sent to each by the header, and that have not ended. Both have two members or more.
        """
        ...


class Picker(Plugin, Protocol):
    """Chooses from the weighted sums."""

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        """Return int[k], k >= 1: positions among the candidates, the destination first.

        `scores` is float64[n] without NaN. `rotation` counts decisions; ties rotate by it.
        """
        ...


class GoesBySessions(Protocol):
    """A scorer to which a session matters as long as sessions come again (`sessions_return`)."""

    def session_of(self, request: InferenceRequest, /) -> str:
        """What `request` names as its session; "" if nothing, or if it does not matter now."""
        ...


class ReadsIndex(Protocol):
    """A filter or scorer that needs an affinity index; one that is missing is made for it."""

    producer_type: ClassVar[str]
    """The type to make it of."""

    @property
    def producer(self) -> str | None:
        """Name of the index, "" for the default prefix index; None: these parameters need none."""
        ...


_MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "reads_index": ("producer_type", "producer"),
    "configures_index": ("producer_parameters",),
    "holds_requests": ("holds",),
    "goes_by_sessions": ("session_of",),
    "marks_responses": ("response_headers",),
    "marks_requests": ("own_headers", "request_headers"),
    "chooses_ranks": ("rank_header", "rank_of"),
    "tells_cost": ("cost_unit", "cost_parts"),
}
"""What a plugin has for an ability, and for nothing else."""
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    **_MEMBERS,
    "reads_session_tokens": ("reads_tokens",),
    "limits_metrics_age": ("metrics_age_max_s",),
    "tells_prefill_speed": ("peak_prefill_throughput",),
    "reads_attribute": ("attribute_key",),
    "brings_filter": ("filter",),
    "names_load_producer": ("in_flight_load_producer_name",),
    "warns": ("warnings",),
    "picks_several": ("max_num_of_endpoints",),
    "counts_blocks": ("block_tokens",),
    "names_sessions": ("session_in",),
    "limits_memory": ("memory_max_bytes",),
}
"""What a plugin, or the settings of an index, must have for each ability that it declares."""
_DECLARED_ONLY: Final = ("reads", "sheds_load")
"""Abilities that are nothing but declared."""


def declaration_fault(kind: type[Any]) -> str | None:
    """What is wrong with what the class of a plugin declares, to come behind its name; None: nothing."""
    members = set(dir(kind))
    missing = "abilities" not in members or not isinstance(kind.abilities, Abilities)
    # What an index can do is never left to the defaults: peers and metrics would go without it.
    if missing or ("open" in members and kind.abilities is Parameters.abilities):
        return "declares no abilities, expected Abilities as a class variable"
    for name in _DECLARED_ONLY:
        if name in members:
            return f"has a class variable {name}, expected it in its abilities"
    reads: object = kind.abilities.reads
    if reads is not None and not (isinstance(reads, tuple) and set(reads) <= set(READABLE)):
        return f"reads {reads!r}, expected a tuple of names among {', '.join(READABLE)}"
    declared = structs.asdict(kind.abilities)
    for ability, names in _NEEDED.items():
        lacking = [name for name in names if name not in members]
        if declared[ability] and lacking:
            return f"declares {ability}, and has no {', '.join(lacking)}"
    for ability, names in _MEMBERS.items():
        if not declared[ability] and members.issuperset(names):
            return f"has {', '.join(names)}, expected {ability}=True in its abilities"
    return None


def may_read_prefix(abilities: Abilities) -> bool:
    """Whether a filter, scorer or picker reads the default prefix index, as far as it declares."""
    return _may_read(abilities, PREFIX_READS)


def may_read_tokens(abilities: Abilities) -> bool:
    """Whether a filter, scorer or picker reads the ids of tokens, as far as it declares."""
    return _may_read(abilities, TOKEN_READS)


def _may_read(abilities: Abilities, names: tuple[str, ...]) -> bool:
    if abilities.reads is None:
        # The index that it reads is the one that it names.
        return not abilities.reads_index
    return not set(names).isdisjoint(abilities.reads)
