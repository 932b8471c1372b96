"""Costs that explain a decision: the cost of the chosen endpoint and of the runner-up, in parts.

A scorer maps costs to scores between the lowest and the highest cost. One candidate with a
thousandfold cost therefore makes all others look alike. A cost in its own unit shows the
difference.

The scorers usually compute these costs after the decision, when a reader requests them. The two
endpoints are then rebuilt from their stored numbers. If a cost depends on more than these numbers,
the scorers compute it during the decision and the record keeps it (`Placements.keeps_costs`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from epp.core.decision.decisive import decisive
from epp.core.decision.plugin import TellsCost
from epp.core.failures import FLOATS, PluginFailures, array_fault
from epp.core.knowledge.candidates import NUMBERS, Candidates
from epp.core.knowledge.prefill_speed import prefill_work
from epp.core.knowledge.rebuilt import rebuilt_candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Seconds

DIGITS: Final = 6

PREFILL_PART: Final = "prefill"
"""Name of the part of a cost that is the request's own prefill at a candidate."""
_MATCHED: Final = NUMBERS.index("matched_blocks")
_PENDING: Final = NUMBERS.index("inflight_prefill_tokens")
_SPEED: Final = NUMBERS.index("prefill_tokens_per_s")


class Cost(Struct, frozen=True):
    """The cost that a scorer computed for the chosen endpoint and, if there is one, for the
    runner-up.
    """

    scorer: str
    unit: str
    parts: tuple[Mapping[str, float], ...]
    """Named parts of the cost of each endpoint, in `unit`, whose sum is the cost: a mapping for the
    chosen endpoint, then one for the runner-up.
    """
    first_token_parts: tuple[str, ...] = ()
    """Names of those parts of the cost that the request waits through before its first token."""

    @property
    def first_token(self) -> float | None:
        """Return the expected time to first token at the chosen endpoint, in `unit`.

        It is None if the scorer declares no `first_token_parts`.
        """
        if not self.first_token_parts:
            return None
        return sum(self.parts[0].get(name, 0.0) for name in self.first_token_parts)

    def first_token_after(self, prefill_s: float | None) -> float | None:
        """Return the expected time to first token if another endpoint prefills in `prefill_s`
        seconds. Return `first_token` if `prefill_s` is None, and None if the cost is not in seconds.

        The own prefill (`PREFILL_PART`) does not apply then, and all other waits at the chosen
        endpoint pass meanwhile.
        """
        if prefill_s is None or self.first_token is None:
            return self.first_token
        if self.unit != "s":
            return None
        here = self.parts[0]
        waits = sum(here.get(name, 0.0) for name in self.first_token_parts if name != PREFILL_PART)
        return max(prefill_s, waits)

    @property
    def totals(self) -> list[float]:
        """Return the total cost of the chosen endpoint and of the runner-up, if there is one, in
        `unit`.
        """
        return [sum(parts.values()) for parts in self.parts]

    @property
    def decided_by(self) -> list[str]:
        """Return the names of the fewest parts without which the chosen endpoint would not be
        cheaper than the runner-up, the largest difference first. Return [] if it is not cheaper,
        or alone.
        """
        if len(self.parts) < 2:
            return []
        chosen, other = self.parts[:2]
        names = list(chosen)
        # The endpoint with the lower cost is ahead.
        found = decisive([other[name] for name in names], [chosen[name] for name in names])
        return [names[at] for at in found]


class CostError(Exception):
    """An error: a scorer returned something that is not a cost. The message says what it returned."""


def cost_of(
    scorer: str,
    plugin: TellsCost,
    asked: InferenceRequest,
    candidates: Candidates,
    positions: Sequence[int],
) -> Cost:
    """Return the cost that `plugin` computes for the candidates at `positions`: the chosen one,
    then the runner-up if there is one.

    Raises `CostError` for a malformed result, and any exception of the plugin.
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


class FailedCost(Struct, frozen=True):
    """A scorer that failed to compute its cost, with the exception."""

    scorer: str
    error: BaseException


def costs_of(
    scorers: Iterable[tuple[str, TellsCost | None]],
    asked: InferenceRequest,
    candidates: Candidates,
    positions: Sequence[int],
) -> list[Cost | FailedCost]:
    """Return the costs of the candidates at `positions` by each scorer that computes costs.
    `scorers` has None for a scorer that does not. A scorer that fails gives a `FailedCost`.
    """
    found: list[Cost | FailedCost] = []
    for name, plugin in scorers:
        if plugin is not None:
            try:
                found.append(cost_of(name, plugin, asked, candidates, positions))
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin: the other scorers are still shown
                found.append(FailedCost(name, error))
    return found


def computed_costs(
    scorers: Iterable[tuple[str, TellsCost | None]],
    asked: InferenceRequest,
    candidates: Candidates,
    positions: Sequence[int],
    failures: PluginFailures,
) -> tuple[Cost, ...]:
    """Return the costs of the candidates at `positions` by each scorer that computes costs. A
    scorer that fails is omitted and counted in `failures`.
    """
    found: list[Cost] = []
    for cost in costs_of(scorers, asked, candidates, positions):
        if isinstance(cost, Cost):
            found.append(cost)
        else:
            failures.raised(cost.scorer, "cost_parts", cost.error)
    return tuple(found)


def rebuilt_pair(
    endpoints: Sequence[Endpoint],
    numbers: Sequence[Sequence[float]],
    *,
    total_blocks: int,
    block_tokens: int,
    prompt_tokens: int,
    matched_most: int,
) -> Candidates:
    """Return candidates with the numbers of the chosen endpoint and of the runner-up as the scorers
    saw them.

    `matched_most` is the largest number of blocks that any candidate had cached. If neither of the
    two endpoints reaches it, a third candidate with that number is added, because costs may depend
    on the longest match.
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


def prefill_time_s(
    before: Sequence[float], *, prompt_tokens: int, prefill_tokens: float
) -> Seconds | None:
    """Return the time in seconds in which an endpoint computes the last `prefill_tokens` of a prompt
    and what it was to compute before, or None if its load is unknown.

    `before` are the `NUMBERS` of the endpoint without the request.
    """
    if not before:
        return None
    work = before[_PENDING] + prefill_work(prompt_tokens, prefill_tokens)
    seconds = work / before[_SPEED]
    return seconds if math.isfinite(seconds) else None


def cost_by_score(
    score: float, chosen: tuple[float, float], other: tuple[float, float]
) -> float | None:
    """Return the cost of a candidate with `score`, given the (score, cost) of two other candidates.

    A score falls linearly with the cost (`TellsCost`), so two points are enough. Return None if the
    two have equal scores or equal costs, unless `score` is that of `chosen`.
    """
    (chosen_score, cost), (other_score, other_cost) = chosen, other
    if score == chosen_score:
        return cost
    if chosen_score == other_score or cost == other_cost:
        return None
    slope = (other_cost - cost) / (other_score - chosen_score)
    return round(cost + (score - chosen_score) * slope, DIGITS)
