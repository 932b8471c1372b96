"""The trial of plugins on test endpoints and requests, before a configuration is accepted.

The endpoints include every kind: never scraped, stale, refusing, with adapters of either
generation, with IPv6 addresses, without labels. The requests include every kind too, and are placed,
moved and ended in several ways. Each filter sees all endpoints, because their combination is a matter
of the document. Every run is the same: there is no clock and no randomness.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ServedBy,
    Tick,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.duration import Duration
from epp.core.failures import FailingPlugin, PluginFailures
from epp.core.knowledge.inflight import Ending, Outcome
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import AdapterReport, ApiKind, Endpoint, EndpointMetrics, MetricsTarget, Seconds

_STALE_AT_S: Final = 0.0
_NOW_S: Final = 1_000.0
_STEP_S: Final = 0.5
_ADAPTER: Final = "adapter"

_METRICS: Final = (
    None,
    EndpointMetrics(),
    EndpointMetrics(
        waiting_requests=3.0,
        running_requests=8.0,
        kv_cache_usage=0.5,
        adapters=AdapterReport(active=frozenset({_ADAPTER}), slots_max=2),
        block_size_tokens=16,
        blocks_total=4_096,
    ),
    EndpointMetrics(
        waiting_requests=0.0,
        running_requests=0.0,
        kv_cache_usage=0.0,
        adapters=AdapterReport(
            slots_max=1,
            resident_known=True,
            gpu=frozenset({_ADAPTER}),
            cpu=frozenset({"other"}),
            pinned=frozenset({_ADAPTER}),
        ),
        block_size_tokens=16,
        blocks_total=1,
    ),
    EndpointMetrics(waiting_requests=40.0, running_requests=256.0, kv_cache_usage=1.0),
)
"""Metrics of the test endpoints, by slot; None for an endpoint that was never scraped."""
_NEVER_FULL: Final = UtilizationDetector(
    queue_depth_threshold=math.inf, metrics_staleness_threshold=Duration(math.inf)
)
_STALE: Final = 1
"""Slot of the test endpoint whose metrics are stale."""
_REFUSING: Final = 4

_LABELS: Final[tuple[Mapping[str, str], ...]] = (
    {},
    {"app": "vllm", "llm-d.ai/role": "decode"},
    {"app": "vllm", "llm-d.ai/role": "prefill"},
    {"app": "vllm", "llm-d.ai/role": "both", "topology.kubernetes.io/zone": "zone-a"},
    {"app": "vllm", "pod-template-hash": "5d4f8c7b9"},
)


def failing_plugins(settings: SchedulerSettings) -> list[FailingPlugin]:
    """Return the plugins of the decode profile of `settings`, and of its indexes, that break the
    contract of `epp.plugins.contract` on test requests.
    The trial takes some milliseconds. It uses a scheduler of its own, so plugins keep no state from
    it.
    """
    profile = settings.profile
    of_filters = PluginFailures()
    alone = [replace(profile, filters=(named,)) for named in profile.filters]
    filter_markers = replace(profile, scorers=(), responders=()).markers(of_filters)
    # These settings neither drop stale endpoints nor refuse requests of low priority.
    permissive = replace(
        settings,
        stages=Stages(decode=replace(profile, filters=())),
        metrics_staleness_s=math.inf,
        saturation=_NEVER_FULL,
        session_tokens=SessionTokens((b"trial",)),
    )
    scheduler = Scheduler(permissive, seed=0)
    for endpoints in (_endpoints(), _endpoints()[:1], _endpoints(incarnation="restarted")):
        scheduler.take(PoolReplaced(endpoints), _NOW_S)
        _scrape(scheduler)
        headers: Mapping[str, str] = {}
        for request in _requests():
            asked = replace(request, headers={**request.headers, **headers})
            decision = scheduler.schedule(asked, _NOW_S)
            if not isinstance(decision, Decision):
                continue
            for filtered in alone:
                filtered.filter(asked, decision.leg.candidates, of_filters)
                filtered.holds(asked, decision.leg.candidates, of_filters)
            served = decision.endpoint
            decision.request_headers()
            for marker in filter_markers:
                marker.response_headers(asked, served, served.address)
            # A client sends back the headers that it received.
            headers = decision.response_headers(served.address)
            _end(scheduler, decision, _NOW_S)
        scheduler.take(Reconfigured(scheduler.settings), _NOW_S)
        scheduler.take(Tick(), _NOW_S + _STEP_S)
    return [*of_filters, *scheduler.failures]


def _end(scheduler: Scheduler, decision: Decision, now: Seconds) -> None:
    """Continue the test request of `decision` in one of four ways, which alternate with the number
    of the decision: its client leaves, another endpoint answers it, an unknown endpoint serves it,
    or it stays in flight.
    """
    match decision.number % 4:
        case 0:
            decision.response_headers("")
            scheduler.take(RequestEnded(decision.lease, Outcome(ending=Ending.CLIENT_LEFT)), now)
        case 1:
            first = next(endpoint for _, endpoint in scheduler.pool.endpoints())
            scheduler.take(ServedBy(decision.lease, first.address), now)
            scheduler.take(OutputStarted(decision.lease), now)
            scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), now + _STEP_S)
        case 2:
            scheduler.take(ServedBy(decision.lease, "192.0.2.255:1"), now)
        case _:
            """The request stays in flight."""


def _endpoints(*, incarnation: str = "") -> list[Endpoint]:
    addresses = [f"192.0.2.{number}:8000" for number in range(1, len(_LABELS))]
    return [
        Endpoint(
            endpoint_id=f"6f1c0b9e-{number}:8000",
            name=f"default/trial-{number}",
            address=address,
            incarnation=incarnation,
            labels=labels,
            metrics=MetricsTarget(port=8000) if number else None,
        )
        for number, (address, labels) in enumerate(
            zip((*addresses, "[2001:db8::1]:8000"), _LABELS, strict=True)
        )
    ]


def _scrape(scheduler: Scheduler) -> None:
    for slot, _ in scheduler.pool.endpoints():
        metrics = _METRICS[slot]
        if metrics is not None:
            scheduler.take(PageScraped(slot, metrics), _STALE_AT_S if slot == _STALE else _NOW_S)
        scheduler.pool.columns.saturated[slot] = slot == _REFUSING


def _requests() -> Iterator[InferenceRequest]:
    """Yield the test requests: first one that may use a single endpoint, then requests of each API
    with zero, one and two prompts.
    """
    long = bytes(range(256)) * 32
    yield InferenceRequest(request_id="subset", subset=("192.0.2.1",), prompts=(long,))
    for number, api in enumerate(ApiKind):
        for prompts in ((), (b"Hello",), (long, long[:4_000])):
            yield InferenceRequest(
                request_id=f"{api}-{len(prompts)}",
                api=api,
                model=("", "base", _ADAPTER)[len(prompts)],
                prompts=prompts,
                prompt_tokens=sum(map(len, prompts)) // 4,
                headers={":path": "/v1/trial", "x-session-id": "1"} if number % 2 else {},
                priority=number % 3 - 1,
                stream=bool(number % 2),
                output_tokens_max=(None, 16)[number % 2],
                session_id="2" if number % 4 == 1 else "",
            )
