"""Fetch pages of endpoints beside their metrics: the list of models and the utilization of GPUs.

The pages are fetched by the same bounded client as metrics, but far less often. One task fetches
each page of each endpoint. The attributes on a page are valid for some fetch intervals and then
unknown; a list of models is kept until the next one is fetched.
"""

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final

import msgspec
from msgspec import Struct, structs

from epp.configuration.compatibility import (
    DCGM_EXTRACTOR,
    GPU_UTILIZATION,
    DcgmDataSource,
    MetricsScheme,
    ModelsDataSource,
)
from epp.configuration.config import MetricsSettings
from epp.core.types import NO_ATTRIBUTES, Endpoint, MetricsTarget, Seconds, attribute_key
from epp.shell.engines.exposition import ExpositionError, SeriesReader
from epp.shell.engines.loop_share import Account, LoopShare
from epp.shell.engines.page_client import BadResponseError, PageClient
from epp.shell.engines.trust import client_context, trust_of
from epp.shell.supervision import Supervisor, forever

MODELS_INTERVAL_S_MIN: Final = 5.0
"""Lower limit in seconds of the mean interval between two fetches of an endpoint's list of models;
adapters are loaded rarely.
"""
GPU_INTERVAL_S_MIN: Final = 1.0
"""Lower limit in seconds of the mean interval between two fetches of an endpoint's GPU utilization;
the exporter itself samples GPUs less often.
"""
BACKOFF_S_MAX: Final = 30.0
KEPT_INTERVALS: Final = 5
"""Number of fetch intervals for which the attributes on the last fetched page stay valid while
later fetches fail.
"""
TIMEOUT_S: Final = 1.0
PAGE_BYTES_MAX: Final = 1024 * 1024
AT_ONCE_MAX: Final = 64
MODELS_MAX: Final = 1_024
"""Maximum number of models in one endpoint's list, which is stored in memory."""
MODEL_NAME_BYTES_MAX: Final = 256
_JITTER: Final = 0.1
_GPU_METRIC: Final = "DCGM_FI_DEV_GPU_UTIL"
_GPU_SERIES: Final = SeriesReader(_GPU_METRIC)
_GPU_KEY: Final = attribute_key(GPU_UTILIZATION, DCGM_EXTRACTOR)
_PERCENT: Final = 100.0
_RANK: Final = re.compile(r"-rank-\d+\Z")


class PageContent(Struct, frozen=True):
    """The parsed content of one model or GPU page of an endpoint."""

    attributes: Mapping[str, float] = NO_ATTRIBUTES
    models: tuple[str, ...] | None = None
    """Names of the models that the page lists, or None if this page does not list models."""


class PagesRow(Struct, frozen=True):
    """The content of an endpoint's model and GPU pages, for operators."""

    models: tuple[str, ...] | None
    """Names of the endpoint's models, or None if they are unknown."""
    problems: tuple[str, ...]
    """Problems of fetching the endpoint's model and GPU pages, one sentence each."""


class _Model(Struct, frozen=True):
    id: str


class _ModelList(Struct, frozen=True):
    data: tuple[_Model, ...]


_decode_models = msgspec.json.Decoder(_ModelList).decode


def models_on(page: bytes) -> tuple[str, ...]:
    """Return the names of the models on a page of `/v1/models`.

    Raises `ExpositionError`, whose text is one sentence.
    """
    try:
        names = tuple(dict.fromkeys(model.id for model in _decode_models(page).data))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # The original error may quote the page.
        raise ExpositionError(
            "it is not a list of models, expected data with an id in each"
        ) from error
    if len(names) > MODELS_MAX:
        raise ExpositionError(f"it lists more than {MODELS_MAX} models")
    if any(len(name.encode("utf-8", "surrogatepass")) > MODEL_NAME_BYTES_MAX for name in names):
        raise ExpositionError(f"a name of a model has more than {MODEL_NAME_BYTES_MAX} bytes")
    return names


def gpu_utilization_on(page: bytes, pod: str) -> float:
    """Return the highest GPU utilization on a DCGM page, from 0 to 1.

    Only samples from 0 to 100 % without a pod label, or with the name `pod` in it, count. Raises
    `ExpositionError` if no sample counts.
    """
    values = [
        value
        for labels, value in _GPU_SERIES.read(page)
        if labels.get(b"pod", pod.encode()) == pod.encode() and value <= _PERCENT
    ]
    if not values:
        raise ExpositionError(f"it has no {_GPU_METRIC} of this pod from 0 to {_PERCENT:g}")
    return max(values) / _PERCENT


def pod_of(endpoint: Endpoint) -> str:
    """Return the name of the endpoint's pod: the endpoint's name without namespace and
    data-parallel rank.
    """
    return _RANK.sub("", endpoint.name.rpartition("/")[2])


def _read_models(page: bytes, _: Endpoint) -> PageContent:
    return PageContent(models=models_on(page))


