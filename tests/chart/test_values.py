"""What the chart refuses, and how it says so."""

import json

import pytest
import yaml

from epp.flags.row import flags_of
from epp.flags.serve import ServeFlags
from tests.chart.rendering import CHART, VALUES, refusal
from tests.chart.values_table import page

BASE = ("--set", "image.repository=r.example.com/homing", "--set", "pool.name=vllm")
EMPTY = "--set-json"
TOLD = 'config={"plugins": [{"type": "precise-prefix-cache-producer"}]}'

GATED = 'config={"featureGates": ["flowControl=false"], "plugins": []}'


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("pool.failureMode=FailClosed", "FailClose"),
        ("pool.failurMode=FailOpen", "failurMode"),
        ("replica=2", "replica"),
        ("image.repo=x", "repo"),
        ("standalone.image.digst=x", "digst"),
        ("pool.targetPorts[0].number=70000", "want 65,535"),
        ("pool.targetPorts[0].name=http", "name"),
        ("pool.appProtocol=grpc", "kubernetes.io/h2c"),
        ("provider.name=aws", "provider"),
        ("logFormat=text", "console"),
        ("serviceMonitor.enabled=maybe", "auto"),
        ("flags.grpc-port=1", "use the key extProcPort"),
        ("flags.client-ca-file=/ca.crt", "use the key tls.clientCASecretName"),
        ("flags.last-good-dir=/x", "use the key lastGood.enabled"),
        ("flags.pool-name=x", "use the key pool.name"),
        ("flags.replicas=2", "use the key replicas"),
        ("flags.lease-name=x", "use the key leaderElection.enabled"),
        ("flags.envoy-admin-port=1", "use the key standalone.enabled"),
        ("standalone.drainSeconds=30", "drainSeconds"),
        ("autoscaling.targetCPU=70%", "targetCPU"),
        ("autoscaling.targetCPUUtilizationPercentage=70", "targetCPUUtilizationPercentage"),
        ("flags.peers=a:1", "the chart sets --peer-service"),
        ("flags.peer-secret-file=/x", "use the key peers.secretName"),
        ("flags.peer-url=valkey://a", "use the key peers.url"),
        ("flags.snapshot-dir=/x", "use the key snapshot.enabled"),
        ("flags.capture-share=0.5", "use the key capture.share"),
        ("capture.share=0", "share"),
        ("capture.maxSize=big", "maxSize"),
        ("flags.decisions-dir=/tmp", "use the key decisions.enabled"),
        ("decisions.maxSize=big", "maxSize"),
        ("decisions.maxAge=2d", "maxAge"),
        ("tokens.rendererUrl=renderer:8000", "rendererUrl"),
        ("tokens.rendererTo=x", "rendererTo"),
        ("flowControl.maxRequests=-1", "minimum"),
        ("flowControl.maxBytes=much", "maxBytes"),
        ("flowControl.defaultRequestTTL=60", "defaultRequestTTL"),
        ("flowControl.requestTTL=60s", "requestTTL"),
        ("flowControl.fairnessPolicy=fair", "token-fairness-policy"),
        ("kvEvents.socketPort=0", "minimum"),
        ("kvEvents.listenPort=zmq", "listenPort"),
        ("peers.enabled=maybe", "auto"),
        ("peers.port=0", "minimum"),
        ("peers.url=http://a", "peers"),
        ("peers.url=valkey://user:word@a", "peers"),
        ("peers.secret=word", "secret"),
        ("flags.metrics-bind-address=x", "use the key bindAddresses.metrics"),
        ("flags.debug-token-file=x", "use the key debugToken.secretName"),
        ("bindAddresses.metrics=localhost", "bindAddresses"),
        ("debugToken.key=", "debugToken"),
        ("standalone.requestBodyMode=SOME", "FULL_DUPLEX_STREAMED"),
        ("standalone.responseBodyMode=BUFFERED", "FULL_DUPLEX_STREAMED"),
        ("image.digest=sha256:12", "sha256"),
        ("router.epp.replicas=2", "deploy/migrate-values"),
        ("router.modelServers.matchLabels.app=x", "deploy/migrate-values"),
        ("inferencePool.targetPortNumber=8000", "charts/homing/README.md"),
        ("inferenceExtension.replicas=1", "charts/homing/README.md"),
    ],
)
def test_the_schema_refuses_by_name(any_helm, change, expected):
    """Misspelt keys, wrong values and the keys of other charts."""
    message = refusal(any_helm, *BASE, "--set", change)
    assert "schema" in message
    assert expected in message


