"""deploy/: manifests made of the chart, overlays that build, an image from the locks alone."""

import os
import re
import subprocess
from importlib.metadata import requires
from operator import itemgetter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from epp.flags import command_lines
from tests.chart.manifests import DEPLOY, chart_objects, generated
from tests.chart.rendering import CHART, ROOT, objects, one, picker

OVERLAYS = sorted(path for path in (DEPLOY / "overlays").iterdir() if path.is_dir())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")

each = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)


def build(kubectl, overlay):
    done = subprocess.run(
        [kubectl, "kustomize", overlay], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def test_generated_manifests_are_what_the_chart_renders(helm_4):
    """`python -m tests.chart.manifests` writes them anew."""
    stale = [
        str(file.relative_to(ROOT))
        for file, text in generated(helm_4)
        if file.read_text(encoding="utf-8") != text
    ]
    assert stale == []


@each
def test_overlays_build(kubectl, overlay):
    """One namespace, one image, one picker whose flags parse, and nobody unknown is referred to."""
    documents = build(kubectl, overlay)
    assert {document["metadata"]["namespace"] for document in documents} == {"models"}
    container = picker(documents)
    assert container["image"].startswith("registry.example.com/homing:")
    told = command_lines.parse_serve(container["args"][1:], {"NAMESPACE": "models"})
    assert told.pool_namespace == "models"
    (subject,) = one(documents, "RoleBinding")["subjects"]
    assert subject["namespace"] == "models"
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for document in documents:
        spec = document.get("spec", {})
        for target in (*spec.get("targetRefs", ()), *filter(None, [spec.get("targetRef")])):
            assert (target["kind"], target["name"]) in names
        if document["kind"] == "InferencePool":
            reference = spec["endpointPickerRef"]
            assert ("Service", reference["name"]) in names
            assert reference["port"]["number"] == told.grpc_port
            assert document["metadata"]["name"] == told.pool_name
        if document["kind"] == "HTTPRoute":
            (gateway,) = spec["parentRefs"]
            assert ("Gateway", gateway["name"]) in names


@pytest.fixture
def with_component(kubectl, tmp_path):
    """What an overlay, or the base, is with a component, in another namespace if one is named."""

    def built(folder, component="", namespace=""):
        kustomization = {"resources": [os.path.relpath(folder, tmp_path)]}
        if component:
            path = os.path.relpath(DEPLOY / "components" / component, tmp_path)
            kustomization["components"] = [path]
        if namespace:
            kustomization["namespace"] = namespace
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return build(kubectl, tmp_path)

    return built


@each
@pytest.mark.parametrize("component", ["", "replicas"])
def test_an_overlay_goes_into_any_namespace(with_component, overlay, component):
    """All of it, and the rights are those of the ServiceAccount there."""
    documents = with_component(overlay, component, namespace="elsewhere")
    assert {document["metadata"]["namespace"] for document in documents} == {"elsewhere"}
    binding = one(documents, "RoleBinding")
    account = one(documents, "ServiceAccount")["metadata"]
    (subject,) = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account["name"], "namespace": "elsewhere"}
    assert binding["roleRef"]["name"] == one(documents, "Role")["metadata"]["name"]
    told = command_lines.parse_serve(picker(documents)["args"][1:], {"NAMESPACE": "elsewhere"})
    assert told.pool_namespace == "elsewhere"


@pytest.mark.parametrize("component", ["headless", "replicas"])
def test_a_component_is_what_the_chart_renders(helm_4, with_component, component):
    """Object by object, but for the namespace, the image, and the order in lists of the pod."""
    values = DEPLOY / "components" / component / "values.yaml"
    wanted = {(at["kind"], at["metadata"]["name"]): at for at in chart_objects(helm_4, values)}
    built = with_component(DEPLOY / "base", component)
    found = {(at["kind"], at["metadata"]["name"]): at for at in built}
    assert set(found) == set(wanted)
    for document in found.values():
        document["metadata"].pop("namespace")
    for subject in found["RoleBinding", "homing"]["subjects"]:
        subject.pop("namespace")
    for subject in wanted["RoleBinding", "homing"]["subjects"]:
        subject.pop("namespace", None)
    for documents in (found, wanted):
        container = picker(list(documents.values()))
        container["image"] = ""
        container["args"].sort()
        container["volumeMounts"].sort(key=itemgetter("name"))
        pod = documents["Deployment", "homing"]["spec"]["template"]["spec"]
        pod["volumes"].sort(key=itemgetter("name"))
    assert found == wanted


