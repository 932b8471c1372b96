"""How long one step of a vLLM engine takes: constants for each model, GPU and degree.

    m = tokens computed in the step: prompt chunks and one for each decoding request
    t = linear(m) * adapter factor                             linear layers
      + all_reduce + all_reduce_per_token * m                  tensor parallel only
      + [decodes] decode + decode_per_context_token * C        C = context of all decoding requests
      + [chunks]  chunk + pair * sum(n*c + n*n/2)              chunk of n tokens after c tokens
      + head + head_per_sequence * sequences + host + loading of adapters
    linear(m) is read from a table of kernel times where there is one, with straight lines between
    its points, else max(weight_read, linear_base + linear_per_token * m).
    C counts tokens that several decoding requests share once in full and `shared_context_factor`
    of each further copy. It grows by `skew` of what it falls short of (decodes * longest context):
    some attention kernels wait for the longest. `mixed_decode_factor` multiplies
    decode_per_context_token * C in steps that also compute chunks: kernels for both at once are
    slower at decoding on some GPUs.

A user's own profiles are TOML, one table a profile, named as they are used; `like` names another to
begin with. See `profiles_in`.

Sources. H100: least squares over the vLLM kernel tables published in ai-dynamo/aiconfigurator (H100
SXM, BF16; gemm, context attention, generation attention, all-reduce; Apache-2.0), `pair_s` being
twice the fitted coefficient of n*n for a whole prompt. A100: no kernel table; the H100's measured
share of its peaks (70 % of 989 TFLOP/s, 89 % of 3.35 TB/s) at the peaks of the A100's data sheet
(312 TFLOP/s, 2.039 TB/s), attention at FlashAttention-2's published 230 TFLOP/s: expect less of it.
RTX: `sim/kernels.py` over the kernel timings that casys-kaist/LLMServingSim publishes (MIT).
`host_s`: fitted on two published vLLM 0.19 runs of the same project. `shared_context_factor` and
the front-end terms: fitted on the llm-d guide `optimized-baseline` (8 x 2 H100, Qwen3-32B). KV
tokens: `Memory`, but where a number was published or recorded. Adapter factors: by rank as in
inference-sim's defaults. Adapter load: from disk, an assumption (0.3 to 5 s are seen).
"""

import tomllib
from bisect import bisect_left
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from sim.sentences import sentence_of

ADAPTER_LINEAR_FACTORS: Final = {8: 1.02, 16: 1.035, 32: 1.06}
"""By LoRA rank: `defaults.yaml` of inference-sim/inference-sim."""


