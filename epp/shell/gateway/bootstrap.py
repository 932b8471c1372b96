"""The Envoy bootstrap for standalone use, which `epp envoy-config` prints.

A laptop, a virtual machine or a pod without a gateway controller needs one Envoy in front of the
endpoints, connected to the picker over ext_proc. Each value that differs from Envoy's default has
its reason beside it. The messages are built with `envoy-data-plane`, so that an unknown field is a
type error here instead of a rejection by Envoy.
"""

from datetime import timedelta
from ipaddress import ip_address
from typing import Final

import msgspec
import yaml
from betterproto2 import Casing, Message
from envoy_data_plane.envoy.config.bootstrap.v3 import (
    Admin,
    Bootstrap,
    BootstrapStaticResources,
    LayeredRuntime,
    RuntimeLayer,
)
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterLbPolicy,
    ClusterOriginalDstLbConfig,
    OutlierDetection,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as HeaderRule
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    BackoffStrategy,
    DataSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    HealthCheckTlsOptions,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    KeepaliveSettings,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    RetryPolicyRetryPriority,
    SocketAddress,
    TransportSocket,
)
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpOptions
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.overload.v3 import OverloadManager, ResourceMonitor
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.header_mutation.v3 import (
    HeaderMutation,
    Mutations,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerServerHeaderTransformation,
    HttpConnectionManagerUpgradeConfig,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
    DownstreamConnectionsConfig,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.extensions.retry.priority.previous_priorities.v3 import (
    PreviousPrioritiesConfig,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CertificateValidationContextTrustChainVerification,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    TlsCertificate,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any, Value
from envoy_data_plane.google.protobuf import Struct as ProtobufStruct
from msgspec import Struct

from epp.core.protocol.messages import REWRITE_HEADERS
from epp.flags.values import BodyMode

DESTINATION_HEADER: Final = "x-gateway-destination-endpoint"

CLIENT_HEADERS_REMOVED: Final = (
    DESTINATION_HEADER,
    f"{DESTINATION_HEADER}-subset",
    f"{DESTINATION_HEADER}-served",
    f"{DESTINATION_HEADER}-scores",
    f"{DESTINATION_HEADER}-fallback",
    *REWRITE_HEADERS,
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)
"""Headers that only gateway and picker may set, and that are removed from clients' requests. With
the picker down and failing open, ORIGINAL_DST would send a request to any address that the client
names. A picker with `--trust-model-rewrite-header` would obey a client's model rewrite.
"""

_RESPONSE_MAX: Final = timedelta(days=1)
"""Maximum duration of a response that Envoy forwards. Envoy's default of 15 s would end long
generations.
"""
_MESSAGE_TIMEOUT_MAX: Final = timedelta(hours=1)
"""Longest timeout that the picker may ask for while a request waits: the most that Envoy accepts."""
_STREAM_IDLE_MAX: Final = timedelta(hours=1)
"""Maximum time without a byte in either direction of a stream through Envoy. A response that is not
streamed may take this long; Envoy's default of 5 minutes would end it.
"""
_REQUEST_HEADERS_MAX: Final = timedelta(seconds=10)
_REQUEST_MAX: Final = timedelta(minutes=5)
"""Maximum time for a client to send its request to Envoy, because a slow body occupies memory of
the picker. Envoy has no limit by default and recommends this one for edge proxies.
"""

_RUNTIME: Final = {
    # Close a connection that has reset most of its first 500 streams within a second each.
    "overload.premature_reset_total_stream_count": 500,
    "overload.premature_reset_min_stream_lifetime_seconds": 1,
    # Limit requests per I/O cycle, so that streams opened and reset in one packet do not all reach
    # the picker.
    "http.max_requests_per_io_cycle": 1,
}
"""Runtime settings of Envoy that protect it against rapid reset of streams (CVE-2023-44487). The
first two values are Envoy's defaults, stated explicitly.
"""

_ENDPOINT_CONNECT_TIMEOUT: Final = timedelta(seconds=5)
_PICKER_CONNECT_TIMEOUT: Final = timedelta(seconds=1)

_ENDPOINT_IDLE_MAX: Final = timedelta(seconds=4)
"""Maximum idle time of Envoy's connections to endpoints. It is below the 5 s after which uvicorn,
and so vLLM, closes an idle connection; a request sent at that time would fail with 503.
"""

_HEALTH_INTERVAL: Final = timedelta(milliseconds=500)
_HEALTH_TIMEOUT: Final = timedelta(seconds=1)
_HEALTH_FAILURES_MAX: Final = 2
"""Number of consecutive failed health checks after which Envoy considers a picker unhealthy. With
the interval of these checks, Envoy stops using a draining picker within its default --drain-grace
of 5 s, and a silent picker within 3 s. A pause of the picker that is shorter than the timeout of a
check has no effect.
"""

_PICKER_RETRIES_MAX: Final = 2
"""Maximum number of times that Envoy retries a request's stream, each at a picker that was not
tried before. A request that crashes pickers therefore reaches three pickers at most.
"""
_PICKER_RETRY_ON: Final = "connect-failure,refused-stream,reset,unavailable"
"""Conditions under which Envoy retries a stream to a picker. They all end the stream before the
picker's first answer; Envoy does not retry a stream after that.
"""
_PICKER_RETRY_BACK_OFF: Final = timedelta(milliseconds=10)
_PICKER_RETRY_BACK_OFF_MAX: Final = timedelta(milliseconds=100)
_HOST_DRAWS_MAX: Final = 32
"""Maximum number of random draws in which Envoy searches for a picker that the request has not
tried. Of two pickers, a dead one has the fewest open streams and wins three draws of four.
"""

_PICKER_PING_INTERVAL: Final = timedelta(seconds=1)
_PICKER_PING_TIMEOUT: Final = timedelta(seconds=3)
"""Time without an answer to an HTTP/2 ping after which Envoy closes its connections to a frozen
picker. Until then, requests that wait for the picker's first answer hang. Closing fails every
request that the picker has placed and that is still running. The longest observed pause of a
healthy event loop, below a second, must therefore not trigger it.
"""

_EJECTED_FOR: Final = timedelta(seconds=2)
_EJECTION_INTERVAL: Final = timedelta(milliseconds=500)
_EJECTED_PERCENT_MAX: Final = 100
_PANIC_BELOW_PERCENT: Final = 1.0
"""Percentage of healthy pickers below which Envoy uses all pickers, healthy or not. Envoy's default
of 50 sends two of three requests to dead pickers if two of three are dead. With 0, requests are
refused if no picker is known to be healthy.
"""

_CONCURRENT_MAX: Final = 40_000
"""Maximum number of concurrent connections and requests of Envoy to endpoints and to pickers each,
of retries to pickers, and of connections from clients. Envoy's default of 1,024 is reached by 1,024
open generations, each of which also has a stream to the picker. Its default of three concurrent
retries is exceeded by the fourth request of a dead picker.
"""

_PER_CONNECTION_BUFFER_BYTES: Final = 32_768
"""Number of bytes that Envoy buffers on each connection for a slow peer; the value of Envoy's
reference configuration for edge proxies.
"""

_HTTP2_STREAM_WINDOW_BYTES: Final = 65_536
_HTTP2_CONNECTION_WINDOW_BYTES: Final = 1_048_576
_HTTP2_STREAMS_PER_CONNECTION_MAX: Final = 100
"""Maximum number of concurrent HTTP/2 streams on a connection. This value and the two window sizes
are Envoy's recommendations for edge proxies.
"""

ALIVE_PATH: Final = "/alive"
"""HTTP path that answers 200 as long as Envoy serves. In contrast, `/ready` already fails while the
picker drains Envoy.
"""
_PICKER_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_PICKER: Final = "ext_proc"
_ENDPOINTS: Final = "endpoints"
_ADMIN: Final = "admin"


class BootstrapOptions(Struct, frozen=True, kw_only=True):
    """Options of the Envoy bootstrap. The constructor raises `ValueError`, in one sentence, for an
    impossible value.
    """

    listen_host: str = "0.0.0.0"  # noqa: S104  a gateway listens everywhere
    listen_port: int = 8081
    admin_port: int = 19000
    """Port of Envoy's admin interface, on loopback only, because the interface can stop Envoy."""
    readiness_port: int | None = 19001
    """Envoy's port for /ready, /alive and /stats/prometheus on `listen_host`, or None for no such
    port.
    """
    picker_address: str = "127.0.0.1:9002"
    """Address of the picker as "host:port", with IPv6 in brackets. A name is resolved by DNS
    repeatedly. Several addresses, separated by commas, are replicas that share the requests.
    """
    second_picker_address: str = ""
    """Addresses of the pickers that Envoy uses while none in `picker_address` is healthy, in the
    form of `picker_address`; empty for none. A name may resolve to many pickers.
    """
    plaintext: bool = False
    """True if Envoy connects to the picker with plaintext HTTP/2 (h2c) instead of TLS."""
    picker_ca_file: str = ""
    """PEM file of the authorities that may sign the picker's certificate; empty to accept any
    certificate.
    """
    picker_server_name: str = ""
    """DNS name that the picker's certificate must have; empty to accept any name."""
    client_cert_path: str = ""
    """Directory with the `tls.crt` and `tls.key` that Envoy presents to the picker; empty to
    present no certificate.
    """
    request_body_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    response_body_mode: BodyMode = BodyMode.NONE
    """Mode in which Envoy passes response bodies to the picker. NONE avoids a message for each
    chunk; the picker still learns when the response ends.
    """
    fail_open: bool = False
    """True if Envoy forwards requests without the picker's decision while the picker is down.
    Without another source of destinations these requests find no endpoint, and fail with 503
    instead of 500.
    """
    message_timeout_s: float = 10.0
    """Maximum time in seconds that Envoy waits for one answer of the picker; not enforced in
    full-duplex mode (Envoy 1.40).
    """
    request_body_max_bytes: int = 33_554_432
    """Number of bytes that Envoy buffers for each connection with the body mode BUFFERED; it should
    equal the picker's --request-body-max-bytes.
    """
    round_robin: tuple[str, ...] = ()
    """Addresses "ip:port" of endpoints that Envoy uses round robin without any picker, as a
    baseline for comparisons; () to use the picker.
    """

    def __post_init__(self) -> None:
        ports = (self.listen_port, self.admin_port, self.readiness_port)
        for port in ports:
            if port is not None and not 0 < port <= 65_535:
                raise ValueError(f"port {port} is not one of 1 to 65535")
        for address in (
            *self.picker_addresses,
            *self.second_picker_addresses,
            *self.round_robin,
        ):
            _split(address)
        if self.plaintext and (self.picker_ca_file or self.client_cert_path):
            raise ValueError(
                "certificates are given, but the connection to the picker is plaintext, without TLS"
            )
        if self.picker_server_name and not self.picker_ca_file:
            raise ValueError(
                f"the picker's name {self.picker_server_name!r} is given without the file of "
                "certificate authorities that may have signed its certificate"
            )
        if self.message_timeout_s <= 0:
            raise ValueError(f"message timeout {self.message_timeout_s} s is not above 0")
        if not 0 < self.request_body_max_bytes < 2**32:
            raise ValueError(
                f"request body limit of {self.request_body_max_bytes} bytes is not one of "
                "1 to 4294967295"
            )

    @property
    def picker_addresses(self) -> tuple[str, ...]:
        """Addresses in `picker_address`, one for each replica."""
        return _listed(self.picker_address)

    @property
    def second_picker_addresses(self) -> tuple[str, ...]:
        """Addresses in `second_picker_address`, which Envoy uses while no picker of the first
        choice is healthy.
        """
        return _listed(self.second_picker_address) if self.second_picker_address else ()


def _listed(addresses: str) -> tuple[str, ...]:
    return tuple(address.strip() for address in addresses.split(","))


def render(options: BootstrapOptions) -> str:
    """Return the Envoy bootstrap as YAML for `envoy --config-path`."""
    return yaml.safe_dump(
        bootstrap(options).to_dict(casing=Casing.SNAKE), sort_keys=False, width=100
    )


def bootstrap(options: BootstrapOptions) -> Bootstrap:
    """Return the Envoy bootstrap as a protobuf message."""
    listeners = [_listener(options)]
    if options.round_robin:
        clusters = [_round_robin_cluster(options.round_robin)]
    else:
        clusters = [_destination_cluster(), _picker_cluster(options)]
    if options.readiness_port is not None:
        listeners.append(_readiness_listener(options.listen_host, options.readiness_port))
        clusters.append(_static_cluster(_ADMIN, (f"127.0.0.1:{options.admin_port}",)))
    return Bootstrap(
        static_resources=BootstrapStaticResources(listeners=listeners, clusters=clusters),
        admin=Admin(
            address=_address("127.0.0.1", options.admin_port), ignore_global_conn_limit=True
        ),
        layered_runtime=_runtime(),
        overload_manager=OverloadManager(resource_monitors=[_connection_limit()]),
    )


def _listener(options: BootstrapOptions) -> Listener:
    buffered = options.request_body_mode is BodyMode.BUFFERED and not options.round_robin
    # Data after an upgrade has no end to wait for, so the picker chooses by the headers.
    upgraded = msgspec.structs.replace(
        options, request_body_mode=BodyMode.NONE, response_body_mode=BodyMode.NONE
    )
    connections = HttpConnectionManager(
        stat_prefix="inference",
        # The client's address and the path are verified by Envoy from here on.
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=(
            HttpConnectionManagerPathWithEscapedSlashesAction.UNESCAPE_AND_REDIRECT
        ),
        # The request id is kept, so that a client finds its request in the logs of Envoy, picker
        # and engine.
        preserve_external_request_id=True,
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        stream_idle_timeout=_STREAM_IDLE_MAX,
        request_headers_timeout=_REQUEST_HEADERS_MAX,
        request_timeout=_REQUEST_MAX,
        http2_protocol_options=_http2(
            streams_max=_HTTP2_STREAMS_PER_CONNECTION_MAX, extended_connect=True
        ),
        route_config=_routes(
            RouteAction(cluster=_ENDPOINTS, timeout=_RESPONSE_MAX, idle_timeout=_STREAM_IDLE_MAX),
            RouteMatch(prefix="/"),
        ),
        http_filters=_http_filters(options),
        upgrade_configs=[
            HttpConnectionManagerUpgradeConfig(
                upgrade_type="websocket", filters=_http_filters(upgraded)
            )
        ],
    )
    return Listener(
        name="inference",
        address=_address(options.listen_host, options.listen_port),
        per_connection_buffer_limit_bytes=(
            options.request_body_max_bytes if buffered else _PER_CONNECTION_BUFFER_BYTES
        ),
        filter_chains=[_chain(connections)],
    )


def _http_filters(options: BootstrapOptions) -> list[HttpFilter]:
    filters = [_http_filter("envoy.filters.http.header_mutation", _strip_client_headers())]
    if not options.round_robin:
        filters.append(_http_filter("envoy.filters.http.ext_proc", _picker_filter(options)))
    filters.append(_http_filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)))
    return filters


