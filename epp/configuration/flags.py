"""Command line -> frozen flags. Go's spelling: one or two dashes, `--flag=value`, `--flag value`.

A boolean takes its value after `=` only. Of a flag given twice the last counts. What cannot be
obeyed is an error; what the reference picker has and Homing does not warns and does nothing.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from epp.core.duration import Duration, parse_duration

Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]


class ByteCount(int):
    """Bytes, written as a number or as a Kubernetes quantity: 4194304, 4Mi, 4M."""

    __slots__ = ()


class MemoryBytes(int):
    """As `ByteCount`, of a process: it may be more than a message can have."""

    __slots__ = ()


class IpAddress(str):
    """An address to listen on; "::" is all of them, IPv4 too."""

    __slots__ = ()


class Transport(StrEnum):
    GRPCIO = "grpcio"
    NGH2 = "ngh2"


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


class CompatMetrics(StrEnum):
    """Whose names our metrics have besides."""

    NONE = "none"
    GIE = "gie"
    LLM_D = "llm-d"
    ALL = "all"


class BodyMode(StrEnum):
    """How Envoy shows a body to the picker, in Envoy's spelling."""

    NONE = "NONE"
    STREAMED = "STREAMED"
    BUFFERED = "BUFFERED"
    BUFFERED_PARTIAL = "BUFFERED_PARTIAL"
    FULL_DUPLEX_STREAMED = "FULL_DUPLEX_STREAMED"


_RECEIVE_MARGIN_BYTES: Final = 65_536
"""Room for headers and metadata beside a body of the greatest size."""
_HELD_BODIES_SHARE: Final = 4
_HELD_BODIES_BYTES_MAX: Final = 512 * 2**20
"""A quarter of the memory, because a body that is read takes two to three times its length."""
RECORDS_BYTES_MIN: Final = 65_536
HISTORY_BYTES_MIN: Final = 2**20
DECISIONS_DIR: Final = "/decisions"
"""Where the chart mounts the volume of `--decisions-dir`."""
REFRESH_MIN_S: Final = 0.2
REFRESH_PER_ENDPOINT_S: Final = 0.000_5
"""At 1,000 endpoints one scrape every 0.5 ms."""


class ServeFlags(Struct, frozen=True, kw_only=True):
    """What `epp serve` is told, checked. Field `grpc_port` is flag `--grpc-port`, and so on."""

    grpc_port: Port = 9002
    grpc_bind_address: IpAddress = IpAddress("::")
    grpc_health_port: Port = 9003
    grpc_health_bind_address: IpAddress = IpAddress("::")
    metrics_port: Port = 9090
    metrics_bind_address: IpAddress = IpAddress("::")
    debug_token_file: str = ""
    transport: Transport = Transport.NGH2
    secure_serving: bool = True
    cert_path: str = ""
    enable_cert_reload: bool = False
    client_ca_file: str = ""
    concurrent_streams_max: Annotated[int, Meta(ge=1)] = 20_000
    connection_age_max: Duration = Duration(1800.0)
    grpc_max_recv_msg_size: ByteCount | None = None
    request_body_max_bytes: ByteCount = ByteCount(33_554_432)

    endpoints_file: str = ""
    pool_name: str = ""
    pool_namespace: str = ""
    pool_group: str = "inference.networking.k8s.io"
    endpoint_selector: str = ""
    endpoint_target_ports: Annotated[tuple[Port, ...], Meta(max_length=8)] = ()
    ha_enable_leader_election: bool = False
    lease_name: str = ""
    replicas: Annotated[int, Meta(ge=1, le=1000)] = 1

    config_file: str = ""
    config_text: str = ""
    config_map: str = ""
    config_map_key: str = ""
    fallback_endpoints_max: Annotated[int, Meta(ge=0, le=64)] = 0
    disable_endpoint_subset_filter: bool = False
    session_token_key_file: str = ""
    accept_unsigned_session_tokens: bool = False
    last_good_dir: str = ""
    seed: int | None = None

    decisions_dir: str = ""
    decisions_max_bytes: MemoryBytes = MemoryBytes(512 * 2**20)
    decisions_max_age: Duration = Duration(48 * 3600.0)

    capture: str = ""
    capture_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    capture_salt_file: str = ""
    capture_file_max_bytes: ByteCount = ByteCount(64 * 2**20)
    capture_file_max_age: Duration = Duration(600.0)
    capture_max_bytes: MemoryBytes = MemoryBytes(2**30)

    peers: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    peer_service: str = ""
    peer_port: Port = 9004
    peer_bind_address: IpAddress = IpAddress("::")
    peer_secret_file: str = ""
    peer_url: str = ""
    peer_url_file: str = ""
    peer_snapshot_timeout: Duration = Duration(2.0)
    snapshot_dir: str = ""

    refresh_metrics_interval: Duration | None = None
    metrics_staleness_threshold: Duration = Duration(2.0)
    adaptive_scraping: bool = False
    request_load_metrics: bool = False

    request_timeout: Duration = Duration(60.0)
    memory_limit: MemoryBytes | None = None
    held_bodies_max_bytes: ByteCount | None = None
    trust_model_rewrite_header: bool = False
    parse_response_usage: bool = False
    decline_response_bodies: bool = False
    lease_ttl_without_response_phase: Duration = Duration(60.0)
    drain_grace: Duration = Duration(5.0)
    drain_timeout: Duration = Duration(120.0)
    envoy_admin_port: Port | None = None

    decision_records_keep: Duration = Duration(900.0)
    decision_records_max_bytes: ByteCount = ByteCount(16 * 2**20)
    explain_headers: bool = False
    compat_metrics: CompatMetrics = CompatMetrics.NONE
    log_format: LogFormat = LogFormat.JSON
    v: Annotated[int, Meta(ge=0)] = 2
    tracing: bool = False

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


