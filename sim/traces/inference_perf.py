"""Reader of workload files of kubernetes-sigs/inference-perf (YAML), from which requests are
generated.

Supported are `data` of the types shared_prefix (also with `enable_multi_turn_chat`),
conversation_replay, synthetic and random, and `load` of the types constant, poisson and concurrent
with stages. Other types, sweeps and media raise an error that names the field. Lengths and sharing
of the generated prompts follow the file; their words do not.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
import yaml
from msgspec import Meta, Struct, field

from sim.traces import workloads
from sim.traces.arrival import FieldError, field_error
from sim.traces.lengths import Kind, Spread, fixed
from sim.traces.reading import DocumentFormat

_NUMBER_MAX: Final = 1_000_000_000
"""Maximum of every count, length, rate, duration and weight in a workload file, except `max` of a
distribution. It excludes the infinity of YAML.
"""
_Positive = Annotated[int, Meta(ge=1, le=_NUMBER_MAX)]
_Count = Annotated[int, Meta(ge=0, le=_NUMBER_MAX)]
_Above0 = Annotated[float, Meta(gt=0, le=_NUMBER_MAX)]
_From0 = Annotated[float, Meta(ge=0, le=_NUMBER_MAX)]


class _Distribution(Struct):
    mean: _From0
    type: Kind = "normal"
    min: _From0 = 0.0
    max: float = float("inf")
    std_dev: _From0 = 0.0

    def spread(self) -> Spread:
        return Spread(
            type=self.type, mean=self.mean, std_dev=self.std_dev, min=self.min, max=self.max
        )


class _SharedPrefix(Struct):
    num_groups: _Positive = field(default=10)
    num_prompts_per_group: _Positive = 10
    num_unique_system_prompts: _Positive | None = None
    """Alternative name of `num_groups` in inference-perf. `num_users_per_system_prompt` is that of
    `num_prompts_per_group`.
    """
    num_users_per_system_prompt: _Positive | None = None
    system_prompt_len: _Count | _Distribution = 100
    question_len: _Positive = 50
    output_len: _Positive = 50
    question_distribution: _Distribution | None = None
    output_distribution: _Distribution | None = None
    enable_multi_turn_chat: bool = False
    max_model_len: _Positive = 225_000


class _Conversations(Struct):
    num_conversations: _Positive = 100
    seed: int | None = None
    shared_system_prompt_len: _Count = 0
    dynamic_system_prompt_len: _Distribution | None = None
    turns_per_conversation: _Distribution | None = None
    input_tokens_per_turn: _Distribution | None = None
    output_tokens_per_turn: _Distribution | None = None
    tool_call_latency_sec: _Distribution | None = None
    max_model_len: _Positive = 225_000


class _Data(Struct):
    type: Literal["shared_prefix", "conversation_replay", "synthetic", "random"]
    shared_prefix: _SharedPrefix | None = None
    conversation_replay: _Conversations | None = None
    input_distribution: _Distribution | None = None
    output_distribution: _Distribution | None = None
    multimodal: Any = None


class _Stage(Struct):
    rate: _Above0 | None = None
    duration: _Above0 | None = None
    concurrency_level: _Positive | None = None
    num_requests: _Positive | None = None


class _Split(Struct):
    name: str
    split: _From0


class _Load(Struct):
    type: Literal["constant", "poisson", "concurrent"] = "constant"
    interval: _From0 = 1.0
    """Pause in seconds between two stages of the load."""
    stages: list[_Stage] = []
    sweep: Any = None
    base_seed: int | None = None
    lora_traffic_split: list[_Split] | None = None


class _Document(Struct):
    data: _Data
    load: _Load


def workload_of(document: bytes) -> workloads.Generated:
    """Return the workload that an inference-perf file describes, together with the seed that the
    file defines. Raises `FieldError` if the file is invalid.
    """
    try:
        tree = yaml.safe_load(document)
    except (yaml.YAMLError, ValueError) as problem:  # ValueError: a date that does not exist
        raise FieldError("", f"Expected YAML: {problem}".replace("\n", " ")) from None
    try:
        read = msgspec.convert(tree, _Document)
    except msgspec.ValidationError as problem:
        raise field_error(problem, _Document) from None
    load, data = read.load, read.data
    if load.sweep is not None:
        raise FieldError("load.sweep", "Expected stages: a sweep depends on what is measured")
    if not load.stages:
        raise FieldError("load.stages", "Expected at least one stage")
    if data.multimodal is not None:
        raise FieldError("data.multimodal", "Expected text: media are not simulated")
    stages = tuple(
        _concurrency(stage, f"load.stages[{place}]")
        if load.type == "concurrent"
        else _rate(stage, f"load.stages[{place}]")
        for place, stage in enumerate(load.stages)
    )
    splits = tuple((one.name, one.split) for one in load.lora_traffic_split or ())
    if splits and not any(split for _, split in splits):
        raise FieldError("load.lora_traffic_split", "Expected at least one split above 0")
    seed = load.base_seed
    if data.conversation_replay is not None and data.conversation_replay.seed is not None:
        seed = data.conversation_replay.seed
    workload = workloads.Workload(
        content=_content(data),
        load=_load(load, stages),
        adapters=workloads.Adapters(weights=splits),
        source="inference-perf",
    )
    return workloads.Generated(workload=workload, seed=seed)


def _load(
    load: _Load, stages: tuple[workloads.Stage | workloads.Concurrency, ...]
) -> workloads.OpenLoad | workloads.ClosedLoad:
    if load.type == "concurrent":
        lanes = tuple(stage for stage in stages if isinstance(stage, workloads.Concurrency))
        return workloads.ClosedLoad(stages=lanes, gap_s=load.interval)
    rates = tuple(stage for stage in stages if isinstance(stage, workloads.Stage))
    burstiness = 1.0 if load.type == "poisson" else 0.0
    return workloads.OpenLoad(stages=rates, gap_s=load.interval, burstiness=burstiness)


def _rate(stage: _Stage, where: str) -> workloads.Stage:
    if stage.rate is None or stage.duration is None:
        raise FieldError(where, "Expected rate and duration")
    return workloads.Stage(rate_per_s=stage.rate, duration_s=stage.duration)


def _concurrency(stage: _Stage, where: str) -> workloads.Concurrency:
    if stage.concurrency_level is None or stage.num_requests is None:
        raise FieldError(where, "Expected concurrency_level and num_requests")
    return workloads.Concurrency(lanes=stage.concurrency_level, requests=stage.num_requests)


def _content(data: _Data) -> workloads.Content:
    if data.type == "shared_prefix":
        if data.shared_prefix is None:
            raise FieldError("data.shared_prefix", "Expected this field, found none")
        return _shared_prefix(data.shared_prefix)
    if data.type == "conversation_replay":
        return _conversations(data.conversation_replay or _Conversations())
    return workloads.Lengths(
        prompt=_spread(data.input_distribution, 512, "input_distribution"),
        output=_spread(data.output_distribution, 128, "output_distribution"),
    )


def _shared_prefix(data: _SharedPrefix) -> workloads.SharedPrefix:
    system = data.system_prompt_len
    return workloads.SharedPrefix(
        groups=data.num_unique_system_prompts or data.num_groups,
        prompts_per_group=data.num_users_per_system_prompt or data.num_prompts_per_group,
        system_tokens=system if isinstance(system, int) else round(system.mean),
        question=_spread(
            data.question_distribution, data.question_len, "shared_prefix.question_distribution"
        ),
        output=_spread(
            data.output_distribution, data.output_len, "shared_prefix.output_distribution"
        ),
        multi_turn=data.enable_multi_turn_chat,
        context_tokens_max=data.max_model_len,
    )


def _conversations(data: _Conversations) -> workloads.Conversations:
    return workloads.Conversations(
        conversations=data.num_conversations,
        shared_tokens=data.shared_system_prompt_len,
        own=_spread(
            data.dynamic_system_prompt_len, 0, "conversation_replay.dynamic_system_prompt_len"
        ),
        turns=_spread(data.turns_per_conversation, 5, "conversation_replay.turns_per_conversation"),
        question=_spread(
            data.input_tokens_per_turn, 100, "conversation_replay.input_tokens_per_turn"
        ),
        output=_spread(
            data.output_tokens_per_turn, 100, "conversation_replay.output_tokens_per_turn"
        ),
        think_s=_spread(data.tool_call_latency_sec, 0, "conversation_replay.tool_call_latency_sec"),
        context_tokens_max=data.max_model_len,
    )


def _spread(distribution: _Distribution | None, otherwise: float, where: str) -> Spread:
    if distribution is None:
        return fixed(otherwise)
    try:
        return distribution.spread()
    except FieldError as problem:
        field = f"data.{where}.{problem.field}".removesuffix(".")
        raise FieldError(field, problem.expected) from None


INFERENCE_PERF: Final = DocumentFormat(
    name="inference-perf",
    recognises=lambda head: b"\ndata:" in b"\n" + head and b"\nload:" in b"\n" + head,
    generated=workload_of,
)
