"""Which series are read of which engine: the built-in names, and those that are configured."""

from collections.abc import Mapping

from epp.compatibility import EngineMetrics
from epp.config import MetricsSettings
from epp.shell.exposition import ENGINE_LABELS, ENGINES, MetricNames, PageReader, Selector, selector


def page_reader(metrics: MetricsSettings) -> PageReader:
    """A reader that knows the engines of `core-metrics-extractor`, the default one first.

    A configured engine replaces the built-in one of its name as a whole, as in the field.
    """
    extractor = metrics.extractor
    engines: dict[str, MetricNames] = dict(ENGINES)
    engines |= {engine.name: _names(engine) for engine in extractor.engine_configs}
    default = extractor.default_engine
    ordered: Mapping[str, MetricNames] = {default: engines[default], **engines}
    labels = tuple(dict.fromkeys((extractor.engine_label_key, *ENGINE_LABELS)))
    return PageReader(ordered, labels)


def _names(engine: EngineMetrics) -> MetricNames:
    return MetricNames(
        waiting=_selectors(engine.queued_requests_spec),
        running=_selectors(engine.running_requests_spec),
        kv_cache_usage=_selectors(engine.kv_usage_spec),
        block_size_tokens=_selectors(engine.cache_block_size_spec),
        blocks_total=_selectors(engine.cache_num_blocks_spec),
        cache_info=_name(engine.cache_info_spec),
        adapter_requests=_name(engine.lora_spec),
    )


def _selectors(spec: str) -> tuple[Selector, ...]:
    return (selector(spec),) if spec else ()


def _name(spec: str) -> bytes:
    return selector(spec).name if spec else b""
