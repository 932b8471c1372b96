"""The load that peers report for their own requests in flight, apart from this picker's load
(design D17).

A peer reports absolute numbers, never differences, so the next report repairs a lost one. The
numbers of a peer are dropped when it leaves.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from epp.core.types import Seconds

REQUESTS_MAX: Final = 1_000_000
"""Maximum number of requests that a peer can report for one endpoint, so that sums cannot overflow."""
TOKENS_MAX: Final = 1e9

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


class _Load:
    """The numbers that one peer reports about its own requests in flight, by endpoint slot."""

    __slots__ = ("held_tokens", "prefill_tokens", "reported_at_s", "requests")

    def __init__(self) -> None:
        self.requests: _Ints = np.zeros(0, dtype=np.int64)
        self.prefill_tokens: _Floats = np.zeros(0)
        self.reported_at_s: _Floats = np.zeros(0)
        self.held_tokens: _Floats = np.zeros((3, 0))
        """Prompt tokens of the peer's requests at each endpoint: all of them, those whose KV blocks
        the endpoint still has to receive, and those whose KV blocks it still has to send.
        """

    def fit(self, slots: int) -> None:
        missing = slots - len(self.requests)
        if missing > 0:
            self.requests = np.concatenate((self.requests, np.zeros(missing, dtype=np.int64)))
            self.prefill_tokens = np.concatenate((self.prefill_tokens, np.zeros(missing)))
            self.reported_at_s = np.concatenate((self.reported_at_s, np.zeros(missing)))
            self.held_tokens = np.hstack((self.held_tokens, np.zeros((3, missing))))


class PeerLoads:
    """The loads of all peers, each stored by the random id of the peer's process."""

    def __init__(self) -> None:
        self._loads: dict[bytes, _Load] = {}
        self._requests: _Ints = np.zeros(0, dtype=np.int64)
        self._held_tokens: _Floats = np.zeros((3, 0))

    def __len__(self) -> int:
        return len(self._loads)

    def tell(
        self,
        origin: bytes,
        slots: _Ints,
        requests: _Ints,
        prefill_tokens: _Floats,
        now: Seconds,
        *,
        whole: bool,
        size: int,
    ) -> None:
        """Store the load that the peer `origin` reports for its requests at `slots`, each of which
        is below `size`. Numbers above `REQUESTS_MAX` and `TOKENS_MAX`, or below 0, are replaced by
        these limits.

        If `whole` is True, the peer's load at all other slots becomes 0.
        """
        load = self._loads.setdefault(origin, _Load())
        load.fit(size)
        if whole:
            load.requests[:] = 0
            load.prefill_tokens[:] = 0.0
        load.requests[slots] = requests.clip(0, REQUESTS_MAX)
        load.prefill_tokens[slots] = np.nan_to_num(prefill_tokens).clip(0.0, TOKENS_MAX)
        load.reported_at_s[slots] = now
        self._add_up()

    def tell_tokens(
        self, origin: bytes, slots: _Ints, tokens: _Floats, *, whole: bool, size: int
    ) -> None:
        """Store the tokens of the peer's requests at `slots`: `tokens`, float64[3, n], are their prompt
        tokens, and those whose KV blocks each endpoint still has to receive, and to send.

        If `whole` is True, the peer's tokens at all other slots become 0.
        """
        load = self._loads.setdefault(origin, _Load())
        load.fit(size)
        if whole:
            load.held_tokens[:] = 0.0
        load.held_tokens[:, slots] = np.nan_to_num(tokens).clip(0.0, TOKENS_MAX)
        self._add_up()

    def forget(self, origin: bytes) -> None:
        """Drop the load of the peer `origin`, because the peer is gone."""
        if self._loads.pop(origin, None) is not None:
            self._add_up()

    def forget_slot(self, slot: int) -> None:
        """Drop the loads of all peers at `slot`, because its endpoint left or restarted."""
        for load in self._loads.values():
            if slot < len(load.requests):
                load.requests[slot] = 0
                load.prefill_tokens[slot] = 0.0
                load.held_tokens[:, slot] = 0.0
        self._add_up()

    def requests(self, slots: _Ints, size: int) -> _Ints:
        """Return int64[n]: number of requests that all peers together have in flight at each of
        `slots`.
        """
        if len(self._requests) < size:
            self._add_up(size)
        return self._requests[slots]

    def context_tokens(self, slots: _Ints, size: int) -> _Ints:
        """Return int64[n]: prompt tokens of the requests that all peers together have in flight at
        each of `slots`.
        """
        return self._held(0, slots, size).astype(np.int64)

    def receiving_tokens(self, slots: _Ints, size: int) -> _Floats:
        """Return float64[n]: prompt tokens whose KV blocks each of `slots` still has to receive, for
        requests of all peers together.
        """
        return self._held(1, slots, size)

    def sending_tokens(self, slots: _Ints, size: int) -> _Floats:
        """Return float64[n]: prompt tokens whose KV blocks each of `slots` still has to send, for
        requests of all peers together.
        """
        return self._held(2, slots, size)

    def _held(self, row: int, slots: _Ints, size: int) -> _Floats:
        if self._held_tokens.shape[1] < size:
            self._add_up(size)
        held: _Floats = self._held_tokens[row, slots]
        return held

    def prefill_tokens(self, slots: _Ints, now: Seconds, tokens_per_s: _Floats) -> _Floats:
        """Return float64[n]: uncached prompt tokens that all peers together have pending at each of
        `slots`, less those that the endpoint can have prefilled since each report.

        `tokens_per_s`, float64[n], is the prefill speed of each of `slots`.
        """
        total = np.zeros(len(slots))
        for load in self._loads.values():
            within = slots < len(load.requests)
            known = slots[within]
            elapsed_s = now - load.reported_at_s[known]
            left = load.prefill_tokens[known] - elapsed_s * tokens_per_s[within]
            total[within] += np.maximum(left, 0.0)
        return total

    def _add_up(self, size: int = 0) -> None:
        for load in self._loads.values():
            size = max(size, len(load.requests))
        size = max(size, len(self._requests))
        requests, held_tokens = np.zeros(size, dtype=np.int64), np.zeros((3, size))
        for load in self._loads.values():
            requests[: len(load.requests)] += load.requests
            held_tokens[:, : len(load.requests)] += load.held_tokens
        self._requests, self._held_tokens = requests, held_tokens
