"""A model's sizes from its config.json, and what is refused."""

import json
from pathlib import Path

import pytest

from sim.engine.profiles import ProfileError
from sim.estimation.model_config import ARCHITECTURES, CONFIG_BYTES_MAX, read_config
from tests.sim.estimation.examples import changed, config_of, shape_of


@pytest.mark.parametrize(
    ("model", "billions", "gigabytes", "kv_bytes"),
    [
        ("llama-3.1-8b", 8.03, 16.1, 131_072),
        ("llama-3.3-70b", 70.55, 141.1, 327_680),
        ("qwen3-32b", 32.76, 65.5, 262_144),
        ("mixtral-8x7b", 46.70, 93.4, 131_072),
        ("qwen3-30b-a3b", 30.53, 61.1, 98_304),
        ("qwen3-235b-a22b-fp8", 235.1, 236.3, 192_512),
        ("deepseek-v3", 671.0, 673.0, 70_272),
        ("gemma-3-27b", 27.0, 54.0, 507_904),
        ("gpt-oss-20b", 20.9, 13.8, 49_152),
    ],
)
def test_sizes_are_those_that_the_authors_publish(model, billions, gigabytes, kv_bytes):
    """Weights within 0.5 %, and the bytes of a token in all layers exactly."""
    shape = shape_of(model)
    assert shape.weights / 1e9 == pytest.approx(billions, rel=0.005)
    assert shape.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert 2 * shape.layers * shape.key_value_numbers(1) == kv_bytes


def test_windows_are_counted_by_layer():
    """Gemma 3 has one layer of six without a window, gpt-oss every second."""
    gemma, gpt = shape_of("gemma-3-27b"), shape_of("gpt-oss-20b")
    assert (gemma.windowed_layers, gemma.window_tokens) == (52, 1024)
    assert (gpt.windowed_layers, gpt.window_tokens) == (12, 128)
    assert gemma.reach(1024) == 62
    assert gemma.reach(4096) == 10 + 52 / 4
    assert shape_of("qwen3-32b").windowed_layers == 0


def test_a_window_that_is_switched_off_is_none(tmp_path):
    """Qwen's configurations name a window and say that it is not used."""
    off = changed(tmp_path, "qwen3-32b", sliding_window=4096)
    assert read_config(off).shape.windowed_layers == 0
    on = changed(
        tmp_path, "qwen3-32b", sliding_window=4096, use_sliding_window=True, max_window_layers=60
    )
    assert read_config(on).shape.windowed_layers == 4


def test_heads_are_divided_and_latent_vectors_are_not():
    """Each GPU keeps its share of the heads, at least one; of latent attention all of the vector."""
    llama, deepseek = shape_of("llama-3.1-8b"), shape_of("deepseek-v3")
    assert llama.key_value_numbers(4) == llama.key_value_numbers(1) / 4
    assert llama.key_value_numbers(16) == llama.key_value_numbers(8)
    assert deepseek.key_value_numbers(8) == deepseek.key_value_numbers(1) == 576


@pytest.mark.parametrize(
    ("told", "linear"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
    ],
)
def test_the_format_of_weights_is_read(tmp_path, told, linear):
    """As the tools that quantize models write it."""
    file = changed(tmp_path, "llama-3.1-8b", quantization_config=told)
    assert read_config(file).shape.linear_format == linear
    assert read_config(file, quantization="16bit").shape.linear_format == "16bit"


def test_a_folder_is_as_good_as_its_file(tmp_path):
    """The name is that of the file, else that of the folder."""
    changed(tmp_path, "llama-3.1-8b", _name_or_path=None)
    assert read_config(tmp_path).shape.name == tmp_path.name
    assert read_config(tmp_path, name="mine").shape.name == "mine"


def test_keys_without_a_meaning_here_are_told(tmp_path):
    """What has no effect is no secret."""
    file = changed(tmp_path, "llama-3.1-8b", frobnication_rank=3)
    assert read_config(file).unknown_keys == ("frobnication_rank",)
    assert read_config(config_of("qwen3-30b-a3b")).unknown_keys == ()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"hidden_size": None}, "hidden_size: expected a whole number from 1 to 1,000,000, got nothing"),
        ({"hidden_size": 10**400}, "hidden_size: expected a whole number"),
        ({"hidden_size": -1}, "hidden_size: expected a whole number"),
        ({"hidden_size": True}, "hidden_size: expected a whole number"),
        ({"hidden_size": "4096"}, "hidden_size: expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number from 1 to 1,000"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of the 32 heads, got 5"),
        ({"vocab_size": None}, "vocab_size: expected"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, got 'no'"),
        ({"architectures": None}, "architectures: expected a list with a name"),
        ({"architectures": []}, "architectures: expected a list with a name"),
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; expected one of"),
        ({"architectures": ["JambaForCausalLM"]}, "'JambaForCausalLM' is not supported"),
        ({"architectures": ["LlamaForCausalLm"]}, "did you mean `LlamaForCausalLM`"),
        ({"mamba_d_state": 16}, "mamba_d_state: models with such layers"),
        ({"index_topk": 2048}, "index_topk: models with such layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: models with an encoder"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types: 'linear_attention' is not supported"),
        ({"quantization_config": {"quant_method": "magic"}}, "the format of 'magic' is unknown"),
        ({"quantization_config": 4}, "quantization_config: expected a JSON object, got 4"),
    ],
)  # fmt: skip
def test_what_no_model_has_is_refused(tmp_path, keys, sentence):
    """With the file, the key and what was expected, in one line."""
    file = changed(tmp_path, "llama-3.1-8b", **keys)
    with pytest.raises(ProfileError) as caught:
        read_config(file)
    told = str(caught.value)
    assert told.startswith(f"{file}: ")
    assert sentence in told
    assert "\n" not in told
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "expected the config.json of a model"),
        (b"\xff\xfe", "expected the config.json of a model"),
        (b"{'a': 1}", "expected the config.json of a model"),
        (b"[1, 2]", "expected a JSON object, got [1, 2]"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"text_config": ' * 60_000, "config.json of a model"),
        (b" " * (CONFIG_BYTES_MAX + 1), "at most 1,000,000 bytes; it is larger"),
        (b"%PDF-1.7", "expected the config.json of a model"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, content, sentence):
    """Also what is large or deep, and none is read to its end."""
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ProfileError) as caught:
        read_config(file)
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_huge_file_is_not_read(tmp_path):
    """100 MB that take no room on the disk, and a device without an end."""
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(100_000_000)
    for one in (file, Path("/dev/zero")):
        with pytest.raises(ProfileError, match="it is larger"):
            read_config(one)


def test_a_missing_file_is_named(tmp_path):
    """As the system says it."""
    with pytest.raises(ProfileError, match=r"config\.json: No such file"):
        read_config(tmp_path)


def test_all_architectures_are_those_of_decoders():
    """Names of classes of transformers."""
    assert all(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in ARCHITECTURES)
    assert json.loads(config_of("deepseek-v3").read_text())["architectures"][0] in ARCHITECTURES
