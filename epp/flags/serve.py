"""Flags of `epp serve`, one row per flag."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from epp.core.duration import Duration
from epp.flags.row import CHART_SETS, Row
from epp.flags.values import (
    ByteCount,
    CompatMetrics,
    IpAddress,
    LogFormat,
    MemoryBytes,
    Port,
    Transport,
    parse_host_port,
)

SERVING: Final = "Serving"
ENDPOINTS: Final = "Endpoints"
SCHEDULING: Final = "Scheduling"
KEPT_DECISIONS: Final = "Kept decisions"
CAPTURE: Final = "Capture"
REPLICAS: Final = "Replicas"
METRICS_OF_ENDPOINTS: Final = "Metrics of endpoints"
REQUESTS: Final = "Requests"
DECISION_RECORDS: Final = "Decision records"
LOGS_METRICS_AND_TRACES: Final = "Logs, metrics and traces"

_RECEIVE_MARGIN_BYTES: Final = 65_536
"""Bytes of headers and metadata that may surround a body of the maximum size in a gRPC message."""
_HELD_BODIES_SHARE: Final = 4
_HELD_BODIES_BYTES_MAX: Final = 512 * 2**20
"""Upper bound in bytes of the default of `--held-bodies-max-bytes`, which is a quarter of the
memory limit, unless two bodies of the maximum size are more.

