"""Fit the efficiencies of `sim profile estimate`, and measure the errors of its estimates.

    python -m docs.estimates --truth DIR

The command fits to docs/kernel_times.json, and writes sim/estimation/efficiencies.toml and
docs/estimates.json. With --truth it also compares estimates with the recordings in DIR, as `sim
validate --profile` does; without it, earlier comparisons are kept. `python -m docs.reference` then
writes the tables of docs/estimates.md.

Each measured model is left out twice. First only that model is left out: the efficiencies of its
GPU come from the other models that were measured there. Then the whole GPU is left out: its
efficiencies are means over the other GPUs. The error of an estimate is its worst over steps of
several sizes.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from docs import kernel_times
from docs.kernel_times import KernelTimes
from sim.engine.profiles import Profile, StepWork, find_profile
from sim.estimation import roofline
from sim.estimation.estimate import EstimateSettings, estimated_profile
from sim.estimation.gpus import gpus
from sim.estimation.model_config import ModelShape
from sim.estimation.roofline import (
    KINDS,
    Efficiency,
    MemoryModel,
    Roofline,
    StepError,
    kind_of,
    pooled,
)
from sim.output import write_whole
from sim.truth.judgement import Judgement
from sim.truth.validate import judge

RESULTS: Final = Path(__file__).with_name("estimates.json")
EFFICIENCIES: Final = Path(roofline.__file__).with_name("efficiencies.toml")
START: Final = Efficiency(
    linear_bandwidth=0.8, linear_compute=0.75, fp8_compute=0.6, expert_bandwidth=0.6,
    packed_bandwidth=0.6, expert_compute=0.4, latent_launch_s=3e-5, prefill_compute=0.55, prefill_launch_s=1e-5, decode_bandwidth=0.8,
    decode_launch_s=1e-5, all_reduce_share=0.6, all_reduce_launch_s=5e-6,
    elementwise_bandwidth=1.0, mixed_decode_factor=1.0,
)  # fmt: skip
"""Efficiencies with which the fit starts."""
CACHED_BYTES: Final = 1.5e8
"""Size in bytes up to which keys and values, or experts, of one layer may lie in a GPU's cache, so
that the bandwidth of its memory does not apply. The fit ignores smaller ones, except decode steps
of one request with 1,024 tokens.
"""
PROMPTS: Final = (512, 2048, 8192)
BATCHES: Final = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (32, 4096), (8, 8192))
BUILT_IN: Final = (
    ("llama-3.1-8b-h100-tp1", "llama-3.1-8b", "h100", 1),
    ("qwen3-32b-h100-tp2", "qwen3-32b", "h100", 2),
    ("llama-3.1-70b-h100-tp4", "llama-3.3-70b", "h100", 4),
    ("llama-3.1-70b-h100-tp8", "llama-3.3-70b", "h100", 8),
    ("llama-3.1-8b-rtx-4090-tp1", "llama-3.1-8b", "rtx-4090", 1),
    ("llama-3.1-8b-rtx-pro-6000-tp1", "llama-3.1-8b", "rtx-pro-6000", 1),
)
"""Built-in profiles that were measured, as (profile, model configuration, GPU, degree of tensor
parallelism).
"""


class MeasuredCache(Struct, frozen=True, kw_only=True):
    """A KV cache whose size an engine reported, and the settings of that engine."""

    model: str
    gpu: str
    tensor_parallel: int
    sequences: int
    batched: int
    kv_tokens: int = 0
    kv_bytes: float = 0.0
    """Size of the KV cache in bytes on each GPU, if the engine reported bytes; 0 if it reported
    `kv_tokens`.
    """
    memory_share: float = 0.9
    """Value of `--gpu-memory-utilization`; 0.9 is the default of vLLM before 0.20."""
    source: str


CACHES: Final = (
    MeasuredCache(
        model="llama-3.1-8b", gpu="rtx-4090", tensor_parallel=1, sequences=256, batched=2048,
        kv_tokens=41_408, source="vLLM 0.19, casys-kaist/LLMServingSim, num_gpu_blocks 2,588",
    ),
    MeasuredCache(
        model="qwen3-32b", gpu="h100", tensor_parallel=2, sequences=1024, batched=8192,
        kv_tokens=307_328, source="llm-d, guide optimized-baseline",
    ),
    MeasuredCache(
        model="llama-3.1-8b", gpu="rtx-3090", tensor_parallel=1, sequences=256, batched=20_000,
        kv_tokens=1952 * 16, source="vLLM 0.6, vllm-project/vllm issue 10517, --max-model-len 20000",
    ),
    MeasuredCache(
        model="llama-3.1-8b", gpu="rtx-3090", tensor_parallel=1, sequences=256, batched=29_000,
        kv_tokens=1478 * 16, source="the same, --max-model-len 29000",
    ),
    MeasuredCache(
        model="qwen3-235b-a22b-fp8", gpu="h100", tensor_parallel=4, sequences=1024, batched=8192,
        kv_tokens=178_880, source="vLLM 0.9, vllm-project/vllm issue 21348",
    ),
    MeasuredCache(
        model="gpt-oss-120b", gpu="h100", tensor_parallel=1, sequences=1024, batched=1024,
        memory_share=0.95, kv_bytes=1.71 * 2**30,
        source="vLLM 0.11, vllm-project/vllm issue 27508",
    ),
)  # fmt: skip
RECORDED: Final[Mapping[str, tuple[str, EstimateSettings]]] = {
    "rtx4090-llama-3.1-8b": (
        "llama-3.1-8b",
        EstimateSettings(
            gpu=gpus()["rtx-4090"], max_num_seqs=256, max_num_batched_tokens=2048,
            memory_share=0.9, as_unmeasured=True,
        ),
    ),
    "rtxpro6000-llama-3.1-8b": (
        "llama-3.1-8b",
        EstimateSettings(
            gpu=gpus()["rtx-pro-6000"], max_num_seqs=128, max_num_batched_tokens=2048,
            memory_share=0.9, as_unmeasured=True,
        ),
    ),
    "llm-d-ladder": (
        "qwen3-32b",
        EstimateSettings(
            gpu=gpus()["h100"], tensor_parallel=2, memory_share=0.9, as_unmeasured=True
        ),
    ),
}  # fmt: skip
"""Recordings of `sim validate` with times, by name: the model, and the settings of its engine for
an estimate that uses no measurement of its GPU.
"""
_Floats = npt.NDArray[np.float64]
Residuals = Callable[[Efficiency], list[float]]


class Left(Struct, frozen=True, kw_only=True):
    """The worst errors of an estimate that was made without its own measurement, as shares; None
    for a phase that was not measured.
    """

    what: str
    kind: str
    without: str
    """Measurements without which the estimate was made: `model` (those of the model on this GPU) or
    `gpu` (all on this GPU).
    """
    prefill: float | None
    decode: float | None


class LeftCache(Struct, frozen=True, kw_only=True):
    """The size of a KV cache on each GPU, measured and estimated without measurements on the same
    GPU.
    """

    what: str
    experts: bool
    measured_gb: float
    estimated_gb: float
    error: float
    """Estimated minus measured size, as a share of the GPU's memory."""


