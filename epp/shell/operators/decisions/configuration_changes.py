"""Which configuration is in force since when, what it changed, and what was refused since."""

import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from epp.core.types import Seconds

CHANGES_MAX = 20
"""Sentences of one change that are kept."""


class Applied(Struct, frozen=True, kw_only=True):
    """A document that came into force."""

    generation: int = 0
    hash: str = ""
    source: str = ""
    at_s: float = 0.0
    """By the clock of the day."""
    changes: tuple[str, ...] = ()
    """Against the one before, one sentence each; more than `CHANGES_MAX` are cut."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of its scorers, by name."""


class RefusedDocument(Struct, frozen=True, kw_only=True):
    """A document that did not."""

    at_s: float
    problem: str


class ConfigurationChanges:
    """Told by whoever applies documents; asked by the live view."""

    def __init__(
        self,
        clock: Callable[[], Seconds] = time.time,
        tell: Callable[[Applied | RefusedDocument], None] = lambda _: None,
    ) -> None:
        """`clock` tells the time of the day; `tell` is told of each change."""
        self._clock = clock
        self._tell = tell
        self.applied = Applied()
        self.refused: RefusedDocument | None = None
        """The last one, if it is newer than what is in force."""

    def apply(
        self,
        generation: int,
        config_hash: str,
        source: str,
        changes: Sequence[str],
        weights: Mapping[str, float],
    ) -> None:
        """A document is in force from now on."""
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
        """A document was refused; the last good one stays."""
        self.refused = RefusedDocument(at_s=self._clock(), problem=problem)
        self._tell(self.refused)
