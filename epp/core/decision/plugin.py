"""The protocols that plugins implement.

A plugin is a frozen `msgspec.Struct`. Its fields are its parameters, spelt as in the
`EndpointPickerConfig` and checked on construction; `type_name` is its name there. A plugin is a
pure function of its arguments: it has no clock, no randomness and no files. State that outlives a
request belongs to an affinity index. The scheduler owns the indexes, and plugins see each only as a
column.

A plugin declares everything beyond its main method as `abilities` (`epp/core/abilities`). The
protocols below `Filter`, `Scorer` and `Picker` correspond to these abilities.

n is the number of candidates. A plugin may write to a column that it requested, and a picker may
write to the sums that it receives. `candidates.slot` is read-only.
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
"""Names that change only when an engine reports new values or when the list of endpoints changes,
and the model of a request. If a scorer's `reads` has only these names, its scores are cached for
each model until one of the other values changes.
"""
PREFIX_READS: Final = ("matched_blocks", "total_blocks", "uncached_tokens", "cold")
"""Names in `READABLE` that depend on the default prefix index, which is created if a plugin may read
one of them and no prefix index is configured.
"""
PEER_READS: Final = frozenset({"nearness", "peer", "peer_candidates"})
"""Names that depend on the endpoint that was chosen for another stage."""
TOKEN_READS: Final = ("token_ids", "token_media", "known_tokens")
"""Request fields that a `token-producer` fills; if a plugin reads one of them, requests wait for
the tokens.
"""
READABLE: Final = tuple(
    dict.fromkeys(
        (
            *KEPT_READS,
            *(name for name, member in vars(Candidates).items() if isinstance(member, property)),
            "rendezvous",
            "link_bytes_per_s",
            *InferenceRequest.__struct_fields__,
            *Moment.__struct_fields__,
        )
    )
)
"""Names that a plugin may list in its `reads`: columns of the candidates, fields of the request and
of its moment.
"""


class Filter(Plugin, Protocol):
    """A filter, which drops candidates that must not serve a request."""

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        """Return bool[n]: True for each candidate that may serve `request`. Never called with n =
        0.
        """
        ...


class HoldsRequests(Protocol):
    """A filter that can make requests wait in the picker's queue before placement."""

    def holds(self, request: InferenceRequest, candidates: Candidates, /) -> bool:
        """Return whether `request` must wait now. Never called with n = 0.

        `candidates` are the ready endpoints that are neither ejected nor excluded as full, unless
        no other endpoint is left, before filters and without index lookups.
        """
        ...


class Scorer(Plugin, Protocol):
    """A plugin that rates each candidate with a score from 0 to 1."""

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        """Return float64[n] in [0, 1], with NaN where the column that it needs is unknown.

        None has the same meaning as NaN for all candidates, and is faster. Never called with n = 0.
        The framework clamps the scores. It replaces an unknown score by the median of the known
        ones, or by 0.5 if none is known. A scorer only passes NaN on.
        """
        ...


