"""Estimation of a profile for a model and a GPU that were not measured together."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from sim.engine.profiles import KV_TOKENS_MIN, EstimateError, KVWindow, Profile, ProfileError
from sim.estimation.gpus import Gpu
from sim.estimation.model_config import ModelShape
from sim.estimation.roofline import (
    CONTEXT_TOKENS,
    LAYER_TABLE_TOKENS,
    MEMORY_SHARE,
    TENSOR_PARALLEL_MAX,
    Efficiency,
    Fit,
    KvFormat,
    MemoryModel,
    Roofline,
    fitted,
    kind_of,
    memory_fit,
    pooled,
)

HOST_S: Final = 0.0015
HOST_S_SEVERAL: Final = 0.002
"""Time in seconds to schedule and launch a step on several GPUs, assumed as in the built-in profile
`qwen3-32b-h100-tp2`. `HOST_S` is the time on one GPU, as in all built-in profiles of one GPU.
"""
KV_ERROR_MAX: Final = 10.0
"""Maximum error of the KV-cache size that is stated, as a share. If hardly any memory is left for
the cache, a larger error has no meaning.
"""
_SEQUENCES: Final = 256
"""Number of sequences up to which the time of the output layer is approximated by a straight
line.
"""


class EstimateSettings(Struct, frozen=True, kw_only=True):
    """The GPU and the engine flags for which a profile is estimated."""

    gpu: Gpu
    tensor_parallel: int = 1
    kv_format: KvFormat = "auto"
    context_tokens: int = CONTEXT_TOKENS
    """Usual context length in tokens, which determines the cost of layers with sliding windows."""
    memory_share: float = MEMORY_SHARE
    """Share of the GPU memory that the engine uses (`--gpu-memory-utilization` of vLLM)."""
    max_num_seqs: int | None = None
    """Maximum number of sequences in a step; None for vLLM's default on the GPU."""
    max_num_batched_tokens: int | None = None
    """Maximum number of tokens in a step, raised to `max_num_seqs` if it is smaller; None for
    vLLM's default on the GPU.
    """
    max_model_len_tokens: int | None = None
    """Maximum number of tokens in prompt and answer together; None for the model's maximum."""
    as_unmeasured: bool = False
    """True to ignore all measurements on this GPU, as if only its data sheet were known."""


class DoesNotFitError(ProfileError):
    """The model does not fit into the memory of the chosen GPUs."""


def estimated_profile(
    shape: ModelShape,
    settings: EstimateSettings,
    *,
    name: str = "",
    efficiency: Efficiency | None = None,
    memory: MemoryModel | None = None,
) -> Profile:
    """Return the estimated profile of the model `shape`, with its error.

    `efficiency` and `memory`, if not None, replace the fitted values, to leave measurements out; if
    both are given, the profile has no error. Raises `DoesNotFitError`, and `ProfileError` if the
    attention heads cannot be divided among the GPUs.
    """
    _check_division(shape, settings.tensor_parallel)
    known = fitted() if efficiency is None or memory is None else None
    at = _roofline(shape, settings, efficiency)
    if memory is None:
        assert known is not None
        memory = known.memory
    sequences, batched = _limits(settings)
    fit = _fit(at, settings, memory)
    if fit.kv_tokens < KV_TOKENS_MIN:
        raise DoesNotFitError(_does_not_fit(shape, settings, memory, fit))
    degree = settings.tensor_parallel
    head_s, full_head_s = at.head_s(1), at.head_s(_SEQUENCES)
    table = [(tokens, at.step_s(tokens)) for tokens in LAYER_TABLE_TOKENS]
    last, before = table[-1], table[-2]
    kv_bytes = at.kv_bytes_a_layer * shape.reach(settings.context_tokens)
    return Profile(
        name=name or f"{shape.name.rpartition('/')[2].lower()}-{settings.gpu.name}-tp{degree}",
        model=shape.name,
        kv_tokens=fit.kv_tokens,
        max_model_len_tokens=settings.max_model_len_tokens or shape.max_model_len_tokens,
        kv_bytes_per_token=round(kv_bytes * (1 if shape.latent else degree)),
        kv_window=_window(at),
        layers=shape.layers,
        linear_tokens=tuple(tokens for tokens, _ in table),
        linear_s=tuple(seconds for _, seconds in table),
        linear_s_per_token=(last[1] - before[1]) / (last[0] - before[0]),
        all_reduce_s=at.all_reduce_s(0),
        all_reduce_s_per_token=at.all_reduce_s(1) - at.all_reduce_s(0),
        prefill_s=shape.layers * at.efficiency.prefill_launch_s,
        pair_s=at.pair_s,
        decode_s=shape.layers * at.efficiency.decode_launch_s,
        decode_s_per_context_token=at.decode_s_per_context_token,
        mixed_decode_factor=at.efficiency.mixed_decode_factor,
        head_s=head_s,
        head_s_per_sequence=(full_head_s - head_s) / (_SEQUENCES - 1),
        host_s=HOST_S if degree == 1 else HOST_S_SEVERAL,
        max_num_seqs=sequences,
        max_num_batched_tokens=batched,
        estimated=_error(at, settings, fit, memory) if known is not None else None,
    )


