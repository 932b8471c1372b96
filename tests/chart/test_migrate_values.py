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
  tracing: {enabled: true, otelExporterEndpoint: "http://otel:4317", sampling: {samplerArg: "0.5"}}
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
    """The pool, its ports and its name; two replicas serve both, and share what they know."""
    documents = installed(GATEWAY)
    pool = one(documents, "InferencePool")
    assert pool["metadata"]["name"] == RELEASE
    assert pool["spec"]["selector"]["matchLabels"] == {"app": "vllm-llama"}
    assert pool["spec"]["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert pool["spec"]["appProtocol"] == "kubernetes.io/h2c"
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    assert one(documents, "Deployment")["spec"]["replicas"] == 2
    arguments = picker(documents)["args"]
    assert "--ha-enable-leader-election=true" not in arguments
    assert "--peer-service=inference-homing-peers" in arguments
    assert "--request-body-max-bytes=67108864" in arguments
    assert "--v=4" in arguments
    assert "--secure-serving=false" in arguments
    assert "--tracing=true" in arguments
    told = {each["name"]: each.get("value") for each in picker(documents)["env"]}
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel:4317"
    assert told["OTEL_TRACES_SAMPLER_ARG"] == "0.5"
    monitor = one(documents, "ServiceMonitor")
    assert monitor["spec"]["endpoints"][0]["interval"] == "20s"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert one(documents, "InferenceObjective")["spec"]["priority"] == -1
    config = yaml.safe_load(one(documents, "ConfigMap")["data"]["config.yaml"])
    assert config["schedulingProfiles"][0]["plugins"][0]["weight"] == 7


@pytest.mark.parametrize(
    ("flags", "elected"),
    [
        ("{ha-enable-leader-election: true}", True),
        ("{ha-enable-leader-election: 'false'}", False),
    ],
)
def test_a_leader_is_elected_where_a_flag_says_so(installed, flags, elected):
    """And the others stand by warm."""
    text = (
        f"router: {{epp: {{replicas: 3, flags: {flags}}}, modelServers: {{matchLabels: {{a: b}}}}}}"
    )
    arguments = picker(installed(text))["args"]
    assert ("--ha-enable-leader-election=true" in arguments) == elected
    assert "--peer-service=inference-homing-peers" in arguments


def test_a_pool_that_is_not_created_means_pods_by_label(installed):
    """As there: `--endpoint-selector`; the proxy becomes standalone mode."""
    documents = installed(STANDALONE)
    assert "InferencePool" not in {document["kind"] for document in documents}
    assert "--endpoint-selector=app=vllm" in picker(documents)["args"]
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    names = [c["name"] for c in (*pod["containers"], *pod["initContainers"])]
    assert names == ["epp", "envoy-config", "envoy"]
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
        "router.epp.replicas",
        "router.epp.pluginsCustomConfig.unused.yaml",
        "router.epp.resources.requests.cpu",
        "router.inferencePool.failureMode",
        "router.modelServers.type",
        "router.monitoring.prometheus.auth.enabled",
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


def with_configuration(text, flags="{}"):
    return yaml.safe_dump(
        {
            "router": {
                "epp": {
                    "pluginsConfigFile": "a.yaml",
                    "pluginsCustomConfig": {"a.yaml": text},
                    "flags": yaml.safe_load(flags),
                }
            }
        }
    )


MISSPELT = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: queu-scorer
- type: request-attribute-reporter
"""


def test_a_configuration_that_would_not_start_is_not_written():
    """Exit code 1 and no output; the sentences are those of `epp check-config`, all of them."""
    done = run(with_configuration(MISSPELT))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        (
            "migrate-values: config: plugins[0] (queu-scorer): type queu-scorer is unknown, "
            "did you mean `queue-scorer`?"
        ),
        (
            "migrate-values: config: plugins[1] (request-attribute-reporter): type "
            "request-attribute-reporter is not supported: nothing is computed from usage: use "
            "--parse-response-usage"
        ),
        "migrate-values: the picker would not start, so nothing is written",
    ]


def test_flags_that_would_not_start_are_not_written():
    """An unknown flag ends the picker at once, as does a value that it cannot read."""
    valid = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]"
    done = run(with_configuration(valid, "{refresh-metrics-intervall: 50ms}"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "flags: unknown flag '--refresh-metrics-intervall', did you mean" in done.stderr
    assert run(with_configuration(valid, "{refresh-metrics-interval: soon}")).returncode == 1
    done = run(with_configuration(valid, "{refresh-metrics-interval: 50ms, enable-pprof: true}"))
    assert done.returncode == 0
    assert "migrate-values: --enable-pprof has no effect: Go's profiler does not" in done.stderr


def test_what_the_picker_would_warn_of_is_said():
    """And written all the same."""
    old = "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\n"
    done = run(with_configuration(old + "plugins: [{type: queue-scorer}]"))
    assert done.returncode == 0
    assert "migrate-values: warning: config: apiVersion inference.networking" in done.stderr


def test_it_works_from_anywhere_and_says_where_it_could_not_check(tmp_path):
    """A copy of the script alone, or a Python without msgspec: converted, and one sentence."""
    copy = tmp_path / "tools" / "migrate-values"
    copy.parent.mkdir()
    copy.write_bytes(SCRIPT.read_bytes())
    (tmp_path / "msgspec.py").write_text("raise ImportError('no msgspec here')")
    for script in (SCRIPT, copy):
        done = subprocess.run(
            [sys.executable, script],
            check=False,
            input=with_configuration(MISSPELT),
            capture_output=True,
            text=True,
            timeout=20,
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0
        assert yaml.safe_load(done.stdout)["config"]["plugins"][0] == {"type": "queu-scorer"}
        (line,) = [line for line in done.stderr.splitlines() if "not checked" in line]
        assert line == "migrate-values: config and flags were not checked: no msgspec here"
    assert run(with_configuration(MISSPELT)).returncode == 1


def test_without_pyyaml_it_says_so_in_a_sentence_and_writes_nothing():
    """A Python of its own, as a machine has that never saw this project."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", SCRIPT],
        check=False,
        input=STANDALONE,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("migrate-values: this Python has no PyYAML, nothing is written")
    assert done.stderr.count("\n") == 1


def test_a_file_is_read_too(tmp_path):
    """And exit code 2 where it cannot be, or where the command line makes no sense."""
    file = tmp_path / "values.yaml"
    file.write_text(STANDALONE, encoding="utf-8")
    assert run("", str(file)).stdout == run(STANDALONE).stdout
    assert run("", str(tmp_path / "none.yaml")).returncode == 2
    assert run("", "--force").returncode == 2
    assert SCRIPT.stat().st_mode & 0o111