class Results(Struct, frozen=True, kw_only=True):
    """The content of docs/estimates.json."""

    left: list[Left]
    built_in: list[Left]
    caches: list[LeftCache]
    efficiencies: dict[str, Efficiency]
    judged: list[Judgement] = []
    """Comparisons of estimated profiles with recordings of whole runs. The estimates use no
    measurement of the recording's GPU.
    """


def main() -> int:
    """Fit the efficiencies, measure the errors of estimates, and write both files. Return the exit
    code.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--truth", type=Path, metavar="DIR", help="folder of recordings for `sim validate`"
    )
    truth: Path | None = parser.parse_args().truth
    measured = kernel_times.read()
    efficiencies = {gpu: rounded(one) for gpu, one in fit_all(measured).items()}
    left = [*left_out(measured, efficiencies)]
    built_in = [*built_in_left_out(measured, efficiencies)]
    caches = [*caches_left_out()]
    results = Results(
        left=left,
        built_in=built_in,
        caches=caches,
        efficiencies=efficiencies,
        judged=read().judged if truth is None and RESULTS.exists() else [],
    )
    write_whole(EFFICIENCIES, as_toml(results).encode())
    roofline.fitted.cache_clear()
    if truth is not None:
        results = replace(results, judged=[*judged_by(truth)])
    write_whole(RESULTS, msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    sys.stdout.write(f"{len(left) + len(built_in)} estimates without their own measurement\n")
    return 0


def read() -> Results:
    """Return the content of docs/estimates.json from the last run."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results)


