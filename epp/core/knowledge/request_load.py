"""The requests at the candidates of a decision: those that engines report, and those in flight from
this picker and its peers.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
HELD_UP_MAX: Final = 10.0
"""Maximum number of waiting requests at an endpoint that count as delayed by a request's memory. In
deep overload every request waits anyway. Counting all of them would pin prompts to an endpoint
whose queue never ends.
"""

_ONE: Final = np.ones(())
_HELD_UP_MAX: Final = np.array(HELD_UP_MAX)


class RequestLoad:
    """The requests at n candidates. The arrays are float64[n], and readers must not change them.

    Requests begin and end at a few endpoints between two decisions, so that `recount` for these
    takes less time than to compute the arrays again.
    """

    __slots__ = (
        *("_kv_used_tokens", "_reported", "_scaled", "_waiting"),
        *("context_tokens", "held_up", "requests", "unseen", "unseen_waiting"),
        *("waiting_kv_tokens", "waiting_share"),
    )

    def __init__(
        self,
        reported: _Floats,
        waiting: _Floats,
        inflight: _Floats,
        context_tokens: _Floats,
        kv_used_tokens: _Floats,
        *,
        waits: bool,
    ) -> None:
        """Compute the arrays from the requests that engines report, the part of them that waits,
        the requests in flight, and their prompt tokens. `kv_used_tokens` are the tokens in the KV
        cache of each candidate. `waits` is True if any request waits.
        """
        self._reported, self._waiting = reported, waiting
        self._kv_used_tokens = kv_used_tokens
        self._scaled: tuple[_Floats, _Floats, _Floats] | None = None
        self.context_tokens = context_tokens
        self.requests: _Floats = np.fmax(reported, inflight)
        """Number of requests at each candidate that its engine reports, or of those in flight if
        these are more or the engine reports none.
        """
        self.unseen: _Floats = self.requests - inflight
        """Number of requests at each candidate that other clients of the engine sent, not this
        picker or its peers.
        """
        self.waiting_share: _Floats | None = None
        """Share of the requests at each candidate that wait, or None if none waits at any
        candidate.
        """
        self.unseen_waiting: _Floats | None = None
        """Product of `unseen` and `waiting_share` at each candidate, or None if no request waits.
        """
        self.waiting_kv_tokens: _Floats | None = None
        """Product of the tokens in the KV cache and `waiting_share` at each candidate, or None if
        no request waits.
        """
        self.held_up: _Floats | None = None
        """Number of waiting requests at each candidate, at most `HELD_UP_MAX`, or None if none
        waits.
        """
        if waits:
            self.waiting_share = waiting / np.fmax(self.requests, _ONE)
            self.unseen_waiting = self.unseen * self.waiting_share
            self.waiting_kv_tokens = kv_used_tokens * self.waiting_share
            self.held_up = np.fmin(waiting, _HELD_UP_MAX)

    def scaled(self, factor: _Floats, offset: _Floats) -> _Floats:
        """Return `requests` times `factor` plus `offset`, both of shape (). The result is kept for
        the same two objects, and `recount` updates it.
        """
        kept = self._scaled
        if kept is None or kept[0] is not factor or kept[1] is not offset:
            scaled = self.requests * factor
            scaled += offset
            kept = self._scaled = factor, offset, scaled
        return kept[2]

    def recount(self, at: int, inflight: int, context_tokens: int) -> None:
        """Set the requests in flight and their prompt tokens of the candidate at position `at`, and
        compute what follows from them there.
        """
        reported = self._reported.item(at)
        requests = reported if reported > inflight else float(inflight)
        self.context_tokens[at] = context_tokens
        self.requests[at] = requests
        self.unseen[at] = unseen = requests - inflight
        if self._scaled is not None:
            factor, offset, scaled = self._scaled
            scaled[at] = requests * factor.item() + offset.item()
        if (
            self.waiting_share is not None
            and self.unseen_waiting is not None
            and self.waiting_kv_tokens is not None
        ):
            share = self._waiting.item(at) / max(1.0, requests)
            self.waiting_share[at] = share
            self.unseen_waiting[at] = unseen * share
            self.waiting_kv_tokens[at] = self._kv_used_tokens.item(at) * share
