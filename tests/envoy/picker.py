"""The picker in the event loop of the test: real session, codec and gRPC pump, visible state."""

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import ClassVar

import numpy as np
from msgspec import Struct

from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.profile import SchedulingProfile
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.knowledge.candidates import Candidates, Floats, Ints
from epp.core.knowledge.inflight import Outcome
from epp.core.protocol.session import Exchange, Session, SessionSettings, StreamFailure
from epp.core.types import Endpoint, EndpointMetrics, Refusal, Seconds
from epp.shell.gateway.calls import Cut
from epp.shell.gateway.ext_proc import STREAMS_MAX, ExtProc
from epp.shell.gateway.health import Health
from epp.shell.gateway.queue_waker import open_queue
from epp.shell.gateway.tls import ServerCertificate
from tests.envoy.upstream import REQUEST_BYTES_MAX, Pod
from tests.transports import carried, transport_of


class InTurn(Struct, frozen=True):
    """Decision number n goes to candidate n: what is tested here is the way, not the choice."""

    type_name: ClassVar[str] = "in-turn-picker"

    def pick(
        self, scores: Floats, candidates: Candidates, random: Random, rotation: int, /
    ) -> Ints:
        return np.array([rotation % len(candidates)], dtype=np.int64)


IN_TURN = SchedulingProfile(
    name="in-turn", filters=(), scorers=(), picker_name="in-turn", picker=InTurn()
)


class Witness:
    """Notes what the picker reports of its requests and streams."""

    def __init__(self) -> None:
        self.decisions: list[Exchange] = []
        self.refusals: list[Refusal] = []
        self.outcomes: list[Outcome] = []
        self.violations: list[tuple[str, str]] = []
        self.declined = 0
        self.connections_cut = 0
        self.stream_codes: list[str] = []
        self.excluded: list[str] = []
        """Names of the endpoints that requests made the picker exclude, one for each time."""

    def decided(self, exchange: Exchange) -> None:
        self.decisions.append(exchange)

    def refused(self, exchange: Exchange, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def failed(self, exchange: Exchange, failure: StreamFailure) -> None:
        pass

    def response_started(self, exchange: Exchange) -> None:
        pass

    def completed(self, exchange: Exchange, outcome: Outcome, now: Seconds) -> None:
        self.outcomes.append(outcome)

    def set_aside(self, endpoint: Endpoint) -> None:
        self.excluded.append(endpoint.name)

    def unknown_body_mode(self, mode: int) -> None:
        self.violations.append(("any", f"body mode {mode}"))

    def protocol_violated(self, phase: str, event: str) -> None:
        self.violations.append((phase, event))

    def response_body_declined(self) -> None:
        self.declined += 1

    def responses_unseen(self) -> None:
        pass

    def usage_unseen(self) -> None:
        pass

    def stream_failed(self) -> None:
        raise AssertionError("no stream fails when it is opened or closed")

    def stream_closed(self, code: str, duration_s: float) -> None:
        self.stream_codes.append(code)

    def stream_shed(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def unknown_objective(self) -> None:
        pass

    def connection_cut(self, reason: Cut) -> None:
        self.connections_cut += 1

    def drain_cut(self, streams: int) -> None:
        pass

    def assert_clean(self) -> None:
        """Assert that the gateway kept to the protocol and that no stream of the picker failed."""
        assert self.violations == []
        assert set(self.stream_codes) <= {"OK", "CANCELLED"}


class Picker:
    """A running picker that chooses in turn."""

    def __init__(
        self,
        settings: SessionSettings,
        streams_max: int,
        transport: str,
        scheduling: SchedulerSettings,
    ) -> None:
        self.scheduler = Scheduler(scheduling, seed=1)
        self.queue = open_queue(self.scheduler) if scheduling.flow is not None else None
        self.witness = Witness()
        self.server = ExtProc(
            lambda gateway: Session(
                self.scheduler,
                settings,
                gateway,
                self.witness,
                lambda: "generated",
                queue=self.queue,
            ),
            self.witness,
            streams_max=streams_max,
        )
        self.address = ""
        self._health = Health()
        self._transport = transport
        self._stack = AsyncExitStack()

    async def start(self, *, tls: bool) -> None:
        self._health.set_ready(True)
        methods = {**self.server.methods, **self._health.methods}
        carries = transport_of(self._transport, methods, bytes_max=REQUEST_BYTES_MAX)
        certificate = ServerCertificate.open(None) if tls else None
        port = await self._stack.enter_async_context(carried(carries, certificate=certificate))
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Stop serving, and cut the streams that are still open."""
        self._health.close()
        await self._stack.aclose()

    @property
    def open_leases(self) -> int:
        return self.scheduler.ledger.open_leases

    def decisions_waited(self) -> int:
        """Return the number of decisions about requests that waited in the queue."""
        records = (one.decision.account for one in self.witness.decisions if one.decision)
        return sum(record.queued is not None for record in records)

    def serve(self, pods: Sequence[Pod]) -> None:
        """Replace the pool by `pods`; all are ready and none is scraped."""
        self.replace(
            Endpoint(endpoint_id=pod.name, name=pod.name, address=pod.address, labels=pod.labels)
            for pod in pods
        )

    def serve_addresses(self, addresses: dict[str, str]) -> None:
        """Replace the pool by endpoints at these addresses, "ip:port" by name."""
        self.replace(
            Endpoint(endpoint_id=name, name=name, address=address)
            for name, address in addresses.items()
        )

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the pool by these endpoints."""
        self.scheduler.take(PoolReplaced(list(endpoints)), time.monotonic())

    def saturate(self) -> None:
        """Report a long queue and a full cache for every endpoint."""
        full = EndpointMetrics(waiting_requests=1_000, running_requests=1_000, kv_cache_usage=1.0)
        for slot, _ in self.scheduler.pool.endpoints():
            self.scheduler.take(PageScraped(slot, full), time.monotonic())


@asynccontextmanager
async def running_picker(
    pods: Sequence[Pod],
    *,
    tls: bool = False,
    settings: SessionSettings | None = None,
    streams_max: int = STREAMS_MAX,
    transport: str = "ngh2",
    scheduling: SchedulerSettings = SchedulerSettings(stages=Stages(decode=IN_TURN)),  # noqa: B008  a constant
) -> AsyncIterator[Picker]:
    """Serve ext_proc and health on a free port of loopback until the end of the block."""
    picker = Picker(settings or SessionSettings(), streams_max, transport, scheduling)
    picker.serve(pods)
    await picker.start(tls=tls)
    try:
        yield picker
    finally:
        await picker.stop()
        picker.witness.assert_clean()
        assert picker.server.open_streams == 0
