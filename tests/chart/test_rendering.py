"""What the chart renders for many files of values, with both Helms, against golden outputs.

`UPDATE_GOLDEN=1` writes them anew.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from epp import __version__
from epp.configuration import flags
from epp.configuration.build import plugin_tables
from epp.configuration.config import DEFAULT_CONFIG, load_config
from tests.chart.rendering import (
    CHART,
    NAMED_SECRETS,
    VALUES,
    helm,
    objects,
    one,
    picker,
    rendered,
)

GOLDEN = Path(__file__).parent / "golden"

PATCH = (
    "kubectl patch inferencepools.inference.networking.k8s.io vllm-llama -n models --type merge "
    """-p '{"spec":{"endpointPickerRef":{"group":"","kind":"Service","name":"inference-homing","""
    """"port":{"number":9002},"failureMode":"FailOpen"}}}'"""
)

each = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)


@each
def test_helm_4_renders_the_golden_output(helm_4, values):
    """Byte for byte, twice the same."""
    text = rendered(helm_4, values)
    golden = GOLDEN / values.name
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert text == rendered.__wrapped__(helm_4, values)


@each
def test_helm_3_renders_the_same_objects(helm_3, values):
    golden = (GOLDEN / values.name).read_text(encoding="utf-8")
    assert objects(rendered(helm_3, values)) == objects(golden)


def test_every_golden_output_has_its_values():
    assert [path.name for path in sorted(GOLDEN.glob("*"))] == [path.name for path in VALUES]
    assert len(VALUES) >= 20


@pytest.mark.parametrize(
    ("version", "values"),
    [("helm_3", VALUES[0]), *(("helm_4", values) for values in VALUES)],
    ids=lambda given: given if isinstance(given, str) else given.stem,
)
def test_lint_finds_nothing(request, version, values):
    """Not even a warning."""
    done = helm(request.getfixturevalue(version), "lint", "--strict", "--values", values, CHART)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


def test_the_chart_is_in_step_with_the_image():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == chart["version"] == __version__


@each
def test_the_picker_takes_its_flags(helm_4, values):
    """Every flag is known, has a value that is taken, and does something."""
    container = picker(objects(rendered(helm_4, values)))
    command, *arguments = container["args"]
    assert command == "serve"
    told = flags.parse_serve(arguments, {"NAMESPACE": "models", "POD_NAME": "inference-homing-0"})
    assert told.warnings == ()
    assert told.pool_namespace == told.own_namespace == "models"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert told.grpc_port == ports["grpc-ext-proc"]
    assert told.grpc_health_port == ports["grpc-health"]
    assert told.metrics_port == ports["http-metrics"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == told.grpc_health_port


@each
def test_the_mounted_configuration_is_the_file_that_is_read(helm_4, values):
    """A directory, never a subPath; the ConfigMap that is watched is the one that is mounted."""
    documents = objects(rendered(helm_4, values))
    container = picker(documents)
    told = flags.parse_serve(container["args"][1:], {})
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "config")
    assert "subPath" not in mount
    assert Path(told.config_file).parent == Path(mount["mountPath"])
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    (volume,) = (v for v in pod["volumes"] if v["name"] == "config")
    if told.config_map:
        assert told.config_map == volume["configMap"]["name"]
        assert told.config_map_key == Path(told.config_file).name
    for document in documents:
        if document["kind"] == "ConfigMap" and document["metadata"]["name"] == told.config_map:
            assert "immutable" not in document
            text = document["data"][Path(told.config_file).name]
            assert load_config(text, values.name, plugin_tables()).warnings == ()


def test_the_debug_token_is_mounted_where_it_is_read(helm_4):
    """As a directory, so that a changed Secret arrives; what is bound is bound as told."""
    documents = objects(rendered(helm_4, values_named("guarded")))
    container = picker(documents)
    told = flags.parse_serve(container["args"][1:], {})
    addresses = told.grpc_bind_address, told.grpc_health_bind_address, told.metrics_bind_address
    assert addresses == ("127.0.0.1", "::", "::")
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "debug-token")
    assert "subPath" not in mount
    assert Path(told.debug_token_file) == Path(mount["mountPath"]) / "bearer"
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    (volume,) = (v for v in pod["volumes"] if v["name"] == "debug-token")
    assert volume["secret"] == {"secretName": "debug-pages"}


