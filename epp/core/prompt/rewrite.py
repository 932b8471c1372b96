"""Which model serves a request for a model: the rules of InferenceModelRewrite objects."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from random import Random
from typing import NamedTuple

from msgspec import Struct


class Target(NamedTuple):
    model: str
    weight: int
    """Share of the requests, relative to the other targets of the rule; at least 1."""


class RewriteRule(Struct, frozen=True):
    """Requests for one of `models` go to one of `targets`; no models: requests for any."""

    models: tuple[str, ...]
    targets: tuple[Target, ...]


class ModelRewrites:
    """Rules in order of precedence, the first that fits wins; exact ones before those for any."""

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
        """The model that is to serve a request for `model`; None if no rule fits."""
        targets = self._exact.get(model, self._any)
        if not targets:
            return None
        if len(targets) == 1:
            return targets[0].model
        bounds = list(accumulate(target.weight for target in targets))
        return targets[bisect_right(bounds, random.randrange(bounds[-1]))].model
