"""AIBrix: most of the prefix with a guard against imbalance, by a table of hashes or by a tree.

Source: `pkg/plugins/gateway/algorithms` and `pkg/utils/prefixcacheindexer` of vllm-project/aibrix
(2026-08). Its fairness is in a file of its own, and so is Preble, whose cost its third policy uses.
"""

from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters
from homing_rivals.radix_tree import RadixTreeSettings
from homing_rivals.routed_blocks import RoutedBlocksSettings


class GuardedPrefix(Parameters, frozen=True):
    """Prefer the endpoint with the most percent of the prompt cached, then the fewest requests,
    among those with R <= mean R + k x sigma.

    Percent is floor(100 x matched / total), sigma that of the sample (n - 1), R the requests in
    flight. The endpoint with the least R wins if no endpoint is within the bound. The rule
    considers only endpoints with min R if max R - min R > `imbalance_requests`.

    `imbalance_requests` 8 and `sigma_factor` 1 are its code's; its documentation says 16 and 2. The
    value 8 was tuned for 4,000 tokens in and 2,000 out on A10 and A100 (PR #933).

    Kept: percent are whole numbers, so blocks less than a hundredth of the prompt apart are equal;
    its table loses the head of a prompt under pressure. Differs: the order among equals is round
    robin or random, by the picker; blocks have 16 tokens, where its code has 4 bytes and its
    documentation 128 tokens. The table has 200,000 (block, endpoint) pairs, and the endpoint with
    most loses its oldest. AIBrix's table has as many blocks in one order and forgets those of 20
    minutes.
    """

    type_name: ClassVar[str] = "guarded-prefix-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = RoutedBlocksSettings.type_name

    imbalance_requests: Annotated[int, Meta(ge=0)] = 8
    sigma_factor: Annotated[float, Meta(ge=0)] = 1.0
    index: str = RoutedBlocksSettings.type_name
    """Name of the affinity index whose matches are the cached blocks."""

    @property
    def producer(self) -> str | None:
        return self.index

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        known = candidates.affinity(self.index)
        percent = known.matched * 100 // (known.total or 1)
        inflight = candidates.inflight_requests
        least = int(inflight.min())
        if int(inflight.max()) - least > self.imbalance_requests:
            eligible = inflight == least
        else:
            sigma = float(inflight.std(ddof=1)) if len(inflight) > 1 else 0.0
            eligible = inflight <= float(inflight.mean()) + self.sigma_factor * sigma
        # At least one endpoint is not above the mean, so one is eligible.
        eligible &= percent == percent[eligible].max()
        eligible &= inflight == inflight[eligible].min()
        scores: Floats = eligible.astype(np.float64)
        return scores


SCORERS: Final = (GuardedPrefix,)

STRATEGIES: Final = (
    contract.Strategy(
        name="aibrix-prefix",
        idea=(
            "AIBrix, prefix-cache: the endpoint with most of the prompt cached, among those "
            "within one sigma of the mean load."
        ),
        omissions=(
            "blocks of 4 bytes, here 16 tokens; expiry after 20 minutes; adapters: AIBrix's "
            "controller places them, and only their pods are candidates"
        ),
        config=contract.config_of(
            contract.producer(
                RoutedBlocksSettings.type_name,
                blockTokens=16,
                blocksPerRequestMax=8_192,
                blocksPerEndpointMax=200_000,
                blocksMax=200_000,
                contiguous=True,
            ),
            contract.step(GuardedPrefix.type_name),
            picker=contract.step("random-tie-picker"),
        ),
    ),
    contract.Strategy(
        name="aibrix-prefix-tree",
        idea=(
            "AIBrix, prefix-cache with its other index: the rule of `aibrix-prefix` over a "
            "tree of prompts."
        ),
        omissions=(
            "characters, here blocks of 16 tokens; adapters: AIBrix's controller places them, "
            "and only their pods are candidates"
        ),
        config=contract.config_of(
            contract.producer(RadixTreeSettings.type_name, blockSizeTokens=16),
            contract.step(GuardedPrefix.type_name, index=RadixTreeSettings.type_name),
            picker=contract.step("random-tie-picker"),
        ),
    ),
)
