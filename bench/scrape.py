"""What scraping costs: CPU share of the scraper at two pool sizes, and of reading one page.

The pods are one process that sends a page of vLLM's layout and size; it does not count.
"""

import asyncio
import multiprocessing
import resource
import time
from collections import Counter as Tally
from multiprocessing.connection import Connection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bench.timing import best_us
from epp.core.types import Endpoint, MetricsTarget
from epp.shell.exposition import PageReader
from epp.shell.scrape import Scraper

_WARM_UP_S = 1.5
_MEASURED_S = 3.0
_HISTOGRAMS = 22
_BUCKETS = 20
_OPEN_FILES = 4096


def vllm_page() -> bytes:
    """A page with the names, labels, order and size of vLLM 0.32 (51 KB with one label value a histogram)."""
    registry = CollectorRegistry()
    own = {"engine": "0", "model_name": "meta-llama/Llama-3.1-8B-Instruct"}
    Gauge("process_start_time_seconds", "Start.", registry=registry).set(1.79523034967e9)
    for name, value in [("running", 37.0), ("waiting", 4.0)]:
        gauge = Gauge(f"vllm:num_requests_{name}", "Requests.", own, registry=registry)
        gauge.labels(**own).set(value)
    reasons = Gauge("vllm:num_requests_waiting_by_reason", "x", [*own, "reason"], registry=registry)
    sleep = Gauge("vllm:engine_sleep_state", "x", [*own, "sleep_state"], registry=registry)
    for reason in ("capacity", "deferred"):
        reasons.labels(**own, reason=reason).set(2)
    for state in ("awake", "weights_offloaded", "discard_all"):
        sleep.labels(**own, sleep_state=state).set(state == "awake")
    Gauge("vllm:kv_cache_usage_perc", "x", own, registry=registry).labels(**own).set(0.4187)
    for name in ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"):
        Counter(f"vllm:{name}", "x", own, registry=registry).labels(**own).inc(1.843712e6)
    buckets = [float(bound) for bound in range(_BUCKETS)]
    for number in range(_HISTOGRAMS):
        name = f"vllm:request_{number}_time_seconds"
        histogram = Histogram(name, "Time.", own, buckets=buckets, registry=registry).labels(**own)
        for bound in buckets:
            histogram.observe(bound)
    config = {f"setting_number_{number}": "None" for number in range(38)}
    config |= {"block_size": "16", "num_gpu_blocks": "27214", "engine": "0"}
    Gauge("vllm:cache_config_info", "x", config, registry=registry).labels(**config).set(1)
    return generate_latest(registry)


class _Pod(asyncio.Protocol):
    """Answers each request on a connection with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._asked += data
        while b"\r\n\r\n" in self._asked:
            self._asked = self._asked.split(b"\r\n\r\n", 1)[1]
            self._transport.write(self._answer)


def _serve(page: bytes, tell: Connection) -> None:
    async def serve() -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)
        server = await asyncio.get_running_loop().create_server(
            lambda: _Pod(answer), "127.0.0.1", 0, backlog=2048
        )
        tell.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    _allow_open_files()
    asyncio.run(serve())


def _allow_open_files() -> None:
    """A thousand kept connections are more than many a shell allows by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, hard))


async def _cpu_share(port: int, endpoints: int) -> str:
    told: Tally[str] = Tally()
    scraper = Scraper(
        lambda endpoint, metrics: told.update(["good"]),
        lambda endpoint, kind, sentence: told.update([kind]),
        reader=PageReader(),
        seed=1,
    )
    scraper.replace(
        [
            Endpoint(
                endpoint_id=f"pod-{number}:{port}",
                name=f"pod-{number}",
                address=f"127.0.0.1:{port}",
                metrics=MetricsTarget(port=port),
            )
            for number in range(endpoints)
        ]
    )
    task = asyncio.create_task(scraper.run())
    await asyncio.sleep(_WARM_UP_S)
    told.clear()
    cpu_s, wall_s = time.process_time(), time.monotonic()
    await asyncio.sleep(_MEASURED_S)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    failed = sum(count for kind, count in told.items() if kind != "good")
    return (
        f"{cpu_s / wall_s:.0%} of a core, {told['good'] / wall_s:.0f} pages/s, "
        f"{cpu_s / max(told['good'], 1) * 1e6:.0f} µs a page, {failed} failed"
    )


def _read_us(page: bytes) -> float:
    reader = PageReader()
    return best_us(lambda labels: reader.read(page, labels), lambda: [{}] * 20)


def run() -> list[tuple[str, str]]:
    """(what, how much) a row."""
    page = vllm_page()
    _allow_open_files()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    pods = spawn.Process(target=_serve, args=(page, theirs), daemon=True)
    pods.start()
    try:
        port = ours.recv()
        return [
            (f"read a metrics page of {len(page) // 1000} KB", f"{_read_us(page):.0f} µs"),
            ("scrape 100 endpoints every 200 ms", asyncio.run(_cpu_share(port, 100))),
            ("scrape 1,000 endpoints every 500 ms", asyncio.run(_cpu_share(port, 1000))),
        ]
    finally:
        pods.terminate()
        pods.join()


if __name__ == "__main__":
    for what, how_much in run():
        print(f"{what}: {how_much}")
