"""Which producer is in force, and what is told of it."""

import asyncio
import contextlib

import structlog

from epp.configuration.token_producer import EndpointDiscovery, TokenProducer, VllmRenderer
from epp.core.prompt.token_ids import COMPARED_MIN
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.service import Tokens
from tests.builders import endpoint
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


def test_ids_that_are_not_the_engines_are_told_of():
    """With nothing of the prompt."""
    tokens = tokens_of(URL)
    with structlog.testing.capture_logs() as logs:
        for _ in range(COMPARED_MIN + 5):
            tokens.compare("m", b"\1\0\0\0\2\0\0\0", b"\1\0\0\0\3\0\0\0")
    (line,) = logs
    assert (line["model"], line["first_difference_at"]) == ("m", 1)
    assert not tokens.exact("m")
    assert tokens.described()["compared"] == [{"model": "m", "compared": 105, "agreed": 0}]
