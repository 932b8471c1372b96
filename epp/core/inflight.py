"""Work that was sent out and has not ended: counted at the decision, given back exactly once."""

from enum import StrEnum

from msgspec import Struct

from epp.core.types import InferenceRequest, Seconds


class Ending(StrEnum):
    """How a request ended, as far as the picker can see."""

    COMPLETE = "complete"
    """The response ended, or nothing more will ever be known of it."""
    CLIENT_LEFT = "client-disconnect"
    ERROR = "error"


class Outcome(Struct, frozen=True, kw_only=True):
    """What `Scheduler.complete` is told."""

    ending: Ending = Ending.COMPLETE
    status: int | None = None
    """HTTP status of the response; None: no response headers were seen."""


class Lease:
    """One request's share of an endpoint's load. Only the ledger writes to it."""

    __slots__ = ("matched_blocks", "opened_at_s", "prefill_tokens", "request", "slot")

    def __init__(
        self, request: InferenceRequest, slot: int, matched_blocks: int, opened_at_s: Seconds
    ) -> None:
        self.request = request
        self.slot = slot
        """-1 once it is closed, or once its endpoint is gone."""
        self.matched_blocks = matched_blocks
        """Blocks that the endpoint held before this request was recorded there."""
        self.opened_at_s = opened_at_s
        self.prefill_tokens = 0.0
        """Uncached prompt tokens of it that are, by estimate, still to be computed."""
