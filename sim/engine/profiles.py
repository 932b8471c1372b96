"""The duration of one step of a vLLM engine: constants for each model, GPU and tensor-parallel
degree.

    m = tokens computed in the step: prompt chunks and one for each decoding request
    t = linear(m) * adapter factor                             linear layers
      + all_reduce + all_reduce_per_token * m                  tensor parallel only
      + [decodes] decode + decode_per_context_token * C        C = context of all decoding requests
      + [chunks]  chunk + pair * sum(n*c + n*n/2)              chunk of n tokens after c tokens
      + expert(tokens of all ranks)                            mixtures of experts with a curve only
      + head + head_per_sequence * sequences + host + loading of adapters + restoring of caches

`linear(m)` is interpolated linearly in a table of kernel times if the profile has one. Otherwise it
is max(weight_read, linear_base + linear_per_token * m).

C counts tokens that several decoding requests share once in full, and each further copy with the
factor `shared_context_factor`. C grows by `skew` times its difference from (decodes * longest
context), because some attention kernels wait for the longest context. `mixed_decode_factor`
multiplies decode_per_context_token * C in steps that also compute chunks, because kernels for both
at once decode more slowly on some GPUs.

The built-in profiles are in `profiles.toml`, each constant with its source. Your own profiles are
TOML files too, with one table per profile, named like the profile. `like` names another profile as
the base. See `profiles_in`.

Sources of the defaults below: `host_s` (1.5 ms) is fitted on two published vLLM 0.19 runs of
casys-kaist/LLMServingSim (MIT). `shared_context_factor` and the front-end terms are fitted on the
llm-d guide `optimized-baseline` (8 x 2 H100, Qwen3-32B). Adapter factors are those of
inference-sim's defaults, by rank. The adapter load from disk is an assumption (0.3 to 5 s occur).
"""

import argparse
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from epp.core.expectation import misfit
from sim.sentences import unread

DEFAULT_PROFILE: Final = "llama-3.1-8b-h100-tp1"
ADAPTER_LINEAR_FACTORS: Final = {8: 1.02, 16: 1.035, 32: 1.06}
"""Factor by which a LoRA adapter slows the linear layers, by LoRA rank; from `defaults.yaml` of
inference-sim/inference-sim.
"""
KV_TOKENS_MIN: Final = 256
"""Minimum size of a KV cache in tokens: sixteen of vLLM's usual blocks. A smaller cache can serve
nothing.
"""

_Count: TypeAlias = Annotated[int, Meta(ge=1, le=10**9)]
# The ranges exclude nan.
_StepTime: TypeAlias = Annotated[float, Meta(ge=0.0, le=60.0)]
"""Type of a constant in seconds that each step, or each request, takes regardless of its content.
The limit is 60 s, because no engine needs more.
"""
_TokenTime: TypeAlias = Annotated[float, Meta(ge=0.0, le=0.1)]
"""Type of a constant in seconds for each token, sequence, or pair of tokens in attention; at most
0.1 s.
"""
_Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
_Factor: TypeAlias = Annotated[float, Meta(ge=0.0, le=100.0)]
_Bytes: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e15)]


class StepWork(Struct):
    """The work of one engine step, from which a profile computes its duration."""

    tokens: int = 0
    decodes: int = 0
    decode_context_tokens: int = 0
    longest_context_tokens: int = 0
    """Length in tokens of the longest context among the decoding requests. It matters only if the
    profile has a skew, and may be 0 otherwise.
    """
    shared_tokens: int = 0
    """Number of context tokens that several decoding requests share, counted for all of these
    requests but one.
    """
    prefills: int = 0
    attention_pairs: float = 0.0
    """Number of token pairs in the attention of prompt chunks: the sum of n*c + n*n/2, for a chunk
    of n tokens after c tokens of context.
    """
    sequences: int = 0
    """Number of requests that get a token at the end of the step."""
    drafts: int = 0
    """Number of draft tokens that the step verifies; they are included in `tokens`."""
    received: int = 0
    """Number of the requests in `decodes` whose prompt another engine computed. The token that the
    step gives them is the first of the answer.
    """
    handed_over: int = 0
    """Number of the requests in `sequences` that only compute a prompt for another engine, which
    continues them. Their token is discarded.
    """
    drafts_accepted: int = 0
    """Number of accepted draft tokens. Requests get them in addition to the one token of each in
    `sequences`.
    """
    with_adapter: bool = False
    adapters_loaded: int = 0
    restore_s: float = 0.0
    """Time in seconds to restore cached prompts and to finish writing to the prompt cache; the
    engine computes nothing meanwhile.
    """


