"""Dashboards that were made for others find their metrics, and nothing is told otherwise."""

import re
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from epp.flags.values import CompatMetrics
from epp.shell.operators.metrics.field_metrics import FIELD_NAMES, GIE, LLM_D, WithFieldNames
from epp.shell.operators.metrics.metric_table import METRICS
from epp.shell.operators.pages.metrics_server import encode_in_slices
from tests.shell.operators.decided import make_endpoints
from tests.shell.operators.metrics.test_telemetry import Exported, exercise, snapshot

OTHERS_QUERIES = (
    'sum by(name, model_server_pod) (inference_pool_per_pod_queue_size{name="llama-pool"})',
    "avg by(name) (inference_pool_average_queue_size)",
    "sum by(name) (inference_pool_average_kv_cache_utilization)",
    "sum(rate(inference_objective_request_total{model_name=~'a'}[1m])) by (model_name, target_model_name)",
    "histogram_quantile(0.95, sum(rate(inference_objective_request_duration_seconds_bucket[1m])) by (le))",
    "sum(rate(inference_objective_request_error_total[1m])) by (error_code, model_name)",
    "sum(rate(inference_objective_input_tokens_sum[1m])) / sum(rate(inference_objective_input_tokens_count[1m]))",
    "inference_objective_running_requests",
    "histogram_quantile(0.99, sum(rate(inference_extension_scheduler_e2e_duration_seconds_bucket[1m])) by (le))",
    "sum by (name) (llm_d_epp_ready_endpoints)",
    "sum(rate(llm_d_epp_request_total[1m]))",
    "histogram_quantile(0.9, sum(rate(llm_d_epp_request_ttft_seconds_bucket[1m])) by (le))",
)
"""As they are asked in the dashboards and adapters of the field."""


@pytest.fixture(scope="module")
def exported():
    made = Exported(snapshot)
    made.telemetry.endpoints_replaced(make_endpoints(4))
    exercise(made)
    return made


def told(exported, choice):
    return WithFieldNames(exported.registry, FIELD_NAMES[choice])


def samples_of(collector):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_every_name_stands_for_a_metric_of_ours():
    ours = {spec.name: spec for spec in METRICS}
    names = [name.name for name in (*GIE, *LLM_D)]
    assert len(set(names)) == len(names)
    for name in (*GIE, *LLM_D):
        assert {label for label, _ in name.labels} <= set(ours[name.of].labels)
        assert name.name.endswith("_total") == (ours[name.of].kind == "counter")


def test_without_the_flag_the_page_is_as_it_was(exported):
    assert samples_of(told(exported, CompatMetrics.NONE)) == samples_of(exported.registry)


@pytest.mark.parametrize("choice", [CompatMetrics.GIE, CompatMetrics.LLM_D, CompatMetrics.ALL])
def test_the_same_numbers_are_told_under_both_names(exported, choice):
    """And ours stay."""
    ours, both = samples_of(exported.registry), samples_of(told(exported, choice))
    assert ours.items() <= both.items()
    named = [name for name in FIELD_NAMES[choice] if name.of == "homing_request_total"]
    for name in named:
        found = {key[1:]: value for key, value in both.items() if key[0] == name.name}
        assert found == {key[1:]: value for key, value in ours.items() if key[0] == name.of} != {}


def test_a_label_has_the_fields_name(exported):
    both = samples_of(told(exported, CompatMetrics.GIE))
    found = [dict(key[1:]) for key in both if key[0] == "inference_pool_per_pod_queue_size"]
    assert {labels["model_server_pod"] for labels in found} == {
        f"prod/vllm-{number}" for number in range(4)
    }


@pytest.mark.parametrize("query", OTHERS_QUERIES)
def test_a_query_of_the_field_finds_its_series(exported, query):
    """Its metric is there, with the labels that it asks for."""
    name, *_ = re.findall(r"\b(?:inference|llm_d)_[a-z0-9_]+", query)
    grouped = [
        label.strip() for group in re.findall(r"by ?\(([^)]*)\)", query)
        for label in group.split(",")
    ]  # fmt: skip
    found = [
        dict(key[1:]) for key in samples_of(told(exported, CompatMetrics.ALL)) if key[0] == name
    ]
    assert found
    assert set(grouped) <= set(found[0])


@pytest.mark.parametrize(
    ("encode", "parse"),
    [
        (generate_latest, text_string_to_metric_families),
        (generate_openmetrics, parse_openmetrics),
    ],
    ids=["text", "openmetrics"],
)
async def test_the_page_parses_and_no_series_appears_twice(exported, encode, parse):
    collector = told(exported, CompatMetrics.ALL)
    slices = [part async for part in encode_in_slices(collector, encode)]
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in parse(b"".join(slices).decode())
        for sample in family.samples
    ]
    assert len(series) == len(set(series))
    assert {name.name.removesuffix("_total") for name in (*GIE, *LLM_D)} <= {
        re.sub(r"_(bucket|sum|count|total)$", "", name) for name, _ in series
    }


def test_samples_are_made_while_they_are_written(exported):
    """A family of thousands is not copied."""
    for family in told(exported, CompatMetrics.ALL).collect():
        if not family.name.startswith("homing"):
            assert isinstance(iter(family.samples), Iterator)
            assert not isinstance(family.samples, list)
