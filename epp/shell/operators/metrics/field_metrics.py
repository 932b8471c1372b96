"""Provide metrics additionally under the names of other pickers, for existing dashboards.

Names and labels are those of the Gateway API inference extension (up to v1.3) and llm-d-router
(v0.10), as far as Homing has the metric. Nothing is counted twice: the metrics page repeats
families under other names.
"""

from collections.abc import Iterator, Mapping
from typing import Final, cast

from msgspec import Struct
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from epp.flags.values import CompatMetrics


class FieldName(Struct, frozen=True):
    """Another name under which a metric is exported, with other names of its labels."""

    name: str
    of: str
    labels: tuple[tuple[str, str], ...] = ()
    """Pairs of a label name of Homing and the corresponding name of the other picker. Labels that
    are missing here keep their name.
    """


def _same(*suffixes: str) -> tuple[FieldName, ...]:
    return tuple(FieldName(f"llm_d_epp_{suffix}", f"homing_{suffix}") for suffix in suffixes)


GIE: Final = (
    FieldName("inference_objective_request_total", "homing_request_total"),
    FieldName("inference_objective_request_error_total", "homing_request_error_total"),
    FieldName("inference_objective_request_duration_seconds", "homing_request_duration_seconds"),
    FieldName("inference_objective_request_sizes", "homing_request_size_bytes"),
    FieldName("inference_objective_input_tokens", "homing_request_input_tokens"),
    FieldName("inference_objective_output_tokens", "homing_request_output_tokens"),
    FieldName("inference_objective_running_requests", "homing_request_running"),
    FieldName("inference_pool_average_kv_cache_utilization", "homing_average_kv_cache_utilization"),
    FieldName("inference_pool_average_queue_size", "homing_average_queue_size"),
    FieldName(
        "inference_pool_per_pod_queue_size",
        "homing_per_endpoint_queue_size",
        (("model_server_endpoint", "model_server_pod"),),
    ),
    FieldName("inference_pool_ready_pods", "homing_ready_endpoints"),
    FieldName("inference_extension_info", "homing_info", (("version", "build_ref"),)),
    FieldName("inference_extension_scheduler_attempts_total", "homing_scheduler_attempts_total"),
    FieldName(
        "inference_extension_scheduler_e2e_duration_seconds",
        "homing_scheduler_e2e_duration_seconds",
    ),
    FieldName("inference_extension_prefix_indexer_size", "homing_prefix_indexer_size"),
    FieldName("inference_extension_prefix_indexer_hit_ratio", "homing_prefix_indexer_hit_ratio"),
    FieldName("inference_extension_prefix_indexer_hit_bytes", "homing_prefix_indexer_hit_bytes"),
)
LLM_D: Final = (
    *_same(
        *("request_total", "request_error_total", "request_duration_seconds"),
        *("request_size_bytes", "request_input_tokens", "request_output_tokens"),
        *("request_cached_tokens", "request_running", "request_ttft_seconds"),
        *("request_processing_duration_seconds", "scheduler_e2e_duration_seconds"),
        *("scheduler_attempts_total", "average_kv_cache_utilization", "average_queue_size"),
        *("average_running_requests", "std_dev_kv_cache_utilization", "std_dev_queue_size"),
        *("std_dev_running_requests", "ready_endpoints", "per_endpoint_queue_size"),
        *("inflight_requests", "inflight_tokens", "prefix_indexer_size"),
        *("prefix_indexer_hit_ratio", "prefix_indexer_hit_bytes", "extproc_streams_inflight"),
        *("extproc_streams_total", "extproc_stream_duration_seconds"),
    ),
    FieldName("llm_d_epp_info", "homing_info", (("version", "build_ref"),)),
)
FIELD_NAMES: Final[Mapping[CompatMetrics, tuple[FieldName, ...]]] = {
    CompatMetrics.NONE: (),
    CompatMetrics.GIE: GIE,
    CompatMetrics.LLM_D: LLM_D,
    CompatMetrics.ALL: (*GIE, *LLM_D),
}


class WithFieldNames(Collector):
    """A collector of all metric families of `source`, each followed by copies under its names in
    `names`.
    """

    def __init__(self, source: Collector, names: tuple[FieldName, ...]) -> None:
        self._source = source
        self._names: dict[str, list[FieldName]] = {}
        for name in names:
            self._names.setdefault(name.of, []).append(name)

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            yield family
            suffix = "_total" if family.type == "counter" else ""
            for name in self._names.get(family.name + suffix, ()):
                known = name.name.removesuffix(suffix)
                told = Metric(known, f"Same as {name.of}. {family.documentation}", family.type)
                # The samples are created while the page is written, because a family may have
                # thousands.
                told.samples = cast("list[Sample]", _Renamed(family, known, dict(name.labels)))
                yield told


class _Renamed:
    """The samples of the metric `family` under another name; it supports only iteration."""

    def __init__(self, family: Metric, name: str, labels: dict[str, str]) -> None:
        self._family = family
        self._name = name
        self._labels = labels

    def __iter__(self) -> Iterator[Sample]:
        family = self._family
        for sample in family.samples:
            labels = sample.labels
            if self._labels:
                labels = {self._labels.get(name, name): value for name, value in labels.items()}
            ending = sample.name.removeprefix(family.name)
            yield Sample(self._name + ending, labels, sample.value)
