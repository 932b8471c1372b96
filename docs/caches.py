"""Check published statements of other projects about their prompt caches with the simulator:
`python -m docs.reference`.

The tables are in docs/caches.md. Each simulated cache gets requests one after another, either
directly or in an engine, whose times are then measured. Settings that a source leaves open are
chosen here, named in the table, and varied.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from epp.core.types import Seconds
from sim.caches.behaviour import PCIE_5_X16_BYTES_PER_S, Stored
from sim.caches.mlx_disk import MEASURED_TOKENS, RESTORE_S, SAVE_S, Disk
from sim.caches.names import cache_named
from sim.caches.ruvllm_faithful import StoredPrompts
from sim.caches.ruvllm_fixed import RadixTree
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, Profile, find_profile
from sim.engine.prompt_cache import PromptCache
from sim.engine.request import EngineRequest, PromptParts
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes

PROFILE: Final = find_profile(DEFAULT_PROFILE)
SETTINGS: Final = EngineSettings(blocks_total=PROFILE.kv_tokens // 16 + 1)

Message = tuple[int, int]
"""A message of a prompt, as (id, number of tokens)."""
Prompt = tuple[Message, ...]

MLX_COLD_S: Final = (2.9054, 12.3068, 28.7878, 141.1421)
"""Published times in seconds of mlx-lm for prefills of `MEASURED_TOKENS` without a cache."""
MLX_STATED: Final = (1477, 2078, 1811, 4585)
"""Published speed-ups of mlx-lm when it restores a prompt from the disk, for `MEASURED_TOKENS`."""


class HitRates(Struct, frozen=True):
    """Hit rates of a cache: `exact` and `partial` are the shares of the look-ups that found the
    whole prompt or a part of it, `tokens` is the share of the prompt tokens that were found.
    """

    exact: float
    partial: float
    tokens: float

    @property
    def total(self) -> float:
        """Share of look-ups that found at least one token."""
        return self.exact + self.partial


def request_of(prompt: Prompt, *, index: int = 0, answer: int | None = None) -> EngineRequest:
    """Return an engine request for `prompt`, with an answer of one token."""
    hashes = PromptHashes(
        Arrival(
            index=index,
            time_s=0.0,
            prompt_tokens=sum(tokens for _, tokens in prompt),
            output_tokens=1,
            blocks=tuple(number for number, _ in prompt),
            lengths=tuple(tokens for _, tokens in prompt),
            answer=answer,
        )
    )
    chain, ends = hashes.engine_pieces(SETTINGS.block_size_tokens)
    return EngineRequest(
        str(index),
        prompt_tokens=hashes.prompt_tokens,
        output_tokens=1,
        chain=chain,
        chain_ends=ends,
        parts=PromptParts(*hashes.engine_pieces(1)),
    )


def opened(name: str, before: PromptCache | None = None) -> PromptCache:
    """Return the simulated cache `name` of a pod with the default profile.

    `before` is the cache before a restart, or None.
    """
    behaviour = cache_named(name)
    assert behaviour is not None, "vLLM's needs no opening"
    return behaviour.open(PROFILE, SETTINGS, before)


def served(cache: PromptCache, prompt: Prompt, index: int) -> int:
    """Return how many tokens of a prompt the cache finds.

    The prompt is then computed and answered, so that the cache stores it.
    """
    request = request_of(prompt, index=index)
    found = cache.fetch(request, 0, float(index))
    assert found is not None, "nobody else is there"
    cache.computed(request, float(index))
    request.generated_tokens = 1
    cache.left(request, float(index))
    return found.tokens


def found_tokens(name: str, prompts: Sequence[Prompt]) -> list[int]:
    """Return how many tokens of each prompt the cache `name` finds, in order, beginning with an
    empty cache.
    """
    cache = opened(name)
    return [served(cache, prompt, at) for at, prompt in enumerate(prompts)]


def hit_rates(name: str, prompts: Sequence[Prompt]) -> HitRates:
    """Return the hit rates of the cache `name` for these prompts, sent in order."""
    found = found_tokens(name, prompts)
    lengths = [sum(tokens for _, tokens in prompt) for prompt in prompts]
    exact = sum(tokens >= length for tokens, length in zip(found, lengths, strict=True))
    some = sum(tokens > 0 for tokens in found)
    return HitRates(exact / len(prompts), (some - exact) / len(prompts), sum(found) / sum(lengths))


def ttft_s(name: str, prompts: Sequence[Prompt], profile: Profile = PROFILE) -> list[Seconds]:
    """Return the time to first token in seconds of each prompt in an engine with the cache `name`.

    Requests do not overlap.
    """
    behaviour = cache_named(name)
    cache = None if behaviour is None else behaviour.open(profile, SETTINGS, None)
    engine, now = Engine(SETTINGS, profile, cache), 0.0
    times_s: list[Seconds] = []
    for at, prompt in enumerate(prompts):
        request = request_of(prompt, index=at)
        engine.submit(request, now)
        while (step := engine.step(now)) is not None:
            ends_at = step.ends_at
            now = ends_at
        assert request.first_token_at is not None, "all are answered"
        times_s.append(request.first_token_at - request.queued_at)
        now += 60.0
    return times_s


def flat_profile(s_per_token: Seconds, pair_s: Seconds = 0.0) -> Profile:
    """Return a profile in which a prompt takes a fixed time per token (and per pair of tokens), and
    nothing else takes time.
    """
    return replace(
        PROFILE,
        weight_read_s=0.0,
        linear_s_per_token=s_per_token,
        decode_s=0.0,
        decode_s_per_context_token=0.0,
        pair_s=pair_s,
        head_s=0.0,
        host_s=0.0,
    )


# --- workloads -------------------------------------------------------------------------------------


def chat(requests: int, *, system_tokens: int = 200, message_tokens: int = 20) -> list[Prompt]:
    """Return chat prompts: the same system prompt each time, followed by a different message."""
    return [((1, system_tokens), (100 + at, message_tokens)) for at in range(requests)]


def rag(
    chunks: int, *, corpus: int = 100, skew: float = 1.0, requests: int = 1_000
) -> list[Prompt]:
    """Return RAG prompts: 2 tokens of a template, chunks of 1,000 tokens by Zipf's law, and a
    question of 20 tokens.

    The chunks of a prompt differ and stand in the order in which they were drawn.
    """
    random = Random("rag")
    weights = [1 / (rank + 1) ** skew for rank in range(corpus)]
    prompts: list[Prompt] = []
    for at in range(requests):
        drawn: dict[int, None] = {}
        while len(drawn) < chunks:
            drawn[random.choices(range(corpus), weights)[0]] = None
        documents = tuple((1_000 + number, 1_000) for number in drawn)
        prompts.append(((1, 2), *documents, (100_000 + at, 20)))
    return prompts


def mixed(share: float, *, system_prompts: int = 10, requests: int = 1_000) -> list[Prompt]:
    """Return prompts of which `share` begin with one of several system prompts of 200 tokens; the
    others share nothing.
    """
    random = Random("mixed")
    return [
        (
            (1 + random.randrange(system_prompts), 200)
            if random.random() < share
            else (10_000 + at, 200),
            (100_000 + at, 50),
        )
        for at in range(requests)
    ]


def repeated(prompts: Sequence[Prompt], share: float) -> list[Prompt]:
    """Return the prompts with a share of them replaced by exact repetitions of earlier ones."""
    random = Random("repeated")
    out: list[Prompt] = []
    for prompt in prompts:
        out.append(random.choice(out) if out and random.random() < share else prompt)
    return out


class Workload(Struct, frozen=True, kw_only=True):
    """A row of RuvLLM's published table of hit rates, with our interpretation as prompts."""

    stated: str
    """Published exact, partial and total hits, in per cent; "" for a variation of the row above."""
    name: str
    min_cache_tokens: int
    prompts: Callable[[], list[Prompt]]


