"""The settings of a simulated cluster: its pods, pickers and clients, and the delays between
them.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Final

from msgspec import Meta, Struct

from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.types import Seconds
from epp.flags.serve import REFRESH_MIN_S, REFRESH_PER_ENDPOINT_S
from epp.plugins.filters import ROLE_LABEL
from sim.cluster.assignment import Assignment
from sim.cluster.kv_events import KVEventSettings
from sim.cluster.links import KVTransferSettings
from sim.cluster.peering import SNAPSHOT_S_MAX, PeerSettings
from sim.cluster.policies import Policy, PolicySource
from sim.cluster.rerouting import Reschedule
from sim.cluster.scraping import ScrapeTrouble
from sim.cluster.simulated_pod import PodKind
from sim.cluster.tokenizing import TokenizeSettings

SCRAPE_INTERVAL_S_MIN: Final = REFRESH_MIN_S
SCRAPE_INTERVAL_S_PER_POD: Final = REFRESH_PER_ENDPOINT_S
"""Part of the scrape interval, in seconds, for each pod of the pool. This constant and
`SCRAPE_INTERVAL_S_MIN` have the values of `epp/shell/engines/scrape`.
"""

TICK_S: Final[Seconds] = 1.0
"""Interval in seconds at which `epp serve` lets time pass in the scheduler (`Tick`)."""


class ClusterSettingsError(ValueError):
    """The settings of a cluster contradict each other. The message is one sentence."""


class ClientSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The behaviour of all clients of a run. Retries of a request count as the same request."""

    retries: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """Maximum number of retries of a request that was answered with 429 or 503, found no running
    picker, lost its picker while it waited there, lost the pod that prefills or decodes it, or
    could not read its KV blocks.
    """
    pause_s: Annotated[float, Meta(ge=0.01, le=1e6)] = 1.0
    """Pause before the first retry of a request, in seconds. Each further pause is twice as long as
    the one before.
    """
    timeout_s: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """Time in seconds after which a client that has no complete answer aborts its request, without
    a retry; None for no limit.
    """

    def pause_before_s(self, retry: int) -> float:
        """Return the pause in seconds before a retry of a request; `retry` is the number of earlier
        retries.
        """
        return self.pause_s * 2.0 ** min(retry, 30)


