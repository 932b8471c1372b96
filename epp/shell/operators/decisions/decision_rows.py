"""Convert recorded decisions and refusals to rows for pages, JSON and `epp explain`."""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from epp.core.decision.account import Ranking, decided_by, rounded_parts
from epp.core.decision.costs import (
    DIGITS,
    Cost,
    FailedCost,
    cost_by_score,
    costs_of,
    prefill_time_s,
    rebuilt_pair,
)
from epp.core.decision.profile import Scored
from epp.core.knowledge.candidates import NUMBERS, Candidates
from epp.core.knowledge.rebuilt import numbers_before
from epp.core.moment import Moment
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Seconds, Stage
from epp.journal.decision_record import (
    Decided,
    DecidedLeg,
    Ended,
    Scores,
    Served,
    predicted_at,
)
from epp.journal.past import PastDecision, PastRefusal, Setting
from epp.journal.records import READY, States
from epp.shell.operators.decisions.endpoint_states import OUTLYING

SCORES_SHOWN_MAX: Final = 8
"""Maximum number of candidates with scores that a decision's row shows, best first."""
LEFT_OUT_SHOWN_MAX: Final = 8
"""Maximum number of endpoints without a score that a decision's row names."""

Row: TypeAlias = dict[str, Any]
Members: TypeAlias = tuple[Endpoint | None, ...]
"""Endpoints of the pool by slot; None for an unused slot."""


class Remembered(Struct, frozen=True):
    """Details of a decision that only memory contains, not files, as far as they are still
    available.
    """

    scores: Scores | None = None
    """Scores of all candidates of the decision, or None if they are no longer available."""
    members: Members | None = None
    """Members of the pool at the time of the decision, or None if they are no longer available."""
    output_time_s: Seconds | None = None
    """Observed time per output token in seconds, or None if it is unknown."""


def row_of(
    past: PastDecision | PastRefusal,
    now_s: float,
    why_not: str = "",
    remembered: Remembered = Remembered(),  # noqa: B008  it is immutable
) -> Row:
    """Return the row that shows a recorded decision or refusal.

    `why_not` is an endpoint for which the row explains why it was not chosen.
    """
    if isinstance(past, PastRefusal):
        return _refused_row(past, why_not)
    return _decided_row(past, now_s, why_not, remembered)


def _decided_row(past: PastDecision, now_s: float, why_not: str, remembered: Remembered) -> Row:
    told, setting, states = past.told, past.setting, past.states
    names = _names(setting, len(told.parts))
    before = _before(told)
    costs = _costs(told, setting, before)
    cost = next((one for one in costs if isinstance(one, Cost)), None)
    expected_s = _first_token_s(told, costs)
    chosen = _score(told.endpoint, told.parts, names, states)
    runner_up, other_parts = _runner_up(told, setting, names, states)
    known = {"endpoint": _numbers(before)}
    if runner_up:
        known["runner_up"] = _numbers(told.runner_up_numbers)
    if cost is not None:
        for score, total in zip((chosen, runner_up), cost.totals, strict=False):
            if score is not None:
                score |= {"cost": round(total, DIGITS), "unit": cost.unit}
    ranked = _Ranked(past, remembered, names, cost)
    among = set(ranked.slots)
    left_out = []
    if among and remembered.members is not None:
        left_out = [
            one.name for at, one in enumerate(remembered.members) if one and at not in among
        ]
    row = {
        "at": iso(past.at_s),
        "age_s": round(now_s - past.at_s, 1),
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
        "predicted_tokens": predicted_at(told, past.served),
        "ready": told.ready,
        "eliminated": dict(told.eliminated),
        "candidates": told.candidates,
        "not_scored": left_out[:LEFT_OUT_SHOWN_MAX],
        "score": chosen,
        "runner_up": runner_up,
        "decided_by": list(decided_by(names, told.parts, other_parts)) if other_parts else [],
        "by_blocks": list(setting.by_blocks),
        "expected_first_token_s": None if expected_s is None else round(expected_s, DIGITS),
        "costs": [_cost_row(told, one) for one in costs],
        "known": known,
        "outcome": outcome_row(past.end, past.served),
        "scores": ranked.best or [chosen],
    }
    if told.shadow is not None:
        row["shadow"] = told.shadow
    if told.queued is not None:
        row["queued"] = told.queued
    if told.predicted:
        row["latency"] = _latency(past, remembered)
    if told.route:
        row |= {"route": told.route, "uncached_tokens": told.uncached_tokens}
        row |= {
            leg.stage: _leg_row(leg, setting, past)
            for leg, setting in zip(told.earlier, past.leg_settings, strict=True)
        }
    if why_not:
        row["why_not"] = _why_not(why_not, past, remembered, row, ranked)
    return row


