"""Decide when the picker is ready for requests from gateways.

The picker is ready once endpoints are known, the first scrapes (`Readiness.scraped`) and the warm
start (loading state from a file or from other replicas) are over, as long as no essential
background task ends again and again.
"""

import time
from typing import TYPE_CHECKING, Final

from epp.core.knowledge.pool import EndpointPool
from epp.core.types import Seconds
from epp.shell.engines.scrape import Scraper
from epp.shell.gateway.health import Health
from epp.shell.gateway.service import GatewayService
from epp.shell.peers.service import Peers
from epp.shell.supervision import Supervisor

if TYPE_CHECKING:
    from epp.shell.kubernetes.cluster import Cluster

FIRST_PASS_S_MAX: Final = 10.0
"""Maximum time in seconds for which endpoints without an answer delay the picker's readiness."""


class Readiness:
    """The readiness of one picker process, which `update` reports to its health service and its
    gateway server.
    """

    def __init__(
        self,
        *,
        cluster: "Cluster | None",
        peers: Peers,
        pool: EndpointPool,
        scraper: Scraper,
        supervisor: Supervisor,
        health: Health,
        gateway: GatewayService,
    ) -> None:
        self._cluster = cluster
        self._peers = peers
        self._pool = pool
        self._scraper = scraper
        self._supervisor = supervisor
        self._health = health
        self._gateway = gateway
        self._known_since_s: Seconds | None = None
        self.scraped = False
        """True once every endpoint was scraped, successfully or not, and one is ready, the pool is
        empty, or `FIRST_PASS_S_MAX` seconds have passed since endpoints are known.
        """

    def update(self) -> None:
        """Compute whether this picker is ready and stands by, and report it to its health service
        and gateway server.

        It is called after a change of the cluster, the peers, the endpoints or the tasks. The first
        time that endpoints are known, `update` begins the warm start, unless `Reloading` has begun
        it.
        """
        known = self._cluster is None or self._cluster.ready
        if known and self._known_since_s is None:
            self._known_since_s = time.monotonic()
            self._peers.endpoints_known()
        able = known and self._first_pass_done() and self._peers.ready
        stands_by = self._cluster is not None and self._cluster.leading is False
        self._health.set_ready(able and not self._supervisor.broken, stands_by=stands_by)
        self._gateway.stand_by(stands_by)

    def endpoint_scraped(self) -> None:
        """Compute the picker's readiness again, as long as the first scrapes are not over. It is
        called after each scrape of an endpoint, successful or not, and once a second.
        """
        if not self.scraped:
            self.update()

    def _first_pass_done(self) -> bool:
        """Return True if the first scrapes are over: every endpoint was scraped once and one is
        ready, the pool is empty, or `FIRST_PASS_S_MAX` seconds have passed since endpoints are
        known.

        The result stays True from then on, because later endpoints join a picker that is already
        serving.
        """
        if self.scraped or self._known_since_s is None:
            return self.scraped
        now = time.monotonic()
        self.scraped = (
            not len(self._pool)
            or (self._scraper.passed and len(self._pool.ready(None, now)) > 0)
            or now - self._known_since_s > FIRST_PASS_S_MAX
        )
        return self.scraped
