"""Why an endpoint was chosen, for the client that is answered: `--explain-headers`."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from epp.core.decision.costs import Cost, cost_of
from epp.core.decision.decisive import decisive, next_best
from epp.core.decision.failures import PluginFailures
from epp.core.decision.scheduler import Decision
from epp.core.knowledge.outliers import Outlier
from epp.core.knowledge.retold import numbers_before, retold_candidates

ENDPOINT_HEADER: Final = "x-homing-endpoint"
REASON_HEADER: Final = "x-homing-reason"
HEADER_CHARACTERS_MAX: Final = 256


class Explained(Struct, frozen=True):
    """What must be noted when a request is decided, because it has changed when it is answered."""

    second: int | None
    """Position of the next best; None: there was one candidate alone."""
    numbers: tuple[Sequence[float], ...]
    """`NUMBERS` of the chosen endpoint, as the scorers saw them, and of the next best; none, where no
    scorer tells a cost."""
    marks: tuple[str, str]
    """What spoke against each: "slow", "failing" or ""."""


def explained(decision: Decision, outliers: Mapping[int, Outlier]) -> Explained:
    """Note it of a `decision` that was made just now; `outliers` by slot."""
    second, candidates = next_best(decision), decision.candidates
    positions = [decision.picked] if second is None else [decision.picked, second]
    numbers: tuple[Sequence[float], ...] = ()
    if any(decision.tellers):
        chosen, *others = map(candidates.numbers_of, positions)
        before = numbers_before(
            chosen,
            prompt_tokens=decision.lease.request.prompt_tokens,
            prefill_tokens=decision.lease.prefill_tokens,
            matched_blocks=decision.matched_blocks,
        )
        numbers = (before, *others)
    found = [outliers.get(candidates.slot.item(at)) for at in positions]
    marks = [one.cause.value if one else "" for one in (*found, None)]
    return Explained(second, numbers, (marks[0], marks[1]))


def explaining_headers(
    decision: Decision, noted: Explained, failures: PluginFailures
) -> dict[str, str]:
    """Who was chosen, and why, for the client: printable ASCII of at most `HEADER_CHARACTERS_MAX`.

    E.g. `score 7, next 4, decided by prefix-cache-scorer, 9 of 9 blocks`; of a scorer of costs that
    decides alone `added-time-scorer 0.12 s, next 0.31 s, decided by prefill, 9 of 9 blocks`.
    """
    told = _costs(decision, noted, failures)
    if len(told) != 1 or len(decision.scorers) != 1:
        told = [*_scores(decision, noted), *told]
    told.append(f"{decision.matched_blocks} of {decision.total_blocks} blocks")
    return {
        ENDPOINT_HEADER: _as_header(decision.endpoint.name),
        REASON_HEADER: _as_header(", ".join(told)),
    }


def _scores(decision: Decision, noted: Explained) -> list[str]:
    scored, second = decision.scored, noted.second
    first, other = map(_marked, noted.marks)
    told = [f"score {scored.total[decision.picked]:.4g}{first}"]
    if second is None:
        return [*told, "the only candidate"]
    told.append(f"next {scored.total[second]:.4g}{other}")
    found = decisive(scored.parts_of(decision.picked), scored.parts_of(second))
    names = " and ".join(decision.scorers[at] for at in found)
    return [*told, f"decided by {names}" if names else "a tie"]


def _costs(decision: Decision, noted: Explained, failures: PluginFailures) -> list[str]:
    """A phrase for each scorer that tells its cost; one that fails tells none."""
    if not noted.numbers:
        return []
    request = decision.lease.request
    pair = retold_candidates(
        [decision.endpoint] * len(noted.numbers),
        noted.numbers,
        total_blocks=decision.total_blocks,
        block_tokens=decision.block_tokens,
        prompt_tokens=request.prompt_tokens,
    )
    told = []
    for name, plugin in zip(decision.scorers, decision.tellers, strict=True):
        if plugin is not None:
            try:
                told.append(_cost(cost_of(name, plugin, request, pair), noted.marks))
            except BaseException as error:  # noqa: BLE001  the boundary of a plugin
                failures.raised(name, "cost_parts", error)
    return told


def _cost(cost: Cost, marks: tuple[str, str]) -> str:
    (total, *others), (first, other) = cost.totals, map(_marked, marks)
    told = f"{cost.scorer} {total:.3g} {cost.unit}{first}"
    if not others:
        return f"{told}, the only candidate"
    by = " and ".join(cost.decided_by)
    told += f", next {others[0]:.3g} {cost.unit}{other}"
    return f"{told}, decided by {by}" if by else told


def _marked(mark: str) -> str:
    return f" ({mark})" if mark else ""


def _as_header(text: str) -> str:
    shown = "".join(one if one.isascii() and one.isprintable() else "?" for one in text)
    return shown[:HEADER_CHARACTERS_MAX]
