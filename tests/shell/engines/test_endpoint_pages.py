"""Pages, then the task that asks for them, against servers on loopback."""

import asyncio
import contextlib

import pytest
from msgspec import structs

from epp.configuration.compatibility import DcgmDataSource, MetricsScheme, ModelsDataSource
from epp.configuration.config import MetricsSettings
from epp.core.types import Endpoint, MetricsTarget
from epp.shell.engines.endpoint_pages import (
    MODELS_MAX,
    EndpointPages,
    gpu_utilization_on,
    models_on,
    pod_of,
    prepare,
)
from epp.shell.engines.exposition import ExpositionError
from tests.shell.engines.certificates import serving_by, written
from tests.shell.engines.test_scrape import answer, pod

GPU_PAGE = b"""\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",pod="a"} 40
DCGM_FI_DEV_GPU_UTIL{gpu="1",pod="a"} 75
DCGM_FI_DEV_GPU_UTIL{gpu="2",pod="b"} 90
DCGM_FI_DEV_MEM_CLOCK{gpu="0",pod="a"} 1000
"""
KEY = "GPUUtilization/dcgm-extractor"


def endpoint(port, **fields):
    return Endpoint(
        endpoint_id="a:1",
        name="default/a",
        address=f"127.0.0.1:{port}",
        metrics=MetricsTarget(port=port),
        **fields,
    )


def test_the_busiest_gpu_of_the_pod_counts():
    """Of a node's exporter, which tells of others too."""
    assert gpu_utilization_on(GPU_PAGE, "a") == 0.75
    assert gpu_utilization_on(GPU_PAGE, "b") == 0.9
    assert gpu_utilization_on(b"DCGM_FI_DEV_GPU_UTIL 5\n", "c") == 0.05


def test_the_name_of_a_pod_is_without_namespace_and_rank():
    """As the exporter has it."""
    assert pod_of(structs.replace(endpoint(1), name="ns/a-0-rank-3")) == "a-0"
    assert pod_of(structs.replace(endpoint(1), name="a-rank-x")) == "a-rank-x"


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"other 1\n",
        b'DCGM_FI_DEV_GPU_UTIL{pod="b"} 5\n',
        b"DCGM_FI_DEV_GPU_UTIL NaN\n",
        b"DCGM_FI_DEV_GPU_UTIL 101\n",
        b"DCGM_FI_DEV_GPU_UTIL -1\n",
        b"DCGM_FI_DEV_GPU_UTIL{\n",
        b"DCGM_FI_DEV_GPU_UTIL x\n",
        b"\n" * 70_000,
        b"DCGM_FI_DEV_GPU_UTIL 1\n" * 9_000,
    ],
)
def test_a_page_without_a_utilization_is_no_page(page):
    """Malformed, of others, of what cannot be, or too much."""
    with pytest.raises(ExpositionError):
        gpu_utilization_on(page, "a")


def test_models_are_listed_in_their_order_once():
    """Whatever else is told of them."""
    page = b'{"object": "list", "data": [{"id": "b", "parent": null}, {"id": "a"}, {"id": "b"}]}'
    assert models_on(page) == ("b", "a")


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"{}",
        b"[]",
        b'{"data": [1]}',
        b'{"data": [{"id": 1}]}',
        b'{"data": [{"id": "\xff"}]}',
        b'{"data": [{"id": "' + b"x" * 300 + b'"}]}',
        b'{"data":' + b"[" * 100_000,
        b'{"data": ['
        + b",".join(b'{"id": "%d"}' % number for number in range(MODELS_MAX + 1))
        + b"]}",
    ],
)
def test_a_list_that_is_none_is_refused(page):
    """A sentence that quotes nothing of it."""
    with pytest.raises(ExpositionError):
        models_on(page)


@contextlib.asynccontextmanager
async def asking(settings, *endpoints):
    pages = EndpointPages(seed=1)
    pages.configure(prepare(settings))
    pages.replace(endpoints)
    task = asyncio.create_task(pages.run())
    try:
        yield pages
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def until(said):
    async with asyncio.timeout(20):
        while not said():
            await asyncio.sleep(0.001)


def now():
    return asyncio.get_running_loop().time()


async def test_an_endpoint_is_told_of_by_both_pages():
    """At its own port, and at the exporter's."""
    models = b'{"data": [{"id": "base"}]}'
    async with pod(answer(models)) as serving, pod(answer(GPU_PAGE)) as exporter:
        settings = MetricsSettings(
            models=ModelsDataSource(), gpus=DcgmDataSource(port=exporter.port)
        )
        one = endpoint(serving.port)
        async with asking(settings, one) as pages:
            await until(lambda: pages.row_of(one).models and pages.attributes_of(one, now()))
            assert pages.attributes_of(one, now()) == {KEY: 0.75}
            assert pages.row_of(one).models == ("base",)
            assert pages.row_of(one).problems == ()
            assert b"GET /v1/models " in serving.heads[0]
            # Too old to be true.
            assert pages.attributes_of(one, now() + 60) == {}
            pages.replace(())
            assert pages.attributes_of(one, now()) == {}