# --- fitting ----------------------------------------------------------------------------------------


def fit_all(measured: Sequence[KernelTimes]) -> dict[str, Efficiency]:
    """Return the fitted efficiencies of each GPU.

    An efficiency that was not measured on a GPU is taken from the others (`completed`).
    """
    partial = {gpu: fit_gpu(measured, gpu) for gpu in dict.fromkeys(one.gpu for one in measured)}
    return {gpu: completed(gpu, partial) for gpu in partial}


def fit_gpu(measured: Iterable[KernelTimes], gpu: str) -> dict[str, float]:
    """Return those efficiencies of a GPU that follow from its own measurements, by field."""
    here = [one for one in measured if one.gpu == gpu]
    found: dict[str, float] = {}
    for fields, residuals in _parts(here):
        if residuals(START):
            found |= _least_squares(fields, residuals, found)
    factors = [one.mixed_decode_factor for one in here if one.mixed_decode_factor]
    if factors:
        found["mixed_decode_factor"] = math.exp(sum(map(math.log, factors)) / len(factors))
    return found


def completed(gpu: str, partial: Mapping[str, Mapping[str, float]]) -> Efficiency:
    """Return all efficiencies of a GPU.

    Missing ones are the geometric mean over the other GPUs, or the starting value if no GPU has
    them. An efficiency of all-reduces is taken only from GPUs that are connected alike.
    `mixed_decode_factor` of GPUs with links is 1 if it was not measured there.
    """
    means = {}
    for field in Efficiency.__struct_fields__:
        known = [
            one[field]
            for name, one in partial.items()
            if field in one and (name != gpu or len(partial) == 1)
            and (not field.startswith("all_reduce") or gpus()[name].peer_to_peer == gpus()[gpu].peer_to_peer)
        ]  # fmt: skip
        means[field] = (
            math.exp(sum(map(math.log, known)) / len(known)) if known else getattr(START, field)
        )
    # Attention beside a chunk was measured on cards with FlashAttention 2 alone; runs on H100s (the
    # published llm-d ladder) are matched without such a factor.
    if gpus()[gpu].peer_to_peer == "link":
        means["mixed_decode_factor"] = 1.0
    return Efficiency(**{**means, **partial[gpu]})


