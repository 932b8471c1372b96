"""How long one step of a vLLM engine takes: published constants for each model, GPU and degree.

    m = tokens computed in the step: prompt chunks and one for each decoding request
    t = max(weight_read, linear * m) * adapter factor          linear layers
      + all_reduce + all_reduce_per_token * m                  tensor parallel only
      + [decodes] decode + decode_per_context_token * C        C = context of all decoding requests
      + [chunks]  pair * sum(n*c + n*n/2)                      chunk of n tokens after c tokens
      + head + host + loading of adapters
    C becomes U + shared * (C - U) where C > U, the tokens in distinct held blocks: a prefix that
    many requests share is cheaper to read than as many copies of it.

Sources. Kernel constants: least squares over the vLLM kernel tables published in
ai-dynamo/aiconfigurator (H100 SXM, BF16; gemm, context attention, generation attention, all-reduce;
Apache-2.0). `pair_s` is twice the fitted coefficient of n*n for a whole prompt. `host_s`: fitted on
two published vLLM 0.19 runs of casys-kaist/LLMServingSim. `shared_context_factor` and the front-end
terms: fitted on the llm-d guide `optimized-baseline` (8 x 2 H100, Qwen3-32B). KV tokens: 0.92 of
80 GB less weights, activations and NCCL; Qwen3-32B as llm-d publishes it. Adapter factor: rank 16
in inference-sim's defaults. Adapter load: from disk, an assumption (0.3 to 5 s are seen).
"""

from typing import Final

from msgspec import Struct


class StepWork(Struct):
    """What one step computes."""

    tokens: int = 0
    decodes: int = 0
    decode_context_tokens: int = 0
    prefills: int = 0
    attention_pairs: float = 0.0
    """Sum of n*c + n*n/2 over the chunks: n tokens after c tokens of context."""
    held_tokens: int = 0
    """Tokens in distinct held blocks."""
    with_adapter: bool = False
    adapters_loaded: int = 0


class Profile(Struct, frozen=True, kw_only=True):
    """One model on one kind of GPU. Seconds and tokens."""

    name: str
    model: str
    kv_tokens: int
    max_model_len_tokens: int
    weight_read_s: float
    linear_s_per_token: float
    decode_s: float
    decode_s_per_context_token: float
    pair_s: float
    head_s: float
    all_reduce_s: float = 0.0
    all_reduce_s_per_token: float = 0.0
    host_s: float = 0.0015
    shared_context_factor: float = 0.5
    adapter_linear_factor: float = 1.035
    adapter_load_s: float = 0.3
    frontend_s: float = 0.010
    """Tokenising, HTTP and output processing of a request, before the engine sees it."""
    frontend_s_per_token: float = 10e-6
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    """Both: the defaults of `vllm serve` on a GPU of at least 70 GiB."""

    def step_s(self, work: StepWork) -> float:
        """How long a step with this work takes."""
        linear = max(self.weight_read_s, self.linear_s_per_token * work.tokens)
        if work.with_adapter:
            linear *= self.adapter_linear_factor
        total = linear + self.all_reduce_s + self.all_reduce_s_per_token * work.tokens
        if work.decodes:
            context: float = work.decode_context_tokens
            if context > work.held_tokens:
                context = work.held_tokens + self.shared_context_factor * (
                    context - work.held_tokens
                )
            total += self.decode_s + self.decode_s_per_context_token * context
        total += self.pair_s * work.attention_pairs
        return total + self.head_s + self.host_s + self.adapter_load_s * work.adapters_loaded

    def frontend_delay_s(self, prompt_tokens: int) -> float:
        """From the arrival of a request to its place in the engine's queue."""
        return self.frontend_s + self.frontend_s_per_token * prompt_tokens


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

PROFILES: Final = {
    profile.name: profile for profile in (_LLAMA_8B, _QWEN3_32B, _LLAMA_70B_TP4, _LLAMA_70B_TP8)
}
DEFAULT_PROFILE: Final = _LLAMA_8B.name
