"""Discover the pool and its pods: endpoints, priorities and model rewrites.

If a pool is configured, its InferencePool supplies the selector and the ports of pods; otherwise
flags supply them. A new selector starts a new list and watch of pods. The old endpoints serve until
this list is complete.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import structlog
from msgspec import Struct

from epp.shell.found import Found
from epp.shell.kubernetes.client import KubeClient
from epp.shell.kubernetes.list_watch import Timing
from epp.shell.kubernetes.objects import (
    EXTENSION_GROUPS,
    EXTENSION_VERSION,
    Collection,
    Pod,
    Pool,
    endpoints_of,
    model_rewrites,
    node_reader,
    objective_reader,
    read_pod,
    read_pool,
    rewrite_reader,
)
from epp.shell.kubernetes.reflector import Reflector
from epp.shell.kubernetes.state import Reflection
from epp.shell.supervision import Loop, Supervisor, forever

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Scope(Struct, frozen=True, kw_only=True):
    """The scope of discovery: the pods of an InferencePool, or those of a label selector with given
    ports.
    """

    namespace: str
    pool_name: str = ""
    pool_group: str = "inference.networking.k8s.io"
    label_selector: str = ""
    target_ports: tuple[int, ...] = ()
    node_labels: tuple[str, ...] = ()
    """Names of labels of nodes that endpoints also have; () to watch no nodes."""


class Discovery:
    """The discovery of the pool's endpoints, objectives and rewrites. It calls `on_change` in the
    event loop whenever `found` or `synced` changes.
    """

    def __init__(
        self,
        client: KubeClient,
        scope: Scope,
        on_change: Callable[[], None],
        *,
        seed: int,
        timing: Timing,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._client = client
        self._scope = scope
        self._on_change = on_change
        self._seed = seed
        self._timing = timing
        self._supervisor = supervisor or Supervisor()
        self._group: asyncio.TaskGroup | None = None
        self._pool = None if not scope.pool_name else self._pool_reflector()
        self._pods: Reflector[Pod] | None = None
        """Reflector whose pods are the current endpoints, or None before the first list of pods is
        complete.
        """
        self._coming: Reflector[Pod] | None = None
        """Reflector of a new selector whose first list of pods is in progress, or None."""
        self._coming_task: asyncio.Task[None] | None = None
        self._selector = ""
        self._objectives = self._extension("inferenceobjectives", objective_reader)
        self._rewrites = self._extension("inferencemodelrewrites", rewrite_reader)
        self._nodes = self._node_reflector() if scope.node_labels else None
        self.found = Found()
        self.synced = False
        """True if the InferencePool exists (or none is configured) and its pods were listed
        once.
        """

    @property
    def pool(self) -> Pool | None:
        """The watched InferencePool, or None if it does not exist or no pool is configured."""
        found = self._pool.objects if self._pool else {}
        return found.get(self._scope.pool_name)

    def reflections(self) -> dict[str, Reflection]:
        """Return the state of the watch of each kind of object, by resource such as "pods"."""
        reflectors: dict[str, Reflector[Any] | None] = {
            "inferencepools": self._pool,
            "pods": self._coming or self._pods,
            "inferenceobjectives": self._objectives,
            "inferencemodelrewrites": self._rewrites,
            "nodes": self._nodes,
        }
        return {name: kept.reflection() for name, kept in reflectors.items() if kept is not None}

    async def run(self) -> None:
        """Discover the pool's endpoints, objectives and rewrites until cancelled. This method owns
        the tasks of all watches.
        """
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name, reflector in (
                ("pool", self._pool),
                ("objectives", self._objectives),
                ("rewrites", self._rewrites),
                ("nodes", self._nodes),
            ):
                if reflector is not None:
                    self._start(f"watch {name}", reflector.run)
            # After a restart of this task, the current pods are watched again.
            pods = self._coming or self._pods
            if pods is not None:
                self._coming_task = self._start("watch pods", pods.run)
            elif self._pool is None:
                self._select(self._scope.label_selector)
            await forever()

    def _start(self, name: str, loop: Loop) -> "asyncio.Task[None]":
        assert self._group is not None, "watches start only within `run`"
        return self._group.create_task(self._supervisor.keep(name, loop), name=name)

    # The methods below create the watches.

    def _random(self, purpose: str) -> Random:
        return Random(f"{self._seed}:kube:{purpose}")  # noqa: S311  jitter, not secrets

    def _pool_reflector(self) -> Reflector[Pool]:
        scope = self._scope
        source = Collection(
            group=scope.pool_group,
            resource="inferencepools",
            namespace=scope.namespace,
            field_selector=f"metadata.name={scope.pool_name}",
        )
        return Reflector(
            self._client,
            (source,),
            read_pool,
            self._pool_changed,
            random=self._random("pool"),
            timing=self._timing,
        )

    def _node_reflector(self) -> Reflector[dict[str, str]]:
        return Reflector(
            self._client,
            (Collection(resource="nodes", namespace="", metadata_only=True),),
            node_reader(self._scope.node_labels),
            self._update,
            random=self._random("nodes"),
            timing=self._timing,
        )

    def _extension(
        self, resource: str, reader: Callable[[str, str], Callable[[bytes], T | None]]
    ) -> Reflector[T] | None:
        """Return a reflector for InferenceObjectives or InferenceModelRewrites, which refer to a
        pool; their kind may be missing in a cluster. Return None if no pool is configured.
        """
        scope = self._scope
        if not scope.pool_name:
            return None
        return Reflector(
            self._client,
            [
                Collection(
                    group=group,
                    version=EXTENSION_VERSION,
                    resource=resource,
                    namespace=scope.namespace,
                )
                for group in EXTENSION_GROUPS
            ],
            reader(scope.pool_name, scope.pool_group),
            self._update,
            random=self._random(resource),
            timing=self._timing,
            optional=True,
        )

    # Callbacks of the reflectors.

    def _pool_changed(self) -> None:
        pool = self.pool
        if pool is None:
            _log.error(
                f"InferencePool {self._scope.pool_name} does not exist in namespace "
                f"{self._scope.namespace}: there are no endpoints and the picker is not ready"
            )
        else:
            _log.info(
                "InferencePool changed",
                selector=pool.label_selector,
                target_ports=pool.target_ports,
                app_protocol=pool.app_protocol,
            )
            self._select(pool.label_selector)
        self._update()

    def _select(self, label_selector: str) -> None:
        """Watch the pods that match `label_selector`, beginning with a list of them, unless they
        are watched already.
        """
        if label_selector == self._selector:
            return
        self._selector = label_selector
        before = self._coming or self._pods
        if self._coming_task is not None:
            # Its pods continue to serve, but later events of it are ignored.
            self._coming_task.cancel()
        coming: Reflector[Pod] = Reflector(
            self._client,
            [
                Collection(
                    resource="pods",
                    namespace=self._scope.namespace,
                    label_selector=label_selector,
                )
            ],
            read_pod,
            self._pods_changed,
            random=self._random("pods"),
            timing=self._timing,
            predecessor=before,
        )
        self._coming = coming
        self._coming_task = self._start("watch pods", coming.run)

    def _pods_changed(self) -> None:
        if self._coming is not None and self._coming.synced:
            self._pods, self._coming = self._coming, None
        self._update()

    def _update(self) -> None:
        """Compute endpoints, objectives and rewrites from the watched objects, and call `on_change`
        if they changed.
        """
        pool = self.pool
        ports = pool.target_ports if pool else self._scope.target_ports
        there = self._pods is not None and (pool is not None or self._pool is None)
        pods = self._pods.objects.values() if self._pods and there else ()
        before = self.found, self.synced
        self.found = Found(
            endpoints=endpoints_of(pods, ports, self._nodes.objects if self._nodes else {}),
            objectives=self._objectives.objects if self._objectives else {},
            rewrites=model_rewrites(self._rewrites.objects if self._rewrites else {}),
        )
        self.synced = there
        if (self.found, self.synced) != before:
            self._on_change()
