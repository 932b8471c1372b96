"""`deploy/migrate-values`: values of the llm-d charts become values that our chart renders."""

import subprocess
import sys

import pytest
import yaml

from tests.chart.rendering import CHART, NAMESPACE, RELEASE, ROOT, helm, objects, one, picker

SCRIPT = ROOT / "deploy/migrate-values"

GATEWAY = """\
router:
  modelServers:
    matchLabels: {app: vllm-llama}
    type: vllm
    protocol: grpc
    targetPorts: [{number: 8000}, {number: 8001}]
  inferencePool: {failureMode: FailClosed}
  inferenceObjectives: [{name: batch, priority: -1}]
  metricsPort: 9191
  clusterDomain: example.internal
  epp:
    replicas: 2
    image: {registry: ghcr.io/llm-d, tag: main}
    resources: {requests: {cpu: 8}}
    flags: {v: "4", request-body-max-bytes: 67108864, secure-serving: "false"}
    env: [{name: GRPC_VERBOSITY, value: ERROR}]
    tolerations: [{key: dedicated, operator: Exists}]
    pluginsConfigFile: custom.yaml
    pluginsCustomConfig:
      custom.yaml: |
        # tuned
        apiVersion: llm-d.ai/v1alpha1
        kind: EndpointPickerConfig
        plugins:
        - type: prefix-cache-scorer
        - type: max-score-picker
        schedulingProfiles:
        - name: default
          plugins:
          - pluginRef: prefix-cache-scorer
            weight: 7
          - pluginRef: max-score-picker
      unused.yaml: "{}"
  monitoring:
    interval: 20s
    prometheus: {enabled: true, auth: {enabled: true}, extraLabels: {release: prometheus}}
  tracing: {enabled: true}
provider: {name: istio}
httpRoute: {create: true, baseModel: llama}
"""

STANDALONE = """\
router:
  modelServers: {matchLabels: {app: vllm}}
  inferencePool: {create: false}
  proxy: {enabled: true, failOpen: true, resources: {requests: {cpu: "2"}}}
  monitoring: {provider: {name: gmp}, prometheus: {enabled: true}}
"""


def run(text, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=20,
    )


def converted(text):
    done = run(text)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout), done.stderr.splitlines()


@pytest.fixture
def installed(helm_4, tmp_path):
    """What our chart makes of converted values."""

    def render(text):
        file = tmp_path / "values.yaml"
        values, _ = converted(text)
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        done = helm(
            *(helm_4, "template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", file),
            *("--set", "image.repository=registry.example.com/homing"),
        )
        assert done.returncode == 0, done.stderr
        return objects(done.stdout)

    return render


def test_values_keep_their_meaning(installed):
    """The pool, its ports and its name; two replicas elect a leader, as there."""
    documents = installed(GATEWAY)
    pool = one(documents, "InferencePool")
    assert pool["metadata"]["name"] == RELEASE
    assert pool["spec"]["selector"]["matchLabels"] == {"app": "vllm-llama"}
    assert pool["spec"]["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert pool["spec"]["appProtocol"] == "kubernetes.io/h2c"
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    assert one(documents, "Deployment")["spec"]["replicas"] == 2
    arguments = picker(documents)["args"]
    assert "--ha-enable-leader-election=true" in arguments
    assert "--request-body-max-bytes=67108864" in arguments
    assert "--v=4" in arguments
    assert "--secure-serving=false" in arguments
    monitor = one(documents, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["interval"] == "20s"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert one(documents, "InferenceObjective")["spec"]["priority"] == -1
    config = yaml.safe_load(one(documents, "ConfigMap")["data"]["config.yaml"])
    assert config["schedulingProfiles"][0]["plugins"][0]["weight"] == 7


def test_a_pool_that_is_not_created_means_pods_by_label(installed):
    """As there: `--endpoint-selector`; the proxy becomes standalone mode."""
    documents = installed(STANDALONE)
    assert "InferencePool" not in {document["kind"] for document in documents}
    assert "--endpoint-selector=app=vllm" in picker(documents)["args"]
    names = [
        c["name"] for c in one(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    ]
    assert names == ["epp", "envoy"]
    assert one(documents, "PodMonitoring")


def test_what_is_left_out_is_said():
    """One line a key, with the reason; nothing is dropped in silence."""
    _, lines = converted(GATEWAY)
    told = {line.removeprefix("migrate-values: ").partition(":")[0] for line in lines}
    assert told == {
        "image.repository",
        "httpRoute.baseModel",
        "router.epp.image.registry",
        "router.epp.image.tag",
        "router.epp.pluginsCustomConfig.unused.yaml",
        "router.epp.resources.requests.cpu",
        "router.inferencePool.failureMode",
        "router.modelServers.type",
        "router.monitoring.prometheus.auth.enabled",
        "router.tracing.enabled",
    }
    _, lines = converted("router: {modelServers: {matchLabels: {a: b}}, surprise: {deep: 1}}")
    assert "migrate-values: router.surprise.deep: unknown, left out" in lines


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pool: {name: x}", "the input has no key router"),
        ("router: [", "the input is not YAML"),
        ("router: {modelServers: {protocol: smtp}}", "protocol is 'smtp', expected http or grpc"),
        ("router: {epp: {pluginsCustomConfig: {a.yaml: x}}}", "without pluginsConfigFile"),
    ],
)
def test_what_is_no_such_file_is_refused(text, sentence):
    """Exit code 1, one sentence, no output."""
    done = run(text)
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr


def test_a_file_is_read_too(tmp_path):
    """And exit code 2 where it cannot be, or where the command line makes no sense."""
    file = tmp_path / "values.yaml"
    file.write_text(STANDALONE, encoding="utf-8")
    assert run("", str(file)).stdout == run(STANDALONE).stdout
    assert run("", str(tmp_path / "none.yaml")).returncode == 2
    assert run("", "--force").returncode == 2
    assert SCRIPT.stat().st_mode & 0o111
