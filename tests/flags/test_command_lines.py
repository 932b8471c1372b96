import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.flags.command_lines import parse_check, parse_envoy, parse_explain, parse_serve, parse_top
from epp.flags.reading import FlagError
from epp.flags.serve import ServeFlags
from epp.flags.subcommands import CheckFlags
from epp.flags.values import BodyMode, LogFormat, parse_byte_count

ENDPOINTS = ["--endpoints-file", "endpoints.yaml"]

# Flags of the reference pickers with a value each (reference/endpoint-pickers.md, section 9).
REFERENCE_FLAGS = [
    "grpc-port=9012",
    "grpc-health-port=9013",
    "pool-group=inference.networking.k8s.io",
    "pool-namespace=team-a",
    "pool-name=vllm",
    "endpoint-selector=app=vllm",
    "endpoint-target-ports=8000,8001",
    "disable-endpoint-subset-filter=true",
    "emit-endpoint-scores=true",
    "refresh-metrics-interval=50ms",
    "refresh-prometheus-metrics-interval=5s",
    "metrics-staleness-threshold=2s",
    "health-checking=true",
    "enable-grpc-stream-metrics=false",
    "v=4",
    "metrics-port=9091",
    "metrics-endpoint-auth=false",
    "metrics-client-ca-file=/ca.crt",
    "metrics-cert-dir=/certs",
    "enable-pprof=true",
    "cert-path=/certs",
    "enable-cert-reload=true",
    "secure-serving=false",
    "tls-min-version=VersionTLS13",
    "tls-cipher-suites=TLS_AES_128_GCM_SHA256",
    "grpc-max-recv-msg-size=4Mi",
    "grpc-max-send-msg-size=4194304",
    "ha-enable-leader-election=true",
    "drain-timeout=30s",
    "config-file=/config/default-plugins.yaml",
    "config-text=kind: EndpointPickerConfig",
    "allow-experimental-plugins=true",
    "tracing=true",
    "zap-encoder=json",
    "zap-log-level=debug",
    "zap-devel=false",
    "zap-stacktrace-level=error",
    "zap-time-encoding=rfc3339",
]

REMOVED_FLAGS = [
    "total-queued-requests-metric",
    "total-running-requests-metric",
    "kv-cache-usage-percentage-metric",
    "lora-info-metric",
    "cache-info-metric",
]


def serve(*arguments, environment=None):
    return parse_serve([*ENDPOINTS, *arguments], environment or {})


@pytest.mark.parametrize("flag", REFERENCE_FLAGS)
@pytest.mark.parametrize("dashes", ["-", "--"])
def test_every_flag_of_the_reference_pickers_parses(flag, dashes):
    """`--name=value` and `--name value`, with one dash or two, mean the same."""
    name, _, value = flag.partition("=")
    with_equals = serve(f"{dashes}{flag}")
    assert isinstance(with_equals, ServeFlags)
    if value not in {"true", "false"}:
        assert serve(f"{dashes}{name}", value) == with_equals
    elif value == "true":
        assert serve(f"{dashes}{name}") == with_equals


@pytest.mark.parametrize("name", REMOVED_FLAGS)
def test_a_removed_flag_is_an_error_that_says_where_its_value_went(name):
    """The reference rejects these too."""
    with pytest.raises(FlagError, match=rf"^--{name} was removed: .*engineConfigs"):
        serve(f"--{name}=x")


def test_how_many_pickers_serve_is_at_least_this_one():
    """One, unless it is told."""
    assert serve().replicas == 1
    assert serve().replicas_besides == 0
    assert serve("--replicas=3").replicas_besides == 2
    pool = ("--pool-name=p", "--ha-enable-leader-election")
    assert parse_serve([*pool, "--replicas=3"], {}).replicas_besides == 0, "the others stand by"
    for wrong in ("0", "-1", "1001", "two"):
        with pytest.raises(FlagError, match=r"^--replicas"):
            serve(f"--replicas={wrong}")


