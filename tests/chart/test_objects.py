"""What is rendered is what the API servers of all supported versions take, and nothing dangerous."""

from functools import cache

import pytest
import yaml

from epp.flags.command_lines import parse_serve
from epp.shell.kubernetes.cluster import _lease_name
from tests.chart.golden_texts import NAMES, golden_text
from tests.chart.rendering import ROOT, objects, one, picker

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed; the dev group has it"
)
jsonschema = pytest.importorskip(
    "jsonschema", reason="jsonschema is not installed; the dev group has it"
)

DEPLOYED = [
    *sorted((ROOT / "deploy").glob("**/homing.yaml")),
    ROOT / "deploy/simulated-pods.yaml",
]
RENDERED = [*NAMES, *DEPLOYED]
"""Goldens by their names, and files."""
VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35", "1.36")
FOREIGN = {
    "inference.networking.k8s.io",
    "llm-d.ai",
    "gateway.networking.k8s.io",
    "monitoring.coreos.com",
    "monitoring.googleapis.com",
    "networking.istio.io",
    "networking.gke.io",
}
"""API groups that Kubernetes itself has not."""

each = pytest.mark.parametrize(
    "golden",
    RENDERED,
    ids=lambda one: one if isinstance(one, str) else f"{one.parent.name}/{one.stem}",
)


@cache
def documents(golden):
    if isinstance(golden, str):
        return objects(golden_text(golden))
    return objects(golden.read_text(encoding="utf-8"))


def group(document):
    return document["apiVersion"].rpartition("/")[0]


def pods(golden):
    """Specifications of pods, of whatever kind."""
    for document in documents(golden):
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]["spec"]
        elif document["kind"] == "Pod":
            yield document["spec"]


def containers(golden):
    for pod in pods(golden):
        yield from (*pod.get("initContainers", ()), *pod["containers"])


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once():
    """The package reads megabytes for every object."""
    original = kubernetes_validate.utils.schema_contents
    kubernetes_validate.utils.schema_contents = cache(original)
    yield
    kubernetes_validate.utils.schema_contents = original


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(version):
    """Strictly: an unknown field is an error. Each different object once."""
    seen = {}
    for golden in RENDERED:
        for document in documents(golden):
            if group(document) not in FOREIGN:
                seen[yaml.safe_dump(document)] = document
    assert len(seen) > 50
    for document in seen.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_would_be_found():
    """The check above can fail."""
    service = next(at for at in documents(NAMES[0]) if at["kind"] == "Service")
    wrong = service | {"spec": service["spec"] | {"portz": []}}
    with pytest.raises(kubernetes_validate.ValidationError, match="portz"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.fixture(scope="module")
def crds(shared_data):
    """(group, kind) -> schema of its version."""
    found = {}
    for path in (shared_data / "crds").glob("*.yaml"):
        crd = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        for version in crd["versions"]:
            key = (f"{crd['group']}/{version['name']}", crd["names"]["kind"])
            found[key] = version["schema"]["openAPIV3Schema"]
    return found


def test_pools_and_objectives_are_as_their_crds_say(crds):
    """Against the published CRDs; unknown fields would be dropped there, so they are errors here."""
    checked = []
    for golden in RENDERED:
        for document in documents(golden):
            if group(document) in {"inference.networking.k8s.io", "llm-d.ai"}:
                schema = crds[document["apiVersion"], document["kind"]]
                jsonschema.Draft7Validator(schema).validate(document)
                assert set(document["spec"]) <= set(schema["properties"]["spec"]["properties"])
                reference = document["spec"].get("endpointPickerRef")
                # What CEL says there: a Service needs its port.
                assert reference is None or reference["port"]["number"]
                checked.append(document["kind"])
    assert set(checked) == {"InferencePool", "InferenceObjective"}


@each
def test_pods_pass_pod_security_restricted(golden):
    """Each rule of the profile, by name; besides, no writable root and no shared service links."""
    for pod in pods(golden):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] != 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for volume in pod.get("volumes", ()):
            assert set(volume) <= {
                "name",
                "configMap",
                "emptyDir",
                "persistentVolumeClaim",
                "secret",
            }
    for container in containers(golden):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not {"privileged", "procMount"} & set(context)
        assert not [port for port in container.get("ports", ()) if "hostPort" in port]


