"""AMD's Infera: missing blocks, running blocks, and recently missed blocks.

Source: AMD-AGI/Infera, `infera/router/policy/kv_event_aware.py` and its twin in Rust.
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta

from epp.plugins import contract
from epp.plugins.contract import Abilities, Candidates, Floats, InferenceRequest, Parameters
from homing_rivals.block_load import BlockLoadSettings
from homing_rivals.lexicographic import scores_by_rank


class DecayedMisses(Parameters, frozen=True):
    """AMD Infera: prefer the endpoint with the fewest blocks that are missing, running and recently
    missed.

    The endpoint e with the lowest cost(e) = w * (N - m(e)) + A(e) + Q(e) wins, and among equal ones
    that with the lowest A(e). N is the number of blocks of the prompt; m(e) the number of leading
    blocks that e is estimated to have cached; A(e) the number of distinct blocks of the requests in
    flight at e; Q(e) the number of blocks that earlier requests missed at e, multiplied by 0.97
    with every later request. w is `overlap_weight`, 1 for pods that prefill and decode (20 if they
    only prefill, 2 if they only decode).

    Different from Infera: cached blocks are those that were routed to an endpoint, never those of
    an engine's event; blocks have 64 tokens; hints about how long to keep a prompt, and images, are
    ignored. The misses Q fade at all endpoints with every request to any of them.
    """

    type_name: ClassVar[str] = "decayed-misses-scorer"
    abilities: ClassVar[Abilities] = Abilities(reads_index=True)
    producer_type: ClassVar[str] = BlockLoadSettings.type_name
    producer: ClassVar[str] = producer_type

    overlap_weight: Annotated[float, Meta(ge=0)] = 1.0

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats | None:
        known = candidates.affinity(self.producer_type)
        if not known.columns:
            return None
        active = known.columns["active_blocks"]
        cost = self.overlap_weight * (known.total - known.matched) + active
        cost += known.columns["recent_miss_blocks"]
        return scores_by_rank(cost, active)


SCORERS: Final = (DecayedMisses,)

STRATEGIES: Final = (
    contract.Strategy(
        name="infera",
        idea="AMD Infera: blocks missed, blocks in flight, and recent misses that fade.",
        omissions=(
            "engines' events; hints about how long to cache a prompt; images; its formula "
            "ignores adapters"
        ),
        config=contract.config_of(
            contract.producer(BlockLoadSettings.type_name), contract.step(DecayedMisses.type_name)
        ),
    ),
)
