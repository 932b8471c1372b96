"""Write Kubernetes Events about the configuration on the InferencePool, for `kubectl describe`."""

import asyncio
import time
from collections import deque
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import structlog
from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.kubernetes.api_errors import ApiError, ApiFailure
from epp.shell.kubernetes.client import KubeClient
from epp.shell.kubernetes.objects import Collection, Pool

MESSAGE_CHARACTERS_MAX: Final = 1_024
"""Number of characters after which the message of a Kubernetes Event is cut."""
PENDING_MAX: Final = 8
COMPONENT: Final = "homing"

_log = structlog.get_logger(__name__)


class Reason(StrEnum):
    """The reason of a Kubernetes Event about the configuration."""

    CONFIG_APPLIED = "ConfigApplied"
    CONFIG_REJECTED = "ConfigRejected"


class _Pending(Struct, frozen=True):
    reason: Reason
    message: str
    pool: Pool


class EventRecorder:
    """A writer of Kubernetes Events about an InferencePool: at most `burst` at once, then one every
    `refill_s` seconds.

    Events are notifications, not a complete record. Events that exceed the rate or cannot be
    written are counted in `dropped` and discarded.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        pool_group: str,
        instance: str,
        burst: int = 10,
        refill_s: Seconds = 30.0,
    ) -> None:
        """Create the writer. `instance` is the name of the picker's pod, which the Events name as
        their source.
        """
        self._client = client
        self._collection = Collection(resource="events", namespace=namespace)
        self._pool_api_version = f"{pool_group}/v1"
        self._instance = instance
        self._burst = burst
        self._refill_s = refill_s
        self._allowed = float(burst)
        self._refilled_at_s = time.monotonic()
        self._pending: deque[_Pending] = deque()
        self._news = asyncio.Event()
        self._problem: ApiFailure | None = None
        self.written = 0
        self.dropped = 0

    def record(self, reason: Reason, message: str, pool: Pool) -> None:
        """Queue a Kubernetes Event if the rate limit and the length of the queue allow it, else
        count it as dropped. The call never blocks and never fails.
        """
        now = time.monotonic()
        refilled = (now - self._refilled_at_s) / self._refill_s
        self._allowed = min(float(self._burst), self._allowed + refilled)
        self._refilled_at_s = now
        if self._allowed < 1 or len(self._pending) >= PENDING_MAX:
            self.dropped += 1
            return
        self._allowed -= 1
        # A configuration may contain text that UTF-8 cannot encode.
        shown = message[:MESSAGE_CHARACTERS_MAX].encode("utf-8", "replace").decode()
        self._pending.append(_Pending(reason, shown, pool))
        self._news.set()

    async def run(self) -> None:
        """Write queued Kubernetes Events until cancelled. Events that cannot be written are
        counted, and each new kind of failure is logged.
        """
        while True:
            while self._pending:
                await self._write(self._pending.popleft())
            await self._news.wait()
            self._news.clear()

    async def _write(self, pending: _Pending) -> None:
        try:
            await self._client.request("POST", self._collection.path, body=self._event(pending))
        except ApiError as error:
            self.dropped += 1
            if error.kind is not self._problem:
                self._problem = error.kind
                _log.warning(_sentence(error, self._collection), reason=pending.reason.value)
        else:
            self.written += 1
            self._problem = None

    def _event(self, pending: _Pending) -> dict[str, object]:
        wall = datetime.now(UTC)
        at = f"{wall:%Y-%m-%dT%H:%M:%S}Z"
        namespace, pool = self._collection.namespace, pending.pool
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                # Recorders of Kubernetes use this form of names: the object and a unique time.
                "name": f"{pool.name}.{int(wall.timestamp() * 1e9):x}",
                "namespace": namespace,
            },
            "involvedObject": {
                "apiVersion": self._pool_api_version,
                "kind": "InferencePool",
                "name": pool.name,
                "namespace": namespace,
                "uid": pool.uid,
            },
            "reason": pending.reason.value,
            "message": pending.message,
            "type": "Warning" if pending.reason is Reason.CONFIG_REJECTED else "Normal",
            "count": 1,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "source": {"component": COMPONENT, "host": self._instance},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
        }


def _sentence(error: ApiError, collection: Collection) -> str:
    if error.kind is ApiFailure.FORBIDDEN:
        return (
            f"forbidden to create {collection}: the Role of the picker's ServiceAccount needs the "
            f"verbs create and patch on resource events of apiGroup '' ({error})"
        )
    return f"Event not written: {error}"
