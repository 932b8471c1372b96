"""Accuracy of the approximate index with and without corrections by the engine: `python -m bench
corrections`.

One request a second goes to one endpoint, whose engine counts the tokens that it found cached. The
picker's prediction for each request is compared with that count, with and without
`correctByEngine`. The engine reports its cache size or not, and prompts are token ids or text in
which each byte is one token.

Each combination is measured on two sets of requests. The set `recorded` has 300 requests with the
counts of a real vLLM; the rule of correction was chosen with it. The set `chats` was not used for
that choice: it has generated conversations for five cache sizes, one seed for each size, and the
counts of a simulated engine. For the recorded requests, the simulated engine gives the counts of
the real one in 300 of 300 cases (`sim validate`). The first 100 requests of each run are not
compared.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Final

from msgspec import Struct

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.inflight import Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.types import BYTES_PER_TOKEN, ApiKind, Endpoint, EndpointMetrics, MetricsTarget
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest
from sim.pods.tokens import encode_ids, hash_chain
from sim.truth.judgement import lines_of
from sim.truth.prefix_cache import Recorded
from sim.truth.validate import RECORDINGS

RECORDING: Final = RECORDINGS / "vllm-0.32-cpu"
RECORDED_BLOCKS: Final = 200
"""Number of blocks in the KV cache of the recorded vLLM engine."""
BLOCK_TOKENS: Final = 32
"""Number of tokens in a KV block of the recorded and of the simulated engines."""
CHAT_BLOCKS: Final = (100, 150, 200, 300, 400)
"""Sizes, in blocks, of the simulated KV caches for which chats are generated. The position of a
size in the tuple is the seed of its chats.
"""
CHAT_REQUESTS: Final = 600
CHATS: Final = 24
"""Number of concurrent conversations in the generated chats."""
CHAT_TOKENS_MAX: Final = 1_500
GAP_S: Final = 1.0
"""Time in seconds between two requests to the endpoint."""
JUDGED_FROM: Final = 100
"""Number of requests at the beginning of each run whose predictions are not compared, because the
index has little to correct yet.
"""
DOCUMENT: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: approx-prefix-cache-producer
  parameters: {{correctByEngine: {corrected}, lruCapacityPerServer: {capacity}}}
- type: prefix-cache-scorer
"""
CAPACITY_TIMES: Final = 10
"""Capacity that the index is configured with, as a multiple of the engine's cache. It applies if
the engine does not report its cache size.
"""


class Served(Struct, frozen=True):
    """A request, and the number of its prompt tokens that its engine found cached."""

    ids: Sequence[int]
    cached_tokens: int


class Predicted(Struct, frozen=True, kw_only=True):
    """Sums over the requests whose predictions are compared, in tokens."""

    predicted: int = 0
    cached: int = 0
    prompt: int = 0
    wrong: int = 0
    """Sum of the absolute errors of the predictions, in tokens."""

    def __add__(self, other: "Predicted") -> "Predicted":
        return Predicted(
            predicted=self.predicted + other.predicted,
            cached=self.cached + other.cached,
            prompt=self.prompt + other.prompt,
            wrong=self.wrong + other.wrong,
        )


def recorded() -> list[Served]:
    """Return the requests recorded from a real engine, with the tokens that it found cached."""
    rows = lines_of(RECORDING / "sequential.jsonl", Recorded)
    return [Served(row.prompt_token_ids, row.cached_tokens) for row in rows]


@cache
def chats(blocks_total: int, seed: int) -> list[Served]:
    """Return the requests of conversations whose next turns come in any order, each behind one of
    eight system prompts.

    A simulated engine with `blocks_total` blocks determines the tokens found cached.
    """
    random = Random(f"{seed}:chats")
    opened = [_ids(random, 100, 400) for _ in range(8)]
    running = [random.choice(opened) for _ in range(CHATS)]
    settings = EngineSettings(blocks_total=blocks_total, block_size_tokens=BLOCK_TOKENS)
    engine = Engine(settings, find_profile(DEFAULT_PROFILE))
    served: list[Served] = []
    now = 0.0
    for number in range(CHAT_REQUESTS):
        at = random.randrange(CHATS)
        prompt, answer = running[at] + _ids(random, 20, 120), _ids(random, 20, 100)
        whole = prompt + answer
        request = EngineRequest(
            str(number),
            prompt_tokens=len(prompt),
            output_tokens=len(answer),
            chain=hash_chain(encode_ids(whole), block_size_tokens=BLOCK_TOKENS),
        )
        engine.submit(request, now)
        while (step := engine.step(now)) is not None:
            now = step.ends_at
        served.append(Served(prompt, request.cached_tokens))
        # Some conversations continue; others are replaced, the longest always.
        ends = random.random() < 0.1 or len(whole) > CHAT_TOKENS_MAX
        running[at] = random.choice(opened) if ends else whole
    return served


