"""The HTTP port of operators: /metrics, /healthz, /readyz, and pages that others add."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, Self

from aiohttp import hdrs, web
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from epp.shell.operators.pages.page_queue import PageQueue

SAMPLES_PER_SLICE_MAX: Final = 250
"""About 1 ms of encoding, the longest that a page keeps the event loop from deciding."""
KEEPALIVE_S: Final = 75.0
SHUTDOWN_S: Final = 1.0
"""How long a page that is being sent may hold up the end."""
_PAGES: Final = {
    "/metrics": "what is counted and measured, for Prometheus",
    "/healthz": "ok, while the process lives",
    "/readyz": "whether requests should be sent here",
}
_OPENMETRICS_END: Final = b"# EOF\n"


class MetricsServer:
    """Async context manager: listens inside `async with`. Writes no access log."""

    def __init__(
        self,
        registry: Collector,
        ready: Callable[[], bool],
        *,
        host: str | None = None,
        port: int = 9090,
        routes: Iterable[web.RouteDef] = (),
        pages: Mapping[str, str] | None = None,
        turn: asyncio.Lock | None = None,
    ) -> None:
        """`host` None: all interfaces. `port` 0: any free one. `routes`: /debug/... and the like.

        `pages`: what each of them shows, by path, for the list at /. `turn`: held while a page is
        made, theirs too.
        """
        self._registry = registry
        self._ready = ready
        self._host = host
        self._port = port
        self._routes = tuple(routes)
        self._pages = _PAGES | dict(pages or {})
        self._runner: web.AppRunner | None = None
        self.scrapes: Final = PageQueue(turn or asyncio.Lock())

    @property
    def port(self) -> int:
        """The port that is listened on; inside `async with` only."""
        assert self._runner is not None, "the port is known once the server listens"
        return int(self._runner.addresses[0][1])

    async def __aenter__(self) -> Self:
        """Raises `OSError` if the port is taken."""
        application = web.Application(client_max_size=1024)
        application.add_routes(
            [
                web.get("/", self._list),
                web.get("/metrics", self.scrapes.queued(self._metrics)),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                *self._routes,
            ]
        )
        runner = web.AppRunner(
            application,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, reuse_address=True).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        return self

    async def __aexit__(self, *_: object) -> None:
        runner, self._runner = self._runner, None
        assert runner is not None, "the server was entered"
        await runner.cleanup()

    async def _list(self, _: web.Request) -> web.Response:
        width = max(map(len, self._pages))
        lines = [f"{path.ljust(width)}  {shows}\n" for path, shows in self._pages.items()]
        return web.Response(text="".join(lines))

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self._ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        accept = ",".join(request.headers.getall(hdrs.ACCEPT, []))
        encode, content_type = choose_encoder(accept)
        slices = [part async for part in encode_in_slices(self._registry, encode)]
        return web.Response(body=b"".join(slices), headers={hdrs.CONTENT_TYPE: content_type})


async def encode_in_slices(
    registry: Collector, encode: Callable[[Collector], bytes]
) -> AsyncIterator[bytes]:
    """The page that `encode` makes of `registry`, without the `_created` series.

    Between two slices of at most `SAMPLES_PER_SLICE_MAX` samples the event loop does other work.
    A thread instead would compete with the loop for the interpreter for as long as the page takes.
    """
    ended = False
    for family in registry.collect():
        header = encode(_Only(_with_samples(family, [])))
        ended = header.endswith(_OPENMETRICS_END)
        header = header.removesuffix(_OPENMETRICS_END)
        yield header
        samples = (sample for sample in family.samples if sample.name != f"{family.name}_created")
        while part := list(islice(samples, SAMPLES_PER_SLICE_MAX)):
            lines = encode(_Only(_with_samples(family, part)))
            yield lines.removesuffix(_OPENMETRICS_END).removeprefix(header)
            await asyncio.sleep(0)
    if ended:
        yield _OPENMETRICS_END


def _with_samples(family: Metric, samples: list[Sample]) -> Metric:
    part = Metric(family.name, family.documentation, family.type, family.unit)
    part.samples = samples
    return part


class _Only(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
