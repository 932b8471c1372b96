"""A roofline model that turns a model's shape and a GPU's peaks into the constants of a profile.

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
"""Exponent p above, which determines how sharply a kernel changes from reading to arithmetic."""
LAUNCH_S: Final = 2e-6
"""Minimum time of a kernel inside a CUDA graph."""
EXPERT_WIDTH: Final = 350
"""Width of an expert on one GPU at which its arithmetic is half as fast as that of a wide one."""
EXPERT_KERNELS: Final = 5
"""Number of kernels in an expert layer: router, sorting of tokens, two matrix products, sum."""
KERNELS_BESIDES: Final = 5
"""Number of kernels in a layer that are not matrix products: two norms, positions, activation, KV
write."""
MEMORY_SHARE: Final = 0.92
"""Default of vLLM's `--gpu-memory-utilization` from version 0.20 on; before, it was 0.9."""
CONTEXT_TOKENS: Final = 4096
"""Usual context length, which determines the cost of layers with sliding windows."""
TENSOR_PARALLEL_MAX: Final = 16

LAYER_TABLE_TOKENS: Final = (
    1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
"""Points of a profile's table of the linear layers, in tokens."""
_BYTES: Final = 2
"""Bytes of an activation, and of a number in the KV cache unless it is in FP8."""

KINDS: Final[Mapping[str, str]] = {
    "dense": "dense, weights of 16 bits",
    "quantized": "dense, weights of 8 bits",
    "quantized-blackwell": "the same on B200 and RTX PRO 6000",
    "experts": "with experts, weights of 16 or 8 bits",
    "packed": "weights of 4 bits",
    "latent": "latent attention (MLA)",
}
"""Kinds of models, with their names in tables."""

KvFormat: TypeAlias = Literal["auto", "fp8"]
_Share: TypeAlias = Annotated[float, Meta(gt=0.0, le=3.0)]


class Efficiency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shares of a GPU's data-sheet peaks that its kernels reach."""

    linear_bandwidth: _Share
    """Share of the memory bandwidth in matrix products with few rows."""
    linear_compute: _Share
    """Share of the 16-bit arithmetic in matrix products with many rows."""
    fp8_compute: _Share
    """Share of the FP8 arithmetic in matrix products with many rows."""
    expert_bandwidth: _Share
    """Share of the memory bandwidth in expert layers."""
    packed_bandwidth: _Share
    """Share of the memory bandwidth in expert layers whose weights have less than 8 bits."""
    expert_compute: _Share
    """Share of the 16-bit arithmetic in layers of wide experts."""
    prefill_compute: _Share
    """Share of the 16-bit arithmetic in attention of a prompt."""
    prefill_launch_s: Seconds
    """Minimum time of attention of a chunk in each layer."""
    decode_bandwidth: _Share
    """Share of the memory bandwidth in attention of decoding requests."""
    decode_launch_s: Seconds
    """Minimum time of attention in each layer of a step that decodes."""
    latent_launch_s: Seconds
    """Additional time of latent attention (MLA) in each layer, for its many small kernels."""
    all_reduce_share: _Share
    """Share of the interconnect in an all-reduce."""
    all_reduce_launch_s: Seconds
    """Minimum time of an all-reduce between two GPUs."""
    elementwise_bandwidth: _Share
    """Share of the memory bandwidth in kernels that are not matrix products. Caches raise it above
    1."""
    mixed_decode_factor: Annotated[float, Meta(ge=1.0, le=10.0)]
    """Factor by which attention decodes more slowly beside a chunk
    (`Profile.mixed_decode_factor`)."""


class MemoryModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a GPU that is used by neither weights nor KV cache."""

    fixed_bytes: float
    """Memory of the driver, the kernels and the allocator on each GPU."""
    communication_bytes: float
    """Additional memory on each of several GPUs."""
    sampler_bytes: float
    """Memory for each request and word of the vocabulary while tokens are sampled."""
    expert_bytes: float
    """Workspace for each token of a step in models with experts."""
    dense_error: float
    """Largest error for models without experts, as a share of a GPU's memory."""
    expert_error: float
    """Largest error for models with experts, as a share of a GPU's memory."""

    def error_of(self, shape: ModelShape) -> float:
        """Return the error for a model, as a share of its GPU's memory."""
        return self.dense_error if shape.experts is None else self.expert_error


class StepError(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest errors of step times, as shares."""

    prefill: float
    decode: float


class Fitted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of efficiencies: fitted values, and errors of estimates."""

    gpus: dict[str, Efficiency]
    memory: MemoryModel
    measured: dict[str, StepError]
    """Largest errors on a GPU with measurements of other models, by `kind_of` a model."""
    unmeasured: dict[str, StepError]
    """Largest errors on a GPU without measurements, by `kind_of` a model."""


@cache
def fitted() -> Fitted:
    """Return the values that `python -m docs.estimates` has written."""
    return msgspec.convert(toml_in(Path(__file__).with_name("efficiencies.toml")), Fitted)


def kind_of(shape: ModelShape, gpu: Gpu) -> str:
    """Return the kind of a model, one of `KINDS`. Each kind has its own estimation errors."""
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
    """Return the geometric means over all GPUs except `gpu`.

    The means of the interconnect cover only GPUs with the same kind of interconnect.
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
    """One model on several GPUs of one kind, each with a share of every layer."""

    shape: ModelShape
    gpu: Gpu
    efficiency: Efficiency
    tensor_parallel: int = 1
    kv_format: KvFormat = "auto"
    context_tokens: int = CONTEXT_TOKENS

    def products_s(self, tokens: int) -> Seconds:
        """Return the time of the matrix products of all layers except experts, for `tokens`
        tokens.
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
        """Return the time of all expert layers for `tokens` tokens; 0 if there are none."""
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
        """Return the bytes of one layer's experts that are read for `tokens` tokens; 0 without
        experts.
        """
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return 0.0
        touched = experts.count * (1.0 - (1.0 - experts.per_token / experts.count) ** tokens)
        width = max(1, experts.inner // self.tensor_parallel)
        return touched * 3 * shape.hidden * width * BYTES_A_WEIGHT[shape.expert_format]

    def elementwise_s(self, tokens: int) -> Seconds:
        """Return the time of norms, positions and activations of all layers."""
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
        """Return the time of the output layer and of sampling."""
        shape = self.shape
        rows = max(1, shape.vocabulary // self.tensor_parallel)
        drawn = sequences * shape.vocabulary * 4 * _BYTES / self.gpu.memory_bytes_per_s
        return self._product_s(sequences, rows, shape.hidden, "16bit") + drawn

    def all_reduce_s(self, tokens: int) -> Seconds:
        """Return the time of both all-reduces of all layers; 0 on one GPU."""
        degree = self.tensor_parallel
        if degree == 1:
            return 0.0
        sent = tokens * self.shape.hidden * _BYTES * 2 * (degree - 1) / degree
        speed = self.gpu.interconnect_bytes_per_s * self.efficiency.all_reduce_share
        launch = self.efficiency.all_reduce_launch_s * math.sqrt(degree / 2)
        return 2 * self.shape.layers * (launch + sent / speed)

    @property
    def pair_s(self) -> Seconds:
        """Time of attention of one token of a chunk to one token before it, in all layers."""
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
        """Time of attention of one decoding request to one token before it, in all layers."""
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
        """Bytes that a layer stores for one token on each GPU."""
        numbers = self.shape.key_value_numbers(self.tensor_parallel)
        return numbers * (1 if self.kv_format == "fp8" else _BYTES)

    def step_s(self, tokens: int) -> Seconds:
        """Return the time of a step for its tokens: all layers without attention and
        communication.
        """
        return self.products_s(tokens) + self.experts_s(tokens) + self.elementwise_s(tokens)

    def _feed_forward_s(self, tokens: int, inner: int) -> Seconds:
        shape = self.shape
        width = max(1, inner // self.tensor_parallel)
        up = self._product_s(tokens, 2 * width, shape.hidden, shape.linear_format)
        return up + self._product_s(tokens, shape.hidden, width, shape.linear_format)

    def _product_s(self, rows: int, outputs: int, inputs: int, weights: WeightFormat) -> Seconds:
        """Return the time of a product of a `rows` x `inputs` and an `inputs` x `outputs`
        matrix.
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
        """Return the operations per second with such weights; unsupported weights are unpacked to
        16 bits.
        """
        gpu = self.gpu
        peaks = {"fp8": gpu.fp8_flops, "int8": gpu.int8_flops, "nvfp4": gpu.fp4_flops}
        return peaks.get(weights) or gpu.half_flops


class Fit(Struct, frozen=True, kw_only=True):
    """The memory use of a model on its GPUs."""

    kv_tokens: int
    """Tokens that the KV cache of all GPUs together holds; 0 or less if the weights do not fit."""
    weight_bytes: float
    """Weights on each GPU in bytes."""
    other_bytes: float
    """Activations, buffers and driver on each GPU in bytes."""


def memory_fit(
    roofline: Roofline, memory: MemoryModel, *, memory_share: float, sequences: int, batched: int
) -> Fit:
    """Return the memory use with `sequences` sequences and `batched` tokens in a step."""
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
