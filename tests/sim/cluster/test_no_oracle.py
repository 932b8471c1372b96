"""Nothing that a plugin sees in the simulator is unknown where the picker serves.

Each field that a plugin can read is walked, so that a new one is judged before it is there.
"""

import re

import msgspec
import numpy as np
import pytest

from epp.core.knowledge.candidates import Candidates
from epp.core.moment import Moment
from epp.core.prompt.request import InferenceRequest
from epp.core.types import EndpointMetrics
from epp.plugins.contract import Affinity
from sim.cluster.cluster import Cluster
from sim.cluster.policies import SchedulerPolicy, policy_source
from sim.cluster.settings import ClusterSettings
from sim.traces.prompts import request_of, request_through_bytes
from tests.sim.made import arrival, kind

LIVE = {
    "media": "body",
    "request_id": "header x-request-id",
    "api": "path",
    "model": "body",
    "prompts": "body",
    "prompt_tokens": "bytes of the body, four a token; the text of a trace has as many. Or its ids",
    "prompt_bytes": "body",
    "cache_salt": "body",
    "headers": "headers",
    "subset": "gateway",
    "priority": "objective named by a header",
    "stream": "body",
    "output_tokens_max": "body",
    "session_id": "header",
    "chains": "body",
    "tails": "body",
    "token_chains": "ids of the body, or of the token producer",
    "segments": "own",
    "moment": "own, see below",
}
MOMENT = {
    "cold": "own index",
    "replicas_unheard": "--replicas, less those that are heard",
    "sessions_return": "own requests before",
    "answer_tokens": "answers counted on the metrics page",
    "session_tokens": "own",
    "token_ids": "token producer",
    "token_media": "token producer",
    "known_tokens": "token producer",
}
"""Where `epp serve` has each field of a request from."""
SEEN_OF_CANDIDATES = {
    "waiting_requests": "metrics page",
    "running_requests": "metrics page",
    "kv_cache_usage": "metrics page",
    "kv_capacity_tokens": "metrics page",
    "metrics_age_s": "clock",
    "metrics_age_s_max": "clock",
    "saturated": "metrics page",
    "cache_queried_tokens": "metrics page",
    "cache_hit_tokens": "metrics page",
    "inflight_requests": "own decisions and what peers tell of theirs",
    "inflight_context_tokens": "own decisions",
    "unreported_requests": "own decisions since the last scrape",
    "inflight_prefill_tokens": "own decisions, first tokens counted on the metrics page, drained between pages",
    "receiving_tokens": "own decisions, first and received tokens counted on the metrics page",
    "sending_tokens": "own decisions, first and received tokens counted on the metrics page",
    "link_unmeasured": "bytes and times of KV transfers counted on the metrics page",
    "own_prefill_tokens": "own decisions, first tokens counted on the metrics page, drained between pages",
    "prefill_tokens_per_s": "configuration",
    "prefill_measured_tokens_per_s": "configuration, first tokens counted on the metrics page",
    "matched_blocks": "own decisions",
    "total_blocks": "body",
    "uncached_tokens": "own decisions",
    "predicted_ttft_s": "own decisions, first chunks of answers",
    "predicted_tpot_s": "own decisions, ends and token usage of answers",
    "predicted_ttft_error": "own decisions, first chunks of answers",
    "predicted_tpot_error": "own decisions, ends and token usage of answers",
    "adapter_state": "metrics page",
    "adapters_reported": "metrics page",
    "prefill_alike": "configuration",
    "common_prefill_tokens_per_s": "configuration",
    "endpoints": "discovery",
    "labels": "discovery",
    "labelled": "discovery",
    "nearness": "discovery",
    "slot": "own",
    "peer": "own choice for an earlier stage of the request",
    "peer_candidates": "own choice for an earlier stage of the request",
    "version": "own",
    "block_tokens": "configuration",
    "prompt_tokens": "body",
}
METHODS = {
    "take", "rendezvous", "version_of", "prefix_match", "metrics_age_s_of", "affinity", "attribute", "named",
    "name_of", "numbers_of", "inflight_requests_of", "all_observed_within", "engine_load",
    "matched_most", "near", "prefill_numbers_of", "request_load",
    "link_bytes_per_s",
}  # fmt: skip
PAGE = {
    "waiting_requests", "running_requests", "kv_cache_usage", "adapters", "block_size_tokens",
    "blocks_total", "cache_queried_tokens", "cache_hit_tokens", "process_started_at_s", "requests_total",
    "rejections_total", "attributes", "asleep", "ttft_sum_s", "ttft_count", "first_outputs_total",
    "tier_hit_tokens", "answers_total", "answer_tokens_total", "transfers",
}  # fmt: skip
"""What the pages of engines say."""