def _readiness_listener(host: str, port: int) -> Listener:
    connections = HttpConnectionManager(
        stat_prefix="readiness",
        route_config=_routes(
            RouteAction(cluster=_ADMIN),
            RouteMatch(path="/ready"),
            RouteMatch(path="/stats/prometheus"),
            answered=RouteMatch(path=ALIVE_PATH),
        ),
        http_filters=[_http_filter("envoy.filters.http.router", Router())],
    )
    return Listener(
        name="readiness",
        address=_address(host, port),
        filter_chains=[_chain(connections)],
        ignore_global_conn_limit=True,
    )


def _strip_client_headers() -> HeaderMutation:
    rules = [HeaderRule(remove=name) for name in CLIENT_HEADERS_REMOVED]
    return HeaderMutation(mutations=Mutations(request_mutations=rules))


def _picker_filter(options: BootstrapOptions) -> ExternalProcessor:
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    full_duplex = options.request_body_mode is BodyMode.FULL_DUPLEX_STREAMED
    return ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(
                cluster_name=_PICKER, authority=options.picker_addresses[0]
            ),
            retry_policy=_picker_retries(bool(options.second_picker_address)),
        ),
        failure_mode_allow=options.fail_open,
        message_timeout=timedelta(seconds=options.message_timeout_s),
        # A request that waits in the picker's queue asks for a longer timeout.
        max_message_timeout=_MESSAGE_TIMEOUT_MAX,
        processing_mode=ProcessingMode(
            request_header_mode=send,
            request_body_mode=ProcessingModeBodySendMode[options.request_body_mode],
            # Envoy rejects full duplex without trailers.
            request_trailer_mode=send if full_duplex else skip,
            response_header_mode=send,
            response_body_mode=ProcessingModeBodySendMode[options.response_body_mode],
            # Trailers keep the stream open to the end of the response without a message for each
            # chunk. The picker thereby learns when the request has ended.
            response_trailer_mode=send,
        ),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(
                untyped=["envoy.lb", "envoy.lb.subset_hint"]
            ),
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=["envoy.lb"]),
        ),
    )


