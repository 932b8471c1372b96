"""The records of a journal besides the events of `epp.core.journal` and the packed decisions."""

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct, field

from epp.core.duration import Duration
from epp.core.journal.events import Event

READY: Final = "ready"
SETTINGS_MAX: Final = 64
"""Maximum number of stored configurations to which recorded decisions can refer."""
STATES_MAX: Final = 256
"""Maximum number of stored sets of endpoint states to which recorded decisions can refer."""


class Applied(Struct, frozen=True, kw_only=True):
    """A configuration document that came into force."""

    generation: int = 0
    hash: str = ""
    source: str = ""
    at_s: float = 0.0
    """Unix time in seconds at which the document came into force."""
    changes: tuple[str, ...] = ()
    """Differences from the document that was in force before, one sentence each."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the configuration's scorers, by name."""


class RefusedDocument(Struct, frozen=True, kw_only=True):
    """A configuration document that was rejected."""

    at_s: float
    problem: str


class EndpointState(Struct, frozen=True):
    """The state of an endpoint, with the reason for it if the endpoint is not simply ready."""

    state: str = READY
    """"ready", the reason why the endpoint is not ready, or "ejected", "full", "failing" or "slow"
    for a ready endpoint with a problem.
    """
    reason: str = ""
    """Reason for the state in words, or "" if the endpoint is ready."""
    since_s: float = 0.0
    """Unix time since which the endpoint has this state.

    A ready endpoint may have been ready for longer.
    """


States = Mapping[str, EndpointState]
"""States of endpoints by the endpoint's name."""


class ToldPlugin(Struct, frozen=True):
    """The type and parameters of a plugin, from which it can be created again."""

    type_name: str
    parameters: bytes


class _Record(Struct, frozen=True, kw_only=True, tag_field="event"):
    """A journal record that is not an event of the scheduler."""


class ToldSetting(_Record, frozen=True, kw_only=True, tag="setting"):
    """Record of a configuration by which requests were routed, with the number by which decisions
    refer to it.
    """

    number: int
    generation: int
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...]
    costs: tuple[ToldPlugin | None, ...] = ()
    """Plugins of the scorers that can list the parts of their cost, with None for each other
    scorer, and for one whose parameters cannot be stored.
    """


class ToldStates(_Record, frozen=True, kw_only=True, tag="states"):
    """Record of the states of all endpoints that are not simply ready, with the number by which
    decisions refer to it.
    """

    number: int
    at_s: float
    states: dict[str, EndpointState]


class ToldApplied(_Record, frozen=True, kw_only=True, tag="applied"):
    """A journal record that a configuration document came into force."""

    document: Applied


class ToldRefused(_Record, frozen=True, kw_only=True, tag="refused"):
    """A journal record that a configuration document was rejected."""

    document: RefusedDocument


Record: TypeAlias = Event | ToldSetting | ToldStates | ToldApplied | ToldRefused


def told_plugin(type_name: str, plugin: object) -> ToldPlugin | None:
    """Return the type and parameters of `plugin` for storage, or None if a parameter cannot be
    encoded.
    """
    try:
        return ToldPlugin(type_name, msgspec.msgpack.encode(plugin, enc_hook=_spelt))
    except (TypeError, NotImplementedError):
        return None


def told_change(change: Applied | RefusedDocument) -> ToldApplied | ToldRefused:
    """Return the journal record of a configuration change."""
    if isinstance(change, Applied):
        return ToldApplied(document=change)
    return ToldRefused(document=change)


def _spelt(value: object) -> str:
    """Return a parameter that msgspec cannot encode, in the spelling of configurations.

    Raises `NotImplementedError` unless it is a duration.
    """
    if isinstance(value, Duration):
        return f"{float(value):.9f}s"
    raise NotImplementedError