def _parts(here: Sequence[KernelTimes]) -> list[tuple[tuple[str, ...], Residuals]]:
    """Return groups of efficiency fields, each with a function that returns the errors which depend
    on this group: logarithms of estimate over measurement.
    """
    plain = [one for one in here if not one.attention_has_products]

    def of(
        times: Iterable[KernelTimes], errors: Callable[[KernelTimes, Roofline], Iterable[float]]
    ) -> Residuals:
        listed = list(times)
        return lambda efficiency: [
            error for one in listed for error in errors(one, _roofline(one, efficiency))
        ]

    dense = [one for one in plain if not one.experts and not one.quantization]
    packed = [one for one in here if one.model == "gpt-oss-20b"]
    experts = [one for one in here if one.experts and one not in packed]
    alike = [
        one for one in here if gpus()[one.gpu].peer_to_peer == "link" or one.tensor_parallel == 2
    ]  # vLLM has other all-reduces between more than two GPUs without links
    return [
        (
            ("linear_bandwidth", "linear_compute"),
            of(dense, lambda one, at: [_log(at.products_s(m), s) for m, s in one.products]),
        ),
        (
            ("fp8_compute",),
            of(
                (one for one in plain if one.quantization == "fp8"),
                lambda one, at: [_log(at.products_s(m), s) for m, s in one.products if m >= 512],
            ),
        ),
        (
            ("expert_bandwidth", "expert_compute"),
            of(experts, _expert_errors),
        ),
        (("packed_bandwidth",), of(packed, _expert_errors)),
        (
            ("prefill_compute", "prefill_launch_s"),
            of(plain, lambda one, at: [_log(_prefill_s(at, n), s) for n, s in one.prefill]),
        ),
        (
            ("decode_bandwidth", "decode_launch_s"),
            of(
                plain,
                lambda one, at: [
                    _log(_decode_s(at, requests, context), s)
                    for requests, context, s in one.decode
                    if (requests, context) == (1, 1024)  # hardly more than the launch
                    or requests * context * at.kv_bytes_a_layer > CACHED_BYTES
                ],
            ),
        ),
        (
            ("all_reduce_share", "all_reduce_launch_s"),
            of(alike, lambda one, at: [_log(at.all_reduce_s(m), s) for m, s in one.all_reduces]),
        ),
        (
            ("elementwise_bandwidth",),
            of(
                here,
                lambda one, at: [_log(at.elementwise_s(m), s) for m, s in one.elementwise if m > 1],
            ),
        ),
        (
            ("latent_launch_s",),
            of(
                (one for one in here if one.attention_has_products),
                lambda one, at: [*_prefill_logs(one, at), *_decode_logs(one, at)],
            ),
        ),
    ]


def _expert_errors(one: KernelTimes, at: Roofline) -> list[float]:
    return [
        _log(at.experts_s(m), s)
        for m, s in one.experts
        if at.expert_bytes_a_layer(m) > CACHED_BYTES
    ]


def _roofline(one: KernelTimes, efficiency: Efficiency) -> Roofline:
    return Roofline(
        shape=_shape(one.model, one.quantization),
        gpu=gpus()[one.gpu],
        efficiency=efficiency,
        tensor_parallel=one.tensor_parallel,
    )


@cache
def _shape(model: str, quantization: str = "") -> ModelShape:
    return kernel_times.shape_of(model, quantization)


def _prefill_s(at: Roofline, tokens: int) -> float:
    """Return the estimated seconds of attention for a whole prompt of `tokens`, in all layers."""
    launches = at.shape.layers * at.efficiency.prefill_launch_s
    return launches + replace(at, context_tokens=tokens).pair_s * tokens * tokens / 2


def _decode_s(at: Roofline, requests: int, context: int) -> float:
    """Return the estimated seconds of attention for one decode step of `requests` with `context`
    tokens each, in all layers.
    """
    launches = at.shape.layers * at.efficiency.decode_launch_s
    return (
        launches
        + replace(at, context_tokens=context).decode_s_per_context_token * requests * context
    )


def _log(estimate: float, measured: float) -> float:
    return math.log(estimate / measured)


def _least_squares(
    fields: Sequence[str], residuals: Residuals, found: Mapping[str, float]
) -> dict[str, float]:
    """Return the values of `fields` with the least squares of `residuals`, by the method of
    Levenberg and Marquardt in logarithms.

    Each value is from a tenth to ten times its value in `START`.
    """
    start = replace(START, **found)

    def errors(logs: _Floats) -> _Floats:
        values = dict(zip(fields, np.exp(logs).tolist(), strict=True))
        return np.array(residuals(replace(start, **values)))

    at = np.log([getattr(start, field) for field in fields])
    low = np.log([getattr(START, field) for field in fields]) - math.log(10.0)
    here, damping = errors(at), 1e-3
    for _ in range(60):
        slopes = np.array([(errors(at + step) - here) / 1e-4 for step in np.eye(len(at)) * 1e-4]).T
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.eye(len(at)), -slopes.T @ here)
        # No constant is ten times as large or as small as where the fit begins.
        tried = np.clip(at + np.clip(move, -1.0, 1.0), low, low + 2 * math.log(10.0))
        there = errors(tried)
        if there @ there > here @ here:
            damping *= 4.0
            continue
        done = here @ here - there @ there < 1e-10
        at, here, damping = tried, there, max(damping / 3, 1e-9)
        if done:
            break
    return dict(zip(fields, np.exp(at).tolist(), strict=True))


