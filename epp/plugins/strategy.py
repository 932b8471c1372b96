"""The description of a routing strategy: a name, an idea with its origin, and the configuration
that implements it.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field, yaml
from msgspec.structs import replace

_PROFILE: Final = "default"
_PICKER: Final = "max-score-picker"


class Step(Struct, frozen=True, kw_only=True):
    """A plugin in the configuration of a routing strategy."""

    type_name: str
    name: str = ""
    """Name of the plugin in the configuration document, or "" for the name of its type."""
    weight: float | None = None
    """Weight of the plugin if it is a scorer, or None for 1."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    decides: bool = True
    """True if the strategy's profile refers to the plugin; False if the plugin is only declared, as
    producers are.
    """


class Strategy(Struct, frozen=True, kw_only=True):
    """A routing strategy that a project ships or proposes, as a configuration of our plugins."""

    name: str
    """Name of the routing strategy, as given to `--config`."""
    idea: str
    """One sentence with the origin of the strategy and its rule."""
    config: str
    """Complete text of an `EndpointPickerConfig`."""
    omissions: str = ""
    """Differences from the original strategy, as a phrase for a table; "" if none are known."""


def step(type_name: str, weight: float | None = None, /, **parameters: object) -> Step:
    """Return a plugin that the strategy's profile refers to; `parameters` are spelt as in its
    class.
    """
    return Step(type_name=type_name, weight=weight, parameters=parameters)


def producer(type_name: str, /, **parameters: object) -> Step:
    """Return a plugin that the strategy only declares, without a reference in its profile."""
    return Step(type_name=type_name, parameters=parameters, decides=False)


def named(name: str, plugin: Step) -> Step:
    """Return `plugin`, a plugin of a routing strategy, with the name `name`, so that a strategy can
    have two plugins of the same type.
    """
    return replace(plugin, name=name)


def config_of(*steps: Step, picker: Step | None = None) -> str:
    """Return the text of an `EndpointPickerConfig` with one profile: `steps` in order, and `picker`
    last.

    The names of the steps must be distinct.
    """
    steps = (*steps, picker or step(_PICKER))
    plugins: list[dict[str, object]] = []
    references: list[dict[str, object]] = []
    for each in steps:
        declared: dict[str, object] = {"type": each.type_name}
        if each.name:
            declared["name"] = each.name
        if each.parameters:
            declared["parameters"] = dict(each.parameters)
        plugins.append(declared)
        if each.decides:
            reference: dict[str, object] = {"pluginRef": each.name or each.type_name}
            if each.weight is not None:
                reference["weight"] = each.weight
            references.append(reference)
    return yaml.encode(
        {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": plugins,
            "schedulingProfiles": [{"name": _PROFILE, "plugins": references}],
        }
    ).decode()
