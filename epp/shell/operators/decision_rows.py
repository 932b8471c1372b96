"""What is told of decisions and refusals: rows for pages, JSON and `epp explain`.

Made of records when they are asked for.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from epp.core.decision.decisive import decisive
from epp.core.decision.plugin import TellsCost
from epp.core.decision.profile import Scored
from epp.core.knowledge.candidates import NUMBERS
from epp.core.knowledge.retold import retold_candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint
from epp.shell.operators.decision_record import Decided, Ended, Refused, Scores

SCORES_SHOWN_MAX: Final = 8
"""Candidates of a decision that are shown, best first."""
LEFT_OUT_SHOWN_MAX: Final = 8
"""Endpoints that were not scored, by name."""

_INFLIGHT_REQUESTS: Final = NUMBERS.index("inflight_requests")
_INFLIGHT_CONTEXT: Final = NUMBERS.index("inflight_context_tokens")
_INFLIGHT_PREFILL: Final = NUMBERS.index("inflight_prefill_tokens")
_MATCHED: Final = NUMBERS.index("matched_blocks")

Row: TypeAlias = dict[str, Any]
Members: TypeAlias = tuple[Endpoint | None, ...]
"""Of the pool, by slot."""


class Setting(Struct, frozen=True):
    """A configuration, as far as its decisions need it to be told."""

    generation: int
    """0: it was not told."""
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...] = ()
    """Those among the scorers whose part is the share of blocks that matched."""
    costs: tuple[TellsCost | None, ...] = ()
    """Those that can say what their cost is made of."""


NO_SETTING: Final = Setting(0, (), ())


def decided_row(
    told: Decided,
    setting: Setting,
    scores: Scores | None,
    members: Members | None,
    *,
    at_s: float,
    now_s: float,
    outcome: Row | None,
) -> Row:
    """A decision that was kept at `at_s`; `scores` of all its candidates and the `members` of the pool
    then, None: not any more.
    """
    names = _names(setting, len(told.parts))
    chosen = _score(told.endpoint, told.parts, names)
    other_parts = _weighted(told.runner_up_scores, setting)
    runner_up = _score(told.runner_up, other_parts, names) if other_parts else None
    rows, left_out = _scores(setting, scores, members, names)
    known = {"endpoint": _numbers(_before(told))}
    if runner_up:
        known["runner_up"] = _numbers(told.runner_up_numbers)
    deciding = decisive(told.parts, other_parts) if runner_up else ()
    return {
        "at": iso(at_s),
        "age_s": round(now_s - at_s, 1),
        "number": told.number,
        "config_generation": setting.generation,
        "request_id": told.request_id,
        "model": told.model,
        "priority": told.priority,
        "endpoint": told.endpoint,
        "address": told.address,
        "fallbacks": list(told.fallbacks),
        "prompt_tokens": told.prompt_tokens,
        "matched_blocks": told.matched_blocks,
        "total_blocks": told.total_blocks,
        "block_tokens": told.block_tokens,
        "ready": told.ready,
        "eliminated": dict(told.eliminated),
        "candidates": told.candidates,
        "not_scored": left_out,
        "score": chosen,
        "runner_up": runner_up,
        "decided_by": [names[at] for at in deciding],
        "by_blocks": list(setting.by_blocks),
        "known": known,
        "outcome": outcome,
        "scores": rows or [chosen],
        **({} if told.shadow is None else {"shadow": told.shadow}),
    }


def refused_row(told: Refused, at_s: float) -> Row:
    """A refusal that was kept at `at_s`."""
    return {
        "at": iso(at_s),
        "request_id": told.request_id,
        "model": told.model,
        "path": told.path,
        "priority": told.priority,
        "refused": told.reason,
        "status": told.status,
        "eliminated": dict(told.eliminated),
    }


def outcome_row(end: Ended | None, served: str | None) -> Row | None:
    """How a request ended; `served`: the address that the gateway went to instead. None: not known."""
    if end is None:
        return None if served is None else {"served_by": served}
    return msgspec.structs.asdict(end) | {"served_by": served}


def _scores(
    setting: Setting, kept: Scores | None, members: Members | None, names: Sequence[str]
) -> tuple[list[Row], list[str]]:
    """Of the best candidates, best first; and who was not scored. Nothing: not any more."""
    if kept is None or members is None or not setting.weights:
        return [], []
    slots = np.frombuffer(kept.slot, np.int64).tolist()
    weights = np.array(setting.weights)
    scores = np.frombuffer(kept.scores).reshape(len(weights), -1)
    total = np.einsum("i,ij->j", weights, scores)
    scored = Scored(total, scores, weights)
    order = np.argsort(-total, kind="stable")[:SCORES_SHOWN_MAX].tolist()
    if kept.picked not in order:
        order[-1] = kept.picked
    rows = []
    for at in order:
        member = members[slots[at]]
        rows.append(_score(member.name if member else "", scored.parts_of(at), names))
    among = set(slots)
    left_out = [one.name for slot, one in enumerate(members) if one and slot not in among]
    return rows, left_out[:LEFT_OUT_SHOWN_MAX]


def _names(setting: Setting, scorers: int) -> Sequence[str]:
    """Of the scorers; of a configuration that is not known any more by their place."""
    if len(setting.scorers) == scorers:
        return setting.scorers
    return tuple(f"scorer {at}" for at in range(1, scorers + 1))


def _score(name: str, parts: Sequence[float], scorers: Sequence[str]) -> Row:
    return {
        "endpoint": name,
        "total": round(sum(parts), 4),
        "parts": {scorer: round(part, 4) for scorer, part in zip(scorers, parts, strict=True)},
    }


def _weighted(packed: bytes, setting: Setting) -> list[float]:
    """What each scorer gave; nothing, if there is nobody or the weights are not known any more."""
    scores = np.frombuffer(packed)
    if not len(scores) or len(scores) != len(setting.weights):
        return []
    parts: list[float] = (scores * np.array(setting.weights)).tolist()
    return parts


def _before(told: Decided) -> list[float]:
    """The numbers of the chosen endpoint as the scorers saw them: without this request."""
    numbers = [*told.numbers]
    numbers[_INFLIGHT_REQUESTS] -= 1
    numbers[_INFLIGHT_CONTEXT] -= told.prompt_tokens
    numbers[_INFLIGHT_PREFILL] = max(0.0, numbers[_INFLIGHT_PREFILL] - told.prefill_tokens)
    numbers[_MATCHED] = told.matched_blocks
    return numbers


def _numbers(numbers: Sequence[float]) -> Row:
    """None: not known."""
    told = zip(NUMBERS, numbers, strict=True)
    return {name: round(value, 3) if math.isfinite(value) else None for name, value in told}


def costs_rows(told: Decided, setting: Setting) -> list[Row]:
    """What the costs that scorers went by were made of, of the chosen endpoint and the next best."""
    pairs: list[tuple[str, Sequence[float]]] = [(told.endpoint, _before(told))]
    if told.runner_up:
        pairs.append((told.runner_up, told.runner_up_numbers))
    found: list[Row] = []
    for name, scorer in zip(setting.scorers, setting.costs, strict=False):
        if scorer is None:
            continue
        try:
            found.append(_cost_of(name, scorer, told, pairs))
        except Exception as error:  # noqa: BLE001  the boundary of a plugin: the rest is told all the same
            found.append({"scorer": name, "failed": type(error).__name__})
    return found


def _cost_of(
    name: str, scorer: TellsCost, told: Decided, pairs: Sequence[tuple[str, Sequence[float]]]
) -> Row:
    endpoints = [Endpoint(endpoint_id=endpoint, name=endpoint, address="") for endpoint, _ in pairs]
    candidates = retold_candidates(
        endpoints,
        [row for _, row in pairs],
        total_blocks=told.total_blocks,
        block_tokens=told.block_tokens,
        prompt_tokens=told.prompt_tokens,
    )
    asked = InferenceRequest(
        request_id=told.request_id,
        model=told.model,
        prompt_tokens=told.prompt_tokens,
        output_tokens_max=told.output_tokens_max,
        priority=told.priority,
    )
    parts = {part: costs.tolist() for part, costs in scorer.cost_parts(asked, candidates).items()}
    rows = [{part: float(costs[at]) for part, costs in parts.items()} for at in range(len(pairs))]
    deciding: list[str] = []
    if len(rows) > 1:
        kinds = list(parts)
        # Of costs the lower is ahead.
        found = decisive([rows[1][kind] for kind in kinds], [rows[0][kind] for kind in kinds])
        deciding = [kinds[at] for at in found]
    return {
        "scorer": name,
        "unit": scorer.cost_unit,
        "endpoints": [
            {
                "endpoint": endpoint,
                "total": round(sum(row.values()), 6),
                "parts": {part: round(cost, 6) for part, cost in row.items()},
            }
            for (endpoint, _), row in zip(pairs, rows, strict=True)
        ],
        "decided_by": deciding,
    }


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
