"""What the scorers of costs went by, in their own unit: asked after the fact, of the two that matter.

A cost becomes a score between the least and the greatest of all, so that one candidate which costs a
thousand times as much makes all others look alike. In its unit nothing is stretched.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from epp.core.decision.decisive import decisive
from epp.core.decision.failures import FLOATS, array_fault
from epp.core.decision.plugin import TellsCost
from epp.core.knowledge.candidates import Candidates
from epp.core.prompt.request import InferenceRequest

DIGITS: Final = 6


class Cost(Struct, frozen=True):
    """What a scorer went by, of the chosen endpoint and then of the next best, if there was one."""

    scorer: str
    unit: str
    parts: tuple[Mapping[str, float], ...]
    """What adds up to the cost of each: a name -> how much, in `unit`."""

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


def cost_of(scorer: str, plugin: TellsCost, asked: InferenceRequest, pair: Candidates) -> Cost:
    """What `plugin` tells of one or two candidates. Raises `CostError`, and what the plugin raises."""
    told = plugin.cost_parts(asked, pair)
    for costs in told.values():
        if fault := array_fault(costs, FLOATS, len(pair)):
            raise CostError(fault)
    return Cost(
        scorer,
        plugin.cost_unit,
        tuple(
            {name: round(costs.item(at), DIGITS) for name, costs in told.items()}
            for at in range(len(pair))
        ),
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
