import math

import pytest
from msgspec import ValidationError, convert

from epp.plugins.endpoint_attributes import EndpointAttributeFilter, EndpointAttributeScorer
from tests.builders import candidates, request

GPU = "GPUUtilization/dcgm-extractor"


def pool(*values, key=GPU):
    return candidates(attributes=[{} if value is None else {key: value} for value in values])


def filtering(operator="LessThan", value=0.5, **parameters):
    algorithm = {"type": "threshold", "threshold": {"operator": operator, "value": value}}
    told = {"attribute": "GPUUtilization", "producer": "dcgm-extractor", "algorithm": algorithm}
    return convert(told | parameters, EndpointAttributeFilter)


def scoring(kind="linear_lower_is_better", normalization=None, **parameters):
    algorithm = {"type": kind, "normalization": normalization or {}}
    told = {"attributeKey": "GPUUtilization", "producer": "dcgm-extractor", "algorithm": algorithm}
    return convert(told | parameters, EndpointAttributeScorer)


@pytest.mark.parametrize(
    ("operator", "kept"),
    [
        ("LessThan", [True, False, False]),
        ("LessThanOrEqual", [True, True, False]),
        ("GreaterThan", [False, False, True]),
        ("GreaterThanOrEqual", [False, True, True]),
        ("Equal", [False, True, False]),
        ("NotEqual", [True, False, True]),
    ],
)
def test_the_filter_compares_as_it_is_told(operator, kept):
    """Six ways, as in the field."""
    assert filtering(operator).keep(request(), pool(0.25, 0.5, 0.75)).tolist() == kept


@pytest.mark.parametrize("operator", ["LessThan", "GreaterThan", "Equal", "NotEqual"])
@pytest.mark.parametrize(("on_missing", "stays"), [("Pass", True), ("Fail", False)])
def test_who_does_not_tell_stays_or_goes_as_it_is_told(operator, on_missing, stays):
    """By default it stays; what is not known is compared with nothing."""
    told = filtering(operator, onMissing=on_missing)
    assert told.keep(request(), pool(0.5, None)).tolist()[1] is stays
    assert filtering(operator).keep(request(), pool(None)).tolist() == [True]


def test_where_nobody_is_left_all_are_only_if_it_is_told():
    """`fallbackOnEmpty`."""
    assert filtering().keep(request(), pool(0.9, 0.9)).tolist() == [False, False]
    told = filtering(fallbackOnEmpty=True)
    assert told.keep(request(), pool(0.9, 0.9)).tolist() == [True, True]


def test_without_a_producer_the_attribute_is_one_of_the_metrics_page():
    """What `customMetrics` name."""
    told = filtering(attribute="queue", producer=None)
    assert told.keep(request(), pool(0.1, 0.9, key="queue/core-metrics-extractor")).tolist() == [
        True,
        False,
    ]
    assert filtering(attribute="a/b", producer="").attribute_key == "a/b/"


def test_the_range_of_the_candidates_is_the_default():
    """Who does not tell takes no part in it, and gets 0."""
    assert scoring().score(request(), pool(10, 20, 30, None)).tolist() == [1.0, 0.5, 0.0, 0.0]
    higher = scoring("linear_higher_is_better", {"adaptiveRange": {}})
    assert higher.score(request(), pool(10, 20, 30, None)).tolist() == [0.0, 0.5, 1.0, 0.0]


def test_equal_values_are_no_preference_and_unknown_ones_are_none():
    """1 for all that tell."""
    assert scoring().score(request(), pool(7, 7, None)).tolist() == [1.0, 1.0, 0.0]
    assert scoring().score(request(), pool(None, None)).tolist() == [0.0, 0.0]


def test_beyond_a_fixed_range_nothing_is_gained_or_lost():
    """Clamped, however far."""
    told = scoring(normalization={"fixedRange": {"min": 0, "max": 1}})
    assert told.score(request(), pool(0.25, 5, 1e15, 0)).tolist() == [0.75, 0.0, 0.0, 1.0]


def test_the_widest_range_of_all_is_one():
    """Its width is no float."""
    most = 1.7e308
    told = scoring(normalization={"fixedRange": {"min": -most, "max": most}})
    found = told.score(request(), pool(0.0)).tolist()
    assert found == [0.5]
    assert math.isfinite(found[0])


@pytest.mark.parametrize(
    "parameters",
    [
        {"attribute": ""},
        {"attribute": "GPUUtilization/dcgm-extractor", "producer": None},
        {"onMissing": "Ignore"},
        {"algorithm": {"type": "topK"}},
        {"algorithm": {"type": "threshold"}},
        {"algorithm": {"type": "threshold", "threshold": {"operator": "Near", "value": 1}}},
    ],
)
def test_a_filter_that_says_what_cannot_be_is_refused(parameters):
    """Before it serves."""
    with pytest.raises(ValidationError):
        filtering(**parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {"attributeKey": ""},
        {"attributeKey": "a/b", "producer": None},
        {"algorithm": {"type": "linear"}},
        {"normalization": {"fixedRange": {"min": 1, "max": 1}}},
        {"normalization": {"fixedRange": {"min": 0, "max": 1}, "adaptiveRange": {}}},
    ],
)
def test_a_scorer_that_says_what_cannot_be_is_refused(parameters):
    """Before it serves."""
    with pytest.raises(ValidationError):
        scoring(**parameters)
