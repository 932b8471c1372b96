"""Response headers that explain a decision to the client: `--explain-headers`."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from epp.core.decision.account import Leg
from epp.core.decision.costs import Cost, computed_costs, prefill_time_s, rebuilt_pair
from epp.core.failures import PluginFailures
from epp.core.knowledge.outliers import Outlier
from epp.core.types import Seconds, Stage

ENDPOINT_HEADER: Final = "x-homing-endpoint"
REASON_HEADER: Final = "x-homing-reason"
HEADER_CHARACTERS_MAX: Final = 256


class Explained(Struct, frozen=True):
    """The values that explain a decision in response headers and that may change before the
    response, stored at the decision.
    """

    leg: Leg
    numbers: tuple[Sequence[float], ...]
    """`NUMBERS` of the chosen endpoint, as the scorers saw them, then those of the runner-up. Empty
    if no costs are to be computed from them.
    """
    marks: tuple[str, str]
    """Outlier state of the chosen endpoint and of the runner-up: "slow", "failing" or "" if it is
    no outlier.
    """
    matched_most: int = 0
    """Largest number of leading prompt blocks that any candidate was estimated to have cached; 0 if
    no costs are to be computed.
    """
    earlier: tuple[Leg, ...] = ()
    """Legs of the prefill and encode stages of the same request."""
    prefill_s: Seconds | None = None
    """Expected time in seconds until the prefill endpoint has computed the prompt, or None if there
    is no prefill leg or if the time is unknown.
    """


def explained(
    leg: Leg, outliers: Mapping[int, Outlier], earlier: tuple[Leg, ...] = ()
) -> Explained:
    """Return the values that explain `leg`, which was just decided, and the `earlier` legs of its
    request.

    `outliers` is indexed by slot.
    """
    positions = [leg.picked] if leg.runner_up is None else [leg.picked, leg.runner_up]
    numbers: tuple[Sequence[float], ...] = ()
    most = 0
    if leg.costs is None and any(leg.tellers):
        most = leg.candidates.matched_most()
        known = (leg.numbers_before, leg.runner_up_numbers)
        numbers = tuple([one for one in known if one])
    found = [outliers.get(leg.candidates.slot.item(at)) for at in positions]
    marks = [one.cause.value if one else "" for one in (*found, None)]
    return Explained(leg, numbers, (marks[0], marks[1]), most, earlier, prefill_s_of(earlier))


def prefill_s_of(earlier: Sequence[Leg]) -> Seconds | None:
    """Return the expected time in seconds of the prefill among `earlier`, the legs of a request
    that was just decided, or None if there is no prefill leg or if the time is unknown.
    """
    for leg in earlier:
        if leg.stage is Stage.PREFILL:
            tokens, prompt_tokens = leg.lease.prefill_tokens, leg.request.prompt_tokens
            return prefill_time_s(
                leg.numbers_before, prompt_tokens=prompt_tokens, prefill_tokens=tokens
            )
    return None


def explaining_headers(noted: Explained, failures: PluginFailures) -> dict[str, str]:
    """Return the two response headers that name the chosen endpoint and the reason of the decision.

    Values are printable ASCII of at most `HEADER_CHARACTERS_MAX` characters. Example: `score 7,
    next 4, decided by prefix-cache-scorer, 9 of 9 blocks`. If the only scorer computes a cost:
    `added-time-scorer 0.12 s, next 0.31 s, decided by prefill, first token expected after 0.08 s,
    9 of 9 blocks`.
    """
    leg, told = noted.leg, _costs(noted, failures)
    if len(told) != 1 or len(leg.scorers) != 1:
        told = [*_scores(noted), *told]
    told.append(f"{leg.matched_blocks} of {leg.total_blocks} blocks")
    if leg.rank is not None:
        told.append(f"rank {leg.rank}")
    told += [f"{one.stage} at {one.endpoint.name}" for one in noted.earlier]
    return {
        ENDPOINT_HEADER: _as_header(leg.endpoint.name),
        REASON_HEADER: _as_header(", ".join(told)),
    }


def _scores(noted: Explained) -> list[str]:
    leg = noted.leg
    first, other = map(_marked, noted.marks)
    told = [f"score {leg.total:.4g}{first}"]
    if leg.runner_up is None:
        return [*told, "the only candidate"]
    told.append(f"next {leg.scored.total[leg.runner_up]:.4g}{other}")
    return [*told, f"decided by {' and '.join(leg.decided_by)}" if leg.decided_by else "a tie"]


def _costs(noted: Explained, failures: PluginFailures) -> list[str]:
    """Return a phrase about the cost by each scorer that computes costs; a scorer that fails is
    omitted.
    """
    leg = noted.leg
    if leg.costs is not None:
        return [_cost(cost, noted) for cost in leg.costs]
    if not noted.numbers:
        return []
    pair = rebuilt_pair(
        [leg.endpoint] * len(noted.numbers),
        noted.numbers,
        total_blocks=leg.total_blocks,
        block_tokens=leg.block_tokens,
        prompt_tokens=leg.request.prompt_tokens,
        matched_most=noted.matched_most,
    )
    scorers = zip(leg.scorers, leg.tellers, strict=True)
    positions = range(len(noted.numbers))
    costs = computed_costs(scorers, leg.request, pair, positions, failures)
    return [_cost(cost, noted) for cost in costs]


def _cost(cost: Cost, noted: Explained) -> str:
    (total, *others), (first, other) = cost.totals, map(_marked, noted.marks)
    told = f"{cost.scorer} {total:.3g} {cost.unit}{first}"
    if others:
        by = " and ".join(cost.decided_by)
        told += f", next {others[0]:.3g} {cost.unit}{other}"
        told += f", decided by {by}" if by else ""
    else:
        told += ", the only candidate"
    first_token = cost.first_token_after(noted.prefill_s)
    if first_token is not None:
        told += f", first token expected after {first_token:.3g} {cost.unit}"
    return told


def _marked(mark: str) -> str:
    return f" ({mark})" if mark else ""


def _as_header(text: str) -> str:
    shown = "".join(one if one.isascii() and one.isprintable() else "?" for one in text)
    return shown[:HEADER_CHARACTERS_MAX]
