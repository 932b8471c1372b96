"""Compute every decision of a run by the formula on paper: `python recompute.py DIR/decisions.jsonl`.

DIR is the folder of `sim replay --inputs` under the default configuration. The program needs only Python.
The formula is in docs/scoring.md, sections "Added time", "By hand" and "Constants".
The exit code is 1 if the formula chooses another endpoint for a request.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

ATTENTION_TOKENS = 40_000
DECODE_SHARE = 1e-3
STEP_TOKENS = 200
HELD_UP_MAX = 10
REPORTED_S_MAX = 2.0
PREFILL_DELAY = 0.3
EVICTION_COST = 2.0
DECODE_TOKENS = 256
FIRST_TOKEN_WEIGHT = 3.0
HALF_WEIGHT_S = 0.5
ADAPTER_LOAD_S = 1.0
ADAPTER_WAIT_S = 1.5

ALIKE = 1e-9
"""Largest difference of two costs that count as equal, as a share of the range of all costs; a
random draw decides between equal ones.
"""


def told(pods: list[Any], name: str, nobody: float | None) -> list[Any]:
    """Return the value `name` that each pod reported last. If it is missing or too old, it is
    replaced by the median of the other pods, or by `nobody` if no pod has a recent one.
    """
    ages = [pod["known"]["metrics_age_s"] for pod in pods]
    old = [age is None or age > REPORTED_S_MAX for age in ages]
    column = [None if gone else pod["known"][name] for pod, gone in zip(pods, old, strict=True)]
    known = [value for value in column if value is not None]
    usual = median(known) if known else nobody
    return [usual if value is None else value for value in column]


def adapter_s(adapters: dict[str, Any]) -> float:
    """Return the seconds until the adapter of the request is loaded."""
    if adapters["loaded"]:
        return 0.0
    if adapters["resident"] is None:
        free = adapters["active"] < adapters["slots_max"]
    else:
        free = adapters["resident"] < adapters["slots_max"] or adapters["idle"] > 0
    return ADAPTER_LOAD_S if free else ADAPTER_WAIT_S


def costs(line: dict[str, Any]) -> list[float]:
    """Return the seconds that the request adds at each candidate."""
    pods, prompt = line["candidates"], line["prompt_tokens"]
    answer = min(line["output_tokens_max"] or DECODE_TOKENS, DECODE_TOKENS)
    answer = min(line["answer_tokens"] or answer, answer)
    waiting = told(pods, "waiting_requests", 0)
    running = told(pods, "running_requests", 0)
    usage = told(pods, "kv_cache_usage", None)
    capacity = told(pods, "kv_capacity_tokens", None)
    compute = [max(0, prompt - pod["matched_blocks"] * line["block_tokens"]) for pod in pods]
    adapters = [pod["known"]["adapters"] for pod in pods]
    reported = [adapter_s(one) for one in adapters if one is not None]
    unreported = median(reported) if reported else 0.0
    found = []
    for at, pod in enumerate(pods):
        known, x = pod["known"], compute[at]
        requests = max(waiting[at] + running[at], known["inflight_requests"])
        unseen = requests - known["inflight_requests"]
        share_waiting = waiting[at] / max(requests, 1)
        pending = known["inflight_prefill_tokens"] + unseen * share_waiting * min(compute)
        context = known["inflight_context_tokens"] + unseen * prompt
        prefill = x * (1 + (prompt - x / 2) / ATTENTION_TOKENS)
        tokens = prefill * (PREFILL_DELAY * requests + EVICTION_COST)
        tokens += answer * DECODE_SHARE * (context + requests * prompt)
        if usage[at] is not None and capacity[at] is not None:
            used = usage[at] * capacity[at]
            over = max(0, used + x - capacity[at] + used * share_waiting)
            per_token = answer * (STEP_TOKENS + DECODE_SHARE * context) / capacity[at]
            tokens += per_token * (over + min(waiting[at], HELD_UP_MAX) * x)
        speed, report = known["prefill_tokens_per_s"], adapters[at]
        first = (pending + prefill) / speed + (unreported if report is None else adapter_s(report))
        late = FIRST_TOKEN_WEIGHT * first**2 / (first + HALF_WEIGHT_S)
        found.append(first + late + tokens / speed)
    return found


def main(path: str) -> int:
    """Print how many choices and costs of the run differ from the formula. Return 1 if a choice
    differs, else 0.
    """
    choices = differ = 0
    furthest = 0.0
    with Path(path).open(encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if not line["candidates"]:
                continue
            if "known" not in line["candidates"][0]:
                sys.exit(f"{path}: expected the decisions of `sim replay --inputs`")
            choices += 1
            seconds = costs(line)
            names = [pod["endpoint"] for pod in line["candidates"]]
            chosen = seconds[names.index(line["endpoint"])]
            if chosen - min(seconds) > ALIKE * (max(seconds) - min(seconds)):
                differ += 1
                best = names[seconds.index(min(seconds))]
                print(f"request {line['request']}: {line['endpoint']}, by the formula {best}")
            for pod, mine in zip(line["candidates"], seconds, strict=True):
                theirs = sum(pod["costs"]["added-time-scorer"].values())
                furthest = max(furthest, abs(mine - theirs) / max(mine, theirs, 1e-9))
    print(f"{differ:,} of {choices:,} choices differ; costs differ by {furthest:.1g} at most")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