class StepWork(Struct):
    """What one step computes."""

    tokens: int = 0
    decodes: int = 0
    decode_context_tokens: int = 0
    longest_context_tokens: int = 0
    """Of a decoding request; told only to profiles with a skew."""
    shared_tokens: int = 0
    """Context that other decoding requests hold too: counted for each of them but one."""
    prefills: int = 0
    attention_pairs: float = 0.0
    """Sum of n*c + n*n/2 over the chunks: n tokens after c tokens of context."""
    sequences: int = 0
    """Requests that get a token."""
    with_adapter: bool = False
    adapters_loaded: int = 0


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one kind of GPU. Seconds and tokens."""

    name: str
    model: str
    kv_tokens: int
    max_model_len_tokens: int
    decode_s: float
    decode_s_per_context_token: float
    pair_s: float
    head_s: float
    weight_read_s: float = 0.0
    linear_base_s: float = 0.0
    linear_s_per_token: float = 0.0
    linear_tokens: tuple[int, ...] = ()
    """Ascending: where the table has its points. Beyond the last, `linear_s_per_token` goes on."""
    linear_s: tuple[float, ...] = ()
    """Seconds at `linear_tokens`, for all layers."""
    prefill_s: float = 0.0
    head_s_per_sequence: float = 0.0
    all_reduce_s: float = 0.0
    all_reduce_s_per_token: float = 0.0
    host_s: float = 0.0015
    shared_context_factor: float = 0.5
    skew: float = 0.0
    mixed_decode_factor: float = 1.0
    adapter_linear_factor: float = ADAPTER_LINEAR_FACTORS[16]
    adapter_load_s: float = 0.3
    frontend_s: float = 0.010
    """Tokenising, HTTP and output processing of a request, before the engine sees it."""
    frontend_s_per_token: float = 10e-6
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    """Both: the defaults of `vllm serve` on a GPU of at least 70 GiB (not A100)."""

    def __post_init__(self) -> None:
        if len(self.linear_tokens) != len(self.linear_s):
            raise ValueError("linear_tokens and linear_s differ in length")
        if list(self.linear_tokens) != sorted(set(self.linear_tokens)):
            raise ValueError("linear_tokens do not ascend")
        if not (self.linear_s or self.weight_read_s or self.linear_s_per_token):
            raise ValueError("neither a table nor constants for the linear layers")

    def step_s(self, work: StepWork) -> float:
        """How long a step with this work takes."""
        linear = self.linear_layers_s(work.tokens)
        if work.with_adapter:
            linear *= self.adapter_linear_factor
        total = linear + self.all_reduce_s + self.all_reduce_s_per_token * work.tokens
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
        return total + self.adapter_load_s * work.adapters_loaded

    def linear_layers_s(self, tokens: int) -> float:
        """All layers but attention, for `tokens` tokens together."""
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

    def frontend_delay_s(self, prompt_tokens: int) -> float:
        """From the arrival of a request to its place in the engine's queue."""
        return self.frontend_s + self.frontend_s_per_token * prompt_tokens


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides how many tokens the KV cache of a pod holds."""

    bytes: float
    """Of one GPU."""
    weight_bytes: float
    """Of the whole model, as `kv_bytes_per_token`."""
    kv_bytes_per_token: int
    tensor_parallel: int = 1
    share: float = 0.92
    """`--gpu-memory-utilization`."""

    @property
    def kv_tokens(self) -> int:
        """What weights, activations and NCCL leave; those as inference-sim has them (dense)."""
        other = (5.5 + (0.15 if self.tensor_parallel == 1 else 0.6)) * 2**30
        left = self.share * self.bytes - self.weight_bytes / self.tensor_parallel - other
        return int(left * self.tensor_parallel / self.kv_bytes_per_token)


class ProfileError(ValueError):
    """A profile cannot be had: one sentence, with the file where there is one."""


def find_profile(text: str) -> Profile:
    """A built-in profile by its name, or FILE.toml, or FILE.toml:NAME where it holds several.

    Raises ProfileError.
    """
    if text in PROFILES:
        return PROFILES[text]
    file, colon, name = text.partition(".toml:")
    if not colon and not text.endswith(".toml"):
        raise ProfileError(
            f"No profile {text!r}; expected one of {', '.join(sorted(PROFILES))}, or FILE.toml."
        )
    path = Path(file + ".toml" if colon else text)
    profiles = profiles_in(path)
    if not colon and len(profiles) == 1:
        return next(iter(profiles.values()))
    if name not in profiles:
        raise ProfileError(f"{path}: no profile {name!r}; expected one of {', '.join(profiles)}.")
    return profiles[name]


def profiles_in(path: Path) -> dict[str, Profile]:
    """All profiles of a TOML file: `[name]`, then the fields of `Profile`.

    `like = "..."` takes what is not said from a built-in profile or one before in the file; a table
    `memory` with the fields of `Memory` stands for `kv_tokens`. Raises ProfileError.
    """
    profiles: dict[str, Profile] = {}
    for name, table in toml_in(path).items():
        if not isinstance(table, dict):
            raise ProfileError(f"{path}: {name}: expected a table, a profile.")
        fields: dict[str, Any] = {**table, "name": name}
        like = fields.pop("like", None)
        if like is not None:
            base = profiles.get(like) or PROFILES.get(like)
            if base is None:
                raise ProfileError(f"{path}: {name}: like: no profile {like!r} before it.")
            fields = {**msgspec.to_builtins(base), **fields}
        try:
            if "memory" in fields:
                fields["kv_tokens"] = msgspec.convert(fields.pop("memory"), Memory).kv_tokens
            profiles[name] = msgspec.convert(fields, Profile)
        except msgspec.ValidationError as problem:
            raise ProfileError(f"{path}: {name}: {problem}.") from problem
    if not profiles:
        raise ProfileError(f"{path}: expected at least one table, a profile.")
    return profiles


def toml_in(path: Path) -> dict[str, Any]:
    """What a TOML file says. Raises ProfileError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ProfileError(sentence_of(problem)) from problem
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ProfileError(f"{path}: {problem}") from problem


