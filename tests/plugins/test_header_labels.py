"""The scorer that prefers a label by a request header."""

import pytest
from msgspec import ValidationError, convert

from epp.plugins.header_labels import HeaderLabelAffinity
from tests.builders import candidates, endpoint, request

SLICE = "disaggregatedset.x-k8s.io/slice"
PARAMETERS = {"headerName": "X-Disagg-Slice", "labelKey": SLICE}
SCORER = convert(PARAMETERS, HeaderLabelAffinity)
POOL = [{SLICE: "0"}, {SLICE: "1"}, {}]


def scores(**headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return SCORER.score(request(headers=named), candidates(labels=POOL)).tolist()


def test_the_label_that_the_header_names_scores_one():
    assert scores(x_disagg_slice="1") == [0.0, 1.0, 0.0]
    assert scores(x_disagg_slice="7") == [0.0, 0.0, 0.0]


def test_without_the_header_or_with_an_empty_one_all_score_zero():
    assert scores() == scores(x_disagg_slice="") == [0.0, 0.0, 0.0]


def test_the_response_carries_the_label_of_the_chosen_endpoint():
    def stamped(scorer, labels):
        return dict(scorer.response_headers(request(), endpoint(0, labels=labels), ""))

    assert stamped(SCORER, {SLICE: "1"}) == {"x-disagg-slice": "1"}
    assert stamped(SCORER, {}) == {}
    quiet = convert(PARAMETERS | {"stampResponseHeader": False}, HeaderLabelAffinity)
    assert stamped(quiet, {SLICE: "1"}) == {}


@pytest.mark.parametrize("missing", ["headerName", "labelKey"])
def test_both_names_are_required(missing):
    given = {name: value for name, value in PARAMETERS.items() if name != missing}
    with pytest.raises(ValidationError, match=missing):
        convert(given, HeaderLabelAffinity)
