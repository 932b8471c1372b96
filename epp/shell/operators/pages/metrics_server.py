"""The HTTP server for operators: /metrics, /healthz, /readyz, and the pages that other modules
add.
"""

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
"""Maximum number of samples that are encoded at once for a metrics page, which blocks the event
loop for about 1 ms.
"""
KEEPALIVE_S: Final = 75.0
SHUTDOWN_S: Final = 1.0
"""Maximum time in seconds for which an unfinished page delays the shutdown of the HTTP server."""
_PAGES: Final = {
    "/metrics": "counters and measurements for Prometheus",
    "/healthz": "ok while the process runs",
    "/readyz": "whether the picker is ready for requests",
}
_OPENMETRICS_END: Final = b"# EOF\n"


class MetricsServer:
    """The HTTP server for operators, an async context manager that listens while entered. It writes
    no access log.
    """

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
        """Create the server. If `host` is None, it listens on all interfaces; if `port` is 0, on
        any free port. `routes` are additional pages such as /debug/..., and `pages` describes them
        by path for the list at /. The lock `turn` is held while a page is created.
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
        """Port on which the HTTP server listens; valid only while the server is entered."""
        assert self._runner is not None, "the port is known once the server listens"
        return int(self._runner.addresses[0][1])

    async def __aenter__(self) -> Self:
        """Start to listen. Raises `OSError` if the port is in use."""
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
    """Yield the parts of the metrics page that `encode` creates from `registry`, without the
    `_created` series.

    The event loop runs between slices of at most `SAMPLES_PER_SLICE_MAX` samples. A thread would
    compete with the loop for the interpreter while it creates the page.
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
    """A registry with a single metric family, so that families are encoded one at a time."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
