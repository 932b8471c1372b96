"""What pickers report to each other about KV transfers: the tokens that each endpoint still has to
receive and to send for the requests of one picker.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec import structs

from epp.core.knowledge.candidates import Columns, Floats
from epp.core.peers.claims import claims_max, referenced_tokens
from epp.core.peers.frames import LOADS_MAX, TRANSFER, Frame, transfers_of
from epp.core.types import Seconds

_CHANGE_TOKENS: Final = 1.0
"""Smallest change of a number of tokens that is reported; a smaller one is a rounding error."""


class TransferReports:
    """The part of frames that is about KV transfers, for the columns of one picker."""

    def __init__(self) -> None:
        self._sent: Floats = np.zeros((2, 0))
        """Tokens to receive and to send that were reported last, by slot."""

    def collect(self, columns: Columns, hashes: Mapping[int, int], *, whole: bool) -> bytes:
        """Return what the next frame reports as an array of `TRANSFER`: each endpoint whose tokens
        changed or, if `whole`, each that has any. `hashes` are the hashes of endpoints by slot.
        """
        n = len(columns)
        tokens = np.stack((columns.receiving_tokens[:n], columns.sending_tokens[:n]))
        sent = np.zeros((2, n))
        sent[:, : self._sent.shape[1]] = self._sent
        changed = tokens != 0.0 if whole else np.abs(tokens - sent) > _CHANGE_TOKENS
        told = changed.any(axis=0)
        self._sent = np.where(told, tokens, sent)
        slots = told.nonzero()[0][:LOADS_MAX]
        if not len(slots):
            return b""
        found = np.zeros(len(slots), dtype=TRANSFER)
        found["endpoint"] = [hashes.get(slot, 0) for slot in slots.tolist()]
        found["receiving_tokens"], found["sending_tokens"] = tokens[:, slots]
        return found.tobytes()

    def take(
        self, columns: Columns, slots: Mapping[int, int], frame: Frame, now: Seconds
    ) -> int:
        """Store what the `frame` of a peer reports, up to the plausible limits. Return the number
        of endpoints whose report exceeded them. `slots` are the slots of endpoints by their hash.
        """
        loads = columns.peers
        if loads is None or not (frame.transfers or frame.whole):
            return 0
        told = transfers_of(frame.transfers)
        at = np.array([slots.get(one, -1) for one in told["endpoint"].tolist()], dtype=np.int64)
        known = at >= 0
        tokens = np.stack((told["receiving_tokens"][known], told["sending_tokens"][known]))
        _, tokens_max = claims_max(columns, at[known], now)
        tokens_max += referenced_tokens(columns, at[known])
        loads.tell_transfers(
            frame.origin,
            at[known],
            np.minimum(np.nan_to_num(tokens.astype(np.float64)), tokens_max),
            whole=frame.whole,
            size=len(columns),
        )
        return int((tokens > tokens_max).any(axis=0).sum())


def reported(frame: Frame, transfers: bytes) -> Frame:
    """Return `frame` with the transfers that `TransferReports.collect` returned."""
    return structs.replace(frame, transfers=transfers) if transfers else frame