def _destination_cluster() -> Cluster:
    """Return Envoy's cluster that sends each request to the destination that the picker chose. It
    has no retries, because a retry would reach the same address.
    """
    return Cluster(
        name=_ENDPOINTS,
        type=ClusterDiscoveryType.ORIGINAL_DST,
        lb_policy=ClusterLbPolicy.CLUSTER_PROVIDED,
        connect_timeout=_ENDPOINT_CONNECT_TIMEOUT,
        original_dst_lb_config=ClusterOriginalDstLbConfig(
            use_http_header=True, http_header_name=DESTINATION_HEADER
        ),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_endpoint_http(),
    )


def _round_robin_cluster(addresses: tuple[str, ...]) -> Cluster:
    cluster = _static_cluster(_ENDPOINTS, addresses)
    cluster.connect_timeout = _ENDPOINT_CONNECT_TIMEOUT
    cluster.lb_policy = ClusterLbPolicy.ROUND_ROBIN
    cluster.circuit_breakers = _circuit_breakers()
    cluster.typed_extension_protocol_options = _endpoint_http()
    return cluster


def _picker_cluster(options: BootstrapOptions) -> Cluster:
    cluster = _static_cluster(_PICKER, options.picker_addresses, options.second_picker_addresses)
    if options.second_picker_address:
        # A name that is not resolved yet must not delay the use of the first choice.
        cluster.wait_for_warm_on_init = False
    cluster.connect_timeout = _PICKER_CONNECT_TIMEOUT
    cluster.lb_policy = ClusterLbPolicy.LEAST_REQUEST
    cluster.circuit_breakers = _circuit_breakers(retries_max=_CONCURRENT_MAX)
    cluster.typed_extension_protocol_options = _http_options(
        HttpProtocolOptions(
            explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                http2_protocol_options=_http2(
                    keepalive=KeepaliveSettings(
                        interval=_PICKER_PING_INTERVAL, timeout=_PICKER_PING_TIMEOUT
                    )
                )
            )
        )
    )
    cluster.common_lb_config = ClusterCommonLbConfig(
        healthy_panic_threshold=Percent(value=_PANIC_BELOW_PERCENT)
    )
    cluster.outlier_detection = _refusing_pickers()
    check = HealthCheck(
        timeout=_HEALTH_TIMEOUT,
        interval=_HEALTH_INTERVAL,
        # Without this value, a picker without traffic is checked only once a minute.
        no_traffic_interval=_HEALTH_INTERVAL,
        unhealthy_threshold=_HEALTH_FAILURES_MAX,
        healthy_threshold=1,
        reuse_connection=True,
        grpc_health_check=HealthCheckGrpcHealthCheck(service_name=_PICKER_SERVICE),
    )
    if not options.plaintext:
        check.tls_options = HealthCheckTlsOptions(alpn_protocols=["h2"])
        cluster.transport_socket = _picker_tls(options)
    cluster.health_checks = [check]
    return cluster


