"""Convert JSON objects of the API server to values of the picker.

Only the required members are read. A missing member has the API server's default. A member of a
wrong type raises `msgspec.ValidationError`, which contains its path. This module has no I/O.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field

from epp.core.prompt.rewrite import ModelRewrites, RewriteRule, Target
from epp.core.types import Endpoint, MetricsTarget, Seconds

READY_AFTER_S: Final[Seconds] = 5.0
"""Time in seconds, after a Ready pod joined the pool, from which it is used although it could not
be scraped.
"""
POOL_GROUP: Final = "inference.networking.k8s.io"
EXTENSION_GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")
"""API groups in which the kinds InferenceObjective and InferenceModelRewrite are searched; the
first available one is used.
"""
EXTENSION_VERSION: Final = "v1alpha2"
ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")

Port = Annotated[int, Meta(ge=1, le=65_535)]


class Collection(Struct, frozen=True, kw_only=True):
    """The objects of one kind in one namespace of the API server, or of the whole cluster,
    optionally restricted by selectors.
    """

    group: str = ""
    """API group of the kind; "" is the core group."""
    version: str = "v1"
    resource: str
    """Plural name of the kind as in a Role, such as "pods"."""
    namespace: str
    """Namespace of the objects; "" for a kind without namespaces, such as nodes."""
    label_selector: str = ""
    field_selector: str = ""
    metadata_only: bool = False
    """True if only names, labels and annotations of the objects are needed."""

    @property
    def path(self) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if not self.namespace:
            return f"{root}/{self.resource}"
        return f"{root}/namespaces/{self.namespace}/{self.resource}"

    @property
    def selectors(self) -> dict[str, str]:
        """Label and field selectors of the collection as query parameters."""
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {name: value for name, value in selectors.items() if value}

    def __str__(self) -> str:
        group = f".{self.group}" if self.group else ""
        where = f"namespace {self.namespace}" if self.namespace else "the cluster"
        return f"{self.resource}{group} in {where}"

    def accept(self, verb: str) -> str:
        """Return the media types to request for `verb`, "list" or "watch"; "" for whole objects."""
        if not self.metadata_only:
            return ""
        kind = "PartialObjectMetadataList" if verb == "list" else "PartialObjectMetadata"
        return f"application/json;as={kind};v=v1;g=meta.k8s.io,application/json"


# EndpointSlice


class _Endpoints(Struct, frozen=True):
    addresses: list[str] | None = None


class _EndpointSlice(Struct, frozen=True):
    endpoints: list[_Endpoints] | None = None


_decode_endpoint_slice = msgspec.json.Decoder(_EndpointSlice).decode


def read_endpoint_slice(raw: bytes) -> frozenset[str]:
    """Return the IP addresses in the JSON of an EndpointSlice, including those of pods that are not
    Ready.

    Host names are skipped.
    """
    found: set[str] = set()
    for endpoint in _decode_endpoint_slice(raw).endpoints or ():
        for address in endpoint.addresses or ():
            with contextlib.suppress(ValueError):
                # A slice of type FQDN contains names.
                found.add(str(ip_address(address)))
    return frozenset(found)


# InferencePool


class Pool(Struct, frozen=True, kw_only=True):
    """The name, pod selector and ports of an InferencePool."""

    name: str
    uid: str
    label_selector: str
    """Selector of the pool's pods in the syntax of the API ("a=b,c=d"), in order of label names."""
    target_ports: tuple[int, ...]
    app_protocol: str


