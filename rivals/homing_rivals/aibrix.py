"""AIBrix: most of the prefix with a guard against imbalance, by a table of hashes or by a tree.

Source: `pkg/plugins/gateway/algorithms` and `pkg/utils/prefixcacheindexer` of vllm-project/aibrix
(2026-08). AIBrix's fairness policy `vtc-basic` is the family `aibrix_vtc`; the cost of its third
prefix policy is that of the family `preble`.
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

    R is the number of an endpoint's requests in flight, k is `sigma_factor`, and sigma the standard
    deviation of R as a sample (n - 1). The percentage of the prompt that an endpoint has cached is
    floor(100 x matched blocks / full blocks of the prompt). If max R - min R >
    `imbalance_requests`, only the endpoints with the lowest R are considered.

    The defaults 8 of `imbalance_requests` and 1 of `sigma_factor` are those of AIBrix's code; its
    documentation says 16 and 2. The authors tuned the value 8 for 4,000 tokens in and 2,000 out on
    A10 and A100 (PR #933).

    Kept from AIBrix: percentages are whole numbers, rounded down, so endpoints may be equal
    although their cached blocks differ by almost a hundredth of the prompt; a full table of hashes
    loses the head of a prompt before its tail. Different from AIBrix: the picker plugin orders
    equal endpoints, round robin or at random; blocks have 16 tokens, where AIBrix's code has 4
    bytes and its documentation 128 tokens. The copy's table of hashes has at most 200,000 (block,
    endpoint) pairs, and the endpoint with most of them loses its oldest. AIBrix's table has as many
    blocks in one order, and forgets blocks after 20 minutes.
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
