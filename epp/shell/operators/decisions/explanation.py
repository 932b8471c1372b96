"""Explain in words why a request was routed to its endpoint, for pages and `epp explain`."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from epp.core.decision.shadow import AGREED, DIFFERED
from epp.core.types import Stage
from epp.journal.records import READY
from epp.shell.printable import printable

_Row: TypeAlias = dict[str, Any]

_DIGITS: Final = 3
_LATENCIES: Final = {"ttft": "time to first token", "tpot": "time per output token"}
_LEVEL: Final = 1e-4
"""Difference of scores below which two totals count as equal; totals are rounded to it."""


def explanation(row: _Row) -> str:
    """Convert a row of `RecentDecisions` to lines of text for people, with control characters
    escaped.
    """
    lines = _refusal(row) if "refused" in row else _decision(row)
    head, *rest = map(printable, lines)
    return "".join([f"{head}\n", *(f"  {line}\n" for line in rest)])


def _refusal(row: _Row) -> list[str]:
    path = f", path {row['path']}" if row["path"] else ""
    lines = [
        f"{_request(row)}{path}, {row['at']}",
        f"refused with {row['status']}: {row['refused']}",
    ]
    if "queued" in row:
        lines.append(_queued(row["queued"]))
    if row["eliminated"]:
        lines.append(f"dropped: {_dropped(row)}")
    if "why_not" in row:
        lines.append(_why_not(row, row["why_not"]))
    return lines


def _decision(row: _Row) -> list[str]:
    by = (
        f", configuration generation {row['config_generation']}" if row["config_generation"] else ""
    )
    lines = [
        f"{_request(row)}, {row['at']}, {row['age_s']:g} s ago, decision {row['number']}{by}",
        f"routed to {row['endpoint']} at {row['address']}",
    ]
    if "queued" in row:
        lines.append(_queued(row["queued"]))
    if "route" in row:
        lines.append(
            f"route {row['route']}: {row['uncached_tokens']} of {row['prompt_tokens']} prompt "
            f"tokens were not cached at {row['endpoint']}"
        )
    lines.append(_verdict(row))
    for stage in (Stage.PREFILL, Stage.ENCODE):
        if stage in row:
            lines += _stage(stage, row[stage])
    if "overdue" in row:
        overdue = row["overdue"]
        lines.append(
            f"overdue: {overdue['prefills']} prefills at {row[Stage.PREFILL]['endpoint']} for "
            f"{row['endpoint']} neither ended nor failed within {overdue['deadline_s']:g} s"
        )
    if "why_not" in row:
        lines.append(_why_not(row, row["why_not"]))
    lines += [_cost(row, cost) for cost in row.get("costs", ())]
    lines.append(_known(row["endpoint"], row["known"]["endpoint"]))
    if row["runner_up"]:
        lines.append(_known(row["runner_up"]["endpoint"], row["known"]["runner_up"]))
    if "shadow" in row:
        lines.append(_shadow(row["shadow"]))
    lines += _others(row)
    lines += [_scored(row), _predicted(row)]
    if row.get("expected_first_token_s") is not None:
        lines.append(_first_token(row))
    lines += _latencies(row.get("latency", {}))
    lines.append(_ended(row))
    return lines


def _latencies(row: _Row) -> list[str]:
    """Return a line with the predicted and the observed value of each kind of latency in the row,
    with "?" for an unknown one, e.g. "predicted time to first token 0.41 s, observed 0.38 s; median
    error 7%".
    """
    return [
        f"predicted {_LATENCIES[name]} {_predicted_s(each['predicted_s'])}, "
        f"observed {_predicted_s(each['observed_s'])}; median error "
        + ("unknown" if each["error"] is None else f"{each['error']:.0%}")
        for name, each in row.items()
    ]


def _predicted_s(value: float | None) -> str:
    return "?" if value is None else f"{_short(value)} s"


def _queued(row: _Row) -> str:
    """Return a line about the wait of the request in the queue, and its reason."""
    flow = f" of flow {row['flow']}" if row["flow"] else ""
    told = f"waited {row['waited_s']:g} s in the queue{flow}, behind {row['ahead']} requests"
    most = row.get("behind_requests", 0)
    if most:
        told += f" ({most} {_of_flow(row['behind'])}, the largest group of its band)"
    told += f", because {row['why']}"
    charged = row["charged_tokens"]
    return f"{told}; charged {charged} tokens" if charged else told


def _of_flow(flow: str) -> str:
    return f"of flow {flow}" if flow else "without a flow"


def _stage(stage: Stage, row: _Row) -> list[str]:
    """Return lines that explain the choice of the endpoint for a stage before decode: its address,
    scores, candidates and load.
    """
    others = f" and {', '.join(row['others'])}" if row["others"] else ""
    lines = [
        f"{stage} at {row['endpoint']} at {row['address']}{others}",
        f"{stage}: {_verdict(row)}",
        f"{stage}: {row['candidates']} of {row['ready']} ready endpoints were scored"
        + (f"; dropped: {_dropped(row)}" if row["eliminated"] else ""),
    ]
    if row["known"]:
        lines.append(_known(row["endpoint"], row["known"]))
    return lines


def _request(row: _Row) -> str:
    model = f"model {row['model']}, " if row["model"] else ""
    return f"request {row['request_id'] or '-'} ({model}priority {row['priority']})"


def _verdict(row: _Row) -> str:
    """Return the scores of the chosen endpoint and the runner-up and what decided, e.g. "pod-3: 7,
    including prefix 3 (9 of 9 blocks); runner-up pod-2: 4; prefix decided".
    """
    score, runner_up = row["score"], row["runner_up"]
    blocks = f"{row['matched_blocks']} of {row['total_blocks']} blocks"
    notes = dict.fromkeys(row["by_blocks"], f" ({blocks})")
    verdict = f"{_name(score)}: {_total(score, notes)}"
    if not runner_up:
        alone = row["candidates"] == 1
        return f"{verdict}; " + (
            "it was the only candidate" if alone else "the scores of others are not recorded"
        )
    verdict += f"; runner-up {_name(runner_up)}: {_total(runner_up, {})}"
    return f"{verdict}; {_decided(row['decided_by'], score['total'], runner_up)}"


def _name(score: _Row) -> str:
    """Return the name of a candidate, with its state in parentheses unless it was simply ready."""
    state = score["state"]
    return str(score["endpoint"]) if state == READY else f"{score['endpoint']} ({state})"


def _why_not(row: _Row, why: _Row) -> str:
    """Return why an endpoint was not chosen, e.g. "why not llm/pod-7: it was not ready; it was
    unreachable since 02:01:07: scrapes fail to connect or get no answer".
    """
    if why["verdict"] == "scored":
        return f"why not {why['endpoint']}: {_behind(row, why)}"
    against = why.get("state", READY) != READY
    told = {
        "chosen": f"it was chosen for stage {why['stage']}" if "stage" in why else "it was chosen",
        "absent": "it was not in the pool then",
        "dropped": f"{why.get('by')} dropped it",
        "outside the subset": "it was ready, and not in the subset that the gateway allows",
        "not ready": "it was not ready",
        "refused": "no endpoint was chosen"
        if against
        else "no endpoint was chosen, and no problem of this one is known",
    }.get(why["verdict"], "the reason is no longer recorded")
    return f"why not {why['endpoint']}: {told}{_against(why)}"


def _behind(row: _Row, why: _Row) -> str:
    chosen, score = row["score"], why["score"]
    told = f"{_name(score)} had {_short(score['total'])} against {_short(chosen['total'])}"
    leads = [f"{name} {_short(lead)}" for name, lead in why["parts"].items() if lead > _LEVEL]
    if why["behind"] > _LEVEL:
        told += f", {_short(why['behind'])} less: {', '.join(leads)}"
    elif why["behind"] < -_LEVEL:
        told += "; the picker chose another one although its score is lower"
    else:
        told += ", a tie"
    if "cost" in score and "cost" in chosen:
        unit = score["unit"]
        told += f"; it cost {_short(score['cost'])} {unit} against {_short(chosen['cost'])} {unit}"
    return told + _against(why)


def _against(why: _Row) -> str:
    if why.get("state", READY) == READY:
        return ""
    reason = f": {why['reason']}" if why["reason"] else ""
    return f"; it was {why['state']} since {why['since'][11:19]}{reason}"


def _others(row: _Row) -> list[str]:
    """Return a line with the costs of the candidates besides the chosen one and the runner-up, best
    first; no line if they are unknown.
    """
    two = {row["score"]["endpoint"], row["runner_up"]["endpoint"] if row["runner_up"] else ""}
    told = [
        f"{_name(score)} {_short(score['cost'])} {score['unit']}"
        for score in row["scores"]
        if score["endpoint"] not in two and "cost" in score
    ]
    return [f"other candidates: {', '.join(told)}"] if told else []


def _decided(by: Sequence[str], total: float, runner_up: _Row) -> str:
    if by:
        return f"{_list(by)} decided"
    if runner_up["total"] > total + _LEVEL:
        return f"the picker chose it although {runner_up['endpoint']} has a higher score"
    return "a tie, which the picker broke"


def _total(score: _Row, notes: dict[str, str]) -> str:
    parts = [
        f"{name} {_short(part)}{notes.get(name, '')}"
        for name, part in score["parts"].items()
        if part or name in notes
    ]
    return _short(score["total"]) + (f", including {', '.join(parts)}" if parts else "")


def _cost(row: _Row, cost: _Row) -> str:
    """Return the cost by one scorer of the chosen endpoint and the runner-up, with the parts of the
    cost.
    """
    if "failed" in cost:
        return f"{cost['scorer']} could not list the parts of its cost: {cost['failed']}"
    unit, (chosen, *others) = cost["unit"], cost["endpoints"]
    told = f"cost by {cost['scorer']} for {chosen['endpoint']}: {_parts(chosen, unit)}"
    for other in others:
        told += f"; for runner-up {other['endpoint']}: {_parts(other, unit)}"
    return told + (f"; {_list(cost['decided_by'])} decided" if cost["decided_by"] else "")


def _parts(cost: _Row, unit: str) -> str:
    parts = sorted(cost["parts"].items(), key=lambda part: -part[1])
    told = [f"{name} {_short(value)}" for name, value in parts if _short(value) != "0"]
    return f"{_short(cost['total'])} {unit}" + (f", including {', '.join(told)}" if told else "")


def _known(name: str, known: _Row) -> str:
    """Return the load of an endpoint as the picker knew it when it decided."""
    usage = known["kv_cache_usage"]
    age = known["metrics_age_s"]
    told = [
        f"{_count(known['waiting_requests'])} waiting",
        f"{_count(known['running_requests'])} running",
        "KV cache unknown" if usage is None else f"KV cache {usage:.0%}",
        f"{_count(known['inflight_requests'])} in flight",
        f"{_count(known['inflight_prefill_tokens'])} tokens to prefill",
        "never scraped" if age is None else f"metrics {_short(age)} s old",
    ]
    return f"{name} at that time: {', '.join(told)}"


def _shadow(told: _Row) -> str:
    """Return what the shadow profile would have chosen, e.g. "the shadow profile would have chosen
    pod-2: 64 uncached tokens there, 576 where it went; 3 in flight there, 5 where it went".
    """
    if told["verdict"] == AGREED:
        return "the shadow profile agreed"
    if told["verdict"] != DIFFERED:
        return f"the shadow profile made no choice: {told['verdict']}"
    return (
        f"the shadow profile would have chosen {told['endpoint']}: "
        f"{_count(told['uncached_tokens'])} uncached tokens there, "
        f"{_count(told['live_uncached_tokens'])} where it went; "
        f"{told['inflight_requests']} in flight there, {told['live_inflight_requests']} where it went"
    )


def _scored(row: _Row) -> str:
    told = f"{row['candidates']} of {row['ready']} ready endpoints were scored"
    if row["eliminated"]:
        told += f"; dropped: {_dropped(row)}"
    if row["not_scored"]:
        told += f"; not scored: {', '.join(row['not_scored'])}"
    return told


def _dropped(row: _Row) -> str:
    return ", ".join(f"{count} by {by}" for by, count in row["eliminated"].items())


def _predicted(row: _Row) -> str:
    told = (
        f"predicted {row['predicted_tokens']} of {row['prompt_tokens']} prompt tokens in its cache"
    )
    cached = (row["outcome"] or {}).get("cached_tokens")
    return told if cached is None else f"{told}, the engine found {cached}"


def _first_token(row: _Row) -> str:
    told = f"first token expected after {_short(row['expected_first_token_s'])} s"
    observed_s = (row["outcome"] or {}).get("first_output_s")
    if observed_s is None:
        return told
    if "queued" not in row:
        return f"{told}, observed after {_short(observed_s)} s"
    own_s = observed_s - row["queued"]["waited_s"]
    return f"{told}, observed after {_short(own_s)} s, without the wait in the queue"


def _ended(row: _Row) -> str:
    outcome = row["outcome"] or {}
    served = outcome.get("served_by")
    elsewhere = f"the gateway used {served} instead; " if served else ""
    if "ending" not in outcome:
        return f"{elsewhere}no end is recorded yet"
    status = outcome["status"]
    told = [f"{status}" if status else "no response was seen"]
    if outcome["by_gateway"] and status:
        told = [f"{status} by the gateway itself"]
    told.append(
        f"{outcome['failure'] or outcome['ending']} after {_short(outcome['duration_s'])} s"
    )
    for name, what in (("response_headers_s", "headers"), ("first_output_s", "first output")):
        if outcome[name] is not None:
            told.append(f"{what} after {_short(outcome[name])} s")
    return f"{elsewhere}ended: {', '.join(told)}"


def _list(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _short(value: float | None) -> str:
    return "?" if value is None else f"{round(value, _DIGITS):g}"
