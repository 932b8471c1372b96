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

from epp.core.decision.account import Ranking, decided_by, rounded_parts
from epp.core.decision.costs import DIGITS, Cost, cost_by_score, cost_of, rebuilt_pair
from epp.core.decision.plugin import TellsCost
from epp.core.decision.profile import Scored
from epp.core.knowledge.candidates import NUMBERS, Candidates
from epp.core.knowledge.rebuilt import numbers_before
from epp.core.moment import Moment
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Seconds
from epp.shell.operators.decisions.decision_record import (
    Decided,
    Ended,
    Refused,
    Scores,
    Served,
    predicted_at,
)
from epp.shell.operators.decisions.endpoint_states import OUTLYING, READY, States

SCORES_SHOWN_MAX: Final = 8
"""Candidates of a decision that are shown, best first."""
LEFT_OUT_SHOWN_MAX: Final = 8
"""Endpoints that were not scored, by name."""

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


class Kept(Struct, frozen=True, kw_only=True):
    """What is still known of a decision."""

    told: Decided
    setting: Setting = NO_SETTING
    scores: Scores | None = None
    """Of all its candidates; None: not any more."""
    members: Members | None = None
    """Of the pool then; None: not known any more."""
    states: States = msgspec.field(default_factory=dict)
    """Of those members that were not simply ready."""


def decided_row(
    kept: Kept,
    *,
    at_s: float,
    now_s: float,
    end: Ended | None,
    served: Served | None,
    why_not: str = "",
) -> Row:
    """A decision that was kept at `at_s`.

    `why_not`: an endpoint of which it is told besides why it was not chosen.
    """
    told, setting, states = kept.told, kept.setting, kept.states
    names = _names(setting, len(told.parts))
    before = _before(told)
    costs = _costs(told, setting, before)
    cost = next((one for one in costs if isinstance(one, Cost)), None)
    expected_s = _first_token_s(costs)
    chosen = _score(told.endpoint, told.parts, names, states)
    other_parts = weighted(told.runner_up_scores, setting)
    runner_up = _score(told.runner_up, other_parts, names, states) if other_parts else None
    known = {"endpoint": _numbers(before)}
    if runner_up:
        known["runner_up"] = _numbers(told.runner_up_numbers)
    if cost is not None:
        for score, total in zip((chosen, runner_up), cost.totals, strict=False):
            if score is not None:
                score |= {"cost": round(total, DIGITS), "unit": cost.unit}
    ranked = _Ranked(kept, names, cost)
    among = set(ranked.slots)
    left_out = []
    if among and kept.members is not None:
        left_out = [one.name for at, one in enumerate(kept.members) if one and at not in among]
    row = {
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
        "predicted_tokens": predicted_at(told, served),
        "ready": told.ready,
        "eliminated": dict(told.eliminated),
        "candidates": told.candidates,
        "not_scored": left_out[:LEFT_OUT_SHOWN_MAX],
        "score": chosen,
        "runner_up": runner_up,
        "decided_by": list(decided_by(names, told.parts, other_parts)) if runner_up else [],
        "by_blocks": list(setting.by_blocks),
        "expected_first_token_s": None if expected_s is None else round(expected_s, DIGITS),
        "costs": [_cost_row(told, one) if isinstance(one, Cost) else one for one in costs],
        "known": known,
        "outcome": outcome_row(end, served),
        "scores": ranked.best or [chosen],
    }
    if told.shadow is not None:
        row["shadow"] = told.shadow
    if why_not:
        row["why_not"] = _why_not(why_not, kept, row, ranked)
    return row


def _why_not(asked: str, kept: Kept, row: Row, ranked: "_Ranked") -> Row:
    """Why the endpoint that is `asked` for was not chosen, by its "verdict"."""
    told, runner_up = kept.told, row["runner_up"]
    if is_called(asked, told.endpoint, told.address):
        return {"endpoint": told.endpoint, "verdict": "chosen"}
    slot, name = _member(asked, kept, runner_up["endpoint"] if runner_up else "")
    if not name:
        absent = kept.members is not None
        return {"endpoint": asked, "verdict": "absent" if absent else "unknown"}
    state = _state(name, kept.states)
    why: Row = {"endpoint": name, "verdict": "unknown"} | state
    is_ready = state["state"] in {READY, *OUTLYING}
    score = None
    if slot in ranked.slots:
        score = ranked.row(ranked.slots.index(slot))
    elif runner_up is not None and name == runner_up["endpoint"]:
        score = runner_up
    if score is not None:
        why |= {"verdict": "scored", "score": score} | _behind(row["score"], score)
    elif by := _dropped_by(slot, kept):
        why |= {"verdict": "dropped", "by": by}
    elif not is_ready:
        why |= {"verdict": "not ready"}
    elif ranked.slots:
        why |= {"verdict": "outside the subset"}
    return why


def _member(asked: str, kept: Kept, runner_up: str) -> tuple[int, str]:
    """Slot and name of the endpoint that is `asked` for; -1 and "", as far as they are not known."""
    if kept.members is None:
        named = (runner_up, *kept.states)
        return -1, next((name for name in named if name and is_called(asked, name, "")), "")
    for slot, one in enumerate(kept.members):
        if one is not None and is_called(asked, one.name, one.address):
            return slot, one.name
    return -1, ""