def _read_gpus(page: bytes, endpoint: Endpoint) -> PageContent:
    return PageContent(attributes={_GPU_KEY: gpu_utilization_on(page, pod_of(endpoint))})


_READERS: Final[Mapping[str, tuple[Callable[[bytes, Endpoint], PageContent], Seconds]]] = {
    "models": (_read_models, MODELS_INTERVAL_S_MIN),
    "gpus": (_read_gpus, GPU_INTERVAL_S_MIN),
}
"""Parser of each kind of page ("models", "gpus"), and lower limit in seconds of the mean interval
between two fetches of such a page.
"""


class _Source(Struct, frozen=True):
    """One kind of page that is fetched from every endpoint, with its settings."""

    name: str
    settings: ModelsDataSource | DcgmDataSource
    tls: ssl.SSLContext
    read: Callable[[bytes, Endpoint], PageContent]
    interval_s_min: Seconds

    @property
    def interval_s(self) -> Seconds:
        return max(self.interval_s_min, self.settings.interval_s)

    @property
    def is_https(self) -> bool:
        return self.settings.scheme is MetricsScheme.HTTPS

    def where(self, endpoint: Endpoint) -> tuple[Endpoint, MetricsTarget]:
        """Return from where to fetch this page of `endpoint`: the endpoint, with the node's address
        if the page comes from there, and the port, scheme and path.
        """
        port = int(endpoint.address.rpartition(":")[2])
        if isinstance(self.settings, DcgmDataSource):
            port = self.settings.port
            if self.settings.use_node_address and endpoint.node_address:
                endpoint = structs.replace(endpoint, address=f"{endpoint.node_address}:{port}")
        scheme, path = self.settings.scheme.value, self.settings.path
        return endpoint, MetricsTarget(port=port, scheme=scheme, path=path)


class _Page:
    """One page (models or GPU utilization) of one endpoint, with the state of its fetches."""

    __slots__ = (
        *("account", "client", "endpoint", "failures", "problem", "source", "task"),
        *("told", "told_at_s"),
    )

    def __init__(
        self, endpoint: Endpoint, source: _Source, client: PageClient, account: Account
    ) -> None:
        self.endpoint = endpoint
        self.source = source
        self.client = client
        self.account = account
        self.failures = 0
        """Number of fetches of this page that failed in a row, up to the last one."""
        self.problem = ""
        """Problem of the last fetch of this page, or "" if it succeeded."""
        self.told = PageContent()
        self.told_at_s: Seconds = float("-inf")
        self.task: asyncio.Task[None] | None = None

    def resume(self, page: "_Page") -> None:
        """Continue with the content and the failures of `page`, which this page replaces."""
        self.failures, self.problem = page.failures, page.problem
        self.told, self.told_at_s = page.told, page.told_at_s


class Prepared(Struct, frozen=True):
    """Settings for fetching model and GPU pages, whose certificate files were read already; the
    input of `EndpointPages.configure`.
    """

    sources: tuple[_Source, ...]


def prepare(settings: MetricsSettings) -> Prepared:
    """Return the kinds of pages to fetch according to `settings`. Reads certificate files and
    raises `ConfigError`.
    """
    return Prepared(
        tuple(
            _Source(name, source, _tls_of(source), *_READERS[name])
            for name, source in settings.pages.items()
        )
    )


def _tls_of(source: ModelsDataSource | DcgmDataSource) -> ssl.SSLContext:
    return trust_of(source) or client_context("", insecure_skip_verify=True)


