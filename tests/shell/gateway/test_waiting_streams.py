"""Streams whose requests wait before they are placed, on every transport."""

import asyncio
import gc
from functools import partial

import grpc
import pytest

from epp.shell.gateway.http2 import Http2Settings
from tests import gateway as gw
from tests.core.protocol.test_waiting import NO_ROOM, Later
from tests.envoy.rig import until
from tests.shell.gateway.test_ext_proc import serving
from tests.transports import TRANSPORTS

BODY = gw.prompt("hello")


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


async def waiting(rig, later, *messages):
    """A call whose request has begun to wait."""
    call = rig.call()
    await call.send(*messages)
    await until(lambda: later.waiting, "the wait")
    return call


async def test_the_answers_come_when_the_wait_is_over(transport):
    """On the stream that waits; its body is held no longer."""
    later = Later()
    async with serving(transport, resolver=later) as rig:
        call = await waiting(rig, later, gw.request_headers(), gw.request_body(BODY))
        assert (rig.leases, rig.budget.held_bytes > 0) == (0, True)
        later.resolve()
        assert gw.kinds(await call.answers(2)) == ["request_headers", "request_body"]
        assert rig.leases == 1
        await until(lambda: not rig.budget.held_bytes, "the body to be let go")
        await call.end()
        await rig.closed(1)


async def test_a_refusal_ends_the_stream(transport):
    """With OK: the client has its answer."""
    later = Later()
    async with serving(transport, resolver=later) as rig:
        call = await waiting(rig, later, gw.request_headers(), gw.request_body(BODY))
        later.resolve(NO_ROOM)
        assert gw.kinds(await call.answers(1)) == ["immediate_response"]
        await rig.closed(1)
        assert rig.told.codes == ["OK"]


async def test_a_refusal_after_a_wait_is_no_failure_of_a_task(transport):
    """The picker ends the stream while it reads. Event loops report errors that nobody has read."""
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    later = Later()
    async with serving(transport, resolver=later) as rig:
        call = await waiting(rig, later, gw.request_headers(), gw.request_body(BODY))
        later.resolve(NO_ROOM)
        await call.answers(1)
        await rig.closed(1)
        assert await call.ended() is grpc.StatusCode.OK
    gc.collect()
    assert reported == []


async def test_clients_that_leave_a_queue_do_not_cost_the_gateway_its_connection(
    transport, monkeypatch
):
    """They look like resets before an answer, and there may be a thousand in a row. The others on
    the connection would all fail.
    """
    monkeypatch.setattr("epp.shell.gateway.connections.ALLOWANCE_MAX", 3)
    monkeypatch.setattr("tests.transports.Http2Settings", partial(Http2Settings, resets_max=3))
    later = Later()
    async with serving(transport, resolver=later) as rig:
        for count in range(8):
            call = await waiting(rig, later, gw.request_headers(), gw.request_body(BODY))
            call.grpc.cancel()
            await rig.closed(count + 1)
            later.waiting.clear()
    assert "connection cut for resets" not in rig.told.events


async def test_who_half_closes_is_answered_before_the_stream_ends(transport):
    """As gateways do that have no more to say."""
    later = Later()
    async with serving(transport, resolver=later) as rig:
        call = await waiting(rig, later, gw.request_headers(), gw.request_body(BODY))
        await call.grpc.done_writing()
        later.resolve()
        assert gw.kinds(await call.answers(2)) == ["request_headers", "request_body"]
        assert await call.ended() is grpc.StatusCode.OK
        await rig.closed(1)


async def test_a_reset_ends_the_wait(transport):
    """Nothing is placed for who has left."""
    later = Later()
    async with serving(transport, resolver=later) as rig:
        call = await waiting(rig, later, gw.request_headers(), gw.request_body(BODY))
        call.grpc.cancel()
        await rig.closed(1)
        assert later.cancelled == 1
        later.resolve()
        assert (rig.leases, rig.budget.held_bytes) == (0, 0)


async def test_what_waits_too_long_is_refused(transport):
    """By the same deadline as a request that does not become whole."""
    later = Later()
    async with serving(transport, resolver=later, request_timeout_s=0.0) as rig:
        call = await waiting(rig, later, gw.request_headers(), gw.request_body(BODY))
        rig.ext_proc.refuse_overdue(rig.ext_proc.clock() + 1.0)
        assert gw.kinds(await call.answers(1)) == ["immediate_response"]
        await rig.closed(1)
        assert later.cancelled == 1


async def test_a_drain_ends_the_stream_once_the_request_is_placed(transport):
    """Not before: the client would lose its request."""
    later = Later()
    modes = gw.protocol(gw.BUFFERED, gw.NONE)
    async with serving(transport, resolver=later) as rig:
        call = await waiting(rig, later, gw.request_headers(modes=modes), gw.request_body(BODY))
        rig.ext_proc.end_bypassed()
        assert rig.ext_proc.open_streams == 1
        later.resolve()
        assert gw.kinds(await call.answers(2)) == ["request_headers", "request_body"]
        assert await call.ended() is grpc.StatusCode.OK
        await rig.closed(1)
