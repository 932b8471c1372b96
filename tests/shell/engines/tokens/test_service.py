"""Which producer is in force, and what is told of it."""

import asyncio
import contextlib

import structlog

from epp.configuration.token_producer import EndpointDiscovery, TokenProducer, VllmRenderer
from epp.core.knowledge.index import Held
from epp.core.kv_events.payload import Removed
from epp.core.prompt.token_ids import COMPARED_MIN, TRIED_EACH
from epp.core.types import ApiKind
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.service import LOOKED_AT_MAX, SERVED_MAX, TOLD_S_MAX, Tokens
from tests.builders import endpoint, request
from tests.core.knowledge.test_exact import SLOTS, TOKENS, opened, run
from tests.core.knowledge.test_exact import asked as ids_of
from tests.shell.engines.tokens.test_resolver import Backend as Asked
from tests.shell.engines.tokens.test_resolver import Told, asked

URL = TokenProducer(vllm=VllmRenderer(url="http://127.0.0.1:1"))
POOL = TokenProducer(vllm=VllmRenderer(endpoint_discovery=EndpointDiscovery()))


def tokens_of(settings):
    tokens = Tokens(Told())
    tokens.accept(tokens.prepare(settings))
    return tokens


def test_who_measures_by_bytes_asks_nobody():
    """Sessions have nothing to wait for."""
    assert tokens_of(TokenProducer()).resolver is None
    assert tokens_of(TokenProducer(estimate={}, model_name="m")).resolver is None


def test_the_same_settings_keep_what_is_there():
    """Its connections, and what a worker has loaded."""
    tokens = tokens_of(URL)
    before = tokens.resolver
    tokens.accept(tokens.prepare(TokenProducer(vllm=VllmRenderer(url="http://127.0.0.1:1"))))
    assert tokens.resolver is before
    tokens.accept(tokens.prepare(POOL))
    assert tokens.resolver is not before
    tokens.accept(tokens.prepare(TokenProducer()))
    assert tokens.resolver is None


def test_what_is_prepared_and_refused_changes_nothing():
    """Another part of the configuration may be wrong."""
    tokens = tokens_of(URL)
    before = tokens.resolver
    tokens.prepare(POOL)
    assert tokens.resolver is before


def test_renderers_of_the_pool_follow_it():
    """Those that came before the configuration, too."""
    tokens = Tokens(Told())
    tokens.replace([endpoint(0), endpoint(1)])
    tokens.accept(tokens.prepare(POOL))
    assert len(tokens.described()["parts"]) == 2
    tokens.replace([endpoint(1)])
    (row,) = tokens.described()["parts"]
    assert row["renderer"] == "http://192.168.1.2:8000"


async def test_what_was_counted_stays_counted():
    """By the name of its backend, under whatever configuration."""
    tokens = tokens_of(POOL)
    for _ in range(2):
        assert tokens.resolver.begin(*asked(), lambda _: None) is None
    (before,) = tokens.snapshots()
    assert before.results == {TokensResult.UNREACHABLE: 2}
    tokens.accept(tokens.prepare(TokenProducer()))
    (after,) = tokens.snapshots()
    assert (after.backend, after.results) == ("vllm", before.results)
    tokens.accept(tokens.prepare(URL))
    assert tokens.snapshots()[0].results == before.results


async def test_what_runs_is_of_the_backend_in_force():
    """And ends with it."""
    log = []

    class Backend:
        name = "fake"

        def __init__(self, number):
            self.number = number

        async def run(self):
            log.append(f"{self.number} runs")
            try:
                await asyncio.Event().wait()
            finally:
                log.append(f"{self.number} ends")

        def close(self):
            pass

    tokens = tokens_of(URL)
    tokens.resolver.backend = Backend(1)
    task = asyncio.create_task(tokens.run())
    for _ in range(5):
        await asyncio.sleep(0)
    second = tokens.prepare(POOL)
    second.resolver.backend = Backend(2)
    tokens.accept(second)
    for _ in range(10):
        await asyncio.sleep(0)
    assert log == ["1 runs", "1 ends", "2 runs"]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert log[-1] == "2 ends"


class Engine:
    """Says how much it holds of what it served."""

    def __init__(self):
        self.blocks = {}
        self.told = {}
        self.asked = 0

    def held(self, served, at):
        self.asked += 1
        blocks = self.blocks.get(served.request_id)
        told = None if blocks is None else Held(blocks, 8, 64)
        return self.told.setdefault(served.request_id, told) and told

    def tokens(self):
        tokens = Tokens(Told(), self.held)
        tokens.accept(tokens.prepare(URL))
        return tokens


def served(request_id, **fields):
    chains = {"token_chains": {64: (bytes(64),)}}
    return request(request_id=request_id, **({"api": ApiKind.CHAT, "model": "m"} | chains | fields))