WORKLOADS: Final = (
    Workload(stated="chat: 95, 3, 98", name="10 requests with one system prompt", min_cache_tokens=50,
             prompts=lambda: chat(10)),
    Workload(stated="", name="50", min_cache_tokens=50, prompts=lambda: chat(50)),
    Workload(stated="", name="200", min_cache_tokens=50, prompts=lambda: chat(200)),
    Workload(stated="", name="200, 95 % of them an earlier prompt again", min_cache_tokens=50,
             prompts=lambda: repeated(chat(200), 0.95)),
    Workload(stated="RAG: 60, 30, 90", name="1 of 100 chunks a query", min_cache_tokens=100,
             prompts=lambda: rag(1)),
    Workload(stated="", name="2", min_cache_tokens=100, prompts=lambda: rag(2)),
    Workload(stated="", name="4", min_cache_tokens=100, prompts=lambda: rag(4)),
    Workload(stated="", name="2, 60 % of the queries an earlier one again", min_cache_tokens=100,
             prompts=lambda: repeated(rag(2), 0.6)),
    Workload(stated="", name="2, of 1,000 chunks", min_cache_tokens=100,
             prompts=lambda: rag(2, corpus=1_000)),
    Workload(stated="batch: 100, 0, 100", name="100 requests", min_cache_tokens=20,
             prompts=lambda: chat(100, system_tokens=50, message_tokens=100)),
    Workload(stated="mixed: 50, 30, 80", name="80 % of 1,000 with one of 10 system prompts",
             min_cache_tokens=50, prompts=lambda: mixed(0.8)),
    Workload(stated="", name="50 %", min_cache_tokens=50, prompts=lambda: mixed(0.5)),
)  # fmt: skip


