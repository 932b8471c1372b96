"""The requests at the candidates of a decision: those that engines report, and those in flight from
this picker.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_ONE: Final = np.ones(())


class RequestLoad:
    """The requests at n candidates. The arrays are float64[n], and readers must not change them.

    Requests begin and end at a few endpoints between two decisions, so that `recount` for these
    takes less time than to compute the arrays again.
    """

    __slots__ = (
        *("_reported", "_waiting"),
        *("context_tokens", "requests", "unseen", "unseen_waiting", "waiting_share"),
    )

    def __init__(
        self,
        reported: _Floats,
        waiting: _Floats,
        inflight: _Floats,
        context_tokens: _Floats,
        *,
        waits: bool,
    ) -> None:
        """Compute the arrays from the requests that engines report, the part of them that waits,
        the requests in flight, and their prompt tokens. `waits` is True if any request waits.
        """
        self._reported, self._waiting = reported, waiting
        self.context_tokens = context_tokens
        self.requests: _Floats = np.fmax(reported, inflight)
        """Number of reported requests, or of requests in flight if that is greater."""
        self.unseen: _Floats = self.requests - inflight
        """Number of requests at each candidate that other clients of the engine sent, not this
        picker.
        """
        self.waiting_share: _Floats | None = None
        """Share of the requests that wait, or None if none waits at any candidate."""
        self.unseen_waiting: _Floats | None = None
        """Product of `unseen` and `waiting_share`, or None if none waits."""
        if waits:
            self.waiting_share = waiting / np.fmax(self.requests, _ONE)
            self.unseen_waiting = self.unseen * self.waiting_share

    def recount(self, at: int, inflight: int, context_tokens: int) -> None:
        """Set the requests in flight and their prompt tokens of the candidate at position `at`."""
        reported = self._reported.item(at)
        requests = reported if reported > inflight else float(inflight)
        self.context_tokens[at] = context_tokens
        self.requests[at] = requests
        self.unseen[at] = unseen = requests - inflight
        if self.waiting_share is not None and self.unseen_waiting is not None:
            share = self._waiting.item(at) / max(1.0, requests)
            self.waiting_share[at] = share
            self.unseen_waiting[at] = unseen * share
