"""The worker process seen from the picker: asked, hung, killed, full, left."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest
import structlog

from epp.configuration.token_producer import LocalTokenizers
from epp.core.prompt.parse import parse_request
from epp.core.prompt.token_ids import unpacked
from epp.shell.engines.tokens.local import (
    LOADED_AT_START_MAX,
    QUEUE_BYTES_MAX,
    QUEUE_MAX,
    LocalWorker,
)
from epp.shell.engines.tokens.question import Question, TokensResult, TokensUnknownError
from tests.envoy.rig import until
from tests.shell.engines.tokens import tiny

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"The quick fox"}]}'


IMAGE = BODY.replace(b'"The quick fox"', b'[{"type":"image_url","image_url":{"url":"data:,A"}}]')


def question(body=BODY, path="/v1/chat/completions"):
    parsed = parse_request(path=path, headers={":path": path}, body=body, request_id="r")
    return Question(parsed.request, parsed.body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("models")
    tiny.make(top / "tiny")
    tiny.make(top / "other")
    (top / "broken").mkdir()
    (top / "broken" / "tokenizer.json").write_text("{}")
    return top


@contextlib.asynccontextmanager
async def running(worker):
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def of(folder, model_name="", **options):
    return LocalWorker(LocalTokenizers(auto_discovery_dir=str(folder)), model_name, **options)


TINY = "hear(); say(Ready(('tiny',))); hear(); say(Loaded('tiny', ''))\n"


def fake(program, begin=TINY, **options):
    """A worker that is another program: it has `say(message)` and `hear()`."""
    script = (
        "import sys, time, os\n"
        "from epp.shell.engines.tokens.frames import *\n"
        "def hear():\n"
        "    head = sys.stdin.buffer.read(4)\n"
        "    return to_worker(sys.stdin.buffer.read(length_of(head)))\n"
        "def say(message):\n"
        "    sys.stdout.buffer.write(framed(message)); sys.stdout.buffer.flush()\n"
    )
    settings = LocalTokenizers(auto_discovery_dir="/none")
    command = (sys.executable, "-c", script + begin + program)
    return LocalWorker(settings, "", command=command, backoff_s=0.01, **options)


async def ready(worker):
    await until(lambda: worker.refuses(question()) is None, "the tokenizer", timeout_s=50.0)


async def test_prompts_have_the_ids_of_their_tokenizer(folder):
    """Of each model its own; who is unknown, and what cannot be read, has none and is told of once."""
    with structlog.testing.capture_logs() as logs:
        async with running(of(folder)) as worker:
            assert worker.refuses(question()) is TokensResult.LOADING
            await ready(worker)
            (ids,) = (await worker.find(question())).ids
            assert unpacked(ids)
            other = question(BODY.replace(b'"tiny"', b'"other"'))
            assert worker.refuses(other) is None
            assert (await worker.find(other)).ids == (ids,)
            unknown = question(BODY.replace(b'"tiny"', b'"mine"'))
            for _ in range(3):
                assert worker.refuses(unknown) is TokensResult.NO_TOKENIZER
            broken = question(BODY.replace(b'"tiny"', b'"broken"'))
            assert worker.refuses(broken) is TokensResult.NO_TOKENIZER
            states = {row["model"]: row["state"] for row in worker.rows()}
            assert (states["tiny"], states["other"]) == ("loaded", "loaded")
            assert "cannot be used" in states["broken"]
    warned = [line["model"] for line in logs if line["log_level"] == "warning"]
    assert sorted(warned) == ["broken", "mine"]


async def test_an_adapter_has_the_tokenizer_of_its_model(folder):
    """The one that the configuration names."""
    async with running(of(folder, "tiny")) as worker:
        await ready(worker)
        adapter = question(BODY.replace(b'"tiny"', b'"adapter"'))
        assert worker.refuses(adapter) is None
        assert await worker.find(adapter) == await worker.find(question())


async def test_other_apis_have_no_tokens_here(folder):
    """Their prompts are made in other ways; messages are the chat that the engine makes of them."""
    async with running(of(folder)) as worker:
        await ready(worker)
        assert worker.refuses(question(path="/v1/embeddings")) is TokensResult.UNSUPPORTED
        assert worker.refuses(question(IMAGE)) is TokensResult.MEDIA
        messages = question(path="/v1/messages")
        assert worker.refuses(messages) is None
        assert await worker.find(messages) == await worker.find(question())


async def test_a_question_that_cannot_be_answered_says_why(folder):
    """As the worker says."""
    async with running(of(folder)) as worker:
        await ready(worker)
        cut = question(BODY[:-1] + b',"truncate_prompt_tokens":2}')
        with pytest.raises(TokensUnknownError) as told:
            await worker.find(cut)
        assert told.value.result is TokensResult.UNSUPPORTED


async def test_of_more_tokenizers_than_may_be_loaded_the_requested_ones_are():
    """None is loaded before, so that models without requests do not take the room."""
    names = [f"m{number}" for number in range(LOADED_AT_START_MAX + 1)]
    begin = f"hear(); say(Ready({tuple(names)}))\n"
    worker = fake("while True: say(Loaded(hear().model, ''))", begin=begin)
    last = question(BODY.replace(b'"tiny"', b'"%s"' % names[-1].encode()))
    async with running(worker):
        await until(lambda: worker.refuses(last) is None, "the tokenizer", timeout_s=30.0)
        states = {row["model"]: row["state"] for row in worker.rows()}
    assert states == dict.fromkeys(names[:-1], "not loaded") | {names[-1]: "loaded"}


async def test_one_that_hangs_is_ended_and_begins_anew():
    """Who asked is placed by the bytes; the others too, until it is there again."""
    worker = fake("hear(); time.sleep(1000)", job_s_max=0.2)
    with structlog.testing.capture_logs() as logs:
        async with running(worker):
            await ready(worker)
            with pytest.raises(TokensUnknownError) as told:
                await worker.find(question())
            assert told.value.result is TokensResult.FAILED
            await until(lambda: worker.starts > 1, "the next one", timeout_s=30.0)
    assert any(line.get("problem") == "WorkerHungError" for line in logs)


DEATHS = {
    "ends": "hear(); sys.exit(0)",
    "aborts": "hear(); os.abort()",
    "babbles": "hear(); os.write(1, b'x' * 5_000_000)",
    "answers another question": "hear(); say(Ready(()))",
    "says nothing sensible": "hear(); os.write(1, b'\\x01\\0\\0\\0\\xc1'); time.sleep(1000)",
}


@pytest.mark.parametrize("death", DEATHS)
async def test_one_that_fails_costs_a_question(death):
    """And is started anew."""
    worker = fake(DEATHS[death])
    async with running(worker):
        await ready(worker)
        with pytest.raises(TokensUnknownError) as told:
            await worker.find(question())
        assert told.value.result is TokensResult.FAILED
        await until(lambda: worker.starts > 1, "the next one", timeout_s=30.0)


@pytest.mark.parametrize("ids", ["()", "(b'',)"])
async def test_too_few_ids_are_none(ids):
    """There is one prompt."""
    worker = fake(f"hear(); say(Done({ids}, 'found', 0, 0, 0)); hear()")
    async with running(worker):
        await ready(worker)
        with pytest.raises(TokensUnknownError) as told:
            await worker.find(question())
        assert told.value.result is TokensResult.INVALID


async def test_the_queue_is_bounded():
    """By questions and by bytes; who leaves makes room."""
    worker = fake("hear(); time.sleep(1000)", job_s_max=1000.0)
    async with running(worker):
        await ready(worker)
        first = asyncio.create_task(worker.find(question()))
        await until(
            lambda: worker._queued_bytes == 0 and not worker._queue, "the first to be asked"
        )
        others = [asyncio.create_task(worker.find(question())) for _ in range(QUEUE_MAX)]
        await until(lambda: len(worker._queue) == QUEUE_MAX, "a full queue")
        assert worker.refuses(question()) is TokensResult.BUSY
        for task in others[1:]:
            task.cancel()
        await asyncio.gather(*others[1:], return_exceptions=True)
        assert worker.refuses(question()) is None
        assert worker._queued_bytes == len(BODY)
        long = question(BODY.replace(b"quick", b"q" * QUEUE_BYTES_MAX))
        assert worker.refuses(long) is TokensResult.BUSY
        for task in (first, others[0]):
            task.cancel()
        await asyncio.gather(first, others[0], return_exceptions=True)


async def test_no_process_is_left_behind(folder):
    """When the picker ends, or has another configuration."""
    worker = fake("say(Done((str(os.getpid()).encode(),), 'found', 0, 0, 0)); time.sleep(1000)")
    async with running(worker):
        await ready(worker)
        (pid,) = (await worker.find(question())).ids
        os.kill(int(pid), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), signal.SIG_DFL)


async def test_without_the_libraries_nobody_waits():
    """And no process is started again and again."""
    script = (
        "import sys\n"
        "from epp.shell.engines.tokens.frames import *\n"
        "sys.stdin.buffer.read(length_of(sys.stdin.buffer.read(4)))\n"
        "sys.stdout.buffer.write(framed(Cannot('install it'))); sys.stdout.buffer.flush()\n"
    )
    worker = LocalWorker(
        LocalTokenizers(auto_discovery_dir="/none"), "", command=(sys.executable, "-c", script)
    )
    with structlog.testing.capture_logs() as logs:
        async with running(worker):
            await until(lambda: worker.totals()["problem"], "the sentence", timeout_s=30.0)
            assert worker.refuses(question()) is TokensResult.NO_TOKENIZER
            assert worker.starts == 1
    assert [line["problem"] for line in logs] == ["install it"]