class EnvoyFlags(Struct, frozen=True, kw_only=True):
    """What `epp envoy-config` is told; all but `out` are options of `shell.bootstrap`."""

    out: str = ""
    listen_host: str = "0.0.0.0"  # noqa: S104 - it is a gateway
    listen_port: Port = 8081
    admin_port: Port = 19_000
    readiness_port: Port = 19_001
    picker_address: str = "127.0.0.1:9002"
    second_picker_address: str = ""
    round_robin: tuple[str, ...] = ()
    plaintext: bool = False
    picker_ca_file: str = ""
    picker_server_name: str = ""
    client_cert_path: str = ""
    request_body_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    response_body_mode: BodyMode = BodyMode.NONE
    fail_open: bool = False
    message_timeout: Duration = Duration(10.0)
    request_body_max_bytes: ByteCount = ByteCount(33_554_432)


class CheckFlags(Struct, frozen=True, kw_only=True):
    """What `epp check-config` is told."""

    file: str = ""
    """The one argument that is no flag; "-": standard input; "": the built-in default."""
    diff: str = ""
    explain: bool = False
    capture: str = ""


class ExplainFlags(Struct, frozen=True, kw_only=True):
    """What `epp explain` is told."""

    request_id: str = ""
    """The one argument that is no flag."""
    endpoint: str = ""
    url: tuple[str, ...] = ("http://127.0.0.1:9090",)
    token_file: str = ""
    dir: str = ""
    json: bool = False


class DecisionsFlags(Struct, frozen=True, kw_only=True):
    """What `epp decisions` is told."""

    dir: str = DECISIONS_DIR
    since: str = "30m"
    until: str = "0s"
    endpoint: str = ""
    model: str = ""
    refused: str = ""
    n: Annotated[int, Meta(ge=1, le=10_000)] = 20
    json: bool = False


class ChangesFlags(Struct, frozen=True, kw_only=True):
    """What `epp changes` is told."""

    dir: str = DECISIONS_DIR
    at: str = ""
    window: Duration = Duration(900.0)
    json: bool = False


class TopFlags(Struct, frozen=True, kw_only=True):
    """What `epp top` is told."""

    url: tuple[str, ...] = ("http://127.0.0.1:9090",)
    token_file: str = ""
    with_peers: bool = False
    interval: Duration = Duration(2.0)
    once: bool = False


class FlagError(Exception):
    """A command line that cannot be obeyed: one sentence."""


Groups: TypeAlias = Mapping[str, Mapping[str, str]]

