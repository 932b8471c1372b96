"""Convert the metrics section of a configuration to settings of the metrics scraper."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from epp.configuration.compatibility import (
    ENGINE_LABELS,
    CoreMetricsExtractor,
    EngineMetrics,
    MetricsDataSource,
    MetricSpec,
)
from epp.core.types import Endpoint, MetricsTarget, attribute_key
from epp.shell.engines.exposition import ENGINES, MetricNames, PageReader, Selector, selector

_UNKNOWN: Final = MetricNames(waiting=())


def page_reader(extractor: CoreMetricsExtractor) -> PageReader:
    """Return a parser of metrics pages with the configured names of series. It determines the
    engine by an endpoint's label or by the page.
    """
    labels = tuple(dict.fromkeys((extractor.engine_label_key, *ENGINE_LABELS)))
    return PageReader(
        engines_of(extractor), engine_labels=labels, default_engine=extractor.default_engine
    )


def engines_of(extractor: CoreMetricsExtractor) -> dict[str, MetricNames]:
    """Return the names of each engine type's metric series, as `PageReader` needs them.

    A configured engine replaces the gauges of the built-in one with the same name. Series that the
    configuration cannot express, such as restart counters, stay those of the built-in one; those of
    adapter residency only if `loraSpec` is not empty.
    """
    engines: dict[str, MetricNames] = dict(ENGINES)
    for configured in extractor.engine_configs:
        engines[configured.name] = _names(configured, ENGINES)
    return engines


def _names(configured: EngineMetrics, built_in: Mapping[str, MetricNames]) -> MetricNames:
    base = built_in.get(configured.name, _UNKNOWN)
    lora = _name(configured.lora_spec)
    return msgspec.structs.replace(
        base,
        waiting=_selectors(configured.queued_requests_spec),
        running=_selectors(configured.running_requests_spec),
        kv_cache_usage=_selectors(configured.kv_usage_spec),
        block_size_tokens=_selectors(configured.cache_block_size_spec),
        blocks_total=_selectors(configured.cache_num_blocks_spec),
        cache_info=_name(configured.cache_info_spec),
        adapter_requests=lora,
        adapter_loaded=base.adapter_loaded if lora else b"",
        adapter_slots=base.adapter_slots if lora else b"",
        attributes=tuple(
            (attribute_key(metric.attribute_key), selector(metric.metric_spec))
            for metric in configured.custom_metrics
            if metric.metric_spec
        ),
    )


def _selectors(spec: MetricSpec) -> tuple[Selector, ...]:
    return (selector(spec),) if spec else ()


def _name(spec: MetricSpec) -> bytes:
    """Return the metric name of a selector without its labels, because such series are read with
    all of their labels.
    """
    return selector(spec).name if spec else b""


def scraped_from(endpoints: Iterable[Endpoint], source: MetricsDataSource) -> tuple[Endpoint, ...]:
    """Return `endpoints`, with the metrics target of the configured `source` for those without a
    target of their own.

    A target is an endpoint's own if it differs from http, the serving port and /metrics. An
    endpoint that serves no metrics stays without a target.
    """
    return tuple(_scraped_from(endpoint, source) for endpoint in endpoints)


def _scraped_from(endpoint: Endpoint, source: MetricsDataSource) -> Endpoint:
    serving_port = endpoint.port
    if endpoint.metrics != MetricsTarget(port=serving_port):
        return endpoint
    target = MetricsTarget(
        port=source.port or serving_port, scheme=source.scheme.value, path=source.path
    )
    return msgspec.structs.replace(endpoint, metrics=target)
