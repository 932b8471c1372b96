"""The records of a journal beside the events of `epp.core.journal` and the packed decisions."""

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct, field

from epp.core.duration import Duration
from epp.core.journal.events import Event

READY: Final = "ready"
SETTINGS_MAX: Final = 64
"""Maximum number of configurations that decisions can refer to."""
STATES_MAX: Final = 256
"""Maximum number of states of endpoints that decisions can refer to."""


class Applied(Struct, frozen=True, kw_only=True):
    """A document that came into force."""

    generation: int = 0
    hash: str = ""
    source: str = ""
    at_s: float = 0.0
    """Unix time in seconds."""
    changes: tuple[str, ...] = ()
    """Differences from the previous document, one sentence each."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the scorers by name."""


class RefusedDocument(Struct, frozen=True, kw_only=True):
    """A document that was rejected."""

    at_s: float
    problem: str


class EndpointState(Struct, frozen=True):
    """The state of an endpoint and its problem, if any."""

    state: str = READY
    """Standing, or "ejected", "full", "failing" or "slow" for a ready endpoint."""
    reason: str = ""
    """Reason in words, or "" if the endpoint is ready."""
    since_s: float = 0.0
    """Unix time since which it has this state; a ready endpoint may have it for longer."""


States = Mapping[str, EndpointState]
"""States by name of the endpoint."""


class ToldPlugin(Struct, frozen=True):
    """A plugin that can be created again from its type and packed parameters."""

    type_name: str
    parameters: bytes


class _Record(Struct, frozen=True, kw_only=True, tag_field="event"):
    """A record that is not an event of the scheduler."""


class ToldSetting(_Record, frozen=True, kw_only=True, tag="setting"):
    """A configuration that decided, with the number that decisions refer to."""

    number: int
    generation: int
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...]
    costs: tuple[ToldPlugin | None, ...] = ()
    """Scorers that can list the parts of their cost, with None for others."""


class ToldStates(_Record, frozen=True, kw_only=True, tag="states"):
    """The states of all endpoints that are not simply ready, with the number that decisions refer
    to.
    """

    number: int
    at_s: float
    states: dict[str, EndpointState]


class ToldApplied(_Record, frozen=True, kw_only=True, tag="applied"):
    """A document came into force."""

    document: Applied


class ToldRefused(_Record, frozen=True, kw_only=True, tag="refused"):
    """A document was rejected."""

    document: RefusedDocument


Record: TypeAlias = Event | ToldSetting | ToldStates | ToldApplied | ToldRefused


def told_plugin(type_name: str, plugin: object) -> ToldPlugin | None:
    """Return `plugin` in a form that can be stored, or None if a parameter cannot be encoded."""
    try:
        return ToldPlugin(type_name, msgspec.msgpack.encode(plugin, enc_hook=_spelt))
    except (TypeError, NotImplementedError):
        return None


def told_change(change: Applied | RefusedDocument) -> ToldApplied | ToldRefused:
    """Return the record of a change of the configuration."""
    if isinstance(change, Applied):
        return ToldApplied(document=change)
    return ToldRefused(document=change)


def _spelt(value: object) -> str:
    """Return a parameter in the spelling of configurations."""
    if isinstance(value, Duration):
        return f"{float(value):.9f}s"
    raise NotImplementedError
