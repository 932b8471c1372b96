"""Model rewrites: the rules of InferenceModelRewrite objects, which replace the model of a request."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from random import Random
from typing import NamedTuple

from msgspec import Struct


class Target(NamedTuple):
    model: str
    weight: int
    """Share of the rule's requests that go to this model, relative to the weights of the other
    targets; at least 1.
    """


class RewriteRule(Struct, frozen=True):
    """A rule that replaces each of `models` in requests by one of `targets`. Without `models`, it
    applies to every model.
    """

    models: tuple[str, ...]
    targets: tuple[Target, ...]


class ModelRewrites:
    """The model-rewrite rules in order of precedence. The first match wins; rules for named models
    come before those for any model.
    """

    def __init__(self, rules: Iterable[RewriteRule] = ()) -> None:
        self._exact: dict[str, tuple[Target, ...]] = {}
        self._any: tuple[Target, ...] = ()
        for rule in rules:
            for model in rule.models:
                self._exact.setdefault(model, rule.targets)
            if not rule.models and not self._any:
                self._any = rule.targets

    def __repr__(self) -> str:
        return f"<ModelRewrites [{len(self._exact)} models, any: {bool(self._any)}]>"

    def __bool__(self) -> bool:
        return bool(self._exact or self._any)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelRewrites):
            return NotImplemented
        return (self._exact, self._any) == (other._exact, other._any)

    __hash__ = None  # type: ignore[assignment]  # equal by content, and never a key

    def target(self, model: str, random: Random) -> str | None:
        """Return the model that replaces `model`, chosen at random by weight, or None if no rule
        matches.
        """
        targets = self._exact.get(model, self._any)
        if not targets:
            return None
        if len(targets) == 1:
            return targets[0].model
        bounds = list(accumulate(target.weight for target in targets))
        return targets[bisect_right(bounds, random.randrange(bounds[-1]))].model