SERVE_HELP: Final[Groups] = {
    "Serving": {
        "grpc-port": "port of ext_proc and of gRPC health",
        "grpc-bind-address": "IP address that --grpc-port is taken at; :: is all, IPv4 too",
        "grpc-health-port": "port of gRPC health in plaintext",
        "grpc-health-bind-address": "IP address that --grpc-health-port is taken at",
        "metrics-port": "port of our own metrics and of the debug pages",
        "metrics-bind-address": "IP address that --metrics-port is taken at",
        "debug-token-file": (
            "file with the bearer token that the debug pages ask for, read again when it changes; "
            "without: they ask for none"
        ),
        "transport": "what carries gRPC: the lean one on libnghttp2, ngh2, or grpcio",
        "secure-serving": "TLS on --grpc-port; false: plaintext",
        "cert-path": "directory with tls.crt and tls.key; without: a self-signed certificate",
        "enable-cert-reload": "read the certificate and --client-ca-file again when they change",
        "client-ca-file": (
            "PEM of who signs gateways' certificates; with it a gateway must show one on --grpc-port"
        ),
        "concurrent-streams-max": "requests open at once; one more gets 503",
        "connection-age-max": (
            "a gateway's connection that is so old, a tenth more or less, gets a GOAWAY; what is "
            "open on it is served to its end; 0s: at no age"
        ),
        "request-body-max-bytes": "longest request body; a longer one gets 413",
        "grpc-max-recv-msg-size": "longest gRPC message (default: body limit + 64Ki)",
    },
    "Endpoints": {
        "endpoints-file": "YAML or JSON list of endpoints, watched",
        "pool-name": "InferencePool to serve",
        "pool-namespace": "its namespace (default: $NAMESPACE, else default)",
        "pool-group": "its API group",
        "endpoint-selector": "label selector of pods, instead of a pool",
        "endpoint-target-ports": "their ports, 1 to 8, separated by commas",
        "ha-enable-leader-election": (
            "of several replicas let one lead, by a Lease; gateways that ask for health are sent to it"
        ),
        "lease-name": "the Lease, in the namespace of the pod (default: homing- and the pool)",
        "replicas": (
            "pickers that serve these endpoints at once; those that do not hear each other send what "
            "they know little of where all would send it (`agreement` of prefix-cache-scorer)"
        ),
    },
    "Scheduling": {
        "config-file": "EndpointPickerConfig, watched; without: the built-in default",
        "config-text": "the EndpointPickerConfig itself",
        "config-map": "ConfigMap that --config-file is mounted from, to be watched by name too",
        "config-map-key": "the key in it (default: the file name of --config-file)",
        "fallback-endpoints-max": "endpoints to name besides the destination, for retries",
        "disable-endpoint-subset-filter": "ignore the gateway's subset hint",
        "session-token-key-file": (
            "keys of session tokens, one a line, watched: the first signs, all are accepted; "
            "without: a key that ends with the process"
        ),
        "accept-unsigned-session-tokens": (
            "accept session tokens that name a pod in base64, which any client can write"
        ),
        "last-good-dir": (
            "directory for copies of --config-file and --endpoints-file as they last came into "
            "force; a start at which the file is broken uses the copy"
        ),
        "seed": "of all dice; logged at start (default: drawn)",
    },
    "Kept decisions": {
        "decisions-dir": (
            "directory for decisions, refusals, how they ended and changes of the configuration, to be "
            "asked by `epp decisions`, `epp explain --dir` and `epp changes` (docs/operate.md); "
            "without: they are kept in memory only"
        ),
        "decisions-max-bytes": "of all files in the directory; above it the oldest are removed",
        "decisions-max-age": "of files in the directory; older ones are removed",
    },
    "Capture": {
        "capture": (
            "directory for what requests ask and where they go, without any text, to be replayed "
            "by `sim replay` (docs/capture-format.md); without: nothing is captured"
        ),
        "capture-share": "share of the sessions, or of the conversations, that are captured whole",
        "capture-salt-file": (
            "file with 16 to 64 secret bytes under which names are hashed, read at start: captures "
            "under one salt can be joined; without: a salt that ends with the process"
        ),
        "capture-file-max-bytes": "size at which other files are begun",
        "capture-file-max-age": "age at which other files are begun",
        "capture-max-bytes": "of all files in the directory; above it the oldest are removed",
    },
    "Replicas": {
        "peers": (
            "other replicas to share what is known with, each host:port, separated by commas; "
            "ourselves among them are left out"
        ),
        "peer-service": (
            "headless Service of the replicas, NAME or NAME:PORT: found by its EndpointSlices in "
            "$NAMESPACE, with --endpoints-file by DNS"
        ),
        "peer-port": "port that replicas connect to",
        "peer-bind-address": "IP address that --peer-port is taken at",
        "peer-secret-file": (
            "file with a secret of at least 32 bytes that all replicas have, read at start: they "
            "encrypt, and refuse who does not have it; without: plaintext, from known addresses only"
        ),
        "peer-url": (
            "Valkey or Redis 7 to share through instead, valkey:// or redis://, with TLS valkeys:// "
            "or rediss://; needs the extra valkey"
        ),
        "peer-url-file": "file with the --peer-url, if there is a password in it",
        "peer-snapshot-timeout": "longest wait at start for what other replicas know",
        "snapshot-dir": (
            "directory for a copy of what is known, written every 30s and at the end, read at start"
        ),
    },
    "Metrics of endpoints": {
        "refresh-metrics-interval": (
            "least time between two scrapes of one endpoint (default: the greater of 200ms and "
            "0.5ms for each endpoint)"
        ),
        "metrics-staleness-threshold": "older metrics rank an endpoint below every fresh one; counts as "
        "two refresh intervals at least",
        "adaptive-scraping": (
            "ask endpoints without work up to five times less often, until they are picked; what "
            "other replicas send there is seen later by as much"
        ),
        "request-load-metrics": (
            "let requests ask engines for their load in the response headers "
            "(endpoint-load-metrics-format: TEXT); clients see the answer"
        ),
    },
    "Requests": {
        "request-timeout": "longest time for a request to become whole; a slower one gets 408",
        "memory-limit": (
            "memory that bodies and indexes are sized for; near it indexes shrink, then long bodies "
            "pass unread (default: the container's limit, else the machine's memory)"
        ),
        "held-bodies-max-bytes": (
            "unfinished bodies that all streams may hold; above it new ones get 503 "
            "(default: a quarter of the memory limit, at most 512Mi, at least two bodies)"
        ),
        "trust-model-rewrite-header": (
            "obey x-llm-d-model-name-rewrite; only where the gateway strips it from clients"
        ),
        "decline-response-bodies": (
            "ask a gateway that streams response bodies not to show them, by a mode override, "
            "which it must allow (`allow_mode_override` of Envoy)"
        ),
        "parse-response-usage": (
            "read response chunks for token usage and time to first token; the gateway must show "
            "them too (--response-body-mode of `epp envoy-config`)"
        ),
        "lease-ttl-without-response-phase": (
            "longest time to count a request where the gateway does not show responses"
        ),
        "drain-grace": "on SIGTERM, go on as before for this long",
        "drain-timeout": (
            "on SIGTERM, wait for open streams at most this long; on Ctrl-C no longer than 30s"
        ),
        "envoy-admin-port": (
            "port of the admin interface, on 127.0.0.1, of an Envoy that ends with this picker, as in "
            "standalone mode: on SIGTERM its clients are sent away, and it is waited for too"
        ),
    },
    "Decision records": {
        "decision-records-keep": (
            "how long at most it can be asked why a request went where it went; 0s keeps nothing"
        ),
        "decision-records-max-bytes": (
            "memory for it, taken at the start: about 0.6 KB a decision"
        ),
        "explain-headers": (
            "tell clients x-homing-endpoint, who was chosen, and x-homing-reason, a few words why"
        ),
    },
    "Logs, metrics and traces": {
        "compat-metrics": (
            "names that our metrics have besides: gie (inference_objective_*, inference_pool_*, "
            "inference_extension_*), llm-d (llm_d_epp_*), all or none; the page gets longer by as much"
        ),
        "log-format": "json or console",
        "v": "verbosity: 0 warnings, 1 to 3 information, 4 and more every decision",
        "tracing": (
            "send a span for each sampled request by OTLP, as the OTEL_* environment variables say; "
            "needs the extra otel"
        ),
    },
}