def _window(at: Roofline) -> KVWindow | None:
    """Return the sizes of the layers with a sliding window for a profile, or None if the model has
    no such layers.
    """
    shape = at.shape
    if not shape.windowed_layers:
        return None
    layer_bytes = at.kv_bytes_a_layer * (1 if shape.latent else at.tensor_parallel)
    return KVWindow(
        tokens=shape.window_tokens,
        bytes_per_token=round(layer_bytes * shape.windowed_layers),
        other_bytes_per_token=round(layer_bytes * (shape.layers - shape.windowed_layers)),
    )


def _error(
    at: Roofline, settings: EstimateSettings, fit: Fit, memory: MemoryModel
) -> EstimateError:
    """Return the published estimation error for models of this kind on this GPU.

    The error of the KV-cache size is known as a share of the GPU's memory. The less memory is left
    for the cache, the larger is its relative error.
    """
    known = fitted()
    measured = at.gpu.name in known.gpus and not settings.as_unmeasured
    steps = (known.measured if measured else known.unmeasured)[kind_of(at.shape, at.gpu)]
    kept = fit.kv_tokens * at.kv_bytes_a_layer * at.shape.reach(at.context_tokens)
    wrong = memory.error_of(at.shape) * at.gpu.memory_bytes / kept
    return EstimateError(
        prefill=steps.prefill, decode=steps.decode, kv_tokens=min(KV_ERROR_MAX, round(wrong, 2))
    )


def gpus_needed(shape: ModelShape, settings: EstimateSettings, memory: MemoryModel) -> int | None:
    """Return the smallest number of GPUs into whose memory the model fits, among the powers of two
    that divide its attention heads; None if no number up to `TENSOR_PARALLEL_MAX` suffices.
    """
    degree = 1
    while degree <= TENSOR_PARALLEL_MAX:
        tried = replace(settings, tensor_parallel=degree)
        if shape.heads % degree == 0:
            fit = _fit(_roofline(shape, tried, None), tried, memory)
            if fit.kv_tokens >= KV_TOKENS_MIN:
                return degree
        degree *= 2
    return None


def _roofline(
    shape: ModelShape, settings: EstimateSettings, efficiency: Efficiency | None
) -> Roofline:
    gpu = settings.gpu
    if efficiency is None:
        known = fitted().gpus
        mine = None if settings.as_unmeasured else known.get(gpu.name)
        efficiency = mine or pooled(known, gpu)
    return Roofline(
        shape=shape,
        gpu=gpu,
        efficiency=efficiency,
        tensor_parallel=settings.tensor_parallel,
        kv_format=settings.kv_format,
        context_tokens=settings.context_tokens,
    )


def _limits(settings: EstimateSettings) -> tuple[int, int]:
    """Return (`max_num_seqs`, `max_num_batched_tokens`) of the engine: the given values, or vLLM's
    defaults on the GPU. The second value is at least the first.
    """
    sequences, batched = settings.gpu.engine_defaults
    sequences = settings.max_num_seqs or sequences
    return sequences, max(sequences, settings.max_num_batched_tokens or batched)


def _fit(at: Roofline, settings: EstimateSettings, memory: MemoryModel) -> Fit:
    sequences, batched = _limits(settings)
    return memory_fit(
        at, memory, memory_share=settings.memory_share, sequences=sequences, batched=batched
    )


def _check_division(shape: ModelShape, degree: int) -> None:
    if shape.heads % degree:
        raise ProfileError(
            f"--tp {degree}: expected a divisor of the {shape.heads} attention heads of "
            f"{shape.name}."
        )


def _does_not_fit(
    shape: ModelShape, settings: EstimateSettings, memory: MemoryModel, fit: Fit
) -> str:
    gpu, degree = settings.gpu, settings.tensor_parallel
    usable = settings.memory_share * gpu.memory_bytes
    needed = gpus_needed(shape, settings, memory)
    advice = (
        f"it needs --tp {needed}" if needed else f"no --tp up to {TENSOR_PARALLEL_MAX} is enough"
    )
    return (
        f"{shape.name} does not fit on {degree} x {gpu.name}: each has {usable / 1e9:.1f} GB for "
        f"vLLM, its share of the weights is {fit.weight_bytes / 1e9:.1f} GB, activations and "
        f"buffers {fit.other_bytes / 1e9:.1f} GB; {advice}."
    )
