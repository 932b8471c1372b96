"""Effects that the simulator does not model, and constants of the model that were measured on one
set-up only.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from sim.engine.profiles import Profile
from sim.measurement.summaries import AssumptionSummary

NOT_MODELLED: Final = (
    (
        "Speculative decoding, unless `--engine` enables it. Acceptance then depends neither on "
        "the text nor on the load, and on the context length only as configured. Drafters use no "
        "KV cache."
    ),
    (
        "Mixtures of experts: a layer costs the same for all experts, and no expert is "
        "overloaded. A profile's expert curve depends on the number of tokens only."
    ),
    (
        "KV cache outside the GPU, unless `--cache` enables it. No other data is offloaded, and "
        "no blocks are fetched from other pods."
    ),
    (
        "Prefill and decode on different pods, pipeline parallelism inside a pod, data "
        "parallelism unless `--engine` enables it, and CUDA graphs for only some batch sizes."
    ),
    "Images, audio and video; structured output; several answers to one prompt.",
    (
        "The CPUs of a pod: tokenising many prompts at once slows nothing down, and the front end "
        "takes the same time under any load."
    ),
    (
        "Network bandwidth, lost packets, queues in gateways, and retries beyond the endpoints "
        "that the picker named."
    ),
    "The tokenizer: the picker's token estimate from bytes is exact in the simulator, but not in production.",
    "Stopping early: an answer is as long as the trace specifies, regardless of the limit that its client sent.",
)
"""Effects that the simulator does not model, one text each; reports list them."""


class Assumption(Struct, frozen=True, kw_only=True):
    """A constant of an engine `Profile` that was measured or assumed for one set-up.

    A profile file can set another value.
    """

    field: str
    says: str
    factor: float
    """Factor that converts the unit of the profile's field to `unit`, the unit of `low` and `high`."""
    unit: str
    low: float
    high: float
    source: str


ASSUMED: Final = (
    Assumption(
        field="frontend_s",
        says="front end per request",
        factor=1e3,
        unit="ms",
        low=5,
        high=20,
        source="requests of the llm-d guide optimized-baseline that do not queue take 55 to 85 ms at "
        "7,200 tokens beyond their prefill; the division of this time into one part per request and "
        "one per prompt token is an assumption",
    ),
    Assumption(
        field="frontend_s_per_token",
        says="front end per prompt token",
        factor=1e6,
        unit="µs",
        low=5,
        high=11,
        source="as for frontend_s",
    ),
    Assumption(
        field="shared_context_factor",
        says="relative cost of reading context that other requests of the batch also read",
        factor=1,
        unit="",
        low=0.5,
        high=1,
        source="fitted on the prefix-aware half of the llm-d guide; at 1 its throughput is 17 % "
        "below the published throughput",
    ),
    Assumption(
        field="host_s",
        says="scheduling and launching a pass",
        factor=1e3,
        unit="ms",
        low=1,
        high=2,
        source="fitted on two published runs of vLLM 0.19, casys-kaist/LLMServingSim",
    ),
    Assumption(
        field="skew",
        says="share by which a decode pass waits for its longest context",
        factor=1,
        unit="",
        low=0,
        high=0.1,
        source="0 on an RTX 4090, 0.05 to 0.1 on an RTX PRO 6000; not known for other GPUs",
    ),
    Assumption(
        field="adapter_load_s",
        says="loading an adapter",
        factor=1,
        unit="s",
        low=0.3,
        high=5,
        source="an assumption: from disk or an object store",
    ),
)


def assumptions_of(profiles: Iterable[Profile]) -> list[AssumptionSummary]:
    """Return a summary of each assumed constant, with its value in each of `profiles`."""
    known = {profile.name: profile for profile in profiles}
    return [
        AssumptionSummary(
            constant=one.field,
            says=one.says,
            unit=one.unit,
            values={
                name: round(one.factor * getattr(profile, one.field), 6)
                for name, profile in known.items()
            },
            low=one.low,
            high=one.high,
            source=one.source,
        )
        for one in ASSUMED
    ]
