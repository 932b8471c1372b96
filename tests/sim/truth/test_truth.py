"""The engine against the recording of a real vLLM 0.32.0 that comes with the simulator."""

import gzip
import json
import re
import tomllib

import pytest

from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest
from sim.pods.exposition import MetricsPage
from sim.pods.tokens import encode_ids, hash_chain
from sim.truth import validate
from sim.truth.prefix_cache import WrittenEvents, recorded_events
from tests.sim.engine.plain_engine import PlainEngine, PlainPool, PlainRequest

MAX_MODEL_LEN_TOKENS = 4096
"""The recorded server's; it decides the buckets of the token histograms."""


@pytest.fixture(scope="module")
def truth():
    """The folder of the recording."""
    return validate.RECORDINGS / "vllm-0.32-cpu"


def text_of(file):
    """What a packed file of the recording holds."""
    return gzip.decompress(file.with_name(f"{file.name}.gz").read_bytes()).decode()


class Replay:
    """The recorded requests through the engine, one at a time."""

    def __init__(self, truth):
        shape = tomllib.loads((truth / "engine.toml").read_text())
        self.settings = settings = EngineSettings(
            blocks_total=shape["num_gpu_blocks"],
            block_size_tokens=shape["block_size_tokens"],
            max_num_seqs=shape["max_num_seqs"],
            max_num_batched_tokens=2048,
        )
        engine = Engine(settings, find_profile(DEFAULT_PROFILE))
        engine.pool.watcher = self.written = WrittenEvents()
        page = MetricsPage(
            model="tiny", settings=settings, max_model_len_tokens=MAX_MODEL_LEN_TOKENS
        )
        lines = text_of(truth / "sequential.jsonl").splitlines()
        self.recorded = [json.loads(line) for line in lines]
        self.requests = []
        now = 0.0
        for row in self.recorded:
            tokens = encode_ids(row["prompt_token_ids"] + row["output_token_ids"])
            request = EngineRequest(
                str(row["request"]),
                prompt_tokens=len(row["prompt_token_ids"]),
                output_tokens=len(row["output_token_ids"]),
                chain=hash_chain(tokens, block_size_tokens=settings.block_size_tokens),
            )
            engine.submit(request, now)
            while (step := engine.step(now)) is not None:
                now = step.ends_at
                page.observe(step, engine.snapshot(), now)
            page.finish(request, "length", request.output_tokens)
            self.requests.append(request)
        self.page = page.render().decode()


@pytest.fixture(scope="module")
def replay(truth):
    """Everything the engine did with the recorded requests."""
    return Replay(truth)


def test_blocks_are_stored_and_removed_as_recorded(truth, replay):
    """The KV events of the run: the same blocks, stored and evicted in the same order."""
    expected = list(recorded_events(truth / "kv_events.jsonl", 32))
    assert sum(kind == "removed" for kind, _ in expected) > 1000
    assert replay.written.events == expected


def test_cached_tokens_equal_the_recorded_ones(replay):
    """All 300 requests report the cached tokens that the real engine reported."""
    assert len(replay.recorded) == 300
    ours = [request.cached_tokens for request in replay.requests]
    assert ours == [row["cached_tokens"] for row in replay.recorded]


class PartialBlocksLast(PlainPool):
    """A queue in which a block without a hash goes behind those with one, as they do."""

    def release(self, blocks):
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free[block] = None


class HeadsFirst(PlainPool):
    """A queue in which the head of a prompt is evicted before its tail."""

    def release(self, blocks):
        super().release(blocks[::-1])


@pytest.mark.parametrize(
    ("pool", "agrees"), [(PlainPool, True), (PartialBlocksLast, False), (HeadsFirst, False)]
)
def test_the_real_engine_tells_the_order_in_which_blocks_are_freed(replay, pool, agrees):
    """Tail first, and those without a hash are taken first: in any other order hits differ."""
    settings = replay.settings
    engine = PlainEngine(settings, find_profile(DEFAULT_PROFILE))
    engine.pool = pool(settings.blocks_total)
    hits = []
    now = 0.0
    for row in replay.recorded:
        prompt, answer = row["prompt_token_ids"], row["output_token_ids"]
        chain = hash_chain(
            encode_ids(prompt + answer), block_size_tokens=settings.block_size_tokens
        )
        request = PlainRequest("", len(prompt), len(answer), chain, "")
        engine.waiting.append(request)
        while (ends_at := engine.step(now)) is not None:
            now = ends_at
        hits.append(request.cached_tokens)
    assert (hits == [row["cached_tokens"] for row in replay.recorded]) is agrees


def vllm_lines(page):
    return [line for line in page.splitlines() if "vllm:" in line]


def test_the_page_has_the_lines_of_the_real_page(truth, replay):
    """Every vLLM line of the real page is on ours: HELP, TYPE, name, labels, order."""
    values = re.compile(r" [0-9.e+-]+$|(?<=\{).*(?=\} 1\.0$)")

    def shape(page):
        return [line if line.startswith("#") else values.sub("", line) for line in vllm_lines(page)]

    assert shape(replay.page) == shape(text_of(truth / "metrics.txt"))


def test_what_does_not_depend_on_time_has_the_real_values(truth, replay):
    """Tokens, hits, steps and requests are counted as the real engine counted them."""

    def counted(page):
        return [
            line
            for line in vllm_lines(page)
            if not line.startswith("#") and "_created" not in line and "_seconds" not in line
        ]

    def without_config(lines):
        return [line for line in lines if not line.startswith("vllm:cache_config_info")]

    real = counted(text_of(truth / "metrics.txt"))
    assert len(real) > 100
    assert without_config(counted(replay.page)) == without_config(real)


def test_the_cache_configuration_has_the_real_labels(truth, replay):
    """`cache_config_info` names the same labels and gives the sizes of this engine."""

    def labels(page):
        line = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info"))
        return dict(re.findall(r'(\w+)="([^"]*)"', line))

    real, ours = labels(text_of(truth / "metrics.txt")), labels(replay.page)
    assert list(ours) == list(real)
    for name in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching"):
        assert ours[name] == real[name]