def rounded(efficiency: Efficiency) -> Efficiency:
    """Return the efficiencies rounded to three significant digits, as the TOML file has them."""
    return Efficiency(
        **{name: float(f"{value:.3g}") for name, value in msgspec.to_builtins(efficiency).items()}
    )


def fit_memory(caches: Sequence[MeasuredCache]) -> MemoryModel:
    """Fit the memory model of engines to the reported KV caches of dense models whose steps have at
    most 8,192 tokens; only the memory of the sampler is fitted.

    The other constants are assumptions. inference-sim has 0.15 GiB for a driver, and 0.6 GiB with
    NCCL: `fixed_bytes` is the former plus half a GiB of kernels and fragments,
    `communication_bytes` is the difference of both. `expert_bytes` is that of inference-sim for
    activations of models with experts, 8 GiB in steps of 8,192 tokens.
    """
    model = MemoryModel(
        fixed_bytes=0.65 * 2**30, communication_bytes=0.45 * 2**30, sampler_bytes=0.0,
        expert_bytes=2.0**20, dense_error=0.0, expert_error=0.0,
    )  # fmt: skip
    needed = []
    for one in caches:
        at = _cache_roofline(one)
        if at.shape.experts is None and one.batched <= 8192:  # else other things take the memory
            other = one.memory_share * at.gpu.memory_bytes - model.fixed_bytes - _kept_bytes(one)
            other -= at.shape.weight_bytes / one.tensor_parallel
            other -= model.communication_bytes if one.tensor_parallel > 1 else 0.0
            needed.append(other / (one.sequences * at.shape.vocabulary))
    sampler = max(1.0, sum(needed) / len(needed))
    return replace(model, sampler_bytes=float(f"{sampler:.3g}"))


def _kept_bytes(one: MeasuredCache) -> float:
    """Return the size of a measured KV cache in bytes on each GPU."""
    at = _cache_roofline(one)
    return one.kv_bytes or one.kv_tokens * at.kv_bytes_a_layer * at.shape.reach(at.context_tokens)


def _cache_roofline(one: MeasuredCache) -> Roofline:
    return Roofline(
        shape=_shape(one.model),
        gpu=gpus()[one.gpu],
        efficiency=START,
        tensor_parallel=one.tensor_parallel,
    )


# --- leaving out ------------------------------------------------------------------------------------


def left_out(
    measured: Sequence[KernelTimes], efficiencies: Mapping[str, Efficiency]
) -> Iterable[Left]:
    """Yield the errors of estimates of each measured model: without all of its GPU, and without
    this model if others were measured there.
    """
    for one in measured:
        yield _errors(one, pooled(efficiencies, gpus()[one.gpu]), "gpu")
        others = without_model(measured, one.gpu, one.model)
        if others is not None:
            yield _errors(one, others, "model")


@cache
def _fit_without(gpu: str, model: str) -> dict[str, float]:
    return fit_gpu([one for one in kernel_times.read() if one.model != model], gpu)


def without_model(measured: Sequence[KernelTimes], gpu: str, model: str) -> Efficiency | None:
    """Return the efficiencies of a GPU that follow from all measurements but those of one model on
    this GPU; None if no other model was measured on it.
    """
    if not any(one.gpu == gpu and one.model != model for one in measured):
        return None
    partial: dict[str, Mapping[str, float]] = {
        name: _fit_without(name, model if name == gpu else "")
        for name in dict.fromkeys(one.gpu for one in measured)
    }
    return completed(gpu, partial)