It is a quarter because decoding a body takes two to three times its length.
"""
RECORDS_BYTES_MIN: Final = 65_536
HISTORY_BYTES_MIN: Final = 2**20
REFRESH_MIN_S: Final = 0.2
REFRESH_PER_ENDPOINT_S: Final = 0.000_5
"""Minimum scrape interval per endpoint of the pool: with 1,000 endpoints, each is scraped every 0.5
s, so one scrape starts every 0.5 ms.
"""


class ServeFlags(Struct, frozen=True, kw_only=True):
    """Validated flags of `epp serve`. The field `grpc_port` is the flag `--grpc-port`, and so on."""

    grpc_port: Annotated[
        Port, Row(SERVING, "port of the gRPC services ext_proc and health", chart="extProcPort")
    ] = 9002
    grpc_bind_address: Annotated[
        IpAddress,
        Row(
            SERVING,
            "IP address that --grpc-port listens on; :: means all addresses, including IPv4",
            chart="bindAddresses.extProc",
        ),
    ] = IpAddress("::")
    grpc_health_port: Annotated[
        Port, Row(SERVING, "port of the gRPC health service without TLS", chart="grpcHealthPort")
    ] = 9003
    grpc_health_bind_address: Annotated[
        IpAddress,
        Row(
            SERVING,
            "IP address that --grpc-health-port listens on",
            chart="bindAddresses.grpcHealth",
        ),
    ] = IpAddress("::")
    metrics_port: Annotated[
        Port, Row(SERVING, "port of the picker's metrics and debug pages", chart="metricsPort")
    ] = 9090
    metrics_bind_address: Annotated[
        IpAddress,
        Row(SERVING, "IP address that --metrics-port listens on", chart="bindAddresses.metrics"),
    ] = IpAddress("::")
    debug_token_file: Annotated[
        str,
        Row(
            SERVING,
            "file with the bearer token that debug pages require, read again when it changes; "
            "without this file they require no token",
            chart="debugToken.secretName",
        ),
    ] = ""
    transport: Annotated[
        Transport, Row(SERVING, "gRPC implementation: ngh2 (faster, based on libnghttp2) or grpcio")
    ] = Transport.NGH2
    secure_serving: Annotated[
        bool,
        Row(
            SERVING,
            "use TLS on --grpc-port; false means connections without TLS",
            chart="tls.enabled",
        ),
    ] = True
    cert_path: Annotated[
        str,
        Row(
            SERVING,
            "directory with the certificate tls.crt and the key tls.key of --grpc-port; "
            "without it the picker uses a self-signed certificate",
            chart="tls.secretName",
        ),
    ] = ""
    enable_cert_reload: Annotated[
        bool,
        Row(
            SERVING,
            "read the certificate and --client-ca-file again when they change",
            chart=CHART_SETS,
        ),
    ] = False
    client_ca_file: Annotated[
        str,
        Row(
            SERVING,
            "PEM file with the CA of gateways' certificates; with it gateways must present a "
            "certificate on --grpc-port",
            chart="tls.clientCASecretName",
        ),
    ] = ""
    concurrent_streams_max: Annotated[
        int,
        Meta(ge=1),
        Row(SERVING, "maximum number of concurrent requests; further requests get status 503"),
    ] = 20_000
    connection_age_max: Annotated[
        Duration,
        Row(
            SERVING,
            "age at which a gateway's connection gets a GOAWAY, varied by up to 10 %; open "
            "requests continue to their end; 0s disables it",
            least=0,
        ),
    ] = Duration(1800.0)
    request_body_max_bytes: Annotated[
        ByteCount,
        Row(SERVING, "maximum size of a request body; a request with a longer one gets status 413"),
    ] = ByteCount(33_554_432)
    grpc_max_recv_msg_size: Annotated[
        ByteCount | None,
        Row(
            SERVING,
            "maximum size of a gRPC message from the gateway (default: "
            "--request-body-max-bytes + 64Ki)",
        ),
    ] = None

    endpoints_file: Annotated[
        str,
        Row(
            ENDPOINTS,
            "file with a YAML or JSON list of endpoints, read again when it changes",
            chart=CHART_SETS,
        ),
    ] = ""
    pool_name: Annotated[
        str,
        Row(ENDPOINTS, "name of the InferencePool to serve", chart="pool.name", kubernetes=True),
    ] = ""
    pool_namespace: Annotated[
        str,
        Row(
            ENDPOINTS,
            "namespace of the InferencePool (default: $NAMESPACE, else default)",
            chart=CHART_SETS,
            environment="NAMESPACE",
        ),
    ] = ""
    pool_group: Annotated[
        str, Row(ENDPOINTS, "API group of the InferencePool", chart=CHART_SETS)
    ] = "inference.networking.k8s.io"
    endpoint_selector: Annotated[
        str,
        Row(
            ENDPOINTS,
            "label selector of the pods to route to, instead of --pool-name",
            chart="pool.matchLabels",
            kubernetes=True,
        ),
    ] = ""
    node_labels: Annotated[
        str,
        Row(
            ENDPOINTS,
            "labels of nodes that the endpoints on them also have, separated by commas, such as "
            "topology.kubernetes.io/zone; needs the right to list and watch nodes",
            chart="pool.nodeLabels",
            kubernetes=True,
        ),
    ] = ""
    endpoint_target_ports: Annotated[
        tuple[Port, ...],
        Meta(max_length=8),
        Row(
            ENDPOINTS,
            "1 to 8 ports of each pod that --endpoint-selector selects, separated by commas; "
            "each port is an endpoint",
            chart="pool.targetPorts",
            kubernetes=True,
        ),
    ] = ()
    ha_enable_leader_election: Annotated[
        bool,
        Row(
            ENDPOINTS,
            "elect one leading replica through a Lease; gateways that check health use only the "
            "leader",
            chart="leaderElection.enabled",
            kubernetes=True,
        ),
    ] = False
    lease_name: Annotated[
        str,
        Row(
            ENDPOINTS,
            "name of the Lease for leader election, in the picker's namespace (default: "
            "homing- and the pool's name)",
            chart="leaderElection.enabled",
            kubernetes=True,
        ),
    ] = ""
    replicas: Annotated[
        int,
        Meta(ge=1, le=1000),
        Row(
            ENDPOINTS,
            "number of pickers that route to the same endpoints at the same time; pickers "
            "without shared state use it to agree on endpoints for unknown prompts "
            "(`agreement` of prefix-cache-scorer)",
            chart="replicas",
        ),
    ] = 1

    config_file: Annotated[
        str,
        Row(
            SCHEDULING,
            "file with the EndpointPickerConfig, read again when it changes; without it the "
            "built-in default is used",
            chart="config",
        ),
    ] = ""
    config_text: Annotated[
        str,
        Row(
            SCHEDULING, "text of the EndpointPickerConfig, instead of --config-file", chart="config"
        ),
    ] = ""
    config_map: Annotated[
        str,
        Row(
            SCHEDULING,
            "name of the ConfigMap mounted as --config-file; it is also watched through the API server",
            chart="existingConfigMap",
            kubernetes=True,
        ),
    ] = ""
    config_map_key: Annotated[
        str,
        Row(
            SCHEDULING,
            "key of the EndpointPickerConfig in --config-map (default: the file name of "
            "--config-file)",
            chart="configMapKey",
        ),
    ] = ""
    fallback_endpoints_max: Annotated[
        int,
        Meta(ge=0, le=64),
        Row(
            SCHEDULING,
            "maximum number of fallback endpoints that the picker names for retries, beside the "
            "chosen one",
        ),
    ] = 0
    disable_endpoint_subset_filter: Annotated[
        bool,
        Row(
            SCHEDULING,
            "route also to endpoints outside the subset that the gateway's metadata allows for "
            "a request",
        ),
    ] = False
    session_token_key_file: Annotated[
        str,
        Row(
            SCHEDULING,
            "file with keys of session tokens, one per line, read again when it changes; the "
            "first key signs and all are accepted; without it a random key is used until the "
            "process ends",
        ),
    ] = ""
    accept_unsigned_session_tokens: Annotated[
        bool,
        Row(
            SCHEDULING,
            "accept session tokens that name a pod in base64, which any client can forge",
        ),
    ] = False
    last_good_dir: Annotated[
        str,
        Row(
            SCHEDULING,
            "directory for copies of the last valid --config-file and --endpoints-file; a start "
            "with a broken file uses the copy",
            chart="lastGood.enabled",
        ),
    ] = ""
    seed: Annotated[
        int | None, Row(SCHEDULING, "seed of all random choices, logged at start (default: random)")
    ] = None

    decisions_dir: Annotated[
        str,
        Row(
            KEPT_DECISIONS,
            "directory for decisions, refusals, their outcomes and configuration changes, read by "
            "`epp decisions`, `epp explain --dir` and `epp changes` (docs/operate.md); without it "
            "they are recorded only in memory",
            chart="decisions.enabled",
        ),
    ] = ""
    decisions_max_bytes: Annotated[
        MemoryBytes,
        Row(
            KEPT_DECISIONS,
            "maximum size of all files in --decisions-dir together; beyond it the oldest files "
            "are removed",
            chart="decisions.maxSize",
            needs="decisions-dir",
            least=HISTORY_BYTES_MIN,
        ),
    ] = MemoryBytes(512 * 2**20)
    decisions_max_age: Annotated[
        Duration,
        Row(
            KEPT_DECISIONS,
            "maximum age of files in --decisions-dir; older files are removed",
            chart="decisions.maxAge",
            above=0,
            needs="decisions-dir",
        ),
    ] = Duration(48 * 3600.0)

    capture: Annotated[
        str,
        Row(
            CAPTURE,
            "directory for a capture of requests and their routing, without any text, for `sim "
            "replay` (docs/capture-format.md); without it nothing is captured",
            chart="capture.enabled",
        ),
    ] = ""
    capture_share: Annotated[
        float,
        Meta(gt=0, le=1),
        Row(
            CAPTURE,
            "share of sessions or conversations to capture; each is captured completely or not at "
            "all",
            chart="capture.share",
            needs="capture",
        ),
    ] = 1.0
    capture_salt_file: Annotated[
        str,
        Row(
            CAPTURE,
            "file with a salt of 16 to 64 secret bytes for hashing names, read at start; captures "
            "with the same salt can be joined; without it a random salt is used until the process "
            "ends",
            chart="capture.saltSecretName",
            needs="capture",
        ),
    ] = ""
    capture_file_max_bytes: Annotated[
        ByteCount,
        Row(
            CAPTURE,
            "size at which a capture file is closed and the next one started",
            needs="capture",
        ),
    ] = ByteCount(64 * 2**20)
    capture_file_max_age: Annotated[
        Duration,
        Row(
            CAPTURE,
            "age at which a capture file is closed and the next one started",
            above=0,
            needs="capture",
        ),
    ] = Duration(600.0)
    capture_max_bytes: Annotated[
        MemoryBytes,
        Row(
            CAPTURE,
            "maximum size of all files in --capture together; beyond it the oldest files are "
            "removed",
            chart="capture.maxSize",
            needs="capture",
        ),
    ] = MemoryBytes(2**30)

    peers: Annotated[
        tuple[str, ...],
        Meta(max_length=64),
        Row(
            REPLICAS,
            "other replicas to share state with, each host:port, separated by commas; the "
            "picker's own address is ignored",
            chart="the chart sets --peer-service",
        ),
    ] = ()
    peer_service: Annotated[
        str,
        Row(
            REPLICAS,
            "headless Service of the replicas (NAME or NAME:PORT); it is resolved through "
            "EndpointSlices in $NAMESPACE, or through DNS with --endpoints-file",
            chart="peers.enabled",
        ),
    ] = ""
    peer_port: Annotated[
        Port, Row(REPLICAS, "port that other replicas of the picker connect to", chart="peers.port")
    ] = 9004
    peer_bind_address: Annotated[
        IpAddress, Row(REPLICAS, "IP address that --peer-port listens on")
    ] = IpAddress("::")
    peer_secret_file: Annotated[
        str,
        Row(
            REPLICAS,
            "file with a secret of at least 32 bytes that all replicas have, read at start; it "
            "enables encryption and authentication; without it replicas use plaintext and accept "
            "only known addresses",
            chart="peers.secretName",
        ),
    ] = ""
    peer_url: Annotated[
        str,
        Row(
            REPLICAS,
            "URL of a Valkey or Redis 7 server to share state through, instead of direct "
            "connections: valkey:// or redis://, with TLS valkeys:// or rediss://; needs the "
            "extra valkey",
            chart="peers.url",
        ),
    ] = ""
    peer_url_file: Annotated[
        str,
        Row(
            REPLICAS,
            "file with the --peer-url, for a URL that contains a password",
            chart="peers.urlSecretName",
        ),
    ] = ""
    peer_snapshot_timeout: Annotated[
        Duration,
        Row(
            REPLICAS,
            "maximum time that a starting picker waits for the state of other replicas",
            least=0,
        ),
    ] = Duration(2.0)
    snapshot_dir: Annotated[
        str,
        Row(
            REPLICAS,
            "directory for a snapshot of the state that replicas share, written every 30s and "
            "at shutdown, and read at start",
            chart="snapshot.enabled",
        ),
    ] = ""

    refresh_metrics_interval: Annotated[
        Duration | None,
        Row(
            METRICS_OF_ENDPOINTS,
            "minimum time between two scrapes of one endpoint (default: 0.5ms per endpoint, but "
            "at least 200ms)",
            above=0,
        ),
    ] = None
    metrics_staleness_threshold: Annotated[
        Duration,
        Row(
            METRICS_OF_ENDPOINTS,
            "age from which an endpoint's metrics are stale, at least two refresh intervals; "
            "an endpoint with stale metrics ranks below every endpoint with fresh ones",
            above=0,
        ),
    ] = Duration(2.0)
    adaptive_scraping: Annotated[
        bool,
        Row(
            METRICS_OF_ENDPOINTS,
            "scrape idle endpoints up to five times less often until they are picked; load from "
            "other replicas is then noticed later",
        ),
    ] = False
    request_load_metrics: Annotated[
        bool,
        Row(
            METRICS_OF_ENDPOINTS,
            "request the engine's load in response headers (endpoint-load-metrics-format: TEXT); "
            "clients see these headers",
        ),
    ] = False

    request_timeout: Annotated[
        Duration,
        Row(
            REQUESTS,
            "maximum time in which a request must arrive completely; a slower one gets status 408",
            above=0,
        ),
    ] = Duration(60.0)
    memory_limit: Annotated[
        MemoryBytes | None,
        Row(
            REQUESTS,
            "memory limit of the picker, which limits stored bodies and indexes; close to it "
            "indexes shrink, then requests with long bodies are routed unread (default: the "
            "container's limit, else the machine's memory)",
        ),
    ] = None
    held_bodies_max_bytes: Annotated[
        ByteCount | None,
        Row(
            REQUESTS,
            "maximum size of the unfinished request bodies of all streams together; further "
            "requests get status 503 (default: a quarter of the memory limit, at most 512Mi, "
            "at least two bodies of the maximum size)",
        ),
    ] = None
    trust_model_rewrite_header: Annotated[
        bool,
        Row(
            REQUESTS,
            "let the request header x-llm-d-model-name-rewrite replace the model name; use it "
            "only if the gateway removes this header from client requests",
        ),
    ] = False
    engine_priority: Annotated[
        bool,
        Row(
            REQUESTS,
            "send the priority of each request to the engine (X-Vllm-Priority is the negated "
            "priority); vLLM needs --scheduling-policy priority",
        ),
    ] = False
    decline_response_bodies: Annotated[
        bool,
        Row(
            REQUESTS,
            "ask the gateway by mode override not to send response bodies; Envoy must allow it "
            "(`allow_mode_override`)",
        ),
    ] = False
    parse_response_usage: Annotated[
        bool,
        Row(
            REQUESTS,
            "read token usage from response bodies; the gateway must send them "
            "(--response-body-mode of `epp envoy-config`)",
        ),
    ] = False
    lease_ttl_without_response_phase: Annotated[
        Duration,
        Row(
            REQUESTS,
            "maximum time to count a request as running if the gateway does not report responses",
            least=0,
        ),
    ] = Duration(60.0)
    drain_grace: Annotated[
        Duration,
        Row(
            REQUESTS,
            "time for which the picker still accepts requests after SIGTERM, before it drains",
            chart="drainGraceSeconds",
            least=0,
        ),
    ] = Duration(5.0)
    drain_timeout: Annotated[
        Duration,
        Row(
            REQUESTS,
            "maximum time that a draining picker waits for open streams after SIGTERM; at most "
            "30s after Ctrl-C",
            chart="drainTimeoutSeconds",
            least=0,
        ),
    ] = Duration(120.0)
    envoy_admin_port: Annotated[
        Port | None,
        Row(
            REQUESTS,
            "port of the admin interface, on 127.0.0.1, of an Envoy that stops together with this "
            "picker (standalone mode); on SIGTERM the picker drains it and waits for it",
            chart="standalone.enabled",
        ),
    ] = None

    decision_records_keep: Annotated[
        Duration,
        Row(
            DECISION_RECORDS,
            "maximum time to retain decision records for `epp explain` and the debug pages; 0s "
            "retains none",
            least=0,
        ),
    ] = Duration(900.0)
    decision_records_max_bytes: Annotated[
        ByteCount,
        Row(
            DECISION_RECORDS,
            "memory for decision records, allocated at start; a decision takes about 0.6 KB",
            least=RECORDS_BYTES_MIN,
        ),
    ] = ByteCount(16 * 2**20)
    explain_headers: Annotated[
        bool,
        Row(
            DECISION_RECORDS,
            "add response headers for clients: x-homing-endpoint (the chosen endpoint) and "
            "x-homing-reason (a short reason)",
        ),
    ] = False

    compat_metrics: Annotated[
        CompatMetrics,
        Row(
            LOGS_METRICS_AND_TRACES,
            "additional names of the picker's metrics: gie (inference_objective_*, "
            "inference_pool_*, inference_extension_*), llm-d (llm_d_epp_*), all or none; each set "
            "makes the metrics page longer",
        ),
    ] = CompatMetrics.NONE
    log_format: Annotated[
        LogFormat,
        Row(LOGS_METRICS_AND_TRACES, "format of log lines: json or console", chart="logFormat"),
    ] = LogFormat.JSON
    v: Annotated[
        int,
        Meta(ge=0),
        Row(
            LOGS_METRICS_AND_TRACES,
            "log verbosity: 0 for warnings, 1 to 3 for information, 4 and more for every decision",
            chart="verbosity",
        ),
    ] = 2
    tracing: Annotated[
        bool,
        Row(
            LOGS_METRICS_AND_TRACES,
            "send a span for each sampled request over OTLP; the OTEL_* environment variables "
            "configure it; needs the extra otel",
        ),
    ] = False
    # The fields below are not flags.

    warnings: tuple[str, ...] = ()
    """Warnings about given flags that have no effect, one sentence each."""
    own_namespace: str = "default"
    """Namespace of the picker's pod, from `$NAMESPACE`; the pool's namespace if the variable is
    unset.
    """
    instance: str = ""
    """Name of the picker's pod, from `$POD_NAME`."""
    own_address: str = ""
    """IP address of the picker's pod, from `$POD_IP`."""

    @property
    def meshes(self) -> bool:
        """True if replicas of the picker connect directly to each other."""
        return bool(self.peers or self.peer_service)

    @property
    def shares(self) -> bool:
        """True if replicas of the picker share their decisions, directly or through a broker."""
        return self.meshes or bool(self.peer_url or self.peer_url_file)

    @property
    def peer_targets(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each of `peers`, or else of `peer_service`; empty if neither is set.
        Raises `ValueError` if one is malformed.
        """
        named = self.peers or (self.peer_service,) if self.meshes else ()
        return tuple(parse_host_port(text, self.peer_port) for text in named)

    @property
    def replicas_besides(self) -> int:
        """Number of other replicas that decide at the same time as this picker; 0 with leader
        election.
        """
        return 0 if self.ha_enable_leader_election else self.replicas - 1

    @property
    def receive_message_max_bytes(self) -> int:
        """Maximum size in bytes of a message that the gRPC server accepts."""
        given = self.grpc_max_recv_msg_size
        return self.request_body_max_bytes + _RECEIVE_MARGIN_BYTES if given is None else given

    def held_body_bytes_max(self, memory_limit_bytes: int) -> int:
        """Return the maximum bytes of the unfinished request bodies of all streams, for a memory
        limit of `memory_limit_bytes`.
        """
        if self.held_bodies_max_bytes is not None:
            return self.held_bodies_max_bytes
        share_bytes = memory_limit_bytes // _HELD_BODIES_SHARE
        return max(2 * self.request_body_max_bytes, min(share_bytes, _HELD_BODIES_BYTES_MAX))

    @property
    def log_level(self) -> Literal["warning", "info", "debug"]:
        """Log level for the verbosity `v`.

        The reference picker, like Homing, logs decisions from verbosity 4 on.
        """
        return "warning" if self.v == 0 else "info" if self.v < 4 else "debug"

    def refresh_interval_s(self, endpoints: int) -> float:
        """Return the seconds between two scrapes of the same endpoint, in a pool of `endpoints`
        endpoints.

        They are 0.5 ms per endpoint, but at least `--refresh-metrics-interval`, or 0.2 s without
        that flag.
        """
        given = self.refresh_metrics_interval
        least_s = REFRESH_MIN_S if given is None else float(given)
        return max(least_s, REFRESH_PER_ENDPOINT_S * endpoints)