def profile_as_toml(profile: Profile, comments: dict[str, str]) -> str:
    """The text of a profile for `profiles_in`, a comment behind the fields that have one."""
    lines = [f"[{_toml(profile.name)}]"]
    for field, value in msgspec.to_builtins(profile).items():
        if field != "name" and value not in ((), []):
            comment = f"  # {comments[field]}" if field in comments else ""
            lines.append(f"{field} = {_toml(value)}{comment}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.1f}"
    return str(value)


_LLAMA_8B: Final = Profile(
    name="llama-3.1-8b-h100-tp1",
    model="meta-llama/Llama-3.1-8B-Instruct",
    kv_tokens=434_000,
    max_model_len_tokens=131_072,
    weight_read_s=5.4e-3,
    linear_s_per_token=21.5e-6,
    decode_s=0.46e-3,
    decode_s_per_context_token=44.1e-9,
    pair_s=2 * 0.343e-9,
    head_s=0.4e-3,
)
_QWEN3_32B: Final = Profile(
    name="qwen3-32b-h100-tp2",
    model="Qwen/Qwen3-32B",
    kv_tokens=307_328,
    max_model_len_tokens=40_960,
    weight_read_s=12.2e-3,
    linear_s_per_token=48e-6,
    all_reduce_s=0.57e-3,
    all_reduce_s_per_token=8.6e-6,
    decode_s=0.70e-3,
    decode_s_per_context_token=45.4e-9,
    pair_s=2 * 0.699e-9,
    head_s=0.35e-3,
    host_s=0.002,
)
_LLAMA_70B_TP4: Final = Profile(
    name="llama-3.1-70b-h100-tp4",
    model="meta-llama/Llama-3.1-70B-Instruct",
    kv_tokens=450_000,
    max_model_len_tokens=131_072,
    weight_read_s=13.0e-3,
    linear_s_per_token=50.2e-6,
    all_reduce_s=0.78e-3,
    all_reduce_s_per_token=22.3e-6,
    decode_s=0.77e-3,
    decode_s_per_context_token=30.6e-9,
    pair_s=2 * 0.372e-9,
    head_s=0.3e-3,
)
_LLAMA_70B_TP8: Final = Profile(
    name="llama-3.1-70b-h100-tp8",
    model="meta-llama/Llama-3.1-70B-Instruct",
    kv_tokens=1_340_000,
    max_model_len_tokens=131_072,
    weight_read_s=7.05e-3,
    linear_s_per_token=23.7e-6,
    all_reduce_s=0.89e-3,
    all_reduce_s_per_token=20.5e-6,
    decode_s=0.77e-3,
    decode_s_per_context_token=15.8e-9,
    pair_s=2 * 0.128e-9,
    head_s=0.3e-3,
)

_LLAMA_8B_A100: Final = Profile(
    name="llama-3.1-8b-a100-tp1",
    model="meta-llama/Llama-3.1-8B-Instruct",
    kv_tokens=434_000,
    max_model_len_tokens=131_072,
    weight_read_s=8.9e-3,
    linear_s_per_token=68e-6,
    decode_s=0.46e-3,
    decode_s_per_context_token=72.5e-9,
    pair_s=2.27e-9,
    head_s=0.65e-3,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
)

# Both RTX tables: points of LLMServingSim's timings chosen so that no other is off by 3 %.
_LLAMA_8B_RTX_4090: Final = Profile(
    name="llama-3.1-8b-rtx-4090-tp1",
    model="meta-llama/Llama-3.1-8B",
    kv_tokens=41_392,  # 2,587 usable blocks of 16: `num_gpu_blocks` of the published run
    max_model_len_tokens=32_768,
    linear_tokens=(
        *(1, 16, 20, 160, 208, 256, 272, 384, 400, 512, 528, 640, 656, 768, 784, 896, 912, 1024),
        *(1040, 1280, 1296, 1408, 1424, 1536, 1552, 2048),
    ),
    linear_s=(
        *(0.01522, 0.01574, 0.01673, 0.02005, 0.0237, 0.02393, 0.03435, 0.0358, 0.04179, 0.04587),
        *(0.0567, 0.06022, 0.06488, 0.06878, 0.07798, 0.08066, 0.08844, 0.09089, 0.1024, 0.1139),
        *(0.1235, 0.1259, 0.1338, 0.1364, 0.1466, 0.1811),
    ),
    linear_s_per_token=88.4e-6,
    decode_s=0.407e-3,
    decode_s_per_context_token=150.1e-9,
    mixed_decode_factor=2.11,
    prefill_s=0.368e-3,
    pair_s=4.75e-9,
    head_s=1.10e-3,
    head_s_per_sequence=3.02e-6,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
)
_LLAMA_8B_RTX_PRO_6000: Final = Profile(
    name="llama-3.1-8b-rtx-pro-6000-tp1",
    model="meta-llama/Llama-3.1-8B",
    kv_tokens=551_000,
    max_model_len_tokens=131_072,
    linear_tokens=(
        *(1, 128, 144, 256, 272, 384, 400, 512, 528, 640, 656, 768, 784, 896, 912, 1024, 1040),
        *(1280, 1296, 1408, 1424, 1664, 1680, 1920, 1936, 2048),
    ),
    linear_s=(
        *(0.01014, 0.01158, 0.01283, 0.0139, 0.01629, 0.01715, 0.02155, 0.02221, 0.0242, 0.02466),
        *(0.03119, 0.03145, 0.03457, 0.03524, 0.03937, 0.03974, 0.04433, 0.04692, 0.05292, 0.05339),
        *(0.06131, 0.0623, 0.06617, 0.06865, 0.0762, 0.07668),
    ),
    linear_s_per_token=37.4e-6,
    decode_s=0.398e-3,
    decode_s_per_context_token=93.8e-9,
    mixed_decode_factor=1.68,
    prefill_s=0.346e-3,
    pair_s=2.58e-9,
    head_s=0.703e-3,
    head_s_per_sequence=1.09e-6,
)

PROFILES: Final = {
    profile.name: profile
    for profile in (
        _LLAMA_8B,
        _QWEN3_32B,
        _LLAMA_70B_TP4,
        _LLAMA_70B_TP8,
        _LLAMA_8B_A100,
        _LLAMA_8B_RTX_4090,
        _LLAMA_8B_RTX_PRO_6000,
    )
}
DEFAULT_PROFILE: Final = _LLAMA_8B.name
