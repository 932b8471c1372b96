"""A roofline model that computes the constants of a profile from a model's shape and a GPU's peaks.

A kernel takes the time of its arithmetic at a share of the GPU's peak, or of its reading at a share
of the bandwidth, whichever is longer. Near the point where both are equal it takes longer than
either (`SHARPNESS`):

    t = launch_s + ((bytes / (bandwidth * share))^p + (operations / (peak * share))^p)^(1/p)

The shares are efficiencies that were fitted to kernel timings of vLLM (`efficiencies.toml`, by
`python -m docs.estimates`, which also computes the errors of the estimates). A GPU without such
timings gets the geometric mean over the GPUs that have them.

Routing is assumed to be balanced: m tokens that each use k of E experts read E * (1 - (1 - k/E)^m)
of them. A layer with a sliding window counts with the share of a context of `context_tokens` that
its window holds, because a profile has one price for each token of context.
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from epp.core.types import Seconds
from sim.engine.profiles import toml_in
from sim.estimation.gpus import Gpu, gpus
from sim.estimation.model_config import BYTES_A_WEIGHT, ModelShape, WeightFormat

SHARPNESS: Final = 3.0
"""Exponent p in the time of a kernel. It determines how sharply the limit changes from reading
memory to arithmetic.
"""
LAUNCH_S: Final = 2e-6
"""Minimum time in seconds of a kernel inside a CUDA graph."""
EXPERT_WIDTH: Final = 350
"""Width of an expert on one GPU at which its matrix products reach half of the speed of a very wide
expert.
"""
EXPERT_KERNELS: Final = 5
"""Number of kernels in an expert layer: router, sorting of tokens, two matrix products, sum."""
KERNELS_BESIDES: Final = 5
"""Number of kernels in a transformer layer that are not matrix products: two norms, positions,
activation, KV write.
"""
MEMORY_SHARE: Final = 0.92
"""Default of vLLM's `--gpu-memory-utilization` from version 0.20 on; it was 0.9 before."""
CONTEXT_TOKENS: Final = 4096
"""Default of the usual context length in tokens, which determines the cost of layers with sliding
windows.
"""
TENSOR_PARALLEL_MAX: Final = 16

