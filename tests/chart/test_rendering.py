"""What the chart renders for many files of values, with both Helms, against golden outputs.

`python -m tests.chart.golden_texts` writes them anew.
"""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from epp import __version__
from epp.configuration.build import plugin_tables
from epp.configuration.config import DEFAULT_CONFIG, load_config
from epp.core.flow.settings import Fairness
from epp.flags import command_lines
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.chart.golden_texts import FOLDER, NAMES, file_of, golden_text
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
    assert text == golden_text(values.stem)
    assert text == rendered.__wrapped__(helm_4, values)


@each
def test_helm_3_renders_the_same_objects(helm_3, values):
    assert objects(rendered(helm_3, values)) == objects(golden_text(values.stem))


def test_every_golden_output_has_its_values():
    assert {*FOLDER.iterdir()} == {file_of(name) for name in NAMES}
    assert len(NAMES) >= 20


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
    told = command_lines.parse_serve(
        arguments, {"NAMESPACE": "models", "POD_NAME": "inference-homing-0"}
    )
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
    told = command_lines.parse_serve(container["args"][1:], {})
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
            warnings = load_config(text, values.name, plugin_tables()).warnings
            # Nothing but an index that hears engines reads the ids that a renderer finds out.
            unread = [
                one
                for one in warnings
                if "no plugin that takes part in decisions reads token ids" in one
            ]
            assert list(warnings) == unread
            given = yaml.safe_load(values.read_text())
            assert len(unread) == ("tokens" in given and "kvEvents" not in given)


def test_the_debug_token_is_mounted_where_it_is_read(helm_4):
    """As a directory, so that a changed Secret arrives; what is bound is bound as told."""
    documents = objects(rendered(helm_4, values_named("guarded")))
    container = picker(documents)
    told = command_lines.parse_serve(container["args"][1:], {})
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
    told = command_lines.parse_serve(picker(documents)["args"][1:], {})
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    goodbye_s = 10
    assert pod["terminationGracePeriodSeconds"] >= told.drain_timeout + goodbye_s
    # A stream of a minute that is opened while gateways learn of it.
    assert told.drain_timeout >= told.drain_grace + 60
    # A sidecar ends after the picker, which finds its admin interface where the bootstrap has it.
    envoy = [found for found in pod.get("initContainers", ()) if found["name"] == "envoy"]
    assert [found["restartPolicy"] for found in envoy] == ["Always"] * len(envoy)
    admin_port = BootstrapOptions().admin_port if envoy else None
    assert told.envoy_admin_port == admin_port


def test_an_envoy_asks_the_other_pickers_where_they_can_be_reached(helm_4):
    """By the Service that leads to each; a picker on loopback is its own Envoy's alone."""
    second = {}
    for address in ("", "127.0.0.1"):
        more = ("--set", f"bindAddresses.extProc={address}")
        documents = objects(rendered(helm_4, values_named("standalone"), *more))
        pod = one(documents, "Deployment")["spec"]["template"]["spec"]
        told = command_lines.parse_envoy(pod["initContainers"][0]["args"][1:])
        second[address] = told.second_picker_address
        headless = [at for at in documents if at.get("spec", {}).get("clusterIP") == "None"]
        assert len(headless) == bool(told.second_picker_address)
        for service in headless:
            (port,) = service["spec"]["ports"]
            assert told.second_picker_address == f"{service['metadata']['name']}:{port['port']}"
    assert second == {"": "inference-homing-headless:9002", "127.0.0.1": ""}


def test_the_pool_points_at_the_service_that_its_gateway_needs(helm_4):
    """And so do the notes, where the pool is not the chart's."""
    documents = objects(rendered(helm_4, values_named("headless")))
    name = one(documents, "InferencePool")["spec"]["endpointPickerRef"]["name"]
    (service,) = (
        at for at in documents if at["kind"] == "Service" and at["metadata"]["name"] == name
    )
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"]
    assert one(documents, "DestinationRule")["spec"]["host"].split(".")[0] == name


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


def test_a_rollout_takes_no_replica_before_another_is_there(helm_4):
    """Standbys are ready too, so that it ends under leader election."""
    for name in ("two-replicas", "leader-election"):
        deployment = one(objects(rendered(helm_4, values_named(name))), "Deployment")
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {
            "maxUnavailable": 0,
            "maxSurge": 1,
        }


