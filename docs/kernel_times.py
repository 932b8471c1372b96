"""Collect times of vLLM's kernels for whole models, from tables that other projects have published.

    python -m docs.kernel_times --aiconfigurator SYSTEMS --servingsim PERF

SYSTEMS is the folder `aic-core/src/aiconfigurator_core/systems/data` of ai-dynamo/aiconfigurator
(Apache-2.0), PERF the folder `profiler/perf` of casys-kaist/LLMServingSim (MIT); both were read as
of 2026-08-21. The command writes docs/kernel_times.json, from which `python -m docs.estimates`
fits.

The time of a matrix product whose shape is in no table is interpolated linearly between its
neighbours, in logarithms of sizes and times. Each time is for all layers of a model, on one of its
GPUs.
"""

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import pyarrow.parquet as pq
from msgspec import Struct

from sim.engine.kernels import fit_attention
from sim.estimation.model_config import ModelShape, read_config
from sim.output import write_whole

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "kernel_times.json"
MODELS: Final = FOLDER / "examples" / "models"

TOKENS: Final = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPTS: Final = (512, 1024, 2048, 4096, 8192, 16384)
BATCHES: Final = (
    (1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 1024), (32, 4096), (128, 1024), (128, 4096),
)  # fmt: skip
SYSTEMS: Final[Mapping[str, tuple[str, str, str]]] = {
    "a100-80gb": ("a100_sxm", "0.14.0", "0.14.0"),
    "l40s": ("l40s", "0.24.0", "0.22.0"),
    "h100": ("h100_sxm", "0.24.0", "0.24.0"),
    "h200": ("h200_sxm", "0.24.0", "0.24.0"),
    "b200": ("b200_sxm", "0.24.0", "0.24.0"),
    "rtx-pro-6000": ("rtx_pro_6000_server", "0.24.0", "0.24.0"),
}
"""Systems of aiconfigurator by GPU: the folder, the version of vLLM, and the version with
all-reduces.
"""
WHOLE_MODELS: Final = (
    ("llama-3.1-8b", 1, ""), ("llama-3.1-8b", 1, "fp8"), ("qwen3-32b", 2, ""),
    ("llama-3.3-70b", 4, ""), ("mixtral-8x7b", 2, ""), ("qwen3-30b-a3b", 1, ""),
    ("gpt-oss-20b", 1, ""), ("gemma-3-27b", 2, ""), ("deepseek-v3", 8, ""),
)  # fmt: skip
"""Models whose times are collected, as (configuration, degree of tensor parallelism, quantization
other than the model's own).
"""
RTX: Final = (
    ("rtx-4090", "RTX4090/meta-llama/Llama-3.1-8B", "llama-3.1-8b", 1),
    ("rtx-pro-6000", "RTXPRO6000/meta-llama/Llama-3.1-8B", "llama-3.1-8b", 1),
    ("rtx-pro-6000", "RTXPRO6000/Qwen/Qwen3-32B", "qwen3-32b", 2),
)


class KernelTimes(Struct, frozen=True, kw_only=True):
    """Kernel times of one model on one type of GPU.

    In each pair or triple, the last number is the time in seconds for all layers.
    """

    gpu: str
    model: str
    tensor_parallel: int
    quantization: str
    source: str
    products: list[tuple[int, float]] = []
    """Times of matrix products except those of experts, by number of tokens."""
    elementwise: list[tuple[int, float]] = []
    """Times of all kernels that are neither matrix products nor attention nor communication, by
    number of tokens.
    """
    head: list[tuple[int, float]] = []
    """Times of the output layer, by number of sequences."""
    experts: list[tuple[int, float]] = []
    prefill: list[tuple[int, float]] = []
    """Times of attention in prefill, by number of prompt tokens."""
    decode: list[tuple[int, int, float]] = []
    """Times of attention in decode, by number of requests and context length of each."""
    all_reduces: list[tuple[int, float]] = []
    """Times of all-reduces, by number of tokens."""
    mixed_decode_factor: float | None = None
    attention_has_products: bool = False
    """True if `prefill` and `decode` include the matrix products of attention."""

    @property
    def name(self) -> str:
        told = f" {self.quantization}" if self.quantization else ""
        return f"{self.model}{told}, {self.tensor_parallel} x {self.gpu}"


