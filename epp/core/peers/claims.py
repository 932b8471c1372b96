"""How much of what a peer says of an endpoint can be true, by what this picker knows itself.

The engine's own page is another witness: what a peer has in flight there is among the requests that
the page shows, or was sent since the page was read. Of the second nobody knows but who sent it, so
it is bounded by what one picker may plausibly send one endpoint in that time.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from epp.core.knowledge.candidates import Columns
from epp.core.types import Seconds

SENT_REQUESTS_MIN: Final = 4.0
"""Requests that one peer may have at one endpoint whatever its page shows."""
SENT_REQUESTS_PER_S: Final = 20.0
"""And so many more for each second since the page was read: requests a second, of one peer to one
endpoint. More of an honest peer is believed as soon as the page shows it."""
UNSEEN_S: Final[Seconds] = 5.0
"""The age of a page that is older, or was never read: then nothing else contradicts a peer."""
PROMPT_TOKENS: Final = 2_048.0
"""Uncached tokens that a request of a peer may have on average, while none of ours is in flight."""
PROMPT_TOKENS_RATIO: Final = 2.0
"""Of a peer's average request to ours: a gateway spreads the same traffic over both."""

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


def claims_max(columns: Columns, slots: _Ints, now: Seconds) -> tuple[_Ints, _Floats]:
    """What one peer can have in flight at `slots`: requests, and uncached prompt tokens.

    Requests: those that the page showed, ours left out as far as it can know them, and what can
    have been sent since. Tokens: of those that the page showed waiting and those sent since, each
    at most `PROMPT_TOKENS_RATIO` times what ours in flight have on average, or, where there are
    none, `PROMPT_TOKENS`; a prompt of a request that runs is mostly prefilled.
    """
    waiting, running = (
        np.nan_to_num(column[slots], nan=0.0, posinf=0.0, neginf=0.0)
        for column in (columns.waiting_requests, columns.running_requests)
    )
    age_s = np.clip(now - columns.observed_at_s[slots], 0.0, UNSEEN_S)
    ours = columns.inflight_requests[slots] - columns.unreported_requests[slots]
    sent = SENT_REQUESTS_MIN + SENT_REQUESTS_PER_S * age_s
    requests = np.maximum(waiting + running - np.maximum(ours, 0), 0.0) + sent
    n = len(columns)
    inflight = float(columns.inflight_requests[:n].sum())
    context_tokens = float(columns.inflight_context_tokens[:n].sum())
    mean_tokens = PROMPT_TOKENS_RATIO * context_tokens / inflight if inflight else PROMPT_TOKENS
    tokens = (waiting + sent) * mean_tokens
    return np.floor(requests).astype(np.int64), tokens