# --- tables ----------------------------------------------------------------------------------------


def budget_used(name: str) -> float:
    """Return the used share of the memory budget of the cache `name`, which is 1 % of the KV cache.

    The cache has stored 40 prompts of 105 tokens and then one of 4,000.
    """
    cache = opened(f"{name}:memory_share=0.01")
    assert isinstance(cache, StoredPrompts | RadixTree)
    for at in range(40):
        served(cache, ((10 + at, 105),), at)
    served(cache, ((8, 4_000),), 99)
    budget_bytes = 0.01 * PROFILE.kv_tokens * PROFILE.kv_bytes_per_token
    return cache.statistics.memory_bytes / budget_bytes


def hit_rate_table() -> str:
    """Return the Markdown table of RuvLLM's published hit rates, with those of both simulated
    versions of its cache.
    """
    rows: list[tuple[str, ...]] = [
        ("published: exact, partial, total %", "our workload", "as written", "repaired", "repaired: tokens"),
        ("---",) * 5,
    ]  # fmt: skip
    for workload in WORKLOADS:
        prompts = workload.prompts()
        told = [
            hit_rates(f"{name}:min_cache_tokens={workload.min_cache_tokens}", prompts)
            for name in ("ruvllm-faithful", "ruvllm-fixed")
        ]
        rates = [f"{one.exact:.0%}, {one.partial:.0%}, {one.total:.0%}" for one in told]
        rows.append((workload.stated, workload.name, *rates, f"{told[1].tokens:.0%}"))
    return _table(rows)


def salvaged(shared_tokens: int, prompt_tokens: int) -> int:
    """Return how many tokens Kronk's cache finds of a prompt of which only the first
    `shared_tokens` equal the prompt before.
    """
    tail = prompt_tokens - shared_tokens
    first = ((1, shared_tokens), (2, tail - 100), (3, 100))
    second = ((1, shared_tokens), (4, tail - 100), (5, 100))
    return found_tokens("kronk-imc-v1", [first, second])[1]


