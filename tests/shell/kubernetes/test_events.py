from structlog.testing import capture_logs

from epp.shell.kubernetes.events import EventRecorder, Reason
from epp.shell.kubernetes.objects import Pool
from tests.shell.kubernetes.fake_api_server import EVENTS, FakeApiServer
from tests.shell.kubernetes.kube import connected, eventually, running

POOL = Pool(
    name="llama-pool", uid="u7", label_selector="app=llama", target_ports=(8000,), app_protocol=""
)


def recorder(client, **arguments):
    return EventRecorder(
        client,
        namespace="llm",
        pool_group="inference.networking.k8s.io",
        instance="homing-0",
        **arguments,
    )


async def test_an_event_is_about_the_pool(tmp_path):
    """What `kubectl describe inferencepool` looks for; a rejection is a warning."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        events = recorder(client)
        async with running(events.run()):
            events.record(Reason.CONFIG_APPLIED, "prefix 3 -> 5", POOL)
            events.record(Reason.CONFIG_REJECTED, "\ud800" + "x" * 2_000, POOL)
            await eventually(lambda: events.written == 2)
        applied, rejected = server.objects[EVENTS].values()
        assert applied["involvedObject"] == {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "name": "llama-pool",
            "namespace": "llm",
            "uid": "u7",
        }
        assert (applied["reason"], applied["type"]) == ("ConfigApplied", "Normal")
        assert (rejected["reason"], rejected["type"]) == ("ConfigRejected", "Warning")
        assert applied["message"] == "prefix 3 -> 5"
        assert len(rejected["message"]) == 1_024
        assert applied["reportingInstance"] == "homing-0"


async def test_events_have_a_rate(tmp_path):
    """Ten at once, the rest is dropped; an editor that saves in a loop does no harm."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        events = recorder(client, burst=3, refill_s=3600.0)
        async with running(events.run()):
            for number in range(20):
                events.record(Reason.CONFIG_APPLIED, f"generation {number}", POOL)
            await eventually(lambda: events.written == 3)
        assert events.dropped == 17
        assert len(server.objects[EVENTS]) == 3


async def test_an_event_that_cannot_be_written_is_dropped_and_said_once(tmp_path):
    """The missing right by verb and resource."""
    async with FakeApiServer() as server, connected(server, tmp_path) as client:
        server.fail("CREATE", EVENTS, 403, 403)
        events = recorder(client)
        with capture_logs() as logs:
            async with running(events.run()):
                for number in range(3):
                    events.record(Reason.CONFIG_APPLIED, f"generation {number}", POOL)
                await eventually(lambda: events.written == 1)
        assert events.dropped == 2
        (line,) = [line for line in logs if line["log_level"] == "warning"]
        assert "verbs create and patch on resource events" in line["event"]
