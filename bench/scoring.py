"""Cost of one call of each built-in plugin: `python -m bench.scoring`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from bench.timing import best_us
from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.failures import PluginFailures
from epp.core.knowledge.candidates import Affinity, Candidates, Columns
from epp.core.moment import Moment
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import AdapterReport, Endpoint, attribute_key
from epp.plugins import FILTERS, PICKERS, SCORERS, pickers

ENDPOINTS = 100
NOW_S = 100.0
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "by-label": {"label": "app", "validValues": ["vllm"]},
    "utilization-filter": {"conditions": [{"metric": "waiting-queue", "maxValue": 5}]},
    "endpoint-attribute-filter": {
        "attribute": "load",
        "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 0.5}},
    },
    "endpoint-attribute-scorer": {
        "attributeKey": "load",
        "algorithm": {"type": "linear_lower_is_better"},
    },
}
"""Parameters that plugins require, by type."""
DEFAULT_WEIGHTS = {
    "prefix-cache-scorer": 3.0,
    "queue-scorer": 2.0,
    "kv-cache-utilization-scorer": 2.0,
    "lora-affinity-scorer": 1.0,
    "active-request-scorer": 1.0,
}


def pool(*, adapters: bool) -> Candidates:
    """Return busy candidates, all scraped just before, some of which have cached some of the
    prompt. With `adapters`, engines report LoRA adapters.
    """
    random = np.random.default_rng(1)
    columns = Columns()
    for number in range(ENDPOINTS):
        slot = columns.add_slot()
        columns.endpoints[slot] = Endpoint(
            endpoint_id=f"uid-{number}",
            name=f"default/pod-{number}",
            address=f"10.0.0.{number}:8000",
            labels={
                "llm-d.ai/role": "decode",
                "app": "vllm",
                "llm-d.ai/context-length-range": "0-8192",
            },
        )
        columns.set_attributes(slot, {attribute_key("load"): random.random()})
        if adapters:
            report = AdapterReport(active=frozenset({f"adapter-{number % 7}", "b"}), slots_max=2)
            columns.set_adapters(slot, report)
    n = ENDPOINTS
    columns.waiting_requests[:n] = random.integers(0, 10, n)
    columns.running_requests[:n] = random.integers(0, 64, n)
    columns.kv_cache_usage[:n] = random.random(n)
    columns.observed_at_s[:n] = NOW_S - random.random(n)
    columns.inflight_requests[:n] = random.integers(0, 64, n)
    columns.prefill_backlog_tokens[:n] = random.integers(0, 100_000, n)
    columns.prefill_drained_at_s[:n] = NOW_S
    return Candidates(
        columns,
        np.arange(n),
        NOW_S,
        affinities={
            "approx-prefix-cache-producer": Affinity(random.integers(0, 33, n), 32),
            "no-hit-lru-producer": Affinity(random.permutation(n), n),
        },
        prefix="approx-prefix-cache-producer",
        block_tokens=64,
        prompt_tokens=2048,
    )


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the microseconds per call of each plugin and of a whole
    profile, alone and with warm caches.

    Within a decision, a call takes twice as long.
    """
    request = InferenceRequest(
        request_id="one",
        model="adapter-1",
        moment=Moment(session_tokens=SessionTokens((b"bench",))),
    )
    without, with_adapters = pool(adapters=False), pool(adapters=True)
    request = structs.replace(
        request,
        headers={"x-session-token": request.moment.session_tokens.of(without.endpoints[7])},
    )
    random = Random("bench:picker")
    sums = np.random.default_rng(2).random(ENDPOINTS)
    rows: list[tuple[str, str]] = []

    def measure(name: str, call: Callable[[], object]) -> None:
        took_us = best_us(lambda _: call(), lambda: range(50))
        rows.append((f"{name}, {ENDPOINTS} endpoints", f"{took_us:.1f} µs"))

    for name, kind in SCORERS.items():
        scorer = msgspec.convert(NEEDED.get(name, {}), kind)
        candidates = with_adapters if "lora" in name else without
        measure(name, lambda s=scorer, c=candidates: s.score(request, c))
        if "lora" in name:
            measure(f"{name} (none reported)", lambda s=scorer: s.score(request, without))
    for name, filtering in FILTERS.items():
        plugin = msgspec.convert(NEEDED.get(name, {}), filtering)
        candidates = with_adapters if "lora" in name else without
        measure(name, lambda p=plugin, c=candidates: p.keep(request, c))
    for name, picking in PICKERS.items():
        picker = picking()
        measure(name, lambda p=picker: p.pick(sums, without, random, 7))
    profile = SchedulingProfile(
        name="default",
        filters=(),
        scorers=tuple(
            WeightedScorer(name, SCORERS[name](), weight)
            for name, weight in DEFAULT_WEIGHTS.items()
        ),
        picker_name="max-score-picker",
        picker=pickers.MaxScore(),
    )
    failures = PluginFailures()
    for name, candidates in (("no adapters", without), ("adapters", with_adapters)):
        measure(
            f"default profile, score and pick, {name}",
            lambda c=candidates: profile.pick(
                profile.score(request, c, failures).total, c, random, 7, failures
            ),
        )
    return rows


if __name__ == "__main__":
    for what, cost in run():
        print(f"{what:60} {cost:>12}")
