"""Past events of pickers: decisions with their outcomes, refusals, changes and losses."""

from typing import Final, TypeAlias

from msgspec import Struct

from epp.core.decision.plugin import TellsCost
from epp.journal.decision_record import Decided, Ended, Refused, Served
from epp.journal.records import Applied, RefusedDocument, States

OPEN_MAX: Final = 65_536
"""Maximum number of decisions that wait for their end; the oldest are returned without it."""


class Setting(Struct, frozen=True):
    """The parts of a configuration that rows of its decisions need."""

    generation: int
    """Generation of the configuration, or 0 if unknown."""
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...] = ()
    """Names of scorers whose part is the share of matched blocks."""
    costs: tuple[TellsCost | None, ...] = ()
    """Scorers that can list the parts of their cost; None for others."""


NO_SETTING: Final = Setting(0, (), ())


class PastDecision(Struct, kw_only=True):
    """A decision with its outcome."""

    at_s: float
    picker: str
    told: Decided
    setting: Setting
    states: States
    """States of endpoints that were not simply ready."""
    leg_settings: tuple[Setting, ...] = ()
    """Settings of the legs in `told.earlier`, in their order."""
    end: Ended | None = None
    served: Served | None = None
    """Endpoint that the gateway used instead, or None."""


class PastRefusal(Struct, frozen=True, kw_only=True):
    at_s: float
    picker: str
    told: Refused
    states: States


class PastStates(Struct, frozen=True, kw_only=True):
    """The states of endpoints that were not simply ready for this picker, from this time on."""

    at_s: float
    picker: str
    states: States


class PastChange(Struct, frozen=True, kw_only=True):
    """A document that came into force or was rejected."""

    at_s: float
    picker: str
    change: Applied | RefusedDocument


class PastLoss(Struct, frozen=True, kw_only=True):
    """A number of missing records, from about this time on."""

    at_s: float
    picker: str
    records: int


Past: TypeAlias = PastDecision | PastRefusal | PastStates | PastChange | PastLoss
