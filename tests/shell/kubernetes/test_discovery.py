import contextlib
from random import Random

from structlog.testing import capture_logs

from epp.shell.kubernetes.discovery import Discovery, Scope
from tests.shell.kubernetes.fake_api_server import (
    OBJECTIVES,
    OLD_OBJECTIVES,
    PODS,
    POOLS,
    REWRITES,
    FakeApiServer,
    objective,
    pod,
    pool,
    rewrite,
)
from tests.shell.kubernetes.kube import FAST, connected, eventually, running

POOL = Scope(namespace="llm", pool_name="llama-pool")


@contextlib.asynccontextmanager
async def discovering(server, folder, scope=POOL):
    async with connected(server, folder) as client:
        changes = []
        discovery = Discovery(client, scope, lambda: changes.append(None), seed=1, timing=FAST)
        discovery.changes = changes
        async with running(discovery.run()):
            yield discovery


def names(discovery):
    return [endpoint.name for endpoint in discovery.found.endpoints]


async def test_a_pool_gives_one_endpoint_for_each_pod_and_port(tmp_path):
    """In order of names; ready once pool and pods are listed, and not before."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool(ports=(8000, 8001)))
        for name in ("b", "a"):
            server.put(PODS, pod(name))
        server.put(PODS, pod("unready", ready=False))
        server.put(PODS, pod("other", labels={"app": "other"}))
        async with discovering(server, tmp_path) as discovery:
            assert not discovery.synced
            await eventually(lambda: discovery.synced)
            assert names(discovery) == [
                *("llm/a-rank-0", "llm/a-rank-1", "llm/b-rank-0", "llm/b-rank-1"),
            ]
            (query,) = [
                query for _, verb, path, query in server.requests if (verb, path) == ("LIST", POOLS)
            ]
            assert query["fieldSelector"] == "metadata.name=llama-pool"
            assert discovery.pool.name == "llama-pool"


async def test_pods_come_and_go_and_a_terminating_one_goes_at_once(tmp_path):
    """A pod reborn under its name is another endpoint; unrelated changes tell nobody."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        server.put(PODS, pod("a", uid="one"))
        async with discovering(server, tmp_path) as discovery:
            await eventually(lambda: names(discovery) == ["llm/a"])
            server.put(PODS, pod("a", uid="two"))
            await eventually(lambda: discovery.found.endpoints[0].endpoint_id == "two:8000")
            server.put(PODS, pod("b"))
            await eventually(lambda: names(discovery) == ["llm/a", "llm/b"])
            told = len(discovery.changes)
            item = server.objects[PODS]["b"]
            server.put(PODS, item | {"spec": item["spec"] | {"nodeName": "elsewhere"}})
            server.put(
                PODS,
                pod("a", uid="two", deletionTimestamp="2026-01-01T00:00:00Z"),
            )
            await eventually(lambda: names(discovery) == ["llm/b"])
            assert len(discovery.changes) == told + 1
            assert "a" in server.objects[PODS]


async def test_until_the_pool_is_there_we_are_not_ready(tmp_path):
    """A wrong name is one sentence; a pool that is deleted takes its endpoints with it."""
    async with FakeApiServer() as server:
        server.put(PODS, pod("a"))
        with capture_logs() as logs:
            async with discovering(server, tmp_path) as discovery:
                await eventually(lambda: any("does not exist" in line["event"] for line in logs))
                assert not discovery.synced
                server.put(POOLS, pool())
                await eventually(lambda: discovery.synced)
                assert names(discovery) == ["llm/a"]
                server.delete(POOLS, "llama-pool")
                await eventually(lambda: not discovery.synced)
                assert names(discovery) == []
                server.put(POOLS, pool(uid="uid-made-anew"))
                await eventually(lambda: discovery.synced)
                assert names(discovery) == ["llm/a"]
        (sentence, _) = [line["event"] for line in logs if "does not exist" in line["event"]]
        assert sentence.startswith("InferencePool llama-pool does not exist in namespace llm")


async def test_a_changed_selector_swaps_the_pods_when_the_new_list_is_in(tmp_path):
    """Until then the old ones serve: there is never a moment without endpoints."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        server.put(PODS, pod("a"))
        server.put(PODS, pod("b", labels={"app": "mistral"}))
        async with discovering(server, tmp_path) as discovery:
            await eventually(lambda: names(discovery) == ["llm/a"])
            server.fail("LIST", PODS, 500, 500)
            server.put(POOLS, pool(labels={"app": "mistral"}))
            await eventually(lambda: server.faults("LIST", PODS) == 0)
            assert names(discovery) == ["llm/a"]
            # Of the old selector no event is heard any more.
            server.put(PODS, pod("late"))
            await eventually(lambda: names(discovery) == ["llm/b"])
            assert discovery.synced
            server.put(PODS, pod("c", labels={"app": "mistral"}))
            await eventually(lambda: names(discovery) == ["llm/b", "llm/c"])
            assert discovery.reflections()["pods"].lists >= 2


async def test_changed_ports_need_no_list(tmp_path):
    """The pods are the same."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        server.put(PODS, pod("a", ip="10.0.0.7"))
        async with discovering(server, tmp_path) as discovery:
            await eventually(lambda: discovery.synced)
            server.put(POOLS, pool(ports=(9000,)))
            await eventually(lambda: discovery.found.endpoints[0].address == "10.0.0.7:9000")
            assert len(server.lists(PODS)) == 1