def main() -> int:
    """Collect the times from both projects and write docs/kernel_times.json. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiconfigurator", type=Path, required=True)
    parser.add_argument("--servingsim", type=Path, required=True)
    options = parser.parse_args()
    found = [*_of_aiconfigurator(options.aiconfigurator), *_of_servingsim(options.servingsim)]
    write_whole(RESULTS, written(found))
    sys.stdout.write(f"{len(found)} models on GPUs written to {RESULTS.name}\n")
    return 0


def written(found: Iterable[KernelTimes]) -> bytes:
    """Return the content of docs/kernel_times.json, with one line for each model and GPU."""
    lines = [msgspec.json.encode(one).decode() for one in found]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def read() -> list[KernelTimes]:
    """Return the content of docs/kernel_times.json from the last run."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[KernelTimes])


def shape_of(model: str, quantization: str = "") -> ModelShape:
    """Return the shape of the model in an example configuration."""
    return read_config(MODELS / f"{model}.json", quantization=quantization).shape


# --- ai-dynamo/aiconfigurator -----------------------------------------------------------------------


def _of_aiconfigurator(root: Path) -> Iterator[KernelTimes]:
    for gpu, (folder, version, comm_version) in SYSTEMS.items():
        tables = _Tables(root / folder, version, comm_version)
        for model, degree, quantization in WHOLE_MODELS:
            shape = shape_of(model, quantization)
            times = _whole_model(tables, shape, degree)
            if times is not None:
                yield msgspec.structs.replace(
                    times, gpu=gpu, model=model, quantization=quantization,
                    source=f"ai-dynamo/aiconfigurator, {folder}, vLLM {version}",
                )  # fmt: skip


def times_of(root: Path, gpu: str, model: str, degree: int) -> KernelTimes:
    """Return the kernel times of one model with its own weights on `degree` GPUs.

    `root` is the folder of aiconfigurator's tables, and `gpu` is a key of `SYSTEMS`. Raise
    ValueError if the tables lack a kernel that the model needs.
    """
    folder, version, comm_version = SYSTEMS[gpu]
    times = _whole_model(_Tables(root / folder, version, comm_version), shape_of(model), degree)
    if times is None:
        raise ValueError(
            f"{root / folder}: the tables lack a kernel of {model} on {degree} x {gpu}."
        )
    source = f"ai-dynamo/aiconfigurator, {folder}, vLLM {version}"
    return msgspec.structs.replace(times, gpu=gpu, model=model, source=source)


