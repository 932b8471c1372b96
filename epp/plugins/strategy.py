"""A strategy: a name, an idea with its origin, and the configuration that implements it."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field, yaml
from msgspec.structs import replace

_PROFILE: Final = "default"
_PICKER: Final = "max-score-picker"


class Step(Struct, frozen=True, kw_only=True):
    """A plugin of a strategy's configuration."""

    type_name: str
    name: str = ""
    """Name in the document, or "" for the name of the type."""
    weight: float | None = None
    """Weight of a scorer, or None for 1."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    decides: bool = True
    """True if the plugin is part of the profile; False if it is only declared, as producers are."""


class Strategy(Struct, frozen=True, kw_only=True):
    """A routing strategy that a project ships or proposes, as a configuration of our plugins."""

    name: str
    """Name for `--config`."""
    idea: str
    """One sentence with the origin and the rule."""
    config: str
    """Complete text of an `EndpointPickerConfig`."""
    omissions: str = ""
    """Differences from the original, as a phrase for a table; "" if none are known."""


def step(type_name: str, weight: float | None = None, /, **parameters: object) -> Step:
    """Return a plugin of the profile; `parameters` are spelt as in its type."""
    return Step(type_name=type_name, weight=weight, parameters=parameters)


def producer(type_name: str, /, **parameters: object) -> Step:
    """Return a plugin that is only declared."""
    return Step(type_name=type_name, parameters=parameters, decides=False)


def named(name: str, plugin: Step) -> Step:
    """Return `plugin` with the name `name`, for a second plugin of the same type."""
    return replace(plugin, name=name)


def config_of(*steps: Step, picker: Step | None = None) -> str:
    """Return the `EndpointPickerConfig` of one profile with `steps` in order and `picker` last.

    Names must be distinct.
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