@each
def test_a_changed_configuration_does_not_restart_the_picker(helm_4, values):
    """No checksum of the ConfigMap on the pod."""
    template = one(objects(rendered(helm_4, values)), "Deployment")["spec"]["template"]
    assert not [key for key in template["metadata"].get("annotations", {}) if "checksum" in key]


def test_the_default_configuration_is_the_built_in_one():
    """Spelt out, so that it can be edited where it is."""
    text = (CHART / "files/default-config.yaml").read_text(encoding="utf-8")
    assert text == DEFAULT_CONFIG


@each
def test_the_pod_is_given_the_time_that_its_drain_takes(helm_4, values):
    documents = objects(rendered(helm_4, values))
    told = flags.parse_serve(picker(documents)["args"][1:], {})
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    goodbye_s = 10
    assert pod["terminationGracePeriodSeconds"] >= told.drain_grace + told.drain_timeout + goodbye_s
    for container in pod["containers"]:
        if container["name"] == "envoy":
            # Envoy takes requests for as long as it sleeps.
            assert container["lifecycle"]["preStop"]["sleep"]["seconds"] <= told.drain_grace


def values_named(name):
    (found,) = (path for path in VALUES if path.stem == name)
    return found


def test_a_monitor_that_is_left_to_the_cluster_follows_its_apis(helm_4):
    """`auto` renders where the API is known, `true` everywhere."""
    without = rendered(helm_4, values_named("monitored-by-pod"))
    apis = ("--api-versions", "monitoring.coreos.com/v1")
    with_api = rendered(helm_4, values_named("monitored-by-pod"), *apis)
    kinds = [{document["kind"] for document in objects(text)} for text in (without, with_api)]
    assert kinds[1] - kinds[0] == {"ServiceMonitor", "PrometheusRule"}
    assert {"PodMonitor", "PodMonitoring"} <= kinds[0]


def test_a_rollout_under_leader_election_does_not_wait_for_a_follower(helm_4):
    """A follower is never ready while the old leader lives: the rollout must go without it."""
    strategy = one(objects(rendered(helm_4, values_named("leader-election"))), "Deployment")
    assert strategy["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == "100%"


def test_only_replicas_that_all_serve_have_a_disruption_budget(helm_4):
    """Under leader election it would forbid the eviction of the leader for ever."""
    has = {
        path.stem: "kind: PodDisruptionBudget" in rendered(helm_4, path)
        for path in map(values_named, ("existing-pool", "two-replicas", "leader-election"))
    }
    assert has == {"existing-pool": False, "two-replicas": True, "leader-election": False}


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        (
            "existing-pool",
            [
                PATCH,
                "within about 2 seconds",
                "up to 90 seconds",
            ],
        ),
        ("no-config-map-watch", ["up to 90 seconds", "it would be 2 seconds"]),
        ("created-pool", ["WARNING: pool.failureMode is FailClose and there is one replica"]),
        ("standalone", ["port-forward -n models service/inference-homing-envoy 8081:8081"]),
        (
            "guarded",
            [
                "kubectl get secret -n models debug-pages -o 'go-template={{index .data ",
                '-H "Authorization: Bearer $HOMING_DEBUG_TOKEN" http://127.0.0.1:9090/debug/config',
                "epp top and epp explain take the token from HOMING_DEBUG_TOKEN too",
            ],
        ),
        (
            "two-replicas",
            [
                "The 2 replicas tell each other which pod holds which prefix, where sessions went",
                "All of them serve.",
                "They do not share metrics, debug pages, the keys of session tokens",
                "http://127.0.0.1:9090/metrics | grep homing_peer",
            ],
        ),
        ("autoscaled", ["All replicas tell each other which pod", "All of them serve."]),
        ("warm-standby", ["Only the leader serves; another takes over knowing what it knew."]),
        ("valkey", ["The 12 replicas tell each other, through Valkey, which pod"]),
        (
            "leader-election",
            ["WARNING: peers.enabled is false", "the leader's successor starts cold"],
        ),
    ],
)
def test_notes_say_what_to_type_next(any_helm, tmp_path, name, sentences):
    text = notes_of(any_helm, tmp_path, name)
    for sentence in sentences:
        assert sentence in text


