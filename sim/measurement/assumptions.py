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
        "The simulator models speculative decoding only if `--engine` enables it. The "
        "simulated acceptance of drafted tokens depends neither on the text nor on the load, and on "
        "the context length only as configured. Simulated drafters use no KV cache."
    ),
    (
        "The simulator does not model single experts of a mixture of experts: a layer takes "
        "equally long for all experts, and no expert is overloaded. A profile's expert curve "
        "depends on the number of tokens only."
    ),
    (
        "The simulator models KV cache outside the GPU only if `--cache` enables it. Simulated "
        "engines offload no other data, and read blocks from other pods only for a decode leg."
    ),
    (
        "The simulator models prefill and decode on different pods only if pods have roles "
        "(`--roles`). KV transfers share NICs, but not switches, and do not delay computation. The "
        "simulator does not model encode on different pods, pipeline parallelism inside a pod, "
        "data parallelism unless `--engine` enables it, and CUDA graphs for only some batch sizes."
    ),
    (
        "The simulator does not model images, audio and video, structured output, and several "
        "answers to one prompt."
    ),
    (
        "The simulator does not model the CPUs of a pod: tokenising many prompts at once slows "
        "nothing down, and the engine's front end takes equally long under any load."
    ),
    (
        "The simulator does not model network bandwidth other than that of KV transfers, lost "
        "packets, queues in gateways, and retries at endpoints that the picker did not name."
    ),
    (
        "The simulator does not model a tokenizer: the picker's estimate of tokens from bytes "
        "is exact in the simulator, but not in production."
    ),
    (
        "The simulator does not apply limits of output tokens: a simulated answer is as long as "
        "the trace specifies, whatever limit of output tokens the client sent."
    ),
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
        source="1.5 ms is fitted on two published runs of vLLM 0.19, casys-kaist/LLMServingSim; 2 ms, "
        "for several GPUs, is an assumption",
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
