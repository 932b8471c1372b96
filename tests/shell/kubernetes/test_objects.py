import json
from pathlib import Path
from random import Random

import pytest
import yaml

from epp.core.types import MetricsTarget
from epp.shell.kubernetes import objects as kube_objects
from epp.shell.kubernetes.objects import (
    Collection,
    config_map_reader,
    endpoints_of,
    model_rewrites,
    node_reader,
    objective_reader,
    read_pod,
    read_pool,
    rewrite_reader,
)
from tests.shell.kubernetes.fake_api_server import objective, pod, pool, rewrite

GROUP = "inference.networking.k8s.io"


def raw(item):
    return json.dumps(item).encode()


def endpoints(*pods, ports=(8000,)):
    return endpoints_of([read for item in pods if (read := read_pod(raw(item)))], ports)


def test_a_pool_is_its_selector_and_its_ports():
    """Labels in order of names, so that the same selector is the same text."""
    read = read_pool(raw(pool(labels={"b": "2", "a": "1"}, ports=(8001, 8000))))
    assert (read.name, read.uid) == ("llama-pool", "uid-llama-pool")
    assert read.label_selector == "a=1,b=2"
    assert read.target_ports == (8001, 8000)
    assert read.app_protocol == "http"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"selector": {"matchLabels": {}}, "targetPorts": [{"number": 8000}]},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": []},
        {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 70_000}]},
        {
            "selector": {"matchLabels": {"a": "b"}},
            "targetPorts": [{"number": 8000 + n} for n in range(9)],
        },
    ],
)
def test_a_pool_that_the_schema_forbids_is_an_error(spec):
    """The API server would not store it; nobody else may make us take it."""
    with pytest.raises(ValueError):
        read_pool(raw(pool() | {"spec": spec}))


def test_an_endpoint_is_one_pod_and_port():
    """Identity by pod UID and port; ready by its first scrape, or after five seconds."""
    item = pod("a", uid="u1", ip="10.0.0.7", ports=(8000,))
    (endpoint,) = endpoints(item)
    assert endpoint.endpoint_id == "u1:8000"
    assert endpoint.name == "llm/a"
    assert endpoint.address == "10.0.0.7:8000"
    assert endpoint.labels == {"app": "llama"}
    assert endpoint.metrics == MetricsTarget(port=8000)
    assert endpoint.ready_after_s == 5.0


def test_several_ports_are_ranks_of_one_pod():
    """Named by the position of the port; IPv6 in brackets."""
    found = endpoints(pod("a", uid="u1", ip="fd00::8"), ports=(8000, 8001))
    assert [(at.name, at.address) for at in found] == [
        ("llm/a-rank-0", "[fd00::8]:8000"),
        ("llm/a-rank-1", "[fd00::8]:8001"),
    ]


@pytest.mark.parametrize(
    ("told", "known"),
    [("10.1.0.1", "10.1.0.1"), ("fd00::1", "[fd00::1]"), ("", ""), (None, ""), ("node-1", "")],
)
def test_the_address_of_its_node_is_known_where_it_is_told(told, known):
    """IPv6 in brackets; what is no address is none."""
    item = pod("a")
    item["status"]["hostIP"] = told
    assert [one.node_address for one in endpoints(item)] == [known]


@pytest.mark.parametrize(
    ("annotations", "ports"),
    [
        ({}, [8000, 8001]),
        ({"llm-d.ai/active-ports": "8001"}, [8001]),
        ({"llm-d.ai/active-ports": " 8001, 8000 ,x,9999"}, [8000, 8001]),
        ({"llm-d.ai/active-ports": ""}, []),
        ({"inference.networking.k8s.io/active-ports": "8000"}, [8000]),
        (
            {"llm-d.ai/active-ports": "8001", "inference.networking.k8s.io/active-ports": "8000"},
            [8001],
        ),
    ],
)
def test_the_annotation_narrows_the_ports(annotations, ports):
    """A rank keeps its number; the newer annotation goes before the older."""
    found = endpoints(pod("a", annotations=annotations), ports=(8000, 8001))
    assert [int(at.address.rpartition(":")[2]) for at in found] == ports
    assert all(at.name.endswith(str(int(at.address[-1]))) for at in found)


@pytest.mark.parametrize(
    "change",
    [
        {"status": {}},
        {"status": {"podIP": "10.0.0.7"}},
        {"status": {"podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": [{"type": "Ready", "status": "True"}]}},
        {
            "status": {
                "phase": "Failed",
                "podIP": "10.0.0.7",
                "conditions": [{"type": "Ready", "status": "True"}],
            }
        },
    ],
)
def test_only_a_ready_pod_with_an_address_serves(change):
    """Not one that has ended either."""
    assert endpoints(pod("a") | change) == ()


def test_a_terminating_pod_is_out_at_once():
    """Before it stops being Ready, and before it is deleted."""
    assert endpoints(pod("a", deletionTimestamp="2026-01-01T00:00:00Z")) == ()


def test_the_incarnation_is_that_of_the_container_that_serves_the_port():
    """The engine's restart forgets what it held, a sidecar's does not."""
    item = pod("a", uid="u1")
    item["spec"]["containers"].append({"name": "sidecar", "ports": [{"containerPort": 9000}]})
    statuses = item["status"]["containerStatuses"]
    statuses.append({"name": "sidecar", "restartCount": 0, "containerID": "containerd://s"})
    (before,) = endpoints(item)
    statuses[1] |= {"restartCount": 1, "containerID": "containerd://s2"}
    assert endpoints(item) == (before,)
    statuses[0] |= {"restartCount": 1, "containerID": "containerd://new"}
    (after,) = endpoints(item)
    assert after.endpoint_id == before.endpoint_id
    assert after.incarnation != before.incarnation


