"""What chooses a pod: the production scheduler with any configuration, or a baseline to beat.

A policy is one picker replica. It sees what production's picker sees, pods as they are announced
and pages as they are scraped, and is driven through the same verbs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final, Protocol, TypeAlias

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import CONFIG_MAX_BYTES, ConfigError, PickerConfig, load_config
from epp.configuration.describing import config_hash
from epp.core.decision.failures import FailingPlugin
from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PeersUnheard,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ScrapeFailed,
    ServedBy,
    Tick,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import Endpoint, EndpointMetrics, Refusal, RefusalReason, Seconds
from sim.cluster.built_in import RIVALS_MISSING, configurations, rivals_installed
from sim.sentences import unread

_SESSION_AFFINITY: Final = "session-affinity"
_SESSION_KEY: Final = b"of every replica in every run"
"""As from one Secret; a run depends on nothing but what it is told."""
_LOADED_MAX: Final = 256
"""Configurations that are kept: loading one tries its plugins out, which takes 50 ms."""


class Route(Struct, gc=False, eq=False):
    """Where a policy sends a request."""

    endpoint: Endpoint
    lease: Lease | None = None
    decision: Decision | None = None
    """Only from the production scheduler."""

    @property
    def predicted_cached_tokens(self) -> int:
        """Prompt tokens that the policy believes the pod to hold."""
        return self.decision.predicted_tokens if self.decision else 0


class Policy(Protocol):
    """One replica of a picker. A request that was routed is completed exactly once."""

    @property
    def settings(self) -> SchedulerSettings | None:
        """What the production scheduler decides by; None for a baseline."""
        ...

    @property
    def open_requests(self) -> int:
        """Routed and not yet completed."""
        ...

    def inflight_counts(self) -> list[int]:
        """What it counts as in flight, by endpoint."""
        ...

    def failing_plugins(self) -> list[FailingPlugin]:
        """The plugins that failed; it decided without them."""
        ...

    def replicas_unheard(self, replicas: int) -> None:
        """So many others route to the same endpoints and do not tell what they decide."""
        ...

    def configure(self, settings: SchedulerSettings, now: Seconds) -> None:
        """Decide by `settings` from now on. Only of a policy that has some."""
        ...

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> None: ...
    def observe(self, endpoint: Endpoint, metrics: EndpointMetrics, now: Seconds) -> None: ...
    def refused(self, endpoint: Endpoint, now: Seconds) -> None:
        """A scrape of `endpoint` got no connection."""
        ...

    @property
    def may_hold(self) -> bool:
        """False: it has nobody wait, and need not be asked."""
        ...

    def holds(self, request: InferenceRequest, now: Seconds) -> bool:
        """Whether `request` is to wait before it is routed."""
        ...

    def route(self, request: InferenceRequest, now: Seconds) -> Route | Refusal: ...
    def first_output(self, route: Route, now: Seconds) -> None: ...
    def reschedule(self, route: Route, served: Endpoint, now: Seconds) -> None:
        """The gateway says that it has asked `served` instead. Only of a policy that names several."""
        ...

    def complete(self, route: Route, outcome: Outcome, now: Seconds) -> None: ...
    def tick(self, now: Seconds) -> None: ...


class SchedulerPolicy:
    """The production `Scheduler`, called as the production shell calls it."""

    def __init__(self, settings: SchedulerSettings, *, seed: int) -> None:
        self.scheduler = Scheduler(settings, seed=seed)

    @property
    def settings(self) -> SchedulerSettings:
        return self.scheduler.settings

    @property
    def open_requests(self) -> int:
        return self.scheduler.ledger.open_leases

    def inflight_counts(self) -> list[int]:
        pool = self.scheduler.pool
        return [int(pool.columns.inflight_requests[slot]) for slot, _ in pool.endpoints()]

    def failing_plugins(self) -> list[FailingPlugin]:
        return list(self.scheduler.failures)

    def replicas_unheard(self, replicas: int) -> None:
        self.scheduler.take(PeersUnheard(replicas), 0.0)

    def configure(self, settings: SchedulerSettings, now: Seconds) -> None:
        self.scheduler.take(Reconfigured(settings), now)

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> None:
        self.scheduler.take(PoolReplaced(endpoints), now)

    def observe(self, endpoint: Endpoint, metrics: EndpointMetrics, now: Seconds) -> None:
        slot = self.scheduler.pool.slot_of(endpoint)
        if slot is not None:
            self.scheduler.take(PageScraped(slot, metrics), now)

    def refused(self, endpoint: Endpoint, now: Seconds) -> None:
        slot = self.scheduler.pool.slot_of(endpoint)
        if slot is not None:
            self.scheduler.take(ScrapeFailed(slot=slot, answered=False), now)

    @property
    def may_hold(self) -> bool:
        return self.scheduler.may_hold

    def holds(self, request: InferenceRequest, now: Seconds) -> bool:
        return self.scheduler.holds(request, now)

    def route(self, request: InferenceRequest, now: Seconds) -> Route | Refusal:
        decision = self.scheduler.schedule(request, now)
        if isinstance(decision, Refusal):
            return decision
        return Route(decision.endpoint, decision.lease, decision)

    def first_output(self, route: Route, now: Seconds) -> None:
        assert route.lease is not None
        self.scheduler.take(OutputStarted(route.lease), now)

    def reschedule(self, route: Route, served: Endpoint, now: Seconds) -> None:
        assert route.lease is not None
        self.scheduler.take(ServedBy(route.lease, served.address), now)

    def complete(self, route: Route, outcome: Outcome, now: Seconds) -> None:
        assert route.lease is not None
        self.scheduler.take(RequestEnded(route.lease, outcome), now)

    def tick(self, now: Seconds) -> None:
        self.scheduler.take(Tick(), now)


def scheduler_of(policy: Policy) -> Scheduler | None:
    """What a policy decides by, if that is the production scheduler."""
    return policy.scheduler if isinstance(policy, SchedulerPolicy) else None


class Baseline:
    """A policy without scraped metrics and without a prefix index: what a plain proxy can do."""

    def __init__(self, choose: "Choose", *, seed: int) -> None:
        self.endpoints: list[Endpoint] = []
        self.inflight: list[int] = []
        """By position among `endpoints`: what this replica sent there and has not ended."""
        self.routed = 0
        self.random = Random(f"{seed}:picker")
        self.open_requests = 0
        self._choose = choose

    @property
    def settings(self) -> None:
        return None

    def inflight_counts(self) -> list[int]:
        return self.inflight

    def failing_plugins(self) -> list[FailingPlugin]:
        return []

    def replicas_unheard(self, replicas: int) -> None:
        """A baseline does not care."""

    def configure(self, settings: SchedulerSettings, now: Seconds) -> None:
        raise AssertionError("a baseline has no configuration")

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> None:
        ids = [at.endpoint_id for at in self.endpoints]
        known = dict(zip(ids, self.inflight, strict=True))
        self.endpoints = list(endpoints)
        self.inflight = [known.get(at.endpoint_id, 0) for at in endpoints]

    def observe(self, endpoint: Endpoint, metrics: EndpointMetrics, now: Seconds) -> None:
        """A baseline does not look at metrics."""

    def refused(self, endpoint: Endpoint, now: Seconds) -> None:
        """A baseline does not look at metrics."""

    @property
    def may_hold(self) -> bool:
        """A baseline has nobody wait."""
        return False

    def holds(self, request: InferenceRequest, now: Seconds) -> bool:
        return False

    def route(self, request: InferenceRequest, now: Seconds) -> Route | Refusal:
        if not self.endpoints:
            return Refusal(
                reason=RefusalReason.NO_ENDPOINTS,
                status=503,
                message="no endpoint is ready: 0 of 0",
            )
        chosen = self._choose(self, request)
        self.routed += 1
        self.inflight[chosen] += 1
        self.open_requests += 1
        return Route(self.endpoints[chosen])

    def first_output(self, route: Route, now: Seconds) -> None:
        """A baseline only counts whole requests."""

    def reschedule(self, route: Route, served: Endpoint, now: Seconds) -> None:
        raise AssertionError("a baseline names one endpoint")

    def complete(self, route: Route, outcome: Outcome, now: Seconds) -> None:
        self.open_requests -= 1
        for position, endpoint in enumerate(self.endpoints):
            # One that left and came back has lost its count; it must not fall below zero.
            if endpoint.endpoint_id == route.endpoint.endpoint_id and self.inflight[position]:
                self.inflight[position] -= 1

    def tick(self, now: Seconds) -> None:
        """A baseline keeps nothing that grows old."""


Choose: TypeAlias = Callable[[Baseline, InferenceRequest], int]
"""How a baseline chooses: a position among its endpoints, of which there is at least one."""


def _random(baseline: Baseline, request: InferenceRequest) -> int:
    return baseline.random.randrange(len(baseline.endpoints))


def _round_robin(baseline: Baseline, request: InferenceRequest) -> int:
    return baseline.routed % len(baseline.endpoints)


def _least_requests(baseline: Baseline, request: InferenceRequest) -> int:
    least = min(baseline.inflight)
    tied = [at for at, requests in enumerate(baseline.inflight) if requests == least]
    return baseline.random.choice(tied)


def _power_of_two(baseline: Baseline, request: InferenceRequest) -> int:
    if len(baseline.endpoints) == 1:
        return 0
    one, other = baseline.random.sample(range(len(baseline.endpoints)), 2)
    return one if baseline.inflight[one] <= baseline.inflight[other] else other


def _session_affinity(baseline: Baseline, request: InferenceRequest) -> int:
    """Rendezvous hashing: a session moves only if its own endpoint leaves."""
    session = request.session_id
    if not session:
        return _random(baseline, request)
    ids = [at.endpoint_id for at in baseline.endpoints]
    weights = [xxhash.xxh64_intdigest(f"{session}\0{endpoint_id}".encode()) for endpoint_id in ids]
    return weights.index(max(weights))


BASELINES: Final[Mapping[str, Choose]] = {
    "random": _random,
    "round-robin": _round_robin,
    "least-requests": _least_requests,
    "power-of-two": _power_of_two,
    _SESSION_AFFINITY: _session_affinity,
}


def built_in() -> tuple[str, ...]:
    """What `--config` knows by name. Raises `ConfigError` as `strategies`."""
    return (*configurations(), *BASELINES)


class PolicyNameError(ValueError):
    """The command line names a policy that there is not, or one name twice: one sentence."""


class PolicySource(Struct, frozen=True, kw_only=True):
    """What `--config` names, read once; small enough to be sent to another process."""

    name: str
    """For tables and files: the built-in's, or the file's without its ending."""
    text: str = ""
    """An `EndpointPickerConfig`; "" for a baseline."""
    source: str = ""
    """Where the text is from, for messages."""

    @property
    def by_session(self) -> bool:
        """It goes by the session of a request and by nothing else."""
        return not self.text and self.name == _SESSION_AFFINITY

    @property
    def hash(self) -> str | None:
        """As `epp check-config` tells it; None for a baseline. Raises as `load`."""
        return config_hash(self.load()) if self.text else None

    def load(self) -> PickerConfig:
        """The configuration. Raises `ConfigError` with all that is wrong with it."""
        return _loaded(self.text, self.source)

    def opener(
        self,
        refresh_interval_s: Seconds,
        prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S,
        fallback_endpoints_max: int = 0,
    ) -> Callable[[int], Policy]:
        """Seed -> a new replica that scrapes at `refresh_interval_s`.

        `prefill_tokens_per_s` is that of each pod of which the configuration says nothing,
        `fallback_endpoints_max` how many endpoints are named besides the first.
        """
        if not self.text:
            choose = BASELINES[self.name]
            return lambda seed: Baseline(choose, seed=seed)
        settings = replace(
            build_settings(
                self.load(),
                refresh_interval_s=refresh_interval_s,
                prefill_tokens_per_s=prefill_tokens_per_s,
                fallback_endpoints_max=fallback_endpoints_max,
            ),
            session_tokens=SessionTokens((_SESSION_KEY,)),
        )
        return lambda seed: SchedulerPolicy(settings, seed=seed)


@lru_cache(maxsize=_LOADED_MAX)
def _loaded(text: str, source: str) -> PickerConfig:
    return load_config(text, source, plugin_tables())


def policy_source(named: str) -> PolicySource:
    """The built-in `named`, or the configuration in the file `named`, checked.

    Raises `PolicyNameError` if there is neither, `ConfigError` if the configuration is no good and
    `OSError` if the file cannot be read.
    """
    text = configurations().get(named)
    if text is not None:
        return PolicySource(name=named, text=text, source=f"built-in {named}")
    if named in BASELINES:
        return PolicySource(name=named)
    path = Path(named)
    if not path.exists():
        hint = "" if rivals_installed() else f"; {RIVALS_MISSING}"
        raise PolicyNameError(f"{named} is neither a file nor one of {', '.join(built_in())}{hint}")
    if path.stat().st_size > CONFIG_MAX_BYTES:
        raise ConfigError([f"{named} is larger than {CONFIG_MAX_BYTES} bytes"])
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError([unread(named, problem, "YAML")]) from problem
    source = PolicySource(name=path.stem, text=text, source=named)
    source.load()
    return source
