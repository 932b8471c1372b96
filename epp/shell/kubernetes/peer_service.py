"""Find the addresses of the picker's replicas through the EndpointSlices of their headless
Service.
"""

from collections.abc import Callable
from random import Random

import structlog

from epp.core.address import address_of
from epp.shell.kubernetes.client import KubeClient
from epp.shell.kubernetes.list_watch import Timing
from epp.shell.kubernetes.objects import Collection, read_endpoint_slice
from epp.shell.kubernetes.reflector import Reflector
from epp.shell.kubernetes.state import Reflection

_log = structlog.get_logger(__name__)


class PeerService:
    """A watcher of the replicas' addresses.

    `on_change` is called with all addresses, "ip:port" each and including that of this replica,
    after the first list and after every change. Replicas count even before they are Ready, because
    a starting replica needs the state of its peers.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        port: int,
        on_change: Callable[[frozenset[str]], None],
        seed: int,
        timing: Timing,
    ) -> None:
        self._name = name
        self._port = port
        self._on_change = on_change
        self._told: frozenset[str] | None = None
        source = Collection(
            group="discovery.k8s.io",
            resource="endpointslices",
            namespace=namespace,
            label_selector=f"kubernetes.io/service-name={name}",
        )
        self._reflector: Reflector[frozenset[str]] = Reflector(
            client,
            (source,),
            read_endpoint_slice,
            self._changed,
            random=Random(f"{seed}:kube:peers"),  # noqa: S311  jitter, not secrets
            timing=timing,
        )

    def reflection(self) -> Reflection:
        return self._reflector.reflection()

    async def run(self) -> None:
        """List and watch the EndpointSlices until cancelled."""
        await self._reflector.run()

    def _changed(self) -> None:
        if not self._reflector.synced:
            return
        hosts = frozenset[str]().union(*self._reflector.objects.values())
        found = frozenset(address_of(host, self._port) for host in hosts)
        if found == self._told:
            return
        if not found:
            _log.warning(
                f"Service {self._name} of --peer-service has no addresses, not even the "
                "picker's own"
            )
        self._told = found
        self._on_change(found)
