"""What the simulator leaves out, and which of its constants come from one set-up only."""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from sim.engine.profiles import Profile
from sim.measurement.summaries import AssumptionSummary

NOT_MODELLED: Final = (
    (
        "Speculative decoding, but where `--engine` says so: then acceptance depends on no text and no "
        "load, on the length of the context only as you tell it, and drafters take no KV cache."
    ),
    (
        "Mixtures of experts: layers cost the same whichever experts tokens go to, and no expert is "
        "overloaded; a profile's curve of experts tells of tokens alone."
    ),
    (
        "KV cache outside the GPU, but where `--cache` says so: nothing else is offloaded, and nothing "
        "fetched from other pods."
    ),
    (
        "Prefill and decode on different pods, pipeline parallelism inside a pod, data parallelism but "
        "where `--engine` says so, CUDA graphs of some batch sizes only."
    ),
    "Images, audio and video; structured output; several answers to one prompt.",
    (
        "The processors of a pod: tokenising many prompts at once slows nothing down, and the front end "
        "takes the same time under any load."
    ),
    (
        "The network's bandwidth, lost packets, gateways' own queues, and their retries beyond what the "
        "picker has named."
    ),
    "The tokenizer: the picker's estimate of tokens by bytes is exact here, live it is not.",
    "Stopping early: an answer is as long as the trace says, whatever limit its client sent.",
)
"""A sentence each."""


class Assumption(Struct, frozen=True, kw_only=True):
    """A constant of `Profile` that comes from one set-up: a profile may say another."""

    field: str
    says: str
    factor: float
    """From the unit of the field to that of the range."""
    unit: str
    low: float
    high: float
    source: str


ASSUMED: Final = (
    Assumption(
        field="frontend_s",
        says="front end, a request",
        factor=1e3,
        unit="ms",
        low=5,
        high=20,
        source="with the next, what unqueued requests of the llm-d guide optimized-baseline take "
        "longer than their prefill: 55 to 85 ms at 7,200 tokens; how it divides is an assumption",
    ),
    Assumption(
        field="frontend_s_per_token",
        says="front end, a prompt token",
        factor=1e6,
        unit="µs",
        low=5,
        high=11,
        source="as above",
    ),
    Assumption(
        field="shared_context_factor",
        says="cost of reading context that other requests of the batch read too",
        factor=1,
        unit="",
        low=0.5,
        high=1,
        source="fitted on the prefix-aware half of the llm-d guide; at 1 its throughput is 17 % "
        "below the published",
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
        says="how far a decode pass waits for its longest context",
        factor=1,
        unit="",
        low=0,
        high=0.1,
        source="0 on an RTX 4090, 0.05 to 0.1 on an RTX PRO 6000; not known of others",
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
    """As summaries have them: each constant with its value in every profile of the run."""
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
