"""The picker's connection with the API server of its cluster, as one object and one task."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from random import Random
from typing import Final
from zlib import crc32

import structlog
from msgspec import Struct

from epp.core.types import Seconds
from epp.flags.serve import ServeFlags
from epp.shell.found import Found
from epp.shell.kubernetes.client import Credentials, KubeClient
from epp.shell.kubernetes.config_source import ConfigSource
from epp.shell.kubernetes.discovery import Discovery, Scope
from epp.shell.kubernetes.events import EventRecorder, Reason
from epp.shell.kubernetes.leader import ElectionTiming, LeaderElector
from epp.shell.kubernetes.list_watch import Timing
from epp.shell.kubernetes.objects import Collection, config_map_reader
from epp.shell.kubernetes.peer_service import PeerService
from epp.shell.kubernetes.reflector import Reflector
from epp.shell.kubernetes.state import ClusterSnapshot, Reflection
from epp.shell.supervision import Loop, Supervisor

IN_TOUCH_POLL_S: Final[Seconds] = 1.0

_log = structlog.get_logger(__name__)


class ClusterTiming(Struct, frozen=True, kw_only=True):
    """Delays and timeouts of watches and of the leader election, which tests shorten."""

    watch: Timing = Timing()
    election: ElectionTiming = ElectionTiming()


class Cluster:
    """The picker's connection to the API server of its cluster. Call `connect`, run `run` as a
    task, and call `close`.

    - `on_found(found)` is called when endpoints, objectives, rewrites or `ready` changed.
    - `on_ready` is called when `ready` or `leading` may have changed.
    - `on_config(text, told_by)` is called when the configuration that the ConfigMap or its mounted
      file supplies changed.
    - `on_peers(addresses)` is called when the replicas of `--peer-service` changed.
    """

    def __init__(  # noqa: PLR0913 - four listeners, and what tests replace
        self,
        flags: ServeFlags,
        *,
        on_found: Callable[[Found], None],
        on_ready: Callable[[], None],
        on_config: Callable[[bytes, str], None],
        on_peers: Callable[[frozenset[str]], None] = lambda _: None,
        seed: int,
        timing: ClusterTiming | None = None,
        credentials: Credentials | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        timing = timing or ClusterTiming()
        self._flags = flags
        self._on_found = on_found
        self._on_ready = on_ready
        self._supervisor = supervisor or Supervisor()
        self._client = KubeClient(credentials or Credentials())
        self.discovery: Final = Discovery(
            self._client,
            _scope(flags),
            self._discovered,
            seed=seed,
            timing=timing.watch,
            supervisor=self._supervisor,
        )
        self._config_map_name = f"ConfigMap {flags.own_namespace}/{flags.config_map}"
        self.config: Final = ConfigSource(
            on_config, watched=self._config_map_name, file=flags.config_file
        )
        self._config_map = self._config_reflector(seed, timing.watch)
        self._peers = self._peer_service(on_peers, seed, timing.watch)
        instance = flags.instance or socket.gethostname()
        self._events = EventRecorder(
            self._client,
            namespace=flags.pool_namespace,
            pool_group=flags.pool_group,
            instance=instance,
        )
        self._elector: LeaderElector | None = None
        if flags.ha_enable_leader_election:
            self._elector = LeaderElector(
                self._client,
                namespace=flags.own_namespace,
                name=_lease_name(flags),
                identity=instance,
                on_change=on_ready,
                random=Random(f"{seed}:kube:lease"),  # noqa: S311  jitter, not secrets
                timing=timing.election,
            )
        self._election_task: asyncio.Task[None] | None = None
        self._retired = False

    @property
    def ready(self) -> bool:
        """True if the InferencePool (or the configured selector) and its pods are known."""
        return self.discovery.synced

    @property
    def leading(self) -> bool | None:
        """True if this replica is the leader, or None without leader election."""
        return self._elector.leading if self._elector else None

    def reflections(self) -> dict[str, Reflection]:
        """Return the state of the watch of each kind of object, by resource such as "pods"."""
        found = self.discovery.reflections()
        if self._config_map is not None:
            found["configmaps"] = self._config_map.reflection()
        if self._peers is not None:
            found["endpointslices"] = self._peers.reflection()
        return found

    def snapshot(self) -> ClusterSnapshot:
        """Return the states of the watches, the counts of Kubernetes Events and the leadership, for a
        metrics page.
        """
        return ClusterSnapshot(
            kinds=self.reflections(),
            events={"written": self._events.written, "dropped": self._events.dropped},
            leading=self.leading,
        )

    def tell(self, *, applied: bool, message: str) -> None:
        """Queue a Kubernetes Event about an applied or rejected configuration on the InferencePool,
        if the InferencePool is known and the limits of the queue allow it.
        """
        pool = self.discovery.pool
        if pool is not None:
            reason = Reason.CONFIG_APPLIED if applied else Reason.CONFIG_REJECTED
            self._events.record(reason, message, pool)

    async def connect(self) -> None:
        """Load the address of the API server and the credentials for it; call this before `run`.
        Raises `KubeConfigError`.
        """
        await self._client.__aenter__()

    async def close(self) -> None:
        """Close the client of the API server; call this after `run`."""
        await self._client.__aexit__()

    async def run(self) -> None:
        """Run all watches, the election and the writer of Events until cancelled."""
        loops: dict[str, Loop] = {"discovery": self.discovery.run, "events": self._events.run}
        if self._config_map is not None:
            loops["watch config"] = self._config_map.run
            loops["config in touch"] = partial(self._watch_touch, self._config_map)
        if self._peers is not None:
            loops["watch peers"] = self._peers.run
        if self._elector is not None:
            loops["election"] = self._elector.run
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(self._supervisor.keep(name, loop), name=name)
                for name, loop in loops.items()
            }
            self._election_task = tasks.get("election")
            if self._retired and self._election_task is not None:
                self._election_task.cancel()

    def retire(self) -> None:
        """Give up leadership so that another replica can lead, but continue discovery."""
        self._retired = True
        if self._election_task is not None:
            self._election_task.cancel()

    async def retired(self) -> None:
        """Wait, after `retire`, until the Lease is released or its release has timed out."""
        if self._election_task is not None:
            await asyncio.wait({self._election_task})

    def _peer_service(
        self, on_change: Callable[[frozenset[str]], None], seed: int, timing: Timing
    ) -> PeerService | None:
        flags = self._flags
        if not flags.peer_service:
            return None
        ((name, port),) = flags.peer_targets
        return PeerService(
            self._client,
            namespace=flags.own_namespace,
            name=name,
            port=port,
            on_change=on_change,
            seed=seed,
            timing=timing,
        )

    # The methods below watch the configuration.

    def _config_reflector(self, seed: int, timing: Timing) -> Reflector[bytes] | None:
        flags = self._flags
        if not flags.config_map:
            return None
        source = Collection(
            resource="configmaps",
            namespace=flags.own_namespace,
            field_selector=f"metadata.name={flags.config_map}",
        )
        return Reflector(
            self._client,
            (source,),
            config_map_reader(flags.config_map_key or PurePath(flags.config_file).name),
            self._config_map_changed,
            random=Random(f"{seed}:kube:config"),  # noqa: S311  jitter, not secrets
            timing=timing,
        )

    def _config_map_changed(self) -> None:
        assert self._config_map is not None
        text = self._config_map.objects.get(self._flags.config_map)
        if text is None:
            _log.error(
                f"{self._config_map_name} is missing or lacks the key of the configuration; the "
                "last valid configuration stays in force"
            )
            return
        self.config.watch_told(text)

    async def _watch_touch(self, reflector: Reflector[bytes]) -> None:
        while True:
            self.config.watch_in_touch(reflector.in_touch)
            await asyncio.sleep(IN_TOUCH_POLL_S)

    def _discovered(self) -> None:
        found = self.discovery.found
        self._on_found(found)
        self._on_ready()
        _log.info(
            "endpoints, objectives or model rewrites in the cluster changed",
            endpoints=len(found.endpoints),
            objectives=len(found.objectives),
            synced=self.discovery.synced,
        )


def _scope(flags: ServeFlags) -> Scope:
    return Scope(
        namespace=flags.pool_namespace,
        pool_name=flags.pool_name,
        pool_group=flags.pool_group,
        label_selector=flags.endpoint_selector,
        target_ports=tuple(flags.endpoint_target_ports),
        node_labels=tuple(dict.fromkeys(name for name in flags.node_labels.split(",") if name)),
    )


def _lease_name(flags: ServeFlags) -> str:
    """Return the name of the Lease by which the replicas of this pool elect a leader: the
    configured one, or one with the pool's name or a hash of the label selector.
    """
    if flags.lease_name:
        return flags.lease_name
    return f"homing-{flags.pool_name or f'{crc32(flags.endpoint_selector.encode()):08x}'}"
