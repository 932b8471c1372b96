"""What any affinity index can do, and how one is configured."""

from typing import Protocol

from epp.core.knowledge.candidates import Affinity
from epp.core.parameters import Plugin
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds


class AffinityIndex(Protocol):
    """State that a strategy keeps about which endpoint has seen what (design D12)."""

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """How much of `request` each of the endpoint slots 0..`slots`-1 holds; changes nothing."""
        ...

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> None:
        """Assume from `now` on that `slot` holds `request`."""
        ...

    def retract(self, request: InferenceRequest, slot: int, kept: int, now: Seconds) -> None:
        """Take back what `record` added beyond the `kept` units that `slot` held before it."""
        ...

    def forget(self, slot: int) -> None:
        """The endpoint in `slot` left or restarted: drop all that is known of it."""
        ...

    def expire(self, now: Seconds) -> None:
        """Bounded housekeeping; called about once a second."""
        ...

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """The engine in `slot` says how large its cache is; ignore it if it does not matter."""
        ...


class AffinityIndexSettings(Plugin, Protocol):
    """A frozen struct that is configured like a plugin and opens the index it describes."""

    def open(self) -> AffinityIndex:
        """A new, empty index."""
        ...

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to a running index and keep what it knows; False: it cannot."""
        ...
