"""Reader of a model's shape from the `config.json` of Hugging Face models.

Supported models are decoders with gated feed-forward layers. They may be dense or have experts,
with grouped-query (GQA) or multi-head latent attention (MLA), and with sliding windows in some
layers or none. All others are rejected, because a guess about their layers could be wrong without
notice.

A model that also reads images has its text part in `text_config`; only that part is read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Struct

from epp.configuration.document import nearest
from sim.engine.profiles import ProfileError
from sim.sentences import unread

WeightFormat: TypeAlias = Literal["16bit", "fp8", "int8", "int4", "mxfp4", "nvfp4"]
FORMATS: Final[tuple[WeightFormat, ...]] = get_args(WeightFormat)
BYTES_A_WEIGHT: Final[Mapping[WeightFormat, float]] = {
    "16bit": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.53,
    "mxfp4": 0.53125,
    "nvfp4": 0.5625,
}
"""Bytes per weight by format, including the scales of formats of 4 bits. INT4 has one scale of 16
bits and a zero point for 128 weights. MXFP4 has one scale of 8 bits for 32 weights (OCP
microscaling formats), and NVFP4 one of 8 bits for 16 weights.
"""
CONFIG_BYTES_MAX: Final = 1_000_000
"""Maximum size of a `config.json` in bytes. Published configurations have 1 to 50 KB."""

_LAYERS_MAX: Final = 1_000
_WIDTH_MAX: Final = 1_000_000
_LENGTH_MAX: Final = 10**9
_UNSUPPORTED_KEYS: Final = (
    "mamba", "ssm_", "linear_num_", "linear_attn", "linear_key", "full_attention_interval",
    "attn_layer_period", "attn_type_list", "hybrid_override_pattern", "block_types", "index_topk",
    "num_encoder_layers", "encoder_layers", "rwkv",
)  # fmt: skip
"""Prefixes of `config.json` keys that show unsupported layers: state spaces, linear or sparse
attention, encoders.
"""
_IGNORED: Final = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_bias",
        "attention_dropout",
        "attn_implementation",
        "attn_logit_softcapping",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "boi_token_index",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "embedding_multiplier",
        "eoi_token_index",
        "eos_token_id",
        "ep_size",
        "experts_per_token",
        "final_logit_softcapping",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "id2label",
        "image_token_index",
        "initial_context_length",
        "initializer_range",
        "intermediate_size",
        "is_decoder",
        "label2id",
        "layer_types",
        "logits_scaling",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "mm_tokens_per_image",
        "model_type",
        "moe_layer_freq",
        "n_group",
        "norm_topk_prob",
        "num_nextn_predict_layers",
        "original_max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "partial_rotary_factor",
        "pretraining_tp",
        "qk_layernorm",
        "qkv_bias",
        "query_pre_attn_scalar",
        "resid_pdrop",
        "residual_multiplier",
        "return_dict",
        "rms_norm_eps",
        "rope_interleave",
        "rope_local_base_freq",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "scoring_func",
        "seq_aux",
        "swiglu_limit",
        "sliding_window",
        "sliding_window_pattern",
        "tie_word_embeddings",
        "topk_group",
        "topk_method",
        "torch_dtype",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        "use_qk_norm",
        "use_sliding_window",
        "vision_config",
        "vision_feature_layer",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "unsloth_fixed",
        "unsloth_version",
        "attention_multiplier",
    ]
)
"""Known keys of a `config.json` that do not change the shape, or that are read by name elsewhere.
They are not reported as unknown.
"""


class Latent(Struct, frozen=True, kw_only=True):
    """The sizes of multi-head latent attention, which stores keys and values of all heads as one
    vector per token.
    """

    query_rank: int
    """Rank of the query projection; 0 if queries are computed directly from the hidden state."""
    key_value_rank: int
    plain_dim: int
    """Size of the part of each head's keys and queries that has no rotary position."""
    rotary_dim: int
    value_dim: int


class Experts(Struct, frozen=True, kw_only=True):
    """The sizes of feed-forward layers with experts. Each token uses `per_token` of the `count`
    experts of a layer.
    """

    layers: int
    count: int
    per_token: int
    inner: int
    shared_inner: int
    """Width of the shared experts, which every token also uses; 0 if there are none."""