async def test_why_a_page_fails_is_told():
    """And nothing else comes of it."""
    async with pod(answer(b"", status=b"404 Not Found")) as serving:
        one = endpoint(serving.port)
        async with asking(MetricsSettings(models=ModelsDataSource()), one) as pages:
            await until(lambda: pages.row_of(one).problems)
            (problem,) = pages.row_of(one).problems
            assert "answered 404" in problem
            assert pages.unread() == {"models": 1}
            assert pages.row_of(one).models is None


async def test_a_node_is_asked_where_it_is_known():
    """Else the endpoint itself is, as in the field."""
    async with pod(answer(GPU_PAGE)) as exporter:
        settings = MetricsSettings(gpus=DcgmDataSource(port=exporter.port, use_node_address=True))
        elsewhere = structs.replace(endpoint(1), address="127.0.0.9:1")
        known = structs.replace(elsewhere, node_address="127.0.0.1")
        async with asking(settings, elsewhere) as pages:
            await until(lambda: pages.row_of(elsewhere).problems)
            assert pages.row_of(elsewhere).problems[0].startswith("http://127.0.0.9:")
            assert pages.unread() == {"gpus": 1}
            pages.replace((known,))
            await until(lambda: pages.attributes_of(known, now()))
            assert pages.attributes_of(known, now()) == {KEY: 0.75}
            assert pages.unread() == {"gpus": 0}


async def test_where_nothing_is_asked_for_nobody_is_asked():
    """No row either."""
    async with asking(MetricsSettings(), endpoint(1)) as pages:
        assert pages.row_of(endpoint(1)) is None
        assert pages.attributes_of(endpoint(1), now()) == {}
        assert pages.unread() == {}


async def test_other_pages_are_asked_for_from_the_next_configuration_on():
    """What the old ones told is forgotten; the same ones go on."""
    models = b'{"data": [{"id": "base"}]}'
    async with pod(answer(models)) as serving, pod(answer(GPU_PAGE)) as exporter:
        one = endpoint(serving.port)
        listing = MetricsSettings(models=ModelsDataSource())
        async with asking(listing, one) as pages:
            await until(lambda: pages.row_of(one).models)
            pages.configure(prepare(listing))
            assert pages.row_of(one).models == ("base",)
            pages.configure(prepare(MetricsSettings(gpus=DcgmDataSource(port=exporter.port))))
            assert pages.row_of(one).models is None
            await until(lambda: pages.attributes_of(one, now()))
            assert serving.requests == 1


async def test_by_https_certificates_count_where_they_are_to(tmp_path):
    """By default whoever answers is believed."""
    async with pod(answer(GPU_PAGE), tls=serving_by(written(tmp_path, "pod"))) as exporter:
        one = endpoint(1)
        source = DcgmDataSource(port=exporter.port, scheme=MetricsScheme.HTTPS)
        async with asking(MetricsSettings(gpus=source), one) as pages:
            await until(lambda: pages.attributes_of(one, now()))
            verifying = structs.replace(source, insecure_skip_verify=False)
            pages.configure(prepare(MetricsSettings(gpus=verifying)))
            await until(lambda: pages.row_of(one).problems)
            assert "certificate" in pages.row_of(one).problems[0]
            assert pages.attributes_of(one, now()) == {}


async def test_certificates_are_read_again_with_an_unchanged_configuration(tmp_path):
    """The pool keeps the content that it has, and pages by http are read as before."""
    models = b'{"data": [{"id": "base"}]}'
    files, others = written(tmp_path, "pod"), written(tmp_path, "other")
    async with pod(answer(models), tls=serving_by(files)) as serving, pod(answer(GPU_PAGE)) as gpus:
        one = endpoint(serving.port)
        source = ModelsDataSource(
            scheme=MetricsScheme.HTTPS, insecure_skip_verify=False, ca_cert_path=str(files[0])
        )
        settings = MetricsSettings(models=source, gpus=DcgmDataSource(port=gpus.port))
        async with asking(settings, one) as pages:
            await until(lambda: pages.row_of(one).models and pages.attributes_of(one, now()))
            files[0].write_bytes(others[0].read_bytes())
            pages.configure(prepare(settings))
            assert pages.row_of(one).models == ("base",)
            assert pages.attributes_of(one, now()) == {KEY: 0.75}
            await until(lambda: pages.row_of(one).problems)
            (problem,) = pages.row_of(one).problems
            assert "certificate" in problem
            assert pages.unread() == {"models": 1, "gpus": 0}