def _dropped_by(slot: int, kept: Kept) -> str:
    """The filter that dropped the endpoint in `slot`; "" if none did, as far as is known."""
    dropped = kept.scores.dropped if kept.scores else {}
    return next(
        (name for name, slots in dropped.items() if slot in np.frombuffer(slots, np.int64)), ""
    )


def _behind(chosen: Row, score: Row) -> Row:
    """By how much, and by which scorers; the greatest first."""
    leads = {name: round(part - score["parts"][name], 4) for name, part in chosen["parts"].items()}
    parts = dict(sorted(leads.items(), key=lambda lead: -lead[1]))
    return {"behind": round(chosen["total"] - score["total"], 4), "parts": parts}


def is_called(asked: str, name: str, address: str) -> bool:
    """Whether an endpoint is `asked` for: by its name, with or without its namespace, or address."""
    return asked in {name, name.rpartition("/")[2], address}


def _state(name: str, states: States) -> Row:
    found = states.get(name)
    if found is None:
        return {"state": READY, "reason": "", "since": None}
    return {"state": found.state, "reason": found.reason, "since": iso(found.since_s)}


def refused_row(told: Refused, states: States, *, at_s: float, why_not: str = "") -> Row:
    """A refusal that was kept at `at_s`, when `states` were those of endpoints not simply ready."""
    row = {
        "at": iso(at_s),
        "request_id": told.request_id,
        "model": told.model,
        "path": told.path,
        "priority": told.priority,
        "refused": told.reason,
        "status": told.status,
        "eliminated": dict(told.eliminated),
    }
    if why_not:
        found = [name for name in states if is_called(why_not, name, "")]
        name = found[0] if found else why_not
        row["why_not"] = {"endpoint": name, "verdict": "refused"} | _state(name, states)
    return row


def outcome_row(end: Ended | None, served: Served | None) -> Row | None:
    """How a request ended; `served`: where the gateway went instead. None: not known."""
    address = None if served is None else served.address
    if end is None:
        return None if served is None else {"served_by": address}
    return msgspec.structs.asdict(end) | {"served_by": address}


class _Ranked:
    """The scores of all candidates, as far as they are kept."""

    def __init__(self, kept: Kept, names: Sequence[str], cost: Cost | None) -> None:
        """`cost` tells what candidates cost, if that is known."""
        self._kept, self._cost = kept, cost
        self.slots: list[int] = []
        """By position."""
        self.best: list[Row] = []
        """Rows of the best, best first, the chosen one among them."""
        scores, weights = kept.scores, np.array(kept.setting.weights)
        if scores is None or kept.members is None or not len(weights):
            return
        parts = np.frombuffer(scores.scores).reshape(len(weights), -1)
        self._ranking = Ranking(
            scorers=tuple(names), scored=Scored.of(parts, weights), picked=scores.picked
        )
        self.slots = np.frombuffer(scores.slot, np.int64).tolist()
        self.best = [self.row(at) for at in self._ranking.best(SCORES_SHOWN_MAX)]

    def row(self, at: int) -> Row:
        """The score of the candidate at a position."""
        members = self._kept.members or ()
        member = members[self.slots[at]]
        name = member.name if member else ""
        ranking, cost = self._ranking, self._cost
        row = _score(name, ranking.scored.parts_of(at), ranking.scorers, self._kept.states)
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
    """Of the scorers; of a configuration that is not known any more by their place."""
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


def weighted(packed: bytes, setting: Setting) -> list[float]:
    """What each scorer gave; nothing, if there is nobody or the weights are not known any more."""
    scores = np.frombuffer(packed)
    if not len(scores) or len(scores) != len(setting.weights):
        return []
    parts: list[float] = (scores * np.array(setting.weights)).tolist()
    return parts


def _numbers(numbers: Sequence[float]) -> Row:
    """None: not known."""
    told = zip(NUMBERS, numbers, strict=True)
    return {name: round(value, 3) if math.isfinite(value) else None for name, value in told}


def _costs(told: Decided, setting: Setting, before: Sequence[float]) -> list[Cost | Row]:
    """What the costs that scorers went by were made of, of the chosen endpoint and the next best; of a
    scorer that fails its row.
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
    found: list[Cost | Row] = []
    for name, scorer in zip(setting.scorers, setting.costs, strict=False):
        if scorer is None:
            continue
        try:
            found.append(cost_of(name, scorer, asked, pair, positions))
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin: the rest is told all the same
            found.append({"scorer": name, "failed": type(error).__name__})
    return found


def expected_first_token_s(told: Decided, setting: Setting) -> Seconds | None:
    """After how long the chosen endpoint was expected to give the first token; None: nobody said."""
    return _first_token_s(_costs(told, setting, _before(told)))


def _before(told: Decided) -> Sequence[float]:
    """`NUMBERS` of the chosen endpoint, as the scorers saw them."""
    return numbers_before(
        told.numbers,
        prompt_tokens=told.prompt_tokens,
        prefill_tokens=told.prefill_tokens,
        matched_blocks=told.matched_blocks,
    )


def _first_token_s(costs: Sequence[Cost | Row]) -> Seconds | None:
    """As the first scorer says that gives its cost in seconds and names its parts."""
    for cost in costs:
        if isinstance(cost, Cost) and cost.unit == "s" and cost.first_token is not None:
            return cost.first_token
    return None


def _pair(told: Decided, before: Sequence[float]) -> Candidates:
    """The chosen endpoint and the next best, as far as they are kept."""
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


def _cost_row(told: Decided, cost: Cost) -> Row:
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