def _ids(random: Random, least: int, most: int) -> list[int]:
    return [random.randrange(256) for _ in range(random.randint(least, most))]


def predict(
    served: Sequence[Served], blocks_total: int, *, corrected: bool, told: bool, text: bool
) -> Predicted:
    """Return the picker's predictions of cached tokens for the requests `served`, added up from
    request `JUDGED_FROM` on.

    `corrected`: the index is corrected by the engine. `told`: the engine reports its cache size.
    `text`: prompts are bytes, one per token.
    """
    own_blocks = blocks_total * BLOCK_TOKENS // 64
    document = DOCUMENT.format(
        corrected=str(corrected).lower(), capacity=CAPACITY_TIMES * own_blocks
    )
    scheduler = Scheduler(build_settings(load_config(document, "bench", plugin_tables())), seed=1)
    pod = Endpoint(
        endpoint_id="uid-0", name="pod-0", address="10.0.0.1:8000", metrics=MetricsTarget(port=1)
    )
    scheduler.take(PoolReplaced([pod]), 0.0)
    queried = hits = 0
    predicted = cached = prompt = wrong = 0
    for number, one in enumerate(served):
        now = number * GAP_S
        page = _page(number, queried, hits, blocks_total if told else None)
        scheduler.take(PageScraped(0, page), now)
        tokens = len(one.ids)
        decision = scheduler.schedule(_request(number, one.ids, text=text), now)
        assert isinstance(decision, Decision)
        scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), now)
        queried += tokens
        hits += one.cached_tokens
        if number >= JUDGED_FROM:
            # The picker's tokens of a text are estimates, so its prediction is a share.
            share = decision.predicted_tokens / max(1, decision.lease.request.prompt_tokens)
            said = round(share * tokens)
            predicted += said
            cached += one.cached_tokens
            prompt += tokens
            wrong += abs(said - one.cached_tokens)
    return Predicted(predicted=predicted, cached=cached, prompt=prompt, wrong=wrong)


def _page(served: int, queried: int, hits: int, blocks_total: int | None) -> EndpointMetrics:
    return EndpointMetrics(
        waiting_requests=0.0,
        running_requests=0.0,
        kv_cache_usage=0.0,
        cache_queried_tokens=float(queried),
        cache_hit_tokens=float(hits),
        ttft_count=float(served),
        block_size_tokens=None if blocks_total is None else BLOCK_TOKENS,
        blocks_total=blocks_total,
    )


def _request(number: int, ids: Sequence[int], *, text: bool) -> InferenceRequest:
    prompt = bytes(each & 0xFF for each in ids) if text else encode_ids(list(ids))
    return InferenceRequest(
        request_id=str(number),
        api=ApiKind.COMPLETIONS if text else ApiKind.TOKENS,
        model="recorded",
        prompts=(prompt,),
        prompt_tokens=len(prompt) // BYTES_PER_TOKEN,
    )


def run() -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) with the cached tokens that the picker predicted and that engines
    found, with and without corrections.
    """
    sources = {
        "recorded": [(recorded(), RECORDED_BLOCKS)],
        "chats": [(chats(blocks, seed), blocks) for seed, blocks in enumerate(CHAT_BLOCKS)],
    }
    for source, parts in sources.items():
        for text in (False, True):
            for told in (True, False):
                kind = "text of a byte a token" if text else "ids of tokens"
                size = "cache size told" if told else "cache size not told"
                for corrected in (False, True):
                    found = Predicted()
                    for served, blocks in parts:
                        found += predict(served, blocks, corrected=corrected, told=told, text=text)
                    how = "corrected" if corrected else "as it is"
                    shares = (
                        f"{found.predicted / found.prompt:.1%} predicted, "
                        f"{found.cached / found.prompt:.1%} cached, "
                        f"off by {found.wrong / found.prompt:.1%}"
                    )
                    yield f"{source}: {kind}, {size}, {how}", shares