def test_a_port_that_no_container_declares_follows_all_containers():
    """Declaring ports is a courtesy in Kubernetes."""
    item = pod("a", ports=())
    (before,) = endpoints(item)
    item["status"]["containerStatuses"][0]["restartCount"] = 1
    (after,) = endpoints(item)
    assert after.incarnation != before.incarnation


def test_objectives_of_our_pool_have_priorities():
    """Unset is 0; those of other pools and groups do not concern us."""
    read = objective_reader("llama-pool", GROUP)
    assert read(raw(objective("a", 10))) == 10
    assert read(raw(objective("a", -1))) == -1
    assert read(raw(objective("a", None))) == 0
    assert read(raw(objective("a", 10, pool_name="other"))) is None
    other = objective("a", 10)
    other["spec"]["poolRef"]["group"] = "example.com"
    assert read(raw(other)) is None


def test_the_oldest_rewrite_wins_then_the_name():
    """Whatever the order in which they are listed."""
    read = rewrite_reader("llama-pool", GROUP)

    def made(name, created, target):
        rules = [
            {
                "matches": [{"model": {"type": "Exact", "value": "food"}}],
                "targets": [{"modelRewrite": target}],
            }
        ]
        return name, read(raw(rewrite(name, rules, created=created)))

    new = made("a-new", "2026-02-01T00:00:00Z", "new")
    old = made("z-old", "2025-02-01T00:00:00Z", "old")
    same = made("b-same", "2025-02-01T00:00:00Z", "same")
    assert model_rewrites(dict([new, old])).target("food", Random(1)) == "old"
    assert model_rewrites(dict([new, old, same])).target("food", Random(1)) == "same"
    assert read(raw(rewrite("x", [], pool_name="other"))) is None


@pytest.mark.parametrize(
    "rules",
    [
        [{"targets": []}],
        [{"targets": [{"modelRewrite": "a", "weight": 0}]}],
        [
            {
                "matches": [{"model": {"type": "Prefix", "value": "a"}}],
                "targets": [{"modelRewrite": "b"}],
            }
        ],
    ],
)
def test_a_rewrite_that_the_schema_forbids_is_an_error(rules):
    """Matching by anything but the exact name is not guessed at."""
    with pytest.raises(ValueError):
        rewrite_reader("llama-pool", GROUP)(raw(rewrite("x", rules)))


def test_a_config_map_is_the_text_under_its_key():
    """Or nothing."""
    read = config_map_reader("plugins.yaml")
    assert read(raw({"data": {"plugins.yaml": "kind: ü"}})) == "kind: ü".encode()
    assert read(raw({"data": {"other": "x"}})) is None
    assert read(raw({"metadata": {}})) is None


def test_paths_are_those_of_the_api():
    """The core group has its own root."""
    assert Collection(resource="pods", namespace="llm").path == "/api/v1/namespaces/llm/pods"
    leases = Collection(group="coordination.k8s.io", resource="leases", namespace="llm")
    assert leases.path == "/apis/coordination.k8s.io/v1/namespaces/llm/leases"
    assert str(leases) == "leases.coordination.k8s.io in namespace llm"


@pytest.mark.parametrize(
    ("file", "reader"),
    [
        ("inference.networking.k8s.io_inferencepools.yaml", "_PoolSpec"),
        ("llm-d.ai_inferenceobjectives.yaml", "_ObjectiveSpec"),
        ("llm-d.ai_inferencemodelrewrites.yaml", "_RewriteSpec"),
    ],
)
def test_every_member_that_we_read_is_in_the_published_schema(shared_data: Path, file, reader):
    """Under its name there, and required there if we require it."""
    path = shared_data / "crds" / file
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    struct = getattr(kube_objects, reader)
    for field in kube_objects.msgspec.structs.fields(struct):
        assert field.encode_name in schema["properties"]
        if field.required:
            assert field.encode_name in schema["required"]


ZONE = "topology.kubernetes.io/zone"


def node(name, **labels):
    return {"metadata": {"name": name, "labels": labels}}


def test_only_the_wanted_labels_of_a_node_are_read():
    read = node_reader((ZONE, "rack"))
    assert read(raw(node("n", **{ZONE: "a", "other": "x"}))) == {ZONE: "a"}
    assert read(raw({"metadata": {"name": "n"}})) == {}


def test_an_endpoint_has_the_labels_of_its_node_that_its_pod_lacks():
    item = pod("a", labels={"app": "llama", "rack": "of-the-pod"})
    item["spec"]["nodeName"] = "n1"
    nodes = {"n1": {ZONE: "a", "rack": "of-the-node"}, "n2": {ZONE: "b"}}
    (found,) = endpoints_of([read_pod(raw(item))], (8000,), nodes)
    assert found.labels == {"app": "llama", "rack": "of-the-pod", ZONE: "a"}
    (alone,) = endpoints_of([read_pod(raw(pod("b")))], (8000,), nodes)
    assert alone.labels == {"app": "llama"}


def test_nodes_have_no_namespace_and_only_their_metadata_are_read():
    nodes = Collection(resource="nodes", namespace="", metadata_only=True)
    assert nodes.path == "/api/v1/nodes"
    assert str(nodes) == "nodes in the cluster"
    assert "as=PartialObjectMetadataList;" in nodes.accept("list")
    assert "as=PartialObjectMetadata;" in nodes.accept("watch")
    assert Collection(resource="pods", namespace="llm").accept("list") == ""