def test_without_flags_the_defaults_are_those_of_the_design():
    """What design section 3 and the reference pickers say."""
    flags = serve()
    assert (flags.grpc_port, flags.grpc_health_port, flags.metrics_port) == (9002, 9003, 9090)
    assert flags.secure_serving
    assert flags.request_body_max_bytes == 33_554_432
    assert flags.receive_message_max_bytes == 33_554_432 + 65_536
    assert flags.fallback_endpoints_max == 0
    assert flags.lease_ttl_without_response_phase == 60.0
    assert (flags.drain_grace, flags.drain_timeout) == (5.0, 120.0)
    assert flags.metrics_staleness_threshold == 2.0
    assert flags.refresh_metrics_interval is None
    assert flags.log_format is LogFormat.JSON
    assert flags.seed is None
    assert flags.warnings == ()


def test_the_arguments_that_the_chart_of_the_field_renders_are_understood():
    """A drop-in image: warnings at most (reference/kubernetes.md 3.3)."""
    flags = serve(
        "--pool-name=vllm", "--pool-namespace=ns", "--zap-encoder", "json", "--config-file",
        "/config/default-plugins.yaml", "--grpc-health-port", "9003", "--tracing=false",
        "--metrics-endpoint-auth=false", "--secure-serving=false", "--v=2",
    )  # fmt: skip
    assert flags.config_file == "/config/default-plugins.yaml"
    assert not flags.secure_serving
    assert flags.warnings == ("--pool-name has no effect: --endpoints-file is given",)


def test_a_flag_without_counterpart_warns_once_and_does_nothing():
    """Unless its value asks for what Homing does anyhow."""
    flags = serve("--zap-devel", "--enable-pprof=true", "--zap-devel=true", "--health-checking")
    assert [warning.split()[0] for warning in flags.warnings] == ["--enable-pprof", "--zap-devel"]
    assert flags == serve("--enable-pprof", "--zap-devel=1")


def test_the_last_of_two_equal_flags_counts():
    """As in Go."""
    assert serve("--grpc-port=1", "-grpc-port", "2").grpc_port == 2


def test_a_receive_limit_that_is_given_is_kept():
    """Bytes or a quantity."""
    flags = serve("--grpc-max-recv-msg-size=4Mi", "--request-body-max-bytes", "1048576")
    assert flags.receive_message_max_bytes == 4_194_304
    assert serve("--request-body-max-bytes=1Mi").receive_message_max_bytes == 1_114_112


def test_the_refresh_interval_grows_with_the_pool_and_a_flag_is_its_minimum():
    """max(200 ms, 0.5 ms an endpoint); the flag replaces the 200 ms."""
    assert serve().refresh_interval_s(10) == pytest.approx(0.2)
    assert serve().refresh_interval_s(1_000) == pytest.approx(0.5)
    explicit = serve("--refresh-metrics-interval=50ms")
    assert explicit.refresh_interval_s(10) == pytest.approx(0.05)
    assert explicit.refresh_interval_s(1_000) == pytest.approx(0.5)
    assert serve("--refresh-metrics-interval=1m").refresh_interval_s(1_000) == pytest.approx(60)


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["--v=0"], "warning"),
        ([], "info"),
        (["-v", "3"], "info"),
        (["--v=4"], "debug"),
        (["--zap-log-level=debug"], "debug"),
        (["--zap-log-level=error"], "warning"),
        (["--zap-log-level=5"], "debug"),
        (["--zap-log-level=debug", "--v=2"], "info"),
    ],
)
def test_verbosity_becomes_a_log_level(arguments, level):
    """--v, or the reference's zap flag if --v is not given."""
    assert serve(*arguments).log_level == level


