"""Profiles of models and GPUs that nobody has measured."""

import pytest

from sim.engine.profiles import ProfileError, find_profile, profile_as_toml
from sim.estimation.estimate import DoesNotFitError, EstimateSettings, estimated_profile
from sim.estimation.gpus import gpus
from sim.estimation.roofline import StepError, fitted
from tests.sim.estimation.examples import shape_of


def estimate(model, gpu, degree=1, **others):
    settings = EstimateSettings(gpu=gpus()[gpu], tensor_parallel=degree, **others)
    return estimated_profile(shape_of(model), settings)


@pytest.mark.parametrize(
    ("model", "gpu", "degree"),
    [
        ("llama-3.1-8b", "l4", 1), ("llama-3.3-70b", "a100-80gb", 4), ("qwen3-32b", "l40s", 4),
        ("mixtral-8x7b", "h100", 2), ("qwen3-30b-a3b", "rtx-pro-6000", 1), ("deepseek-v3", "h200", 8),
        ("gemma-3-27b", "mi300x", 1), ("gpt-oss-20b", "rtx-4090", 1), ("llama-3.1-8b", "t4", 2),
        ("llama-3.1-8b", "a10g", 1), ("deepseek-v3", "b200", 8),
    ],
)  # fmt: skip
def test_profiles_are_whole_and_survive_their_file(tmp_path, model, gpu, degree):
    """Steps take longer with more tokens and longer contexts, and the file says that it is an estimate."""
    profile = estimate(model, gpu, degree)
    assert list(profile.linear_s) == sorted(profile.linear_s)
    assert (
        profile.decode_step_s(8, 4096)
        > profile.decode_step_s(8, 1024)
        > profile.decode_step_s(1, 1024)
    )
    assert profile.kv_tokens > 4096
    assert profile.estimated is not None
    file = tmp_path / "estimated.toml"
    file.write_text(profile_as_toml(profile, {}))
    again = find_profile(str(file))
    assert again.estimated == profile.estimated
    assert again.step_s is not None
    assert again.decode_step_s(8, 1024) == pytest.approx(profile.decode_step_s(8, 1024), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "model", "gpu", "degree"),
    [
        ("llama-3.1-8b-h100-tp1", "llama-3.1-8b", "h100", 1),
        ("qwen3-32b-h100-tp2", "qwen3-32b", "h100", 2),
        ("llama-3.1-70b-h100-tp4", "llama-3.3-70b", "h100", 4),
        ("llama-3.1-8b-rtx-4090-tp1", "llama-3.1-8b", "rtx-4090", 1),
        ("llama-3.1-8b-rtx-pro-6000-tp1", "llama-3.1-8b", "rtx-pro-6000", 1),
    ],
)
def test_without_its_gpu_an_estimate_is_as_near_as_is_published(name, model, gpu, degree):
    """Built-in profiles that were measured: prefill and decode, with nothing of that GPU known."""
    known = find_profile(name)
    mine = estimate(model, gpu, degree, as_unmeasured=True)
    error = mine.estimated
    for tokens in (512, 2048):
        ratio = mine.prefill_tokens_per_s(tokens) / known.prefill_tokens_per_s(tokens)
        assert 1 / (1 + error.prefill) <= ratio <= 1 + error.prefill
    for requests, context in ((1, 1024), (32, 1024), (32, 4096)):
        ratio = mine.decode_step_s(requests, context) / known.decode_step_s(requests, context)
        assert 1 / (1 + error.decode) <= ratio <= 1 + error.decode


def steps_of(profile):
    return StepError(prefill=profile.estimated.prefill, decode=profile.estimated.decode)


def test_an_estimate_of_a_measured_gpu_is_surer():
    """Dense models: the published errors are smaller where other models were measured."""
    assert steps_of(estimate("llama-3.1-8b", "l4")) == fitted().unmeasured["dense"]
    assert steps_of(estimate("llama-3.1-8b", "l40s")) == fitted().measured["dense"]
    left_out = estimate("llama-3.1-8b", "l40s", as_unmeasured=True)
    assert steps_of(left_out) == fitted().unmeasured["dense"]
    assert fitted().measured["dense"].prefill < fitted().unmeasured["dense"].prefill


def test_a_small_kv_cache_is_less_sure_than_a_large_one():
    """What is wrong of the memory is wrong of what is left."""
    small, large = estimate("llama-3.1-8b", "rtx-4090"), estimate("llama-3.1-8b", "h100")
    assert small.estimated.kv_tokens > 2 * large.estimated.kv_tokens
    share = fitted().memory.dense_error
    kept = large.kv_tokens * 131_072
    assert large.estimated.kv_tokens == pytest.approx(share * 85e9 / kept, abs=0.006)


@pytest.mark.parametrize(
    ("model", "gpu", "degree", "needs"),
    [
        ("llama-3.3-70b", "h100", 1, "it needs --tp 2"),
        ("llama-3.1-8b", "t4", 1, "it needs --tp 2"),
        ("deepseek-v3", "h200", 4, "it needs --tp 8"),
        ("deepseek-v3", "t4", 8, "no --tp up to 16 is enough"),
    ],
)
def test_a_model_that_does_not_fit_says_how_many_gpus_it_needs(model, gpu, degree, needs):
    """With the memory that there is and what takes it."""
    with pytest.raises(DoesNotFitError, match=rf"does not fit on {degree} x {gpu}.*; {needs}"):
        estimate(model, gpu, degree)


def test_heads_that_cannot_be_divided_are_refused(tmp_path):
    """As vLLM refuses it."""
    with pytest.raises(ProfileError, match="--tp 3: expected a divisor of the 32 attention heads"):
        estimate("llama-3.1-8b", "h100", 3)


def test_limits_of_the_engine_are_taken():
    """Of a step, of the memory and of the context."""
    profile = estimate(
        "llama-3.1-8b",
        "h100",
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len_tokens=8192,
    )
    assert (profile.max_num_seqs, profile.max_num_batched_tokens) == (64, 512)
    assert profile.max_model_len_tokens == 8192
    usual = estimate("llama-3.1-8b", "h100")
    assert profile.kv_tokens > usual.kv_tokens
    assert estimate("llama-3.1-8b", "h100", memory_share=0.5).kv_tokens < usual.kv_tokens / 2
    assert estimate("llama-3.1-8b", "h100", kv_format="fp8").kv_tokens == pytest.approx(
        2 * usual.kv_tokens, rel=0.01
    )


@pytest.mark.parametrize(
    ("model", "gpu", "degree", "gigabytes"),
    [
        ("llama-3.1-8b", "h100", 1, 1.07),
        ("qwen3-32b", "h100", 2, 2.15),
        ("llama-3.3-70b", "h100", 4, 2.68),
        ("deepseek-v3", "b200", 8, 0.58),
        ("gpt-oss-120b", "h200", 4, 0.31),
    ],
)
def test_the_kv_cache_of_8k_tokens_has_the_size_of_the_model(model, gpu, degree, gigabytes):
    """Grouped heads, a latent vector, and windows in half of the layers; for all GPUs together."""
    profile = estimate(model, gpu, degree)
    assert profile.kv_bytes(8_192) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert profile.layers == shape_of(model).layers
