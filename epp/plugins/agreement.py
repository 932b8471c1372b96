"""Where pickers that do not hear each other would all send a prompt of which one knows little.

Each finds the same endpoint for the same key by rendezvous hashing, without a word. The key is the
whole question: too coarse, and one endpoint gets everybody who shares a system prompt; too fine,
and the turns of one conversation part. So it is

- the hash of the prompt's head as far as the first boundary of `key_tokens` beyond what most
  candidates hold, as long as that lies in what comes before the user's first message: who shares a
  preamble that is not everywhere yet stays together;
- beyond that the session, if the client names it and sessions come again here, else the
  conversation: the hash of all up to the end of the user's first message, the same at each turn;
- of a completion, of which nobody knows what comes before a first message, the session if sessions
  come again, else that head in any case: a session of one request would part who shares a head.

What most hold is nearly the same at all pickers, because it is what most requests begin with; whether
sessions come again is, because each picker sees a sample of the same.
"""

import math
from enum import StrEnum
from typing import Final

import numpy as np

from epp.core.knowledge.rendezvous import identity_hash
from epp.core.types import BYTES_PER_TOKEN
from epp.plugins.contract import Candidates, Floats, InferenceRequest, Ints


class Agreement(StrEnum):
    """Whether prompts of which little is known go where every picker would send them."""

    AUTO = "auto"
    NONE = "none"
    RENDEZVOUS = "rendezvous"


LOAD_FACTOR_MAX: Final = 1.25
"""Of the mean: the load factor of consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2018) that its users have settled on."""
CHANCE_DEVIATIONS: Final = 3.0
"""Requests in flight are counted by each picker for itself. Of few, counts differ by chance, and each
picker's differently: as long as chance explains a count, skipping would only part the pickers."""


def agreement_key(
    request: InferenceRequest,
    candidates: Candidates,
    matched_blocks: Ints,
    *,
    key_tokens: int,
    session: str,
) -> int | None:
    """64 bits by which pickers agree on `request`; None: it has nothing to go by.

    `matched_blocks`, int64[n], is what each candidate holds, by the own index. `session` is "" if
    the client names none.
    """
    block_bytes = candidates.block_tokens * BYTES_PER_TOKEN
    step = max(1, key_tokens // candidates.block_tokens)
    # More than half hold so much.
    common = int(np.sort(matched_blocks)[(len(matched_blocks) - 1) // 2])
    head_blocks = step * (common // step + 1)
    preamble_bytes, conversation = request.opening() or (0, None)
    if session and request.moment.sessions_return:
        conversation = identity_hash(session)
    if conversation is not None and head_blocks * block_bytes > preamble_bytes:
        return conversation
    head = request.block_hash(block_bytes, head_blocks)
    return identity_hash(session) if head is None and session else head


def agreed_scores(candidates: Candidates, key: int) -> Floats:
    """float64[n]: 1 for the endpoint on which all agree, 0 for the others.

    It is the first in rendezvous order that does not have too many requests in flight from here:
    more than `LOAD_FACTOR_MAX` times the mean and what chance explains beyond it. Of how many
    pickers there are that does not depend: each compares its own counts with its own mean.
    """
    inflight = candidates.inflight_requests
    mean = float(np.add.reduce(inflight)) / len(inflight)
    most = LOAD_FACTOR_MAX * mean + CHANCE_DEVIATIONS * math.sqrt(mean) + 1.0
    weights = candidates.rendezvous(key)
    winner = int(weights.argmax())
    if inflight.item(winner) > most:
        # Somebody is not above the mean, so that somebody is left.
        weights[inflight > most] = 0
        winner = int(weights.argmax())
    scores = np.zeros(len(weights))
    scores[winner] = 1.0
    return scores