ENVOY_HELP: Final[Groups] = {
    "Output": {"out": "file to write (default: standard output)"},
    "Listening": {
        "listen-host": "address of the gateway's listener",
        "listen-port": "its port",
        "admin-port": "port of Envoy's admin interface, on loopback",
        "readiness-port": "port of /ready and /stats/prometheus",
    },
    "Picker": {
        "picker-address": "host:port of `epp serve`; of several replicas, with commas between them",
        "second-picker-address": (
            "as --picker-address: of pickers to ask while none of those is healthy; empty: none"
        ),
        "round-robin": "serve these ip:port in turn without a picker, separated by commas",
        "plaintext": "speak to it without TLS (`epp serve --secure-serving=false`)",
        "picker-ca-file": "PEM of who signs its certificate (default: whoever signed it)",
        "picker-server-name": "DNS name that its certificate must have, with --picker-ca-file",
        "client-cert-path": "directory with tls.crt and tls.key to show to it",
        "fail-open": "let requests pass when it is down",
        "message-timeout": "how long it may take for one answer",
        "request-body-mode": "how request bodies reach it",
        "response-body-mode": (
            "how response bodies reach it; STREAMED lets `epp serve --parse-response-usage` read them"
        ),
        "request-body-max-bytes": "as of `epp serve`",
    },
}

CHECK_HELP: Final[Groups] = {
    "Output": {
        "diff": "another configuration; say what FILE changes in it",
        "explain": "print what is in effect, defaults filled in",
        "capture": (
            "directory of `epp serve --capture`; say how many of the decisions in it would have "
            "been others by FILE"
        ),
    }
}


_DEBUG_PORT: Final = {
    "url": "http://host:port of --metrics-port, as `kubectl port-forward deploy/homing 9090` opens it",
    "token-file": (
        "file with the token that `epp serve --debug-token-file` asks for; without: "
        "HOMING_DEBUG_TOKEN_FILE names it, or HOMING_DEBUG_TOKEN is the token"
    ),
}

EXPLAIN_HELP: Final[Groups] = {
    "Pickers": _DEBUG_PORT
    | {"url": f"{_DEBUG_PORT['url']}; of several replicas, with commas between them"},
    "Output": {
        "endpoint": "say besides why it did not go to this one: name or address",
        "json": "all that is known, as JSON",
    },
    "Files": {
        "dir": "directory of `epp serve --decisions-dir` to look in, instead of asking a picker",
    },
}

_DECISION_FILES: Final = {
    "dir": (
        "directory of `epp serve --decisions-dir`, or of several of them; the default is where the "
        "chart has it"
    ),
}
_MOMENT: Final = "UTC, as 02:10, 2026-03-02T02:10:30, or 30m for so long ago"

DECISIONS_HELP: Final[Groups] = {
    "Files": _DECISION_FILES,
    "Which": {
        "since": f"not older; {_MOMENT}",
        "until": "not newer; as --since",
        "endpoint": "name, with or without its namespace, or address",
        "model": "as it was asked for",
        "refused": "true, false or a reason",
    },
    "Output": {
        "n": "how many to list, the last ones, 1 to 10000; sums are of all",
        "json": "as JSON",
    },
}

