"""Routing policies of simulated pickers: the production scheduler with any configuration, and
baselines for comparison.

A policy is one picker replica. It sees what a production picker sees: pods as they are announced,
and pages as they are scraped. The simulator calls it as production calls the scheduler.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final, Protocol, TypeAlias

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import (
    CONFIG_MAX_BYTES,
    DEFAULT_SOURCE,
    ConfigError,
    PickerConfig,
    load_config,
)
from epp.configuration.defaults import Labelled, default_for_roles
from epp.configuration.describing import config_hash
from epp.core.decision.inputs import (
    OutputStarted,
    PageScraped,
    PeersUnheard,
    PoolReplaced,
    Reconfigured,
    RequestEnded,
    ResponseStarted,
    ScrapeFailed,
    ServedBy,
    Tick,
)
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.failures import FailingPlugin
from epp.core.knowledge.inflight import Lease, Outcome
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import Endpoint, EndpointMetrics, Refusal, RefusalReason, Seconds
from sim.cluster.built_in import RIVALS_MISSING, configurations, rivals_installed
from sim.sentences import unread

_SESSION_AFFINITY: Final = "session-affinity"
_SESSION_KEY: Final = b"of every replica in every run"
"""Key of the session tokens of all replicas in all runs, as if from one Secret, so that runs are
reproducible.
"""
_LOADED_MAX: Final = 256
"""Maximum number of parsed configurations that are cached. Parsing one takes 50 ms, because its
plug-ins are tried.
"""


class Route(Struct, gc=False, eq=False):
    """The endpoint that a policy chose for a request, with the scheduler's lease and decision."""

    endpoint: Endpoint
    lease: Lease | None = None
    decision: Decision | None = None
    """Decision of the production scheduler for the request, or None for a baseline."""
    prefill: Endpoint | None = None
    """Endpoint that computes the prompt before `endpoint` decodes; None, or `endpoint` itself, if
    `endpoint` does both.
    """

    @property
    def predicted_cached_tokens(self) -> int:
        """Number of cached prompt tokens that the policy expects at the chosen pod; 0 for a
        baseline.
        """
        return self.decision.predicted_tokens if self.decision else 0


class Policy(Protocol):
    """The interface of one simulated picker replica. The caller completes each routed request
    exactly once.
    """

    @property
    def settings(self) -> SchedulerSettings | None:
        """Settings of the policy's production scheduler; None for a baseline."""
        ...

    @property
    def open_requests(self) -> int:
        """Number of requests that the policy has routed and that are not completed."""
        ...

    def inflight_counts(self) -> list[int]:
        """Return the number of requests in flight at each endpoint, as the policy counts them."""
        ...

    def failing_plugins(self) -> list[FailingPlugin]:
        """Return the plugins that raised an error or returned invalid values. The policy decided
        without these results.
        """
        ...

    def replicas_unheard(self, replicas: int) -> None:
        """Tell the policy how many other replicas route to the same endpoints without sharing
        decisions with it.
        """
        ...

    def configure(self, settings: SchedulerSettings, now: Seconds) -> None:
        """Replace the settings of the policy's scheduler. Baselines have none and raise an
        error.
        """
        ...

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> None: ...
    def observe(self, endpoint: Endpoint, metrics: EndpointMetrics, now: Seconds) -> None: ...
    def refused(self, endpoint: Endpoint, now: Seconds) -> None:
        """Report to the policy that a scrape of `endpoint` got no answer."""
        ...

    def route(self, request: InferenceRequest, now: Seconds) -> Route | Refusal: ...
    def response_started(self, route: Route, now: Seconds) -> None:
        """Report to the policy that the response headers of a request that several endpoints serve
        have arrived.
        """
        ...

    def first_output(self, route: Route, now: Seconds) -> None: ...
    def reschedule(self, route: Route, served: Endpoint, now: Seconds) -> None:
        """Report to the policy that the gateway sent the request to `served`, a fallback endpoint,
        instead of the first endpoint. Only for policies that name several endpoints.
        """
        ...

    def complete(self, route: Route, outcome: Outcome, now: Seconds) -> None: ...
    def tick(self, now: Seconds) -> None: ...


class SchedulerPolicy:
    """A policy that is the production `Scheduler`, called as the production shell calls it."""

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

    def route(self, request: InferenceRequest, now: Seconds) -> Route | Refusal:
        decision = self.scheduler.schedule(request, now)
        return decision if isinstance(decision, Refusal) else route_of(decision)

    def response_started(self, route: Route, now: Seconds) -> None:
        assert route.lease is not None
        self.scheduler.take(ResponseStarted(route.lease), now)

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


def route_of(decision: Decision) -> Route:
    """Return the route by a decision of a production scheduler."""
    return Route(decision.endpoint, decision.lease, decision)


def scheduler_of(policy: Policy) -> Scheduler | None:
    """Return the production scheduler of `policy`, or None for a baseline."""
    return policy.scheduler if isinstance(policy, SchedulerPolicy) else None


