"""What was decided, and why: found out once a decision, and told by everybody from here.

A decision holds the arrays that were decided by. What is to be told of them is worked out when it is
first asked for: the log's line, what the pages keep, spans, headers for clients and the simulator's
`decisions.jsonl` are projections of one account, so that no two of them can disagree. What the
numbers of endpoints were is known only until the next decision.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from epp.core.decision.costs import Cost
from epp.core.decision.decisive import decisive
from epp.core.decision.plugin import TellsCost
from epp.core.decision.profile import Scored
from epp.core.decision.shadow import ShadowVerdict
from epp.core.knowledge.candidates import Candidates, Ints
from epp.core.knowledge.inflight import Lease
from epp.core.knowledge.rebuilt import numbers_before
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint

_Found = TypeVar("_Found")


class _FoundOnce(Generic[_Found]):
    """As `functools.cached_property`, which up to Python 3.11 takes a lock that costs more than what
    is found here.
    """

    def __init__(self, find: Callable[[Any], _Found]) -> None:
        self._find: Final = find
        self._name: Final = find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, at: Any, kind: object = None) -> _Found:
        found = at.__dict__[self._name] = self._find(at)
        return found


class Role(StrEnum):
    """What an endpoint is chosen for."""

    SERVE = "serve"
    """The whole of a request."""


class Ranking(Struct, frozen=True, kw_only=True, dict=True):
    """How the candidates of a decision were ranked: as it is decided, or of the arrays that were kept."""

    scorers: tuple[str, ...]
    scored: Scored
    """Its rows are those of `scorers`, its columns the candidates."""
    picked: int
    """Position of the chosen endpoint among them."""

    @property
    def total(self) -> float:
        """The weighted sum of the chosen endpoint."""
        return float(self.scored.total[self.picked])

    @_FoundOnce
    def parts(self) -> list[float]:
        """What each scorer gave the chosen endpoint."""
        return self.scored.parts_of(self.picked)

    @_FoundOnce
    def runner_up(self) -> int | None:
        """Position of the best candidate that was not chosen; None: there was one alone."""
        return runner_up_of(self.scored, self.picked)

    @_FoundOnce
    def decided_by(self) -> tuple[str, ...]:
        """The fewest scorers without which the chosen endpoint would not be ahead, the greatest first."""
        if self.runner_up is None:
            return ()
        return decided_by(self.scorers, self.parts, self.scored.parts_of(self.runner_up))

    def best(self, most: int) -> list[int]:
        """Positions of the `most` best candidates, best first; the chosen one is always among them."""
        order: list[int] = (-self.scored.total).argsort(kind="stable")[:most].tolist()
        if self.picked not in order:
            order[-1] = self.picked
        return order


class Leg(Ranking, frozen=True, kw_only=True, dict=True):
    """One endpoint that was chosen for one part of a request, and why that one."""

    role: Role = Role.SERVE
    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...]
    ready: int
    """Endpoints that were ready and in the subset, before filters."""
    dropped: Mapping[str, Ints]
    """Name of the filter -> slots of the endpoints that it dropped."""
    candidates: Candidates
    """Those that were scored."""
    tellers: tuple[TellsCost | None, ...]
    lease: Lease
    matched_blocks: int
    """Leading full blocks of the prompt that `endpoint` is believed to hold."""
    total_blocks: int
    block_tokens: int
    rank: int | None = None
    """Of `endpoint`, that was told to serve; None: its engine chooses, or has no others."""
    costs: tuple[Cost, ...] | None = None
    """The costs that the `tellers` gave during the decision; None: the numbers of two endpoints give them again."""

    @property
    def request(self) -> InferenceRequest:
        return self.lease.request

    @property
    def eliminated(self) -> Mapping[str, int]:
        """Name of the filter -> how many endpoints it dropped."""
        dropped = self.dropped
        # Mostly none, and asked for with each decision.
        return {name: len(slots) for name, slots in dropped.items()} if dropped else {}

    @_FoundOnce
    def numbers(self) -> tuple[float, ...]:
        """`NUMBERS` of the chosen endpoint, this request counted."""
        return self.candidates.numbers_of(self.picked)

    @_FoundOnce
    def runner_up_numbers(self) -> tuple[float, ...]:
        """`NUMBERS` of the next best; (): there is none."""
        return () if self.runner_up is None else self.candidates.numbers_of(self.runner_up)

    @_FoundOnce
    def numbers_before(self) -> list[float]:
        """`NUMBERS` of the chosen endpoint, as the scorers saw them."""
        return numbers_before(
            self.numbers,
            prompt_tokens=self.request.prompt_tokens,
            prefill_tokens=self.lease.prefill_tokens,
            matched_blocks=self.matched_blocks,
        )

    @property
    def predicted_tokens(self) -> int:
        """Tokens of the prompt that the chosen endpoint is believed to hold."""
        return predicted_tokens(self.matched_blocks, self.block_tokens, self.request.prompt_tokens)


class Account(Struct, frozen=True, kw_only=True, gc=False):
    """One decision."""

    number: int
    request: InferenceRequest
    legs: tuple[Leg, ...]
    """In the order in which the request goes through them; one, where one endpoint serves."""
    shadow: ShadowVerdict | None

    @property
    def leg(self) -> Leg:
        """Of the endpoint that the gateway sends the request to."""
        return self.legs[0]


def runner_up_of(scored: Scored, picked: int) -> int | None:
    """Position of the best candidate beside the one that was `picked`; None: there is no other."""
    if scored.total.size < 2:
        return None
    rest = scored.total.copy()
    rest[picked] = -math.inf
    return int(rest.argmax())


def decided_by(
    scorers: Sequence[str], parts: Sequence[float], others: Sequence[float]
) -> tuple[str, ...]:
    """Of scorers that gave `parts` to the chosen endpoint and `others` to the next best; as of a ranking."""
    return tuple([scorers[at] for at in decisive(parts, others)])


def predicted_tokens(matched_blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """Tokens of a prompt that an endpoint with `matched_blocks` of its blocks is believed to hold."""
    return min(matched_blocks * block_tokens, prompt_tokens)


def rounded_parts(scorers: Sequence[str], parts: Sequence[float]) -> dict[str, float]:
    """What each scorer gave, as it is told."""
    return {scorer: round(part, 4) for scorer, part in zip(scorers, parts, strict=True)}
