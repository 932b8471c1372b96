"""The number of pods over the time of a run, and the pod-hours."""

from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.cluster.loop import Loop

_HOUR_S: Final[Seconds] = 3600.0


class PodTotals(Struct, frozen=True, kw_only=True):
    """Minimum, maximum and mean number of pods since the start of a run, and its pod-hours."""

    pods_min: int
    pods_max: int
    pods_mean: float
    pod_hours: float


class PodCount:
    """A counter of the pods that occupy GPUs: those that start, serve, drain or restart."""

    def __init__(self, loop: Loop) -> None:
        self.pods = 0
        self._loop = loop
        self._since: Seconds = loop.now
        self._pod_s = 0.0
        self._extremes: tuple[int, int] | None = None

    def change(self, pods: int) -> None:
        """Record that the number of pods is `pods` from now on."""
        if self._loop.now > self._since:
            self._settle()
        self.pods = pods

    def totals(self) -> PodTotals:
        """Return the minimum, maximum and mean number of pods, and the pod-hours, from the start of
        the run until now.
        """
        lowest, highest = self._settle()
        now = self._loop.now
        return PodTotals(
            pods_min=lowest,
            pods_max=highest,
            pods_mean=self._pod_s / now if now else float(self.pods),
            pod_hours=self._pod_s / _HOUR_S,
        )

    def _settle(self) -> tuple[int, int]:
        """Add the pod time since the last change to the total. Return the lowest and the highest
        number of pods so far.
        """
        now = self._loop.now
        self._pod_s += self.pods * (now - self._since)
        self._since = now
        lowest, highest = self._extremes or (self.pods, self.pods)
        self._extremes = min(lowest, self.pods), max(highest, self.pods)
        return self._extremes
