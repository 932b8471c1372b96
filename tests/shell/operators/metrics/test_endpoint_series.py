"""What is told of each endpoint: sums and counts of those that are there, however many come and go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.shell.operators.metrics import endpoint_series
from epp.shell.operators.metrics.endpoint_series import ENDPOINTS_MAX
from epp.shell.operators.metrics.telemetry import endpoint_labels
from tests.shell.operators.decided import make_endpoints
from tests.shell.operators.metrics.test_telemetry import Exported

SEEN = {
    "headers_s": 0.25,
    "ttft_s": 0.5,
    "duration_s": 2.0,
    "status": 200,
    "by_gateway": False,
    "prompt_tokens": 700,
    "predicted_hit_tokens": 192,
}
PREFIX = "homing_per_endpoint_"


class Told(Exported):
    def __init__(self, count=4):
        super().__init__()
        self.endpoints = make_endpoints(count)
        self.telemetry.endpoints_replaced(self.endpoints)

    def answer(self, number=0, **fields):
        self.telemetry.by_endpoint.answered(self.endpoints[number], **(SEEN | fields))

    def of(self, name, number=0, **labels):
        self.telemetry.fold()
        values = endpoint_labels(self.endpoints[number])
        named = dict(zip(("endpoint_name", "namespace", "port"), values, strict=True))
        return self(PREFIX + name, **named, **labels)

    def series(self):
        return [
            sample
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        ]


def test_an_answer_is_told_with_all_that_was_seen_of_it():
    told = Told()
    told.answer(1)
    told.answer(1, headers_s=0.75, duration_s=4.0)
    assert told.of("response_headers_seconds_sum", 1) == 1.0
    assert told.of("response_headers_seconds_count", 1) == 2
    assert told.of("ttft_seconds_sum", 1) == 1.0
    assert told.of("request_duration_seconds_sum", 1) == 6.0
    assert told.of("prompt_tokens_total", 1) == 1400
    assert told.of("predicted_hit_tokens_total", 1) == 384
    assert told.of("error_total", 1, status="5xx") is None
    assert told.of("prompt_tokens_total", 0) is None


def test_what_was_not_seen_is_in_no_mean():
    """The client left before anything came, or the gateway shows no body."""
    told = Told()
    told.answer(headers_s=None, ttft_s=None, duration_s=None, status=None)
    told.answer(ttft_s=None)
    assert told.of("response_headers_seconds_count") == 1
    assert told.of("request_duration_seconds_count") == 1
    assert told.of("ttft_seconds_count") is None
    assert told.of("prompt_tokens_total") == 1400


@pytest.mark.parametrize(
    ("status", "by_gateway", "told_as"),
    [
        (200, False, None),
        (304, False, None),
        (404, False, "4xx"),
        (429, True, "4xx"),
        (500, False, "5xx"),
        (503, False, "5xx"),
        (503, True, "unreached"),
        (None, True, None),
    ],
)
def test_errors_are_told_by_class_and_by_who_made_them(status, by_gateway, told_as):
    told = Told()
    told.answer(status=status, by_gateway=by_gateway)
    for name in ("4xx", "5xx", "unreached"):
        assert told.of("error_total", status=name) == (1 if name == told_as else None)


def test_endpoints_that_left_take_their_series_with_them():
    """And what ends only then does not bring them back."""
    told = Told()
    told.answer(3, status=500)
    told.answer(2)
    assert told.series()
    told.answer(3)
    told.telemetry.endpoints_replaced(told.endpoints[:3])
    told.answer(3)
    told.telemetry.fold()
    assert {sample.labels["endpoint_name"] for sample in told.series()} == {"vllm-2"}
    told.telemetry.endpoints_replaced(told.endpoints)
    told.answer(3)
    assert told.of("prompt_tokens_total", 3) == 700


def test_more_endpoints_than_may_be_have_no_series():
    told = Told(ENDPOINTS_MAX + 20)
    for number in range(len(told.endpoints)):
        told.answer(number, status=500)
    told.telemetry.fold()
    assert len({sample.labels["endpoint_name"] for sample in told.series()}) == ENDPOINTS_MAX


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("answer"), st.integers(0, 3)),
            st.tuples(st.just("replace"), st.integers(0, 4)),
            st.just(("fold", 0)),
        ),
        max_size=40,
    )
)
def test_every_answer_of_who_stays_is_counted_once(steps):
    """Whenever rows are folded; of who left nothing is told, and it starts anew when it is back."""
    told = Told()
    expected = dict.fromkeys(range(4), 0)
    for step, number in steps:
        if step == "answer":
            told.answer(number)
            if number in expected:
                expected[number] += 1
        elif step == "replace":
            told.telemetry.endpoints_replaced(told.endpoints[:number])
            expected = {at: expected.get(at, 0) for at in range(number)}
        else:
            told.telemetry.fold()
    for number in range(4):
        counted = told.of("response_headers_seconds_count", number) or 0
        assert counted == expected.get(number, 0)


def test_a_request_waits_and_is_counted_with_others(monkeypatch):
    """Nothing is looked up until many are counted together."""
    told = Told()
    counted = []
    monkeypatch.setattr(
        endpoint_series.EndpointSeries, "_count", lambda _, labels, *row: counted.append(row)
    )
    for number in range(endpoint_series.WAITING_MAX - 1):
        told.answer(number % 4)
    assert counted == []
    told.answer(3)
    assert len(counted) == endpoint_series.WAITING_MAX


def test_an_answer_that_cannot_be_counted_costs_no_page(monkeypatch):
    """Nor the task that folds."""
    failed = []
    told = Told()
    told.telemetry._could_not = lambda event, error: failed.append(event)
    told.answer()
    monkeypatch.setattr(
        endpoint_series.EndpointSeries, "_count", lambda *_: (_ for _ in ()).throw(ValueError())
    )
    told.telemetry.fold()
    assert failed == ["answered"]
    assert told.series() == []