CHANGES_HELP: Final[Groups] = {
    "Files": _DECISION_FILES,
    "Which": {
        "at": f"the moment to compare around, {_MOMENT} (default: the last change of the configuration)",
        "window": "how long before and after, 1s to 24h",
    },
    "Output": {"json": "as JSON"},
}

TOP_HELP: Final[Groups] = {
    "Pickers": _DEBUG_PORT
    | {
        "url": f"{_DEBUG_PORT['url']}; several, with commas between them, are shown as one",
        "with-peers": (
            "show the replicas too that the first one shares with, at the same port of their "
            "addresses; these are reached from inside the cluster only"
        ),
    },
    "Output": {
        "interval": "time between two looks, 1s to 60s",
        "once": "print what is seen now and end",
    },
}


class Foreign(Struct, frozen=True):
    """A flag of the reference picker that does nothing here."""

    sentence: str
    ours: str | None = None
    """The value that says what we do anyhow; it is no reason to warn."""
    boolean: bool = False


FOREIGN: Final[Mapping[str, Foreign]] = {
    "emit-endpoint-scores": Foreign(
        "scores are in the log of decisions (--v 4)", "false", boolean=True
    ),
    "refresh-prometheus-metrics-interval": Foreign("our metrics are computed when they are read"),
    "health-checking": Foreign("gRPC health is always served", "true", boolean=True),
    "enable-grpc-stream-metrics": Foreign("streams are always counted", "true", boolean=True),
    "metrics-endpoint-auth": Foreign(
        "our metrics are served without authentication", "false", boolean=True
    ),
    "metrics-client-ca-file": Foreign("our metrics are served without TLS", ""),
    "metrics-cert-dir": Foreign("our metrics are served without TLS", ""),
    "enable-pprof": Foreign(
        "there is no profiler of Go in a Python process", "false", boolean=True
    ),
    "tls-min-version": Foreign("gRPC takes TLS 1.2 and newer", ""),
    "tls-cipher-suites": Foreign("gRPC chooses them", ""),
    "grpc-max-send-msg-size": Foreign("our messages stay below 64 KiB", ""),
    "allow-experimental-plugins": Foreign("every plugin may be used", "true", boolean=True),
    "zap-devel": Foreign("use --log-format console", "false", boolean=True),
    "zap-stacktrace-level": Foreign("an unexpected error is always logged with its traceback"),
    "zap-time-encoding": Foreign("times are logged in ISO 8601", "iso8601"),
}

REMOVED: Final = dict.fromkeys(
    (
        "total-queued-requests-metric",
        "total-running-requests-metric",
        "kv-cache-usage-percentage-metric",
        "lora-info-metric",
        "cache-info-metric",
    ),
    "was removed: name metrics in engineConfigs of core-metrics-extractor, in the configuration",
)

_ZAP: Final = ("zap-encoder", "zap-log-level")
_ZAP_LEVELS: Final = {"debug": 4, "info": 2, "error": 0, "panic": 0}

_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
}
_QUANTITY: Final = re.compile(r"(\d{1,12})(|k|M|G|Ki|Mi|Gi)", re.ASCII)
_HOST_PORT: Final = re.compile(
    r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9][A-Za-z0-9._-]{0,252}))(?::(\d{1,5}))?", re.ASCII
)
_URL: Final = re.compile(r"(valkeys?|rediss?)://[^\s/]+(/\d{0,4})?", re.ASCII)
_BYTES_MAX: Final = 2**31 - 1
"""What gRPC can be told."""
_MEMORY_BYTES_MIN: Final = 64 * 2**20
_MEMORY_BYTES_MAX: Final = 2**40

_NO_FLAGS: Final = (
    *("file", "request_id", "warnings", "own_namespace", "instance", "own_address"),
)
"""Fields that no flag sets."""

_DISCOVERY: Final = (
    *("pool-name", "endpoint-selector", "endpoint-target-ports"),
    *("ha-enable-leader-election", "lease-name", "config-map"),
)
"""Flags that only mean something in Kubernetes."""

_LISTS: Final = ("endpoint-target-ports", "peers", "round-robin")
_REPLICAS: Final = "url"
"""A list too, where a command asks several pickers."""
"""Flags that take several values, separated by commas."""

F = TypeVar("F", bound=Struct)


def parse_byte_count(text: str) -> ByteCount:
    """Read a quantity of at least one byte and less than 2 GiB; `ValueError` for anything else."""
    return ByteCount(_bytes_of(text, 1, _BYTES_MAX))


def parse_memory_bytes(text: str) -> MemoryBytes:
    """Read a quantity of 64 MiB to 1 TiB; `ValueError` for anything else."""
    return MemoryBytes(_bytes_of(text, _MEMORY_BYTES_MIN, _MEMORY_BYTES_MAX))


def _bytes_of(text: str, least: int, most: int) -> int:
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a number of bytes such as 4194304 or 4Mi")
    count = int(match[1]) * _UNITS[match[2]]
    if not least <= count <= most:
        raise ValueError(f"{text!r} is not one of {least} to {most} bytes")
    return count