def names(struct):
    return {field.name for field in msgspec.structs.fields(struct)}


def test_every_field_is_known_live():
    """A new one is to be named here, with where production has it from."""
    assert names(InferenceRequest) == set(LIVE)
    assert names(Moment) == set(MOMENT)
    public = {name for name in dir(Candidates) if not name.startswith("_")}
    assert public == set(SEEN_OF_CANDIDATES) | (METHODS & public)
    assert names(EndpointMetrics) == PAGE


ONE = arrival(
    3, prompt_tokens=200, output_tokens=9, output_tokens_max=64, blocks=(4, 5), lengths=(128, 64),
    session="c", priority=-1, cache_salt="s", adapter="x",
)  # fmt: skip
FUTURE = {"output_tokens": 900, "answer": 77, "after": 1, "think_s": 5.0, "time_s": 9.0, "turn": 4}


@pytest.mark.parametrize("make", [request_of, request_through_bytes])
@pytest.mark.parametrize("field", sorted(LIVE))
def test_a_request_tells_nothing_of_its_answer(make, field):
    """Field by field: the same whatever comes of it, and after what it was sent."""
    told = [getattr(make(one), field) for one in (ONE, msgspec.structs.replace(ONE, **FUTURE))]
    assert told[0] == told[1]


@pytest.mark.parametrize("field", sorted(LIVE.keys() - {"prompts", "chains"}))
def test_a_replayed_request_is_the_one_that_production_parses(field):
    """Field by field; the prompt is compared by its hashes elsewhere."""
    fast, parsed = request_of(ONE), request_through_bytes(ONE)
    if field == "headers":
        return
    assert getattr(fast, field) == getattr(parsed, field)


def test_a_limit_that_nobody_sent_is_not_seen():
    """No limit, rather than the length that the answer turned out to have."""
    silent = msgspec.structs.replace(ONE, output_tokens_max=None)
    for make in (request_of, request_through_bytes):
        assert make(silent).output_tokens_max is None
        assert make(ONE).output_tokens_max == 64


class Watched(SchedulerPolicy):
    """Writes down all that a plugin could read, with each decision and page."""

    def __init__(self, settings, *, seed, seen):
        super().__init__(settings, seed=seed)
        self.seen = seen

    def observe(self, endpoint, metrics, now):
        if now < UNTIL_S:
            self.seen.append((now, endpoint.name, metrics))
        super().observe(endpoint, metrics, now)

    def route(self, request, now):
        route = super().route(request, now)
        if now < UNTIL_S:
            candidates = route.decision.leg.candidates
            for name in SEEN_OF_CANDIDATES:
                self.seen.append((now, name, plain(getattr(candidates, name))))
            for name in MOMENT:
                moment = route.decision.lease.request.moment
                self.seen.append((now, name, plain(getattr(moment, name))))
            for name in LIVE:
                self.seen.append((now, name, plain(getattr(request, name))))
        return route


UNTIL_S = 1.5


def plain(value):
    """Comparable by value."""
    if isinstance(value, np.ndarray):
        # NaN, which is what nobody has told, differs from itself.
        return repr(value.tolist())
    if isinstance(value, msgspec.Struct | dict | tuple | str | bytes | int | float | type(None)):
        return re.sub(" at 0x[0-9a-f]+", "", repr(value))
    if isinstance(value, Affinity) or hasattr(value, "__slots__"):
        return [plain(getattr(value, name, None)) for name in getattr(value, "__slots__", ())]
    return repr(type(value))


def seen_with(output_tokens):
    """Until `UNTIL_S`, when answers of so many tokens are still being made."""
    seen = []
    given = [
        arrival(0, prompt_tokens=300, output_tokens=output_tokens[0], blocks=(1, 2), block_tokens=128),
        arrival(1, time_s=0.1, prompt_tokens=900, output_tokens=output_tokens[1]),
        *(
            arrival(at, time_s=0.3 * at, prompt_tokens=400, blocks=(1, 2, 3), block_tokens=128)
            for at in range(2, 5)
        ),
    ]  # fmt: skip
    settings = ClusterSettings(pods=(kind(),) * 2)
    picker = policy_source("default").opener(settings.refresh_interval_s)(0).settings
    Cluster(
        settings,
        lambda seed: Watched(picker, seed=seed, seen=seen),
        lambda one, hashes: request_of(one, hashes=hashes),
        given,
        seed=1,
        ended=lambda request: None,
    ).run()
    return seen


def test_what_is_seen_does_not_depend_on_what_is_still_to_come():
    """Two runs in which answers differ only in tokens that are not made yet: nothing differs."""
    one, other = seen_with((400, 300)), seen_with((4_000, 3_000))
    assert len(one) > 50
    assert one == other