class EstimateError(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The error of a profile that was estimated and not measured, as shares of the true values.

    Each share is the largest error found when one measured model or GPU at a time was left out
    (`docs/estimates.md`), or the error that `sim calibrate` has left of it. A time may be `1 / (1 +
    error)` to `1 + error` times the real one.
    """

    prefill: Annotated[float, Meta(ge=0.0, le=10.0)]
    """Error of the estimated duration of a step that computes a prompt, as a share of the true
    duration.
    """
    decode: Annotated[float, Meta(ge=0.0, le=10.0)]
    """Error of the estimated duration of a step in which requests decode, as a share of the true
    duration.
    """
    kv_tokens: Annotated[float, Meta(ge=0.0, le=10.0)]

    @property
    def said(self) -> str:
        """Part of a sentence that states the error of an estimated profile in per cent: the largest
        of the errors of prefill, decode and KV-cache size, then each of them.
        """
        worst = max(self.prefill, self.decode, self.kv_tokens)
        return (
            f"within ± {worst:.0%} (prefill {self.prefill:.0%}, decode {self.decode:.0%}, KV "
            f"tokens {self.kv_tokens:.0%})"
        )


class KVWindow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes from which the KV cache of a model is computed if some of its layers have a sliding
    window.
    """

    tokens: _Count
    """Number of tokens in the sliding window of the layers that have one."""
    bytes_per_token: _Count
    """KV-cache bytes per token of all layers with the sliding window together."""
    other_bytes_per_token: Annotated[int, Meta(ge=0, le=10**9)]
    """KV-cache bytes per token of all layers without a sliding window together."""


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speed and the limits of one model on one kind of GPU, as constants in seconds and
    tokens.
    """

    name: str
    model: str
    kv_tokens: Annotated[int, Meta(ge=KV_TOKENS_MIN, le=10**10)]
    max_model_len_tokens: _Count
    """Maximum number of tokens in prompt and answer of a request together (`--max-model-len` of
    vLLM).
    """
    kv_bytes_per_token: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """KV-cache bytes per token of the whole model, usually 2 * layers * KV heads * head size *
    bytes of a number. 0 if unknown. With a `kv_window`, it is the mean at the usual context length.
    """
    kv_window: KVWindow | None = None
    """Sizes of the layers with a sliding window; None if the KV cache keeps all tokens in all
    layers.
    """
    layers: _Count | None = None
    """Number of transformer layers of the model; None if unknown. Only layer-wise KV transfers need
    it.
    """
    decode_s: _StepTime
    decode_s_per_context_token: _TokenTime
    pair_s: _TokenTime
    head_s: _StepTime
    weight_read_s: _StepTime = 0.0
    linear_base_s: _StepTime = 0.0
    linear_s_per_token: _TokenTime = 0.0
    linear_tokens: tuple[_Count, ...] = ()
    """Numbers of tokens, ascending, at which `linear_s` has the time of the linear layers. Beyond
    the last one, the time grows by `linear_s_per_token`. Without them, the constants determine the
    time.
    """
    linear_s: tuple[Annotated[float, Meta(gt=0.0, le=60.0)], ...] = ()
    """Seconds that all linear layers take at each of `linear_tokens`."""
    expert_tokens: tuple[_Count, ...] = ()
    """Numbers of tokens that all data-parallel ranks together compute in a step, ascending, for
    each of which `expert_s` has a time.
    """
    expert_s: tuple[Annotated[float, Meta(gt=0.0, le=60.0)], ...] = ()
    """Seconds that all expert layers take at each of `expert_tokens`, including the transfer of
    tokens. `linear_s` and similar fields then cover only the other layers. The curve is
    interpolated linearly and extended by its last segment.
    """
    prefill_s: _StepTime = 0.0
    head_s_per_sequence: _TokenTime = 0.0
    all_reduce_s: _StepTime = 0.0
    all_reduce_s_per_token: _TokenTime = 0.0
    host_s: _StepTime = 0.0015
    shared_context_factor: _Share = 0.5
    skew: _Share = 0.0
    mixed_decode_factor: _Factor = 1.0
    adapter_linear_factor: _Factor = ADAPTER_LINEAR_FACTORS[16]
    adapter_load_s: _StepTime = 0.3
    frontend_s: _StepTime = 0.010
    """Seconds for tokenising, HTTP and output processing of a request, before the engine sees
    it.
    """
    frontend_s_per_token: _TokenTime = 10e-6
    max_num_seqs: _Count = 1024
    max_num_batched_tokens: _Count = 8192
    """Maximum number of tokens that a step computes. The defaults of this field and of
    `max_num_seqs` are those of `vllm serve` on a GPU of 70 to 160 GiB (not A100).
    """
    estimated: EstimateError | None = None
    """Error of the constants if the profile was estimated; None if it was measured."""

    def __post_init__(self) -> None:
        if len(self.linear_tokens) != len(self.linear_s):
            raise ValueError("linear_tokens and linear_s differ in length")
        if list(self.linear_tokens) != sorted(set(self.linear_tokens)):
            raise ValueError("linear_tokens do not ascend")
        if len(self.expert_tokens) != len(self.expert_s) or len(self.expert_s) == 1:
            raise ValueError("expert_tokens and expert_s must have the same length, at least 2")
        if list(self.expert_tokens) != sorted(set(self.expert_tokens)):
            raise ValueError("expert_tokens do not ascend")
        if list(self.expert_s) != sorted(self.expert_s):
            raise ValueError("expert_s decreases; more tokens cannot take less time")
        if not (self.linear_s or self.weight_read_s or self.linear_s_per_token):
            raise ValueError(
                "expected linear_tokens and linear_s, weight_read_s or linear_s_per_token"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; expected at least "
                f"max_num_seqs, {self.max_num_seqs}"
            )

    def step_s(self, work: StepWork) -> float:
        """Return the duration in seconds of an engine step with this work."""
        linear = self.linear_layers_s(work.tokens)
        if work.with_adapter:
            linear *= self.adapter_linear_factor
        total = linear + self.all_reduce_s + self.all_reduce_s_per_token * work.tokens
        if self.expert_s:
            total += self.expert_layers_s(work.tokens)
        if work.decodes:
            context = work.decode_context_tokens - (
                (1.0 - self.shared_context_factor) * work.shared_tokens
            )
            if self.skew:
                even = work.decodes * work.longest_context_tokens
                context += self.skew * (even - work.decode_context_tokens)
            attention = self.decode_s_per_context_token * context
            if work.prefills:
                attention *= self.mixed_decode_factor
            total += self.decode_s + attention
        if work.prefills:
            total += self.prefill_s + self.pair_s * work.attention_pairs
        total += self.head_s + self.head_s_per_sequence * work.sequences + self.host_s
        return total + self.adapter_load_s * work.adapters_loaded + work.restore_s

    def kv_bytes(self, tokens: int) -> float:
        """Return the size of the KV cache of the last `tokens` tokens of a prompt in bytes; 0 if
        unknown.

        Layers with a sliding window only keep the window, as in vLLM's hybrid KV-cache manager.
        """
        window = self.kv_window
        if window is None:
            return float(tokens * self.kv_bytes_per_token)
        kept = min(tokens, window.tokens)
        return float(tokens * window.other_bytes_per_token + kept * window.bytes_per_token)

    def prefill_tokens_per_s(self, tokens: int) -> float:
        """Return the peak prefill throughput in tokens per second: that of a step that computes
        only `tokens` tokens of one new prompt.

        With 8,192 tokens, Qwen3-32B on two H100s has 15,953 tokens/s; llm-d's guide
        optimized-baseline measured 15,928.
        """
        work = StepWork(tokens=tokens, prefills=1, attention_pairs=tokens * tokens / 2, sequences=1)
        return tokens / self.step_s(work)

    def decode_step_s(self, requests: int, context_tokens: int) -> float:
        """Return the time in seconds of a step in which `requests` requests decode, each with a
        context of `context_tokens`.
        """
        work = StepWork(
            tokens=requests,
            decodes=requests,
            decode_context_tokens=requests * context_tokens,
            longest_context_tokens=context_tokens,
            sequences=requests,
        )
        return self.step_s(work)

    def linear_layers_s(self, tokens: int) -> float:
        """Return the time in seconds of the linear layers in a step that computes `tokens` tokens:
        of all layers except attention and the output layer, and except experts if the profile has a
        curve for these.
        """
        points = self.linear_tokens
        if not points:
            by_tokens = self.linear_base_s + self.linear_s_per_token * tokens
            return max(self.weight_read_s, by_tokens)
        at = bisect_left(points, tokens)
        if at == len(points):
            return self.linear_s[-1] + self.linear_s_per_token * (tokens - points[-1])
        if at == 0:
            return self.linear_s[0]
        share = (tokens - points[at - 1]) / (points[at] - points[at - 1])
        return self.linear_s[at - 1] + share * (self.linear_s[at] - self.linear_s[at - 1])

    def expert_layers_s(self, tokens: int) -> float:
        """Return the time in seconds of all expert layers in a step in which all ranks together
        compute `tokens` tokens; 0 if the profile has no curve for experts.
        """
        points, seconds = self.expert_tokens, self.expert_s
        if not points:
            return 0.0
        if tokens <= points[0]:
            return seconds[0]
        at = min(bisect_left(points, tokens), len(points) - 1)
        share = (tokens - points[at - 1]) / (points[at] - points[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def frontend_delay_s(self, prompt_tokens: int) -> float:
        """Return the time in seconds from the arrival of a request at the server until it is in the
        engine's queue.
        """
        return self.frontend_s + self.frontend_s_per_token * prompt_tokens


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory sizes that determine how many tokens the KV cache of a pod holds."""

    bytes: _Bytes
    """Size in bytes of the memory of one GPU."""
    weight_bytes: _Bytes
    """Size in bytes of the weights of the whole model, not of one tensor-parallel part."""
    kv_bytes_per_token: _Count
    tensor_parallel: _Count = 1
    share: _Share = 0.92
    """Share of the GPU memory that the engine may use (`--gpu-memory-utilization` of vLLM)."""

    def __post_init__(self) -> None:
        if self.kv_tokens < KV_TOKENS_MIN:
            raise ValueError(
                f"the weights leave {self.kv_tokens} tokens for the KV cache; expected at least "
                f"{KV_TOKENS_MIN}"
            )

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that the KV cache holds beside weights, activations and NCCL. The sizes
        of the last two are those of inference-sim for dense models.
        """
        other = (5.5 + (0.15 if self.tensor_parallel == 1 else 0.6)) * 2**30
        left = self.share * self.bytes - self.weight_bytes / self.tensor_parallel - other
        return int(left * self.tensor_parallel / self.kv_bytes_per_token)


def estimate_warnings(profiles: Iterable[Profile]) -> list[str]:
    """Return a warning sentence for each profile that was estimated and not measured."""
    errors = {profile.name: profile.estimated for profile in profiles}
    return [estimate_warning(name, error.said) for name, error in errors.items() if error]


def estimate_warning(name: str, said: str) -> str:
    """Return the warning that profile `name` is estimated and not measured; `said` is its error in
    words.
    """
    return (
        f"Profile {name} is estimated, {said}: times may be wrong by as much, and by more if "
        "requests queue."
    )


class ProfileError(ValueError):
    """A profile is missing or invalid. The message is one sentence, which usually names the file if
    there is one.
    """


@cache
def built_in_profiles() -> Mapping[str, Profile]:
    """Return the built-in profiles by name, in the order of the file `profiles.toml`."""
    return _profiles_of(Path(__file__).with_name("profiles.toml"), known={})


def find_profile(text: str) -> Profile:
    """Return the profile that `text` names: a built-in name, FILE.toml with one profile, or
    FILE.toml:NAME.

    Raises `ProfileError` if there is no such profile, or if the file is invalid.
    """
    built_in = built_in_profiles()
    if text in built_in:
        return built_in[text]
    file, colon, name = text.partition(".toml:")
    if not colon and not text.endswith(".toml"):
        raise ProfileError(
            f"No profile {text!r}; expected one of {', '.join(sorted(built_in))}, or FILE.toml."
        )
    path = Path(file + ".toml" if colon else text)
    profiles = profiles_in(path)
    if not colon and len(profiles) == 1:
        return next(iter(profiles.values()))
    if not name:
        raise ProfileError(
            f"{path}: no profile is named; expected {path}:NAME with one of {', '.join(profiles)}."
        )
    if name not in profiles:
        raise ProfileError(f"{path}: no profile {name!r}; expected one of {', '.join(profiles)}.")
    return profiles[name]


def profiles_in(path: Path) -> dict[str, Profile]:
    """Return all profiles of a TOML file by name. Each is a table `[name]` with the fields of
    `Profile`.

    `like = "..."` takes missing fields from a built-in profile or an earlier one in the file. A
    table `memory` with the fields of `Memory` replaces `kv_tokens` and `kv_bytes_per_token`. Raises
    `ProfileError` if the file is invalid.
    """
    return _profiles_of(path, known=built_in_profiles())


def _profiles_of(path: Path, *, known: Mapping[str, Profile]) -> dict[str, Profile]:
    """Return the profiles of a TOML file by name; `known` has further profiles that `like` may
    name.
    """
    profiles: dict[str, Profile] = {}
    for name, table in toml_in(path).items():
        if not isinstance(table, dict):
            raise ProfileError(f"{path}: {name}: expected a table with a profile.")
        fields: dict[str, Any] = {**table, "name": name}
        like = fields.pop("like", None)
        if like is not None:
            base = profiles.get(str(like)) or known.get(str(like))
            if base is None:
                raise ProfileError(f"{path}: {name}: like: no profile {like!r} before it.")
            fields = {**msgspec.to_builtins(base), **fields}
        place = f"{path}: {name}: memory"
        try:
            if "memory" in fields:
                memory = msgspec.convert(fields.pop("memory"), Memory)
                fields["kv_tokens"] = memory.kv_tokens
                fields["kv_bytes_per_token"] = memory.kv_bytes_per_token
            place = f"{path}: {name}"
            profiles[name] = msgspec.convert(fields, Profile)
        except msgspec.ValidationError as problem:
            raise ProfileError(f"{misfit(place, problem, Profile)}.") from problem
    if not profiles:
        raise ProfileError(f"{path}: expected at least one table with a profile.")
    return profiles


def toml_in(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises `ProfileError` if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ProfileError(unread(path, problem, "TOML")) from problem


def profile_as_toml(profile: Profile, comments: dict[str, str]) -> str:
    """Return a profile as TOML text that `profiles_in` can read, with a comment behind each field
    in `comments`.
    """
    lines = [f"[{_toml(profile.name)}]"]
    for field, value in msgspec.to_builtins(profile).items():
        if field != "name" and value not in ((), [], None):
            comment = f"  # {comments[field]}" if field in comments else ""
            lines.append(f"{field} = {_toml(value)}{comment}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.1f}"
    return str(value)


def profile_named(text: str) -> Profile:
    """Return the profile that `text` names, as `find_profile` does, for argparse. Raises
    `ArgumentTypeError`.
    """
    try:
        return find_profile(text)
    except ProfileError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem
