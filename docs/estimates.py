"""Fits the efficiencies of `sim profile estimate`, and measures how far its estimates are off.

    python -m docs.estimates --truth DIR

The command fits to docs/kernel_times.json, and writes sim/estimation/efficiencies.toml and
docs/estimates.json. With --truth it also judges estimates by the recordings in DIR, as `sim validate
--profile` does; without it, the earlier judgements are kept. `python -m docs.reference` then writes the
tables of docs/estimates.md.

Each measured model is left out twice. First only that model is left out: the efficiencies of its GPU
come from the other models that were measured there. Then the whole GPU is left out: its efficiencies
are means over the other GPUs. The error of an estimate is its worst over steps of several sizes.
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
"""Efficiencies from which the fit starts."""
CACHED_BYTES: Final = 1.5e8
"""Keys and values of one layer that may lie in a GPU's cache, where the bandwidth is another."""
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
"""Built-in profiles that were measured, and configuration, GPU and degree of each."""


class MeasuredCache(Struct, frozen=True, kw_only=True):
    """A KV cache whose size an engine reported."""

    model: str
    gpu: str
    tensor_parallel: int
    sequences: int
    batched: int
    kv_tokens: int = 0
    kv_bytes: float = 0.0
    """Bytes on each GPU; used if the engine reported bytes and no tokens."""
    memory_share: float = 0.9
    """`--gpu-memory-utilization`: the default of vLLM before 0.20."""
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
"""Recordings of `sim validate` with times: model, and how its engine ran. Nothing of its GPU is used."""
_Floats = npt.NDArray[np.float64]
Residuals = Callable[[Efficiency], list[float]]


class Left(Struct, frozen=True, kw_only=True):
    """The worst errors of an estimate made without its own measurement, as shares; None if not measured."""

    what: str
    kind: str
    without: str
    """`model` or `gpu`: what was left out."""
    prefill: float | None
    decode: float | None


class LeftCache(Struct, frozen=True, kw_only=True):
    """A KV cache that was estimated without measurements on its GPU; bytes on each GPU."""

    what: str
    experts: bool
    measured_gb: float
    estimated_gb: float
    error: float
    """The error of the estimate, as a share of the GPU's memory."""


class Results(Struct, frozen=True, kw_only=True):
    """docs/estimates.json."""

    left: list[Left]
    built_in: list[Left]
    caches: list[LeftCache]
    efficiencies: dict[str, Efficiency]
    judged: list[Judgement] = []
    """Comparisons with recordings of whole runs, without measurements of their GPU."""


def main() -> int:
    """Fit, leave out, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, metavar="DIR", help="folder of the recordings")
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
    """Return the results that were written last."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results)


# --- fitting ----------------------------------------------------------------------------------------


def fit_all(measured: Sequence[KernelTimes]) -> dict[str, Efficiency]:
    """The efficiencies of each GPU; what was not measured on it is the mean over the others."""
    partial = {gpu: fit_gpu(measured, gpu) for gpu in dict.fromkeys(one.gpu for one in measured)}
    return {gpu: completed(gpu, partial) for gpu in partial}


def fit_gpu(measured: Iterable[KernelTimes], gpu: str) -> dict[str, float]:
    """The efficiencies of one GPU that its measurements tell, by field."""
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
    """Return the efficiencies, with the geometric mean of the other GPUs for missing ones."""
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
    """Fields, and the errors that depend on them alone: logarithms of estimate over measurement."""
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
    """Attention of a whole prompt."""
    launches = at.shape.layers * at.efficiency.prefill_launch_s
    return launches + replace(at, context_tokens=tokens).pair_s * tokens * tokens / 2


def _decode_s(at: Roofline, requests: int, context: int) -> float:
    """Attention of requests that decode."""
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
    """The fields with the least squares of `residuals`: Levenberg and Marquardt's, in logarithms."""
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
    """Return the efficiencies rounded to three digits, as the file has them."""
    return Efficiency(
        **{name: float(f"{value:.3g}") for name, value in msgspec.to_builtins(efficiency).items()}
    )