def _latency(past: PastDecision, remembered: Remembered) -> Row:
    """Return the predicted and observed latencies of a request, with the median errors of the
    predictions when it was placed. The times count from the decision, but the observed time to first
    token includes the time before it since the request headers, except the wait in the queue.
    """
    ttft_s, tpot_s, ttft_error, tpot_error = map(_known, past.told.predicted)
    observed_s = None if past.end is None else observed_first_token_s(past.told, past.end)
    output_s = remembered.output_time_s
    return {
        "ttft": {"predicted_s": ttft_s, "observed_s": observed_s, "error": ttft_error},
        "tpot": {
            "predicted_s": tpot_s,
            "observed_s": None if output_s is None else round(output_s, DIGITS),
            "error": tpot_error,
        },
    }


def _known(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None


def _leg_row(leg: DecidedLeg, setting: Setting, past: PastDecision) -> Row:
    """Return the row that shows the choice of the endpoint for a prefill or encode stage."""
    told, states = past.told, past.states
    names = _names(setting, len(leg.parts))
    chosen = _score(leg.endpoint, leg.parts, names, states)
    runner_up, other_parts = _runner_up(leg, setting, names, states)
    numbers = _leg_before(told, leg)
    return {
        "endpoint": leg.endpoint,
        "address": leg.address,
        "others": list(leg.others),
        "matched_blocks": leg.matched_blocks,
        "total_blocks": told.total_blocks,
        "ready": told.ready,
        "eliminated": dict(leg.eliminated),
        "candidates": leg.candidates,
        "score": chosen,
        "runner_up": runner_up,
        "decided_by": list(decided_by(names, leg.parts, other_parts)) if other_parts else [],
        "by_blocks": list(setting.by_blocks),
        "known": _numbers(numbers) if numbers else None,
    }


def _why_not(
    asked: str, past: PastDecision, remembered: Remembered, row: Row, ranked: "_Ranked"
) -> Row:
    """Return why the decision did not choose the endpoint `asked`: a "verdict" and what is known
    about it.
    """
    told, runner_up = past.told, row["runner_up"]
    if is_called(asked, told.endpoint, told.address):
        return {"endpoint": told.endpoint, "verdict": "chosen"}
    for leg in told.earlier:
        if is_called(asked, leg.endpoint, leg.address):
            return {"endpoint": leg.endpoint, "verdict": "chosen", "stage": leg.stage}
    named = (runner_up["endpoint"] if runner_up else "", *past.states)
    slot, name = _member(asked, remembered, named)
    if not name:
        absent = remembered.members is not None
        return {"endpoint": asked, "verdict": "absent" if absent else "unknown"}
    state = _state(name, past.states)
    why: Row = {"endpoint": name, "verdict": "unknown"} | state
    is_ready = state["state"] in {READY, *OUTLYING}
    score = None
    if slot in ranked.slots:
        score = ranked.row(ranked.slots.index(slot))
    elif runner_up is not None and name == runner_up["endpoint"]:
        score = runner_up
    if score is not None:
        why |= {"verdict": "scored", "score": score} | _behind(row["score"], score)
    elif by := _dropped_by(slot, remembered):
        why |= {"verdict": "dropped", "by": by}
    elif not is_ready:
        why |= {"verdict": "not ready"}
    elif ranked.slots:
        why |= {"verdict": "outside the subset"}
    return why


def _member(asked: str, remembered: Remembered, named: Iterable[str]) -> tuple[int, str]:
    """Return slot and name of the endpoint that is called `asked`, or -1 and "" if it is unknown.

    If the pool's members at that time are unknown, the name is one of `named` and the slot -1.
    """
    if remembered.members is None:
        return -1, next((name for name in named if name and is_called(asked, name, "")), "")
    for slot, one in enumerate(remembered.members):
        if one is not None and is_called(asked, one.name, one.address):
            return slot, one.name
    return -1, ""


def _dropped_by(slot: int, remembered: Remembered) -> str:
    """Return the name of the filter that dropped the endpoint in `slot` from the candidates, or ""
    if none is known.
    """
    dropped = remembered.scores.dropped if remembered.scores else {}
    return next(
        (name for name, slots in dropped.items() if slot in np.frombuffer(slots, np.int64)), ""
    )


def _behind(chosen: Row, score: Row) -> Row:
    """Return by how much an endpoint's score was below that of the chosen one, in total and by
    scorer, greatest lead first.
    """
    leads = {name: round(part - score["parts"][name], 4) for name, part in chosen["parts"].items()}
    parts = dict(sorted(leads.items(), key=lambda lead: -lead[1]))
    return {"behind": round(chosen["total"] - score["total"], 4), "parts": parts}


def is_called(asked: str, name: str, address: str) -> bool:
    """Return True if `asked` denotes an endpoint: it is the endpoint's name, with or without
    namespace, or its address.
    """
    return asked in {name, name.rpartition("/")[2], address}


def _state(name: str, states: States) -> Row:
    found = states.get(name)
    if found is None:
        return {"state": READY, "reason": "", "since": None}
    return {"state": found.state, "reason": found.reason, "since": iso(found.since_s)}


def _refused_row(past: PastRefusal, why_not: str) -> Row:
    told, states = past.told, past.states
    row = {
        "at": iso(past.at_s),
        "request_id": told.request_id,
        "model": told.model,
        "path": told.path,
        "priority": told.priority,
        "refused": told.reason,
        "status": told.status,
        "eliminated": dict(told.eliminated),
    }
    if told.queued is not None:
        row["queued"] = told.queued
    if why_not:
        found = [name for name in states if is_called(why_not, name, "")]
        name = found[0] if found else why_not
        row["why_not"] = {"endpoint": name, "verdict": "refused"} | _state(name, states)
    return row


def outcome_row(end: Ended | None, served: Served | None) -> Row | None:
    """Return how the request of a decision ended, and which endpoint the gateway used instead, or
    None if neither is known.
    """
    address = None if served is None else served.address
    if end is None:
        return None if served is None else {"served_by": address}
    return msgspec.structs.asdict(end) | {"served_by": address}


def _leg_before(told: Decided, leg: DecidedLeg) -> Sequence[float]:
    """Return the load `NUMBERS` of the endpoint of `leg` before the decision, or () if they are not
    recorded.
    """
    if not leg.numbers:
        return ()
    return numbers_before(
        leg.numbers,
        prompt_tokens=told.prompt_tokens,
        prefill_tokens=leg.prefill_tokens,
        matched_blocks=leg.matched_blocks,
    )


class _Ranked:
    """The ranking of a decision's candidates by their recorded scores."""

    def __init__(
        self, past: PastDecision, remembered: Remembered, names: Sequence[str], cost: Cost | None
    ) -> None:
        """Create the ranking of the decision `past`. `cost` contains the candidates' costs, if
        known.
        """
        self._states, self._cost = past.states, cost
        self._members = remembered.members or ()
        self.slots: list[int] = []
        """Slots of the candidates, in the order of the recorded scores; [] if the scores are no
        longer available.
        """
        self.best: list[Row] = []
        """Rows of the candidates with the best scores, best first, including the chosen one; [] if
        the scores are no longer available.
        """
        scores, weights = remembered.scores, np.array(past.setting.weights)
        if scores is None or not self._members or not len(weights):
            return
        parts = np.frombuffer(scores.scores).reshape(len(weights), -1)
        self._ranking = Ranking(
            scorers=tuple(names), scored=Scored.of(parts, weights), picked=scores.picked
        )
        self.slots = np.frombuffer(scores.slot, np.int64).tolist()
        self.best = [self.row(at) for at in self._ranking.best(SCORES_SHOWN_MAX)]

    def row(self, at: int) -> Row:
        """Return the row of the candidate at position `at` of the recorded scores."""
        member = self._members[self.slots[at]]
        name = member.name if member else ""
        ranking, cost = self._ranking, self._cost
        row = _score(name, ranking.scored.parts_of(at), ranking.scorers, self._states)
        second = ranking.runner_up
        if cost is None or len(cost.parts) < 2 or second is None:
            return row
        scores = ranking.scored.scores[ranking.scorers.index(cost.scorer)]
        total = cost_by_score(
            scores.item(at),
            (scores.item(ranking.picked), cost.totals[0]),
            (scores.item(second), cost.totals[1]),
        )
        return row if total is None else row | {"cost": total, "unit": cost.unit}


def _names(setting: Setting, scorers: int) -> Sequence[str]:
    """Return the names of the scorers of a decision, or "scorer 1", ... if its configuration is no
    longer known.
    """
    if len(setting.scorers) == scorers:
        return setting.scorers
    return tuple(f"scorer {at}" for at in range(1, scorers + 1))


def _score(name: str, parts: Sequence[float], scorers: Sequence[str], states: States) -> Row:
    found = states.get(name)
    return {
        "endpoint": name,
        "total": round(sum(parts), 4),
        "parts": rounded_parts(scorers, parts),
        "state": READY if found is None else found.state,
    }


def _runner_up(
    one: Decided | DecidedLeg, setting: Setting, scorers: Sequence[str], states: States
) -> tuple[Row | None, list[float]]:
    """Return the row that shows the score of the runner-up, and its weighted scores; None and [] if
    there is no runner-up or its scores are unknown.
    """
    parts = weighted(one.runner_up_scores, setting) if one.runner_up else None
    if parts is None:
        return None, []
    return _score(one.runner_up, parts, scorers, states), parts


def weighted(packed: bytes, setting: Setting) -> list[float] | None:
    """Multiply the packed scores of one candidate with the weights of the scorers. Return None if
    the scores or the weights are unknown, and [] if there are no scorers.
    """
    scores = np.frombuffer(packed)
    if len(scores) != len(setting.weights):
        return None
    parts: list[float] = (scores * np.array(setting.weights)).tolist()
    return parts


def _numbers(numbers: Sequence[float]) -> Row:
    """Return the `NUMBERS` of an endpoint's load by name; None stands for an unknown number."""
    told = zip(NUMBERS, numbers, strict=True)
    return {name: round(value, 3) if math.isfinite(value) else None for name, value in told}


def _costs(told: Decided, setting: Setting, before: Sequence[float]) -> list[Cost | FailedCost]:
    """Return the costs of the chosen endpoint and the runner-up, one entry for each scorer that has
    costs.
    """
    if not any(setting.costs):
        return []
    if told.costs is not None:
        return list(told.costs)
    pair = _pair(told, before)
    positions = range(2 if told.runner_up else 1)
    asked = InferenceRequest(
        request_id=told.request_id,
        model=told.model,
        prompt_tokens=told.prompt_tokens,
        output_tokens_max=told.output_tokens_max,
        priority=told.priority,
        moment=Moment(answer_tokens=told.answer_tokens),
    )
    scorers = zip(setting.scorers, setting.costs, strict=False)
    return costs_of(scorers, asked, pair, positions)


def expected_first_token_s(told: Decided, setting: Setting) -> Seconds | None:
    """Return the time to first token in seconds that a recorded decision expected, or None if no
    scorer estimates it.
    """
    return _first_token_s(told, _costs(told, setting, _before(told)))


def observed_first_token_s(told: Decided, end: Ended) -> Seconds | None:
    """Return the observed time to first token in seconds, from the request headers and without the
    wait in the queue, or None if it is unknown.
    """
    if end.first_output_s is None:
        return None
    waited_s = (told.queued or {}).get("waited_s")
    own_s = end.first_output_s - (waited_s if isinstance(waited_s, float | int) else 0.0)
    return round(own_s, DIGITS)


def _before(told: Decided) -> Sequence[float]:
    """Return the load `NUMBERS` of the chosen endpoint as the scorers saw them, before its load
    included this request.
    """
    return numbers_before(
        told.numbers,
        prompt_tokens=told.prompt_tokens,
        prefill_tokens=told.prefill_tokens,
        matched_blocks=told.matched_blocks,
    )


def _first_token_s(told: Decided, costs: Sequence[Cost | FailedCost]) -> Seconds | None:
    """Return the expected time to first token in seconds from the first scorer whose cost contains
    it, or None if none does. It includes the time of a prefill at another endpoint.
    """
    found = (cost for cost in costs if isinstance(cost, Cost) and cost.unit == "s")
    own = next((cost for cost in found if cost.first_token is not None), None)
    if own is None:
        return None
    prefill = next((leg for leg in told.earlier if leg.stage == Stage.PREFILL), None)
    if prefill is None:
        return own.first_token
    return own.first_token_after(
        prefill_time_s(
            _leg_before(told, prefill),
            prompt_tokens=told.prompt_tokens,
            prefill_tokens=prefill.prefill_tokens,
        )
    )


def _pair(told: Decided, before: Sequence[float]) -> Candidates:
    """Return the chosen endpoint and the runner-up as candidates, with the recorded part of their
    state.
    """
    numbers = {told.endpoint: before}
    if told.runner_up:
        numbers[told.runner_up] = told.runner_up_numbers
    return rebuilt_pair(
        [Endpoint(endpoint_id=name, name=name, address="") for name in numbers],
        list(numbers.values()),
        total_blocks=told.total_blocks,
        block_tokens=told.block_tokens,
        prompt_tokens=told.prompt_tokens,
        matched_most=told.matched_most,
    )


def _cost_row(told: Decided, cost: Cost | FailedCost) -> Row:
    if isinstance(cost, FailedCost):
        return {"scorer": cost.scorer, "failed": type(cost.error).__name__}
    names = [told.endpoint, told.runner_up][: len(cost.parts)]
    return {
        "scorer": cost.scorer,
        "unit": cost.unit,
        "endpoints": [
            {"endpoint": name, "total": round(total, DIGITS), "parts": dict(parts)}
            for name, total, parts in zip(names, cost.totals, cost.parts, strict=True)
        ],
        "decided_by": cost.decided_by,
    }


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
