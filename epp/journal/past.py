"""Past events of pickers as a journal's reader returns them: decisions with their outcomes,
refusals, changes and losses of records.
"""

from typing import Final, TypeAlias

from msgspec import Struct

from epp.core.decision.plugin import TellsCost
from epp.journal.decision_record import Decided, Ended, Refused, Served
from epp.journal.records import Applied, RefusedDocument, States

OPEN_MAX: Final = 65_536
"""Maximum number of decisions whose end is still searched; beyond it, the oldest are returned
without an end.
"""


class Setting(Struct, frozen=True):
    """The parts of a configuration that are needed to explain its decisions."""

    generation: int
    """Generation of the configuration in its picker, or 0 if unknown."""
    scorers: tuple[str, ...]
    weights: tuple[float, ...]
    by_blocks: tuple[str, ...] = ()
    """Names of the scorers whose score is the share of the prompt's blocks that the endpoint has
    cached.
    """
    costs: tuple[TellsCost | None, ...] = ()
    """Plugins of the scorers that can list the parts of their cost; None for each other scorer, and
    for one that cannot be created again.
    """


NO_SETTING: Final = Setting(0, (), ())


class PastDecision(Struct, kw_only=True):
    """A past routing decision with its outcome."""

    at_s: float
    picker: str
    told: Decided
    setting: Setting
    states: States
    """States of the endpoints that were not simply ready, by name."""
    leg_settings: tuple[Setting, ...] = ()
    """Settings of the legs in `told.earlier`, in their order."""
    end: Ended | None = None
    served: Served | None = None
    """Endpoint to which the gateway sent the request instead of the chosen one, or None."""


class PastRefusal(Struct, frozen=True, kw_only=True):
    at_s: float
    picker: str
    told: Refused
    states: States


class PastStates(Struct, frozen=True, kw_only=True):
    """The states of the endpoints that were not simply ready for this picker, from `at_s` on."""

    at_s: float
    picker: str
    states: States


class PastChange(Struct, frozen=True, kw_only=True):
    """A configuration document that came into force or was rejected."""

    at_s: float
    picker: str
    change: Applied | RefusedDocument


class PastLoss(Struct, frozen=True, kw_only=True):
    """A number of records missing in a journal: soon after `at_s`, or before the file that begins
    then.
    """

    at_s: float
    picker: str
    records: int


Past: TypeAlias = PastDecision | PastRefusal | PastStates | PastChange | PastLoss
