import pytest
from msgspec import structs

from epp.configuration.compatibility import (
    BUILT_IN_ENGINES,
    CoreMetricsExtractor,
    EngineMetrics,
    ExtraMetric,
    MetricsDataSource,
    MetricSpec,
    MetricsScheme,
)
from epp.core.types import Endpoint, MetricsTarget
from epp.shell.engines.exposition import ENGINES, PageMemory
from epp.shell.engines.sources import engines_of, page_reader, scraped_from

ATOM = EngineMetrics(
    name="atom",
    queued_requests_spec=MetricSpec("atom:queue{state=waiting}"),
    kv_usage_spec=MetricSpec("atom:kv"),
    lora_spec=MetricSpec("atom:lora"),
    cache_info_spec=MetricSpec("atom:cache"),
)

PAGE = b"""# HELP atom:queue Requests.
atom:queue{state="waiting"} 3
atom:queue{state="running"} 5
atom:kv 0.25
atom:cache{block_size="16",num_gpu_blocks="100"} 1
"""


def endpoint(metrics):
    return Endpoint(endpoint_id="a", name="a", address="[::1]:8000", metrics=metrics)


def test_without_configuration_the_built_in_engines_are_read_vllm_first():
    """Nothing is lost and nothing is added."""
    engines = engines_of(CoreMetricsExtractor())
    assert engines == dict(ENGINES)
    assert next(iter(engines)) == "vllm"


def test_the_configuration_knows_the_engines_that_the_reader_has():
    """`defaultEngine` is checked against the one table and looked up in the other."""
    assert set(BUILT_IN_ENGINES) == set(ENGINES)


def test_a_configured_engine_is_read_by_its_own_names():
    """By either label, or as the default engine without one."""
    extractor = CoreMetricsExtractor(
        default_engine="atom", engine_label_key="engine", engine_configs=(ATOM,)
    )
    reader = page_reader(extractor)
    for labels in ({}, {"engine": "atom"}, {"llm-d.ai/engine-type": "atom"}):
        metrics = reader.read(PAGE, labels)
        assert (metrics.waiting_requests, metrics.kv_cache_usage) == (3, 0.25)
        assert (metrics.block_size_tokens, metrics.blocks_total) == (16, 100)


def test_a_configured_vllm_keeps_what_the_document_cannot_express():
    """The counter that tells a restart; residency unless adapters are switched off."""
    vllm = EngineMetrics(name="vllm", queued_requests_spec=MetricSpec("vllm:mine"))
    names = engines_of(CoreMetricsExtractor(engine_configs=(vllm,)))["vllm"]
    assert names.waiting[0].name == b"vllm:mine"
    assert names.running == ()
    assert names.requests_total == ENGINES["vllm"].requests_total
    assert (names.adapter_requests, names.adapter_loaded, names.adapter_slots) == (b"", b"", b"")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MetricsTarget(port=8000), MetricsTarget(port=9400, scheme="https", path="/prometheus")),
        (MetricsTarget(port=8001), MetricsTarget(port=8001)),
        (None, None),
    ],
)
def test_the_source_moves_targets_that_are_not_an_endpoints_own(before, after):
    """One that the endpoints file gives stays, and none stays none."""
    source = MetricsDataSource(scheme=MetricsScheme.HTTPS, path="/prometheus", port=9400)
    assert scraped_from([endpoint(before)], source) == (endpoint(after),)
    assert scraped_from([endpoint(before)], MetricsDataSource()) == (endpoint(before),)


def test_custom_metrics_are_attributes():
    """By their names here; the first series counts, and what is missing or none is unknown."""
    told = {
        "first": "atom:queue",
        "running": "atom:queue{state=running}",
        "missing": "atom:none",
        "nan": "atom:nan",
        "empty": "",
    }
    atom = structs.replace(
        ATOM,
        custom_metrics=tuple(
            ExtraMetric(attribute_key=key, metric_spec=MetricSpec(spec))
            for key, spec in told.items()
        ),
    )
    extractor = CoreMetricsExtractor(default_engine="atom", engine_configs=(atom,))
    reader, memory = page_reader(extractor), PageMemory()
    for _ in range(3):
        metrics = reader.read(PAGE + b"atom:nan NaN\n", {}, memory)
        assert metrics.attributes == {
            "first/core-metrics-extractor": 3,
            "running/core-metrics-extractor": 5,
        }
    later = PAGE.replace(b"} 5", b"} 7") + b"atom:nan NaN\n"
    assert reader.read(later, {}, memory).attributes["running/core-metrics-extractor"] == 7
    assert (
        page_reader(CoreMetricsExtractor()).read(b"vllm:num_requests_waiting 1\n", {}).attributes
        == {}
    )