class Baseline:
    """A policy for comparison, without scraped metrics and without a prefix index, like a plain
    proxy.
    """

    def __init__(self, choose: "Choose", *, seed: int) -> None:
        self.endpoints: list[Endpoint] = []
        self.inflight: list[int] = []
        """Number of requests of this replica in progress at each endpoint, by position in
        `endpoints`.
        """
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
        """Do nothing, because a baseline ignores other replicas."""

    def configure(self, settings: SchedulerSettings, now: Seconds) -> None:
        raise AssertionError("a baseline has no configuration")

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> None:
        ids = [at.endpoint_id for at in self.endpoints]
        known = dict(zip(ids, self.inflight, strict=True))
        self.endpoints = list(endpoints)
        self.inflight = [known.get(at.endpoint_id, 0) for at in endpoints]

    def observe(self, endpoint: Endpoint, metrics: EndpointMetrics, now: Seconds) -> None:
        """Do nothing, because a baseline ignores metrics."""

    def refused(self, endpoint: Endpoint, now: Seconds) -> None:
        """Do nothing, because a baseline does not react to failed scrapes."""

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

    def response_started(self, route: Route, now: Seconds) -> None:
        raise AssertionError("a baseline chooses one endpoint for each request")

    def first_output(self, route: Route, now: Seconds) -> None:
        """Do nothing, because a baseline does not react to the beginning of an answer."""

    def reschedule(self, route: Route, served: Endpoint, now: Seconds) -> None:
        raise AssertionError("a baseline names one endpoint")

    def complete(self, route: Route, outcome: Outcome, now: Seconds) -> None:
        self.open_requests -= 1
        for position, endpoint in enumerate(self.endpoints):
            # An endpoint that left and returned has lost its count, which must not become negative.
            if endpoint.endpoint_id == route.endpoint.endpoint_id and self.inflight[position]:
                self.inflight[position] -= 1

    def tick(self, now: Seconds) -> None:
        """Do nothing, because a baseline stores nothing that expires."""


Choose: TypeAlias = Callable[[Baseline, InferenceRequest], int]
"""Function of a baseline that returns the position, in `Baseline.endpoints`, of the endpoint for a
request. It is called only if there is an endpoint.
"""


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
    """Return the position of the session's endpoint by rendezvous hashing: a session moves only if
    its own endpoint leaves, or to a new endpoint with a greater hash. Without a session, choose at
    random.
    """
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
    """Return the built-in names that `--config` accepts: configurations and baselines. Raises
    `ConfigError` for invalid entry points, as `strategies` does.
    """
    return (*configurations(), *BASELINES)


class PolicyNameError(ValueError):
    """A policy name on the command line is unknown or repeated. The message is one sentence."""


class PolicySource(Struct, frozen=True, kw_only=True):
    """The configuration or baseline that `--config` names, small enough to be sent to another
    process. The file is read only once.
    """

    name: str
    """Name of the policy in tables and files: the built-in name, or the file's name without its
    extension.
    """
    text: str = ""
    """Text of the policy's `EndpointPickerConfig`; "" for a baseline."""
    source: str = ""
    """File or built-in name from which the text was read, for messages."""

    @property
    def by_session(self) -> bool:
        """True if the policy is the baseline that routes only by the request's session."""
        return not self.text and self.name == _SESSION_AFFINITY

    @property
    def hash(self) -> str | None:
        """Hash of the policy's configuration as `epp check-config` prints it; None for a baseline.
        Raises `ConfigError` if the configuration is invalid.
        """
        return config_hash(self.load()) if self.text else None

    def load(self) -> PickerConfig:
        """Return the parsed configuration of the policy. Raises `ConfigError` with all problems of
        an invalid one.
        """
        return _loaded(self.text, self.source)

    def for_pods(self, pods: Iterable[Labelled]) -> "PolicySource":
        """Return this policy or, if it is the built-in default, the default that `epp serve` chooses
        for endpoints with the labels of `pods`.
        """
        if self.source != DEFAULT_SOURCE:
            return self
        default = default_for_roles(pods)
        return replace(self, text=default.text, source=default.source)

    def opener(
        self,
        refresh_interval_s: Seconds,
        prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S,
        fallback_endpoints_max: int = 0,
    ) -> Callable[[int], Policy]:
        """Return a function that creates a new replica of the policy from a seed.
        `refresh_interval_s` is the mean interval between two scrapes of a pod.

        `prefill_tokens_per_s` is the speed of each pod for which the configuration sets none.
        `fallback_endpoints_max` is the maximum number of fallback endpoints that a replica names.
        Raises `ConfigError` if the configuration is invalid.
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
    """Return the built-in policy with the name `named`, or the checked configuration in the file
    `named`.

    Raises `PolicyNameError` if neither exists, `ConfigError` if the configuration is invalid, and
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
