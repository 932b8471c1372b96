"""Cost of the picker's own metrics page: bytes, children, and CPU time of a scrape.

Models that clients choose can enlarge the page: they share one child beyond a budget of bytes. The
page is made as the server makes it, in slices between which the event loop decides.
"""

import asyncio
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest

from bench.decision import Pool
from epp.core.decision.inputs import RequestEnded
from epp.core.decision.scheduler import Decision
from epp.core.knowledge.inflight import Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.budget import BodyBudget
from epp.core.types import ApiKind
from epp.shell.operators.metrics.snapshot import pool_snapshot
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.pages.metrics_server import encode_in_slices
from epp.shell.process.pressure import MemoryPressure

CASES = ((1, 10), (20, 100), (4_000, 100), (4_000, 1_000))
"""Numbers of models and endpoints in each measured case."""
_PAGES = 5


def exported(models: int, endpoints: int) -> tuple[CollectorRegistry, Telemetry]:
    """Return the metrics registry and the telemetry of a picker after requests for each of `models`
    models.

    Every endpoint has answered, and all responses were parsed.
    """
    pool = Pool(endpoints)
    scheduler = pool.scheduler
    registry = CollectorRegistry()
    bodies = BodyBudget(0)
    telemetry = Telemetry(
        registry,
        lambda: pool_snapshot(scheduler, "pool", bodies, MemoryPressure(2**30), None, pool.now),
    )
    members = [endpoint for _, endpoint in scheduler.pool.endpoints()]
    telemetry.endpoints_replaced(members)
    for number in range(max(models, 2 * endpoints)):
        request = InferenceRequest(
            request_id="bench",
            api=ApiKind.CHAT,
            model=f"meta-llama/Llama-3.1-8B-Instruct-{number % models}",
            prompts=(number.to_bytes(8, "big") * 64,),
            prompt_tokens=128,
        )
        decision = scheduler.schedule(request, pool.now)
        assert isinstance(decision, Decision), decision
        telemetry.decided(decision.leg, scheduling_s=5e-5, processing_s=1e-3, request_bytes=512)
        telemetry.first_output(decision, elapsed_s=0.1)
        telemetry.completed(
            decision, Outcome(status=500), elapsed_s=1.0, output_tokens=9, cached_tokens=64
        )
        telemetry.by_endpoint.answered(
            # Every endpoint, whichever was picked.
            members[number % endpoints],
            headers_s=0.1,
            ttft_s=0.1,
            duration_s=1.0,
            status=500,
            by_gateway=False,
            prompt_tokens=128,
            predicted_hit_tokens=64,
        )
        scheduler.take(RequestEnded(decision.lease, Outcome()), pool.now)
    return registry, telemetry


async def page_of(registry: CollectorRegistry) -> tuple[bytes, float, float]:
    """Return the metrics page of `registry`, the CPU seconds of making it, and the CPU seconds of
    its longest slice.
    """
    slices: list[bytes] = []
    longest_s = 0.0
    started = before = time.thread_time()
    async for part in encode_in_slices(registry, generate_latest):
        slices.append(part)
        now = time.thread_time()
        longest_s, before = max(longest_s, now - before), now
    return b"".join(slices), time.thread_time() - started, longest_s


def named(page: bytes, name: str) -> int:
    """Return for how many models the metrics page has the sample `name` under the model's own name,
    and not under "other".
    """
    lines = [line for line in page.splitlines() if line.startswith(name.encode() + b"{")]
    return len({line for line in lines if b'="other"' not in line})


def run() -> Iterable[tuple[str, str]]:
    """Yield rows (what, how much) with the size and the cost of the metrics page."""
    for models, endpoints in CASES:
        registry, _ = exported(models, endpoints)
        pages = [asyncio.run(page_of(registry)) for _ in range(_PAGES)]
        page = pages[0][0]
        best_s = min(cpu_s for _, cpu_s, _ in pages)
        slice_s = min(longest_s for *_, longest_s in pages)
        what = f"{models:,} models at {endpoints:,} endpoints, "
        yield what + "page", f"{len(page) / 1e6:.2f} MB"
        yield what + "CPU time of a scrape", f"{best_s * 1e3:.0f} ms"
        yield what + "longest slice of it", f"{slice_s * 1e3:.1f} ms"
        counted = named(page, "homing_request_total")
        measured = named(page, "homing_request_duration_seconds_count")
        yield what + "models counted, with distributions", f"{counted:,}, {measured:,}"


if __name__ == "__main__":
    for what, figure in run():
        print(f"{what:80} {figure:>12}")
