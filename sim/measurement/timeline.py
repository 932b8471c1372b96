"""What each pod was doing over time: samples for charts, as many as a chart can show."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.cluster.loop import Loop
from sim.cluster.simulated_pod import SimulatedPod
from sim.measurement.measures import PodLoad

SAMPLES_MAX: Final = 600
_FIRST_INTERVAL_S: Final = 1.0


class PodSamples(Struct):
    """One pod, a value a sample; a pod that joined late begins with zeros."""

    running: list[int]
    waiting: list[int]
    kv_cache_usage: list[float]
    hit_rate: list[float]
    """Of all that the pod has completed so far."""


class Timeline:
    """Looks at every pod once an interval, which doubles whenever there are too many samples."""

    def __init__(
        self, loop: Loop, pods: Sequence[SimulatedPod], loads: Mapping[str, PodLoad]
    ) -> None:
        """`loads`: what each pod has completed, by its name, kept by others."""
        self.time_s: list[Seconds] = []
        self.pods: dict[str, PodSamples] = {}
        self._loop = loop
        self._members = pods
        self._loads = loads
        self._interval_s = _FIRST_INTERVAL_S
        loop.after(self._interval_s, self._sample)

    def as_json(self) -> dict[str, Any]:
        """Columns by pod."""
        return {
            "time_s": self.time_s,
            "pods": {
                name: {
                    "running": samples.running,
                    "waiting": samples.waiting,
                    "kv_cache_usage": [round(usage, 4) for usage in samples.kv_cache_usage],
                    "hit_rate": [round(rate, 4) for rate in samples.hit_rate],
                }
                for name, samples in self.pods.items()
            },
        }

    def _sample(self) -> None:
        for pod in self._members:
            samples = self.pods.get(pod.name)
            if samples is None:
                before = len(self.time_s)
                samples = PodSamples([0] * before, [0] * before, [0.0] * before, [0.0] * before)
                self.pods[pod.name] = samples
            page = pod.page(self._loop.now)
            samples.running.append(0 if page is None else int(page.running_requests))
            samples.waiting.append(0 if page is None else int(page.waiting_requests))
            samples.kv_cache_usage.append(0.0 if page is None else page.kv_cache_usage)
            load = self._loads.get(pod.name)
            samples.hit_rate.append(load.cached_tokens / load.prompt_tokens if load else 0.0)
        self.time_s.append(self._loop.now)
        if len(self.time_s) >= SAMPLES_MAX:
            self._halve()
        self._loop.after(self._interval_s, self._sample)

    def _halve(self) -> None:
        self._interval_s *= 2
        del self.time_s[::2]
        for samples in self.pods.values():
            del samples.running[::2], samples.waiting[::2]
            del samples.kv_cache_usage[::2], samples.hit_rate[::2]
