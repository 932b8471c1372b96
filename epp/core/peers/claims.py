"""Plausibility limits of the load that a peer reports, from what this picker knows itself.

The endpoint's metrics page is independent evidence. A peer's requests at an endpoint are either on
the page, or were sent since the page was read. Only the peer knows the latter, so they are limited
to what one picker may plausibly send to one endpoint in that time.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from epp.core.knowledge.candidates import Columns
from epp.core.types import Seconds

SENT_REQUESTS_MIN: Final = 4.0
"""Number of requests that one peer may report at one endpoint, in addition to those on the
endpoint's metrics page, when this page was just read.
"""
SENT_REQUESTS_PER_S: Final = 20.0
"""Number of further requests that one peer may report at one endpoint for each second since the
endpoint's metrics page was read. More of them count as soon as the page shows them.
"""
UNSEEN_S: Final[Seconds] = 5.0
"""Maximum age in seconds of an endpoint's metrics page that is assumed when the load of peers is
limited. It is used if the page is older or was never read; then nothing else contradicts a peer.
"""
PROMPT_TOKENS: Final = 2_048.0
"""Assumed number of prompt tokens of a peer's average request, if this picker has no request in
flight.
"""
PROMPT_TOKENS_RATIO: Final = 2.0
"""Largest ratio of the prompt tokens of a peer's average request to those of this picker's, because
a gateway spreads the same traffic over both.
"""

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


def claims_max(columns: Columns, slots: _Ints, now: Seconds) -> tuple[_Ints, _Floats]:
    """Return the largest plausible load of one peer at each of `slots`: the number of requests,
    int64[n], and their uncached prompt tokens, float64[n].

    Requests are those that the endpoint's metrics page showed, without this picker's as far as it
    can include them, plus those that may have been sent since. Tokens are counted for requests that
    the page showed waiting or that were sent since. Each counts as `PROMPT_TOKENS_RATIO` times the
    average prompt of this picker's requests in flight, or as `PROMPT_TOKENS` if it has none. The
    prompt of a running request is mostly prefilled.
    """
    waiting, running = (
        np.nan_to_num(column[slots], nan=0.0, posinf=0.0, neginf=0.0)
        for column in (columns.waiting_requests, columns.running_requests)
    )
    ours = columns.inflight_requests[slots] - columns.unreported_requests[slots]
    sent = _sent_max(columns, slots, now)
    requests = np.maximum(waiting + running - np.maximum(ours, 0), 0.0) + sent
    tokens = (waiting + sent) * _mean_tokens_max(columns)
    return np.floor(requests).astype(np.int64), tokens


def held_tokens_max(columns: Columns, slots: _Ints, now: Seconds) -> _Floats:
    """Return float64[n]: the largest plausible number of tokens in the context of one peer's requests
    at each of `slots`, which is also that of their KV transfers.

    These are the tokens in KV blocks that requests reference by the endpoint's metrics page, and the
    mean as in `claims_max` for each request on the page or sent since.
    """
    waiting, running, usage, capacity = (
        np.nan_to_num(column[slots], nan=0.0, posinf=0.0, neginf=0.0)
        for column in (
            columns.waiting_requests,
            columns.running_requests,
            columns.kv_cache_usage,
            columns.kv_capacity_tokens,
        )
    )
    requests = waiting + running + _sent_max(columns, slots, now)
    tokens: _Floats = usage * capacity + requests * _mean_tokens_max(columns)
    return tokens


def _sent_max(columns: Columns, slots: _Ints, now: Seconds) -> _Floats:
    """Return float64[n]: the largest plausible number of one peer's requests that the metrics page of
    each of `slots` does not show yet.
    """
    age_s = np.clip(now - columns.observed_at_s[slots], 0.0, UNSEEN_S)
    sent: _Floats = SENT_REQUESTS_MIN + SENT_REQUESTS_PER_S * age_s
    return sent


def _mean_tokens_max(columns: Columns) -> float:
    """Return the largest plausible number of prompt tokens of a peer's average request."""
    n = len(columns)
    inflight = float(columns.inflight_requests[:n].sum())
    context_tokens = float(columns.inflight_context_tokens[:n].sum())
    return PROMPT_TOKENS_RATIO * context_tokens / inflight if inflight else PROMPT_TOKENS