def _picker_retries(second_choice: bool) -> RetryPolicy:
    """Return Envoy's retry policy for streams to which the picker has not answered yet. Envoy
    buffers the first 64 KiB of a stream for resending.
    """
    policy = RetryPolicy(
        num_retries=_PICKER_RETRIES_MAX,
        retry_on=_PICKER_RETRY_ON,
        retry_back_off=BackoffStrategy(
            base_interval=_PICKER_RETRY_BACK_OFF, max_interval=_PICKER_RETRY_BACK_OFF_MAX
        ),
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=Any.pack(PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=_HOST_DRAWS_MAX,
    )
    if second_choice:
        # Otherwise a picker that refused would be tried again before it is known to be ejected.
        policy.retry_priority = RetryPolicyRetryPriority(
            name="envoy.retry_priorities.previous_priorities",
            typed_config=Any.pack(PreviousPrioritiesConfig(update_frequency=1)),
        )
    return policy


def _refusing_pickers() -> OutlierDetection:
    """Return Envoy's outlier detection for pickers. A refused connection ejects a picker for some
    seconds, or until a health check succeeds.

    Five consecutive gRPC errors also eject it, as is Envoy's default. If all pickers are ejected,
    Envoy uses all of them.
    """
    return OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
        enforcing_success_rate=0,
        interval=_EJECTION_INTERVAL,
        base_ejection_time=_EJECTED_FOR,
        max_ejection_percent=_EJECTED_PERCENT_MAX,
    )