@pytest.mark.parametrize("name", ["existing-pool", "guarded", "other-ports"])
def test_notes_ask_a_picker_from_inside(helm_4, tmp_path, name):
    """No shell, which the image may lack: `epp` itself, of its container, with what is mounted."""
    text = notes_of(helm_4, tmp_path, name)
    documents = objects(rendered(helm_4, values_named(name)))
    container = picker(documents)
    served = flags.parse_serve(container["args"][1:], {})
    asked = re.findall(
        r"^  kubectl exec (.+) -c (\S+) -- epp (\S+)(?: -)?(?= |$)([^<\n]*)", text, re.MULTILINE
    )
    assert [command for _, _, command, _ in asked] == ["top", "explain", "check-config"]
    deployment = one(documents, "Deployment")["metadata"]["name"]
    for where, named, command, rest in asked:
        assert f"-n models deployment/{deployment}" in where
        assert named == container["name"]
        parse = {"top": flags.parse_top, "explain": flags.parse_explain}.get(command)
        if parse is None:
            assert flags.parse_check(["-", *rest.split()]).diff == served.config_file
        else:
            told = parse(rest.split())
            url = f"http://127.0.0.1:{served.metrics_port}"
            assert told.url == (url,)
            assert told.token_file == ""
    # In the container they find the token themselves.
    told_by = {each["name"]: each.get("value") for each in container["env"]}
    assert told_by.get("HOMING_DEBUG_TOKEN_FILE", "") == served.debug_token_file


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        ("two-replicas", ("peers.secretName=",), "each rendering would make another"),
        ("two-replicas", ("peers.enabled=false",), "each knows only what it decided itself"),
        ("valkey", ("networkPolicy.extraEgress=null",), "no replica reaches it, and each is alone"),
    ],
)
def test_notes_warn_of_replicas_that_would_be_alone(any_helm, tmp_path, name, more, sentence):
    """Where it is so, and not otherwise."""
    assert sentence not in notes_of(any_helm, tmp_path / "as-is", name)
    assert sentence in notes_of(any_helm, tmp_path / "changed", name, "--set", *more)


@pytest.mark.parametrize("name", ["existing-pool", "standalone", "guarded"])
def test_notes_of_one_replica_say_nothing_of_several(helm_4, tmp_path, name):
    assert "replicas tell each other" not in notes_of(helm_4, tmp_path, name)


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ((), False),
        (("--set", "sessionTokens.secretName="), True),
        (("--set", "sessionTokens.secretName=,replicas=1"), False),
        (("--set", "sessionTokens.secretName=,replicas=1,autoscaling.enabled=true"), True),
    ],
)
def test_notes_warn_of_replicas_that_do_not_read_each_others_session_tokens(
    helm_4, tmp_path, more, warned
):
    """With a configuration that gives tokens and without a Secret."""
    text = notes_of(helm_4, tmp_path, "session-tokens", *more)
    assert ("no replica reads the session tokens of another" in text) is warned


def test_the_session_token_keys_are_read_where_they_are_mounted(helm_4):
    """A directory, never a subPath, so that other keys arrive without a restart."""
    documents = objects(rendered(helm_4, values_named("session-tokens")))
    container = picker(documents)
    told = flags.parse_serve(container["args"][1:], {})
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "session-tokens")
    assert "subPath" not in mount
    assert Path(told.session_token_key_file).parent == Path(mount["mountPath"])
    assert told.accept_unsigned_session_tokens
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    (volume,) = (v for v in pod["volumes"] if v["name"] == "session-tokens")
    assert volume["secret"] == {"secretName": "session-token-keys"}


def notes_of(binary, tmp_path, name, *more):
    """Helm prints them with a cluster only; so they are rendered as an object of a copy."""
    chart = tmp_path / "homing"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates/NOTES.txt").read_text(encoding="utf-8")
    shown = 'apiVersion: v1\nkind: Notes\nnotes: {{ include "notes" . | toJson }}\n'
    template = f'{{{{- define "notes" -}}}}{notes}{{{{- end -}}}}\n{shown}'
    (chart / "templates/notes.yaml").write_text(template, encoding="utf-8")
    done = helm(
        *(binary, "template", "inference", chart, "--namespace", "models"),
        *("--values", NAMED_SECRETS, "--values", values_named(name)),
        *("--show-only", "templates/notes.yaml", *more),
    )
    assert done.returncode == 0, done.stderr
    return one(objects(done.stdout), "Notes")["notes"]
