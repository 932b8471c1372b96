"""Which labels a selector selects, as Kubernetes does."""

import pytest

from epp.core.labels import LabelExpression, LabelOperator, Selector


@pytest.mark.parametrize(
    ("operator", "values", "labels", "selected"),
    [
        (LabelOperator.IN, ("a", "b"), {"k": "b"}, True),
        (LabelOperator.IN, ("a",), {}, False),
        (LabelOperator.NOT_IN, ("a",), {}, True),
        (LabelOperator.NOT_IN, ("a",), {"k": "a"}, False),
        (LabelOperator.EXISTS, (), {"k": ""}, True),
        (LabelOperator.DOES_NOT_EXIST, (), {"k": ""}, False),
    ],
)
def test_labels_and_expressions_must_all_hold(operator, values, labels, selected):
    expression = LabelExpression(key="k", operator=operator, values=values)
    selector = Selector(match_expressions=(expression,), match_labels={"l": "1"})
    assert selector.matches(labels | {"l": "1"}) is selected
    assert not selector.matches(labels)


def test_an_empty_selector_selects_everything():
    assert Selector().matches({})


@pytest.mark.parametrize(
    ("operator", "values", "expected"),
    [("In", (), "at least one of `values`, has 0"), ("Exists", ("a",), "none of `values`, has 1")],
)
def test_values_are_there_exactly_where_the_operator_needs_them(operator, values, expected):
    with pytest.raises(ValueError, match=f"{operator} of label k takes {expected}"):
        LabelExpression(key="k", operator=LabelOperator(operator), values=values)
