import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from epp.shell.operators.metrics.counting import Distribution, Family, Number, Sum, Waiting
from epp.shell.operators.metrics.metric_table import MetricSpec

BOUNDS = (0.0, 0.25, 1.0, 4096.0)


def page(registry):
    """Sample -> value, without the library's `_created`."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


events = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(BOUNDS) | st.floats(0, 1e6)),
    max_size=30,
)


@given(events)
@settings(max_examples=100, deadline=None)
def test_distributions_and_numbers_count_as_the_library_does(observed):
    """The same events make the same page, on the bucket bounds too."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    row = MetricSpec("size_bytes", "histogram", "bytes", "S.", ("n",), BOUNDS)
    sizes = Family(row, lambda: Distribution(BOUNDS))
    totals = Family(MetricSpec("seen_total", "counter", "events", "T.", ("n",)), Number)
    ours.register(sizes)
    ours.register(totals)
    histogram = Histogram("size_bytes", "S.", ["n"], buckets=BOUNDS, registry=theirs)
    counter = Counter("seen_total", "T.", ["n"], registry=theirs)
    for label, value in observed:
        sizes.labels(label).observe(value)
        totals.labels(label).inc(value)
        histogram.labels(label).observe(value)
        counter.labels(label).inc(value)
    assert page(ours) == page(theirs)


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(-1, 1e6), max_size=100))
@settings(max_examples=100, deadline=None)
def test_values_count_together_as_they_do_alone(values):
    """The same buckets, few or many, on the bounds and beyond; the sum differs by rounding."""
    alone, together = Distribution(BOUNDS), Distribution(BOUNDS)
    for value in values:
        alone.observe(value)
    together.observe_all(np.array(values, dtype=np.float64))
    *buckets, total = alone.samples("size", {})
    *buckets_together, total_together = together.samples("size", {})
    assert buckets == buckets_together
    assert total_together.value == pytest.approx(total.value)


def test_rows_wait_in_their_order_and_are_taken_once():
    """With the key and the numbers that they came with."""
    waiting = Waiting(2)
    waiting.append("a", 1, 0.5)
    waiting.append("b", 2, True)
    assert len(waiting) == 2
    keys, rows = waiting.take()
    assert (keys, rows.tolist()) == (["a", "b"], [[1.0, 0.5], [2.0, 1.0]])
    assert len(waiting) == 0
    waiting.append("c", 3, 4)
    assert waiting.take()[0] == ["c"]
    assert rows.tolist() == [[1.0, 0.5], [2.0, 1.0]], "what was taken stays as it is"


@pytest.mark.parametrize("numbers", [(1.0,), (1.0, 2.0, 3.0), (1.0, "2"), (None, 2.0)])
def test_a_row_that_is_no_numbers_is_not_kept(numbers):
    """It would shift those of all others."""
    waiting = Waiting(2)
    waiting.append("a", 1.0, 2.0)
    with pytest.raises(struct.error):
        waiting.append("b", *numbers)
    keys, rows = waiting.take()
    assert (keys, rows.tolist()) == (["a"], [[1.0, 2.0]])


def test_two_metrics_of_one_name_cannot_be_registered():
    """The registry refuses the second, as with the library's own."""
    registry = CollectorRegistry()
    row = MetricSpec("seen_total", "counter", "events", "T.")
    registry.register(Family(row, Number))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Family(row, Number))


def test_children_may_leave_while_a_page_is_written():
    """A page shows the children that were there when its family began."""
    family = Family(MetricSpec("seen_total", "counter", "events", "T.", ("n",)), Number)
    family.labels("a").inc()
    family.labels("b").inc()
    samples = iter(family)
    next(samples)
    family.remove("b")
    assert next(samples).labels == {"n": "b"}
    assert [sample.labels["n"] for sample in family] == ["a"]


def test_a_sum_counts_what_is_known():
    """NaN is no observation; a page shows how often and how much."""
    spec = MetricSpec("homing_times_seconds", "summary", "seconds", "Times.", ("pod",))
    family = Family(spec, Sum)
    for value in (1.5, math.nan, 2.5):
        family.labels("a").observe(value)
    registry = CollectorRegistry()
    registry.register(family)
    assert registry.get_sample_value("homing_times_seconds_sum", {"pod": "a"}) == 4.0
    assert registry.get_sample_value("homing_times_seconds_count", {"pod": "a"}) == 2.0
    assert b"# TYPE homing_times_seconds summary\n" in generate_latest(registry)


def test_what_a_family_does_not_retain_is_gone_and_starts_anew():
    spec = MetricSpec("homing_times_seconds", "summary", "seconds", "Times.", ("pod",))
    family = Family(spec, Sum)
    for pod in ("a", "b"):
        family.labels(pod).observe(1.0)
    family.retain(lambda values: values == ("b",))
    assert [sample.labels["pod"] for sample in family] == ["b", "b"]
    family.labels("a").observe(3.0)
    assert [sample.value for sample in family if sample.labels["pod"] == "a"] == [1.0, 3.0]


@given(st.lists(st.tuples(st.sampled_from(BOUNDS) | st.floats(0, 1e6), st.booleans()), max_size=30))
@settings(max_examples=50, deadline=None)
def test_an_exemplar_is_the_last_of_its_bucket(told):
    """The library's parser finds each in a bucket that its value is in; the rest has none."""
    registry = CollectorRegistry()
    row = MetricSpec("size_bytes", "histogram", "bytes", "S.", (), BOUNDS)
    family = Family(row, lambda: Distribution(BOUNDS))
    registry.register(family)
    last = {}
    for number, (value, grow) in enumerate(told):
        family.labels().observe(value)
        bucket = next((at for at, bound in enumerate(BOUNDS) if value <= bound), len(BOUNDS))
        exemplar = Exemplar({"trace_id": str(number)}, value, float(number))
        added = family.labels().exemplify(exemplar, grow=grow)
        assert added == (grow and bucket not in last)
        if grow or bucket in last:
            last[bucket] = exemplar
    (found,) = text_string_to_metric_families(generate_latest(registry).decode())
    shown = [sample.exemplar for sample in found.samples if sample.name.endswith("_bucket")]
    assert [each and float(each.value) for each in shown] == [
        last[at].value if at in last else None for at in range(len(BOUNDS) + 1)
    ]
