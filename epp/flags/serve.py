"""The flags of `epp serve`, a row each."""

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
"""Room for headers and metadata beside a body of the greatest size."""
_HELD_BODIES_SHARE: Final = 4
_HELD_BODIES_BYTES_MAX: Final = 512 * 2**20
"""A quarter of the memory, because a body that is read takes two to three times its length."""
RECORDS_BYTES_MIN: Final = 65_536
HISTORY_BYTES_MIN: Final = 2**20
REFRESH_MIN_S: Final = 0.2
REFRESH_PER_ENDPOINT_S: Final = 0.000_5
"""At 1,000 endpoints one scrape every 0.5 ms."""


class ServeFlags(Struct, frozen=True, kw_only=True):
    """What `epp serve` is told, checked. Field `grpc_port` is flag `--grpc-port`, and so on."""

    grpc_port: Annotated[
        Port, Row(SERVING, "port of ext_proc and of gRPC health", chart="extProcPort")
    ] = 9002
    grpc_bind_address: Annotated[
        IpAddress,
        Row(
            SERVING,
            "IP address that --grpc-port is taken at; :: is all, IPv4 too",
            chart="bindAddresses.extProc",
        ),
    ] = IpAddress("::")
    grpc_health_port: Annotated[
        Port, Row(SERVING, "port of gRPC health in plaintext", chart="grpcHealthPort")
    ] = 9003
    grpc_health_bind_address: Annotated[
        IpAddress,
        Row(
            SERVING,
            "IP address that --grpc-health-port is taken at",
            chart="bindAddresses.grpcHealth",
        ),
    ] = IpAddress("::")
    metrics_port: Annotated[
        Port, Row(SERVING, "port of our own metrics and of the debug pages", chart="metricsPort")
    ] = 9090
    metrics_bind_address: Annotated[
        IpAddress,
        Row(SERVING, "IP address that --metrics-port is taken at", chart="bindAddresses.metrics"),
    ] = IpAddress("::")
    debug_token_file: Annotated[
        str,
        Row(
            SERVING,
            "file with the bearer token that the debug pages ask for, read again when it changes; "
            "without: they ask for none",
            chart="debugToken.secretName",
        ),
    ] = ""
    transport: Annotated[
        Transport, Row(SERVING, "what carries gRPC: the lean one on libnghttp2, ngh2, or grpcio")
    ] = Transport.NGH2
    secure_serving: Annotated[
        bool, Row(SERVING, "TLS on --grpc-port; false: plaintext", chart="tls.enabled")
    ] = True
    cert_path: Annotated[
        str,
        Row(
            SERVING,
            "directory with tls.crt and tls.key; without: a self-signed certificate",
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
            "PEM of who signs gateways' certificates; with it a gateway must show one on --grpc-port",
            chart="tls.clientCASecretName",
        ),
    ] = ""
    concurrent_streams_max: Annotated[
        int, Meta(ge=1), Row(SERVING, "requests open at once; one more gets 503")
    ] = 20_000
    connection_age_max: Annotated[
        Duration,
        Row(
            SERVING,
            "a gateway's connection that is so old, a tenth more or less, gets a GOAWAY; what is "
            "open on it is served to its end; 0s: at no age",
            least=0,
        ),
    ] = Duration(1800.0)
    request_body_max_bytes: Annotated[
        ByteCount, Row(SERVING, "longest request body; a longer one gets 413")
    ] = ByteCount(33_554_432)
    grpc_max_recv_msg_size: Annotated[
        ByteCount | None, Row(SERVING, "longest gRPC message (default: body limit + 64Ki)")
    ] = None

    endpoints_file: Annotated[
        str, Row(ENDPOINTS, "YAML or JSON list of endpoints, watched", chart=CHART_SETS)
    ] = ""
    pool_name: Annotated[
        str, Row(ENDPOINTS, "InferencePool to serve", chart="pool.name", kubernetes=True)
    ] = ""
    pool_namespace: Annotated[
        str,
        Row(
            ENDPOINTS,
            "its namespace (default: $NAMESPACE, else default)",
            chart=CHART_SETS,
            environment="NAMESPACE",
        ),
    ] = ""
    pool_group: Annotated[str, Row(ENDPOINTS, "its API group", chart=CHART_SETS)] = (
        "inference.networking.k8s.io"
    )
    endpoint_selector: Annotated[
        str,
        Row(
            ENDPOINTS,
            "label selector of pods, instead of a pool",
            chart="pool.matchLabels",
            kubernetes=True,
        ),
    ] = ""
    endpoint_target_ports: Annotated[
        tuple[Port, ...],
        Meta(max_length=8),
        Row(
            ENDPOINTS,
            "their ports, 1 to 8, separated by commas",
            chart="pool.targetPorts",
            kubernetes=True,
        ),
    ] = ()
    ha_enable_leader_election: Annotated[
        bool,
        Row(
            ENDPOINTS,
            "of several replicas let one lead, by a Lease; gateways that ask for health are sent to it",
            chart="leaderElection.enabled",
            kubernetes=True,
        ),
    ] = False
    lease_name: Annotated[
        str,
        Row(
            ENDPOINTS,
            "the Lease, in the namespace of the pod (default: homing- and the pool)",
            chart="leaderElection.enabled",
            kubernetes=True,
        ),
    ] = ""
    replicas: Annotated[
        int,
        Meta(ge=1, le=1000),
        Row(
            ENDPOINTS,
            "pickers that serve these endpoints at once; those that do not hear each other send what "
            "they know little of where all would send it (`agreement` of prefix-cache-scorer)",
            chart="replicas",
        ),
    ] = 1

    config_file: Annotated[
        str,
        Row(
            SCHEDULING,
            "EndpointPickerConfig, watched; without: the built-in default",
            chart="config",
        ),
    ] = ""
    config_text: Annotated[
        str, Row(SCHEDULING, "the EndpointPickerConfig itself", chart="config")
    ] = ""
    config_map: Annotated[
        str,
        Row(
            SCHEDULING,
            "ConfigMap that --config-file is mounted from, to be watched by name too",
            chart="existingConfigMap",
            kubernetes=True,
        ),
    ] = ""
    config_map_key: Annotated[
        str,
        Row(
            SCHEDULING,
            "the key in it (default: the file name of --config-file)",
            chart="configMapKey",
        ),
    ] = ""
    fallback_endpoints_max: Annotated[
        int,
        Meta(ge=0, le=64),
        Row(SCHEDULING, "endpoints to name besides the destination, for retries"),
    ] = 0
    disable_endpoint_subset_filter: Annotated[
        bool, Row(SCHEDULING, "ignore the gateway's subset hint")
    ] = False
    session_token_key_file: Annotated[
        str,
        Row(
            SCHEDULING,
            "keys of session tokens, one a line, watched: the first signs, all are accepted; "
            "without: a key that ends with the process",
        ),
    ] = ""
    accept_unsigned_session_tokens: Annotated[
        bool,
        Row(
            SCHEDULING,
            "accept session tokens that name a pod in base64, which any client can write",
        ),
    ] = False
    last_good_dir: Annotated[
        str,
        Row(
            SCHEDULING,
            "directory for copies of --config-file and --endpoints-file as they last came into "
            "force; a start at which the file is broken uses the copy",
            chart="lastGood.enabled",
        ),
    ] = ""
    seed: Annotated[
        int | None, Row(SCHEDULING, "of all dice; logged at start (default: drawn)")
    ] = None

    decisions_dir: Annotated[
        str,
        Row(
            KEPT_DECISIONS,
            "directory for decisions, refusals, how they ended and changes of the configuration, to be "
            "asked by `epp decisions`, `epp explain --dir` and `epp changes` (docs/operate.md); "
            "without: they are kept in memory only",
            chart="decisions.enabled",
        ),
    ] = ""
    decisions_max_bytes: Annotated[
        MemoryBytes,
        Row(
            KEPT_DECISIONS,
            "of all files in the directory; above it the oldest are removed",
            chart="decisions.maxSize",
            needs="decisions-dir",
            least=HISTORY_BYTES_MIN,
        ),
    ] = MemoryBytes(512 * 2**20)
    decisions_max_age: Annotated[
        Duration,
        Row(
            KEPT_DECISIONS,
            "of files in the directory; older ones are removed",
            chart="decisions.maxAge",
            above=0,
            needs="decisions-dir",
        ),
    ] = Duration(48 * 3600.0)

    capture: Annotated[
        str,
        Row(
            CAPTURE,
            "directory for what requests ask and where they go, without any text, to be replayed "
            "by `sim replay` (docs/capture-format.md); without: nothing is captured",
            chart="capture.enabled",
        ),
    ] = ""
    capture_share: Annotated[
        float,
        Meta(gt=0, le=1),
        Row(
            CAPTURE,
            "share of the sessions, or of the conversations, that are captured whole",
            chart="capture.share",
            needs="capture",
        ),
    ] = 1.0
    capture_salt_file: Annotated[
        str,
        Row(
            CAPTURE,
            "file with 16 to 64 secret bytes under which names are hashed, read at start: captures "
            "under one salt can be joined; without: a salt that ends with the process",
            chart="capture.saltSecretName",
            needs="capture",
        ),
    ] = ""
    capture_file_max_bytes: Annotated[
        ByteCount, Row(CAPTURE, "size at which other files are begun", needs="capture")
    ] = ByteCount(64 * 2**20)
    capture_file_max_age: Annotated[
        Duration, Row(CAPTURE, "age at which other files are begun", above=0, needs="capture")
    ] = Duration(600.0)
    capture_max_bytes: Annotated[
        MemoryBytes,
        Row(
            CAPTURE,
            "of all files in the directory; above it the oldest are removed",
            chart="capture.maxSize",
            needs="capture",
        ),
    ] = MemoryBytes(2**30)

    peers: Annotated[
        tuple[str, ...],
        Meta(max_length=64),
        Row(
            REPLICAS,
            "other replicas to share what is known with, each host:port, separated by commas; "
            "ourselves among them are left out",
            chart="the chart sets --peer-service",
        ),
    ] = ()
    peer_service: Annotated[
        str,
        Row(
            REPLICAS,
            "headless Service of the replicas, NAME or NAME:PORT: found by its EndpointSlices in "
            "$NAMESPACE, with --endpoints-file by DNS",
            chart="peers.enabled",
        ),
    ] = ""
    peer_port: Annotated[
        Port, Row(REPLICAS, "port that replicas connect to", chart="peers.port")
    ] = 9004
    peer_bind_address: Annotated[
        IpAddress, Row(REPLICAS, "IP address that --peer-port is taken at")
    ] = IpAddress("::")
    peer_secret_file: Annotated[
        str,
        Row(
            REPLICAS,
            "file with a secret of at least 32 bytes that all replicas have, read at start: they "
            "encrypt, and refuse who does not have it; without: plaintext, from known addresses only",
            chart="peers.secretName",
        ),
    ] = ""
    peer_url: Annotated[
        str,
        Row(
            REPLICAS,
            "Valkey or Redis 7 to share through instead, valkey:// or redis://, with TLS valkeys:// "
            "or rediss://; needs the extra valkey",
            chart="peers.url",
        ),
    ] = ""
    peer_url_file: Annotated[
        str,
        Row(
            REPLICAS,
            "file with the --peer-url, if there is a password in it",
            chart="peers.urlSecretName",
        ),
    ] = ""
    peer_snapshot_timeout: Annotated[
        Duration, Row(REPLICAS, "longest wait at start for what other replicas know", least=0)
    ] = Duration(2.0)
    snapshot_dir: Annotated[
        str,
        Row(
            REPLICAS,
            "directory for a copy of what is known, written every 30s and at the end, read at start",
            chart="snapshot.enabled",
        ),
    ] = ""

    refresh_metrics_interval: Annotated[
        Duration | None,
        Row(
            METRICS_OF_ENDPOINTS,
            "least time between two scrapes of one endpoint (default: the greater of 200ms and "
            "0.5ms for each endpoint)",
            above=0,
        ),
    ] = None
    metrics_staleness_threshold: Annotated[
        Duration,
        Row(
            METRICS_OF_ENDPOINTS,
            "older metrics rank an endpoint below every fresh one; counts as "
            "two refresh intervals at least",
            above=0,
        ),
    ] = Duration(2.0)
    adaptive_scraping: Annotated[
        bool,
        Row(
            METRICS_OF_ENDPOINTS,
            "ask endpoints without work up to five times less often, until they are picked; what "
            "other replicas send there is seen later by as much",
        ),
    ] = False
    request_load_metrics: Annotated[
        bool,
        Row(
            METRICS_OF_ENDPOINTS,
            "let requests ask engines for their load in the response headers "
            "(endpoint-load-metrics-format: TEXT); clients see the answer",
        ),
    ] = False

    request_timeout: Annotated[
        Duration,
        Row(REQUESTS, "longest time for a request to become whole; a slower one gets 408", above=0),
    ] = Duration(60.0)
    memory_limit: Annotated[
        MemoryBytes | None,
        Row(
            REQUESTS,
            "memory that bodies and indexes are sized for; near it indexes shrink, then long bodies "
            "pass unread (default: the container's limit, else the machine's memory)",
        ),
    ] = None
    held_bodies_max_bytes: Annotated[
        ByteCount | None,
        Row(
            REQUESTS,
            "unfinished bodies that all streams may hold; above it new ones get 503 "
            "(default: a quarter of the memory limit, at most 512Mi, at least two bodies)",
        ),
    ] = None
    trust_model_rewrite_header: Annotated[
        bool,
        Row(
            REQUESTS,
            "obey x-llm-d-model-name-rewrite; only where the gateway strips it from clients",
        ),
    ] = False
    decline_response_bodies: Annotated[
        bool,
        Row(
            REQUESTS,
            "ask a gateway that streams response bodies not to show them, by a mode override, "
            "which it must allow (`allow_mode_override` of Envoy)",
        ),
    ] = False
    parse_response_usage: Annotated[
        bool,
        Row(
            REQUESTS,
            "read response chunks for token usage and time to first token; the gateway must show "
            "them too (--response-body-mode of `epp envoy-config`)",
        ),
    ] = False
    lease_ttl_without_response_phase: Annotated[
        Duration,
        Row(
            REQUESTS,
            "longest time to count a request where the gateway does not show responses",
            least=0,
        ),
    ] = Duration(60.0)
    drain_grace: Annotated[
        Duration,
        Row(
            REQUESTS,
            "on SIGTERM, go on as before for this long",
            chart="drainGraceSeconds",
            least=0,
        ),
    ] = Duration(5.0)
    drain_timeout: Annotated[
        Duration,
        Row(
            REQUESTS,
            "on SIGTERM, wait for open streams at most this long; on Ctrl-C no longer than 30s",
            chart="drainTimeoutSeconds",
            least=0,
        ),
    ] = Duration(120.0)
    envoy_admin_port: Annotated[
        Port | None,
        Row(
            REQUESTS,
            "port of the admin interface, on 127.0.0.1, of an Envoy that ends with this picker, as in "
            "standalone mode: on SIGTERM its clients are sent away, and it is waited for too",
            chart="standalone.enabled",
        ),
    ] = None

    decision_records_keep: Annotated[
        Duration,
        Row(
            DECISION_RECORDS,
            "how long at most it can be asked why a request went where it went; 0s keeps nothing",
            least=0,
        ),
    ] = Duration(900.0)
    decision_records_max_bytes: Annotated[
        ByteCount,
        Row(
            DECISION_RECORDS,
            "memory for it, taken at the start: about 0.6 KB a decision",
            least=RECORDS_BYTES_MIN,
        ),
    ] = ByteCount(16 * 2**20)
    explain_headers: Annotated[
        bool,
        Row(
            DECISION_RECORDS,
            "tell clients x-homing-endpoint, who was chosen, and x-homing-reason, a few words why",
        ),
    ] = False

    compat_metrics: Annotated[
        CompatMetrics,
        Row(
            LOGS_METRICS_AND_TRACES,
            "names that our metrics have besides: gie (inference_objective_*, inference_pool_*, "
            "inference_extension_*), llm-d (llm_d_epp_*), all or none; the page gets longer by as much",
        ),
    ] = CompatMetrics.NONE
    log_format: Annotated[
        LogFormat, Row(LOGS_METRICS_AND_TRACES, "json or console", chart="logFormat")
    ] = LogFormat.JSON
    v: Annotated[
        int,
        Meta(ge=0),
        Row(
            LOGS_METRICS_AND_TRACES,
            "verbosity: 0 warnings, 1 to 3 information, 4 and more every decision",
            chart="verbosity",
        ),
    ] = 2
    tracing: Annotated[
        bool,
        Row(
            LOGS_METRICS_AND_TRACES,
            "send a span for each sampled request by OTLP, as the OTEL_* environment variables say; "
            "needs the extra otel",
        ),
    ] = False
    # What follows is no flag of its own.

    warnings: tuple[str, ...] = ()
    """Flags that do nothing, one sentence each."""
    own_namespace: str = "default"
    """Of our own pod, `$NAMESPACE`; where it is not told, that of the pool."""
    instance: str = ""
    """Name of our own pod, `$POD_NAME`."""
    own_address: str = ""
    """IP address of our own pod, `$POD_IP`."""

    @property
    def meshes(self) -> bool:
        """Whether replicas connect to each other."""
        return bool(self.peers or self.peer_service)

    @property
    def shares(self) -> bool:
        """Whether replicas tell each other what they decide."""
        return self.meshes or bool(self.peer_url or self.peer_url_file)

    @property
    def peer_targets(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each of `peers`, or those of `peer_service`."""
        named = self.peers or (self.peer_service,) if self.meshes else ()
        return tuple(parse_host_port(text, self.peer_port) for text in named)

    @property
    def replicas_besides(self) -> int:
        """Other pickers that decide at the same time; with leader election the others stand by."""
        return 0 if self.ha_enable_leader_election else self.replicas - 1

    @property
    def receive_message_max_bytes(self) -> int:
        """Largest message that the gRPC server takes."""
        given = self.grpc_max_recv_msg_size
        return self.request_body_max_bytes + _RECEIVE_MARGIN_BYTES if given is None else given

    def held_body_bytes_max(self, memory_limit_bytes: int) -> int:
        """What all streams together may hold of unfinished bodies, in so much memory."""
        if self.held_bodies_max_bytes is not None:
            return self.held_bodies_max_bytes
        share_bytes = memory_limit_bytes // _HELD_BODIES_SHARE
        return max(2 * self.request_body_max_bytes, min(share_bytes, _HELD_BODIES_BYTES_MAX))

    @property
    def log_level(self) -> Literal["warning", "info", "debug"]:
        """One of "warning", "info" and "debug"; the reference picker's decisions are at 4 and 5 too."""
        return "warning" if self.v == 0 else "info" if self.v < 4 else "debug"

    def refresh_interval_s(self, endpoints: int) -> float:
        """Time between two scrapes of each of `endpoints`; an explicit flag is the minimum."""
        given = self.refresh_metrics_interval
        least_s = REFRESH_MIN_S if given is None else float(given)
        return max(least_s, REFRESH_PER_ENDPOINT_S * endpoints)
