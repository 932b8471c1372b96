"""The inputs of a routing decision, written so that other programs can recompute the decision.

The inputs are collected just after the decision and before the next one. At that time the state of
the chosen endpoint before the decision is still recorded, and the state of the other candidates has
not changed.
"""

from typing import Any, Final

from epp.core.decision.account import Leg
from epp.core.knowledge.candidates import NUMBERS
from epp.core.knowledge.rebuilt import rebuilt_candidates
from epp.core.types import AdapterReport

_MATCHED: Final = NUMBERS.index("matched_blocks")


def request_properties(leg: Leg) -> dict[str, Any]:
    """Return the properties of the request that scorers use, such as its prompt length in
    tokens.
    """
    request = leg.request
    return {
        "block_tokens": leg.block_tokens,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens_max": request.output_tokens_max,
        "answer_tokens": request.moment.answer_tokens,
    }


def candidate_entries(leg: Leg) -> list[dict[str, Any]]:
    """Return an entry for each candidate of a decision, as in decisions.jsonl, with the inputs and
    the costs of its scorers.

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
    """Return the numbers of an endpoint's LoRA adapter slots and whether `model` is loaded in one,
    or None if the endpoint reports no adapters.
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