def _picker_tls(options: BootstrapOptions) -> TransportSocket:
    common = CommonTlsContext(alpn_protocols=["h2"], validation_context=_picker_trust(options))
    if options.client_cert_path:
        common.tls_certificates = [
            TlsCertificate(
                certificate_chain=DataSource(filename=f"{options.client_cert_path}/tls.crt"),
                private_key=DataSource(filename=f"{options.client_cert_path}/tls.key"),
            )
        ]
    context = UpstreamTlsContext(common_tls_context=common, sni=options.picker_server_name)
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def _picker_trust(options: BootstrapOptions) -> CertificateValidationContext:
    if not options.picker_ca_file:
        return CertificateValidationContext(
            trust_chain_verification=(
                CertificateValidationContextTrustChainVerification.ACCEPT_UNTRUSTED
            )
        )
    trust = CertificateValidationContext(trusted_ca=DataSource(filename=options.picker_ca_file))
    if options.picker_server_name:
        trust.match_typed_subject_alt_names = [
            SubjectAltNameMatcher(
                san_type=SubjectAltNameMatcherSanType.DNS,
                matcher=StringMatcher(exact=options.picker_server_name),
            )
        ]
    return trust


def _runtime() -> LayeredRuntime:
    values = ProtobufStruct(
        fields={name: Value(number_value=number) for name, number in _RUNTIME.items()}
    )
    return LayeredRuntime(layers=[RuntimeLayer(name="homing", static_layer=values)])


