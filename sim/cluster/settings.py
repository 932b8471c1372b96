"""What a cluster is: its pods, its pickers, its clients, and all that separates them."""

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Final

from msgspec import Meta, Struct

from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.types import Seconds
from epp.flags.serve import REFRESH_MIN_S, REFRESH_PER_ENDPOINT_S
from sim.cluster.assignment import Assignment
from sim.cluster.kv_events import KVEventSettings
from sim.cluster.peering import SNAPSHOT_S_MAX, PeerSettings
from sim.cluster.policies import Policy, PolicySource
from sim.cluster.rerouting import Reschedule
from sim.cluster.scraping import ScrapeTrouble
from sim.cluster.simulated_pod import PodKind
from sim.cluster.tokenizing import TokenizeSettings

SCRAPE_INTERVAL_S_MIN: Final = REFRESH_MIN_S
SCRAPE_INTERVAL_S_PER_POD: Final = REFRESH_PER_ENDPOINT_S
"""Both: as `epp/shell/engines/scrape` has them."""

TICK_S: Final[Seconds] = 1.0
"""As `epp serve` calls `Scheduler.tick`."""


class ClusterSettingsError(ValueError):
    """Settings that do not go together: one sentence."""


class ClientSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All clients of a run; each request is one to its client, however often it is sent."""

    retries: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """How often one is sent again that was refused with 429 or 503, that met no picker, or whose
    pod died.
    """
    pause_s: Annotated[float, Meta(ge=0.01, le=1e6)] = 1.0
    """Before the first of them; twice as long before each further one."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    """The client leaves if the whole answer is not there by then, and does not come again."""

    def pause_before_s(self, retry: int) -> float:
        """Before the `retry`-th time again, from 0."""
        return self.pause_s * 2.0 ** min(retry, 30)


class Absence(Struct, frozen=True):
    """Picker `replica` dies at `from_s`, and a new process takes its place at `to_s`.

    From 0 on: it joins late. The new process knows nothing, scrapes from `from_s` on and gets
    requests from `to_s` on, or once it has a snapshot of its peers. Requests go to the others
    meanwhile; where there are none the gateway refuses them. Answers that were under way are served.
    """

    replica: int
    from_s: Seconds
    to_s: Seconds


class ClusterSettings(Struct, frozen=True, kw_only=True):
    """The pool and all that separates the picker's view from the truth.

    Raises `ClusterSettingsError`.
    """

    pods: tuple[PodKind, ...]
    replicas: int = 1
    """Pickers."""
    assignment: Assignment = Assignment.RANDOM
    """Which of them a request reaches."""
    peers: PeerSettings | None = None
    """How they tell each other what they decide; None: each is blind to the others."""
    absences: tuple[Absence, ...] = ()
    fallback_endpoints_max: int = 0
    """Endpoints that a picker names besides the first, which the gateway asks if it does not get through."""
    reschedules: tuple[Reschedule, ...] = ()
    scrape_interval_s: Seconds | None = None
    """Mean time between two scrapes of a pod; None: as production, by the number of pods."""
    scrape_delay_s: Seconds = 0.001
    """From the instant that a page shows to the picker that has read it."""
    scrape_troubles: tuple[ScrapeTrouble, ...] = ()
    network_delay_s: Seconds = 0.0005
    """One way, client to picker and picker to pod alike."""
    discovery_delay_s: Seconds = 1.0
    """From a change of the pool to the pickers that know of it."""
    response_chunks: bool = False
    """The gateway shows response bodies to the picker, which thus knows of first tokens."""
    abort_share: float = 0.0
    """Share of the requests whose client leaves if the answer takes too long."""
    abort_after_s: Seconds = 10.0
    """Mean of the exponentially distributed patience of those clients."""
    clients: ClientSettings = ClientSettings()
    believed_prefill_tokens_per_s: float | None = None
    """What pickers take for the prefill speed of every pod of which their configuration says nothing;
    None: what it does."""
    tokenize: TokenizeSettings | None = None
    """What requests wait for before they are placed; None: for nothing."""
    kv_events: KVEventSettings | None = None
    """How pickers hear what engines hold; None: nobody tells them."""

    @property
    def refresh_interval_s(self) -> Seconds:
        """Mean time between two scrapes of a pod, in effect."""
        if self.scrape_interval_s is not None:
            return self.scrape_interval_s
        return max(SCRAPE_INTERVAL_S_MIN, SCRAPE_INTERVAL_S_PER_POD * len(self.pods))

    @property
    def prefill_tokens_per_s(self) -> float:
        """What pickers are told of every pod unless their configuration tells them.

        `believed_prefill_tokens_per_s`, else what it does; where pods differ in that, what a picker
        assumes that nobody tells anything.
        """
        if self.believed_prefill_tokens_per_s is not None:
            return self.believed_prefill_tokens_per_s
        speeds = {kind.prefill_tokens_per_s for kind in self.pods}
        return speeds.pop() if len(speeds) == 1 else PREFILL_TOKENS_PER_S

    def opener(self, source: PolicySource) -> Callable[[int], Policy]:
        """Seed -> a new picker of this pool, which decides by `source`."""
        return source.opener(
            self.refresh_interval_s, self.prefill_tokens_per_s, self.fallback_endpoints_max
        )

    def __post_init__(self) -> None:
        _check_pickers(self)


def _check_pickers(settings: ClusterSettings) -> None:
    """`ClusterSettingsError` if something is said of pickers that there are not or cannot be."""
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
            "(--fallback-endpoints-max) of 1 or more, got 0: pickers name one endpoint alone"
        )
    away_s_min = 2 * settings.refresh_interval_s
    by_replica = sorted(settings.absences, key=lambda absence: (absence.replica, absence.from_s))
    for absence in by_replica:
        if absence.to_s - absence.from_s < away_s_min:
            raise ClusterSettingsError(
                f"picker {absence.replica} scrapes every pod before it is there again: expected an "
                f"absence of {away_s_min:g} s at least, got {absence.to_s - absence.from_s:g} s"
            )
    for before, after in pairwise(by_replica):
        if before.replica == after.replica and after.from_s < before.to_s + SNAPSHOT_S_MAX:
            raise ClusterSettingsError(
                f"picker {after.replica} dies at {after.from_s:g} s: expected that to be "
                f"{SNAPSHOT_S_MAX:g} s at least after it came back, at {before.to_s:g} s"
            )