def test_several_replicas_have_a_disruption_budget(helm_4):
    """Also where one of them leads; one alone could never be evicted."""
    has = {
        path.stem: "kind: PodDisruptionBudget" in rendered(helm_4, path)
        for path in map(values_named, ("existing-pool", "two-replicas", "leader-election"))
    }
    assert has == {"existing-pool": False, "two-replicas": True, "leader-election": True}


def test_the_lease_goes_with_the_release(helm_4):
    """It is one of its objects, by the name that replicas are told; nothing of it is rendered that
    they write."""
    for name in ("leader-election", "leader-election-without-pool", "warm-standby"):
        documents = objects(rendered(helm_4, values_named(name)))
        lease = one(documents, "Lease")
        told = command_lines.parse_serve(picker(documents)["args"][1:], {"NAMESPACE": "models"})
        assert told.lease_name == lease["metadata"]["name"]
        assert told.own_namespace == lease["metadata"]["namespace"]
        assert set(lease) == {"apiVersion", "kind", "metadata"}


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        (
            "existing-pool",
            [
                PATCH,
                "serves open streams to the end, and exits as soon as nothing is open",
                "within about 2 seconds",
                "up to 90 seconds",
            ],
        ),
        ("no-config-map-watch", ["up to 90 seconds", "shortens this to 2 seconds"]),
        ("created-pool", ["WARNING: pool.failureMode is FailClose and there is one replica"]),
        (
            "standalone",
            [
                "port-forward -n models service/inference-homing-envoy 8081:8081",
                "serves the open requests of its Envoy to the end",
            ],
        ),
        (
            "guarded",
            [
                "kubectl get secret -n models debug-pages -o 'go-template={{index .data ",
                '-H "Authorization: Bearer $HOMING_DEBUG_TOKEN" http://127.0.0.1:9090/debug/config',
                "epp top and epp explain also read the token from HOMING_DEBUG_TOKEN",
            ],
        ),
        (
            "two-replicas",
            [
                "The 2 replicas share which pod caches which prefix, where sessions went",
                "All of them serve requests.",
                "They do not share metrics, debug pages, the keys of session tokens",
                "http://127.0.0.1:9090/metrics | grep homing_peer",
            ],
        ),
        ("autoscaled", ["All replicas share which pod", "All of them serve requests."]),
        ("warm-standby", ["All replicas are ready and one leads, the holder of the Lease"]),
        ("headless", ["after 300 s at the latest", "All of them serve requests."]),
        ("valkey", ["The 12 replicas share, through Valkey, which pod"]),
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


def test_notes_warn_of_a_pod_that_is_killed_before_its_drain_is_over(helm_4, tmp_path):
    told = "the kubelet kills the picker before its drain ends"
    assert told not in notes_of(helm_4, tmp_path / "as-is", "existing-pool")
    shorter = ("--set", "terminationGracePeriodSeconds=60")
    assert told in notes_of(helm_4, tmp_path / "changed", "existing-pool", *shorter)


