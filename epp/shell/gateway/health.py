"""The gRPC health service, which gives the same answers on the picker's serving port and on its
health port.

The module does not use grpcio's asyncio servicer. That servicer writes to a watcher while it holds
the lock of the next status change, so a single watcher that does not read would block all watchers.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from epp.shell.gateway.calls import OK, Call, Code, EndedCall, Opener, Status, Wire

LIVENESS: Final = "liveness"
ABLE: Final = frozenset(
    {
        "readiness",
        # A common Helm chart probes this name with one replica.
        "inference-extension",
    }
)
"""Names of the gRPC health services that a kubelet checks. Their status is SERVING while the picker
would answer requests correctly, also as a standby.
"""
WANTED: Final = frozenset({"", "envoy.service.ext_proc.v3.ExternalProcessor"})
"""Names of the gRPC health services that gateways and load balancers check. Their status is SERVING
while requests should be sent to this picker.
"""
WATCHERS_MAX: Final = 1_000

_SERVICE: Final = "/grpc.health.v1.Health"


class Health:
    """The health of this picker: whether it can serve, and whether it should get requests;
    initially neither.

    A standby replica can serve but should get no requests. Its pod is Ready, so that a rollout
    completes, and a gateway that checks health uses the leader. `liveness` is always SERVING. For
    an unknown name, `Check` returns NOT_FOUND and `Watch` returns SERVICE_UNKNOWN, as the gRPC
    health protocol specifies.
    """

    def __init__(self) -> None:
        self._ready = False
        self._stands_by = False
        self._closed = False
        self._watchers: set[_Watch] = set()

    @property
    def ready(self) -> bool:
        return self._ready

    def set_ready(self, ready: bool, *, stands_by: bool = False) -> None:
        """Set the picker's health and notify every watcher of a change. It has no effect after
        `close`.

        It must be called on the event loop.
        """
        if (ready, stands_by) != (self._ready, self._stands_by) and not self._closed:
            self._ready, self._stands_by = ready, stands_by
            self._wake()

    def close(self) -> None:
        """Report the picker as not ready from now on, and end all watchers, because
        `grpc.aio.Server.stop` would wait for them.
        """
        self._ready = False
        self._closed = True
        self._wake()

    @property
    def methods(self) -> Mapping[str, Opener]:
        """Functions that open a call of the health service, by gRPC path, as transports need
        them.
        """
        return {f"{_SERVICE}/Check": self._check, f"{_SERVICE}/Watch": self._watch}

    def serving(self, service: str) -> bool | None:
        """Return whether the health service `service` is SERVING, or None if there is none of that
        name.
        """
        if service == LIVENESS:
            return True
        if service in WANTED:
            return self._ready and not self._stands_by
        return self._ready if service in ABLE else None

    def watch(self, watch: "_Watch") -> None:
        """Notify `watch` of every change of the health status from now on."""
        self._watchers.add(watch)

    def leave(self, watch: "_Watch") -> None:
        """Stop notifying `watch` of changes of the health status."""
        self._watchers.discard(watch)

    @property
    def closed(self) -> bool:
        return self._closed

    def _wake(self) -> None:
        for watch in list(self._watchers):
            watch.tell()

    def _check(self, _: str, __: Wire) -> Call:
        return _Check(self)

    def _watch(self, _: str, wire: Wire) -> Call:
        if len(self._watchers) >= WATCHERS_MAX:
            return EndedCall(
                Status(Code.RESOURCE_EXHAUSTED, f"at most {WATCHERS_MAX} watchers are served")
            )
        return _Watch(self, wire)


_MALFORMED: Final = Status(Code.INVALID_ARGUMENT, "the message is not a HealthCheckRequest")
_NO_MESSAGE: Final = Status(Code.INVALID_ARGUMENT, "expected one HealthCheckRequest")


def _service_of(message: bytes) -> str | None:
    """Return the service name in a serialised HealthCheckRequest, or None if the message is
    malformed.
    """
    try:
        return str(health_pb2.HealthCheckRequest.FromString(message).service)
    except DecodeError:
        return None


class _Check:
    """A call of the method `Check` of the health service, which answers once."""

    __slots__ = ("_health", "ended")

    def __init__(self, health: Health) -> None:
        self._health = health
        self.ended: Status | None = None

    def receive(self, message: bytes) -> Iterable[bytes]:
        service = _service_of(message)
        if service is None:
            self.ended = _MALFORMED
            return ()
        serving = self._health.serving(service)
        if serving is None:
            self.ended = Status(Code.NOT_FOUND, "no such service")
            return ()
        self.ended = OK
        return (_answer(_status(serving)),)

    def half_close(self) -> Iterable[bytes]:
        self.ended = self.ended or _NO_MESSAGE
        return ()

    def sent(self) -> None:
        """Do nothing after the answer was sent, because a call of `Check` keeps no state."""

    def closed(self, _: Status) -> bool:
        """Return False at the end of the stream, because a call of `Check` keeps no state."""
        return False


class _Watch:
    """A call of the method `Watch` of the health service. It answers at once and after every
    change, until the picker drains.
    """

    __slots__ = ("_health", "_service", "_told", "_wire", "ended")

    def __init__(self, health: Health, wire: Wire) -> None:
        self._health = health
        self._wire = wire
        self._service: str | None = None
        self._told: int | None = None
        self.ended: Status | None = None

    def receive(self, message: bytes) -> Iterable[bytes]:
        if self._service is not None:
            # The method accepts only one request.
            return ()
        self._service = _service_of(message)
        if self._service is None:
            self.ended = _MALFORMED
            return ()
        self._health.watch(self)
        self._told = _status(self._health.serving(self._service))
        if self._health.closed:
            self.ended = OK
        return (_answer(self._told),)

    def half_close(self) -> Iterable[bytes]:
        if self._service is None:
            self.ended = _NO_MESSAGE
        return ()

    def tell(self) -> None:
        """Send the health status to the watcher if it has changed, and end the call if the picker
        drains.
        """
        assert self._service is not None, "it asked for a service"
        status = _status(self._health.serving(self._service))
        if status != self._told:
            self._told = status
            self._wire.push(_answer(status))
        if self._health.closed:
            self._wire.end(OK)

    def sent(self) -> None:
        """Do nothing after a status was sent, because a call of `Watch` depends only on changes of
        the status.
        """

    def closed(self, _: Status) -> bool:
        self._health.leave(self)
        return False


def _answer(status: int) -> bytes:
    answer: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return answer


def _status(serving: bool | None) -> int:
    if serving is None:
        return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
    if serving:
        return int(health_pb2.HealthCheckResponse.SERVING)
    return int(health_pb2.HealthCheckResponse.NOT_SERVING)
