"""How many pods a run has had, and for how long it has had them."""

from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.cluster.loop import Loop

_HOUR_S: Final[Seconds] = 3600.0


class PodTotals(Struct, frozen=True, kw_only=True):
    """Of a run until now."""

    pods_min: int
    pods_max: int
    pods_mean: float
    pod_hours: float


class PodCount:
    """The number of pods that take up their cards: those that start, serve, drain or restart."""

    def __init__(self, loop: Loop) -> None:
        self.pods = 0
        self._loop = loop
        self._since: Seconds = loop.now
        self._pod_s = 0.0
        self._extremes: tuple[int, int] | None = None

    def change(self, pods: int) -> None:
        """So many from now on."""
        if self._loop.now > self._since:
            self._settle()
        self.pods = pods

    def totals(self) -> PodTotals:
        """What there was until now."""
        lowest, highest = self._settle()
        now = self._loop.now
        return PodTotals(
            pods_min=lowest,
            pods_max=highest,
            pods_mean=self._pod_s / now if now else float(self.pods),
            pod_hours=self._pod_s / _HOUR_S,
        )

    def _settle(self) -> tuple[int, int]:
        """Count what has passed since the last change: the least and the most pods so far."""
        now = self._loop.now
        self._pod_s += self.pods * (now - self._since)
        self._since = now
        lowest, highest = self._extremes or (self.pods, self.pods)
        self._extremes = min(lowest, self.pods), max(highest, self.pods)
        return self._extremes
