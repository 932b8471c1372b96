"""Objects of gateways that the chart renders and the overlays have, as the gateways define them."""

import copy
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.chart.golden_texts import NAMES, golden_text
from tests.chart.manifests import DEPLOY
from tests.chart.rendering import ROOT, objects

jsonschema = pytest.importorskip(
    "jsonschema", reason="jsonschema is not installed; the dev group has it"
)

HERE = Path(__file__).parent
FIELDS = {
    (told["apiVersion"], told["kind"]): told
    for told in yaml.safe_load((HERE / "gateway_fields.yaml").read_text(encoding="utf-8"))
}
OF_GATEWAYS = {name.rpartition("/")[0] for name, _ in FIELDS}
OVERLAYS = sorted(path for path in (DEPLOY / "overlays").iterdir() if path.is_dir())
WRITTEN_FOR = {
    "agentgateway": {"Gateway", "HTTPRoute"},
    "envoy-ai-gateway": {"Gateway", "HTTPRoute"},
    "envoy-gateway": {
        *("Gateway", "HTTPRoute"),
        *("BackendTrafficPolicy", "ClientTrafficPolicy", "EnvoyExtensionPolicy"),
    },
    "gke": {"Gateway", "HTTPRoute", "GCPBackendPolicy", "HealthCheckPolicy"},
    "istio": {"Gateway", "HTTPRoute", "DestinationRule"},
    "kgateway": {"Gateway", "HTTPRoute"},
    "nginx-gateway-fabric": {"Gateway", "HTTPRoute"},
    "static-envoy": set(),
}


def closed(schema):
    """`schema`, and no member besides those that it names: an API server would refuse or drop it."""
    schema = copy.deepcopy(schema)
    if "properties" in schema:
        schema |= {"type": "object", "additionalProperties": False}
        schema["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = closed(schema["items"])
    return schema


@cache
def validator(key):
    return jsonschema.Draft7Validator(closed(FIELDS[key]["spec"]))


def faults(document):
    """Sentences against an object of a gateway; none is wrong with it if there is none."""
    key = document["apiVersion"], document["kind"]
    if key not in FIELDS:
        return [f"gateway_fields.yaml does not say what a {key[1]} of {key[0]} may be"]
    extra = set(document) - {"apiVersion", "kind", "metadata", "spec"}
    found = validator(key).iter_errors(document["spec"])
    return [*map(str, extra), *(f"{at.json_path}: {at.message}" for at in found)]


def of_gateways(documents):
    return [at for at in documents if at["apiVersion"].rpartition("/")[0] in OF_GATEWAYS]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_an_overlay_is_what_its_gateway_defines(kubectl, overlay):
    """Built as `kubectl apply -k` builds it; and it has what the gateway needs besides the pool."""
    built = subprocess.run(
        [kubectl, "kustomize", overlay], check=True, capture_output=True, text=True, timeout=30
    )
    found = of_gateways(objects(built.stdout))
    assert [fault for document in found for fault in faults(document)] == []
    assert {document["kind"] for document in found} == WRITTEN_FOR[overlay.name]


def test_the_chart_renders_what_gateways_define():
    """Every golden; each kind that the chart has for a gateway is among them."""
    seen = Counter()
    for name in NAMES:
        for document in of_gateways(objects(golden_text(name))):
            assert faults(document) == [], name
            seen[document["kind"]] += 1
    assert set(seen) == {"DestinationRule", "GCPBackendPolicy", "HTTPRoute", "HealthCheckPolicy"}


@pytest.mark.parametrize(
    ("golden", "expected"),
    [
        ("gke", [{"port": 8000, "portSpecification": "USE_FIXED_PORT", "requestPath": "/healthz"}]),
        (
            "other-ports",
            [
                {"portSpecification": "USE_SERVING_PORT", "requestPath": "/health"},
                {"port": 50052, "portSpecification": "USE_FIXED_PORT"},
            ],
        ),
    ],
    ids=["a pool of ours", "somebody else's pool, and another port of the picker"],
)
def test_gke_is_told_which_port_to_check(golden, expected):
    """It takes no port unless it is said that one is meant, and no check where nothing is said."""
    documents = objects(golden_text(golden))
    checks = [
        at["spec"]["default"]["config"] for at in documents if at["kind"] == "HealthCheckPolicy"
    ]
    of_kinds = ("httpHealthCheck", "grpcHealthCheck")
    assert [check[kind] for kind in of_kinds for check in checks if kind in check] == expected


def everything():
    """Objects of the chart and of the overlays."""
    for name in NAMES:
        yield from objects(golden_text(name))
    for file in DEPLOY.glob("overlays/*/*.yaml"):
        yield from _read(file)


def changed(kind, path, value):
    """An object as it is, with one member of its spec set, or taken away by None."""
    document = copy.deepcopy(next(at for at in everything() if at["kind"] == kind))
    *names, last = path
    place = document["spec"]
    for name in names:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


@cache
def _read(file):
    return [
        at for at in yaml.safe_load_all(file.read_text(encoding="utf-8")) if at and "kind" in at
    ]


CHECK = ("default", "config", "httpHealthCheck")
EXT_PROC = ("extProc", 0)


@pytest.mark.parametrize(
    ("kind", "path", "value", "told"),
    [
        ("Gateway", ("listeners", 0, "port"), 0, "less than the minimum"),
        ("HTTPRoute", ("rules", 0, "timeouts"), {"request": "5 min"}, "does not match"),
        ("DestinationRule", ("trafficPolicy", "tls", "mode"), "TLS", "is not one of"),
        ("DestinationRule", ("trafficPolicy", "outlierDetections"), {}, "outlierDetections"),
        ("HealthCheckPolicy", (*CHECK, "portSpecification"), None, "portSpecification"),
        ("HealthCheckPolicy", (*CHECK, "port"), None, "not valid under any"),
        ("GCPBackendPolicy", ("default", "timeoutSec"), "300", "is not of type 'integer'"),
        ("EnvoyExtensionPolicy", (*EXT_PROC, "messageTimeout"), 10, "is not of type 'string'"),
        ("EnvoyExtensionPolicy", (*EXT_PROC, "backendRefs", 0, "port"), None, "'port' is a req"),
        ("BackendTrafficPolicy", ("loadBalancer", "type"), "LeastRequests", "is not one of"),
        ("ClientTrafficPolicy", ("targetRefs", 0, "kind"), "HTTPRoute", "is not one of"),
    ],
)
def test_a_wrong_object_would_be_found(kind, path, value, told):
    """The checks above can fail, for each kind."""
    assert any(told in fault for fault in faults(changed(kind, path, value)))


def test_what_is_said_of_definitions_is_used():
    """A kind that nothing of ours is any more leaves the file; each names where its facts are from."""
    used = {(at.get("apiVersion"), at["kind"]) for at in everything() if "kind" in at}
    assert set(FIELDS) <= used
    assert all(told["source"].endswith(".yaml") for told in FIELDS.values())
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert "gateway_fields.yaml" in page