class EndpointPages:
    """The fetched pages (models, GPU utilization) of all endpoints. `clock` returns the CPU time of
    the loop's thread.
    """

    def __init__(
        self,
        *,
        seed: int,
        supervisor: Supervisor | None = None,
        clock: Callable[[], Seconds] = time.thread_time,
    ) -> None:
        self._random = Random(f"{seed}:endpoint-pages")  # noqa: S311  jitter, not secrets
        self._supervisor = supervisor or Supervisor()
        self._loop_share = LoopShare(clock)
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)
        self._sources: tuple[_Source, ...] = ()
        self._endpoints: Sequence[Endpoint] = ()
        self._pages: dict[tuple[str, str], _Page] = {}
        """Fetched model and GPU pages, by endpoint id and kind of page."""
        self._group: asyncio.TaskGroup | None = None

    def configure(self, prepared: Prepared) -> None:
        """Fetch the kinds of pages in `prepared` from now on, and discard all content. If their
        settings are unchanged, only connect to https servers again, with the certificates that
        were read for `prepared`.
        """
        wanted = {source.name: source.settings for source in prepared.sources}
        changed = wanted != {source.name: source.settings for source in self._sources}
        ended = {key: page for key, page in self._pages.items() if changed or page.source.is_https}
        self._end(tuple(ended))
        self._sources = prepared.sources
        self.replace(self._endpoints)
        if not changed:
            for key, page in ended.items():
                self._pages[key].resume(page)

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the set of endpoints from which model and GPU pages are fetched; those without
        metrics are left out. The content of an endpoint that left, restarted or has a new address
        is dropped.
        """
        self._endpoints = endpoints
        wanted: dict[tuple[str, str], tuple[Endpoint, _Source]] = {
            (endpoint.endpoint_id, source.name): (endpoint, source)
            for endpoint in endpoints
            if endpoint.metrics is not None
            for source in self._sources
        }
        gone = [
            key
            for key, page in self._pages.items()
            if key not in wanted or not _same_server(page.endpoint, wanted[key][0])
        ]
        self._end(gone)
        for key, (endpoint, source) in wanted.items():
            if key in self._pages:
                self._pages[key].endpoint = endpoint
                continue
            account = self._loop_share.open()
            client = PageClient(
                *source.where(endpoint),
                page_bytes_max=PAGE_BYTES_MAX,
                tls=source.tls,
                account=account,
            )
            self._pages[key] = _Page(endpoint, source, client, account)
        self._start()

    def attributes_of(self, endpoint: Endpoint, now: Seconds) -> Mapping[str, float]:
        """Return the attributes of `endpoint` on pages that are still valid at the loop time `now`,
        such as its GPU utilization.
        """
        found: dict[str, float] = {}
        for page in self._pages_of(endpoint):
            if now - page.told_at_s <= KEPT_INTERVALS * page.source.interval_s:
                found.update(page.told.attributes)
        return found or NO_ATTRIBUTES

    def row_of(self, endpoint: Endpoint) -> PagesRow | None:
        """Return the last fetched content of the endpoint's pages, or None if no pages are
        configured.
        """
        pages = self._pages_of(endpoint)
        if not self._sources:
            return None
        listed = [page.told.models for page in pages if page.told.models is not None]
        problems = tuple(page.problem for page in pages if page.problem)
        return PagesRow(models=listed[0] if listed else None, problems=problems)

    def unread(self) -> Mapping[str, int]:
        """Return the number of endpoints whose last fetch of a page failed, by kind of page."""
        names = [page.source.name for page in self._pages.values() if page.problem]
        return {source.name: names.count(source.name) for source in self._sources}

    async def run(self) -> None:
        """Fetch model and GPU pages until cancelled. This method owns all tasks and connections."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._start()
                await forever()
        finally:
            self._group = None
            for page in self._pages.values():
                page.task = None

    def _pages_of(self, endpoint: Endpoint) -> list[_Page]:
        keys = ((endpoint.endpoint_id, source.name) for source in self._sources)
        return [self._pages[key] for key in keys if key in self._pages]

    def _end(self, keys: Sequence[tuple[str, str]]) -> None:
        for key in keys:
            page = self._pages.pop(key)
            if page.task is not None:
                page.task.cancel()

    def _start(self) -> None:
        if self._group is None:
            return
        for page in self._pages.values():
            if page.task is None:
                name = f"{page.source.name} of {page.endpoint.name}"
                page.task = self._group.create_task(
                    self._supervisor.keep("endpoint page", partial(self._follow, page), of=name),
                    name=f"endpoint page {name}",
                )

    async def _follow(self, page: _Page) -> None:
        interval_s = page.source.interval_s
        try:
            # The start is spread, or a thousand endpoints would be requested at once.
            await asyncio.sleep(self._random.random() * min(interval_s, GPU_INTERVAL_S_MIN))
            while True:
                async with self._slots:
                    await self._ask(page)
                # The interval times 2**8 exceeds the maximum.
                pause_s = interval_s * 2.0 ** min(page.failures, 8)
                pause_s = max(interval_s, min(pause_s, BACKOFF_S_MAX))
                pause_s = max(pause_s, page.account.settle(interval_s, BACKOFF_S_MAX))
                await asyncio.sleep(pause_s * self._random.uniform(1 - _JITTER, 1 + _JITTER))
        finally:
            page.client.close()
            page.account.close()

    async def _ask(self, page: _Page) -> None:
        url = page.client.url
        try:
            content = await page.client.fetch(TIMEOUT_S)
            with page.account:
                page.told = page.source.read(content, page.endpoint)
        except TimeoutError:
            self._failed(page, f"{url} sent no page within {TIMEOUT_S:g} s")
        except OSError as problem:
            self._failed(page, f"{url} cannot be reached: {problem}")
        except BadResponseError as bad:
            self._failed(page, f"{url} {bad}")
        except ExpositionError as problem:
            self._failed(page, f"{url} sent an invalid page: {problem}")
        else:
            page.failures = 0
            page.problem = ""
            page.told_at_s = asyncio.get_running_loop().time()

    def _failed(self, page: _Page, sentence: str) -> None:
        page.failures += 1
        page.problem = sentence


def _same_server(one: Endpoint, other: Endpoint) -> bool:
    return (one.address, one.incarnation, one.node_address) == (
        other.address,
        other.incarnation,
        other.node_address,
    )
