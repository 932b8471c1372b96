"""Track the configuration in force, its changes, and the last rejected configuration document."""

import time
from collections.abc import Callable, Mapping, Sequence

from epp.core.types import Seconds
from epp.journal.records import Applied, RefusedDocument

CHANGES_MAX = 20
"""Maximum number of sentences that are recorded for one change of the configuration."""


class ConfigurationChanges:
    """The configuration in force and its last rejected document, for the live view and the decision
    history.
    """

    def __init__(
        self,
        clock: Callable[[], Seconds] = time.time,
        tell: Callable[[Applied | RefusedDocument], None] = lambda _: None,
    ) -> None:
        """Create the record of configuration changes. `clock` returns Unix time in seconds, and
        `tell` is called with each document that came into force or was rejected.
        """
        self._clock = clock
        self._tell = tell
        self.applied = Applied()
        self.refused: RefusedDocument | None = None
        """Last rejected configuration document if it is newer than the configuration in force, else
        None.
        """

    def apply(
        self,
        generation: int,
        config_hash: str,
        source: str,
        changes: Sequence[str],
        weights: Mapping[str, float],
    ) -> None:
        """Record and report that a configuration document came into force, and forget the last
        rejected one.
        """
        self.applied = Applied(
            generation=generation,
            hash=config_hash,
            source=source,
            at_s=self._clock(),
            changes=tuple(changes[:CHANGES_MAX]),
            weights=weights,
        )
        self.refused = None
        self._tell(self.applied)

    def refuse(self, problem: str) -> None:
        """Record and report that a configuration document was rejected and the last valid one stays
        in force.
        """
        self.refused = RefusedDocument(at_s=self._clock(), problem=problem)
        self._tell(self.refused)
