"""Load alone, as proxies balance it: chance, round robin, the fewest requests, and vLLM's own rule.

The strategies of this family ignore the prompt. They are the baseline for strategies that use
cached prefixes. Four of their names end in `-live` because the simulator has baselines with the
plain names. The baselines model a plain proxy, which has no scrapes and considers no endpoint
stale, whereas the strategies with `-live` consist of plugins of the scheduler.
"""

from random import Random
from typing import ClassVar, Final

import numpy as np

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Ints, Parameters


class RandomTie(Parameters, frozen=True):
    """Pick the endpoint with the highest total score, at random among equal ones.

    This picker serves strategies that draw at random among equal endpoints, where
    `max-score-picker` would alternate.
    """

    type_name: ClassVar[str] = "random-tie-picker"
    abilities: ClassVar[Abilities] = Abilities(reads=())

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        tied = contract.highest(scores)
        first = random.randrange(len(tied))
        return tied[first : first + 1]


class PowerOfTwo(Parameters, frozen=True):
    """Draw two different endpoints at random and pick the one with the higher total score; the
    first if both are equal.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001). smg,
    AIBrix and Ray use this rule with requests in flight as the load.
    """

    type_name: ClassVar[str] = "power-of-two-picker"
    abilities: ClassVar[Abilities] = Abilities(reads=())

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        if len(scores) == 1:
            return np.zeros(1, dtype=np.int64)
        one, other = random.sample(range(len(scores)), 2)
        return np.array([one if scores[one] >= scores[other] else other], dtype=np.int64)


class DataParallelLoad(Parameters, frozen=True):
    """Prefer the endpoint with the least 4 x waiting + running requests, as vLLM's balancer of
    data-parallel ranks does.

    Requests that were sent since the engine last reported its load count as waiting. Source: vLLM's
    `DPLBAsyncMPClient`, whose engines report their load every 100 ms.

    Different from vLLM: an engine's load is as old as its last scrape; equal endpoints are picked
    round robin, where vLLM picks the first in an order that differs for each client. The score of
    an engine whose load is unknown is also unknown.
    """

    type_name: ClassVar[str] = "data-parallel-load-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("running_requests", "unreported_requests", "waiting_requests")
    )

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        waiting = candidates.waiting_requests + candidates.unreported_requests
        load = 4.0 * waiting + candidates.running_requests
        scores = contract.scores_of_cost(load)
        scores[np.isnan(load)] = np.nan
        return scores


PICKERS: Final = (RandomTie, PowerOfTwo)
SCORERS: Final = (DataParallelLoad,)

STRATEGIES: Final = (
    contract.Strategy(
        name="random-live",
        idea="Random: any endpoint.",
        config=contract.config_of(picker=contract.step("random-picker")),
    ),
    contract.Strategy(
        name="round-robin-live",
        idea="Round robin: the endpoints one after the other.",
        config=contract.config_of(picker=contract.step("max-score-picker")),
    ),
    contract.Strategy(
        name="least-requests-live",
        idea=(
            "Least requests: the endpoint with the fewest requests in flight, equal ones round "
            "robin."
        ),
        config=contract.config_of(contract.step("active-request-scorer")),
    ),
    contract.Strategy(
        name="power-of-two-live",
        idea=(
            "Power of two choices: of two random endpoints, the one with fewer requests in flight."
        ),
        config=contract.config_of(
            contract.step("active-request-scorer"), picker=contract.step(PowerOfTwo.type_name)
        ),
    ),
    contract.Strategy(
        name="vllm-data-parallel",
        idea=(
            "vLLM between data-parallel ranks: the endpoint with the least 4 x waiting + running "
            "requests."
        ),
        omissions="reports of load every 100 ms: here as often as pages are scraped",
        config=contract.config_of(contract.step(DataParallelLoad.type_name)),
    ),
)
