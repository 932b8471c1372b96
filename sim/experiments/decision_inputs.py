"""The inputs of a decision in a form from which the decision can be recomputed without this
program.

They are collected just after the decision. The chosen endpoint's numbers from before it are known,
and those of the others have not changed. The next decision changes them.
"""

from typing import Any, Final

from epp.core.decision.account import Leg
from epp.core.knowledge.candidates import NUMBERS
from epp.core.knowledge.rebuilt import rebuilt_candidates
from epp.core.types import AdapterReport

_MATCHED: Final = NUMBERS.index("matched_blocks")


def asked_of(leg: Leg) -> dict[str, Any]:
    """Return the numbers of the request that scorers use."""
    request = leg.request
    return {
        "block_tokens": leg.block_tokens,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens_max": request.output_tokens_max,
        "answer_tokens": request.moment.answer_tokens,
    }


def scored_by(leg: Leg) -> list[dict[str, Any]]:
    """Return each candidate's entry in decisions.jsonl, its inputs, and its costs.

    Raises what a plug-in raises.
    """
    candidates, scored = leg.candidates, leg.scored
    numbers = [candidates.numbers_of(at) for at in range(len(candidates))]
    numbers[leg.picked] = tuple(leg.numbers_before)
    adapters = candidates.adapter_state.reports
    seen = rebuilt_candidates(
        candidates.endpoints,
        numbers,
        total_blocks=leg.total_blocks,
        block_tokens=leg.block_tokens,
        prompt_tokens=leg.request.prompt_tokens,
        adapters=adapters,
    )
    costs = {
        name: {part: cost.tolist() for part, cost in teller.cost_parts(leg.request, seen).items()}
        for name, teller in zip(leg.scorers, leg.tellers, strict=True)
        if teller is not None
    }
    return [
        {
            "endpoint": endpoint.name,
            "matched_blocks": int(numbers[at][_MATCHED]),
            "score": scored.total.item(at),
            "parts": dict(zip(leg.scorers, scored.parts_of(at), strict=True)),
            "known": {
                **{
                    name: one
                    for name, one in zip(NUMBERS, numbers[at], strict=True)
                    if name != "matched_blocks"
                },
                "adapters": _adapters(adapters[at], leg.request.model),
            },
            "costs": {
                name: {part: cost[at] for part, cost in parts.items()}
                for name, parts in costs.items()
            },
        }
        for at, endpoint in enumerate(candidates.endpoints)
    ]


def _adapters(report: AdapterReport | None, model: str) -> dict[str, Any] | None:
    """Return the adapter slots of an endpoint and whether `model` has one, or None if it reports no
    adapters.
    """
    if report is None:
        return None
    resident = report.resident_known
    return {
        "loaded": model in report.active or model in report.gpu,
        "slots_max": report.slots_max,
        "active": len(report.active),
        "resident": len(report.gpu) if resident else None,
        "idle": len(report.gpu - report.active - report.pinned) if resident else None,
    }
