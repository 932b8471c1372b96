"""The built-in default configuration, which depends on the roles of the endpoints.

Without roles, one endpoint serves each request. If endpoints only prefill or only encode, the
default has a stage for them, and the pool is served by role.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

from msgspec import Struct

from epp.configuration.compatibility import API_VERSION
from epp.configuration.config import DEFAULT_CONFIG, DEFAULT_SOURCE
from epp.core.types import Stage
from epp.plugins.filters import ROLE_LABEL, DecodeRole, EncodeRole, PrefillRole

BY_ROLE_SOURCE: Final = "built-in default by role"
DEFAULT_SOURCES: Final = frozenset({DEFAULT_SOURCE, BY_ROLE_SOURCE})
"""Names that stand in place of a file for each built-in default."""

_HANDLERS: Final = {
    frozenset({Stage.PREFILL}): """\
    stageOrder: prefill-first
    deciders: {prefill: time-based-pd-decider}
""",
    frozenset({Stage.ENCODE}): """\
    profiles: {fallback: decode}
    deciders: {encode: always-disagg-multimodal-decider}
""",
    frozenset({Stage.PREFILL, Stage.ENCODE}): """\
    stageOrder: prefill-first
    profiles: {fallback: decode}
    deciders: {prefill: time-based-pd-decider, encode: always-disagg-multimodal-decider}
""",
}
"""Parameters of `disagg-profile-handler` in the built-in default by role, by the stages that it has
besides decode.
"""
_DECIDERS: Final = {
    Stage.PREFILL: "time-based-pd-decider",
    Stage.ENCODE: "always-disagg-multimodal-decider",
}
_SCORERS: Final = {
    Stage.PREFILL: {"prefill-time-scorer": 1},
    # The ratio of the weights is that of llm-d's guide for three stages. Pickers share the counts
    # that `active-request-scorer` reads, and metrics pages would be older.
    Stage.ENCODE: {"mm-embeddings-cache-scorer": 2, "active-request-scorer": 1},
}
"""Scorers of the built-in default for the stages prefill and encode, with their weights."""


class Labelled(Protocol):
    """An endpoint, or a description of one, of which only the labels are read."""

    @property
    def labels(self) -> Mapping[str, str]: ...


class BuiltIn(Struct, frozen=True):
    """A built-in default configuration."""

    source: str
    """Name of this configuration in outputs that name the file of other configurations."""
    text: str
    """Text of the default configuration, as a document."""


def default_for_roles(endpoints: Iterable[Labelled]) -> BuiltIn:
    """Return the default configuration of a pool of `endpoints`."""
    return default_with_stages(stages_apart(endpoints))


def stages_apart(endpoints: Iterable[Labelled]) -> frozenset[Stage]:
    """Return the stages that the role of any of `endpoints` names, if this role is not to decode."""
    roles = {endpoint.labels.get(ROLE_LABEL, "") for endpoint in endpoints} - DecodeRole.roles
    named = {Stage.PREFILL: PrefillRole.roles, Stage.ENCODE: EncodeRole.roles}
    return frozenset(stage for stage, of_stage in named.items() if roles & of_stage)


def default_with_stages(apart: AbstractSet[Stage]) -> BuiltIn:
    """Return the default configuration that serves the stages `apart` at endpoints of their own.

    If endpoints encode, the decode profile is also the fallback, because a decode endpoint can
    encode media itself. A prefill elsewhere is never required, because its decider compares times.
    """
    if not apart:
        return BuiltIn(DEFAULT_SOURCE, DEFAULT_CONFIG)
    decode = "decode-time-scorer" if Stage.PREFILL in apart else "added-time-scorer"
    stages = {Stage.DECODE: {decode: 1}}
    stages |= {stage: scorers for stage, scorers in _SCORERS.items() if stage in apart}
    types = [decider for stage, decider in _DECIDERS.items() if stage in apart]
    types += [f"{stage}-filter" for stage in stages]
    types += [scorer for scorers in stages.values() for scorer in scorers]
    return BuiltIn(
        BY_ROLE_SOURCE,
        f"apiVersion: {API_VERSION}\nkind: EndpointPickerConfig\nplugins:\n"
        f"- type: disagg-profile-handler\n  parameters:\n{_HANDLERS[frozenset(apart)]}"
        + "".join(f"- type: {name}\n" for name in (*types, "max-score-picker"))
        + "schedulingProfiles:\n"
        + "".join(_profile(stage, scorers) for stage, scorers in stages.items()),
    )


def _profile(stage: Stage, scorers: dict[str, int]) -> str:
    """Return the profile of `stage` as a part of a document."""
    weighted = [
        f"  - pluginRef: {name}\n" + (f"    weight: {weight}\n" if weight != 1 else "")
        for name, weight in scorers.items()
    ]
    return (
        f"- name: {stage}\n  plugins:\n  - pluginRef: {stage}-filter\n{''.join(weighted)}"
        "  - pluginRef: max-score-picker\n"
    )
