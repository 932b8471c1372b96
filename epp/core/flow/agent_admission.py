"""The rule by which agent sessions are admitted: the room that a waiting session may take."""

from enum import IntEnum
from typing import Final

from msgspec import Struct

from epp.core.knowledge.agent_sessions import AGENT_SESSIONS, Room, Standing
from epp.core.types import Seconds

HEAD_WAIT_S_MAX: Final = 30.0


class Rank(IntEnum):
    """The order in which a band of agent sessions is served, lowest first."""

    ADMITTED = 0
    OVERDUE = 1
    """The session is not admitted and has waited for half of `head_wait_s_max` or longer."""
    PAUSED = 2
    NEW = 3


class AgentAdmission(Struct, frozen=True, kw_only=True):
    """Settings of the admission of agent sessions."""

    index: str = AGENT_SESSIONS
    """Name of the affinity index of agent sessions."""
    head_wait_s_max: Seconds = HEAD_WAIT_S_MAX
    """Seconds after which a waiting session is admitted even without room; 0 for never."""

    def least_room(self, waited_s: Seconds) -> Room:
        """Return the lowest value of `Room` at which an endpoint admits a session whose request has
        waited for `waited_s`.
        """
        limit_s = self.head_wait_s_max
        if not limit_s or waited_s < limit_s / 2:
            return Room.OF_LONG_IDLE
        return Room.OF_IDLE if waited_s < limit_s else Room.NONE

    def rank(self, standing: Standing, waited_s: Seconds) -> Rank:
        """Return the rank of a request that has waited for `waited_s`, by the standing of its
        session.
        """
        if standing is Standing.ADMITTED:
            return Rank.ADMITTED
        if self.least_room(waited_s) < Room.OF_LONG_IDLE:
            return Rank.OVERDUE
        return Rank.PAUSED if standing is Standing.PAUSED else Rank.NEW