def _static_cluster(name: str, *choices: tuple[str, ...]) -> Cluster:
    """Return an Envoy cluster of fixed addresses; if any of them is a name instead of an IP
    address, DNS resolves it repeatedly.

    Each of `choices` is a list of "host:port". A later list is used while no earlier one has a
    healthy address. Empty lists are omitted.
    """
    places = [[_split(address) for address in choice] for choice in choices if choice]
    kind = ClusterDiscoveryType.STATIC
    if not all(_is_ip(host) for choice in places for host, _ in choice):
        kind = ClusterDiscoveryType.STRICT_DNS
    endpoints = [
        LocalityLbEndpoints(
            priority=priority,
            lb_endpoints=[
                LbEndpoint(endpoint=Endpoint(address=_address(host, port))) for host, port in choice
            ],
        )
        for priority, choice in enumerate(places)
    ]
    return Cluster(
        name=name,
        type=kind,
        load_assignment=ClusterLoadAssignment(cluster_name=name, endpoints=endpoints),
    )


def _endpoint_http() -> dict[str, Any]:
    return _http_options(
        HttpProtocolOptions(
            common_http_protocol_options=CommonHttpOptions(idle_timeout=_ENDPOINT_IDLE_MAX),
            explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                http_protocol_options=Http1ProtocolOptions()
            ),
        )
    )


