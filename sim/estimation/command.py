"""The command `sim profile`: estimate a profile for a model on a GPU that were not measured, or
list the known GPUs.
"""

import argparse
import sys
from pathlib import Path
from typing import Final, TypeAlias

from sim.engine.profiles import Profile, ProfileError, profile_as_toml
from sim.estimation.estimate import DoesNotFitError, EstimateSettings, estimated_profile
from sim.estimation.gpus import Gpu, gpu_named, gpus
from sim.estimation.model_config import FORMATS, ModelShape, read_config
from sim.estimation.roofline import (
    CONTEXT_TOKENS,
    MEMORY_SHARE,
    TENSOR_PARALLEL_MAX,
    fitted,
)
from sim.output import write_whole
from sim.sentences import failed, sentence_of, warned

_DESCRIPTION: Final = """\
Estimate the profile of a model on a GPU from the model's config.json and the GPU's data sheet, by a
roofline model. The profile is a TOML file for --profile of sim replay, sim size and others. Their
reports state that the profile is estimated, and its error.

    sim profile estimate --config config.json --gpu l40s --out mine.toml
    sim size TRACE --profile mine.toml --slo ttft-p90=1 --out sized

A few measured points improve it: set `like` to this file in the points of sim calibrate.
"""
_FIELDS: Final = {
    "kv_tokens": "memory of all GPUs, less weights, activations and buffers",
    "linear_tokens": "products of matrices, experts, norms and activations of all layers",
    "host_s": "that of a built-in profile",
}
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parser(commands: _Commands) -> None:
    """Add the command line of `sim profile`."""
    parser = commands.add_parser(
        "profile",
        help="estimate a profile for a model and a GPU without a built-in profile",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_estimate(kinds)
    listed = kinds.add_parser("gpus", help="list the known GPUs", allow_abbrev=False)
    listed.set_defaults(run=_list_gpus)


def _add_estimate(kinds: _Commands) -> None:
    parser = kinds.add_parser(
        "estimate",
        help="estimate a profile from a model's config.json and a GPU's data sheet",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    required = parser.add_argument_group("required").add_argument
    required("--config", type=Path, required=True, metavar="FILE", help="config.json of the model, "
        "or the folder that contains it")  # fmt: skip
    required(
        "--gpu",
        required=True,
        metavar="NAME",
        help=f"GPU to estimate for: one of {', '.join(gpus())}",
    )
    engine = parser.add_argument_group("engine, with the flags of vllm serve").add_argument
    engine("--tp", type=_degree, default=1, metavar="N", help="number of GPUs that share "
        "every layer, as --tensor-parallel-size of vllm serve (default 1)")  # fmt: skip
    engine("--quantization", choices=("auto", *FORMATS), default="auto", metavar="FORMAT",
        help=f"format of the weights: auto (from config.json), or one of {', '.join(FORMATS)} "
        "(default auto)")  # fmt: skip
    engine("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="number format of the KV cache: "
        "auto has 16 bits (default auto)")  # fmt: skip
    engine("--gpu-memory-utilization", type=_share, default=MEMORY_SHARE, metavar="SHARE",
        help=f"share of the memory that the engine uses (default {MEMORY_SHARE:g}; vLLM "
        "before 0.20 has 0.9)")  # fmt: skip
    engine("--max-model-len", type=_count, metavar="TOKENS", help="maximum tokens of prompt and answer together "
        "(default: the model's maximum)")  # fmt: skip
    engine("--max-num-seqs", type=_count, metavar="N", help="maximum requests in a step (default: vLLM's for "
        "the GPU, 256 or 1024)")  # fmt: skip
    engine("--max-num-batched-tokens", type=_count, metavar="TOKENS", help="maximum tokens in a step (default: "
        "vLLM's for the GPU, 2048 to 16384)")  # fmt: skip
    other = parser.add_argument_group("estimate and output").add_argument
    other("--context-tokens", type=_count, default=CONTEXT_TOKENS, metavar="TOKENS",
        help="usual context length, which determines the cost of layers with a sliding window (default "
        f"{CONTEXT_TOKENS:,}; no effect on models without such layers)")  # fmt: skip
    other("--unmeasured", action="store_true", help="ignore measurements on this GPU, as if only "
        "its data sheet were known, to test estimates")  # fmt: skip
    other("--name", metavar="NAME", help="name of the profile (default: model, GPU and degree)")
    other(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="file to write the profile to (default: standard output)",
    )
    parser.set_defaults(run=_estimate)


def _estimate(options: argparse.Namespace) -> int:
    """Run `sim profile estimate`. Return exit code 0 on success, 1 if the model does not fit or the
    file cannot be written, 2 on bad input.
    """
    try:
        settings = _settings(options)
        quantization = "" if options.quantization == "auto" else options.quantization
        config = read_config(options.config, quantization=quantization)
        if config.unknown_keys:
            warned(
                f"{options.config}: unknown keys without effect: {', '.join(config.unknown_keys)}"
            )
        profile = estimated_profile(config.shape, settings, name=options.name or "")
    except DoesNotFitError as problem:
        return failed(str(problem), code=1)
    except ProfileError as problem:
        return failed(str(problem), code=2)
    text = _text(profile, config.shape, settings)
    _say(profile, config.shape, settings)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    try:
        write_whole(options.out, text.encode())
    except OSError as problem:
        return failed(sentence_of(problem), code=1)
    sys.stderr.write(f"written to {options.out}; use it with --profile {options.out}\n")
    return 0


def _settings(options: argparse.Namespace) -> EstimateSettings:
    return EstimateSettings(
        gpu=gpu_named(options.gpu),
        tensor_parallel=options.tp,
        kv_format=options.kv_cache_dtype,
        context_tokens=options.context_tokens,
        memory_share=options.gpu_memory_utilization,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len_tokens=options.max_model_len,
        as_unmeasured=options.unmeasured,
    )


def _text(profile: Profile, shape: ModelShape, settings: EstimateSettings) -> str:
    """Return the text of the estimated profile's TOML file, with comments about the sources of the
    estimate.
    """
    assert profile.estimated is not None
    head = [
        f"# Estimated, {profile.estimated.said}.",
        f"# Model: {_model_said(shape)}.",
        f"# {settings.tensor_parallel} x {settings.gpu.says}: {settings.gpu.source}.",
    ]
    if shape.windowed_layers:
        head.append(
            "# The cost of layers with a sliding window is that for contexts of "
            f"{settings.context_tokens:,} tokens."
        )
    return "\n".join(head) + "\n" + profile_as_toml(profile, _FIELDS)


def _model_said(shape: ModelShape) -> str:
    kept = shape.layers - shape.windowed_layers
    said = [f"{shape.name}, {shape.architecture}", f"{shape.weights / 1e9:.1f} billion weights",
        f"{shape.weight_bytes / 1e9:.1f} GB"]  # fmt: skip
    if shape.experts is not None:
        said.append(f"{shape.experts.per_token} of {shape.experts.count} experts per token")
    if shape.windowed_layers:
        said.append(f"{kept} of {shape.layers} layers without a window")
    return ", ".join(said)


def _say(profile: Profile, shape: ModelShape, settings: EstimateSettings) -> None:
    """Print the model, the GPU and the main results of the estimate on standard error."""
    assert profile.estimated is not None
    gpu = settings.gpu
    measured = gpu.name in fitted().gpus and not settings.as_unmeasured
    batched = profile.max_num_batched_tokens
    lines = [
        f"model          {_model_said(shape)}",
        f"GPU            {settings.tensor_parallel} x {gpu.says}, kernels "
        + ("measured" if measured else "not measured: means of other GPUs"),
        f"KV cache       {profile.kv_tokens:,} tokens, {profile.kv_bytes_per_token:,} bytes each",
        f"prefill        {profile.prefill_tokens_per_s(batched):,.0f} tokens/s in steps of {batched:,}",
        *(f"decode         {_decode_said(profile, requests)}" for requests in (1, 32)),
        f"estimated      {profile.estimated.said}",
    ]
    sys.stderr.write("\n".join(lines) + "\n")


def _decode_said(profile: Profile, requests: int) -> str:
    step_s = profile.decode_step_s(requests, 1024)
    return f"{step_s * 1e3:.1f} ms per token with {requests} request{'s' * (requests > 1)} of 1,024 tokens"


def _list_gpus(options: argparse.Namespace) -> int:
    """Print a table of the known GPUs, and return exit code 0."""
    head = ("name", "memory", "bandwidth", "16 bits", "FP8", "kernels", "GPU")
    rows = [head, *(_cells(gpu) for gpu in gpus().values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return 0


def _cells(gpu: Gpu) -> tuple[str, ...]:
    """Return the row of a GPU in the table of `sim profile gpus`."""
    return (
        gpu.name,
        f"{gpu.memory_bytes / 1e9:.0f} GB",
        f"{gpu.memory_bytes_per_s / 1e12:.2f} TB/s",
        f"{gpu.half_flops / 1e12:,.0f} TFLOPS",
        f"{gpu.fp8_flops / 1e12:,.0f} TFLOPS" if gpu.fp8_flops else "none",
        "measured" if gpu.name in fitted().gpus else "not measured",
        gpu.says,
    )


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 0 < number <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10^9")
    return number


def _degree(text: str) -> int:
    number = _count(text)
    if number > TENSOR_PARALLEL_MAX or number & (number - 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a power of two from 1 to {TENSOR_PARALLEL_MAX}"
        )
    return number


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return number