class ModelShape(Struct, frozen=True, kw_only=True):
    """The sizes of a model that determine what it computes, reads and stores."""

    name: str
    architecture: str
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_dim: int
    latent: Latent | None
    windowed_layers: int
    """Number of layers whose attention covers only the last `window_tokens` tokens."""
    window_tokens: int
    dense_layers: int
    dense_inner: int
    experts: Experts | None
    tied_embeddings: bool
    """True if the output layer shares its weights with the embedding."""
    max_model_len_tokens: int
    linear_format: WeightFormat
    expert_format: WeightFormat

    @property
    def attention_weights(self) -> int:
        """Number of weights in the attention of one layer."""
        return sum(n * k for n, k in self.attention_products(1))

    @property
    def linear_weights(self) -> int:
        """Number of weights in all layers, without routed experts, embedding and output layer."""
        shared = (
            self.experts.layers * 3 * self.hidden * self.experts.shared_inner if self.experts else 0
        )
        dense = self.dense_layers * 3 * self.hidden * self.dense_inner
        return self.layers * self.attention_weights + dense + shared

    @property
    def expert_weights(self) -> int:
        """Number of weights in the routed experts of all layers; 0 if the model has none."""
        experts = self.experts
        if experts is None:
            return 0
        return experts.layers * experts.count * 3 * self.hidden * experts.inner

    @property
    def embedding_weights(self) -> int:
        """Number of weights in the embedding and the output layer, which always have 16 bits."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def weights(self) -> int:
        """Number of weights of the model, without norms, biases and the routers of experts."""
        return self.linear_weights + self.expert_weights + self.embedding_weights

    @property
    def weight_bytes(self) -> float:
        """Size in bytes of all weights of the model in GPU memory."""
        return (
            self.linear_weights * BYTES_A_WEIGHT[self.linear_format]
            + self.expert_weights * BYTES_A_WEIGHT[self.expert_format]
            + self.embedding_weights * BYTES_A_WEIGHT["16bit"]
        )

    def attention_products(self, tensor_parallel: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each matrix in the attention of one layer, as one of
        `tensor_parallel` GPUs has it.
        """
        hidden, heads = self.hidden, self.heads // tensor_parallel
        latent = self.latent
        if latent is None:
            kept = max(1, self.key_value_heads // tensor_parallel)
            return [((heads + 2 * kept) * self.head_dim, hidden), (hidden, heads * self.head_dim)]
        queries = heads * (latent.plain_dim + latent.rotary_dim)
        low = latent.key_value_rank + latent.rotary_dim
        first = [(latent.query_rank + low, hidden), (queries, latent.query_rank)]
        if not latent.query_rank:
            first = [(low, hidden), (queries, hidden)]
        up = (heads * (latent.plain_dim + latent.value_dim), latent.key_value_rank)
        return [*first, up, (hidden, heads * latent.value_dim)]

    def key_value_numbers(self, tensor_parallel: int) -> int:
        """Return how many numbers one layer stores in the KV cache for a token, on each of
        `tensor_parallel` GPUs.
        """
        if self.latent is not None:
            return self.latent.key_value_rank + self.latent.rotary_dim
        return 2 * self.head_dim * max(1, self.key_value_heads // tensor_parallel)

    def reach(self, context_tokens: int) -> float:
        """Return the mean number of layers in which a token of a context of `context_tokens` is
        stored and read. A layer with a sliding window counts with the share of the context in its
        window.
        """
        share = min(1.0, self.window_tokens / context_tokens) if self.windowed_layers else 0.0
        return self.layers - self.windowed_layers + self.windowed_layers * share


class _Family(Struct, frozen=True):
    """The rules for reading the `config.json` of a model architecture."""

    experts: str = ""
    """Key that has the number of experts, or "" if all layers of the architecture are dense."""
    inner: str = "moe_intermediate_size"
    latent: bool = False
    windows: Literal["all", "flagged", "layers"] = "all"
    """Rule for the layers that have the window of the key `sliding_window`, unless `layer_types`
    names them: "all"; "flagged" (those after the first `max_window_layers` if `use_sliding_window`
    is true, else none); or "layers" (by `sliding_window_pattern`).
    """
    pattern: int = 0
    """Default n of the key `sliding_window_pattern`: one of n layers has no sliding window. 0 if
    all layers have one.
    """
    usual: Mapping[str, Any] = {}
    """Default values in transformers of the keys that a `config.json` of this architecture may
    leave out.
    """


_GEMMA_3: Final = _Family(
    windows="layers",
    pattern=6,
    usual={
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096,
    },
)  # fmt: skip
"""Rules for reading the `config.json` of Gemma 3. The defaults are those of `Gemma3TextConfig` in
transformers 4.57.
"""
_FAMILIES: Final[Mapping[str, _Family]] = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(),
    "Mistral3ForConditionalGeneration": _Family(),
    "Qwen2ForCausalLM": _Family(windows="flagged"),
    "Qwen3ForCausalLM": _Family(windows="flagged"),
    "Phi3ForCausalLM": _Family(),
    "GraniteForCausalLM": _Family(),
    "Olmo2ForCausalLM": _Family(),
    "Glm4ForCausalLM": _Family(),
    "Gemma2ForCausalLM": _Family(
        windows="layers", pattern=2, usual={"tie_word_embeddings": True, "head_dim": 256}
    ),
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": _GEMMA_3,
    "MixtralForCausalLM": _Family(experts="num_local_experts", inner="intermediate_size"),
    "Qwen2MoeForCausalLM": _Family(experts="num_experts", windows="flagged"),
    "Qwen3MoeForCausalLM": _Family(experts="num_experts", windows="flagged"),
    "OlmoeForCausalLM": _Family(experts="num_experts", inner="intermediate_size"),
    "Glm4MoeForCausalLM": _Family(experts="n_routed_experts"),
    "GptOssForCausalLM": _Family(
        experts="num_local_experts", inner="intermediate_size", windows="layers", pattern=2
    ),
    "DeepseekV2ForCausalLM": _Family(experts="n_routed_experts", latent=True),
    "DeepseekV3ForCausalLM": _Family(experts="n_routed_experts", latent=True),
}
ARCHITECTURES: Final = tuple(_FAMILIES)


class ReadConfig(Struct, frozen=True, kw_only=True):
    """The result of reading a `config.json`: the model's shape, and keys that were not
    understood.
    """

    shape: ModelShape
    unknown_keys: tuple[str, ...]
    """Keys of the `config.json` whose meaning is unknown to this module; they have no effect on the
    shape.
    """


def read_config(path: Path, name: str = "", quantization: str = "") -> ReadConfig:
    """Return the model shape in the file `path`, or in `config.json` of the folder `path`.

    `name` is the model's name, by default `_name_or_path` of the file or the name of its folder.
    `quantization` is one of `FORMATS` and overrides the file, or "". Raises `ProfileError` with the
    file, the key and what was expected.
    """
    file = path / "config.json" if path.is_dir() else path
    config = _decoded(file)
    keys = _Keys(file, config)
    architecture = _architecture(keys)
    if isinstance(config.get("text_config"), dict):
        outside = {key: value for key, value in config.items() if key == "quantization_config"}
        keys = _Keys(file, {**config["text_config"], **outside}, "text_config.")
    family = _FAMILIES[architecture]
    keys.usual = family.usual
    _refuse_other_layers(keys)
    formats = _formats(keys, quantization)
    shape = _shape(keys, architecture, family, formats)
    told = name or str(config.get("_name_or_path") or "") or file.resolve().parent.name
    return ReadConfig(shape=msgspec.structs.replace(shape, name=told), unknown_keys=keys.unknown())


class _Keys:
    """The values of a `config.json` by key, with methods that check their types. Errors name the
    file and the key.
    """

    def __init__(self, file: Path, values: Mapping[str, Any], within: str = "") -> None:
        self._file = file
        self._values = values
        self._within = within
        self._read: set[str] = set()
        self.usual: Mapping[str, Any] = {}

    def names(self) -> Sequence[str]:
        return list(self._values)

    def unknown(self) -> tuple[str, ...]:
        """Return the keys of the file that were not read and are not in `_IGNORED`, sorted."""
        return tuple(sorted(set(self._values) - self._read - _IGNORED))

    def get(self, key: str) -> Any:
        """Return the value of `key`, or the architecture's default if it is missing or null; None
        if there is no default.
        """
        self._read.add(key)
        value = self._values.get(key)
        return self.usual.get(key) if value is None else value

    def whole(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """Return the value of `key`, a whole number from `least` to `most`. If the key is missing,
        return the architecture's default, or else `default`. Raises `ProfileError` for another
        value, or if there is no default.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            got = "nothing" if value is None else _shown(value)
            self.refuse(key, f"expected a whole number from {least} to {most:,}, got {got}")
        return int(value)

    def flag(self, key: str) -> bool:
        """Return the value of `key`, true or false. If the key is missing, return the
        architecture's default, or false if there is none. Raises `ProfileError` for another value.
        """
        value = self.get(key)
        if value is not None and type(value) is not bool:
            self.refuse(key, f"expected true or false, got {_shown(value)}")
        return bool(value)

    def refuse(self, key: str, sentence: str) -> None:
        """Raise `ProfileError` with the name of the file, the key and `sentence`."""
        raise ProfileError(f"{self._file}: {self._within}{key}: {sentence}.")


def _shown(value: object) -> str:
    """Return the text of a value for an error message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _decoded(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises `ProfileError` if the file is unreadable, too large
    or contains something else.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(CONFIG_BYTES_MAX + 1)
        if len(content) > CONFIG_BYTES_MAX:
            raise ProfileError(
                f"{file}: expected the config.json of a model, at most {CONFIG_BYTES_MAX:,} "
                "bytes; it is larger."
            )
        config = msgspec.json.decode(content)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as problem:
        raise ProfileError(f"{unread(file, problem, 'the config.json of a model')}.") from problem
    except RecursionError as problem:
        raise ProfileError(
            f"{file}: expected the config.json of a model; this file is nested too deeply."
        ) from problem
    if not isinstance(config, dict):
        raise ProfileError(f"{file}: expected a JSON object, got {_shown(config)}.")
    return config


def _architecture(keys: _Keys) -> str:
    named = keys.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        got = "nothing" if named is None else _shown(named)
        keys.refuse(
            "architectures", f"expected a list with a name such as {ARCHITECTURES[0]!r}, got {got}"
        )
    if named[0] not in _FAMILIES:
        near = nearest(named[0], ARCHITECTURES)
        keys.refuse(
            "architectures",
            f"{_shown(named[0])} is not supported{near}; expected one of {', '.join(ARCHITECTURES)}",
        )
    return str(named[0])


def _refuse_other_layers(keys: _Keys) -> None:
    for key in keys.names():
        if key.startswith(_UNSUPPORTED_KEYS) and keys.get(key) not in (None, False, 0, []):
            keys.refuse(key, "models with such layers (state spaces, linear or sparse attention, "
                "encoders) are not supported")  # fmt: skip
    if keys.flag("is_encoder_decoder"):
        keys.refuse("is_encoder_decoder", "models with an encoder are not supported")


def _shape(
    keys: _Keys, architecture: str, family: _Family, formats: tuple[WeightFormat, WeightFormat]
) -> ModelShape:
    layers = keys.whole("num_hidden_layers", _LAYERS_MAX)
    hidden = keys.whole("hidden_size", _WIDTH_MAX)
    heads = keys.whole("num_attention_heads", 10_000)
    kept = keys.whole("num_key_value_heads", 10_000, heads)
    if heads % kept and not family.latent:
        keys.refuse("num_key_value_heads", f"expected a divisor of the {heads} heads, got {kept}")
    experts = _experts(keys, family, layers)
    dense_layers = layers - (experts.layers if experts else 0)
    windowed, window = _windows(keys, family, layers)
    return ModelShape(
        name="",
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        vocabulary=keys.whole("vocab_size", 10_000_000),
        heads=heads,
        key_value_heads=kept,
        head_dim=keys.whole("head_dim", 10_000, max(1, hidden // heads)),
        latent=_latent(keys) if family.latent else None,
        windowed_layers=windowed,
        window_tokens=window,
        dense_layers=dense_layers,
        dense_inner=keys.whole("intermediate_size", _WIDTH_MAX) if dense_layers else 0,
        experts=experts,
        tied_embeddings=keys.flag("tie_word_embeddings"),
        max_model_len_tokens=keys.whole("max_position_embeddings", _LENGTH_MAX),
        linear_format=formats[0],
        expert_format=formats[1],
    )


def _latent(keys: _Keys) -> Latent:
    return Latent(
        query_rank=keys.whole("q_lora_rank", _WIDTH_MAX, 0),
        key_value_rank=keys.whole("kv_lora_rank", _WIDTH_MAX),
        plain_dim=keys.whole("qk_nope_head_dim", 10_000),
        rotary_dim=keys.whole("qk_rope_head_dim", 10_000),
        value_dim=keys.whole("v_head_dim", 10_000),
    )


def _experts(keys: _Keys, family: _Family, layers: int) -> Experts | None:
    if not family.experts:
        return None
    count = keys.whole(family.experts, 100_000)
    inner = keys.whole(family.inner, _WIDTH_MAX)
    per_token = keys.whole("num_experts_per_tok", count)
    dense_first = keys.whole("first_k_dense_replace", layers, 0, least=0)
    step = keys.whole("decoder_sparse_step", layers, 1)
    dense_only = keys.get("mlp_only_layers") or []
    if not isinstance(dense_only, list):
        keys.refuse("mlp_only_layers", f"expected a list, got {_shown(dense_only)}")
    sparse = sum((at + 1) % step == 0 and at not in dense_only for at in range(dense_first, layers))
    shared = keys.whole("n_shared_experts", 1_000, 0, least=0) * inner
    shared += keys.whole("shared_expert_intermediate_size", _WIDTH_MAX, 0, least=0)
    return Experts(
        layers=sparse, count=count, per_token=per_token, inner=inner, shared_inner=shared
    )


def _windows(keys: _Keys, family: _Family, layers: int) -> tuple[int, int]:
    """Return (number of layers with a sliding window, size of the window in tokens). Both are 0 if
    the model defines no window or does not use it.
    """
    kinds = keys.get("layer_types")
    others = set(map(str, kinds)) - {"full_attention", "sliding_attention"} if kinds else set()
    if others:
        keys.refuse("layer_types", f"{_shown(min(others))} is not supported; expected full_attention "
            "or sliding_attention")  # fmt: skip
    switched = family.windows != "flagged" or keys.flag("use_sliding_window")
    if not switched or keys.get("sliding_window") is None:
        return 0, 0
    window = keys.whole("sliding_window", _LENGTH_MAX)
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds), window
    if family.windows == "flagged":
        return layers - min(
            layers, keys.whole("max_window_layers", _LAYERS_MAX, layers, least=0)
        ), window
    pattern = keys.whole("sliding_window_pattern", _LAYERS_MAX, family.pattern, least=0)
    return (layers - layers // pattern if pattern else layers), window


def _formats(keys: _Keys, quantization: str) -> tuple[WeightFormat, WeightFormat]:
    """Return the formats of the weights, as (format of linear layers, format of experts)."""
    if quantization:
        chosen: WeightFormat = msgspec.convert(quantization, WeightFormat)
        return chosen, chosen
    told = keys.get("quantization_config")
    if told is None:
        return "16bit", "16bit"
    if not isinstance(told, dict):
        keys.refuse("quantization_config", f"expected a JSON object, got {_shown(told)}")
    found = _format_of(told)
    if found is None:
        method = _shown(told.get("quant_method"))
        keys.refuse(
            "quantization_config",
            f"the format of {method} is unknown; set --quantization to one of {', '.join(FORMATS)}",
        )
        raise AssertionError
    # MXFP4 models (gpt-oss) quantize only the experts.
    return ("16bit", found) if found == "mxfp4" else (found, found)


def _format_of(told: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of the weights that the value of `quantization_config` defines; None if the
    format is unknown.
    """
    method = str(told.get("quant_method", "")).lower()
    if method in {"fp8", "fbgemm_fp8", "mxfp4"}:
        return "mxfp4" if method == "mxfp4" else "fp8"
    if method in {"awq", "gptq", "gptq_marlin", "awq_marlin"}:
        return _by_bits(told.get("bits", told.get("w_bit", 4)), "int")
    if method == "bitsandbytes":
        return "int4" if told.get("load_in_4bit") else "int8"
    if method in {"modelopt", "modelopt_fp4"}:
        return "nvfp4" if "FP4" in str(told.get("quant_algo")) else "fp8"
    if method == "compressed-tensors":
        groups = told.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        if isinstance(weights, dict):
            return _by_bits(weights.get("num_bits"), str(weights.get("type")))
    return None


def _by_bits(bits: object, kind: str) -> WeightFormat | None:
    if kind == "float":
        return {8: "fp8", 4: "nvfp4"}.get(bits)  # type: ignore[call-overload, no-any-return]
    return {8: "int8", 4: "int4"}.get(bits)  # type: ignore[call-overload, no-any-return]
