import contextlib

from structlog.testing import capture_logs

from epp.shell.kubernetes.peer_service import PeerService
from tests.shell.kubernetes.fake_api_server import FakeApiServer
from tests.shell.kubernetes.kube import FAST, connected, eventually, running

SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"


def endpoint_slice(name, *hosts, service="homing-peers", ready=True):
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": [host], "conditions": {"ready": ready, "serving": ready}}
            for host in hosts
        ],
        "ports": [{"name": "tcp-homing-peer", "port": 9004}],
    }


@contextlib.asynccontextmanager
async def watching(server, folder):
    """A `PeerService` of homing-peers; what it told."""
    async with connected(server, folder) as client:
        told = []
        service = PeerService(
            client,
            namespace="llm",
            name="homing-peers",
            port=9004,
            on_change=told.append,
            seed=1,
            timing=FAST,
        )
        async with running(service.run()):
            yield service, told


async def test_replicas_come_and_go(tmp_path):
    """Those that are not ready too; of all slices of the Service and of no other."""
    async with FakeApiServer() as server:
        server.put(SLICES, endpoint_slice("one", "10.0.0.1", "10.0.0.2"))
        server.put(SLICES, endpoint_slice("six", "fd00::1", ready=False))
        server.put(SLICES, endpoint_slice("other", "10.9.9.9", service="other"))
        async with watching(server, tmp_path) as (service, told):
            first = {"10.0.0.1:9004", "10.0.0.2:9004", "[fd00::1]:9004"}
            await eventually(lambda: told == [first])
            server.put(SLICES, endpoint_slice("one", "10.0.0.2", "10.0.0.1"))
            server.put(SLICES, endpoint_slice("two", "10.0.0.3", "10.0.0.1"))
            await eventually(lambda: told[1:] == [first | {"10.0.0.3:9004"}])
            server.delete(SLICES, "two")
            await eventually(lambda: told[2:] == [first])
            assert service.reflection().objects == 2


async def test_an_api_server_that_is_away_takes_no_replica_away(tmp_path):
    """Who was known stays; the watch is taken up again."""
    async with FakeApiServer() as server:
        server.put(SLICES, endpoint_slice("one", "10.0.0.1"))
        async with watching(server, tmp_path) as (_, told):
            await eventually(lambda: told == [{"10.0.0.1:9004"}])
            await server.stop()
            server.put(SLICES, endpoint_slice("one", "10.0.0.1", "10.0.0.2"))
            await server.start()
            await eventually(lambda: told[1:] == [{"10.0.0.1:9004", "10.0.0.2:9004"}])


async def test_what_is_no_address_is_left_out(tmp_path):
    """A slice of names, an empty one, and one that is not understood."""
    async with FakeApiServer() as server:
        server.put(SLICES, endpoint_slice("names", "replica.example", "10.0.0.1"))
        server.put(SLICES, endpoint_slice("empty") | {"endpoints": None})
        server.put(SLICES, endpoint_slice("wrong") | {"endpoints": "none"})
        async with watching(server, tmp_path) as (_, told):
            await eventually(lambda: told == [{"10.0.0.1:9004"}])


async def test_a_service_without_replicas_is_said(tmp_path):
    """We are one ourselves: its name or its selector is wrong."""
    async with FakeApiServer() as server:
        with capture_logs() as lines:
            async with watching(server, tmp_path) as (_, told):
                await eventually(lambda: told == [set()])
        assert (
            "Service homing-peers of --peer-service has no addresses, not even the picker's own"
            in [line["event"] for line in lines]
        )
