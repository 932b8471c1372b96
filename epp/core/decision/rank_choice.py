"""The choice of the data-parallel rank that serves a request at the picked endpoint."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from epp.core.decision.plugin import ChoosesRanks
from epp.core.failures import PluginFailures
from epp.core.knowledge.indexes import Indexes
from epp.core.knowledge.inflight import InflightLedger, Lease
from epp.core.types import Seconds


class RankChoice(StrEnum):
    """The outcome of the choice among several data-parallel ranks. If no rank is named to the
    engine, the engine chooses.
    """

    NAMED = "named"
    UNHELD = "unheld"
    """No rank has any part of the prompt cached."""
    ALIKE = "alike"
    """No rank has so much more of the prompt cached than the others that the plugin prefers it."""
    CROWDED = "crowded"
    """The plugin would select a rank by its cached prefix, but not with the running requests that
    this picker sent to the ranks.
    """
    FALLBACK = "fallback"
    """A fallback endpoint does not have the selected rank, and all receive the same header."""
    FAILED = "failed"
    """The plugin that selects ranks, or the index with the cached blocks of ranks, failed."""


class RankChooser(Struct, frozen=True):
    """The plugin that selects data-parallel ranks, with its name in the configuration."""

    name: str
    plugin: ChoosesRanks
    failures: PluginFailures

    def choose(
        self, held_tokens: Sequence[int], sent: Sequence[int]
    ) -> tuple[int | None, RankChoice]:
        """Return (rank, outcome): the rank that the plugin selects, or None if the engine chooses,
        and the outcome of the choice. `held_tokens` and `sent` are those of `ChoosesRanks.rank_of`.
        """
        failed_before = self.failures.so_far
        rank = self._rank_of(held_tokens, sent)
        if rank is not None:
            return rank, RankChoice.NAMED
        if self.failures.so_far != failed_before:
            return None, RankChoice.FAILED
        if not any(held_tokens):
            return None, RankChoice.UNHELD
        # A plugin is a function of its arguments, so its answer for idle ranks shows the reason.
        idle = self._rank_of(held_tokens, [0] * len(sent))
        return None, RankChoice.ALIKE if idle is None else RankChoice.CROWDED

    def _rank_of(self, held_tokens: Sequence[int], sent: Sequence[int]) -> int | None:
        """Return the rank that the plugin selects, or None if it selects none or fails."""
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

    def place(
        self,
        lease: Lease,
        fallbacks: Sequence[int],
        indexes: Indexes,
        ledger: InflightLedger,
        outcomes: dict[RankChoice, int],
        now: Seconds,
    ) -> int | None:
        """Choose the rank that must serve the request of `lease`. Count the request at that rank,
        and the outcome in `outcomes`. Do neither if the endpoint has one rank or reports no events.

        Return the rank, or None if the engine chooses. `fallbacks` are the slots of the fallback
        endpoints. They receive the same headers as the chosen endpoint.
        """
        held = indexes.tokens_by_rank(lease.request, lease.slot, now)
        if held is not None and not held:
            return None
        rank, outcome = None, RankChoice.FAILED
        if held is not None:
            rank, outcome = self.choose(held, ledger.sent_to_ranks(lease.slot, len(held)))
        if rank is not None and fallbacks:
            fewest = indexes.fewest_ranks(fallbacks)
            # An engine refuses a rank that it does not have.
            if fewest is None or rank >= fewest:
                rank = None
                outcome = RankChoice.FAILED if fewest is None else RankChoice.FALLBACK
        outcomes[outcome] += 1
        if rank is not None:
            ledger.place(lease, rank)
        return rank
