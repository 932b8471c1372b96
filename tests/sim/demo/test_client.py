"""The demo's client against a simulated pod, and against servers that go wrong."""

import contextlib

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sim.demo.client import drive
from sim.demo.workload import Conversation, Turn
from tests.sim.running import MODEL, running_pod

WORKLOAD = [
    Conversation(
        arrives_s=0.0,
        tenant=0,
        system="You help. " * 40,
        turns=(Turn("one? " * 20, 30, 0.0), Turn("two? " * 20, 20, 0.01)),
    ),
    Conversation(arrives_s=0.01, tenant=0, system="You help. " * 40, turns=(Turn("x", 5, 0.0),)),
]


async def test_every_turn_is_measured():
    """All requests end with their tokens, and the first token comes before the last."""
    seen = []
    async with running_pod(speed=50.0) as pod:
        outcomes = await drive(str(pod.url("/")), MODEL, WORKLOAD, seen.append)
    assert seen == outcomes
    assert {(outcome.conversation, outcome.turn) for outcome in outcomes} == {
        (0, 0),
        (0, 1),
        (1, 0),
    }
    for outcome in outcomes:
        assert not outcome.error
        assert 0 < outcome.ttft_s <= outcome.duration_s
        turn = WORKLOAD[outcome.conversation].turns[outcome.turn]
        assert outcome.output_tokens == turn.answer_tokens


async def test_the_second_turn_contains_the_answer_to_the_first():
    """Prompt and answer of the first turn are in the cache when the second comes."""
    async with running_pod(speed=50.0) as pod:
        outcomes = await drive(str(pod.url("/")), MODEL, WORKLOAD[:1], lambda _: None)
    first, second = outcomes
    assert second.cached_tokens == (first.prompt_tokens + first.output_tokens - 1) // 16 * 16


@contextlib.asynccontextmanager
async def serving(handler):
    application = web.Application()
    application.router.add_post("/v1/chat/completions", handler)
    async with TestServer(application) as server:
        yield str(server.make_url("/"))


async def refuses(request):
    return web.Response(status=503, text="no room")


async def talks_nonsense(request):
    return web.Response(text="data: {]\n\n")


async def stops_early(request):
    response = web.StreamResponse()
    await response.prepare(request)
    chunk = '{"choices": [{"delta": {"content": "the "}}]}'
    await response.write(f"data: {chunk}\n\n".encode())
    return response


async def breaks_off(request):
    response = web.StreamResponse()
    await response.prepare(request)
    request.transport.abort()
    return response


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (refuses, "status 503: no room"),
        (talks_nonsense, "JSON is malformed"),
        (stops_early, "the stream ended after 0 of 30 tokens"),
        (breaks_off, ""),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(handler, says):
    """The request is an error with a reason, and its conversation does not go on."""
    async with serving(handler) as url:
        [outcome] = await drive(url, MODEL, WORKLOAD[:1], lambda _: None)
    assert outcome.error
    assert says in outcome.error