class Absence(Struct, frozen=True):
    """A period in which picker `replica` is down: the process dies at `from_s`, and a new one gets
    requests from `to_s` on.

    A period that begins at 0 means that the picker joins late. The new process begins without any
    state. It scrapes pods from `from_s` on. It receives requests from `to_s` on; if pickers share
    decisions, it first waits for a snapshot from a peer, at most `SNAPSHOT_S_MAX`. Other pickers
    receive the requests meanwhile; without others, they fail. Requests that wait at the picker when
    it dies fail too. Pods finish the answers in progress.

    A period must last at least two scrape intervals. It must begin at least `SNAPSHOT_S_MAX` after
    the end of the same picker's previous one.
    """

    replica: int
    from_s: Seconds
    to_s: Seconds


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """The settings of a simulated cluster: its pool, pickers and clients, and all delays and losses
    between the pods' state and what pickers see.

    Raises `ClusterSettingsError` if the settings contradict each other.
    """

    pods: tuple[PodKind, ...]
    replicas: int = 1
    """Number of pickers, each of which routes a part of the requests."""
    assignment: Assignment = Assignment.RANDOM
    """Rule by which requests are assigned to pickers."""
    peers: PeerSettings | None = None
    """Settings of the sharing of decisions between pickers, or None if they share nothing."""
    absences: tuple[Absence, ...] = ()
    fallback_endpoints_max: int = 0
    """Maximum number of fallback endpoints that a picker names; the gateway uses them if a
    connection fails."""
    reschedules: tuple[Reschedule, ...] = ()
    """Periods in which some connections to the first named endpoint fail. They need
    `fallback_endpoints_max` of 1 or more.
    """
    scrape_interval_s: Seconds | None = None
    """Mean time in seconds between two scrapes of a pod; None derives it from the number of pods at
    the start, by the rule of `epp serve`.
    """
    scrape_delay_s: Seconds = 0.001
    """Time in seconds from a scrape of a pod until the picker reads the page, which shows the state
    at the scrape.
    """
    scrape_troubles: tuple[ScrapeTrouble, ...] = ()
    network_delay_s: Seconds = 0.0005
    """Network delay in seconds in one direction, between client and picker and between picker and
    pod.
    """
    discovery_delay_s: Seconds = 1.0
    """Time in seconds from a change of the pool until pickers know of it."""
    response_chunks: bool = False
    """True if the gateway passes response bodies to the picker, which then observes first
    tokens.
    """
    abort_share: float = 0.0
    """Share of the requests whose client aborts if the answer takes longer than its patience."""
    abort_after_s: Seconds = 10.0
    """Mean patience in seconds of the clients in `abort_share`; it is exponentially distributed."""
    clients: ClientSettings = ClientSettings()
    believed_prefill_tokens_per_s: float | None = None
    """Prefill speed in tokens per second that pickers assume for every pod if their configuration
    does not set it. None for the speed by the pods' profile and engine (without `PodKind.speed`),
    or the default of `epp serve` if pods differ in it.
    """
    tokenize: TokenizeSettings | None = None
    """Settings of a renderer for whose tokens requests wait before they are placed, or None if
    requests do not wait.
    """
    kv_events: KVEventSettings | None = None
    """Settings of KV-cache events from engines to pickers, or None if pickers receive none."""
    kv_transfer: KVTransferSettings | None = None
    """Network and connector of disaggregated requests; None if all pods serve whole requests."""

    @property
    def refresh_interval_s(self) -> Seconds:
        """Mean time in seconds between two scrapes of a pod: `scrape_interval_s`, or the time
        derived from the number of pods at the start.
        """
        if self.scrape_interval_s is not None:
            return self.scrape_interval_s
        return max(SCRAPE_INTERVAL_S_MIN, SCRAPE_INTERVAL_S_PER_POD * len(self.pods))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill speed that pickers assume for every pod unless their configuration sets it.

        It is `believed_prefill_tokens_per_s` if set, else the speed by the pods' profile and engine
        (without `PodKind.speed`). If that is not set and pods differ in it, it is the default of
        `epp serve`.
        """
        if self.believed_prefill_tokens_per_s is not None:
            return self.believed_prefill_tokens_per_s
        speeds = {kind.prefill_tokens_per_s for kind in self.pods}
        return speeds.pop() if len(speeds) == 1 else PREFILL_TOKENS_PER_S

    def policy_of(self, source: PolicySource) -> PolicySource:
        """Return the policy of this cluster's pickers. It is `source`, except for the built-in
        default in a cluster that transfers KV blocks: then it is the default that `epp serve`
        chooses for the roles of the pods at the start.
        """
        if self.kv_transfer is None:
            return source
        return source.for_pods(self.pods)

    def opener(self, source: PolicySource) -> Callable[[int], Policy]:
        """Return a function that creates a new picker replica of this cluster from a seed, with the
        policy `source` (`policy_of`).
        """
        return self.policy_of(source).opener(
            self.refresh_interval_s, self.prefill_tokens_per_s, self.fallback_endpoints_max
        )

    def __post_init__(self) -> None:
        _check_pickers(self)
        _check_transfers(self)


def _check_pickers(settings: ClusterSettings) -> None:
    """Raise `ClusterSettingsError` if the settings name pickers that do not exist, absences that
    are too short or follow each other too soon, or failing connections without fallback endpoints.
    """
    named = [("--picker-away (picker-restart)", one.replica) for one in settings.absences]
    peers = settings.peers
    if peers is not None and settings.replicas > 1:
        named += [("--peer-slow (peer_slow)", one.replica) for one in peers.slow]
        named += [
            ("--peer-partition (peer-partition)", replica)
            for partition in peers.partitions
            for replica in partition.side
        ]
    for what, replica in named:
        if not 0 <= replica < settings.replicas:
            raise ClusterSettingsError(
                f"{what}: expected a picker from 0 to {settings.replicas - 1}, got {replica}"
            )
    if settings.reschedules and not settings.fallback_endpoints_max:
        raise ClusterSettingsError(
            f"reschedule at {settings.reschedules[0].from_s:g} s: expected fallback_endpoints_max "
            "(--fallback-endpoints-max) of 1 or more, got 0: pickers name only one endpoint"
        )
    away_s_min = 2 * settings.refresh_interval_s
    by_replica = sorted(settings.absences, key=lambda absence: (absence.replica, absence.from_s))
    for absence in by_replica:
        if absence.to_s - absence.from_s < away_s_min:
            raise ClusterSettingsError(
                f"picker {absence.replica} scrapes every pod before it serves again: expected an "
                f"absence of at least {away_s_min:g} s, got {absence.to_s - absence.from_s:g} s"
            )
    for before, after in pairwise(by_replica):
        if before.replica == after.replica and after.from_s < before.to_s + SNAPSHOT_S_MAX:
            raise ClusterSettingsError(
                f"picker {after.replica} dies at {after.from_s:g} s: expected this to be at least "
                f"{SNAPSHOT_S_MAX:g} s after its restart at {before.to_s:g} s"
            )


def _check_transfers(settings: ClusterSettings) -> None:
    """Raise `ClusterSettingsError` if a pod with a role has no KV connector, or if the KV blocks of
    a pod with a connector cannot be transferred.

    Without `kv_transfer` a role is only a label, which filters may read.
    """
    transfer = settings.kv_transfer
    if transfer is None:
        return
    for number, kind in enumerate(settings.pods):
        role = kind.labels.get(ROLE_LABEL)
        if role is not None and kind.engine.kv_connector is None:
            raise ClusterSettingsError(
                f"pod {number} has the label {ROLE_LABEL}={role}: expected an engine with a "
                "kv_connector"
            )
        _check_kind(number, kind, transfer)


def _check_kind(number: int, kind: PodKind, transfer: KVTransferSettings) -> None:
    """Raise `ClusterSettingsError` if the KV blocks of a pod cannot be transferred."""
    if kind.engine.kv_connector is None:
        return
    profile = kind.profile
    if not profile.kv_bytes_per_token and profile.kv_window is None:
        raise ClusterSettingsError(
            f"pod {number}: profile {profile.name} has no kv_bytes_per_token, which KV transfers "
            "need"
        )
    if kind.cache is not None:
        raise ClusterSettingsError(
            f"pod {number}: KV transfers need vLLM's cache, got {kind.cache.type_name}"
        )
    if transfer.push and not transfer.concurrent:
        raise ClusterSettingsError(
            "kv_transfer: push needs concurrent legs, because the decode engine must have reserved "
            "its blocks before the prefill"
        )
    if transfer.push and profile.layers is None:
        raise ClusterSettingsError(
            f"pod {number}: profile {profile.name} has no layers, which layer-wise transfers need"
        )