def test_the_namespace_comes_from_the_flag_then_the_environment_then_default():
    """As in the reference picker."""
    assert serve().pool_namespace == "default"
    assert serve(environment={"NAMESPACE": "team-b"}).pool_namespace == "team-b"
    flags = serve("--pool-namespace=team-a", environment={"NAMESPACE": "team-b"})
    assert flags.pool_namespace == "team-a"


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--grpc-prt=1", "unknown flag '--grpc-prt', did you mean --grpc-port?"),
        ("--zzz", "unknown flag '--zzz'"),
        ("--drain-timeout", "--drain-timeout needs a value"),
        ("--grpc-port=http", "--grpc-port: expected a whole number, got 'http'"),
        ("--grpc-port=70000", "--grpc-port: expected a whole number of at most 65535, got '70000'"),
        ("--grpc-port=0", "--grpc-port: expected a whole number of at least 1, got '0'"),
        *(
            (
                f"--metrics-bind-address={text}",
                (
                    f"--metrics-bind-address: {text!r} is not an IP address without a port such as "
                    "127.0.0.1 or ::1"
                ),
            )
            for text in ("localhost", ":9090", "127.0.0.1:9090", "[::]", "10.0.0.256", "")
        ),
        ("--log-format=xml", "--log-format: expected json or console, got 'xml'"),
        ("--zap-encoder=xml", "--zap-encoder: expected json or console, got 'xml'"),
        (
            "--zap-log-level=loud",
            "--zap-log-level: expected debug, info, error, panic or a number, got 'loud'",
        ),
        ("--transport=quic", "--transport: expected grpcio or ngh2, got 'quic'"),
        ("--secure-serving=maybe", "--secure-serving: expected true or false, got 'maybe'"),
        (
            "--drain-grace=5",
            "--drain-grace: '5' is not a duration such as 300ms, 2s or 1m30s",
        ),
        ("--drain-grace=-5s", "--drain-grace: expected at least 0s, got -5s"),
        (
            "--decision-records-keep=-1s",
            "--decision-records-keep: expected at least 0s, got -1s",
        ),
        (
            "--decision-records-max-bytes=64k",
            "--decision-records-max-bytes: expected at least 65536, got 64000",
        ),
        (
            "--metrics-staleness-threshold=0s",
            "--metrics-staleness-threshold: expected more than 0s, got 0s",
        ),
        (
            "--refresh-metrics-interval=0",
            "--refresh-metrics-interval: expected more than 0s, got 0s",
        ),
        (
            "--grpc-max-recv-msg-size=4x",
            "--grpc-max-recv-msg-size: '4x' is not a number of bytes such as 4194304 or 4Mi",
        ),
        (
            "--request-body-max-bytes=0",
            "--request-body-max-bytes: '0' is out of range, expected 1 to 2147483647 bytes",
        ),
        (
            "--fallback-endpoints-max=-1",
            "--fallback-endpoints-max: expected a whole number of at least 0, got '-1'",
        ),
        (
            "--endpoint-target-ports=8000,x",
            "--endpoint-target-ports: expected a whole number, got '8000,x'",
        ),
        (
            "--endpoint-target-ports=1,2,3,4,5,6,7,8,9",
            "--endpoint-target-ports: expected a list of at most 8 entries, got '1,2,3,4,5,6,7,8,9'",
        ),
        ("--capture-share=0", "--capture-share: expected a number above 0, got '0'"),
        ("--capture-share=1.1", "--capture-share: expected a number of at most 1, got '1.1'"),
        ("--capture-file-max-age=0s", "--capture-file-max-age: expected more than 0s, got 0s"),
        (
            "--capture-max-bytes=100Mi",
            (
                "--capture-max-bytes: expected at least twice --capture-file-max-bytes, 134217728, "
                "got 104857600"
            ),
        ),
        ("now", "unexpected argument 'now', expected flags only"),
        (
            "--metrics-port=9002",
            "--grpc-port, --grpc-health-port and --metrics-port are 9002, 9003 and 9002; the three ports must differ",
        ),
    ],
)
def test_a_flag_that_cannot_be_obeyed_is_refused_in_one_sentence(argument, sentence):
    """What, where, what was expected."""
    with pytest.raises(FlagError) as error:
        serve(argument)
    assert str(error.value) == sentence


def test_two_sources_of_one_thing_are_refused():
    """A configuration from a file or from the text; pods from a pool or by selector."""
    with pytest.raises(FlagError, match=r"^--config-file and --config-text are both given"):
        serve("--config-file=a", "--config-text=b")
    with pytest.raises(FlagError, match=r"^--pool-name and --endpoint-selector are both given"):
        serve("--pool-name=a", "--endpoint-selector=b=c")


def test_endpoints_have_to_come_from_somewhere():
    """A pool, a selector with its ports, or a file."""
    with pytest.raises(FlagError, match=r"^no endpoints are configured: give --pool-name,"):
        parse_serve([], {})
    with pytest.raises(FlagError, match=r"^--endpoint-selector needs --endpoint-target-ports"):
        parse_serve(["--endpoint-selector=app=vllm"], {})
    assert parse_serve(["--pool-name=vllm"], {}).pool_name == "vllm"
    selected = parse_serve(["--endpoint-selector=app=vllm", "--endpoint-target-ports=8000"], {})
    assert selected.endpoint_target_ports == (8000,)