def fit_memory(caches: Sequence[MeasuredCache]) -> MemoryModel:
    """Fit the memory that the sampler takes to the KV caches of dense models that engines reported.

    The rest are assumptions: `fixed_bytes` and `communication_bytes` what inference-sim has for a driver
    and for NCCL (0.15 and 0.6 GiB) and half a GiB of kernels and fragments; `expert_bytes` what it has
    for activations of models with experts, 8 GiB in steps of 8,192 tokens.
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
    """Bytes of a measured KV cache on each GPU."""
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
    """Each measured model without itself, then without its GPU."""
    for one in measured:
        yield _errors(one, pooled(efficiencies, gpus()[one.gpu]), "gpu")
        others = without_model(measured, one.gpu, one.model)
        if others is not None:
            yield _errors(one, others, "model")


@cache
def _fit_without(gpu: str, model: str) -> dict[str, float]:
    return fit_gpu([one for one in kernel_times.read() if one.model != model], gpu)


def without_model(measured: Sequence[KernelTimes], gpu: str, model: str) -> Efficiency | None:
    """The efficiencies of a GPU without one model; None if no other was measured there."""
    if not any(one.gpu == gpu and one.model != model for one in measured):
        return None
    partial: dict[str, Mapping[str, float]] = {
        name: _fit_without(name, model if name == gpu else "")
        for name in dict.fromkeys(one.gpu for one in measured)
    }
    return completed(gpu, partial)


def _errors(one: KernelTimes, efficiency: Efficiency, without: str) -> Left:
    """Steps of kernels alone: what is the same for all engines (host, front end) would only hide errors."""
    at = _roofline(one, efficiency)
    return Left(
        what=f"{one.name} ({one.source.partition(',')[0].rpartition('/')[2]})",
        kind=kind_of(at.shape, at.gpu),
        without=without,
        prefill=_worst(_prefill_logs(one, at)),
        decode=_worst(_decode_logs(one, at)),
    )


def _prefill_logs(one: KernelTimes, at: Roofline) -> list[float]:
    """Errors of steps that compute a prompt."""
    return [
        _log(
            _layers_s(one, at, tokens) + _prefill_s(at, tokens),
            _measured_s(one, at, tokens) + seconds,
        )
        for tokens, seconds in one.prefill
        if tokens in PROMPTS and tokens in dict(one.products)
    ]


def _decode_logs(one: KernelTimes, at: Roofline) -> list[float]:
    """Errors of steps in which requests decode; of none whose experts a benchmark had in its cache."""
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
    """Return the seconds of a step without attention, as far as they were measured."""
    reduces = at.all_reduce_s(tokens) if _reduces(one, at) else 0.0
    return at.products_s(tokens) + at.experts_s(tokens) + reduces


def _measured_s(one: KernelTimes, at: Roofline, tokens: int) -> float:
    return (
        dict(one.products)[tokens]
        + dict(one.experts).get(tokens, 0.0)
        + _reduces(one, at).get(tokens, 0.0)
    )


def _reduces(one: KernelTimes, at: Roofline) -> dict[int, float]:
    """Return the times of all-reduces that vLLM uses: none among more than two GPUs without links."""
    used = at.gpu.peer_to_peer == "link" or one.tensor_parallel == 2
    return dict(one.all_reduces) if used else {}


def _worst(logs: Sequence[float]) -> float | None:
    """The largest error, as the share that is added to the smaller of estimate and measurement."""
    return float(f"{math.exp(max(map(abs, logs))) - 1:.3g}") if logs else None


def built_in_left_out(
    measured: Sequence[KernelTimes], efficiencies: Mapping[str, Efficiency]
) -> Iterable[Left]:
    """Each built-in profile that was measured, whole steps with host and output layer."""
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
    """Each measured KV cache, by what those on other GPUs tell."""
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
    """Estimates beside recordings of whole runs: what `sim validate --profile` judges."""
    for name, (model, settings) in RECORDED.items():
        profile = estimated_profile(_shape(model), settings)
        for judgement in judge(truth / name, lambda _: None, profile):
            if judgement.tolerance is not None:
                yield judgement


# --- what is written --------------------------------------------------------------------------------


def published(results: Results) -> dict[str, dict[str, StepError]]:
    """`measured` and `unmeasured`, by the kind of a model: the worst errors that were found."""
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
    """The memory model, with the worst errors that were found."""
    worst = {False: 0.0, True: 0.0}
    for one in caches:
        worst[one.experts] = max(worst[one.experts], abs(one.error))
    dense, experts = (math.ceil(1000 * worst[one]) / 1000 for one in (False, True))
    return replace(memory, dense_error=dense, expert_error=experts)


def _highest(results: Results, kind: str, without: str, field: str) -> float:
    """Return the largest error, rounded up to a hundredth."""
    errors = [
        getattr(one, field) or 0.0
        for one in (*results.left, *results.built_in)
        if one.kind == kind and one.without == without
    ]
    return math.ceil(100 * max(errors)) / 100


def as_toml(results: Results) -> str:
    """sim/estimation/efficiencies.toml."""
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