def parse_ip_address(text: str) -> IpAddress:
    """Read an IPv4 or IPv6 address without a port; `ValueError` for anything else."""
    try:
        return IpAddress(ip_address(text))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not an IP address without a port such as 127.0.0.1 or ::1"
        ) from error


def parse_host_port(text: str, port: int) -> tuple[str, int]:
    """Read "host:port", or "host" for `port`; IPv6 in brackets, which are left out.

    Raises `ValueError` for anything else.
    """
    match = _HOST_PORT.fullmatch(text)
    if not match or not 1 <= int(match[3] or port) <= 65_535:
        raise ValueError(f"{text!r} is not host:port such as replica-1:9004 or [::1]:9004")
    if match[1]:
        parse_ip_address(match[1])
    return match[1] or match[2], int(match[3] or port)


def parse_serve(arguments: Sequence[str], environment: Mapping[str, str]) -> ServeFlags:
    """Read the command line of `epp serve`. Raises `FlagError`."""
    foreign = {name: flag.boolean for name, flag in FOREIGN.items()}
    foreign |= dict.fromkeys((*REMOVED, *_ZAP), False)
    given, rest = _split(arguments, ServeFlags, foreign)
    if rest:
        raise FlagError(f"unexpected argument {rest[0]!r}, expected flags only")
    for name in given:
        if name in REMOVED:
            raise FlagError(f"--{name} {REMOVED[name]}")
    warnings = [
        f"--{name} has no effect: {flag.sentence}"
        for name, flag in FOREIGN.items()
        if name in given and given.pop(name) != flag.ours
    ]
    _translate_zap(given, warnings)
    given.setdefault("pool-namespace", environment.get("NAMESPACE") or "default")
    given["own_namespace"] = environment.get("NAMESPACE") or given["pool-namespace"]
    given["instance"] = environment.get("POD_NAME", "")
    given["own_address"] = environment.get("POD_IP", "")
    flags = _convert(given, ServeFlags)
    _check_serve(flags)
    if flags.endpoints_file:
        unused = [name for name in _DISCOVERY if name in given and given[name] != "false"]
        warnings += [f"--{name} has no effect: --endpoints-file is given" for name in unused]
    if flags.last_good_dir and not (flags.config_file or flags.endpoints_file):
        warnings.append("--last-good-dir has no effect: no file is given that could be kept")
    if not flags.decisions_dir:
        unread = [name for name in given if name.startswith("decisions-")]
        warnings += [f"--{name} has no effect: --decisions-dir is not given" for name in unread]
    if not flags.capture:
        unread = [name for name in given if name.startswith("capture-")]
        warnings += [f"--{name} has no effect: --capture is not given" for name in unread]
    warnings += _peer_warnings(flags)
    return msgspec.structs.replace(flags, warnings=tuple(warnings))


def parse_envoy(arguments: Sequence[str]) -> EnvoyFlags:
    """Read the command line of `epp envoy-config`. Raises `FlagError`."""
    given, rest = _split(arguments, EnvoyFlags, {})
    if rest:
        raise FlagError(f"unexpected argument {rest[0]!r}, expected flags only")
    return _convert(given, EnvoyFlags)


def parse_check(arguments: Sequence[str]) -> CheckFlags:
    """Read the command line of `epp check-config`. Raises `FlagError`."""
    given, rest = _split(arguments, CheckFlags, {})
    if len(rest) > 1:
        raise FlagError(f"unexpected argument {rest[1]!r}, expected one FILE")
    flags = _convert(given | {"file": rest[0] if rest else ""}, CheckFlags)
    if not flags.file and not flags.explain:
        raise FlagError("expected FILE, - for standard input, or --explain for the default")
    return flags


def parse_explain(arguments: Sequence[str]) -> ExplainFlags:
    """Read the command line of `epp explain`. Raises `FlagError`."""
    given, rest = _split(arguments, ExplainFlags, {})
    if len(rest) != 1 or not rest[0]:
        raise FlagError("expected one REQUEST_ID, the x-request-id of the response")
    flags = _convert(given | {"request_id": rest[0]}, ExplainFlags)
    if not flags.url:
        raise FlagError("--url: expected at least one http://host:port")
    return flags


def parse_top(arguments: Sequence[str]) -> TopFlags:
    """Read the command line of `epp top`. Raises `FlagError`."""
    given, rest = _split(arguments, TopFlags, {})
    if rest:
        raise FlagError(f"unexpected argument {rest[0]!r}, expected flags only")
    flags = _convert(given, TopFlags)
    if not flags.url:
        raise FlagError("--url: expected at least one http://host:port")
    if not 1.0 <= flags.interval <= 60.0:
        raise FlagError(f"--interval: expected 1s to 60s, got {float(flags.interval):g}s")
    return flags


def parse_decisions(arguments: Sequence[str]) -> DecisionsFlags:
    """Read the command line of `epp decisions`. Raises `FlagError`."""
    given, rest = _split(arguments, DecisionsFlags, {})
    if rest:
        raise FlagError(f"unexpected argument {rest[0]!r}, expected flags only")
    return _convert(given, DecisionsFlags)