async def test_without_a_pool_the_selector_and_the_ports_are_given(tmp_path):
    """Nothing but pods is looked at."""
    scope = Scope(namespace="llm", label_selector="app=llama", target_ports=(8000, 8001))
    async with FakeApiServer() as server:
        server.put(PODS, pod("a"))
        async with discovering(server, tmp_path, scope) as discovery:
            await eventually(lambda: discovery.synced)
            assert names(discovery) == ["llm/a-rank-0", "llm/a-rank-1"]
            assert discovery.pool is None
            assert {path for _, _, path, _ in server.requests} == {PODS}
            assert set(discovery.reflections()) == {"pods"}


async def test_objectives_and_rewrites_of_the_pool_are_read_from_either_group(tmp_path):
    """Live; those of other pools do not count."""
    rules = [{"targets": [{"modelRewrite": "tuned"}]}]
    async with FakeApiServer(absent=[OBJECTIVES]) as server:
        server.put(POOLS, pool())
        server.put(OLD_OBJECTIVES, objective("batch", -1))
        server.put(OLD_OBJECTIVES, objective("foreign", 5, pool_name="other"))
        server.put(REWRITES, rewrite("all", rules))
        async with discovering(server, tmp_path) as discovery:
            await eventually(lambda: discovery.found.objectives == {"batch": -1})
            await eventually(lambda: bool(discovery.found.rewrites))
            assert discovery.found.rewrites.target("llama", Random(1)) == "tuned"
            server.put(OLD_OBJECTIVES, objective("chat", 10))
            await eventually(lambda: discovery.found.objectives == {"batch": -1, "chat": 10})
            server.delete(REWRITES, "all")
            await eventually(lambda: not discovery.found.rewrites)


async def test_extensions_that_are_absent_or_forbidden_do_not_hold_us_up(tmp_path):
    """A feature that is off, or a right that is missing: pods are served all the same."""
    async with FakeApiServer(absent=[OBJECTIVES, OLD_OBJECTIVES]) as server:
        server.put(POOLS, pool())
        server.put(PODS, pod("a"))
        server.fail("LIST", REWRITES, *[403] * 100)
        async with discovering(server, tmp_path) as discovery:
            await eventually(lambda: discovery.synced)
            assert names(discovery) == ["llm/a"]
            assert not discovery.reflections()["inferenceobjectives"].synced


async def test_an_api_server_that_goes_away_leaves_everything_as_it_was(tmp_path):
    """Endpoints and readiness; what changed meanwhile is there when it is back."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        server.put(PODS, pod("a"))
        server.put(PODS, pod("b"))
        async with discovering(server, tmp_path) as discovery:
            await eventually(lambda: discovery.synced)
            await server.stop()
            await eventually(lambda: sum(discovery.reflections()["pods"].errors.values()) > 4)
            assert discovery.synced
            assert names(discovery) == ["llm/a", "llm/b"]
            server.delete(PODS, "a")
            server.put(PODS, pod("c"))
            await server.start()
            await eventually(lambda: names(discovery) == ["llm/b", "llm/c"])


NODES = "/api/v1/nodes"
ZONE = "topology.kubernetes.io/zone"
WITH_ZONES = Scope(namespace="llm", pool_name="llama-pool", node_labels=(ZONE,))


def zones(discovery):
    return [endpoint.labels.get(ZONE) for endpoint in discovery.found.endpoints]


def node(name, zone):
    return {"metadata": {"name": name, "uid": name, "labels": {ZONE: zone, "other": "x"}}}


async def test_endpoints_have_the_wanted_labels_of_their_nodes(tmp_path):
    """They follow the node; other labels of it are not read."""
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        item = pod("a")
        server.put(PODS, item | {"spec": item["spec"] | {"nodeName": "n1"}})
        server.put(NODES, node("n1", "a"))
        async with discovering(server, tmp_path, WITH_ZONES) as discovery:
            await eventually(lambda: zones(discovery) == ["a"])
            assert discovery.found.endpoints[0].labels == {"app": "llama", ZONE: "a"}
            server.put(NODES, node("n1", "b"))
            await eventually(lambda: zones(discovery) == ["b"])
            server.delete(NODES, "n1")
            await eventually(lambda: zones(discovery) == [None])


async def test_without_the_right_to_read_nodes_endpoints_serve_and_a_sentence_says_so(tmp_path):
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        server.put(PODS, pod("a"))
        server.fail("LIST", NODES, *[403] * 100)
        with capture_logs() as logs:
            async with discovering(server, tmp_path, WITH_ZONES) as discovery:
                await eventually(lambda: discovery.synced and names(discovery) == ["llm/a"])
                await eventually(lambda: any("forbidden" in line["event"] for line in logs))
        (said, *_) = [line["event"] for line in logs if "forbidden" in line["event"]]
        assert said.startswith("forbidden to list nodes in the cluster: the ClusterRole of")


async def test_nodes_are_not_read_unless_their_labels_are_wanted(tmp_path):
    async with FakeApiServer() as server:
        server.put(POOLS, pool())
        async with discovering(server, tmp_path) as discovery:
            await eventually(lambda: discovery.synced)
        assert not any(path == NODES for _, _, path, _ in server.requests)
