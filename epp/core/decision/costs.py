"""Scorers of costs say what they decided by: the cost of the chosen endpoint and of the next best, in parts.

A cost becomes a score between the least and the greatest of all, so that one candidate which costs a
thousand times as much makes all others look alike. In its unit nothing is stretched.

As a rule the scorers are asked after the decision, when somebody wants to know: the two endpoints are
built again from the numbers that were kept of them. Where a cost depends on more, the scorers are asked
while the request is decided, and what they say is kept (`Scheduler.keeps_costs`).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from epp.core.decision.decisive import decisive
from epp.core.decision.failures import FLOATS, array_fault
from epp.core.decision.plugin import TellsCost
from epp.core.knowledge.candidates import NUMBERS, Candidates
from epp.core.knowledge.rebuilt import rebuilt_candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint

DIGITS: Final = 6
FRESH_S_MAX: Final = 1.0
"""A scorer may take the median of other endpoints for a report that is older."""

_MATCHED: Final = NUMBERS.index("matched_blocks")


class Cost(Struct, frozen=True):
    """What a scorer went by, of the chosen endpoint and then of the next best, if there was one."""

    scorer: str
    unit: str
    parts: tuple[Mapping[str, float], ...]
    """What adds up to the cost of each: a name -> how much, in `unit`."""
    first_token_parts: tuple[str, ...] = ()
    """The parts that the request waits through before its first token."""

    @property
    def first_token(self) -> float | None:
        """After how long the chosen endpoint is expected to give the first token, in `unit`.

        It is None if the scorer does not say.
        """
        if not self.first_token_parts:
            return None
        return sum(self.parts[0].get(name, 0.0) for name in self.first_token_parts)

    @property
    def totals(self) -> list[float]:
        """In `unit`."""
        return [sum(parts.values()) for parts in self.parts]

    @property
    def decided_by(self) -> list[str]:
        """The fewest parts without which the chosen one would not cost less, the greatest first."""
        if len(self.parts) < 2:
            return []
        chosen, other = self.parts[:2]
        names = list(chosen)
        # Of costs the lower is ahead.
        found = decisive([other[name] for name in names], [chosen[name] for name in names])
        return [names[at] for at in found]


class CostError(Exception):
    """What a plugin gave is no cost: what it gave instead."""


def cost_of(
    scorer: str,
    plugin: TellsCost,
    asked: InferenceRequest,
    candidates: Candidates,
    positions: Sequence[int],
) -> Cost:
    """Ask `plugin` for the cost of the candidates at `positions`: the chosen one, then the next best.

    Raises `CostError`, and what the plugin raises.
    """
    told = plugin.cost_parts(asked, candidates)
    for costs in told.values():
        if fault := array_fault(costs, FLOATS, len(candidates)):
            raise CostError(fault)
    return Cost(
        scorer,
        plugin.cost_unit,
        tuple(
            {name: round(costs.item(at), DIGITS) for name, costs in told.items()}
            for at in positions
        ),
        tuple(getattr(plugin, "first_token_parts", ())),
    )


def rebuilt_pair(
    endpoints: Sequence[Endpoint],
    numbers: Sequence[Sequence[float]],
    *,
    total_blocks: int,
    block_tokens: int,
    prompt_tokens: int,
    matched_most: int,
) -> Candidates:
    """The chosen endpoint and the next best, as the scorers saw them.

    `matched_most`: the most blocks that any candidate held. Where neither of the two held as many, a third
    candidate stands in for the one that did, because costs may depend on the greatest match.
    """
    endpoints, numbers = [*endpoints], [*numbers]
    if numbers and matched_most > max(row[_MATCHED] for row in numbers):
        endpoints.append(endpoints[0])
        third = [*numbers[0]]
        third[_MATCHED] = matched_most
        numbers.append(third)
    return rebuilt_candidates(
        endpoints,
        numbers,
        total_blocks=total_blocks,
        block_tokens=block_tokens,
        prompt_tokens=prompt_tokens,
    )


def cost_by_score(
    score: float, chosen: tuple[float, float], other: tuple[float, float]
) -> float | None:
    """What a candidate with `score` costs, by (score, cost) of two others.

    A score falls by as much for each unit of a cost (`TellsCost`), so that two are enough. None: they
    score the same, and nothing can be said of who is between or beyond.
    """
    (chosen_score, cost), (other_score, other_cost) = chosen, other
    if score == chosen_score:
        return cost
    if chosen_score == other_score or cost == other_cost:
        return None
    slope = (other_cost - cost) / (other_score - chosen_score)
    return round(cost + (score - chosen_score) * slope, DIGITS)
