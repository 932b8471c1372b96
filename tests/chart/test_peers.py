"""Replicas that tell each other what they know: who is found how, by what secret, with what rights."""

import base64
import json
import shutil
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from epp.flags import command_lines
from tests.chart.rendering import CHART, VALUES, helm, objects, one, picker, refusal, rendered

BASE = ("--set", "image.repository=r.example.com/homing,pool.name=vllm")
SECRET_BYTES_MIN = 32
"""As `--peer-secret-file` demands."""
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
users: [{{name: test, user: {{}}}}]
"""


def documents_of(binary, name):
    (values,) = (path for path in VALUES if path.stem == name)
    return objects(rendered(binary, values))


def told_of(documents):
    """The flags of the picker, as it reads them."""
    environment = {"NAMESPACE": "models", "POD_NAME": "a", "POD_IP": "10.0.0.1"}
    return command_lines.parse_serve(picker(documents)["args"][1:], environment)


def mounted(documents, name):
    """(path, volume) of a mount of the picker."""
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    (mount,) = (at for at in picker(documents)["volumeMounts"] if at["name"] == name)
    (volume,) = (at for at in pod["volumes"] if at["name"] == name)
    assert "subPath" not in mount
    return mount["mountPath"], volume


def services(documents):
    return {at["metadata"]["name"]: at["spec"] for at in documents if at["kind"] == "Service"}


MESHES = {
    "two-replicas": 2,
    "scheduling": 3,
    "autoscaled": 3,
    "guarded-replicas": 3,
    "one-handing-over": 1,
    # The leader decides alone: nobody else has to be agreed with.
    "warm-standby": 1,
    "leader-election-without-pool": 1,
}
"""Values by which replicas connect to each other -> how many decide."""


@pytest.mark.parametrize(("name", "deciding"), MESHES.items())
def test_replicas_find_each_other_by_a_headless_service(helm_4, name, deciding):
    """Of the port that they take, before they are ready, with their own address left out."""
    documents = documents_of(helm_4, name)
    told = told_of(documents)
    service = services(documents)[told.peer_service]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"].items() <= labels_of(documents).items()
    (port,) = service["ports"]
    assert port["port"] == told.peer_port
    named = {at["name"]: at["containerPort"] for at in picker(documents)["ports"]}
    assert named[port["targetPort"]] == told.peer_port
    # A mesh that does not know a protocol guesses it, or goes by the name of the port.
    assert port["name"].startswith("tcp-")
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert address in picker(documents)["env"]
    assert told.replicas == deciding
    assert (told.peers, told.peer_url, told.peer_url_file) == ((), "", "")


def labels_of(documents):
    return one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", MESHES)
def test_replicas_know_each_other_by_a_secret(helm_4, name):
    """They do not speak in plaintext, whatever else is in the clear."""
    documents = documents_of(helm_4, name)
    path, volume = mounted(documents, "peer-secret")
    key = "peer-secret" if name == "scheduling" else "secret"
    assert told_of(documents).peer_secret_file == f"{path}/{key}"
    assert volume["secret"] == {"secretName": "homing-peers"}
    assert "Secret" not in {document["kind"] for document in documents}


@pytest.mark.parametrize(
    "name", ["existing-pool", "leader-election", "valkey", "valkey-with-password", "standalone"]
)
def test_who_connects_to_nobody_has_neither_port_nor_right(helm_4, name):
    """Alone, blind, or through Valkey."""
    documents = documents_of(helm_4, name)
    told = told_of(documents)
    assert (told.peer_service, told.peer_secret_file) == ("", "")
    assert not [spec for spec in services(documents).values() if "publishNotReadyAddresses" in spec]
    assert "tcp-homing-peer" not in {port["name"] for port in picker(documents)["ports"]}
    slices = [r for r in one(documents, "Role")["rules"] if "endpointslices" in r["resources"]]
    assert slices == []


def test_replicas_share_through_valkey(helm_4):
    """By a URL, or by a Secret that has it: a password is in no list of processes."""
    told = told_of(documents_of(helm_4, "valkey"))
    assert (told.peer_url, told.replicas) == ("valkey://valkey.caches:6379/0", 12)
    documents = documents_of(helm_4, "valkey-with-password")
    path, volume = mounted(documents, "peer-url")
    assert told_of(documents).peer_url_file == f"{path}/uri"
    assert volume["secret"] == {"secretName": "shared-valkey"}


def test_a_policy_lets_replicas_reach_each_other_and_nobody_else(helm_4):
    """In and out, at the port of peers, and that of ext_proc for the Envoy beside each."""
    documents = documents_of(helm_4, "guarded-replicas")
    policy = one(documents, "NetworkPolicy")["spec"]
    ours = {"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}
    told = told_of(documents)
    ports = [{"port": port, "protocol": "TCP"} for port in (told.peer_port, told.grpc_port)]
    for rules, where in ((policy["ingress"], "from"), (policy["egress"], "to")):
        found = [rule for rule in rules if ports[0] in rule.get("ports", ())]
        assert found == [{"ports": ports, where: [ours]}]


@pytest.mark.parametrize(
    ("name", "volume"),
    [
        ("valkey-with-password", {"emptyDir": {"sizeLimit": "256Mi"}}),
        ("one-handing-over", {"persistentVolumeClaim": {"claimName": "homing-snapshot"}}),
    ],
)
def test_a_copy_is_kept_where_it_is_read(helm_4, name, volume):
    documents = documents_of(helm_4, name)
    path, found = mounted(documents, "snapshot")
    assert told_of(documents).snapshot_dir == path
    assert found == {"name": "snapshot", **volume}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("replicas=1", None),
        ("replicas=2", "peers"),
        ("replicas=2,peers.enabled=false", None),
        ("replicas=2,leaderElection.enabled=true", "peers"),
        ("replicas=1,autoscaling.enabled=true", "peers"),
        ("replicas=1,peers.enabled=true", "peers"),
        ("replicas=2,peers.url=valkey://a", "url"),
        ("replicas=1,peers.url=valkey://a", None),
    ],
)
def test_several_replicas_share_unless_told_not_to(any_helm, change, kind):
    done = helm(any_helm, "template", "inference", CHART, *BASE, "--set", change)
    assert done.returncode == 0, done.stderr
    given = [a for a in picker(objects(done.stdout))["args"] if a.startswith("--peer-")]
    expected = {None: [], "url": ["--peer-url=valkey://a"]}
    if kind == "peers":
        names = [argument.partition("=")[0] for argument in given]
        assert names == ["--peer-service", "--peer-port", "--peer-secret-file"]
    else:
        assert given == expected[kind]


def test_two_ways_of_sharing_are_one_too_many(any_helm):
    message = refusal(
        any_helm, *BASE, "--set", "replicas=2,peers.url=valkey://a,peers.urlSecretName=b"
    )
    assert "peers.url and peers.urlSecretName are both set, expected one of them" in message


# The Secret that is made.


@pytest.fixture
def peers_chart(tmp_path):
    """Of the chart what makes the Secret, and nothing that asks more of a cluster."""
    chart = tmp_path / "homing"
    shutil.copytree(CHART, chart)
    for template in (chart / "templates").iterdir():
        if template.name not in {"_helpers.tpl", "peers.yaml"}:
            shutil.rmtree(template) if template.is_dir() else template.unlink()
    return chart


def secret_of(binary, chart, *more):
    done = helm(
        *(binary, "template", "inference", chart, "--namespace", "models", *BASE),
        *("--set", "replicas=2", *more),
    )
    assert done.returncode == 0, done.stderr
    (data,) = one(objects(done.stdout), "Secret")["data"].items()
    return data


def test_a_secret_is_drawn_where_none_is_named(any_helm, peers_chart):
    """Long enough, each time another, and in the file that is read."""
    drawn = [secret_of(any_helm, peers_chart) for _ in range(2)]
    assert drawn[0] != drawn[1]
    for key, data in drawn:
        assert key == "secret"
        text = base64.b64decode(data, validate=True)
        assert len(base64.b64decode(text, validate=True)) >= SECRET_BYTES_MIN
    named = ("--set", "replicas=2,debugToken.secretName=debug-pages")
    done = helm(any_helm, "template", "inference", CHART, *BASE, *named)
    documents = objects(done.stdout)
    _, volume = mounted(documents, "peer-secret")
    assert volume["secret"]["secretName"] == one(documents, "Secret")["metadata"]["name"]


RESOURCES = [
    {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
    for name, kind in (("secrets", "Secret"), ("services", "Service"))
]


@contextmanager
def cluster_with(data, name="inference-homing-peers"):
    """The port of an API server that has one Secret, `name` of `models`."""
    pages = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": RESOURCES},
        f"/api/v1/namespaces/models/secrets/{name}": {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": name,
                "namespace": "models",
                # What is not of the release Helm would not touch.
                "labels": {"app.kubernetes.io/managed-by": "Helm"},
                "annotations": {
                    "meta.helm.sh/release-name": "inference",
                    "meta.helm.sh/release-namespace": "models",
                },
            },
            "data": data,
        },
    }
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            found = pages.get(self.path.partition("?")[0])
            body = json.dumps(found or missing | {"code": 404}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("key", ["secret", "other"])
def test_an_upgrade_keeps_the_secret_of_the_cluster(any_helm, peers_chart, tmp_path, key):
    """Other replicas than those that restart would not know a new one. A missing key is drawn."""
    kept = base64.b64encode(b"k" * 40).decode()
    with cluster_with({"secret": kept}) as port:
        kubeconfig = tmp_path / "kubeconfig.yaml"
        kubeconfig.write_text(KUBECONFIG.format(port=port), encoding="utf-8")
        server = ("--dry-run=server", "--disable-openapi-validation", "--kubeconfig", kubeconfig)
        found = secret_of(any_helm, peers_chart, "--set", f"peers.secretKey={key}", *server)
    assert found[0] == key
    assert (found[1] == kept) == (key == "secret")