class TellsCost(Protocol):
    """A scorer that prefers the lowest cost and can return the parts of the cost.

    The scores must fall linearly with the cost wherever the cost is finite. The cost of any
    candidate can then be computed from its score and from the costs of two others.

    A class may also have `first_token_parts`, a tuple of names of parts. These are the parts that
    the request waits through before its first token. Their sum is reported as the expected time to
    first token. A part with the name `prefill` is the request's own prefill, which is left out if
    another endpoint prefills.
    """

    cost_unit: ClassVar[str]
    """Unit of the scorer's cost and of all its parts, such as "s"."""

    def cost_parts(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> Mapping[str, Floats]:
        """Return the parts of each candidate's cost: name -> float64[n], in `cost_unit`.

        The framework usually calls this after the decision, for the chosen candidate and the
        runner-up. Both are rebuilt from their stored numbers (`NUMBERS`). A third candidate may
        stand in for the one with the longest match. The request then has its model and its numbers, but
        no prompt. If a cost may depend on more than these numbers, the framework calls this during
        the decision, for all candidates. Examples are adapters, peers that do not share, and load
        reports that are missing or older than `REPORTED_S_MAX`.
        """
        ...


class MarksResponses(Plugin, Protocol):
    """A plugin that sets headers on the response: a filter, a scorer, or a plugin for headers
    alone.
    """

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        """Return the headers to set on the response to `request`, which was routed to `endpoint`,
        by name.

        `served` is the address that the gateway reports as the origin of the response, or "" if it
        reports none.
        """
        ...


class MarksRequests(Plugin, Protocol):
    """A plugin that sets headers on the request: a filter, a scorer, or a plugin for headers alone."""

    own_headers: ClassVar[tuple[str, ...]]
    """Lower-case names of the request headers that this plugin sets. A client's headers with these
    names are removed.
    """

    def request_headers(
        self, request: InferenceRequest, candidates: Candidates, endpoint: Endpoint, /
    ) -> Mapping[str, str]:
        """Return the headers among `own_headers` to set on `request`, which is routed to
        `endpoint`.

        `candidates` are those of the decision before filters. Usually they are the ready endpoints
        that are neither ejected nor excluded as full; flow control may leave only those with room.
        The request no longer has its prompt.
        """
        ...


class ChoosesRanks(Plugin, Protocol):
    """A plugin that selects the data-parallel rank of an endpoint, and names it in a header for the
    engine.
    """

    rank_header: ClassVar[str]
    """Lower-case name of the request header with the rank. A client's header with this name is
    removed.
    """

    def rank_of(self, held_tokens: Sequence[int], sent: Sequence[int], /) -> int | None:
        """Return the rank of the picked endpoint that must serve the request, or None if the engine
        chooses.

        `held_tokens` has the number of prompt tokens that each rank is estimated to have cached.
        `sent` has the number of running requests that this picker sent to each rank by the header.
        Both have a member for each rank, and at least two.
        """
        ...


class Picker(Plugin, Protocol):
    """A picker plugin, which chooses endpoints by the weighted sums of their scores."""

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        """Return int[k], k >= 1: positions of the chosen candidates, the destination first.

        `scores` is float64[n] without NaN, the weighted sum of each candidate. `rotation` counts
        decisions and breaks ties round robin.
        """
        ...


class GoesBySessions(Protocol):
    """A scorer that may use the session of a request. The picker counts the sessions that this
    scorer returns, to learn whether clients return to them (`sessions_return`).
    """

    def session_of(self, request: InferenceRequest, /) -> str:
        """Return the session that `request` names, or "" if it names none or sessions do not matter
        at present.
        """
        ...


class ReadsIndex(Protocol):
    """A filter or scorer that reads an affinity index. The framework creates the index if the
    configuration does not.
    """

    producer_type: ClassVar[str]
    """Type name of the index that is created if the configuration does not declare one."""

    @property
    def producer(self) -> str | None:
        """Return the name of the index that this plugin reads, "" for the default prefix index, or
        None if its parameters need no index.
        """
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
"""Names of the members that a plugin class has if and only if it declares the ability, by ability."""
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
"""Names of the members that a plugin, or the settings of an index, must have for each ability that
it declares, by ability.
"""
_DECLARED_ONLY: Final = ("reads", "sheds_load")
"""Names of abilities without any member: a plugin only declares them."""


def declaration_fault(kind: type[Any]) -> str | None:
    """Return the words that follow the name of a plugin class to say what is wrong with its
    abilities, or None if nothing is.
    """
    members = set(dir(kind))
    missing = "abilities" not in members or not isinstance(kind.abilities, Abilities)
    # An index must declare its abilities explicitly. With the defaults, peers and metrics would
    # miss it.
    if missing or ("open" in members and kind.abilities is Parameters.abilities):
        return "declares no abilities; it needs a class variable `abilities` of type Abilities"
    for name in _DECLARED_ONLY:
        if name in members:
            return f"has a class variable {name}, which belongs in its abilities"
    reads: object = kind.abilities.reads
    if reads is not None and not (isinstance(reads, tuple) and set(reads) <= set(READABLE)):
        return f"reads {reads!r}, expected a tuple of names among {', '.join(READABLE)}"
    declared = structs.asdict(kind.abilities)
    for ability, names in _NEEDED.items():
        lacking = [name for name in names if name not in members]
        if declared[ability] and lacking:
            return f"declares {ability} but has no {', '.join(lacking)}"
    for ability, names in _MEMBERS.items():
        if not declared[ability] and members.issuperset(names):
            return f"has {', '.join(names)} but does not declare {ability}=True in its abilities"
    return None


def may_read_prefix(abilities: Abilities) -> bool:
    """Return whether a filter, scorer or picker plugin with these abilities may read the default
    prefix index.
    """
    return _may_read(abilities, PREFIX_READS)


def may_read_tokens(abilities: Abilities) -> bool:
    """Return whether a filter, scorer or picker plugin with these abilities may read the prompt's
    token ids.
    """
    return _may_read(abilities, TOKEN_READS)


def _may_read(abilities: Abilities, names: tuple[str, ...]) -> bool:
    if abilities.reads is None:
        # Such a plugin reads only the index that it names.
        return not abilities.reads_index
    return not set(names).isdisjoint(abilities.reads)