@each
def test_the_token_is_mounted_where_it_is_used(golden):
    """Only in the pod of the picker."""
    for document in documents(golden):
        if document["kind"] == "ServiceAccount":
            assert document["automountServiceAccountToken"] is False
        if document["kind"] == "Pod":
            assert document["spec"]["automountServiceAccountToken"] is False


ALLOWED = {
    ("", "pods"): {"get", "list", "watch"},
    ("", "events"): {"create"},
    ("", "configmaps"): {"get", "list", "watch"},
    ("inference.networking.k8s.io", "inferencepools"): {"get", "list", "watch"},
    ("llm-d.ai", "inferenceobjectives"): {"get", "list", "watch"},
    ("llm-d.ai", "inferencemodelrewrites"): {"get", "list", "watch"},
    ("inference.networking.x-k8s.io", "inferenceobjectives"): {"get", "list", "watch"},
    ("inference.networking.x-k8s.io", "inferencemodelrewrites"): {"get", "list", "watch"},
    ("coordination.k8s.io", "leases"): {"get", "create", "update"},
    ("discovery.k8s.io", "endpointslices"): {"get", "list", "watch"},
}
NAMED = {("", "configmaps"), ("inference.networking.k8s.io", "inferencepools")}
"""Only ever by name."""


@each
def test_rights_are_the_least(golden):
    """A Role, and a ClusterRole only to read nodes whose labels are wanted; no wildcard; nothing that
    can be written but Events and the Lease.
    """
    arguments = next(containers(golden))["args"]
    reads_nodes = any(argument.startswith("--node-labels=") for argument in arguments)
    cluster = [one["rules"] for one in documents(golden) if one["kind"] == "ClusterRole"]
    nodes = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}
    assert cluster == ([[nodes]] if reads_nodes else [])
    for document in documents(golden):
        if document["kind"] != "Role":
            continue
        granted = set()
        for rule in document["rules"]:
            for pair in ((g, r) for g in rule["apiGroups"] for r in rule["resources"]):
                assert set(rule["verbs"]) <= ALLOWED[pair], pair
                assert pair not in NAMED or rule["resourceNames"], pair
                granted.add(pair)
        elects = "--ha-enable-leader-election=true" in arguments
        assert (("coordination.k8s.io", "leases") in granted) == elects
        if arguments[0] == "serve":
            watches = any(argument.startswith("--config-map=") for argument in arguments)
            assert (("", "configmaps") in granted) == watches
            finds_peers = any(argument.startswith("--peer-service=") for argument in arguments)
            assert (("discovery.k8s.io", "endpointslices") in granted) == finds_peers


def test_the_lease_that_is_granted_is_the_one_that_is_used():
    """By name, with or without a pool."""
    for name in ("leader-election", "leader-election-without-pool"):
        told = parse_serve(picker(documents(name))["args"][1:], {})
        (rule,) = (
            rule
            for rule in one(documents(name), "Role")["rules"]
            if rule["resources"] == ["leases"] and "update" in rule["verbs"]
        )
        assert rule["resourceNames"] == [_lease_name(told)]


@each
def test_selectors_choose_the_pods_of_the_deployment(golden):
    """Of the Service, the budget, the policy and the monitors; and not the pod of `helm test`."""
    deployment = one(documents(golden), "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    for document in documents(golden):
        match document["kind"]:
            case "Service":
                assert document["spec"]["selector"] == selector
            case "PodDisruptionBudget" | "ServiceMonitor" | "PodMonitor" | "PodMonitoring":
                assert document["spec"]["selector"]["matchLabels"] == selector
            case "NetworkPolicy":
                assert document["spec"]["podSelector"]["matchLabels"] == selector
            case "Pod":
                assert not selector.items() <= document["metadata"]["labels"].items()


@each
def test_ports_of_services_are_those_of_containers(golden):
    names = {port["name"] for c in containers(golden) for port in c.get("ports", ())}
    for document in documents(golden):
        if document["kind"] == "Service":
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= names


@each
def test_only_envoy_can_be_seen_from_outside(golden):
    """ext_proc and metrics are for the cluster alone."""
    for document in documents(golden):
        if (
            document["kind"] == "Service"
            and document["spec"].get("type", "ClusterIP") != "ClusterIP"
        ):
            assert [port["name"] for port in document["spec"]["ports"]] == ["http"]
