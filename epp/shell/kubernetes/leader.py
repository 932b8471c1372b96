"""Elect a leader by a Lease, so that at most one replica leads at any time.

`Election` is the state machine. From the content of the Lease and this replica's own writes it
determines whether to write and until when this replica may lead. Clocks of two machines are never
compared: the Lease of another replica expires after it was *seen* unchanged for its duration. The
term of this replica starts when it *sends* a write. The term ends at the renew deadline, before
another replica may take the Lease. A request that hangs therefore cannot extend it.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

import msgspec
import structlog
from msgspec import Struct

from epp.core.types import Seconds
from epp.shell.kubernetes.api_errors import ApiError, ApiFailure
from epp.shell.kubernetes.client import KubeClient
from epp.shell.kubernetes.objects import Collection

LEASE_GROUP: Final = "coordination.k8s.io"

_log = structlog.get_logger(__name__)


class ElectionTiming(Struct, frozen=True, kw_only=True):
    """Timing of a leader election, with the same defaults as Kubernetes controllers."""

    lease_s: int = 15
    """Validity of the Lease in whole seconds, as the API requires."""
    renew_deadline_s: Seconds = 10.0
    retry_s: Seconds = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry_s < self.renew_deadline_s < self.lease_s:
            raise ValueError(
                "expected 0 < retry_s < renew_deadline_s < lease_s, got "
                f"{self.retry_s:g}, {self.renew_deadline_s:g} and {self.lease_s}"
            )


class LeaseSpec(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The part `spec` of a Lease object: its holder, duration, times and number of transitions."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Election:
    """The state of a leader election, as one replica (candidate) sees it."""

    def __init__(self, identity: str, timing: ElectionTiming) -> None:
        self._identity = identity
        self._timing = timing
        self._seen: LeaseSpec | None = None
        self._seen_at_s: Seconds = 0.0
        self.lead_until_s: Seconds | None = None
        """Time until which this replica leads, or None if it does not lead."""

    def leads(self, now: Seconds) -> bool:
        return self.lead_until_s is not None and now < self.lead_until_s

    def observe(self, spec: LeaseSpec, now: Seconds) -> bool:
        """Record the current content of the Lease; if another replica holds it, this one no longer
        leads. Return True if this replica may write itself into it as holder.
        """
        if spec != self._seen:
            self._seen, self._seen_at_s = spec, now
        if not spec.holder_identity or spec.holder_identity == self._identity:
            return True
        self.lead_until_s = None
        lease_s = spec.lease_duration_seconds or self._timing.lease_s
        return now >= self._seen_at_s + lease_s

    def written(self, sent_at_s: Seconds) -> None:
        """Record that a write of the Lease with this replica as holder, sent at `sent_at_s`,
        succeeded.
        """
        self.lead_until_s = sent_at_s + self._timing.renew_deadline_s

    def lost(self) -> None:
        """Record that this replica no longer leads, because another one wrote the Lease, the
        deadline passed, or this replica stops.
        """
        self.lead_until_s = None

    def claim(self, before: LeaseSpec | None, wall: datetime) -> LeaseSpec:
        """Return the content of the Lease with which this replica acquires it, or renews it."""
        at = f"{wall.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"
        ours = before is not None and before.holder_identity == self._identity
        transitions = before.lease_transitions or 0 if before else 0
        return LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=self._timing.lease_s,
            acquire_time=before.acquire_time if ours and before else at,
            renew_time=at,
            lease_transitions=transitions + (not ours and before is not None),
        )


class _Lease(Struct, frozen=True):
    metadata: dict[str, Any]
    """Metadata of the Lease object, which is written back unchanged, because its labels belong to
    the creator of the object.
    """
    spec: LeaseSpec = LeaseSpec()


class LeaderElector:
    """A candidate for the Lease `name`. It calls `on_change` when `leading` changes."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        on_change: Callable[[], None],
        random: Random,
        timing: ElectionTiming | None = None,
    ) -> None:
        self._client = client
        self._collection = Collection(group=LEASE_GROUP, resource="leases", namespace=namespace)
        self._name = name
        self._on_change = on_change
        self._random = random
        self._timing = timing or ElectionTiming()
        self._identity = identity
        self._election = Election(identity, self._timing)
        self._problem: ApiFailure | None = None
        self.leading = False

    async def run(self) -> None:
        """Try to acquire and then renew the Lease until cancelled, then release it."""
        try:
            while True:
                await self._attempt()
                self._update()
                await self._pause()
        finally:
            await self._release()

    async def _attempt(self) -> None:
        """Read the Lease, and write it if this replica may. A leader stops trying at its deadline.
        A failure is logged; if another candidate wrote the Lease meanwhile, this replica no longer
        leads.
        """
        until_s = self._election.lead_until_s
        limit_s = self._timing.renew_deadline_s
        if until_s is not None:
            limit_s = max(0.0, until_s - time.monotonic())
        try:
            async with asyncio.timeout(limit_s):
                await self._acquire_or_renew()
        except TimeoutError:
            self._report(ApiFailure.SILENT, f"no answer within {limit_s:.3g} s")
        except ApiError as error:
            if error.kind is ApiFailure.CONFLICT:
                # Another candidate was faster; the next read shows which.
                self._election.lost()
            else:
                self._report(error.kind, str(error))
        except ValueError as problem:
            self._report(ApiFailure.UNREADABLE, f"the Lease is invalid: {problem}")
        else:
            self._problem = None

    async def _acquire_or_renew(self) -> None:
        path = f"{self._collection.path}/{self._name}"
        try:
            raw = await self._client.request("GET", path)
        except ApiError as error:
            if error.kind is not ApiFailure.ABSENT:
                raise
            await self._write("POST", self._collection.path, None)
            return
        lease = msgspec.json.decode(raw, type=_Lease)
        if self._election.observe(lease.spec, time.monotonic()):
            await self._write("PUT", path, lease)

    async def _write(self, method: str, path: str, before: _Lease | None) -> None:
        sent_at_s = time.monotonic()
        spec = self._election.claim(before.spec if before else None, datetime.now(UTC))
        await self._client.request(method, path, body=self._body(spec, before))
        self._election.written(sent_at_s)

    def _body(self, spec: LeaseSpec, before: _Lease | None) -> dict[str, Any]:
        # The resource version makes the write fail if another one happened in between.
        known = before.metadata if before else {}
        metadata = {**known, "name": self._name, "namespace": self._collection.namespace}
        return {
            "apiVersion": f"{LEASE_GROUP}/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    async def _pause(self) -> None:
        """Wait until the next attempt to write the Lease. A leader wakes at its deadline at the
        latest, when leadership ends.
        """
        pause_s = self._timing.retry_s * self._random.uniform(1.0, 1.2)
        until_s = self._election.lead_until_s
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= pause_s:
                await asyncio.sleep(max(0.0, left_s))
                self._update()
                return
        await asyncio.sleep(pause_s)

    def _update(self) -> None:
        leading = self._election.leads(time.monotonic())
        if not leading:
            self._election.lost()
        if leading != self.leading:
            self.leading = leading
            _log.info(
                "became leader" if leading else "lost leadership",
                lease=self._name,
                us=self._identity,
            )
            self._on_change()

    async def _release(self) -> None:
        """End this replica's leadership, and release the Lease if it leads, so that another replica
        can lead immediately. A failure is logged.
        """
        held = self._election.leads(time.monotonic())
        self._election.lost()
        self._update()
        if not held:
            return
        path = f"{self._collection.path}/{self._name}"
        try:
            async with asyncio.timeout(self._timing.retry_s):
                lease = msgspec.json.decode(await self._client.request("GET", path), type=_Lease)
                if lease.spec.holder_identity == self._identity:
                    # The holder is removed completely, because the API server rejects an empty
                    # name.
                    free = msgspec.structs.replace(
                        lease.spec, holder_identity=None, lease_duration_seconds=1
                    )
                    await self._client.request("PUT", path, body=self._body(free, lease))
        except (TimeoutError, ApiError, ValueError) as problem:
            _log.warning("Lease not released, it will expire", problem=str(problem))

    def _report(self, kind: ApiFailure, sentence: str) -> None:
        """Log a problem of the election once, until it is solved or another problem occurs."""
        if kind is self._problem:
            return
        self._problem = kind
        if kind is ApiFailure.FORBIDDEN:
            sentence = (
                f"forbidden to use {self._collection}: the Role of the picker's ServiceAccount "
                "needs the verbs get, create and update on resource leases of apiGroup "
                f"{LEASE_GROUP!r} ({sentence})"
            )
        _log.error(sentence, lease=self._name)