def salvage_table() -> str:
    """Return the Markdown table about Kronk's statement that 77 to 80 % are salvaged, which is the
    share of the common beginning for any cache.
    """
    rows = [("shared head, tokens", "prompt, tokens", "salvaged", "share"), ("---:",) * 4]
    for shared, prompt in (
        (6_800, 8_400), (6_800, 8_500), (6_800, 8_830), (6_800, 13_600), (2_000, 8_400), (80, 8_400),
    ):  # fmt: skip
        kept = salvaged(shared, prompt)
        rows.append((f"{shared:,}", f"{prompt:,}", f"{kept:,}", f"{kept / prompt:.1%}"))
    return _table(rows)


def agents_taking_turns(
    slots: int, agents: int, *, turns: int = 12, common_tokens: int = 0
) -> float:
    """Return the share of prompt tokens that Kronk's cache finds when agents alternate, after each
    agent's first prompt.

    Each agent has a system prompt of its own, behind a common beginning of `common_tokens`. Their
    conversations grow by one message per turn.
    """
    head: Prompt = ((999_999, common_tokens),) if common_tokens else ()
    prompts: list[Prompt] = []
    for turn in range(turns):
        for agent in range(agents):
            history = ((1_000 * agent + 100 + at, 60) for at in range(turn + 1))
            prompts.append((*head, (1 + agent, 500), *history))
    found = found_tokens(f"kronk-imc-v1:slots={slots}", prompts)[agents:]
    return sum(found) / sum(tokens for prompt in prompts[agents:] for _, tokens in prompt)


def agent_table() -> str:
    """Return the Markdown table of the tokens that Kronk's cache finds, by number of slots and of
    alternating agents.
    """
    numbers = (1, 2, 3, 4, 6)
    rows = [("slots", *(f"agents: {agents}" for agents in numbers)), ("---:",) * (len(numbers) + 1)]
    for slots, common_tokens in ((1, 0), (3, 0), (4, 0), (3, 99), (3, 100), (6, 100)):
        shares = (
            agents_taking_turns(slots, agents, common_tokens=common_tokens) for agents in numbers
        )
        name = (
            f"{slots}, a head of {common_tokens} tokens in common" if common_tokens else str(slots)
        )
        rows.append((name, *(f"{share:.0%}" for share in shares)))
    return _table(rows)


def spc_restore_s(tokens: int, bytes_per_s: float) -> Seconds:
    """Return the time in seconds that the simulated cache of Kronk needs to restore a system
    prompt, for each request that begins with it.
    """
    cache = opened(f"kronk-spc:bytes_per_s={bytes_per_s}")
    served(cache, ((1, tokens), (2, 10)), 0)
    found = cache.fetch(request_of(((1, tokens), (3, 10))), 0, 1.0)
    assert found is not None, "nobody waits for a buffer"
    assert found.tokens == tokens
    return found.restore_s


def spc_table() -> str:
    """Return the Markdown table about Kronk's statement of 10 to 30 ms, by the size of the system
    prompt and the speed of the copy.
    """
    sizes = (100, 500, 2_000, 8_000, 16_000)
    rows = [("bytes a second", *(f"{tokens:,} tokens" for tokens in sizes))]
    rows.append(("---:",) * (len(sizes) + 1))
    for bytes_per_s in (10e9, 25e9, PCIE_5_X16_BYTES_PER_S):
        times_s = (spc_restore_s(tokens, bytes_per_s) for tokens in sizes)
        rows.append((f"{bytes_per_s / 1e9:.0f} GB", *(f"{1e3 * one:.1f} ms" for one in times_s)))
    return _table(rows)


def prefill_law(times_s: Sequence[Seconds], tokens: Sequence[int]) -> tuple[Seconds, Seconds]:
    """Return (seconds per token, seconds per pair) of the law of prefill times through the first
    and the last point.

    The law is tokens * first + tokens**2 / 2 * second.
    """
    (few, many), (short_s, long_s) = (tokens[0], tokens[-1]), (times_s[0], times_s[-1])
    pair_s = 2 * (long_s / many - short_s / few) / (many - few)
    return short_s / few - pair_s * few / 2, pair_s


