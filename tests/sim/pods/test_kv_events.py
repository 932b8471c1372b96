"""What a simulated engine tells of its cache, read as a picker reads it."""

import struct
from random import Random

import pytest

from epp.core.knowledge.exact import ExactIndexSettings
from epp.core.knowledge.exact_parameters import TokenProcessorConfig
from epp.core.kv_events.payload import Cleared, read_payload
from epp.core.kv_events.stream import StreamState
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest
from sim.pods.kv_events import KVEvents, TokenChain
from tests.builders import request

SIZE = 16


def packed(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


class Told:
    """An engine, and an index that knows of it what its frames say."""

    def __init__(self, blocks=64, block_tokens=SIZE, **events):
        settings = EngineSettings(blocks_total=blocks, block_size_tokens=SIZE, max_loras=2)
        self.engine = Engine(settings, find_profile(DEFAULT_PROFILE))
        self.events = self.engine.pool.watcher = KVEvents(SIZE, **events)
        self.events.send = self.hear
        processor = TokenProcessorConfig(block_size_tokens=block_tokens)
        self.index = ExactIndexSettings(token_processor_config=processor).open()
        self.index.set_stream(0, StreamState.LIVE, complete=True)
        self.block_tokens = block_tokens
        self.numbers = []
        self.read = []
        self.served = 0
        self.now = 0.0

    def hear(self, number, payload):
        batch = read_payload(payload)
        assert not batch.faults
        self.numbers.append(number)
        self.read += batch.events
        assert not self.index.hear(0, batch.events, 0.0).faults

    def predicted(self, prompt, *, adapter="", salt=""):
        given = request(token_ids=(packed(prompt),), model=adapter, cache_salt=salt)
        return self.index.match(given, 1, 0.0).matched.item(0) * self.block_tokens

    def submit(self, *prompts, answer=20, adapter="", salt=""):
        made = []
        for prompt in prompts:
            self.served += 1
            tokens = packed([*prompt, *range(self.served * 1_000, self.served * 1_000 + answer)])
            chain = TokenChain(tokens, block_size_tokens=SIZE, adapter=adapter, cache_salt=salt)
            made.append(
                EngineRequest(
                    str(self.served),
                    prompt_tokens=len(prompt),
                    output_tokens=answer,
                    chain=chain,
                    adapter=adapter,
                )
            )
            self.engine.submit(made[-1], self.now)
        return made

    def run(self):
        while (step := self.engine.step(self.now)) is not None:
            self.now = step.ends_at
            self.events.end_step(self.now)

    def serve(self, *prompts, **fields):
        made = self.submit(*prompts, **fields)
        self.run()
        return [one.cached_tokens for one in made]


def prompts(count, seed=3, groups=4, longest=400):
    random = Random(seed)
    heads = [[random.getrandbits(17) for _ in range(longest)] for _ in range(groups)]
    for _ in range(count):
        head = random.choice(heads)[: random.randrange(1, longest)]
        yield [*head, *(random.getrandbits(17) for _ in range(random.randrange(1, 60)))]


@pytest.mark.parametrize("block_tokens", [SIZE, 64])
def test_from_frames_alone_each_hit_is_known(block_tokens):
    """Under pressure, one request after the other: what is cached is what is predicted."""
    told = Told(block_tokens=block_tokens)
    hits = 0
    for prompt in prompts(150):
        predicted = told.predicted(prompt)
        (cached,) = told.serve(prompt)
        assert predicted == cached // block_tokens * block_tokens
        hits += cached > 0
    assert hits > 30
    assert any(type(event).__name__ == "Removed" for event in told.read)


def test_copies_are_told_each():
    """Equal prompts of one step are stored twice, and one of them may go."""
    told = Told()
    for prompt in prompts(40, groups=1):
        predicted = told.predicted(prompt)
        cached = told.serve(prompt, list(prompt))
        assert predicted == cached[0]
        assert not told.index.mirror_of(0).unbalanced(64)


def test_adapters_and_salts_share_nothing():
    told = Told(blocks=500)
    prompt = next(prompts(1))[:330]
    for fields in ({"adapter": "sql"}, {}, {"salt": "s"}, {"adapter": "sql", "salt": "s"}):
        assert told.predicted(prompt, **fields) == 0
        assert told.serve(prompt, **fields) == [0]
        assert told.predicted(prompt, **fields) == (len(prompt) - 1) // SIZE * SIZE


def test_nothing_is_told_before_the_step_has_ended():
    """The engine has not computed it."""
    told = Told()
    told.submit([7] * 100)
    told.engine.begin(0.0)
    assert told.numbers == []
    assert told.predicted([7] * 100) == 0
    told.engine.end()
    told.events.end_step(1.0)
    assert told.numbers == [0]
    assert told.predicted([7] * 100) == 96


def test_a_step_that_stores_nothing_sends_nothing():
    told = Told()
    told.serve([7] * 20, answer=10)
    assert told.numbers == [0]


def test_a_reset_is_told_with_the_next_step():
    told = Told()
    told.serve([7] * 100)
    assert told.engine.pool.clear()
    told.engine.check()
    assert told.predicted([7] * 100) == 96
    assert told.serve([9] * 100) == [0]
    assert any(isinstance(event, Cleared) for event in told.read)
    assert (told.predicted([7] * 100), told.predicted([9] * 100)) == (0, 96)
    assert told.serve([7] * 100) == [0]


def test_a_cache_in_use_is_not_reset():
    told = Told()
    told.submit([7] * 100)
    told.engine.begin(0.0)
    assert not told.engine.pool.clear()
    told.engine.end()


def test_the_last_frames_are_kept():
    """Numbered from 0, without a gap."""
    told = Told(kept_max=5)
    for prompt in prompts(10):
        told.serve(prompt)
    last = told.numbers[-1]
    assert told.numbers == list(range(last + 1))
    assert [number for number, _ in told.events.kept_from(0)] == list(range(last - 4, last + 1))
    assert [number for number, _ in told.events.kept_from(last)] == [last]
    assert told.events.kept_from(last + 1) == []