@pytest.mark.parametrize("name", ["existing-pool", "guarded", "other-ports"])
def test_notes_ask_a_picker_from_inside(helm_4, tmp_path, name):
    """No shell, which the image may lack: `epp` itself, of its container, with what is mounted."""
    text = notes_of(helm_4, tmp_path, name)
    documents = objects(rendered(helm_4, values_named(name)))
    container = picker(documents)
    served = command_lines.parse_serve(container["args"][1:], {})
    asked = re.findall(
        r"^  kubectl exec (.+) -c (\S+) -- epp (\S+)(?: -)?(?= |$)([^<\n]*)", text, re.MULTILINE
    )
    assert [command for _, _, command, _ in asked] == ["top", "explain", "check-config"]
    deployment = one(documents, "Deployment")["metadata"]["name"]
    for where, named, command, rest in asked:
        assert f"-n models deployment/{deployment}" in where
        assert named == container["name"]
        parse = {"top": command_lines.parse_top, "explain": command_lines.parse_explain}.get(
            command
        )
        if parse is None:
            assert command_lines.parse_check(["-", *rest.split()]).diff == served.config_file
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
        (
            "two-replicas",
            ("peers.secretName=",),
            "Each rendering without a cluster would create another one; name a Secret of yours in peers",
        ),
        ("two-replicas", ("peers.enabled=false",), "each knows only its own decisions"),
        (
            "valkey",
            ("networkPolicy.extraEgress=null",),
            "no replica reaches it, and each works alone",
        ),
    ],
)
def test_notes_warn_of_replicas_that_would_be_alone(any_helm, tmp_path, name, more, sentence):
    """Where it is so, and not otherwise."""
    assert sentence not in notes_of(any_helm, tmp_path / "as-is", name)
    assert sentence in notes_of(any_helm, tmp_path / "changed", name, "--set", *more)


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        (
            "queue",
            "defaultRequestTTL=5m",
            "Envoy's default stream_idle_timeout ends them after 300 s",
        ),
        ("queue", "noEndpointRequestTTL=1h", "requests wait up to 3600 s"),
        (
            "queue",
            "maxRequests=1024",
            "flowControl.maxRequests is 1024, but Envoy's default circuit",
        ),
        ("queue", "maxRequests=0", "5,000 requests of each priority may wait, but Envoy's"),
        ("standalone", "enabled=true,defaultRequestTTL=60m", "Envoy ends a request after an hour"),
        ("gke", "enabled=true,defaultRequestTTL=600s", "ends them after provider.gke.timeoutSec"),
        ("gke", "enabled=true,maxRequests=2000", "WARNING: flowControl.maxRequests is 2000"),
        (
            "queue-with-istio",
            "maxRequests=10000",
            "http2MaxRequests of provider.istio.destinationRule.trafficPolicy is 10000, but 10000",
        ),
        (
            "queue-with-istio",
            "maxRequests=50000",
            "http2MaxRequests of provider.istio.destinationRule.trafficPolicy is 10000, but 50000",
        ),
    ],
)
def test_notes_warn_of_waits_that_the_gateway_would_end(helm_4, tmp_path, name, more, sentence):
    """Where it is so, and not otherwise."""
    changes = ",".join(f"flowControl.{change}" for change in more.split(","))
    assert sentence not in notes_of(helm_4, tmp_path / "as-is", name)
    assert sentence in notes_of(helm_4, tmp_path / "changed", name, "--set", changes)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("queue", ()),
        ("queue-with-istio", ()),
        ("standalone", ("--set", "flowControl.enabled=true,flowControl.maxRequests=5000")),
        ("standalone", ("--set", "flowControl.enabled=true,flowControl.defaultRequestTTL=10m")),
    ],
)
def test_notes_of_a_queue_that_the_gateway_allows_warn_of_nothing(helm_4, tmp_path, name, more):
    text = notes_of(helm_4, tmp_path, name, *more)
    assert "grep homing_flow" in text
    assert "WARNING" not in text


@pytest.mark.parametrize("name", ["queue", "queue-with-istio"])
def test_the_queue_of_the_values_is_that_of_the_configuration(helm_4, name):
    """The rest of the configuration is unchanged."""
    documents = objects(rendered(helm_4, values_named(name)))
    config = load_config(one(documents, "ConfigMap")["data"]["config.yaml"], "c", plugin_tables())
    given = yaml.safe_load(values_named(name).read_text())["flowControl"]
    flow = config.flow
    assert flow.requests_max == given.get("maxRequests", 1_000)
    assert flow.bytes_max == (256 * 2**20 if "maxBytes" in given else 0)
    assert flow.wait_s_max == (240.0 if "defaultRequestTTL" in given else 60.0)
    assert flow.empty_pool_wait_s_max == (120.0 if "noEndpointRequestTTL" in given else 240.0)
    assert flow.default_band.fairness is Fairness.TOKENS
    without = objects(rendered(helm_4, values_named(name), "--set", "flowControl.enabled=false"))
    told = yaml.safe_load(one(without, "ConfigMap")["data"]["config.yaml"])
    assert "flowControl" not in told.get("featureGates", [])
    assert "flowControl" not in told


@pytest.mark.parametrize("name", ["existing-pool", "standalone", "guarded"])
def test_notes_of_one_replica_say_nothing_of_several(helm_4, tmp_path, name):
    assert "replicas share" not in notes_of(helm_4, tmp_path, name)


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
    assert ("no replica can read the session tokens of another" in text) is warned


def test_the_session_token_keys_are_read_where_they_are_mounted(helm_4):
    """A directory, never a subPath, so that other keys arrive without a restart."""
    documents = objects(rendered(helm_4, values_named("session-tokens")))
    container = picker(documents)
    told = command_lines.parse_serve(container["args"][1:], {})
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
