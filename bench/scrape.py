"""Cost of scraping endpoints: the scraper's CPU share at two pool sizes, and the cost of reading
one page.

The pods are one process that is not measured. They send the pages of a simulated engine under load,
in the layout of vLLM 0.32, one for every half second of its time. Gauges, counters, histograms and
the lengths of lines change from scrape to scrape. The length of the engine's model name, which is
in each of its lines, determines the size of a page: 51 KB with the short name, as in the recorded
page of a real engine, and 60 KB with the long one.
"""

import asyncio
import re
import time
from collections import Counter as Tally
from collections.abc import Sequence
from itertools import count
from random import Random

from bench.pods import allow_open_files, served
from bench.timing import best_us
from epp.core.types import Endpoint, MetricsTarget
from epp.shell.engines.exposition import PageReader
from epp.shell.engines.scrape import Scraper, interval_s_by_pool
from epp.shell.process.event_loop import loop_factory
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest
from sim.pods.exposition import MetricsPage

_WARM_UP_S = 1.5
_MEASURED_S = 3.0
_SHORT_NAME = "llama-3.1-8b"
_LONG_NAME = "meta-llama/Llama-3.1-8B-Instruct"
_PAGES = 64
_PAGE_EVERY_S = 0.5
_FIRST_PAGE_S = 30.0
_REQUESTS_S = 12.0
_IDLE = re.compile(rb"(?m)^(vllm:num_requests_(?:waiting|running){[^}]*}) .*$")


def live_pages(model: str) -> list[bytes]:
    """Return the metrics pages that one busy engine shows at successive scrapes."""
    random = Random(1)
    settings = EngineSettings(blocks_total=27_214, block_size_tokens=16)
    engine = Engine(settings, find_profile(DEFAULT_PROFILE))
    page = MetricsPage(model=model, settings=settings, max_model_len_tokens=131_072)
    pages: list[bytes] = []
    inside: list[EngineRequest] = []
    arrives_at = now = 0.0
    numbers = count()
    while len(pages) < _PAGES:
        while arrives_at <= now:
            prompt_tokens, output_tokens = (
                1 + int(random.lognormvariate(mean, 0.8)) for mean in (6.5, 4.8)
            )
            request = EngineRequest(
                str(next(numbers)),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                chain=[
                    random.getrandbits(63) for _ in range((prompt_tokens + output_tokens) // 16)
                ],
            )
            engine.submit(request, arrives_at)
            inside.append(request)
            arrives_at += random.expovariate(_REQUESTS_S)
        step = engine.step(now)
        if step is None:
            now = arrives_at
            continue
        now = step.ends_at
        page.observe(step, engine.snapshot(), now)
        for request in inside:
            if request.finished:
                page.finish(request, "length", request.output_tokens)
        inside = [request for request in inside if not request.finished]
        if now >= _FIRST_PAGE_S + len(pages) * _PAGE_EVERY_S:
            pages.append(page.render())
    return pages


def _cpu_share(port: int, endpoints: int, *, adaptive: bool = False) -> str:
    """Return a phrase with the share of a processor that scraping `endpoints` endpoints takes on
    the event loop of `epp serve`. With `adaptive`, idle endpoints are scraped less often.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_scrape(port, endpoints, adaptive=adaptive))


async def _scrape(port: int, endpoints: int, *, adaptive: bool) -> str:
    told: Tally[str] = Tally()
    scraper = Scraper(
        lambda endpoint, metrics: told.update(["good"]),
        lambda endpoint, kind, sentence: told.update([kind]),
        reader=PageReader(),
        seed=1,
        idle_oldest_s=(lambda: 1.0) if adaptive else None,
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
    failed = sum(times for kind, times in told.items() if kind != "good")
    return (
        f"{cpu_s / wall_s:.0%} of a core, {told['good'] / wall_s:.0f} pages/s, "
        f"{cpu_s / max(told['good'], 1) * 1e6:.0f} µs a page, {failed} failed"
    )


def _read_us(pages: Sequence[bytes]) -> float:
    reader = PageReader()
    return best_us(lambda page: reader.read(page, {}), lambda: pages)


def _interval_ms(endpoints: int) -> float:
    return interval_s_by_pool(endpoints) * 1e3


def _rows(model: str, pools: Sequence[int]) -> list[tuple[str, str]]:
    """Return rows (what, how much) for reading a page, for scraping each of `pools` (numbers of
    endpoints) at the scraper's own interval, and for scraping 100 idle endpoints.
    """
    pages = live_pages(model)
    size = f"pages of {len(pages[0]) / 1000:.0f} KB"
    with served(pages) as pods:
        busy = [
            (f"read metrics, {size}", f"{_read_us(pages):.0f} µs"),
            *(
                (
                    f"scrape {endpoints:,} endpoints every {_interval_ms(endpoints):.0f} ms, {size}",
                    _cpu_share(pods.port, endpoints),
                )
                for endpoints in pools
            ),
        ]
    with served([_IDLE.sub(rb"\1 0.0", page) for page in pages]) as pods:
        return [
            *busy,
            (f"100 idle endpoints, adaptive, {size}", _cpu_share(pods.port, 100, adaptive=True)),
        ]


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the cost of scraping."""
    allow_open_files()
    return [
        *_rows(_SHORT_NAME, [100, 1000]),
        *_rows(_LONG_NAME, [100, 1000]),
    ]


if __name__ == "__main__":
    for what, how_much in run():
        print(f"{what}: {how_much}")
