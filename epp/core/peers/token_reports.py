"""Pickers report tokens to each other: at each endpoint, the context of a picker's requests, and the
tokens of their KV transfers that the endpoint still has to receive and to send.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from epp.core.knowledge.candidates import Bools, Columns, Floats
from epp.core.peers.claims import held_tokens_max
from epp.core.peers.frames import LOADS_MAX, TOKENS, Frame, tokens_of
from epp.core.types import Seconds

MEMBERS: Final = ("context_tokens", "receiving_tokens", "sending_tokens")
"""Members of `TOKENS` in the order of the rows of tokens."""
_CHANGE_TOKENS: Final = 1.0
"""Change of a number of tokens above which it is reported; a smaller one is a rounding error."""


class TokenReports:
    """The reports on tokens of contexts and KV transfers in the frames between pickers, for the
    columns of one picker.
    """

    def __init__(self) -> None:
        self._sent: Floats = np.zeros((len(MEMBERS), 0))
        """Tokens that were reported last, by slot, with a row for each of `MEMBERS`."""

    def collect(self, columns: Columns, hashes: Mapping[int, int], *, whole: bool) -> bytes:
        """Return the tokens that the next frame reports, as an array of `TOKENS`: each endpoint
        whose tokens changed or, if `whole`, each that has any, up to `LOADS_MAX`. These then count
        as reported. `hashes` are the hashes of endpoints by slot.
        """
        n = len(columns)
        own = columns.inflight_context_tokens, columns.receiving_tokens, columns.sending_tokens
        tokens = np.stack([column[:n].astype(np.float64) for column in own])
        sent = np.zeros_like(tokens)
        if not whole:
            # Peers forget what is not in a whole report.
            sent[:, : self._sent.shape[1]] = self._sent
        changed = tokens != 0.0 if whole else np.abs(tokens - sent) > _CHANGE_TOKENS
        told: Bools = np.asarray(changed.any(axis=0))
        slots = told.nonzero()[0][:LOADS_MAX]
        sent[:, slots] = tokens[:, slots]
        self._sent = sent
        if not len(slots):
            return b""
        found = np.zeros(len(slots), dtype=TOKENS)
        found["endpoint"] = [hashes.get(slot, 0) for slot in slots.tolist()]
        for member, row in zip(MEMBERS, tokens, strict=True):
            found[member] = row[slots]
        return found.tobytes()

    def take(self, columns: Columns, slots: Mapping[int, int], frame: Frame, now: Seconds) -> int:
        """Store the tokens that the `frame` of a peer reports, up to the plausible limits. Return
        the number of endpoints whose report exceeded them. `slots` are the slots of endpoints by
        their hash.
        """
        loads = columns.peers
        if loads is None:
            return 0
        told = tokens_of(frame.tokens)
        at = np.array([slots.get(one, -1) for one in told["endpoint"].tolist()], dtype=np.int64)
        known = at >= 0
        tokens = np.stack([told[member][known].astype(np.float64) for member in MEMBERS])
        tokens_max = held_tokens_max(columns, at[known], now)
        loads.tell_tokens(
            frame.origin,
            at[known],
            np.minimum(tokens, tokens_max),
            whole=frame.whole,
            size=len(columns),
        )
        return int((tokens > tokens_max).any(axis=0).sum())