def parse_changes(arguments: Sequence[str]) -> ChangesFlags:
    """Read the command line of `epp changes`. Raises `FlagError`."""
    given, rest = _split(arguments, ChangesFlags, {})
    if rest:
        raise FlagError(f"unexpected argument {rest[0]!r}, expected flags only")
    flags = _convert(given, ChangesFlags)
    if not 1.0 <= flags.window <= 86_400.0:
        raise FlagError(f"--window: expected 1s to 24h, got {float(flags.window):g}s")
    return flags


def wants_help(arguments: Iterable[str]) -> bool:
    return any(argument in {"-h", "-help", "--help"} for argument in arguments)


def help_text(usage: str, groups: Groups, kind: type[Struct]) -> str:
    """Every flag with its default and one line, by group."""
    defaults = {field.encode_name: field.default for field in _fields(kind)}
    lines = [f"usage: {usage}"]
    for title, flags in groups.items():
        lines += ["", f"{title}:"]
        for name, sentence in flags.items():
            default = defaults[name.replace("-", "_")]
            shown = "" if default in (None, "", ()) else f" (default: {_shown(default)})"
            lines.append(f"  --{name}")
            lines.append(f"      {sentence}{shown}")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{float(default):g}s" if isinstance(default, Duration) else str(default)


def _fields(kind: type[Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return tuple(field for field in msgspec.structs.fields(kind) if field.name not in _NO_FLAGS)


def _split(
    arguments: Sequence[str], kind: type[Struct], foreign: Mapping[str, bool]
) -> tuple[dict[str, str], list[str]]:
    """Flags with their values, the last of each; and what is no flag."""
    booleans = {field.name.replace("_", "-"): field.type is bool for field in _fields(kind)}
    booleans |= foreign
    given: dict[str, str] = {}
    rest: list[str] = []
    pending = list(reversed(arguments))
    while pending:
        argument = pending.pop()
        if argument == "--":
            return given, rest + pending[::-1]
        if not argument.startswith("-") or argument == "-":
            rest.append(argument)
            continue
        dashes = 2 if argument.startswith("--") else 1
        name, equals, value = argument[dashes:].partition("=")
        if name not in booleans:
            near = get_close_matches(name, booleans, n=1)
            hint = f", did you mean --{near[0]}?" if near else ""
            raise FlagError(f"unknown flag {'-' * dashes + name!r}{hint}")
        if booleans[name]:
            value = _boolean(name, value) if equals else "true"
        elif not equals:
            if not pending:
                raise FlagError(f"--{name} needs a value")
            value = pending.pop()
        given[name] = value
    return given, rest


def _boolean(name: str, text: str) -> str:
    """Go's spellings of a boolean."""
    if text in {"1", "t", "T", "true", "TRUE", "True"}:
        return "true"
    if text in {"0", "f", "F", "false", "FALSE", "False"}:
        return "false"
    raise FlagError(f"--{name}: expected true or false, got {text!r}")


def _translate_zap(given: dict[str, str], warnings: list[str]) -> None:
    """The reference picker's log flags, in terms of ours."""
    encoder, level = given.pop("zap-encoder", ""), given.pop("zap-log-level", "")
    if encoder not in {"", "json", "console"}:
        raise FlagError(f"--zap-encoder: expected json or console, got {encoder!r}")
    if encoder:
        given.setdefault("log-format", encoder)
    if not level:
        return
    if level not in _ZAP_LEVELS and not level.isdecimal():
        known = ", ".join(_ZAP_LEVELS)
        raise FlagError(f"--zap-log-level: expected {known} or a number, got {level!r}")
    given.setdefault("v", str(_ZAP_LEVELS.get(level, level)))


def _convert(given: Mapping[str, str], kind: type[F]) -> F:
    values: dict[str, Any] = {name: given[name] for name in _NO_FLAGS if name in given}
    for field in _fields(kind):
        name = field.name.replace("_", "-")
        if name in given:
            values[field.name] = _read(name, given[name], field.type)
    return kind(**values)


def _read(name: str, text: str, kind: Any) -> Any:
    """The value of flag `name` as a `kind`."""
    value: Any = text
    if name in _LISTS or (name == _REPLICAS and kind is not str):
        value = [item.strip() for item in text.split(",") if item.strip()]
    if isinstance(kind, type) and issubclass(kind, StrEnum) and text not in list(kind):
        raise FlagError(f"--{name}: expected {' or '.join(kind)}, got {text!r}")
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=_decode)
    except msgspec.ValidationError as error:
        sentence = str(error).partition(" - at `$")[0].removesuffix(", got `str`")
        if sentence.startswith("Expected"):
            sentence = f"e{sentence[1:]}, got {text!r}"
        raise FlagError(f"--{name}: {sentence}") from error


def _decode(kind: type[Any], text: str) -> Any:
    readers: dict[type[Any], Callable[[str], Any]] = {
        Duration: parse_duration,
        ByteCount: parse_byte_count,
        MemoryBytes: parse_memory_bytes,
        IpAddress: parse_ip_address,
    }
    return readers[kind](text)


def _check_serve(flags: ServeFlags) -> None:
    """What only several flags together tell."""
    if flags.config_file and flags.config_text:
        raise FlagError("--config-file and --config-text are both given, expected one")
    if flags.pool_name and flags.endpoint_selector:
        raise FlagError("--pool-name and --endpoint-selector are both given, expected one")
    if flags.client_ca_file and not flags.secure_serving:
        raise FlagError("--client-ca-file is given, expected --secure-serving too: it is for TLS")
    _check_peers(flags)
    if flags.capture_max_bytes < 2 * flags.capture_file_max_bytes:
        raise FlagError(
            f"--capture-max-bytes: expected at least twice --capture-file-max-bytes, "
            f"{2 * flags.capture_file_max_bytes}, got {flags.capture_max_bytes}"
        )
    if flags.decisions_max_bytes < HISTORY_BYTES_MIN:
        raise FlagError(
            f"--decisions-max-bytes: expected at least {HISTORY_BYTES_MIN}, "
            f"got {flags.decisions_max_bytes}"
        )
    ports = (flags.grpc_port, flags.grpc_health_port, flags.metrics_port)
    if len(set(ports)) < len(ports):
        names = "--grpc-port, --grpc-health-port and --metrics-port"
        raise FlagError(f"{names} are {ports[0]}, {ports[1]} and {ports[2]}, expected three")
    for name, duration in (
        ("refresh-metrics-interval", flags.refresh_metrics_interval),
        ("metrics-staleness-threshold", flags.metrics_staleness_threshold),
        ("request-timeout", flags.request_timeout),
        ("capture-file-max-age", flags.capture_file_max_age),
        ("decisions-max-age", flags.decisions_max_age),
    ):
        if duration is not None and duration <= 0:
            raise FlagError(f"--{name}: expected more than 0s, got {float(duration):g}s")
    for name, duration in (
        ("lease-ttl-without-response-phase", flags.lease_ttl_without_response_phase),
        ("connection-age-max", flags.connection_age_max),
        ("drain-grace", flags.drain_grace),
        ("drain-timeout", flags.drain_timeout),
        ("peer-snapshot-timeout", flags.peer_snapshot_timeout),
        ("decision-records-keep", flags.decision_records_keep),
    ):
        if duration < 0:
            raise FlagError(f"--{name}: expected at least 0s, got {float(duration):g}s")
    if flags.decision_records_max_bytes < RECORDS_BYTES_MIN:
        raise FlagError(
            f"--decision-records-max-bytes: expected at least {RECORDS_BYTES_MIN}, "
            f"got {flags.decision_records_max_bytes}"
        )
    if not flags.endpoints_file:
        _check_discovery(flags)


def _check_peers(flags: ServeFlags) -> None:
    ways = {
        "--peers": flags.peers,
        "--peer-service": flags.peer_service,
        "--peer-url": flags.peer_url,
        "--peer-url-file": flags.peer_url_file,
    }
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise FlagError(f"{' and '.join(given)} are given, expected one of them")
    # What is wrong with it is not quoted: there may be a password in it.
    if flags.peer_url and not is_peer_url(flags.peer_url):
        raise FlagError(f"--peer-url: expected {PEER_URL}")
    flag = "--peers" if flags.peers else "--peer-service"
    try:
        targets = flags.peer_targets
    except ValueError as error:
        raise FlagError(f"{flag}: {error}") from error
    for name, port in (
        ("--grpc-port", flags.grpc_port),
        ("--grpc-health-port", flags.grpc_health_port),
        ("--metrics-port", flags.metrics_port),
    ):
        if targets and port == flags.peer_port:
            raise FlagError(f"{name} and --peer-port are both {port}, expected two")


PEER_URL: Final = "valkey://[user:password@]host[:port][/db], or redis://, valkeys://, rediss://"


def is_peer_url(text: str) -> bool:
    """Whether `text` is a URL of Valkey or Redis."""
    return _URL.fullmatch(text) is not None


def _peer_warnings(flags: ServeFlags) -> list[str]:
    if flags.peer_secret_file and not flags.meshes:
        return ["--peer-secret-file has no effect: neither --peers nor --peer-service is given"]
    if flags.meshes and flags.secure_serving and not flags.peer_secret_file:
        sentence = "replicas speak to each other in plaintext, though gateways are spoken to by TLS"
        return [f"{sentence}: give --peer-secret-file"]
    return []


def _check_discovery(flags: ServeFlags) -> None:
    if not (flags.pool_name or flags.endpoint_selector):
        raise FlagError("no endpoints: give --pool-name, --endpoint-selector or --endpoints-file")
    if flags.endpoint_selector and not flags.endpoint_target_ports:
        raise FlagError("--endpoint-selector is given, expected --endpoint-target-ports too")
    if flags.config_map and not flags.config_file:
        raise FlagError(
            "--config-map is given, expected --config-file too: it counts at start and whenever "
            "the API server is away"
        )
