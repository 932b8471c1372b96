"""Parse the endpoints file, which replaces discovery in Kubernetes.

    endpoints:
    - {name: pod-0, address: 10.0.0.7, port: 8000, labels: {app: llama}}
    - {name: pod-1, address: "fd00::8", port: 8000, metrics: {port: 9000, path: /m, scheme: https}}
    objectives: {interactive: 10, batch: -1}

The file is YAML or JSON. The default for an endpoint's metrics is `/metrics` of its serving port;
`metrics: null` or `false` means that it serves none. Files of llm-d's `file-discovery` are accepted
too: they contain ports as text, and a name with its port is unique within its `namespace`. This
module performs no I/O.
"""

from ipaddress import ip_address
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml
from msgspec import UNSET, Meta, Struct, UnsetType, field

from epp.configuration.document import load_yaml
from epp.core.expectation import place_and_sentence
from epp.core.types import Endpoint, MetricsTarget
from epp.shell.found import Found

READY_AFTER_S: Final = 5.0
"""Time in seconds, after an endpoint of the file joined the pool, from which it is used although
its metrics were not scraped yet.
"""
_PORT: Final = Annotated[int, Meta(ge=1, le=65535)]
_Name = Annotated[str, Meta(min_length=1, max_length=253)]


class EndpointsFileError(ValueError):
    """Raised if the endpoints file is invalid. `problems` has one sentence for each problem, with
    file and path.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems: Final = tuple(problems)


class _Port(int):
    """A port number from 1 to 65535, which may be written as text in the endpoints file."""


class _Metrics(Struct, frozen=True, forbid_unknown_fields=True):
    port: _Port | None = None
    path: Annotated[str, Meta(pattern="^/[!-~]*$", max_length=1024)] = "/metrics"
    scheme: Literal["http", "https"] = "http"


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: _Name
    namespace: _Name = "default"
    address: str
    port: _Port
    labels: dict[str, str] = field(default_factory=dict)
    metrics: _Metrics | bool | UnsetType | None = UNSET


class _Document(Struct, frozen=True, forbid_unknown_fields=True):
    endpoints: list[Any]
    objectives: dict[_Name, int] = field(default_factory=dict)


def load_endpoints(text: bytes, source: str) -> Found:
    """Parse the text of an endpoints file; `source` is the name of the file in errors.

    Raises `EndpointsFileError` with the problems of all endpoints at once, or with the one problem
    of a file that cannot be read as a document.
    """
    try:
        document = msgspec.convert(_parse(text), _Document)
    except (msgspec.ValidationError, ValueError) as problem:
        raise EndpointsFileError([_sentence(source, "", problem, _Document)]) from None
    endpoints: list[Endpoint] = []
    problems: list[str] = []
    seen: dict[tuple[str, str], str] = {}
    for position, raw in enumerate(document.endpoints):
        path = f"endpoints[{position}]"
        try:
            endpoint = _endpoint(msgspec.convert(raw, _Entry, dec_hook=_decode))
        except (msgspec.ValidationError, ValueError) as problem:
            problems.append(_sentence(source, path, problem, _Entry))
            continue
        for kind, key in (("name", endpoint.endpoint_id), ("address", endpoint.address)):
            first = seen.setdefault((kind, key), path)
            if first != path:
                problems.append(
                    f"{source}: {path}: {key} is already {first}; names and addresses must be "
                    "unique"
                )
        endpoints.append(endpoint)
    if problems:
        raise EndpointsFileError(problems)
    return Found(endpoints=tuple(endpoints), objectives=document.objectives)


def _parse(text: bytes) -> Any:
    try:
        # JSON is tried first, because YAML rejects its tabs and is a hundred times slower.
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        document = load_yaml(text)
    except yaml.MarkedYAMLError as problem:
        where = f"line {problem.problem_mark.line + 1}: " if problem.problem_mark else ""
        raise ValueError(f"{where}{problem.problem or 'not understood'}, expected YAML") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        raise ValueError("not UTF-8 text in YAML or JSON") from None
    if document is None:
        raise ValueError("empty, expected `endpoints: [...]`")
    return document


def _decode(kind: type[_Port], value: Any) -> _Port:
    """Convert a value of the endpoints file to a type that msgspec does not know. Raises
    `ValueError`.
    """
    try:
        return kind(msgspec.convert(value, _PORT, strict=False))
    except msgspec.ValidationError as problem:
        # msgspec adds the path of the value only to a `ValueError`.
        raise ValueError(str(problem)) from None


def _endpoint(entry: _Entry) -> Endpoint:
    try:
        address = ip_address(entry.address)
        scoped = "%" in entry.address
    except ValueError:
        scoped = True
    if scoped:
        raise ValueError(f"address {entry.address!r} is not an IP address such as 10.0.0.7 or ::1")
    host = f"[{address}]" if address.version == 6 else str(address)
    target = None
    if entry.metrics is not None and entry.metrics is not False:
        told = entry.metrics if isinstance(entry.metrics, _Metrics) else _Metrics()
        target = MetricsTarget(port=told.port or entry.port, scheme=told.scheme, path=told.path)
    name = entry.name if entry.namespace == "default" else f"{entry.namespace}/{entry.name}"
    return Endpoint(
        endpoint_id=f"{name}:{entry.port}",
        name=name,
        address=f"{host}:{entry.port}",
        labels=entry.labels,
        metrics=target,
        ready_after_s=READY_AFTER_S,
    )


def _sentence(source: str, path: str, problem: Exception, kind: type[Struct]) -> str:
    """Return an error sentence with the name of the endpoints file, the place in it and the
    problem.
    """
    inner, what = place_and_sentence(str(problem), kind)
    where = (path + inner).lstrip(".")
    return f"{source}: {where}: {what}" if where else f"{source}: {what}"
