"""AIBrix's `vtc-basic`: users with many tokens are sent to late endpoints of the list.

Source: `pkg/plugins/gateway/algorithms/vtc` of vllm-project/aibrix (2026-08), after the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models" (2024).
"""

from random import Random
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Ints, Parameters
from homing_rivals.user_tokens import TOKENS, TOKENS_MAX, TOKENS_MIN, UserTokensSettings


class UserTokenPlace(Parameters, frozen=True):
    """Prefer the endpoint with the lowest |i - place| + min(R / `requests_max`, 1), where i is its
    position in the list of n.

    place = min(tokens of the user / max(`tokens_min`, (least + most of any user) / 2), n - 1). The
    tokens of a user are its prompt tokens plus twice its estimated output tokens of the last 5
    minutes (`user-tokens-producer`); R is the number of requests in flight at the endpoint. The
    score of an endpoint is 1 - (|i - place| + min(R / `requests_max`, 1)) / n. A request without a
    user gets the same score at every endpoint.

    Kept from AIBrix: the rule does not queue requests by virtual tokens. Users with many tokens
    share the last endpoints of the list, whatever other users do, and users with few tokens share
    the first; the order of endpoints in the list decides which ones these are.

    Different from AIBrix: the output tokens are estimated, and their real number is never used; the
    lowest and the highest number of tokens of any user may be up to a second old.
    """

    type_name: ClassVar[str] = "user-token-place-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = UserTokensSettings.type_name
    producer: ClassVar[str] = producer_type

    tokens_min: Annotated[float, Meta(gt=0)] = 1_000.0
    requests_max: Annotated[float, Meta(gt=0)] = 100.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        n = len(candidates)
        known = candidates.affinity(self.producer_type)
        if known.total == 0:
            return np.ones(n)
        tokens, least, most = (known.columns[name][0] for name in (TOKENS, TOKENS_MIN, TOKENS_MAX))
        place = min(tokens / max(self.tokens_min, (least + most) / 2.0), n - 1.0)
        cost = np.abs(np.arange(n) - place)
        cost += np.minimum(candidates.inflight_requests / self.requests_max, 1.0)
        scores: Floats = 1.0 - cost / n
        return scores


class NoisyMaxScore(Parameters, frozen=True):
    """Pick the endpoint with the highest total score minus a random number from 0 to `noise` / n,
    for n candidates.

    The random number is divided by n because `user-token-place-scorer` also divides its cost by n,
    so `noise` is in the unit of that cost.
    """

    type_name: ClassVar[str] = "noisy-max-score-picker"
    abilities: ClassVar[Abilities] = Abilities(reads=())

    noise: Annotated[float, Meta(ge=0)] = 0.1

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        n = len(scores)
        noise = np.array([random.random() for _ in range(n)]) * (self.noise / n)
        return np.array([(scores - noise).argmax()], dtype=np.int64)


INDEXES: Final = (UserTokensSettings,)
SCORERS: Final = (UserTokenPlace,)
PICKERS: Final = (NoisyMaxScore,)

STRATEGIES: Final = (
    contract.Strategy(
        name="aibrix-vtc",
        idea=(
            "AIBrix, vtc-basic: the more recent tokens a user has, the later the endpoint in the "
            "list."
        ),
        omissions=(
            "real lengths of answers, which are estimated; adapters: AIBrix's controller places "
            "them, and only their pods are candidates"
        ),
        config=contract.config_of(
            contract.step(UserTokenPlace.type_name), picker=contract.step(NoisyMaxScore.type_name)
        ),
    ),
)
