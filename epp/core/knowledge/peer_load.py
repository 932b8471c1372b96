"""Work that peers have in flight: what each says itself, kept apart from our own (design D17).

A peer tells absolute numbers, never differences: what is lost is repaired by what comes next. They
are its own, and all of them go when it does.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from epp.core.types import Seconds

REQUESTS_MAX: Final = 1_000_000
"""What one peer can say of one endpoint: it cannot make sums overflow."""
TOKENS_MAX: Final = 1e9

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


class _Load:
    """Of one peer, by endpoint slot."""

    __slots__ = ("prefill_tokens", "reported_at_s", "requests")

    def __init__(self) -> None:
        self.requests: _Ints = np.zeros(0, dtype=np.int64)
        self.prefill_tokens: _Floats = np.zeros(0)
        self.reported_at_s: _Floats = np.zeros(0)

    def fit(self, slots: int) -> None:
        missing = slots - len(self.requests)
        if missing > 0:
            self.requests = np.concatenate((self.requests, np.zeros(missing, dtype=np.int64)))
            self.prefill_tokens = np.concatenate((self.prefill_tokens, np.zeros(missing)))
            self.reported_at_s = np.concatenate((self.reported_at_s, np.zeros(missing)))


class PeerLoads:
    """The loads of all peers, by the origin that each of them calls itself."""

    def __init__(self) -> None:
        self._loads: dict[bytes, _Load] = {}
        self._requests: _Ints = np.zeros(0, dtype=np.int64)

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
        """`origin` has so much in flight at `slots`, which are below `size`.

        `whole`: and nothing elsewhere.
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

    def forget(self, origin: bytes) -> None:
        """`origin` is gone, and what it had in flight with it."""
        if self._loads.pop(origin, None) is not None:
            self._add_up()

    def forget_slot(self, slot: int) -> None:
        """The endpoint in `slot` left or restarted."""
        for load in self._loads.values():
            if slot < len(load.requests):
                load.requests[slot] = 0
                load.prefill_tokens[slot] = 0.0
        self._add_up()

    def requests(self, slots: _Ints, size: int) -> _Ints:
        """int64[n]: requests that all peers together have at `slots`, which are below `size`."""
        if len(self._requests) < size:
            self._add_up(size)
        return self._requests[slots]

    def prefill_tokens(self, slots: _Ints, now: Seconds, tokens_per_s: _Floats) -> _Floats:
        """float64[n]: uncached prompt tokens of theirs, less what was prefilled since they said so.

        `tokens_per_s`, float64[n], is how fast each of `slots` prefills.
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
        total = np.zeros(max(size, len(self._requests)), dtype=np.int64)
        for load in self._loads.values():
            total[: len(load.requests)] += load.requests
        self._requests = total
