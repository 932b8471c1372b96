"""What a strategy is: a name, whose idea it is, and the configuration that decides by it."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field, yaml
from msgspec.structs import replace

_PROFILE: Final = "default"
_PICKER: Final = "max-score-picker"


class Step(Struct, frozen=True, kw_only=True):
    """One plugin of a profile."""

    type_name: str
    name: str = ""
    """In the document; "": as its type."""
    weight: float | None = None
    """Of a scorer; None: 1."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    decides: bool = True
    """It is part of the profile; False: it is only declared, as producers are."""


class Strategy(Struct, frozen=True, kw_only=True):
    """A way to choose that somebody ships or proposes, as a configuration of our plugins."""

    name: str
    """What `--config` knows it by."""
    idea: str
    """One sentence: whose, and the rule."""
    config: str
    """An `EndpointPickerConfig`, as text that a user may take as it is."""
    omissions: str = ""
    """What the original does that this does not, or not so: a phrase for a table; "": nothing known."""


def step(type_name: str, weight: float | None = None, /, **parameters: object) -> Step:
    """A plugin that decides; `parameters` as its type spells them."""
    return Step(type_name=type_name, weight=weight, parameters=parameters)


def producer(type_name: str, /, **parameters: object) -> Step:
    """A plugin that is only declared."""
    return Step(type_name=type_name, parameters=parameters, decides=False)


def named(name: str, plugin: Step) -> Step:
    """`plugin` as `name`: where two are of one type."""
    return replace(plugin, name=name)


def config_of(*steps: Step, picker: Step | None = None) -> str:
    """The `EndpointPickerConfig` of one profile with `steps` in their order and `picker` last.

    No two may be of one name.
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
