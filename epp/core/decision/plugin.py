"""The whole extension surface: a few small protocols.

A plugin is a frozen `msgspec.Struct`. Its fields are its parameters, spelt as in the
`EndpointPickerConfig` and checked on construction; `type_name` is its name there. It is a pure
function of its arguments: no clock, no dice, no files. State that outlives a request belongs to an
affinity index, which the scheduler owns and plugins only see as a column.

n is the number of candidates. A column that a plugin asks for is its own, to use as scratch, and so
are the sums that a picker gets; `candidates.slot` cannot be written.
"""

from collections.abc import Mapping
from random import Random
from typing import ClassVar, Final, Protocol, runtime_checkable

from epp.core.knowledge.candidates import VERSIONED, Bools, Candidates, Floats, Ints
from epp.core.parameters import Plugin
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint

MODEL: Final = "model"
READABLE: Final = (*VERSIONED, MODEL)
"""What `reads` of a scorer may name."""


class Filter(Plugin, Protocol):
    """Says who may serve."""

    sheds_load: ClassVar[bool]
    """True: when this filter leaves nobody the client is told 429, come back; false: 503."""

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        """Return bool[n], true for each candidate that stays. Never called with n = 0."""
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


@runtime_checkable
class TellsCost(Protocol):
    """A scorer that prefers whoever costs least, and can say what the cost is made of.

    Its scores fall with the cost, by as much for each unit of it, wherever the cost is finite: so what
    any candidate cost can be told by its score and by the costs of two others.
    """

    cost_unit: ClassVar[str]
    """Of all parts, such as "s"."""

    def cost_parts(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> Mapping[str, Floats]:
        """What adds up to the cost of each candidate: a name -> float64[n], in `cost_unit`.

        Asked after the fact, never while a request is decided: of the chosen candidate and the next
        best alone, which are made again of the numbers that were kept of them (`NUMBERS`). Of the
        request there are the model, its numbers, and no prompt.
        """
        ...


@runtime_checkable
class MarksResponses(Protocol):
    """A filter, a scorer, or what is nothing else, that wants headers on the response."""

    def response_headers(
        self, request: InferenceRequest, endpoint: Endpoint, served: str, /
    ) -> Mapping[str, str]:
        """Headers to set on the response to `request`, which was sent to `endpoint`.

        `served`: the address that the gateway says it is from, "" if it does not say.
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


@runtime_checkable
class ReadsColumns(Protocol):
    """A scorer that says what it reads: it is asked again only once that has changed.

    Until then its scores of the same candidates are taken as they were.
    """

    reads: ClassVar[tuple[str, ...]]
    """Columns of the candidates that only scrapes or the list of endpoints change, of `READABLE`, and
    "model" if it reads `request.model`. It reads nothing else of the request or the candidates."""


@runtime_checkable
class GoesBySessions(Protocol):
    """A scorer to which a session matters as long as sessions come again (`sessions_return`)."""

    def session_of(self, request: InferenceRequest, /) -> str:
        """What `request` names as its session; "" if nothing, or if it does not matter now."""
        ...


@runtime_checkable
class ReadsIndex(Protocol):
    """A filter or scorer that needs an affinity index; one that is missing is made for it.

    The default prefix index is also made for a plugin that reads it and declares nothing.
    """

    producer_type: ClassVar[str]
    """The type to make it of."""

    @property
    def producer(self) -> str | None:
        """Name of the index, "" for the default prefix index; None: these parameters need none."""
        ...
