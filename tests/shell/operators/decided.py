"""Decisions made by hand from real columns, for the tests of what is counted and logged."""

from random import Random

import numpy as np
from msgspec import structs

from epp.core.decision.account import Account, Leg
from epp.core.decision.profile import Scored
from epp.core.decision.scheduler import Decision
from epp.core.knowledge.candidates import Affinity, Candidates, Columns
from epp.core.knowledge.inflight import Lease
from epp.core.prompt.request import InferenceRequest
from epp.core.types import ApiKind, Endpoint

SCORERS = ("prefix-cache-scorer", "queue-scorer", "kv-cache-utilization-scorer")


def make_endpoints(count: int) -> list[Endpoint]:
    return [
        Endpoint(endpoint_id=f"uid-{i}", name=f"prod/vllm-{i}", address=f"10.0.0.{i}:8000")
        for i in range(count)
    ]


def make_candidates(count: int, *, scraped: bool = True) -> Candidates:
    """Endpoint i has i waiting and 2i running requests, was scraped i seconds ago, now is 1000."""
    columns = Columns()
    matched = np.zeros(count, dtype=np.int64)
    for i, endpoint in enumerate(make_endpoints(count)):
        slot = columns.add_slot()
        columns.endpoints[slot] = endpoint
        matched[slot] = i
        columns.inflight_requests[slot] = i + 1
        columns.prefill_backlog_tokens[slot] = 64.0 * i
        columns.prefill_drained_at_s[slot] = 1000.0
        if scraped:
            columns.waiting_requests[slot] = i
            columns.running_requests[slot] = 2 * i
            columns.kv_cache_usage[slot] = i / count
            columns.cache_queried_tokens[slot] = 1000.0 * i
            columns.cache_hit_tokens[slot] = 100.0 * i
            columns.observed_at_s[slot] = 1000.0 - i
    return Candidates(
        columns,
        np.arange(count, dtype=np.int64),
        1000.0,
        affinities={"approx": Affinity(matched, 10)},
        prefix="approx",
        block_tokens=64,
        prompt_tokens=700,
    )


def make_request(model: str = "llama", **fields: object) -> InferenceRequest:
    request = InferenceRequest(
        request_id="r-1",
        api=ApiKind.CHAT,
        model=model,
        prompts=(b"a secret prompt",),
        prompt_tokens=700,
    )
    return structs.replace(request, **fields)


def make_decision(
    request: InferenceRequest | None = None, *, number: int = 1, endpoints: int = 4, picked: int = 3
) -> Decision:
    candidates = make_candidates(endpoints)
    random = Random(number)
    scores = np.array([[random.random() for _ in range(endpoints)] for _ in SCORERS])
    scores[:, picked] = (1.0, 0.25, 1.0)
    weights = np.array([3.0, 1.0, 1.0])
    lease = Lease(request or make_request(), picked, 0, picked, 1000.0)
    leg = Leg(
        endpoint=candidates.endpoints[picked],
        fallbacks=(),
        ready=endpoints + 1,
        dropped={"fresh-metrics-filter": np.array([endpoints])},
        candidates=candidates,
        picked=picked,
        scorers=SCORERS,
        scored=Scored(weights @ scores, scores, weights),
        tellers=(None,) * len(SCORERS),
        lease=lease,
        matched_blocks=picked,
        total_blocks=10,
        block_tokens=64,
    )
    account = Account(number=number, request=lease.request, legs=(leg,), shadow=None)
    return Decision(account=account, leg=leg)


def with_leg(decision: Decision, **fields: object) -> Decision:
    """The same decision with other `fields` of its leg."""
    leg = structs.replace(decision.leg, **fields)
    return Decision(account=structs.replace(decision.account, legs=(leg,)), leg=leg)
