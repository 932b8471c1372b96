"""What the chart and deploy/ would install, judged by the API server itself, CEL rules included."""

import copy
import subprocess

import pytest
import yaml

from tests.apiserver.cluster import Namespace
from tests.chart.golden_texts import NAMES, golden_text
from tests.chart.rendering import NAMESPACE, ROOT, objects, one

OVERLAYS = sorted(path.parent for path in (ROOT / "deploy").glob("overlays/*/kustomization.yaml"))


@pytest.fixture(scope="module")
def dry_run(api, kubectl, tmp_path_factory):
    """Objects -> (how many the API server would take, what it says against the others)."""
    Namespace.made(api, NAMESPACE)
    folder = tmp_path_factory.mktemp("kubectl")
    kubeconfig = api.kubeconfig(folder / "administrator.yaml")

    def run(documents):
        command = [kubectl, "--kubeconfig", kubeconfig, "--cache-dir", folder]
        command += ["--namespace", NAMESPACE, "apply", "--server-side", "--dry-run=server"]
        done = subprocess.run(
            [*command, "--validate=strict", "--filename=-"],
            input=yaml.safe_dump_all(documents),
            check=False,
            capture_output=True,
            text=True,
            timeout=50,
        )
        return done.stdout.count("serverside-applied (server dry run)"), done.stderr

    return run


@pytest.fixture(scope="module")
def served(api):
    """Objects -> those of API groups whose definitions are at hand."""
    groups = {"", *(group["name"] for group in api.request("GET", "/apis")["groups"])}
    return lambda documents: [
        each for each in documents if each["apiVersion"].rpartition("/")[0] in groups
    ]


@pytest.mark.parametrize("golden", NAMES)
def test_the_api_server_takes_what_the_chart_renders(dry_run, served, golden):
    """Every object whose kind it knows, strictly."""
    documents = served(objects(golden_text(golden)))
    assert len(documents) >= 3
    assert dry_run(documents) == (len(documents), "")


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_the_api_server_takes_the_manifests_of_deploy(dry_run, served, kubectl, overlay):
    """As `kubectl apply -k` would send them."""
    built = subprocess.run(
        [kubectl, "kustomize", overlay], check=True, capture_output=True, text=True, timeout=30
    )
    documents = served(objects(built.stdout))
    assert len(documents) >= 6
    assert dry_run(documents) == (len(documents), "")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda spec: spec["endpointPickerRef"].pop("port"), "port is required when kind is"),
        (
            lambda spec: spec.update(targetPorts=[{"number": 8000}, {"number": 8000}]),
            "port number must be unique",
        ),
        (
            lambda spec: spec["endpointPickerRef"].update(failureMode="FailClosed"),
            'Unsupported value: "FailClosed"',
        ),
        (lambda spec: spec.update(targetPort=8000), "field not declared in schema"),
    ],
    ids=["no port", "a port twice", "FailClosed", "unknown"],
)
def test_a_wrong_pool_would_be_found(dry_run, change, problem):
    """The checks above can fail, by rules of the CRD as by its schema."""
    right = one(objects(golden_text("created-pool")), "InferencePool")
    wrong = copy.deepcopy(right)
    change(wrong["spec"])
    assert dry_run([right])[0] == 1
    applied, told = dry_run([wrong])
    assert applied == 0
    assert problem in told