def _whole_model(tables: "_Tables", shape: ModelShape, degree: int) -> KernelTimes | None:
    """Return the kernel times of a model in all layers, or None if the tables lack a part that it
    needs.
    """
    latent = shape.latent is not None
    products = [] if latent else [*shape.attention_products(degree)] * shape.layers
    inner = [shape.dense_inner] * shape.dense_layers
    experts = shape.experts
    if experts is not None and experts.shared_inner:
        inner += [experts.shared_inner] * experts.layers
    for one in inner:
        products += [(2 * one // degree, shape.hidden), (shape.hidden, one // degree)]
    times = KernelTimes(
        gpu="", model="", tensor_parallel=degree, quantization="", source="",
        products=tables.products(products, shape.linear_format),
        experts=tables.experts(shape, degree) if experts is not None else [],
        prefill=tables.prefill(shape, degree),
        decode=tables.decode(shape, degree),
        all_reduces=tables.all_reduces(shape, degree) if degree > 1 else [],
        attention_has_products=latent,
    )  # fmt: skip
    complete = times.products and times.prefill and times.decode
    return times if complete and (times.experts or experts is None) else None


class _Tables:
    """The tables of kernel times that aiconfigurator publishes for one GPU."""

    def __init__(self, root: Path, version: str, comm_version: str) -> None:
        self._root = root
        self._version = version
        self._comm_version = comm_version
        self._products: dict[str, dict[tuple[int, int, int], float]] = {}
        self._attentions: dict[str, dict[tuple[int, ...], float]] = {}
        self._open: dict[str, list[dict[str, Any]]] = {}

    def products(self, shapes: list[tuple[int, int]], weights: str) -> list[tuple[int, float]]:
        dtype = {"16bit": "bfloat16", "fp8": "fp8"}[weights]
        known = self._product_table(dtype)
        counted = {shape: shapes.count(shape) for shape in dict.fromkeys(shapes)}
        found = []
        for tokens in TOKENS:
            times = {one: _between(known, tokens, *one) for one in counted}
            if times and all(value is not None for value in times.values()):
                total = sum(counted[one] * (value or 0.0) for one, value in times.items())
                found.append((tokens, _seconds(total)))
        return found

    def experts(self, shape: ModelShape, degree: int) -> list[tuple[int, float]]:
        """Return the kernel times of a model's experts by number of tokens. The tokens are
        distributed over the experts by a power law, as real routers do.
        """
        experts = shape.experts
        assert experts is not None
        dtype = {"16bit": "bfloat16", "fp8": "fp8_block", "mxfp4": "w4a16_mxfp4"}[
            shape.expert_format
        ]
        times = defaultdict(list)
        for row in self._rows("moe", "moe_perf"):
            if (
                row["moe_dtype"], row["hidden_size"], row["inter_size"], row["topk"], row["num_experts"],
                row["moe_tp_size"], row["moe_ep_size"],
            ) == (
                dtype, shape.hidden, experts.inner, experts.per_token, experts.count, degree, 1,
            ) and row["distribution"] == "power_law_1.2":  # fmt: skip
                times[row["num_tokens"]].append(row["latency"])
        return [
            (tokens, _seconds(experts.layers * min(times[tokens])))
            for tokens in TOKENS
            if tokens in times
        ]

    def prefill(self, shape: ModelShape, degree: int) -> list[tuple[int, float]]:
        return [
            (tokens, seconds)
            for tokens in PROMPTS
            if (seconds := self._attention("context", shape, degree, (1, tokens))) is not None
        ]

    def decode(self, shape: ModelShape, degree: int) -> list[tuple[int, int, float]]:
        return [
            (requests, context, seconds)
            for requests, context in BATCHES
            if (seconds := self._attention("generation", shape, degree, (requests, context)))
            is not None
        ]

    def all_reduces(self, shape: ModelShape, degree: int) -> list[tuple[int, float]]:
        """Return the times of all-reduces inside a CUDA graph, by number of tokens.

        Sizes between two of the table are interpolated.
        """
        known = {
            2 * row["message_size"]: row["latency"]
            for row in self._rows("comm", "custom_allreduce_perf", self._comm_version)
            if row["num_gpus"] == degree and row["backend"] == "vllm_graph"
        }
        return [
            (tokens, _seconds(2 * shape.layers * _on_line(known, 2 * tokens * shape.hidden)))
            for tokens in TOKENS
        ]

    def _attention(
        self, kind: str, shape: ModelShape, degree: int, at: tuple[int, int]
    ) -> float | None:
        """Return the seconds of attention in all layers, or None if the tables lack them.

        Latent attention has a table of its own. Layers with and without a sliding window have
        different kernels.
        """
        if shape.latent is not None:
            return self._latent(kind, shape, degree, at)
        full, windowed = shape.layers - shape.windowed_layers, shape.windowed_layers
        total = 0.0
        for layers, window in ((full, 0), (windowed, shape.window_tokens)):
            if layers:
                one = self._attention_table(kind).get((
                    shape.heads // degree, max(1, shape.key_value_heads // degree), shape.head_dim,
                    window, *at,
                ))  # fmt: skip
                if one is None:
                    return None
                total += layers * one
        return _seconds(total)

    def _latent(
        self, kind: str, shape: ModelShape, degree: int, at: tuple[int, int]
    ) -> float | None:
        wanted = "fp8_block" if shape.linear_format == "fp8" else "bfloat16"
        length = "isl" if kind == "context" else "step"
        times = [
            row["latency"]
            for row in self._rows("mla", f"mla_{kind}_module_perf")
            if row["gemm_type"] == wanted
            and row["kv_cache_dtype"] == "bfloat16"
            and row["num_heads"] == shape.heads // degree
            and (row["batch_size"], row[length]) == at
        ]
        return _seconds(shape.layers * min(times)) if times else None

    def _attention_table(self, kind: str) -> Mapping[tuple[int, ...], float]:
        times = self._attentions.setdefault(kind, {})
        if times:
            return times
        for row in self._rows("attention", f"{kind}_attention_perf"):
            if row["kv_cache_dtype"] == "bfloat16":
                length = row["isl"] if kind == "context" else row["step"] + 1
                key = (
                    row["num_heads"], row["num_key_value_heads"], row["head_dim"],
                    row.get("window_size", 0), row["batch_size"], length,
                )  # fmt: skip
                times[key] = min(row["latency"], times.get(key, math.inf))
        return times

    def _product_table(self, dtype: str) -> dict[tuple[int, int, int], float]:
        if dtype not in self._products:
            times = defaultdict(list)
            for row in self._rows("gemm", "gemm_perf"):
                if row["gemm_dtype"] == dtype:
                    times[row["m"], row["n"], row["k"]].append(row["latency"])
            self._products[dtype] = {key: median(values) for key, values in times.items()}
        return self._products[dtype]

    def _rows(self, kind: str, name: str, version: str = "") -> list[dict[str, Any]]:
        file = self._root / kind / "vllm" / (version or self._version) / f"{name}.parquet"
        if str(file) not in self._open:
            self._open[str(file)] = pq.read_table(file).to_pylist() if file.exists() else []
        return self._open[str(file)]


def _seconds(milliseconds: float) -> float:
    return float(f"{milliseconds / 1e3:.4g}")


def _between(
    known: Mapping[tuple[int, int, int], float], rows: int, outputs: int, inputs: int
) -> float | None:
    """Return the milliseconds of a matrix product, interpolated between shapes in the table.

    Return None if the table has too few shapes around it.
    """
    total = weight = 0.0
    for n, n_share in _neighbours(outputs, sorted({key[1] for key in known})):
        for k, k_share in _neighbours(inputs, sorted({key[2] for key in known})):
            time = known.get((rows, n, k))
            if time is not None:
                total += n_share * k_share * math.log(time)
                weight += n_share * k_share
    return math.exp(total) if weight > 0.99 else None


def _neighbours(value: int, grid: list[int]) -> list[tuple[int, float]]:
    """Return the one or two grid points around a value, each with its weight for interpolation;
    none if the value is outside the grid.
    """
    if value in grid:
        return [(value, 1.0)]
    below, above = [one for one in grid if one < value], [one for one in grid if one > value]
    if not (below and above):
        return []
    low, high = below[-1], above[0]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


def _on_line(known: Mapping[int, float], size: int) -> float:
    near = _neighbours(size, sorted(known))
    return math.exp(sum(share * math.log(known[one]) for one, share in near))


# --- casys-kaist/LLMServingSim ----------------------------------------------------------------------


def _of_servingsim(root: Path) -> Iterator[KernelTimes]:
    for gpu, folder, model, degree in RTX:
        place = root / folder / "bf16" / f"tp{degree}"
        shape = shape_of(model)
        dense = _csv(place / "dense.csv")
        products: dict[int, float] = defaultdict(float)
        besides: dict[int, float] = defaultdict(float)
        for row in dense:
            layer, tokens = row["layer"], int(row["tokens"])
            if tokens in TOKENS:
                once = layer in {"embedding", "final_layernorm"}
                count = 1 if once else shape.layers * (2 if layer == "layernorm" else 1)
                to = products if layer.endswith("_proj") else besides
                to[tokens] += count * float(row["time_us"]) / 1e3
        head: dict[int, float] = defaultdict(float)
        for row in _csv(place / "per_sequence.csv"):
            if int(row["sequences"]) in {1, 8, 32, 64, 128, 256}:
                head[int(row["sequences"])] += float(row["time_us"]) / 1e3
        prefill, decode = _csv_attention(place / "attention.csv", shape.layers)
        yield KernelTimes(
            gpu=gpu, model=model, tensor_parallel=degree, quantization="",
            source=f"casys-kaist/LLMServingSim, {folder}, vLLM 0.19.0",
            products=_listed(products), elementwise=_listed(besides), head=_listed(head),
            prefill=prefill, decode=decode,
            mixed_decode_factor=float(f"{fit_attention(place / 'attention.csv').mixed_decode_factor:.3g}"),
        )  # fmt: skip


def _csv_attention(
    file: Path, layers: int
) -> tuple[list[tuple[int, float]], list[tuple[int, int, float]]]:
    prefill, decode = [], []
    for row in _csv(file):
        chunk, before = int(row["prefill_chunk"]), int(row["kv_prefill"])
        requests, context = int(row["n_decode"]), int(row["kv_decode"])
        seconds = _seconds(layers * float(row["time_us"]) / 1e3)
        if chunk in PROMPTS and before == 0 and requests == 0:
            prefill.append((chunk, seconds))
        if chunk == 0 and (requests, context) in BATCHES:
            decode.append((requests, context, seconds))
    return prefill, decode


def _csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _listed(times: Mapping[int, float]) -> list[tuple[int, float]]:
    return [(at, _seconds(time)) for at, time in sorted(times.items())]


if __name__ == "__main__":
    sys.exit(main())
