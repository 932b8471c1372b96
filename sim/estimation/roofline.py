"""A roofline model: from a model's shape and a GPU's peaks to the constants of a profile.

A kernel takes as long as its arithmetic at a share of the GPU's peak, or as its reading at a share of
the bandwidth, whichever is more; near the point where both are equal, more than either (`SHARPNESS`):

    t = launch_s + ((bytes / (bandwidth * share))^p + (operations / (peak * share))^p)^(1/p)

The shares are efficiencies that were fitted to kernel timings of vLLM (`efficiencies.toml`, by
`python -m docs.estimates`, which also says how far the estimates are off). A GPU without such timings
gets the geometric mean over the GPUs that have them.

What depends on routing is taken for balanced: m tokens of which each takes k of E experts read
E * (1 - (1 - k/E)^m) of them. Layers with a sliding window are counted by the share of a context of
`context_tokens` that their window holds, because a profile has one price for each token of context.
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
"""The exponent p above: how sharply a kernel passes from reading to arithmetic."""
LAUNCH_S: Final = 2e-6
"""What a kernel takes however small it is, inside a CUDA graph."""
EXPERT_WIDTH: Final = 350
"""Width of an expert, on one GPU, at which its arithmetic is half as fast as that of a wide one."""
EXPERT_KERNELS: Final = 5
"""Kernels of a layer of experts: the router, the sorting of tokens, two products, the sum."""
KERNELS_BESIDES: Final = 5
"""Kernels of a layer that are no product of matrices: two norms, positions, activation, KV write."""
MEMORY_SHARE: Final = 0.92
"""`--gpu-memory-utilization` of vLLM by default, from version 0.20 on; 0.9 before."""
CONTEXT_TOKENS: Final = 4096
"""The usual length of a context, by which sliding windows are counted."""
TENSOR_PARALLEL_MAX: Final = 16

LAYER_TABLE_TOKENS: Final = (
    1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
)  # fmt: skip
"""Where a profile's table of the linear layers has its points."""
_BYTES: Final = 2
"""Of a number of activations, and of the KV cache unless it is in FP8."""

KINDS: Final[Mapping[str, str]] = {
    "dense": "dense, weights of 16 bits",
    "quantized": "dense, weights of 8 bits",
    "quantized-blackwell": "the same on B200 and RTX PRO 6000",
    "experts": "with experts, weights of 16 or 8 bits",
    "packed": "weights of 4 bits",
    "latent": "latent attention (MLA)",
}
"""Kinds of models, and what they are called in tables."""

KvFormat: TypeAlias = Literal["auto", "fp8"]
_Share: TypeAlias = Annotated[float, Meta(gt=0.0, le=3.0)]


class Efficiency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which shares of a GPU's peaks its kernels reach; a peak is that of the data sheet."""

    linear_bandwidth: _Share
    """Of the memory's bandwidth, by products of matrices with few rows."""
    linear_compute: _Share
    """Of the arithmetic in 16 bits, by products of matrices with many rows."""
    fp8_compute: _Share
    """Of the arithmetic in FP8, by the same."""
    expert_bandwidth: _Share
    """Of the memory's bandwidth, by layers of experts."""
    packed_bandwidth: _Share
    """Of the memory's bandwidth, by layers of experts whose weights have less than 8 bits."""
    expert_compute: _Share
    """Of the arithmetic in 16 bits, by layers of wide experts."""
    prefill_compute: _Share
    """Of the arithmetic in 16 bits, by attention of a prompt."""
    prefill_launch_s: Seconds
    """What attention of a chunk takes in each layer, however short it is."""
    decode_bandwidth: _Share
    """Of the memory's bandwidth, by attention of requests that decode."""
    decode_launch_s: Seconds
    """What attention of a step that decodes takes in each layer."""
    latent_launch_s: Seconds
    """What latent attention (MLA) takes besides, in each layer: its many small kernels."""
    all_reduce_share: _Share
    """Of the interconnect, by an all-reduce."""
    all_reduce_launch_s: Seconds
    """What an all-reduce takes however small it is, between two GPUs."""
    elementwise_bandwidth: _Share
    """Of the memory's bandwidth, by kernels that are no products of matrices. Caches make it more than 1."""
    mixed_decode_factor: Annotated[float, Meta(ge=1.0, le=10.0)]
    """How much slower attention decodes beside a chunk (`Profile.mixed_decode_factor`)."""


class MemoryModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What takes memory of a GPU besides weights and KV cache."""

    fixed_bytes: float
    """Of the driver, the kernels and the allocator, on each GPU."""
    communication_bytes: float
    """Besides that where there are several GPUs."""
    sampler_bytes: float
    """For each request and word of the vocabulary, while tokens are drawn."""
    expert_bytes: float
    """For each token of a step, in models with experts: their kernels' workspace."""
    dense_error: float
    """Share of a GPU's memory that was estimated wrong at worst, of models without experts."""
    expert_error: float
    """The same of models with experts."""

    def error_of(self, shape: ModelShape) -> float:
        """The error for a model, as a share of its GPU's memory."""
        return self.dense_error if shape.experts is None else self.expert_error


class StepError(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the times of steps were off at worst, as shares."""

    prefill: float
    decode: float


class Fitted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of efficiencies: what was fitted, and how far estimates were off."""

    gpus: dict[str, Efficiency]
    memory: MemoryModel
    measured: dict[str, StepError]
    """By `kind_of` a model: worst errors on a GPU of which other models were measured."""
    unmeasured: dict[str, StepError]
    """By `kind_of` a model: worst errors on a GPU of which nothing was measured."""


@cache
def fitted() -> Fitted:
    """What `python -m docs.estimates` has written."""
    return msgspec.convert(toml_in(Path(__file__).with_name("efficiencies.toml")), Fitted)


def kind_of(shape: ModelShape, gpu: Gpu) -> str:
    """Return which of `KINDS` a model is of: each kind is estimated with other errors."""
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
    """The geometric means over all GPUs but `gpu`; of the interconnect over those with its kind."""
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
    """One model on some GPUs of a kind, each of which has a share of every layer."""

    shape: ModelShape
    gpu: Gpu
    efficiency: Efficiency
    tensor_parallel: int = 1
    kv_format: KvFormat = "auto"
    context_tokens: int = CONTEXT_TOKENS

    def products_s(self, tokens: int) -> Seconds:
        """Products of matrices of all layers but experts, for `tokens` tokens."""
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
        """All layers of experts, for `tokens` tokens; 0 if there are none."""
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return 0.0
        efficiency = self.efficiency
        width = max(1, experts.inner // self.tensor_parallel)
        rows = tokens * experts.per_token
        # Kernels for weights of 8 bits, too, reach no more than a share of the peak in 16 bits.
        peak = self.gpu.half_flops * efficiency.expert_compute * width / (width + EXPERT_WIDTH)
        packed = BYTES_A_WEIGHT[shape.expert_format] < 1.0
        share = efficiency.packed_bandwidth if packed else efficiency.expert_bandwidth
        seconds = _blend(
            self.expert_bytes_a_layer(tokens) / (self.gpu.memory_bytes_per_s * share),
            2.0 * rows * 3 * shape.hidden * width / peak,
        )
        # The tokens of each expert are gathered, and its answers written and summed.
        moved = rows * (3 * shape.hidden + 3 * width) * _BYTES
        return experts.layers * (
            EXPERT_KERNELS * LAUNCH_S + seconds + moved / self.gpu.memory_bytes_per_s
        )

    def expert_bytes_a_layer(self, tokens: int) -> float:
        """Bytes of the experts of one layer that are read for `tokens` tokens; 0 if there are none."""
        shape, experts = self.shape, self.shape.experts
        if experts is None:
            return 0.0
        touched = experts.count * (1.0 - (1.0 - experts.per_token / experts.count) ** tokens)
        width = max(1, experts.inner // self.tensor_parallel)
        return touched * 3 * shape.hidden * width * BYTES_A_WEIGHT[shape.expert_format]

    def elementwise_s(self, tokens: int) -> Seconds:
        """Norms, positions and activations of all layers."""
        shape, degree = self.shape, self.tensor_parallel
        heads = (shape.heads + shape.key_value_heads) / degree * shape.head_dim
        experts = shape.experts
        inner = shape.dense_layers * shape.dense_inner
        if experts is not None:
            inner += experts.layers * experts.shared_inner  # `experts_s` has those of the others
        # Two norms that read and write state and residual, positions, an activation of two inputs.
        numbers = shape.layers * (8 * shape.hidden + 2 * heads) + 3 * inner / degree
        moved = tokens * numbers * _BYTES
        speed = self.gpu.memory_bytes_per_s * self.efficiency.elementwise_bandwidth
        return shape.layers * KERNELS_BESIDES * LAUNCH_S + moved / speed

    def head_s(self, sequences: int) -> Seconds:
        """The output layer and the choice of tokens."""
        shape = self.shape
        rows = max(1, shape.vocabulary // self.tensor_parallel)
        drawn = sequences * shape.vocabulary * 4 * _BYTES / self.gpu.memory_bytes_per_s
        return self._product_s(sequences, rows, shape.hidden, "16bit") + drawn

    def all_reduce_s(self, tokens: int) -> Seconds:
        """Both all-reduces of all layers; 0 on one GPU."""
        degree = self.tensor_parallel
        if degree == 1:
            return 0.0
        sent = tokens * self.shape.hidden * _BYTES * 2 * (degree - 1) / degree
        speed = self.gpu.interconnect_bytes_per_s * self.efficiency.all_reduce_share
        launch = self.efficiency.all_reduce_launch_s * math.sqrt(degree / 2)
        return 2 * self.shape.layers * (launch + sent / speed)

    @property
    def pair_s(self) -> Seconds:
        """Attention of one token of a chunk to one token before it, in all layers."""
        shape = self.shape
        latent = shape.latent
        dims = 2 * shape.head_dim
        if latent is not None:
            dims = latent.plain_dim + latent.rotary_dim + latent.value_dim
        operations = 2 * shape.heads / self.tensor_parallel * dims
        speed = self.gpu.half_flops * self.efficiency.prefill_compute
        # In a window of W a prompt of n has nW - W*W/2 pairs in the place of n*n/2.
        share = (
            min(1.0, shape.window_tokens / self.context_tokens) if shape.windowed_layers else 1.0
        )
        layers = shape.layers - shape.windowed_layers + shape.windowed_layers * (2 - share) * share
        return layers * operations / speed

    @property
    def decode_s_per_context_token(self) -> Seconds:
        """Attention of one request that decodes to one token before it, in all layers."""
        shape, efficiency = self.shape, self.efficiency
        read = self.kv_bytes_a_layer / (self.gpu.memory_bytes_per_s * efficiency.decode_bandwidth)
        if shape.latent is not None:
            # All heads read one vector, with arithmetic enough to matter.
            dims = 2 * shape.latent.key_value_rank + shape.latent.rotary_dim
            operations = 2 * shape.heads / self.tensor_parallel * dims
            read = _blend(read, operations / (self.gpu.half_flops * efficiency.prefill_compute))
        return read * shape.reach(self.context_tokens)

    @property
    def kv_bytes_a_layer(self) -> float:
        """Bytes that a layer keeps of one token on each GPU."""
        numbers = self.shape.key_value_numbers(self.tensor_parallel)
        return numbers * (1 if self.kv_format == "fp8" else _BYTES)

    def step_s(self, tokens: int) -> Seconds:
        """All that a step does for each token: layers without attention and communication."""
        return self.products_s(tokens) + self.experts_s(tokens) + self.elementwise_s(tokens)

    def _feed_forward_s(self, tokens: int, inner: int) -> Seconds:
        shape = self.shape
        width = max(1, inner // self.tensor_parallel)
        up = self._product_s(tokens, 2 * width, shape.hidden, shape.linear_format)
        return up + self._product_s(tokens, shape.hidden, width, shape.linear_format)

    def _product_s(self, rows: int, outputs: int, inputs: int, weights: WeightFormat) -> Seconds:
        """A product of `rows` by `inputs` with `inputs` by `outputs` numbers."""
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
        """Operations per second with such weights; where a GPU cannot, they are unpacked to 16 bits."""
        gpu = self.gpu
        peaks = {"fp8": gpu.fp8_flops, "int8": gpu.int8_flops, "nvfp4": gpu.fp4_flops}
        return peaks.get(weights) or gpu.half_flops


class Fit(Struct, frozen=True, kw_only=True):
    """How a model fits into the memory of its GPUs."""

    kv_tokens: int
    """Tokens that the KV cache of all GPUs together holds; 0 or less if the weights do not fit."""
    weight_bytes: float
    """On each GPU."""
    other_bytes: float
    """On each GPU: activations, buffers, driver."""


def memory_fit(
    roofline: Roofline, memory: MemoryModel, *, memory_share: float, sequences: int, batched: int
) -> Fit:
    """How many tokens the KV cache holds with so many sequences and tokens in a step."""
    shape, degree = roofline.shape, roofline.tensor_parallel
    experts = shape.experts
    inner = max(
        shape.dense_inner,
        experts.per_token * experts.inner + experts.shared_inner if experts is not None else 0,
    )
    # The feed-forward layer's two inputs and its product, beside state and residual.
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