def counts_of(tokens):
    (snapshot,) = tokens.snapshots()
    return snapshot.compared


def test_what_an_engine_stored_is_compared_with_what_was_sent():
    """At once where it told already, and once more a second later."""
    engine = Engine()
    tokens = engine.tokens()
    engine.blocks = {"told": 8, "late": 0, "differs": 3}
    for request_id in ("told", "late", "differs", "not heard"):
        tokens.served(served(request_id), endpoint(0), 10.0)
    assert counts_of(tokens) == {"agrees": 1}
    engine.blocks["late"] = 8
    tokens.look(10.0 + 0.9 * TOLD_S_MAX)
    assert counts_of(tokens) == {"agrees": 1}
    tokens.look(10.0 + TOLD_S_MAX)
    assert counts_of(tokens) == {"agrees": 2, "differs": 1}
    assert tokens.described()["compared"] == [
        {"model": "m", "compared": 3, "agreed": 2, "exact": True}
    ]


def test_what_was_evicted_since_it_was_served_is_not_taken_for_other_ids():
    """Small caches are used up within the second; what is told anew says nothing of what was before."""
    engine = Engine()
    tokens = engine.tokens()
    for request_id in ("evicted", "void", "unheard", "evicted, unheard"):
        engine.blocks[request_id] = 3
        tokens.served(served(request_id), endpoint(0), 10.0)
    for request_id in ("evicted", "evicted, unheard"):
        engine.told[request_id].blocks = 8
    engine.told["void"].void = True
    engine.blocks = {"evicted": 0, "void": 3}
    tokens.look(10.0 + TOLD_S_MAX)
    assert counts_of(tokens) == {"agrees": 2}


def test_an_index_tells_of_what_was_evicted_since():
    """The index that engines tell, asked as the picker asks it."""
    index = opened()
    index.hear(0, [run(TOKENS[:64])], 0.0)
    tokens = Tokens(Told(), lambda given, at: index.held(given, 0))
    tokens.accept(tokens.prepare(URL))
    for prompt in (TOKENS[:256], [7, *TOKENS[:255]]):
        given = ids_of(prompt, api=ApiKind.CHAT, model="")
        index.match(given, SLOTS, 0.0)
        tokens.served(given.without_prompts(), endpoint(0), 10.0)
    stored = run(TOKENS[64:256], first=200, parent=100)
    index.hear(0, [stored], 0.0)
    index.hear(0, [Removed(hashes=[*stored.hashes, 100])], 0.0)
    tokens.look(10.0 + TOLD_S_MAX)
    assert counts_of(tokens) == {"agrees": 1, "differs": 1}


def test_only_ids_that_were_found_out_are_compared():
    """Those of clients are theirs; without ids, or where nobody is asked, nothing is."""
    engine = Engine()
    tokens = engine.tokens()
    tokens.served(served("ids", api=ApiKind.TOKENS), endpoint(0), 0.0)
    tokens.served(served("bytes", token_chains={}), endpoint(0), 0.0)
    tokens.accept(tokens.prepare(TokenProducer()))
    tokens.served(served("nobody"), endpoint(0), 0.0)
    tokens.look(100.0)
    assert engine.asked == 0


def test_comparing_is_bounded():
    """In what waits, and in each turn."""
    engine = Engine()
    tokens = engine.tokens()
    for number in range(2 * SERVED_MAX):
        engine.blocks[str(number)] = 0
        tokens.served(served(str(number)), endpoint(0), 0.0)
    engine.asked = 0
    tokens.look(100.0)
    assert engine.asked == LOOKED_AT_MAX
    for _ in range(100):
        tokens.look(100.0)
    assert engine.asked == SERVED_MAX


async def test_ids_that_are_not_the_engines_are_told_of_and_not_used():
    """With nothing of the prompt, once; another configuration begins anew."""
    engine = Engine()
    tokens = engine.tokens()
    tokens.resolver.backend = Asked()
    engine.blocks["r"] = 2
    with structlog.testing.capture_logs() as logs:
        for _ in range(COMPARED_MIN + 5):
            tokens.served(served("r"), endpoint(0), 0.0)
            tokens.look(100.0)
    (line,) = logs
    assert (line["model"], line["same_tokens"]) == ("m", 128)
    assert not tokens.exact("m")
    waits = [tokens.resolver.begin(*asked(), lambda _: None) for _ in range(TRIED_EACH)]
    assert sum(wait is not None for wait in waits) == 1
    assert tokens.resolver.results == {TokensResult.NOT_THE_ENGINES: TRIED_EACH - 1}
    for wait in waits:
        if wait is not None:
            wait.cancel()
    tokens.accept(tokens.prepare(POOL))
    assert tokens.exact("m")
    assert counts_of(tokens) == {"differs": COMPARED_MIN + 5}
