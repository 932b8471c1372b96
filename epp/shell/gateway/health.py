"""gRPC health: the same answers on the serving port and on the health port.

A small handler of its own: the stock asyncio servicer writes to a watcher while it holds the lock
that the next change of status needs, so one watcher that does not read would stop them all.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

LIVENESS: Final = "liveness"
FOLLOWING_READINESS: Final = frozenset(
    {
        "",
        "readiness",
        "envoy.service.ext_proc.v3.ExternalProcessor",
        # The name that the field's Helm chart probes with one replica.
        "inference-extension",
    }
)
WATCHERS_MAX: Final = 1_000

_Context: TypeAlias = grpc.aio.ServicerContext[
    health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
]


class Health:
    """Whether this picker may be sent traffic. Not ready until told so.

    `liveness` is SERVING for as long as there is somebody to ask; the other names follow
    readiness; `Check` of an unknown name is NOT_FOUND and `Watch` of one says SERVICE_UNKNOWN, as
    the gRPC health protocol has it.
    """

    def __init__(self) -> None:
        self._ready = False
        self._closed = False
        self._watchers: set[asyncio.Event] = set()

    @property
    def ready(self) -> bool:
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Tell every watcher, if it is news; nothing is after `close`. Call it on the event loop."""
        if ready != self._ready and not self._closed:
            self._ready = ready
            self._wake()

    def close(self) -> None:
        """Not ready any more, and watchers end: `grpc.aio.Server.stop` would wait for them."""
        self._ready = False
        self._closed = True
        self._wake()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `grpc.health.v1.Health` there; call before the server starts."""
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self._check,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._watch,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
        }
        # Registered methods have queues of their own in gRPC: an answer does not wait behind
        # thousands of streams, for which a gateway would take the picker for dead.
        server.add_registered_method_handlers("grpc.health.v1.Health", handlers)

    def serving(self, service: str) -> bool | None:
        """None: there is no service of that name."""
        if service == LIVENESS:
            return True
        return self._ready if service in FOLLOWING_READINESS else None

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def _check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        serving = self.serving(request.service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=_status(serving))

    async def _watch(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if len(self._watchers) >= WATCHERS_MAX:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {WATCHERS_MAX} watchers are served"
            )
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            told: int | None = None
            while True:
                changed.clear()
                status = _status(self.serving(request.service))
                if status != told:
                    yield health_pb2.HealthCheckResponse(status=status)
                    told = status
                    # It may have changed while it was being sent.
                    continue
                if self._closed:
                    return
                await changed.wait()
        finally:
            self._watchers.discard(changed)


def _status(serving: bool | None) -> int:
    if serving is None:
        return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
    if serving:
        return int(health_pb2.HealthCheckResponse.SERVING)
    return int(health_pb2.HealthCheckResponse.NOT_SERVING)