def _errors(one: KernelTimes, efficiency: Efficiency, without: str) -> Left:
    """Return the errors of an estimate for one measured model.

    They cover kernels only, because the host and the front end, which all engines share, would hide
    errors.
    """
    at = _roofline(one, efficiency)
    return Left(
        what=f"{one.name} ({one.source.partition(',')[0].rpartition('/')[2]})",
        kind=kind_of(at.shape, at.gpu),
        without=without,
        prefill=_worst(_prefill_logs(one, at)),
        decode=_worst(_decode_logs(one, at)),
    )


def _prefill_logs(one: KernelTimes, at: Roofline) -> list[float]:
    """Return the errors of steps that compute a prompt, as logarithms of estimate over measurement."""
    return [
        _log(
            _layers_s(one, at, tokens) + _prefill_s(at, tokens),
            _measured_s(one, at, tokens) + seconds,
        )
        for tokens, seconds in one.prefill
        if tokens in PROMPTS and tokens in dict(one.products)
    ]


def _decode_logs(one: KernelTimes, at: Roofline) -> list[float]:
    """Return the errors of decode steps, as logarithms of estimate over measurement.

    Steps whose experts fit into the GPU's cache are left out.
    """
    return [
        _log(
            _layers_s(one, at, requests) + _decode_s(at, requests, context),
            _measured_s(one, at, requests) + seconds,
        )
        for requests, context, seconds in one.decode
        if (requests, context) in BATCHES
        and requests in dict(one.products)
        and not 0.0 < at.expert_bytes_a_layer(requests) < CACHED_BYTES
    ]


def _layers_s(one: KernelTimes, at: Roofline, tokens: int) -> float:
    """Return the estimated seconds of a step without attention, for those kernels that were
    measured.
    """
    reduces = at.all_reduce_s(tokens) if _reduces(one, at) else 0.0
    return at.products_s(tokens) + at.experts_s(tokens) + reduces


def _measured_s(one: KernelTimes, at: Roofline, tokens: int) -> float:
    return (
        dict(one.products)[tokens]
        + dict(one.experts).get(tokens, 0.0)
        + _reduces(one, at).get(tokens, 0.0)
    )


def _reduces(one: KernelTimes, at: Roofline) -> dict[int, float]:
    """Return the measured times of all-reduces by tokens; none for more than two GPUs without
    links, where vLLM uses another kind.
    """
    used = at.gpu.peer_to_peer == "link" or one.tensor_parallel == 2
    return dict(one.all_reduces) if used else {}


def _worst(logs: Sequence[float]) -> float | None:
    """Return the largest of the errors `logs`, as the relative difference of the larger to the
    smaller of estimate and measurement. None if there are none.
    """
    return float(f"{math.exp(max(map(abs, logs))) - 1:.3g}") if logs else None


def built_in_left_out(
    measured: Sequence[KernelTimes], efficiencies: Mapping[str, Efficiency]
) -> Iterable[Left]:
    """Yield the errors of estimates of the built-in profiles, over whole steps with host and output
    layer.
    """
    for name, model, gpu, degree in BUILT_IN:
        known = find_profile(name)
        for without, efficiency in (
            ("gpu", pooled(efficiencies, gpus()[gpu])),
            ("model", without_model(measured, gpu, model)),
        ):
            if efficiency is not None:
                settings = EstimateSettings(gpu=gpus()[gpu], tensor_parallel=degree)
                mine = estimated_profile(
                    _shape(model),
                    settings,
                    efficiency=efficiency,
                    memory=fit_memory(_caches_without(gpu)),
                )
                yield _profile_errors(known, mine, without)