def mlx_times_s(tokens: int) -> tuple[Seconds, Seconds]:
    """Return the prefill times in seconds of a prompt (without a disk cache, with one after a
    restart). The disk has all tokens of the prompt but the last.
    """
    profile = replace(flat_profile(*prefill_law(MLX_COLD_S, MEASURED_TOKENS)), kv_tokens=10**6)
    settings = EngineSettings(blocks_total=10**6 // 16, max_num_batched_tokens=10**6)
    behaviour = cache_named(f"mlx-disk:disk_bytes={2**40}")
    assert behaviour is not None
    cache: PromptCache | None = None
    times_s: list[Seconds] = []
    for prompt in (((1, tokens - 1),), ((1, tokens - 1), (2, 1))):
        cache = behaviour.open(profile, settings, cache)
        engine = Engine(settings, profile, cache)
        engine.submit(request_of(prompt), 0.0)
        step = engine.step(0.0)
        assert step is not None
        times_s.append(step.duration_s)
    return times_s[0], times_s[1]


def mlx_table() -> str:
    """Return the Markdown table of mlx-lm's published prefill times with a disk cache, beside the
    simulated ones.
    """
    rows = [
        ("tokens", "stated: cold, restored, faster", "cold, by two of the points", "restored and one token computed", "faster"),
        ("---:",) * 5,
    ]  # fmt: skip
    stated = zip(MEASURED_TOKENS, MLX_COLD_S, RESTORE_S, MLX_STATED, strict=True)
    for tokens, cold_s, restore_s, faster in stated:
        ours_s, hit_s = mlx_times_s(tokens)
        rows.append(
            (
                f"{tokens:,}",
                f"{cold_s:.1f} s, {1e3 * restore_s:.1f} ms, {faster:,}",
                f"{ours_s:.1f} s",
                f"{1e3 * hit_s:.1f} ms",
                f"{ours_s / hit_s:,.0f}",
            )
        )
    return _table(rows)


def survivors() -> tuple[list[float], list[int]]:
    """Insert 148 MB four times into mlx-lm's disk cache of 400 MB.

    Return the GB on the disk after each insert, and the numbers of the entries that remain.
    """
    disk = Disk(400_000_000)
    prompts = [request_of(((number, MEASURED_TOKENS[0]),)).parts for number in range(1, 5)]
    stored = [Stored(prompt, 1) for prompt in prompts if prompt is not None]
    on_disk: list[float] = []
    for one in stored:
        disk.write(one, 148_400_000)
        on_disk.append(round(disk.kept_bytes / 1e9, 3))
    return on_disk, [at for at, one in enumerate(stored) if one in disk.sequences]


def _statements() -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the table of statements: (statement, source, our measurement or
    computation, verdict).
    """
    yield from _of_ruvllm()
    yield from _of_kronk()
    yield from _of_mlx()


def _of_ruvllm() -> Iterator[tuple[str, str, str, str]]:
    source = "RuvLLM ADR-011"
    slow = flat_profile(0.5e-3)
    written = ttft_s("ruvllm-faithful", chat(2), slow)
    first, second = ttft_s("ruvllm-fixed", chat(2), slow)
    yield (
        "chat, system prompt of 200 tokens: 100 ms, then 10 ms",
        source,
        (
            f"at its 0.5 ms a token and messages of 20: {1e3 * first:.0f} ms, then {1e3 * second:.0f} ms; "
            f"as written {1e3 * written[1]:.0f} ms again"
        ),
        "true if repaired, contradicted as written",
    )
    first, second = ttft_s("ruvllm-fixed", chat(2))
    yield (
        "the same, 10 times faster",
        source,
        (
            f"on an H100 {1e3 * first:.1f} ms, then {1e3 * second:.1f} ms, {first / second:.1f} times: "
            "a pass reads all weights whatever it computes"
        ),
        "true only if prefill is slow",
    )
    documents = [((1, 1_000), (2 + at, 100)) for at in range(2)]
    first, second = ttft_s("ruvllm-fixed", documents, slow)
    yield (
        "RAG, 1,000 tokens of chunks: 500 ms, then 50 ms",
        source,
        f"at 0.5 ms a token and questions of 100: {1e3 * first:.0f} ms, then {1e3 * second:.0f} ms",
        "true if repaired, and if the chunks come first and in the same order",
    )
    batch = ttft_s("ruvllm-fixed:min_cache_tokens=20", chat(100, system_tokens=50), slow)
    without = ttft_s("vllm", chat(1, system_tokens=50), slow)
    yield (
        "batch, 100 requests with 50 common tokens: 1,000 ms, then 200 ms",
        source,
        (
            f"its own 30 ms a request are 3 s; at 0.5 ms a token and inputs of 20: "
            f"{100 * without[0]:.1f} s without, {sum(batch):.1f} s with"
        ),
        "contradicts itself; the factor is that of the inputs",
    )
    llama_2_7b = 2 * 32 * 32 * 128 * 2
    yield (
        "4 MB of KV cache for 1,000 tokens of a 7B model in BF16",
        source,
        (
            f"32 layers, 32 heads of 128: {llama_2_7b * 1_000 / 1e6:.0f} MB; with 8 KV heads "
            f"{PROFILE.kv_bytes_per_token * 1_000 / 1e6:.0f} MB"
        ),
        "contradicted",
    )
    yield (
        "tree and metadata cost 5 to 10 %",
        source,
        f"its own 1 KB a node and 200 bytes an entry are {1_224 / 4e6:.2%} of its own 4 MB",
        "contradicts itself; not modelled",
    )
    written_share, repaired_share = budget_used("ruvllm-faithful"), budget_used("ruvllm-fixed")
    yield (
        "the cache stays within its limit",
        source,
        (
            f"as written each new entry removes one: one of 4,000 tokens after 40 of 105 leaves "
            f"{written_share:.0%} of the budget in use; repaired {repaired_share:.0%}"
        ),
        "contradicted as written",
    )


def _of_kronk() -> Iterator[tuple[str, str, str, str]]:
    source = "Kronk, chapter 5"
    kept = salvaged(6_800, 8_400)
    yield (
        "77 to 80 % salvaged, 6,800 of 8,400 tokens",
        source,
        f"{kept:,} of 8,400, {kept / 8_400:.1%}, and 1,600 computed",
        "the tokens are right and are 81 %; the share is that of the head, see below",
    )
    flat = flat_profile(0.1e-3)
    conversation: list[Prompt] = [((1, 2_000), (2, 50)), ((1, 2_000), (3, 50))]
    first, second = ttft_s("kronk-imc-v1", conversation, flat)
    yield (
        "2,000 tokens cached: 200 ms of prefill, then 5 ms",
        source,
        f"at its 0.1 ms a token and a message of 50: {1e3 * first:.0f} ms, then {1e3 * second:.0f} ms",
        "true at that speed and length",
    )
    turns: list[Prompt] = [tuple((1 + at, 400) for at in range(count)) for count in (2, 4, 6)]
    found = found_tokens("kronk-imc-v1", turns)
    yield (
        "all messages except the last are cached",
        source,
        "; ".join(
            f"{tokens:,} of {sum(size for _, size in prompt):,}"
            for tokens, prompt in zip(found, turns, strict=True)
        )
        + " tokens in the first three turns, 400 a message",
        "true of the previous turn: its last message and answer are computed again",
    )
    alternating: list[Prompt] = [((1 + at % 2, 500), (10 + at, 20)) for at in range(20)]
    hits = sum(tokens > 0 for tokens in found_tokens("kronk-spc", alternating))
    yield (
        "SPC is best for several users with different system prompts",
        source,
        f"two alternating system prompts: {hits} of 20 requests find theirs",
        "contradicted: there is one buffer",
    )
    edited: list[Prompt] = [((1, 500), (2, 500), (3, 50)), ((1, 500), (4, 500), (3, 50))]
    tokens = found_tokens("kronk-imc-v1", edited)[1]
    yield (
        "an earlier message is edited: both ways of matching fail, everything is computed again",
        source,
        f"second of three messages: {tokens} of 1,050 tokens are salvaged",
        "contradicts its own fallback; true only for the first message, and for v2",
    )
    per_slot = 8_192 // 4 * PROFILE.kv_bytes_per_token / 1e6
    yield (
        "8K context in 4 slots, 8B in F16: about 200 MB a slot, 800 MB together",
        source,
        f"{per_slot:.0f} MB a slot, {4 * per_slot:,.0f} MB together with 8 KV heads and 32 layers",
        "a quarter too low",
    )
    yield (
        "an extension takes about 3 ms, tokenising for the comparison less than 5 ms",
        source,
        "3 ms are 30 tokens at its 0.1 ms a token; tokenising takes no time here",
        "depends on the message; not modelled",
    )
    yield (
        "fewer slots than agents: every request rebuilds",
        source,
        "see below",
        "true without a common head",
    )
    alone, together = (agents_taking_turns(6, 2, common_tokens=tokens) for tokens in (99, 100))
    yield (
        "each sub-agent gets its own slot by hash matching",
        source,
        (
            f"two agents on six slots: {alone:.0%} of the tokens found with 99 common tokens, "
            f"{together:.0%} with 100"
        ),
        "contradicted: a common head is preferred to an empty slot, so they share one",
    )
    yield ("a restored system prompt takes 10 to 30 ms", source, "see below", "unknown: the manual names neither size nor bus")  # fmt: skip


def _of_mlx() -> Iterator[tuple[str, str, str, str]]:
    source = "mlx-lm#6 of a fork"
    on_disk, kept = survivors()
    yield (
        "four inserts of 148 MB in 400 MB: 0.148, 0.297, 0.297, 0.297 GB, [2, 3] survive",
        source,
        f"{', '.join(f'{one:.3f}' for one in on_disk)} GB, {kept}",
        "true",
    )
    yield ("restored in 2.0 to 30.8 ms, saved in 54 to 593 ms", source, "used unchanged, see below", "an input")  # fmt: skip
    speed = 0.148e9 / RESTORE_S[0] / 1e9
    yield (
        "that is the whole time to the first token",
        source,
        (
            f"148 MB in 2.0 ms are {speed:.0f} GB/s, more than a disk reads; and at least one token must "
            "be computed"
        ),
        "contradicted: it is the time of a load whose bytes are not yet read, or are in memory",
    )
    yield (
        "the default budget is 1 GB",
        source,
        "its own flags say 4 GB; four inserts fit both",
        "contradicts itself",
    )
    yield (
        "3,824 times at 96k, from 63.0 s to 16.5 ms (commit message)",
        source,
        f"{MLX_COLD_S[-1]:.1f} s and {1e3 * RESTORE_S[-1]:.1f} ms in its description",
        "contradicts itself: twice as fast in both",
    )
    cold_s, saved_s = MLX_COLD_S[-1], SAVE_S[-1]
    yield (
        "saving costs little",
        source,
        (
            f"{saved_s / cold_s:.1%} of the prefill at 96k tokens, {SAVE_S[0] / MLX_COLD_S[0]:.1%} at 4k; "
            "the engine stops meanwhile under load"
        ),
        "true for one user",
    )


def statement_table() -> str:
    """Return the Markdown table of all statements and their verdicts."""
    head = ("statement", "source", "here", "verdict")
    return _table([head, ("---",) * 4, *_statements()])


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
