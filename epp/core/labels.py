"""Label selectors of Kubernetes, as plugin parameters."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, field

from epp.core.parameters import Parameters


class LabelOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelExpression(Parameters, frozen=True):
    """One requirement of a label selector, an entry of `matchExpressions`.

    As in Kubernetes, `NotIn` also accepts an endpoint without the label. Raises `ValueError` if
    `values` is empty although the operator needs it, or given although the operator takes none.
    """

    key: Annotated[str, Meta(min_length=1)]
    operator: LabelOperator
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        needed = self.operator in {LabelOperator.IN, LabelOperator.NOT_IN}
        if needed != bool(self.values):
            expected = "at least one" if needed else "none"
            raise ValueError(
                f"matchExpressions: {self.operator} of label {self.key} takes {expected} of "
                f"`values`, has {len(self.values)}"
            )

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case LabelOperator.IN:
                return labels.get(self.key) in self.values
            case LabelOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case LabelOperator.EXISTS:
                return self.key in labels
            case LabelOperator.DOES_NOT_EXIST:
                return self.key not in labels


class Selector(Parameters, frozen=True):
    """A label selector. An endpoint must have all labels in `match_labels` and meet all of
    `match_expressions`; an empty selector accepts every endpoint.
    """

    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: tuple[LabelExpression, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        expressions = self.match_expressions
        return self.match_labels.items() <= labels.items() and (
            not expressions or all(each.matches(labels) for each in expressions)
        )


_REQUIREMENT: Final = re.compile(
    r"\s*(?:(?P<missing>!\s*[^\s!=(),]+)"
    r"|(?P<key>[^\s!=(),]+)\s*(?:(?P<equals>==?|!=)\s*(?P<value>[^\s!=(),]*)"
    r"|\s(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?)\s*(?:,|\Z)"
)


def parse_selector(text: str) -> Selector:
    """Return the label selector in `text`, written as for `kubectl --selector`: "a=b,c in (d,e),!f".

    Raises `ValueError`, with one sentence, for any other text.
    """
    expressions: list[LabelExpression] = []
    at = 0
    while at < len(text):
        found = _REQUIREMENT.match(text, at)
        if found is None:
            raise ValueError(
                f"{text!r} is not a label selector such as app=vllm or role in (prefill,decode)"
            )
        at = found.end()
        expressions.append(_expression(found))
    return Selector(match_expressions=tuple(expressions))


def _expression(found: re.Match[str]) -> LabelExpression:
    if found["missing"]:
        key = found["missing"][1:].strip()
        return LabelExpression(key=key, operator=LabelOperator.DOES_NOT_EXIST)
    key = found["key"]
    if found["equals"]:
        operator = LabelOperator.NOT_IN if found["equals"] == "!=" else LabelOperator.IN
        return LabelExpression(key=key, operator=operator, values=(found["value"],))
    if found["set"]:
        operator = LabelOperator.IN if found["set"] == "in" else LabelOperator.NOT_IN
        values = tuple(value.strip() for value in found["values"].split(","))
        return LabelExpression(key=key, operator=operator, values=values)
    return LabelExpression(key=key, operator=LabelOperator.EXISTS)