def test_the_schema_refuses_what_rows_say_another_key_sets():
    """Each flag of `epp serve`, no more and no less."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    refused = {
        name: {"const": f"unset: {flag.row.refusal_of_chart}"}
        for name, flag in flags_of(ServeFlags).items()
        if flag.row.refusal_of_chart
    }
    assert schema["properties"]["flags"]["properties"] == refused


def test_nine_ports_are_too_many(any_helm):
    ports = json.dumps([{"number": 8000 + index} for index in range(9)])
    assert "targetPorts" in refusal(any_helm, *BASE, EMPTY, f"pool.targetPorts={ports}")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--set", "pool.name=vllm"), "image.repository is not set: name the image"),
        (("--set", "image.repository=r"), "there is nothing to serve: set pool.name"),
        ((*BASE, "--set", "pool.create=true"), "pool.create is true: name the labels"),
        ((*BASE, "--set", "pool.matchLabels.app=x"), "pool.matchLabels is set, but pool.name"),
        (
            (*BASE, "--set", "autoscaling.enabled=true,leaderElection.enabled=true"),
            "only the leader serves",
        ),
        (
            (*BASE, "--set", "tls.enabled=false,tls.clientCASecretName=a"),
            "tls.clientCASecretName is set and tls.enabled is false",
        ),
        (
            (*BASE, "--set", "standalone.enabled=true,tls.clientCASecretName=a"),
            "the picker either requires a certificate of Envoy or not",
        ),
        (
            (*BASE, "--set", "pool.name=,pool.matchLabels.a=b,httpRoute.create=true"),
            "the route needs an InferencePool",
        ),
        (
            (*BASE, "--set", "kvEvents.enabled=true", "--set-json", TOLD),
            "kvEvents.enabled is true and config has a precise-prefix-cache-producer, expected only one of them",
        ),
        (
            (*BASE, "--set", "flowControl.enabled=true,existingConfigMap=mine"),
            "existingConfigMap is set: the chart does not change that ConfigMap",
        ),
        (
            (*BASE, "--set", "flowControl.enabled=true", "--set-json", GATED),
            "config.featureGates has flowControl, expected only one of them",
        ),
        (
            (*BASE, "--set", "flowControl.enabled=true,config.flowControl.maxRequests=3"),
            "config has a section flowControl: set flowControl.enabled to false",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(any_helm, arguments, sentence):
    """It says what to set."""
    message = refusal(any_helm, *arguments)
    assert sentence in message


def test_the_schema_knows_every_value():
    """Each default has its key in the schema, and each own object of the schema is closed."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    def compare(value, part, where):
        if not isinstance(value, dict) or "properties" not in part:
            return
        assert part["additionalProperties"] is False, where
        assert set(value) <= set(part["properties"]), where
        for key, below in value.items():
            compare(below, part["properties"][key], f"{where}.{key}")

    compare(values, schema, "")
    foreign = {"router", "inferenceExtension", "inferencePool", "global"}
    assert set(schema["properties"]) - foreign == set(values)


def test_files_of_values_together_set_every_switch():
    """What no file of values touches is not tested: each top-level key is in one."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    used = set()
    for path in VALUES:
        used |= set(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert set(values) - used == {"extraContainers", "nameOverride", "securityContext"}


def test_the_readme_is_made_of_the_values():
    """`python -m tests.chart.values_table` writes it anew."""
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert readme == page(readme)
