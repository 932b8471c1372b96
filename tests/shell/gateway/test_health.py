import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from epp.shell.gateway.health import ABLE, WANTED, Health
from tests.transports import TRANSPORTS, carried, transport_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def serving(name, health):
    """A server with `health` and the field's own stub on it."""
    async with carried(transport_of(name, health.methods)) as port:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield health_pb2_grpc.HealthStub(channel)
        health.close()


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


async def check(stub, service):
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return reply.status


@pytest.mark.parametrize("service", sorted(ABLE | WANTED))
async def test_names_follow_readiness(service, transport):
    """Not ready at first, then as told, back and forth."""
    health = Health()
    async with serving(transport, health) as stub:
        assert await check(stub, service) == NOT_SERVING
        health.set_ready(True)
        assert await check(stub, service) == SERVING
        health.set_ready(False)
        assert await check(stub, service) == NOT_SERVING


async def test_a_standby_is_able_and_not_wanted(transport):
    """The kubelet is told that it is ready, a gateway that another is to be asked."""
    health = Health()
    async with serving(transport, health) as stub:
        health.set_ready(True, stands_by=True)
        assert {await check(stub, name) for name in ABLE} == {SERVING}
        assert {await check(stub, name) for name in WANTED} == {NOT_SERVING}
        assert health.ready
        health.set_ready(True)
        assert {await check(stub, name) for name in ABLE | WANTED} == {SERVING}


async def test_whoever_asks_by_the_name_of_a_cluster_is_answered_or_reset(transport):
    """Envoy's check says it as the authority. A slash, as Envoy Gateway has, is none in a valid one."""
    health = Health()
    health.set_ready(True)
    async with carried(transport_of(transport, health.methods)) as port:
        for authority, answered in (
            ("picker", True),
            ("envoyextensionpolicy/models/homing/extproc/0", transport == "grpcio"),
        ):
            named = [("grpc.default_authority", authority)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=named) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                if answered:
                    assert await check(stub, "") == SERVING
                else:
                    with pytest.raises(grpc.aio.AioRpcError, match="RST_STREAM"):
                        await check(stub, "")
        health.close()


async def test_liveness_is_serving_even_when_not_ready(transport):
    """A picker that waits for its pool must not be restarted."""
    async with serving(transport, Health()) as stub:
        assert await check(stub, "liveness") == SERVING


async def test_unknown_names_are_not_found(transport):
    """A probe with a wrong name fails by name, not by status."""
    async with serving(transport, Health()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(stub, "nobody")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_one_health_answers_on_two_servers(transport):
    """The serving port and the health port agree."""
    health = Health()
    async with serving(transport, health) as first, serving(transport, health) as second:
        health.set_ready(True)
        assert await check(first, "readiness") == await check(second, "readiness") == SERVING


async def test_watchers_are_told_of_each_change_and_end_with_the_server(transport):
    """The present status at once, every change after it, and an end at close."""
    health = Health()
    async with serving(transport, health) as stub:
        call = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await call.read()).status == NOT_SERVING
        health.set_ready(True)
        assert (await call.read()).status == SERVING
        health.close()
        assert (await call.read()).status == NOT_SERVING
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_watching_an_unknown_name_says_so(transport):
    """The protocol has a status for it; the call stays open."""
    async with serving(transport, Health()) as stub:
        call = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await call.read()).status == SERVICE_UNKNOWN
        assert not call.done()
        call.cancel()


async def test_watchers_are_bounded(monkeypatch, transport):
    """One more than the limit is refused, and a watcher that leaves makes room."""
    monkeypatch.setattr("epp.shell.gateway.health.WATCHERS_MAX", 1)
    health = Health()
    async with serving(transport, health) as stub:
        first = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        await first.read()
        second = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        async with asyncio.timeout(10):
            while health._watchers:
                await asyncio.sleep(0)
        third = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await third.read()).status == NOT_SERVING
        third.cancel()
