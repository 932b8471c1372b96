"""Agreement between pickers that do not share decisions, on the endpoint for a little-known prompt.

Every picker computes the same endpoint for the same key by rendezvous hashing, without
communication. The choice of the key is what matters. If it is too coarse, all clients with the same
system prompt go to one endpoint. If it is too fine, the turns of one conversation go to different
endpoints. The key is:

- The hash of the prompt's head up to the first multiple of `key_tokens` beyond what most candidates
  have cached. This applies while that position is before the user's first message. Prompts with a
  common preamble that is not yet cached everywhere thus stay together.
- Beyond that position, the session, if the client names one and clients return to sessions here.
  Otherwise it is the conversation: the hash of everything up to the end of the user's first
  message, which is the same at each turn.
- For a completion, the session if clients return to sessions, otherwise the hash of the head in
  every case. A completion has no known first message, and a session of one request would separate
  prompts with the same head.
- For a prompt without a full block, other than a conversation, the session if the client names one.

The length that most candidates have cached is nearly the same at all pickers, because it is the
beginning of most requests. All pickers also agree on whether clients return to sessions, because
each sees a sample of the same traffic.
"""

import math
from enum import StrEnum
from typing import Final

import numpy as np

from epp.core.knowledge.rendezvous import identity_hash
from epp.core.types import BYTES_PER_TOKEN
from epp.plugins.contract import Candidates, Floats, InferenceRequest, Ints


class Agreement(StrEnum):
    """Condition under which pickers of a pool route little-known prompts to the endpoint that every
    picker would choose.
    """

    AUTO = "auto"
    NONE = "none"
    RENDEZVOUS = "rendezvous"


LOAD_FACTOR_MAX: Final = 1.25
"""Maximum number of requests in flight at the agreed endpoint, as a multiple of the candidates'
mean.

It is the usual load factor of consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2018).
"""
CHANCE_DEVIATIONS: Final = 3.0
"""Number of standard deviations by which a count of requests in flight may differ from the mean by
chance.

A picker does not count the requests of the pickers that it does not receive, and small counts
differ by chance between pickers. If chance explains a count, skipping the endpoint would only make
the pickers disagree.
"""


def agreement_key(
    request: InferenceRequest,
    candidates: Candidates,
    matched_blocks: Ints,
    *,
    key_tokens: int,
    session: str,
) -> int | None:
    """Return the 64-bit key by which all pickers choose the same endpoint for `request`, or None if
    it has no such key.

    `matched_blocks`, int64[n], holds the blocks of the prompt that this picker's index estimates as
    cached at each candidate. `session` is "" if the client names none.
    """
    block_bytes = candidates.block_tokens * BYTES_PER_TOKEN
    step = max(1, key_tokens // candidates.block_tokens)
    # More than half of the candidates have this many blocks.
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
    """Return float64[n]: 1 for the endpoint on which all pickers agree, 0 for the others.

    It is the first endpoint in rendezvous order that has at most `LOAD_FACTOR_MAX` times the mean
    number of requests in flight, plus what chance explains. Each picker compares its counts with
    their mean, so the rule does not depend on the number of pickers.
    """
    inflight = candidates.inflight_requests
    mean = float(np.add.reduce(inflight)) / len(inflight)
    most = LOAD_FACTOR_MAX * mean + CHANCE_DEVIATIONS * math.sqrt(mean) + 1.0
    weights = candidates.rendezvous(key)
    winner = int(weights.argmax())
    if inflight.item(winner) > most:
        # One endpoint or more is not above the mean, so the list cannot become empty.
        weights[inflight > most] = 0
        winner = int(weights.argmax())
    scores = np.zeros(len(weights))
    scores[winner] = 1.0
    return scores
