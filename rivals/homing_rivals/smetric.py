"""SMetric: a request of which most is cached stays at the endpoint with its longest match while its
expected time to first token is within a limit there, or within it at no endpoint. Other requests go
to the endpoint with the least work.

Source: a proposal for vllm-project/router.
"""

import math
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters


class StayInTime(Parameters, frozen=True):
    """SMetric: prefer the endpoint with the longest match while its first token is in time, else
    the one with the least work.

    cost(n) = (n + n * (L - n / 2) / A) / v is the time to prefill n tokens, and queued(e) = P(e) /
    v + cost(L - hit(e)) the time until e has prefilled this request. The request stays at the
    endpoint h with the longest match (of several the one with the lowest queued(h)) if hit(h) > r *
    L, and if queued(h) <= s * (b + cost(L)) or no endpoint fulfils this second condition. Otherwise
    the request goes to the endpoint with the lowest queued(e) * (R(e) + 1), or with the lowest
    queued(e) if `colocated` is false.

    L is the number of tokens of the prompt; hit(e) the number of them that e is estimated to have
    cached; P(e) the number of uncached tokens waiting at e; v the prefill speed of e; R(e) the
    number of requests in flight at e. A is `attention_tokens`, the length of context at which
    attention takes as long as everything else; r is `hit_ratio`, s is `slack`, and b is `base_ms`.

    Different from the proposal: prefill speeds are those of the configuration, where the proposal
    takes the 90th percentile of the last 64 that it saw; the first turn of a conversation is
    recognized by its small hit and not by its messages; the proposal's constants are unknown, so
    the values of A, r, s and b are ours.
    """

    type_name: ClassVar[str] = "stay-in-time-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = "approx-prefix-cache-producer"
    producer: ClassVar[str] = ""

    attention_tokens: Annotated[float, Meta(gt=0)] = 32_768.0
    hit_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.5
    slack: Annotated[float, Meta(ge=0)] = 2.0
    base_ms: Annotated[float, Meta(ge=0)] = 500.0
    colocated: bool = True
    """True if endpoints that prefill also decode.

    The number of requests in flight, including this one, is then a factor of an endpoint's cost.
    """

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        speed = candidates.prefill_tokens_per_s
        prompt = float(candidates.prompt_tokens)
        uncached = candidates.uncached_tokens
        queued = candidates.inflight_prefill_tokens / speed + self._cost(uncached, prompt) / speed
        limit_s = self.slack * (self.base_ms / 1_000 + self._cost(prompt, prompt) / speed)
        fits = queued <= limit_s
        hit = prompt - uncached
        most = float(hit.max())
        holds = hit == most
        if most > self.hit_ratio * prompt and ((fits & holds).any() or not fits.any()):
            return contract.scores_of_cost(np.where(holds, queued, math.inf))
        if self.colocated:
            queued = queued * (candidates.inflight_requests + 1.0)
        return contract.scores_of_cost(queued)

    def _cost(self, tokens: "Floats | float", prompt: float) -> Floats:
        """Return the cost of computing `tokens` tokens of a prompt of `prompt` tokens, as the
        number of prefill tokens that cost the same without attention.
        """
        cost: Floats = np.asarray(tokens * (1.0 + (prompt - tokens / 2) / self.attention_tokens))
        return cost


SCORERS: Final = (StayInTime,)

STRATEGIES: Final = (
    contract.Strategy(
        name="smetric",
        idea=(
            "SMetric: the endpoint with the longest match while its first token is in time, else "
            "the least prefill time at an endpoint, times its requests."
        ),
        omissions=(
            "measured speeds: here configured; its constants, which are unknown; tokens in "
            "flight until the first chunk: here metrics pages and time reduce them; its formula "
            "ignores adapters"
        ),
        config=contract.config_of(contract.step(StayInTime.type_name)),
    ),
)
