"""Which data-parallel rank of the endpoint that was picked serves a request, and why none is named."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from epp.core.decision.failures import PluginFailures
from epp.core.decision.plugin import ChoosesRanks


class RankChoice(StrEnum):
    """What came of choosing among several ranks; where none is named the engine chooses."""

    NAMED = "named"
    UNHELD = "unheld"
    """None of them holds any of the prompt."""
    ALIKE = "alike"
    """None holds so much more than the others that it matters to the plugin."""
    CROWDED = "crowded"
    """The one that would have been named was sent too many requests already."""
    FALLBACK = "fallback"
    """An endpoint that may serve in place of the one that was picked has not that rank."""
    FAILED = "failed"
    """The plugin or the index did."""


class RankChooser(Struct, frozen=True):
    """The plugin that chooses ranks, under its name in the configuration."""

    name: str
    plugin: ChoosesRanks
    failures: PluginFailures

    def choose(
        self, held_tokens: Sequence[int], sent: Sequence[int]
    ) -> tuple[int | None, RankChoice]:
        """As of `ChoosesRanks`, and what that came to."""
        failed_before = self.failures.so_far
        rank = self._rank_of(held_tokens, sent)
        if rank is not None:
            return rank, RankChoice.NAMED
        if self.failures.so_far != failed_before:
            return None, RankChoice.FAILED
        if not any(held_tokens):
            return None, RankChoice.UNHELD
        # A plugin is a function of what it is given: what it says of idle ranks tells why.
        idle = self._rank_of(held_tokens, [0] * len(sent))
        return None, RankChoice.ALIKE if idle is None else RankChoice.CROWDED

    def _rank_of(self, held_tokens: Sequence[int], sent: Sequence[int]) -> int | None:
        """None, if the plugin fails."""
        try:
            rank: object = self.plugin.rank_of(held_tokens, sent)
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(self.name, "rank_of", error)
            return None
        if rank is None or (type(rank) is int and 0 <= rank < len(held_tokens)):
            return rank
        fault = f"{rank!r:.40}, expected None or a rank below {len(held_tokens)}"
        self.failures.returned(self.name, "rank_of", fault)
        return None