def test_a_watched_config_map_needs_its_mounted_file():
    """The file counts at start and whenever the API server is away."""
    with pytest.raises(FlagError, match=r"^--config-map needs --config-file"):
        parse_serve(["--pool-name=vllm", "--config-map=homing"], {})
    flags = parse_serve(
        ["--pool-name=vllm", "--config-map=homing", "--config-file=/config/homing.yaml"], {}
    )
    assert flags.config_map == "homing"


def test_flags_of_kubernetes_have_no_effect_beside_a_file():
    """And say so."""
    flags = serve("--ha-enable-leader-election", "--config-map=a", "--endpoint-target-ports=1")
    assert [warning.split()[0] for warning in flags.warnings] == [
        *("--endpoint-target-ports", "--ha-enable-leader-election", "--config-map"),
    ]
    assert serve("--ha-enable-leader-election=false").warnings == ()


def test_our_own_pod_is_told_by_the_environment():
    """The chart sets both; the pool may be elsewhere."""
    flags = parse_serve(
        ["--pool-name=vllm", "--pool-namespace=models"],
        {"NAMESPACE": "gateway", "POD_NAME": "homing-0"},
    )
    assert (flags.pool_namespace, flags.own_namespace) == ("models", "gateway")
    assert flags.instance == "homing-0"
    assert parse_serve(["--pool-name=vllm", "--pool-namespace=a"], {}).own_namespace == "a"


def test_client_certificates_need_tls():
    """In plaintext nobody could show one."""
    assert serve("--client-ca-file=/ca.crt").client_ca_file == "/ca.crt"
    with pytest.raises(FlagError, match=r"^--client-ca-file needs --secure-serving"):
        serve("--client-ca-file=/ca.crt", "--secure-serving=false")


def test_the_bound_of_open_requests_is_at_least_one():
    """20,000 unless it is told."""
    assert serve().concurrent_streams_max == 20_000
    assert serve("--concurrent-streams-max=1").concurrent_streams_max == 1
    assert serve("--connection-age-max=0s").connection_age_max == 0.0
    with pytest.raises(FlagError, match=r"^--connection-age-max: expected at least 0s"):
        serve("--connection-age-max=-1s")
    with pytest.raises(
        FlagError, match=r"^--concurrent-streams-max: expected a whole number of at least 1"
    ):
        serve("--concurrent-streams-max=0")


def test_envoy_flags_parse():
    """The options of the bootstrap, and where to write it."""
    flags = parse_envoy(
        ["--out", "envoy.yaml", "--listen-port=8080", "--picker-address", "[::1]:9002",
         "--plaintext", "--request-body-mode=BUFFERED", "--message-timeout=3s"]
    )  # fmt: skip
    assert flags.out == "envoy.yaml"
    assert flags.plaintext
    assert flags.request_body_mode is BodyMode.BUFFERED
    assert flags.message_timeout == 3.0
    certificates = parse_envoy(
        ["--picker-ca-file=/ca.crt", "--picker-server-name=picker", "--client-cert-path=/certs"]
    )
    assert certificates.picker_ca_file == "/ca.crt"
    assert certificates.picker_server_name == "picker"
    assert certificates.client_cert_path == "/certs"
    in_turn = parse_envoy(["--round-robin", "10.0.0.1:8000, [::1]:8000"]).round_robin
    assert in_turn == ("10.0.0.1:8000", "[::1]:8000")
    with pytest.raises(FlagError, match="--request-body-mode: expected NONE or STREAMED or"):
        parse_envoy(["--request-body-mode=buffered"])
    with pytest.raises(FlagError, match="unexpected argument 'x'"):
        parse_envoy(["x"])