class _Metadata(Struct, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    created: str | None = field(default=None, name="creationTimestamp")
    deleted: str | None = field(default=None, name="deletionTimestamp")


class _Selector(Struct, frozen=True):
    match_labels: Annotated[dict[str, str], Meta(min_length=1)] = field(name="matchLabels")


class _TargetPort(Struct, frozen=True):
    number: Port


class _PoolSpec(Struct, frozen=True):
    selector: _Selector
    target_ports: Annotated[list[_TargetPort], Meta(min_length=1, max_length=8)] = field(
        name="targetPorts"
    )
    app_protocol: str | None = field(default=None, name="appProtocol")


class _PoolObject(Struct, frozen=True):
    metadata: _Metadata
    spec: _PoolSpec


_decode_pool = msgspec.json.Decoder(_PoolObject).decode


def read_pool(raw: bytes) -> Pool:
    """Parse the JSON of an InferencePool (API version v1). Raises `msgspec.ValidationError`."""
    pool = _decode_pool(raw)
    labels = pool.spec.selector.match_labels
    return Pool(
        name=pool.metadata.name,
        uid=pool.metadata.uid,
        label_selector=",".join(f"{name}={labels[name]}" for name in sorted(labels)),
        target_ports=tuple(dict.fromkeys(port.number for port in pool.spec.target_ports)),
        app_protocol=pool.spec.app_protocol or "http",
    )


# Pod


class Pod(Struct, frozen=True, kw_only=True):
    """A pod that can serve: it is Ready, not terminating, and has an address."""

    uid: str
    name: str
    """Name of the pod in the form "namespace/name"."""
    host: str
    """IP address of the pod; IPv6 is in brackets."""
    labels: Mapping[str, str]
    active_ports: frozenset[int] | None
    """Ports of the pod that serve, or None for all ports."""
    incarnations: Mapping[int, str]
    """Identity of the pod's running container by port; port 0 stands for all containers of the
    pod.
    """
    node: str = ""
    """IP address of the pod's node, with IPv6 in brackets; "" if it is unknown."""
    node_name: str = ""
    """Name of the pod's node, or "" if it is unknown."""


_NO_NODES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType({})


class _Condition(Struct, frozen=True):
    type: str = ""
    status: str = ""


class _ContainerStatus(Struct, frozen=True):
    name: str = ""
    container_id: str | None = field(default="", name="containerID")
    restart_count: int = field(default=0, name="restartCount")


class _PodStatus(Struct, frozen=True):
    phase: str | None = None
    pod_ip: str | None = field(default=None, name="podIP")
    host_ip: str | None = field(default=None, name="hostIP")
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = field(
        default=None, name="containerStatuses"
    )


class _ContainerPort(Struct, frozen=True):
    container_port: int = field(default=0, name="containerPort")


class _Container(Struct, frozen=True):
    name: str = ""
    ports: list[_ContainerPort] | None = None


class _PodSpec(Struct, frozen=True):
    containers: list[_Container] | None = None
    node_name: str | None = field(default=None, name="nodeName")


class _PodObject(Struct, frozen=True):
    metadata: _Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


_decode_pod = msgspec.json.Decoder(_PodObject).decode


def read_pod(raw: bytes) -> Pod | None:
    """Parse the JSON of a Pod. Return None while the pod cannot serve."""
    pod = _decode_pod(raw)
    metadata, status = pod.metadata, pod.status
    ready = any(
        condition.type == "Ready" and condition.status == "True"
        for condition in status.conditions or ()
    )
    ended = status.phase in {"Succeeded", "Failed"}
    if not ready or ended or metadata.deleted or not status.pod_ip:
        return None
    return Pod(
        uid=metadata.uid,
        name=f"{metadata.namespace}/{metadata.name}",
        host=_host(status.pod_ip),
        node=_node(status.host_ip or ""),
        node_name=pod.spec.node_name or "",
        labels=metadata.labels or {},
        active_ports=_active_ports(metadata.annotations or {}),
        incarnations=_incarnations(pod.spec.containers or (), status.container_statuses or ()),
    )


def _host(ip: str) -> str:
    """Return an IP address as it is written before a port, with IPv6 in brackets. Raises
    `ValueError` if it is invalid.
    """
    address = ip_address(ip)
    return f"[{address}]" if address.version == 6 else str(address)


def _node(ip: str) -> str:
    try:
        return _host(ip)
    except ValueError:
        return ""


def _active_ports(annotations: Mapping[str, str]) -> frozenset[int] | None:
    """Return the active ports that a pod's annotation lists, without invalid ones, or None if the
    pod has no such annotation.
    """
    for name in ACTIVE_PORTS:
        if name in annotations:
            told = (part.strip() for part in annotations[name].split(","))
            return frozenset(int(part) for part in told if part.isascii() and part.isdigit())
    return None


def _incarnations(
    containers: Iterable[_Container], statuses: Iterable[_ContainerStatus]
) -> dict[int, str]:
    # A restart of a sidecar does not clear the engine's cache, so each port has its own container.
    lives = {status.name: f"{status.restart_count}:{status.container_id}" for status in statuses}
    by_port = {
        port.container_port: lives.get(container.name, "")
        for container in containers
        for port in container.ports or ()
    }
    return {**by_port, 0: " ".join(lives[name] for name in sorted(lives))}


class _NodeObject(Struct, frozen=True):
    metadata: _Metadata


_decode_node = msgspec.json.Decoder(_NodeObject).decode


def node_reader(names: Sequence[str]) -> Callable[[bytes], dict[str, str]]:
    """Return a function that parses a Node and returns those of its labels that `names` lists."""

    def read(raw: bytes) -> dict[str, str]:
        labels = _decode_node(raw).metadata.labels or {}
        return {name: labels[name] for name in names if name in labels}

    return read


def endpoints_of(
    pods: Iterable[Pod],
    target_ports: tuple[int, ...],
    node_labels: Mapping[str, Mapping[str, str]] = _NO_NODES,
) -> tuple[Endpoint, ...]:
    """Return one endpoint for each active target port of each pod.

    If there are several target ports, an endpoint's name contains its rank, the position of its
    port. `node_labels` are labels of nodes by name. An endpoint has those of its node that its pod
    does not have.
    """
    return tuple(
        Endpoint(
            endpoint_id=f"{pod.uid}:{port}",
            name=pod.name if len(target_ports) == 1 else f"{pod.name}-rank-{rank}",
            address=f"{pod.host}:{port}",
            incarnation=pod.incarnations.get(port, pod.incarnations[0]),
            labels={**node_labels.get(pod.node_name, {}), **pod.labels}
            if node_labels
            else pod.labels,
            node_address=pod.node,
            metrics=MetricsTarget(port=port),
            ready_after_s=READY_AFTER_S,
        )
        for pod in pods
        for rank, port in enumerate(target_ports)
        if pod.active_ports is None or port in pod.active_ports
    )


# InferenceObjective and InferenceModelRewrite


class _PoolRef(Struct, frozen=True):
    name: str = ""
    group: str | None = POOL_GROUP
    kind: str | None = "InferencePool"

    def means(self, pool_name: str, pool_group: str) -> bool:
        return (self.group or POOL_GROUP, self.kind or "InferencePool", self.name) == (
            pool_group,
            "InferencePool",
            pool_name,
        )


class _ObjectiveSpec(Struct, frozen=True):
    pool_ref: _PoolRef = field(name="poolRef")
    priority: int | None = 0


class _ObjectiveObject(Struct, frozen=True):
    metadata: _Metadata
    spec: _ObjectiveSpec


_decode_objective = msgspec.json.Decoder(_ObjectiveObject).decode


def objective_reader(pool_name: str, pool_group: str) -> Callable[[bytes], int | None]:
    """Return a function that parses an InferenceObjective and returns its priority, or None if it
    belongs to another pool.
    """

    def read(raw: bytes) -> int | None:
        spec = _decode_objective(raw).spec
        return (spec.priority or 0) if spec.pool_ref.means(pool_name, pool_group) else None

    return read


class _ModelMatch(Struct, frozen=True):
    value: Annotated[str, Meta(min_length=1)]
    type: str | None = "Exact"


class _Match(Struct, frozen=True):
    model: _ModelMatch


class _TargetModel(Struct, frozen=True):
    model: Annotated[str, Meta(min_length=1)] = field(name="modelRewrite")
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class _Rule(Struct, frozen=True):
    targets: Annotated[list[_TargetModel], Meta(min_length=1)]
    matches: list[_Match] | None = None


class _RewriteSpec(Struct, frozen=True):
    pool_ref: _PoolRef = field(name="poolRef")
    rules: list[_Rule]


class _RewriteObject(Struct, frozen=True):
    metadata: _Metadata
    spec: _RewriteSpec


class Rewrite(Struct, frozen=True, kw_only=True):
    """The rules of an InferenceModelRewrite, with its creation time."""

    created: str
    """Creation time of the InferenceModelRewrite in RFC 3339 and UTC, so that texts sort like
    times.
    """
    rules: tuple[RewriteRule, ...]


_decode_rewrite = msgspec.json.Decoder(_RewriteObject).decode


def rewrite_reader(pool_name: str, pool_group: str) -> Callable[[bytes], Rewrite | None]:
    """Return a function that parses an InferenceModelRewrite and returns its rules, or None if it
    belongs to another pool. The function raises `ValueError` for a match that is not exact.
    """

    def read(raw: bytes) -> Rewrite | None:
        rewrite = _decode_rewrite(raw)
        if not rewrite.spec.pool_ref.means(pool_name, pool_group):
            return None
        return Rewrite(
            created=rewrite.metadata.created or "",
            rules=tuple(map(_rule, rewrite.spec.rules)),
        )

    return read


def _rule(rule: _Rule) -> RewriteRule:
    for match in rule.matches or ():
        if match.model.type not in {None, "Exact"}:
            raise ValueError(f"a model match has type {match.model.type!r}, expected 'Exact'")
    return RewriteRule(
        models=tuple(match.model.value for match in rule.matches or ()),
        targets=tuple(Target(target.model, target.weight or 1) for target in rule.targets),
    )


def model_rewrites(rewrites: Mapping[str, Rewrite]) -> ModelRewrites:
    """Return the rules of all InferenceModelRewrites, those of the oldest object first, then by
    name.
    """
    oldest_first = sorted(rewrites.items(), key=lambda item: (item[1].created, item[0]))
    return ModelRewrites(rule for _, rewrite in oldest_first for rule in rewrite.rules)


# ConfigMap


class _ConfigMapObject(Struct, frozen=True):
    data: dict[str, str] | None = None


_decode_config_map = msgspec.json.Decoder(_ConfigMapObject).decode


def config_map_reader(key: str) -> Callable[[bytes], bytes | None]:
    """Return a function that parses a ConfigMap and returns the text under `key`, or None if it has
    none.
    """

    def read(raw: bytes) -> bytes | None:
        text = (_decode_config_map(raw).data or {}).get(key)
        return None if text is None else text.encode()

    return read