@each
def test_the_component_of_replicas_fits_every_overlay(with_component, overlay):
    """The container that is patched is the picker; its flags are taken."""
    documents = with_component(overlay, "replicas")
    told = command_lines.parse_serve(picker(documents)["args"][1:], {"NAMESPACE": "models"})
    assert (told.replicas, told.peer_service) == (3, "homing-peers")
    (volume,) = (
        at
        for at in one(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
        if at["name"] == "peer-secret"
    )
    assert volume["secret"] == {"secretName": "homing-peer-secret"}
    assert Path(told.peer_secret_file).parent == Path("/peer-secret")


@each
def test_every_overlay_is_in_the_page(overlay):
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert f"overlays/{overlay.name}" in page


@each
def test_what_clients_may_not_name_is_removed_or_the_gateway_s_business(kubectl, overlay):
    """Where a header alone decides the destination, a client's own is removed before."""
    documents = build(kubectl, overlay)
    kinds = {document["kind"] for document in documents}
    if "BackendTrafficPolicy" in kinds:
        removed = one(documents, "ClientTrafficPolicy")["spec"]["headers"]["earlyRequestHeaders"]
        assert "x-gateway-destination-endpoint" in removed["remove"]


# The image. No engine builds it here: what can be read off the file is.


def test_the_images_are_installed_from_the_locks_alone():
    """Every installation asks for hashes, but that of the wheel made here, which asks nobody."""
    text = DOCKERFILE.replace("\\\n", "")
    commands = re.findall(r"pip (?:--python \S+ )?install ([^\n]*)", text)
    assert len(commands) == len(re.findall(r"\bpip\b[^\n]* install ", text)) == 5
    for command in commands:
        assert "--require-hashes" in command or "--no-index" in command
    assert "--no-build-isolation" in DOCKERFILE
    locked = (ROOT / "lock/dev.txt").read_text(encoding="utf-8")
    (names,) = re.findall(r"wanted = /\^\(([^)]*)\)==/", DOCKERFILE)
    assert needs("hatchling") == set(names.split("|"))
    for name in names.split("|"):
        assert re.search(rf"^{name}==", locked, re.MULTILINE), name


def needs(name):
    """`name` and all that it requires, as installed here."""
    found, pending = set(), [name]
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            wanted = [Requirement(text) for text in requires(current) or ()]
            pending += [one.name for one in wanted if not one.marker or one.marker.evaluate()]
    return found


def test_the_image_gets_only_what_it_is_made_of():
    """Each path that is copied is let in, and the rest of the tree is not."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {
        Path(word).parts[0]
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("page", [DEPLOY / "README.md", CHART / "README.md"], ids=str)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_quick_start_names_files_that_exist():
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"\bdeploy/[\w./-]+", page):
        assert (ROOT / name.rstrip(".")).exists(), name


def cpu_of(text):
    """In thousandths of a core."""
    return int(text[:-1]) if text.endswith("m") else 1_000 * int(text)


def test_the_quick_start_fits_a_small_node(kubectl):
    """Beside what a control plane asks for on two cores; the page says how much."""
    asked = 0
    pods = (DEPLOY / "simulated-pods.yaml").read_text(encoding="utf-8")
    for document in (*build(kubectl, DEPLOY / "overlays/static-envoy"), *objects(pods)):
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]
            stays = [at for at in pod.get("initContainers", ()) if "restartPolicy" in at]
            for container in (*pod["containers"], *stays):
                asked += document["spec"]["replicas"] * cpu_of(
                    container["resources"]["requests"]["cpu"]
                )
    assert asked <= 1_000
    assert f"request {asked}m of CPU" in (DEPLOY / "README.md").read_text(encoding="utf-8")


def test_the_pods_of_the_quick_start_are_those_of_the_base():
    """Label and port, so that the pool finds them."""
    pods = objects((DEPLOY / "simulated-pods.yaml").read_text(encoding="utf-8"))
    labels = one(pods, "Deployment")["spec"]["template"]["metadata"]["labels"]
    base = yaml.safe_load((DEPLOY / "base/values.yaml").read_text(encoding="utf-8"))
    assert base["pool"]["matchLabels"].items() <= labels.items()