def _http_options(options: HttpProtocolOptions) -> dict[str, Any]:
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(options)}


def _http2(
    streams_max: int | None = None,
    keepalive: KeepaliveSettings | None = None,
    *,
    extended_connect: bool = False,
) -> Http2ProtocolOptions:
    """Return the HTTP/2 options of one Envoy listener or cluster.

    With `extended_connect`, clients may open WebSockets by an extended CONNECT (RFC 8441).
    """
    return Http2ProtocolOptions(
        max_concurrent_streams=streams_max,
        connection_keepalive=keepalive,
        allow_connect=extended_connect,
        initial_stream_window_size=_HTTP2_STREAM_WINDOW_BYTES,
        initial_connection_window_size=_HTTP2_CONNECTION_WINDOW_BYTES,
    )


def _connection_limit() -> ResourceMonitor:
    limit = DownstreamConnectionsConfig(max_active_downstream_connections=_CONCURRENT_MAX)
    return ResourceMonitor(
        name="envoy.resource_monitors.global_downstream_max_connections",
        typed_config=Any.pack(limit),
    )


def _circuit_breakers(retries_max: int | None = None) -> CircuitBreakers:
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=_CONCURRENT_MAX,
                max_pending_requests=_CONCURRENT_MAX,
                max_requests=_CONCURRENT_MAX,
                max_retries=retries_max,
            )
        ]
    )


def _routes(
    action: RouteAction, *matches: RouteMatch, answered: RouteMatch | None = None
) -> RouteConfiguration:
    routes = [Route(match=match, route=action) for match in matches]
    if answered is not None:
        routes.append(Route(match=answered, direct_response=DirectResponseAction(status=200)))
    return RouteConfiguration(virtual_hosts=[VirtualHost(name="all", domains=["*"], routes=routes)])


def _chain(connections: HttpConnectionManager) -> FilterChain:
    name = "envoy.filters.network.http_connection_manager"
    return FilterChain(filters=[Filter(name=name, typed_config=Any.pack(connections))])


def _http_filter(name: str, config: Message) -> HttpFilter:
    return HttpFilter(name=name, typed_config=Any.pack(config))


def _address(host: str, port: int) -> Address:
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def _split(address: str) -> tuple[str, int]:
    """Split "host:port" and return the host without brackets, and the port. Raises `ValueError` if
    either is malformed.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"address {address!r} is not host:port; an IPv6 host needs brackets")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65_535):
        raise ValueError(f"address {address!r} does not end in a port of 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
