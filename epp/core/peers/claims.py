"""Plausibility limits of a peer's reported load, by this picker's own knowledge.

The engine's own page is independent evidence. A peer's requests at an endpoint are either on the
page, or were sent since the page was read. Only the peer knows the latter, so they are limited to
what one picker may plausibly send to one endpoint in that time.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from epp.core.knowledge.candidates import Columns
from epp.core.types import Seconds

SENT_REQUESTS_MIN: Final = 4.0
"""Number of requests that one peer may have at one endpoint regardless of its page."""
SENT_REQUESTS_PER_S: Final = 20.0
"""Additional requests per second since the page was read, of one peer at one endpoint. More of them
count as soon as the page shows them.
"""
UNSEEN_S: Final[Seconds] = 5.0
"""Assumed age of a page that is older or was never read; then nothing else contradicts a peer."""
PROMPT_TOKENS: Final = 2_048.0
"""Assumed uncached tokens of a peer's average request, if none of ours is in flight."""
PROMPT_TOKENS_RATIO: Final = 2.0
"""Largest ratio of a peer's average request to ours, because a gateway spreads the same traffic
over both.
"""

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


def claims_max(columns: Columns, slots: _Ints, now: Seconds) -> tuple[_Ints, _Floats]:
    """Return the most that one peer can have in flight at `slots`: requests, and uncached prompt
    tokens.

    Requests are those that the page showed, without ours as far as it can include them, plus those
    that may have been sent since. Tokens are counted for requests that the page showed waiting or
    that were sent since. Each counts at most `PROMPT_TOKENS_RATIO` times our average in flight, or
    `PROMPT_TOKENS` if we have none. The prompt of a running request is mostly prefilled.
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