LAYER_TABLE_TOKENS: Final = (
    1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
"""Numbers of tokens at which an estimated profile has the time of the linear layers."""
_BYTES: Final = 2
"""Size in bytes of a number in an activation, and in the KV cache unless that is in FP8."""

KINDS: Final[Mapping[str, str]] = {
    "dense": "dense, weights of 16 bits",
    "quantized": "dense, weights of 8 bits",
    "quantized-blackwell": "the same on B200 and RTX PRO 6000",
    "experts": "with experts, weights of 16 or 8 bits",
    "packed": "weights of 4 bits",
    "latent": "latent attention (MLA)",
}
"""Kinds of models that have separate estimation errors, with their descriptions in tables."""

KvFormat: TypeAlias = Literal["auto", "fp8"]
_Share: TypeAlias = Annotated[float, Meta(gt=0.0, le=3.0)]


class Efficiency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shares of a GPU's data-sheet peaks that its kernels reach, and minimum times of
    kernels.
    """

    linear_bandwidth: _Share
    """Share of the memory bandwidth that matrix products with few rows reach."""
    linear_compute: _Share
    """Share of the 16-bit arithmetic peak that matrix products with many rows reach."""
    fp8_compute: _Share
    """Share of the 8-bit (or FP4) arithmetic peak that matrix products with many rows reach."""
    expert_bandwidth: _Share
    """Share of the memory bandwidth that expert layers reach."""
    packed_bandwidth: _Share
    """Share of the memory bandwidth that expert layers reach if their weights have less than 8
    bits.
    """
    expert_compute: _Share
    """Share of the 16-bit arithmetic peak that layers of very wide experts reach."""
    prefill_compute: _Share
    """Share of the 16-bit arithmetic peak that attention of a prompt reaches."""
    prefill_launch_s: Seconds
    """Minimum time in seconds of the attention of a prompt chunk in each layer."""
    decode_bandwidth: _Share
    """Share of the memory bandwidth that attention of decoding requests reaches."""
    decode_launch_s: Seconds
    """Minimum time in seconds of the attention of decoding requests in each layer."""
    latent_launch_s: Seconds
    """Additional time in seconds of latent attention (MLA) in each layer, for its many small
    kernels.
    """
    all_reduce_share: _Share
    """Share of the interconnect's bandwidth that an all-reduce reaches."""
    all_reduce_launch_s: Seconds
    """Minimum time in seconds of an all-reduce between two GPUs."""
    elementwise_bandwidth: _Share
    """Share of the memory bandwidth that kernels other than matrix products reach. It exceeds 1 if
    the GPU's caches hold part of the data.
    """
    mixed_decode_factor: Annotated[float, Meta(ge=1.0, le=10.0)]
    """Factor by which attention of decoding requests takes longer in a step with a prompt chunk
    (`Profile.mixed_decode_factor`).
    """


class MemoryModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fitted parameters of the GPU memory that is used by neither weights nor KV cache, and the
    errors of the KV-cache memory that results.
    """

    fixed_bytes: float
    """Size in bytes of the memory of the driver, the kernels and the allocator on each GPU."""
    communication_bytes: float
    """Size in bytes of additional memory on each GPU if there are several."""
    sampler_bytes: float
    """Size in bytes, for each request and word of the vocabulary, of the memory for sampling
    tokens.
    """
    expert_bytes: float
    """Size in bytes of the workspace for each token of a step in models with experts."""
    dense_error: float
    """Largest error of the KV-cache memory for models without experts, as a share of a GPU's
    memory.
    """
    expert_error: float
    """Largest error of the KV-cache memory for models with experts, as a share of a GPU's
    memory.
    """

    def error_of(self, shape: ModelShape) -> float:
        """Return the largest error of the KV-cache memory for models like `shape`, as a share of a
        GPU's memory.
        """
        return self.dense_error if shape.experts is None else self.expert_error


class StepError(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest errors of the estimated durations of prefill and decode steps, as shares."""

    prefill: float
    decode: float


class Fitted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `efficiencies.toml`: fitted values, and errors of the estimates with them."""

    gpus: dict[str, Efficiency]
    memory: MemoryModel
    measured: dict[str, StepError]
    """Largest errors of estimated step durations on a GPU on which other models were measured, by
    kind of model (`KINDS`).
    """
    unmeasured: dict[str, StepError]
    """Largest errors of estimated step durations on a GPU without measurements, by kind of model
    (`KINDS`).
    """


@cache
def fitted() -> Fitted:
    """Return the content of `efficiencies.toml`, which `python -m docs.estimates` has written."""
    return msgspec.convert(toml_in(Path(__file__).with_name("efficiencies.toml")), Fitted)


def kind_of(shape: ModelShape, gpu: Gpu) -> str:
    """Return the kind of a model on a GPU, one of `KINDS`. Each kind has its own estimation
    errors.
    """
    if shape.latent is not None:
        return "latent"
    formats = {shape.linear_format, shape.expert_format}
    if any(BYTES_A_WEIGHT[one] < 1.0 for one in formats):
        return "packed"
    if shape.experts is not None:
        return "experts"
    if formats == {"16bit"}:
        return "dense"
    return "quantized" if gpu.fp4_flops is None else "quantized-blackwell"


def pooled(efficiencies: Mapping[str, Efficiency], gpu: Gpu) -> Efficiency:
    """Return the geometric mean of each efficiency over all GPUs except `gpu`.

    For the interconnect and the factor of mixed steps, the mean covers only GPUs with the same kind
    of interconnect, if there are any.
    """
    others = {name: one for name, one in efficiencies.items() if name != gpu.name}
    alike = {
        name: one for name, one in others.items() if gpus()[name].peer_to_peer == gpu.peer_to_peer
    }
    linked = {"all_reduce_share", "all_reduce_launch_s", "mixed_decode_factor"}
    means = {}
    for field in Efficiency.__struct_fields__:
        over = alike if field in linked and alike else others
        logs = [math.log(getattr(one, field)) for one in over.values()]
        means[field] = math.exp(sum(logs) / len(logs))
    return Efficiency(**means)


class Roofline(Struct, frozen=True, kw_only=True):
    """A calculator of the times and the memory of one model on several GPUs of one kind, each of
    which has a share of every layer.
    """

    shape: ModelShape
    gpu: Gpu
    efficiency: Efficiency
    tensor_parallel: int = 1
    kv_format: KvFormat = "auto"
    context_tokens: int = CONTEXT_TOKENS

    def products_s(self, tokens: int) -> Seconds:
        """Return the time in seconds of the matrix products in all layers except routed experts,
        for a step with `tokens` tokens.
        """
        shape, degree = self.shape, self.tensor_parallel
        total = shape.layers * sum(
            self._product_s(tokens, n, k, shape.linear_format)
            for n, k in shape.attention_products(degree)
        )
        total += shape.dense_layers * self._feed_forward_s(tokens, shape.dense_inner)
        if shape.latent is not None:
            total += shape.layers * self.efficiency.latent_launch_s
        if shape.experts is not None and shape.experts.shared_inner:
            total += shape.experts.layers * self._feed_forward_s(tokens, shape.experts.shared_inner)
        return total

    def experts_s(self, tokens: int) -> Seconds:
        """Return the time in seconds of the routed experts in all layers, for a step with `tokens`
        tokens; 0 if the model has none.
        """
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return 0.0
        efficiency = self.efficiency
        width = max(1, experts.inner // self.tensor_parallel)
        rows = tokens * experts.per_token
        # Kernels for 8-bit weights also reach only a share of the 16-bit peak.
        peak = self.gpu.half_flops * efficiency.expert_compute * width / (width + EXPERT_WIDTH)
        packed = BYTES_A_WEIGHT[shape.expert_format] < 1.0
        share = efficiency.packed_bandwidth if packed else efficiency.expert_bandwidth
        seconds = _blend(
            self.expert_bytes_a_layer(tokens) / (self.gpu.memory_bytes_per_s * share),
            2.0 * rows * 3 * shape.hidden * width / peak,
        )
        # The tokens of each expert are gathered, and its outputs are written and summed.
        moved = rows * (3 * shape.hidden + 3 * width) * _BYTES
        return experts.layers * (
            EXPERT_KERNELS * LAUNCH_S + seconds + moved / self.gpu.memory_bytes_per_s
        )

    def expert_bytes_a_layer(self, tokens: int) -> float:
        """Return the bytes of one layer's routed experts that each GPU reads for a step with
        `tokens` tokens; 0 if the model has none.
        """
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return 0.0
        touched = experts.count * (1.0 - (1.0 - experts.per_token / experts.count) ** tokens)
        width = max(1, experts.inner // self.tensor_parallel)
        return touched * 3 * shape.hidden * width * BYTES_A_WEIGHT[shape.expert_format]

    def elementwise_s(self, tokens: int) -> Seconds:
        """Return the time in seconds of norms, positions and activations in all layers, for a step
        with `tokens` tokens.
        """
        shape, degree = self.shape, self.tensor_parallel
        heads = (shape.heads + shape.key_value_heads) / degree * shape.head_dim
        experts = shape.experts
        inner = shape.dense_layers * shape.dense_inner
        if experts is not None:
            inner += experts.layers * experts.shared_inner  # `experts_s` has those of the others
        # Two norms read and write state and residual; then come positions and an activation of two
        # inputs.
        numbers = shape.layers * (8 * shape.hidden + 2 * heads) + 3 * inner / degree
        moved = tokens * numbers * _BYTES
        speed = self.gpu.memory_bytes_per_s * self.efficiency.elementwise_bandwidth
        return shape.layers * KERNELS_BESIDES * LAUNCH_S + moved / speed

    def head_s(self, sequences: int) -> Seconds:
        """Return the time in seconds of the output layer and of sampling, for a step in which
        `sequences` requests get a token.
        """
        shape = self.shape
        rows = max(1, shape.vocabulary // self.tensor_parallel)
        drawn = sequences * shape.vocabulary * 4 * _BYTES / self.gpu.memory_bytes_per_s
        return self._product_s(sequences, rows, shape.hidden, "16bit") + drawn

    def all_reduce_s(self, tokens: int) -> Seconds:
        """Return the time in seconds of both all-reduces in all layers, for a step with `tokens`
        tokens; 0 on one GPU.
        """
        degree = self.tensor_parallel
        if degree == 1:
            return 0.0
        sent = tokens * self.shape.hidden * _BYTES * 2 * (degree - 1) / degree
        speed = self.gpu.interconnect_bytes_per_s * self.efficiency.all_reduce_share
        launch = self.efficiency.all_reduce_launch_s * math.sqrt(degree / 2)
        return 2 * self.shape.layers * (launch + sent / speed)

    @property
    def pair_s(self) -> Seconds:
        """Time in seconds of the attention of one prompt token to one earlier token, in all
        layers.
        """
        shape = self.shape
        latent = shape.latent
        dims = 2 * shape.head_dim
        if latent is not None:
            dims = latent.plain_dim + latent.rotary_dim + latent.value_dim
        operations = 2 * shape.heads / self.tensor_parallel * dims
        speed = self.gpu.half_flops * self.efficiency.prefill_compute
        # In a window of W, a prompt of n tokens has nW - W*W/2 pairs instead of n*n/2.
        share = (
            min(1.0, shape.window_tokens / self.context_tokens) if shape.windowed_layers else 1.0
        )
        layers = shape.layers - shape.windowed_layers + shape.windowed_layers * (2 - share) * share
        return layers * operations / speed

    @property
    def decode_s_per_context_token(self) -> Seconds:
        """Time in seconds of the attention of one decoding request to one token of its context, in
        all layers.
        """
        shape, efficiency = self.shape, self.efficiency
        read = self.kv_bytes_a_layer / (self.gpu.memory_bytes_per_s * efficiency.decode_bandwidth)
        if shape.latent is not None:
            # All heads read one vector, with enough arithmetic to matter.
            dims = 2 * shape.latent.key_value_rank + shape.latent.rotary_dim
            operations = 2 * shape.heads / self.tensor_parallel * dims
            read = _blend(read, operations / (self.gpu.half_flops * efficiency.prefill_compute))
        return read * shape.reach(self.context_tokens)

    @property
    def kv_bytes_a_layer(self) -> float:
        """Bytes that one layer stores in the KV cache for one token on each GPU."""
        numbers = self.shape.key_value_numbers(self.tensor_parallel)
        return numbers * (1 if self.kv_format == "fp8" else _BYTES)

    def step_s(self, tokens: int) -> Seconds:
        """Return the time in seconds that a step with `tokens` tokens spends in all layers.
        Attention to the context, communication between GPUs and the output layer are not included.
        """
        return self.products_s(tokens) + self.experts_s(tokens) + self.elementwise_s(tokens)

    def _feed_forward_s(self, tokens: int, inner: int) -> Seconds:
        shape = self.shape
        width = max(1, inner // self.tensor_parallel)
        up = self._product_s(tokens, 2 * width, shape.hidden, shape.linear_format)
        return up + self._product_s(tokens, shape.hidden, width, shape.linear_format)

    def _product_s(self, rows: int, outputs: int, inputs: int, weights: WeightFormat) -> Seconds:
        """Return the time in seconds of the product of a `rows` x `inputs` matrix and an `inputs` x
        `outputs` matrix of weights.
        """
        efficiency = self.efficiency
        share = efficiency.fp8_compute if self._is_fp8(weights) else efficiency.linear_compute
        moved = outputs * inputs * BYTES_A_WEIGHT[weights] + rows * (outputs + inputs) * _BYTES
        return LAUNCH_S + _blend(
            moved / (self.gpu.memory_bytes_per_s * efficiency.linear_bandwidth),
            2.0 * rows * outputs * inputs / (self._peak(weights) * share),
        )

    def _is_fp8(self, weights: WeightFormat) -> bool:
        return weights in {"fp8", "int8", "nvfp4"} and self._peak(weights) > self.gpu.half_flops

    def _peak(self, weights: WeightFormat) -> float:
        """Return the GPU's peak in operations per second for weights of this format. INT4, MXFP4
        and formats that the GPU does not support are unpacked to 16 bits.
        """
        gpu = self.gpu
        peaks = {"fp8": gpu.fp8_flops, "int8": gpu.int8_flops, "nvfp4": gpu.fp4_flops}
        return peaks.get(weights) or gpu.half_flops


class Fit(Struct, frozen=True, kw_only=True):
    """The use of a GPU's memory by a model, in total and for the KV cache."""

    kv_tokens: int
    """Number of tokens that the KV cache holds; 0 or less if the weights do not fit."""
    weight_bytes: float
    """Size in bytes of the weights on each GPU."""
    other_bytes: float
    """Size in bytes of activations, buffers and driver on each GPU."""


def memory_fit(
    roofline: Roofline, memory: MemoryModel, *, memory_share: float, sequences: int, batched: int
) -> Fit:
    """Return the use of each GPU's memory by an engine with at most `sequences` requests and
    `batched` tokens in a step. The engine uses `memory_share` of the memory.
    """
    shape, degree = roofline.shape, roofline.tensor_parallel
    experts = shape.experts
    inner = max(
        shape.dense_inner,
        experts.per_token * experts.inner + experts.shared_inner if experts is not None else 0,
    )
    # The feed-forward layer has two inputs and a product, beside state and residual.
    feed_forward = batched * (3 * inner / degree + 3 * shape.hidden) * _BYTES
    sampler = sequences * shape.vocabulary * memory.sampler_bytes
    workspace = batched * memory.expert_bytes if experts is not None else 0.0
    other = memory.fixed_bytes + max(feed_forward, sampler, workspace)
    if degree > 1:
        other += memory.communication_bytes
    weights = shape.weight_bytes / degree
    left = memory_share * roofline.gpu.memory_bytes - weights - other
    kept = roofline.kv_bytes_a_layer * shape.reach(roofline.context_tokens)
    return Fit(kv_tokens=math.floor(left / kept), weight_bytes=weights, other_bytes=other)


def _blend(first_s: Seconds, second_s: Seconds) -> Seconds:
    return float((first_s**SHARPNESS + second_s**SHARPNESS) ** (1 / SHARPNESS))