def test_check_flags_take_one_file():
    """FILE may be anywhere, `-` is a file, and without one there is only --explain."""
    assert parse_check(["a.yaml", "--diff", "b.yaml"]) == CheckFlags(file="a.yaml", diff="b.yaml")
    assert parse_check(["--explain", "-"]) == CheckFlags(file="-", explain=True)
    assert parse_check(["--", "--odd"]) == CheckFlags(file="--odd")
    assert parse_check(["--explain"]).explain
    assert parse_check(["a.yaml", "--upgrade"]) == CheckFlags(file="a.yaml", upgrade=True)
    for more in ([], ["a", "--explain"], ["a", "--diff=b"], ["a", "--capture=c"]):
        with pytest.raises(FlagError, match=r"^(--upgrade needs|expected) FILE"):
            parse_check([*more, "--upgrade"])
    with pytest.raises(FlagError, match=r"^expected FILE"):
        parse_check([])
    with pytest.raises(FlagError, match=r"^unexpected argument 'b', expected one FILE"):
        parse_check(["a", "b"])


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("4k", 4_000), ("4Ki", 4_096), ("3M", 3_000_000), ("1Gi", 2**30)]
)
def test_byte_counts_are_numbers_or_quantities(text, count):
    """As Kubernetes writes them."""
    assert parse_byte_count(text) == count


@settings(max_examples=300)
@given(st.lists(st.text(max_size=12) | st.sampled_from([f"--{flag}" for flag in REFERENCE_FLAGS])))
def test_any_command_line_parses_or_is_refused_in_one_line(arguments):
    """Never another exception, never a sentence of two lines."""
    refusal = ""
    try:
        parse_serve(arguments, {})
    except FlagError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) <= 1


def test_ports_are_taken_everywhere_unless_an_address_is_given():
    """One spelling of each: `::` is all."""
    flags = serve("--grpc-bind-address=127.0.0.1", "--metrics-bind-address", "0:0:0:0:0:0:0:0")
    assert flags.grpc_bind_address == "127.0.0.1"
    assert flags.grpc_health_bind_address == flags.metrics_bind_address == "::"


def test_the_memory_limit_may_be_more_than_a_message_can_have():
    """Gigabytes, where other quantities end at two."""
    assert serve().memory_limit is None
    assert serve("--memory-limit=16Gi").memory_limit == 16 * 2**30
    for wrong in ("1Mi", "9999Gi", "much"):
        with pytest.raises(FlagError, match="--memory-limit"):
            serve(f"--memory-limit={wrong}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("replica", ("replica", 9004)),
        ("replica-1.homing:7", ("replica-1.homing", 7)),
        ("10.0.0.1:65535", ("10.0.0.1", 65_535)),
        ("[fd00::1]", ("fd00::1", 9004)),
        ("[::1]:9005", ("::1", 9005)),
    ],
)
def test_a_peer_is_a_host_with_or_without_a_port(text, found):
    """Without: --peer-port."""
    assert serve("--peers", f"{text}, x").peer_targets == (found, ("x", 9004))
    if ":" not in text:
        assert serve(f"--peer-service={text}").peer_targets == (found,)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--peers=a:0"], "--peers: 'a:0' is not host:port such as replica-1:9004 or [::1]:9004"),
        (["--peers=::1"], "--peers: '::1' is not host:port such as replica-1:9004 or [::1]:9004"),
        (["--peers=a b"], "--peers: 'a b' is not host:port such as replica-1:9004 or [::1]:9004"),
        (["--peers=[a:b]"], "--peers: 'a:b' is not an IP address without a port"),
        (["--peer-service=a:70000"], "--peer-service: 'a:70000' is not host:port"),
        (["--peers=" + ",".join("a" * 65)], "--peers: expected a list of at most 64 entries"),
        (
            ["--peers=a", "--peer-service=b"],
            "--peers and --peer-service are given, expected only one of them",
        ),
        (["--peer-url=redis://a", "--peer-url-file=b"], "--peer-url and --peer-url-file are given"),
        (
            ["--peers=a", "--peer-url=redis://a"],
            "--peers and --peer-url are given, expected only one of them",
        ),
        (["--peers=a", "--metrics-port=9004"], "--metrics-port and --peer-port are both 9004"),
        (["--peer-url=http://:secret@a"], "--peer-url: expected valkey://[user:password@]host"),
        (["--peer-snapshot-timeout=-1s"], "--peer-snapshot-timeout: expected at least 0s, got -1s"),
    ],
)
def test_what_cannot_be_shared_so_is_refused_in_one_sentence(arguments, sentence):
    """Without what may be a password."""
    with pytest.raises(FlagError) as caught:
        serve(*arguments)
    assert str(caught.value).startswith(sentence)
    assert "secret@" not in str(caught.value)


