"""The roofline model: what it costs to compute, to read and to send."""

import math

import pytest
from msgspec.structs import replace

from sim.estimation.gpus import gpus
from sim.estimation.roofline import (
    Efficiency,
    MemoryModel,
    Roofline,
    fitted,
    kind_of,
    memory_fit,
    pooled,
)
from tests.sim.estimation.examples import shape_of

PERFECT = Efficiency(
    linear_bandwidth=1.0, linear_compute=1.0, fp8_compute=1.0, expert_bandwidth=1.0,
    packed_bandwidth=1.0, expert_compute=1.0, prefill_compute=1.0, prefill_launch_s=1e-6,
    decode_bandwidth=1.0, decode_launch_s=1e-6, latent_launch_s=1e-6, all_reduce_share=1.0,
    all_reduce_launch_s=1e-6, elementwise_bandwidth=1.0, mixed_decode_factor=1.0,
)  # fmt: skip


def at(model, gpu="h100", degree=1, quantization="", **others):
    return Roofline(
        shape=shape_of(model, quantization), gpu=gpus()[gpu], efficiency=PERFECT,
        tensor_parallel=degree, **others,
    )  # fmt: skip


def test_one_token_takes_the_reading_of_the_weights():
    """Of the layers, at the bandwidth of the data sheet; 128 kernels are launched besides."""
    one = at("llama-3.1-8b")
    read_s = 2 * one.shape.linear_weights / one.gpu.memory_bytes_per_s
    assert read_s < one.products_s(1) < read_s * 1.08


def test_many_tokens_take_the_arithmetic():
    """Two operations a weight and token, at the peak of the data sheet."""
    one = at("llama-3.1-8b")
    operations = 2 * 16_384 * one.shape.linear_weights
    assert one.products_s(16_384) == pytest.approx(operations / one.gpu.half_flops, rel=0.02)


def test_quantized_weights_are_read_faster_and_computed_faster_where_the_gpu_can():
    """FP8 halves both on an H100; on an A100, which has no FP8, reading alone."""
    for gpu, computes in (("h100", 0.5), ("a100-80gb", 1.0)):
        plain, fp8 = at("llama-3.1-8b", gpu), at("llama-3.1-8b", gpu, quantization="fp8")
        assert fp8.products_s(1) / plain.products_s(1) == pytest.approx(0.5, abs=0.03)
        assert fp8.products_s(16_384) / plain.products_s(16_384) == pytest.approx(
            computes, abs=0.03
        )


def test_experts_are_read_as_far_as_tokens_go_to_them():
    """One token reads 8 of 128 experts, many all; no model without experts reads any."""
    one = at("qwen3-30b-a3b")
    whole = 2 * one.shape.expert_weights / one.shape.experts.layers
    assert one.expert_bytes_a_layer(1) == pytest.approx(whole * 8 / 128)
    assert one.expert_bytes_a_layer(4096) == pytest.approx(whole)
    assert at("llama-3.1-8b").expert_bytes_a_layer(8) == 0.0


def test_degrees_share_the_work_and_send_the_sums():
    """Half the products on each of two; nothing is sent on one."""
    one, two = at("llama-3.3-70b"), at("llama-3.3-70b", degree=2)
    assert two.products_s(4096) / one.products_s(4096) == pytest.approx(0.5, rel=0.01)
    assert one.all_reduce_s(512) == 0.0
    sent_s = 2 * 80 * (512 * 8192 * 2) / two.gpu.interconnect_bytes_per_s
    assert two.all_reduce_s(512) == pytest.approx(sent_s + 2 * 80 * 1e-6)


def test_attention_reads_what_is_kept_of_a_context():
    """131,072 bytes a token of Llama-3.1-8B; half of it in FP8."""
    one = at("llama-3.1-8b")
    assert one.decode_s_per_context_token == pytest.approx(131_072 / one.gpu.memory_bytes_per_s)
    fp8 = replace(one, kv_format="fp8")
    assert fp8.decode_s_per_context_token == pytest.approx(one.decode_s_per_context_token / 2)


def test_windows_make_long_contexts_cheaper():
    """By the share of the context that they hold, in reading and in pairs."""
    short, long = at("gemma-3-27b", context_tokens=1024), at("gemma-3-27b", context_tokens=16_384)
    assert long.decode_s_per_context_token / short.decode_s_per_context_token == pytest.approx(
        (10 + 52 / 16) / 62
    )
    assert long.pair_s < short.pair_s / 3


def test_a_gpu_without_measurements_gets_the_means_of_the_others():
    """Its own are left out, and those of the interconnect are of GPUs with the same kind."""
    known = fitted().gpus
    others = [one.linear_bandwidth for name, one in known.items() if name != "h100"]
    mean = math.exp(sum(map(math.log, others)) / len(others))
    assert pooled(known, gpus()["h100"]).linear_bandwidth == pytest.approx(mean)
    assert pooled(known, gpus()["mi300x"]).mixed_decode_factor == pytest.approx(1.0)
    assert pooled(known, gpus()["t4"]).mixed_decode_factor > 1.5


@pytest.mark.parametrize(
    ("model", "quantization", "gpu", "kind"),
    [
        ("llama-3.1-8b", "", "h100", "dense"), ("llama-3.1-8b", "fp8", "h100", "quantized"),
        ("llama-3.1-8b", "fp8", "b200", "quantized-blackwell"), ("llama-3.1-8b", "", "b200", "dense"),
        ("llama-3.1-8b", "int4", "h100", "packed"), ("gpt-oss-20b", "", "h100", "packed"),
        ("qwen3-30b-a3b", "", "h100", "experts"), ("deepseek-v3", "", "h200", "latent"),
    ],
)  # fmt: skip
def test_kinds_are_told_apart(model, quantization, gpu, kind):
    """Each is estimated with other errors."""
    assert kind_of(shape_of(model, quantization), gpus()[gpu]) == kind


def test_the_kv_cache_gets_what_is_left():
    """Memory less weights, buffers and what the sampler takes."""
    memory = MemoryModel(
        fixed_bytes=1e9, communication_bytes=0.5e9, sampler_bytes=0.0, expert_bytes=0.0,
        dense_error=0.01, expert_error=0.1,
    )  # fmt: skip
    one = at("llama-3.1-8b")
    fit = memory_fit(one, memory, memory_share=0.9, sequences=256, batched=1)
    left = 0.9 * one.gpu.memory_bytes - one.shape.weight_bytes - 1e9
    assert fit.kv_tokens == pytest.approx(left / 131_072, rel=0.001)
    assert (
        memory_fit(at("llama-3.3-70b"), memory, memory_share=0.9, sequences=1, batched=1).kv_tokens
        < 0
    )
