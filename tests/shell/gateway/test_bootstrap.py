import itertools
import subprocess

import pytest
import yaml
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap

from epp.flags.values import BodyMode
from epp.shell.gateway.bootstrap import (
    CLIENT_HEADERS_REMOVED,
    DESTINATION_HEADER,
    BootstrapOptions,
    bootstrap,
    render,
)
from tests.envoy.rig import ENVOY

# Pairs, not the whole product: each value of each option meets each value of every other.
COMBINATIONS = [
    BootstrapOptions(
        request_body_mode=request_mode,
        response_body_mode=response_mode,
        plaintext=(row + column) % 2 == 0,
        fail_open=row % 2 == 0,
        readiness_port=19001 if column % 2 == 0 else None,
        picker_address=("127.0.0.1:9002", "[::1]:9002", "picker.inference.svc:9002")[
            (row + column) % 3
        ],
        second_picker_address="" if row % 2 == 0 else "homing-headless:9002",
    )
    for (row, request_mode), (column, response_mode) in itertools.product(
        enumerate(BodyMode), enumerate(BodyMode)
    )
]


def document(options):
    return yaml.safe_load(render(options))


def connection_manager(rendered):
    chain = rendered["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]


def by_name(filters):
    return {entry["name"].rpartition(".")[2]: entry["typed_config"] for entry in filters}


def http_filters(rendered):
    return by_name(connection_manager(rendered)["http_filters"])


def websocket_filters(rendered):
    (upgrade,) = connection_manager(rendered)["upgrade_configs"]
    assert upgrade["upgrade_type"] == "websocket"
    return by_name(upgrade["filters"])


def cluster(rendered, name):
    (found,) = (c for c in rendered["static_resources"]["clusters"] if c["name"] == name)
    return found


def options_id(options):
    spoken = [options.request_body_mode, options.response_body_mode, options.picker_address]
    spoken += [name for name in ("plaintext", "fail_open") if getattr(options, name)]
    return "-".join(spoken)


def assert_envoy_accepts(options, directory):
    path = directory / "envoy.yaml"
    path.write_text(render(options))
    run = subprocess.run(
        [ENVOY, "--mode", "validate", "--config-path", path, "--concurrency", "1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
class TestRealEnvoy:
    @pytest.mark.parametrize("options", COMBINATIONS, ids=options_id)
    def test_envoy_accepts_every_combination_of_options(self, options, tmp_path):
        """`envoy --mode validate` loads what is rendered."""
        assert_envoy_accepts(options, tmp_path)

    def test_envoy_accepts_the_round_robin_arm(self, tmp_path):
        """The comparison without a picker is a valid bootstrap too."""
        assert_envoy_accepts(
            BootstrapOptions(round_robin=("127.0.0.1:8000", "[::1]:8001")), tmp_path
        )


@pytest.mark.parametrize("options", COMBINATIONS[::6], ids=options_id)
def test_the_rendered_text_says_what_the_message_says(options):
    """Reading the YAML back gives the message that was built, unknown fields being an error."""
    assert Bootstrap.from_dict(document(options)) == bootstrap(options)


@pytest.mark.parametrize("filters_of", [http_filters, websocket_filters])
def test_clients_cannot_choose_a_destination(filters_of):
    """Every address header is removed, ORIGINAL_DST's first of all, before the picker is asked."""
    rendered = document(BootstrapOptions())
    filters = filters_of(rendered)
    assert list(filters) == ["header_mutation", "ext_proc", "router"]
    mutations = filters["header_mutation"]["mutations"]["request_mutations"]
    removed = {mutation["remove"] for mutation in mutations}
    assert removed == set(CLIENT_HEADERS_REMOVED)
    destination = cluster(rendered, "endpoints")["original_dst_lb_config"]["http_header_name"]
    assert destination == DESTINATION_HEADER
    assert destination in removed


@pytest.mark.parametrize("request_mode", BodyMode)
@pytest.mark.parametrize("response_mode", BodyMode)
def test_the_picker_sees_the_end_of_every_response(request_mode, response_mode):
    """Response headers and trailers are sent whatever the body modes; full duplex has trailers."""
    options = BootstrapOptions(request_body_mode=request_mode, response_body_mode=response_mode)
    mode = http_filters(document(options))["ext_proc"]["processing_mode"]
    assert mode["response_header_mode"] == mode["response_trailer_mode"] == "SEND"
    assert mode.get("request_body_mode", "NONE") == request_mode
    assert mode.get("response_body_mode", "NONE") == response_mode
    full_duplex = request_mode is BodyMode.FULL_DUPLEX_STREAMED
    assert mode["request_trailer_mode"] == ("SEND" if full_duplex else "SKIP")


@pytest.mark.parametrize("request_mode", BodyMode)
def test_an_upgraded_connection_waits_for_no_body(request_mode):
    """What follows a WebSocket handshake never ends, so the picker is shown headers only."""
    options = BootstrapOptions(
        request_body_mode=request_mode, response_body_mode=BodyMode.FULL_DUPLEX_STREAMED
    )
    picker = websocket_filters(document(options))["ext_proc"]
    assert "request_body_mode" not in picker["processing_mode"]
    assert "response_body_mode" not in picker["processing_mode"]


def test_metadata_passes_both_ways():
    """The picker gets the subset hint and may write the destination."""
    metadata = http_filters(document(BootstrapOptions()))["ext_proc"]["metadata_options"]
    assert "envoy.lb.subset_hint" in metadata["forwarding_namespaces"]["untyped"]
    assert metadata["receiving_namespaces"]["untyped"] == ["envoy.lb"]


@pytest.mark.parametrize(
    ("mode", "limit_bytes"), [(BodyMode.BUFFERED, 8_000_000), (BodyMode.STREAMED, 32_768)]
)
def test_a_buffered_body_has_room_up_to_the_body_limit(mode, limit_bytes):
    """Only where Envoy buffers the whole body does a connection get the whole limit."""
    options = BootstrapOptions(request_body_mode=mode, request_body_max_bytes=8_000_000)
    listener = document(options)["static_resources"]["listeners"][0]
    assert listener["per_connection_buffer_limit_bytes"] == limit_bytes


def test_a_dead_address_is_given_up_in_seconds():
    """Connecting takes at most 5 s to an endpoint and 1 s to the picker."""
    rendered = document(BootstrapOptions())
    assert cluster(rendered, "endpoints")["connect_timeout"] == "5s"
    assert cluster(rendered, "ext_proc")["connect_timeout"] == "1s"


def test_the_picker_is_reached_as_it_serves():
    """TLS whoever signed it, or h2c; its health is asked of the ext_proc service."""
    secure = cluster(document(BootstrapOptions()), "ext_proc")
    context = secure["transport_socket"]["typed_config"]["common_tls_context"]
    assert context["alpn_protocols"] == ["h2"]
    assert context["validation_context"] == {"trust_chain_verification": "ACCEPT_UNTRUSTED"}
    plain = cluster(document(BootstrapOptions(plaintext=True)), "ext_proc")
    assert "transport_socket" not in plain
    for found in (secure, plain):
        (check,) = found["health_checks"]
        service = check["grpc_health_check"]["service_name"]
        assert service == "envoy.service.ext_proc.v3.ExternalProcessor"
        (options,) = found["typed_extension_protocol_options"].values()
        assert "http2_protocol_options" in options["explicit_http_config"]


def picker_tls(**options):
    found = cluster(document(BootstrapOptions(**options)), "ext_proc")
    return found["transport_socket"]["typed_config"]


def test_a_certificate_is_shown_to_the_picker_where_there_is_one():
    """Chain and key from the directory, as Kubernetes mounts a Secret; otherwise none."""
    (shown,) = picker_tls(client_cert_path="/certs")["common_tls_context"]["tls_certificates"]
    assert shown == {
        "certificate_chain": {"filename": "/certs/tls.crt"},
        "private_key": {"filename": "/certs/tls.key"},
    }
    assert "tls_certificates" not in picker_tls()["common_tls_context"]


def test_the_pickers_certificate_is_verified_where_its_authority_is_given():
    """By the authority alone, or by its name too."""
    trust = picker_tls(picker_ca_file="/ca.crt")["common_tls_context"]["validation_context"]
    assert trust == {"trusted_ca": {"filename": "/ca.crt"}}
    named = picker_tls(picker_ca_file="/ca.crt", picker_server_name="picker.svc")
    assert named["sni"] == "picker.svc"
    (matcher,) = named["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    assert matcher == {"san_type": "DNS", "matcher": {"exact": "picker.svc"}}


def test_nothing_a_client_does_or_omits_is_kept_for_a_day():
    """Headers, request and silence have limits; a long answer has a day."""
    manager = connection_manager(document(BootstrapOptions()))
    assert manager["request_headers_timeout"] == "10s"
    assert manager["request_timeout"] == "300s"
    assert manager["stream_idle_timeout"] == "3600s"
    (host,) = manager["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    assert route["route"]["idle_timeout"] == "3600s"
    assert route["route"]["timeout"] == "86400s"


def test_a_client_that_resets_most_of_its_streams_loses_its_connection():
    """Envoy's limits of rapid resets are written down, in the layer that Envoy reads them from."""
    (layer,) = document(BootstrapOptions())["layered_runtime"]["layers"]
    assert layer["static_layer"] == {
        "overload.premature_reset_total_stream_count": 500,
        "overload.premature_reset_min_stream_lifetime_seconds": 1,
        "http.max_requests_per_io_cycle": 1,
    }


@pytest.mark.parametrize(
    ("address", "kind", "host"),
    [
        ("10.0.0.7:9002", "STATIC", "10.0.0.7"),
        ("[fd00::7]:9002", "STATIC", "fd00::7"),
        ("picker:9002", "STRICT_DNS", "picker"),
    ],
)
def test_an_address_is_fixed_and_a_name_is_resolved(address, kind, host):
    """The kind of the picker's cluster follows from its address."""
    found = cluster(document(BootstrapOptions(picker_address=address)), "ext_proc")
    assert found["type"] == kind
    endpoint = found["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert endpoint["address"]["socket_address"] == {"address": host, "port_value": 9002}


def test_replicas_of_the_picker_are_members_of_one_cluster():
    """Each is asked for its own health; the authority is that of the first."""
    found = document(BootstrapOptions(picker_address="10.0.0.7:9002, 10.0.0.8:9003"))
    members = cluster(found, "ext_proc")["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [
        (at["address"], at["port_value"])
        for at in (member["endpoint"]["address"]["socket_address"] for member in members)
    ] == [("10.0.0.7", 9002), ("10.0.0.8", 9003)]
    service = http_filters(found)["ext_proc"]["grpc_service"]["envoy_grpc"]
    assert service["authority"] == "10.0.0.7:9002"
    with pytest.raises(ValueError, match="is not host:port"):
        BootstrapOptions(picker_address="10.0.0.7:9002,")


def test_a_second_choice_has_a_lower_priority():
    """It is not waited for, and a request that found nobody at the first is sent to it."""
    options = BootstrapOptions(second_picker_address="homing-headless:9002, 10.0.0.8:9003")
    found = document(options)
    pickers = cluster(found, "ext_proc")
    assert pickers["type"] == "STRICT_DNS"
    assert pickers["wait_for_warm_on_init"] is False
    first, second = pickers["load_assignment"]["endpoints"]
    assert (first.get("priority", 0), second["priority"]) == (0, 1)
    places = [
        (at["address"], at["port_value"])
        for at in (one["endpoint"]["address"]["socket_address"] for one in second["lb_endpoints"])
    ]
    assert places == [("homing-headless", 9002), ("10.0.0.8", 9003)]
    service = http_filters(found)["ext_proc"]["grpc_service"]
    assert service["envoy_grpc"]["authority"] == "127.0.0.1:9002"
    assert service["retry_policy"]["retry_priority"]["typed_config"]["update_frequency"] == 1
    with pytest.raises(ValueError, match="is not host:port"):
        BootstrapOptions(second_picker_address="homing-headless")


def test_without_a_second_choice_nothing_is_said_of_one():
    found = document(BootstrapOptions(picker_address="10.0.0.7:9002,10.0.0.8:9002"))
    assert len(cluster(found, "ext_proc")["load_assignment"]["endpoints"]) == 1
    policy = http_filters(found)["ext_proc"]["grpc_service"]["retry_policy"]
    assert "retry_priority" not in policy


@pytest.mark.parametrize("fail_open", [False, True])
def test_failing_open_is_a_choice(fail_open):
    """`failure_mode_allow` is what was asked for, and false by default."""
    picker = http_filters(document(BootstrapOptions(fail_open=fail_open)))["ext_proc"]
    assert picker.get("failure_mode_allow", False) is fail_open
    assert BootstrapOptions().fail_open is False


def test_the_round_robin_arm_differs_in_the_choice_only():
    """No picker; the same listener, timeouts and limits over a fixed list."""
    addresses = ("127.0.0.1:8000", "127.0.0.1:8001")
    ours = document(BootstrapOptions())
    other = document(BootstrapOptions(round_robin=addresses))
    assert [c["name"] for c in other["static_resources"]["clusters"]] == ["endpoints", "admin"]
    turn, picked = cluster(other, "endpoints"), cluster(ours, "endpoints")
    assert turn["type"] == "STATIC"
    assert len(turn["load_assignment"]["endpoints"][0]["lb_endpoints"]) == len(addresses)
    for field in ("connect_timeout", "circuit_breakers", "typed_extension_protocol_options"):
        assert turn[field] == picked[field]
    for filters_of in (http_filters, websocket_filters):
        assert "ext_proc" not in filters_of(other)
        assert filters_of(other)["header_mutation"] == filters_of(ours)["header_mutation"]


def test_ports_and_hosts_are_where_they_were_asked_for():
    """Listener and readiness on the host, admin on loopback only."""
    rendered = document(
        BootstrapOptions(
            listen_host="127.0.0.9", listen_port=1, admin_port=2, readiness_port=3, plaintext=True
        )
    )
    sockets = [
        listener["address"]["socket_address"]
        for listener in rendered["static_resources"]["listeners"]
    ]
    assert sockets == [
        {"address": "127.0.0.9", "port_value": 1},
        {"address": "127.0.0.9", "port_value": 3},
    ]
    admin = rendered["admin"]["address"]["socket_address"]
    assert admin == {"address": "127.0.0.1", "port_value": 2}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"listen_port": 0}, "port 0 is not one of 1 to 65535"),
        ({"readiness_port": 70_000}, "port 70000 is not one of"),
        ({"picker_address": "9002"}, "'9002' is not host:port"),
        ({"picker_address": "::1:9002"}, "an IPv6 host needs brackets"),
        ({"picker_address": "picker:http"}, "does not end in a port"),
        ({"round_robin": ("10.0.0.1:99999",)}, "does not end in a port"),
        ({"message_timeout_s": 0.0}, "is not above 0"),
        ({"plaintext": True, "picker_ca_file": "/ca"}, "the picker is plaintext"),
        ({"plaintext": True, "client_cert_path": "/certs"}, "the picker is plaintext"),
        ({"picker_server_name": "a"}, "'a' is given without the file of certificate authorities"),
        ({"request_body_max_bytes": 2**32}, "request body limit of 4294967296 bytes"),
    ],
)
def test_an_impossible_option_is_refused_in_one_sentence(values, sentence):
    """The sentence repeats what was given and says what was expected."""
    with pytest.raises(ValueError, match=sentence):
        BootstrapOptions(**values)


def test_a_picker_that_is_gone_is_noticed_by_everything_that_envoy_has():
    """Retries, as many at once as there may be streams; ejection of all that refuse; PINGs."""
    rendered = document(BootstrapOptions(picker_address="10.0.0.7:9002,10.0.0.8:9002"))
    for filters_of in (http_filters, websocket_filters):
        retries = filters_of(rendered)["ext_proc"]["grpc_service"]["retry_policy"]
        assert {"connect-failure", "reset"} <= set(retries["retry_on"].split(","))
        (predicate,) = retries["retry_host_predicate"]
        assert predicate["name"] == "envoy.retry_host_predicates.previous_hosts"
    pickers = cluster(rendered, "ext_proc")
    (limits,) = pickers["circuit_breakers"]["thresholds"]
    assert limits["max_retries"] == limits["max_requests"]
    ejection = pickers["outlier_detection"]
    assert ejection["consecutive_local_origin_failure"] == 1
    assert ejection["max_ejection_percent"] == 100
    assert pickers["common_lb_config"]["healthy_panic_threshold"]["value"] < 50
    (http,) = pickers["typed_extension_protocol_options"].values()
    http2 = http["explicit_http_config"]["http2_protocol_options"]
    assert http2["connection_keepalive"] == {"interval": "1s", "timeout": "3s"}