def test_replicas_that_speak_in_plaintext_are_warned_about_where_gateways_use_tls():
    """Not where nothing is encrypted, nor where there is a secret."""
    (warning,) = serve("--peers=a").warnings
    assert warning.startswith("replicas connect to each other in plaintext")
    assert serve("--peers=a", "--secure-serving=false").warnings == ()
    assert serve("--peers=a", "--peer-secret-file=s").warnings == ()
    (warning,) = serve("--peer-url=redis://a", "--peer-secret-file=s").warnings
    assert warning.startswith("--peer-secret-file has no effect")


@pytest.mark.parametrize(
    "url", ["valkey://a", "valkeys://u:p@a:6379/3", "redis://:p@[::1]:1/", "rediss://a/15"]
)
def test_a_broker_may_be_valkey_or_redis_with_or_without_tls(url):
    assert serve(f"--peer-url={url}").peer_url == url


def test_explain_takes_a_request_and_several_pickers():
    """By default the one whose port is forwarded."""
    assert parse_explain(["r-1"]).url == ("http://127.0.0.1:9090",)
    told = parse_explain(["--url=http://a:1, http://b:2", "--json", "r-1"])
    assert told.url == ("http://a:1", "http://b:2")
    assert (told.request_id, told.json) == ("r-1", True)
    for arguments in ([], ["a", "b"], ["a", "--url="], ["a", "--urls=b"]):
        with pytest.raises(FlagError):
            parse_explain(arguments)


def test_top_takes_pickers():
    """And looks no more often than it pays."""
    assert parse_top([]).url == ("http://127.0.0.1:9090",)
    told = parse_top(["--url", "http://a:1,http://b:2", "--interval=1m", "--once"])
    assert (told.url, told.interval, told.once) == (("http://a:1", "http://b:2"), 60.0, True)
    for argument in ("--interval=0s", "--interval=61s", "now", "--url="):
        with pytest.raises(FlagError):
            parse_top([argument])


def test_what_is_said_of_a_capture_that_is_not_wanted_warns():
    """It has no effect; with a directory it has."""
    assert serve("--capture-share=0.5").warnings == (
        "--capture-share has no effect: --capture is not given",
    )
    flags = serve("--capture=/var/capture", "--capture-share=0.5", "--capture-max-bytes=4Gi")
    assert flags.warnings == ()
    assert (flags.capture_share, flags.capture_max_bytes) == (0.5, 4 * 2**30)


def test_kept_decisions_are_bounded():
    """By bytes and age; without a directory these have no effect, which is told."""
    told = serve("--decisions-dir=/decisions", "--decisions-max-bytes=1Gi")
    assert (told.decisions_dir, told.decisions_max_bytes) == ("/decisions", 2**30)
    assert told.warnings == ()
    assert serve("--decisions-max-age=1h").warnings == (
        "--decisions-max-age has no effect: --decisions-dir is not given",
    )
    for wrong in ("--decisions-max-bytes=1000", "--decisions-max-age=0s"):
        with pytest.raises(FlagError, match=wrong.partition("=")[0]):
            serve("--decisions-dir=/decisions", wrong)


@pytest.mark.parametrize(
    "more",
    [[], ["--v", "4", "--config-file", "/config/plugins.yaml"]],
    ids=["v1.6", "v1.3 to v1.5"],
)
def test_the_flags_of_the_conformance_manifests_are_taken(more):
    """Each is in force as it is meant, and none is warned of."""
    ports = ["--grpc-port", "9002", "--grpc-health-port", "9003"]
    pool = ["--pool-name", "primary-inference-pool", "--pool-namespace", "app-backend"]
    told = parse_serve([*pool, "--zap-encoder", "json", *ports, *more], {})
    assert (told.pool_name, told.pool_namespace) == ("primary-inference-pool", "app-backend")
    assert (told.grpc_port, told.grpc_health_port, told.log_format) == (9002, 9003, LogFormat.JSON)
    assert told.config_file == ("/config/plugins.yaml" if more else "")
    assert told.warnings == ()