def _profile_errors(known: Profile, mine: Profile, without: str) -> Left:
    prefill = [
        StepWork(tokens=n, prefills=1, attention_pairs=n * n / 2, sequences=1)
        for n in PROMPTS
        if n <= known.max_num_batched_tokens
    ]
    decode = [
        StepWork(tokens=n, decodes=n, decode_context_tokens=n * context, sequences=n)
        for n, context in BATCHES
    ]
    mine = replace(mine, host_s=known.host_s)

    def worst(works: Sequence[StepWork]) -> float | None:
        return _worst([_log(mine.step_s(work), known.step_s(work)) for work in works])

    return Left(
        what=known.name,
        kind="dense",
        without=without,
        prefill=worst(prefill),
        decode=worst(decode),
    )


def _caches_without(gpu: str) -> list[MeasuredCache]:
    return [one for one in CACHES if one.gpu != gpu] or list(CACHES)


def caches_left_out() -> Iterable[LeftCache]:
    """Yield each measured KV cache with its estimate from caches on other GPUs."""
    for one in CACHES:
        at = _cache_roofline(one)
        fit = roofline.memory_fit(
            at,
            fit_memory(_caches_without(one.gpu)),
            memory_share=one.memory_share,
            sequences=one.sequences,
            batched=one.batched,
        )
        measured = _kept_bytes(one)
        estimated = fit.kv_tokens * at.kv_bytes_a_layer * at.shape.reach(at.context_tokens)
        yield LeftCache(
            what=f"{one.model}, {one.tensor_parallel} x {one.gpu} ({one.source})",
            experts=at.shape.experts is not None,
            measured_gb=round(measured / 1e9, 2),
            estimated_gb=round(estimated / 1e9, 2),
            error=float(f"{(estimated - measured) / at.gpu.memory_bytes:.3g}"),
        )


def judged_by(truth: Path) -> Iterable[Judgement]:
    """Yield comparisons of simulated runs with recordings in the folder `truth`, as far as a
    tolerance is known for them. Each run has an estimated profile.
    """
    for name, (model, settings) in RECORDED.items():
        profile = estimated_profile(_shape(model), settings)
        for judgement in judge(truth / name, lambda _: None, profile):
            if judgement.tolerance is not None:
                yield judgement


# --- what is written --------------------------------------------------------------------------------


def published(results: Results) -> dict[str, dict[str, StepError]]:
    """Return the published errors by kind of model: the worst of models that were left out, on GPUs
    that were measured with other models (`measured`), and on GPUs that were left out as a whole
    (`unmeasured`).
    """
    return {
        name: {
            kind: StepError(
                prefill=_highest(results, kind, without, "prefill"),
                decode=_highest(results, kind, without, "decode"),
            )
            for kind in KINDS
        }
        for name, without in (("measured", "model"), ("unmeasured", "gpu"))
    }


def with_errors(memory: MemoryModel, caches: Iterable[LeftCache]) -> MemoryModel:
    """Return the memory model with the largest errors of the estimated KV caches, rounded up."""
    worst = {False: 0.0, True: 0.0}
    for one in caches:
        worst[one.experts] = max(worst[one.experts], abs(one.error))
    dense, experts = (math.ceil(1000 * worst[one]) / 1000 for one in (False, True))
    return replace(memory, dense_error=dense, expert_error=experts)


def _highest(results: Results, kind: str, without: str, field: str) -> float:
    """Return the largest error of one kind of model in one phase, rounded up to a hundredth."""
    errors = [
        getattr(one, field) or 0.0
        for one in (*results.left, *results.built_in)
        if one.kind == kind and one.without == without
    ]
    return math.ceil(100 * max(errors)) / 100


def as_toml(results: Results) -> str:
    """Return the content of sim/estimation/efficiencies.toml."""
    memory = with_errors(fit_memory(CACHES), results.caches)
    lines = ["# Written by `python -m docs.estimates`; what a field means is said in roofline.py."]
    tables: dict[str, object] = {"memory": memory}
    for name, errors in published(results).items():
        tables |= {f"{name}.{kind}": error for kind, error in errors.items()}
    tables |= {f"gpus.{name}": one for name, one in results.efficiencies.items()}
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{field} = {value!r}" for field, value in msgspec.to_builtins(table).items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
