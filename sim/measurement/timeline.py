"""Samples of the number of pods and of each pod's state over the time of a run, as many as a chart
can show.
"""

from collections.abc import Mapping
from typing import Final

from epp.core.types import Seconds
from sim.cluster.cluster import Cluster
from sim.measurement.measures import PodLoad
from sim.measurement.summaries import PodSamples, TimelineSummary

SAMPLES_MAX: Final = 600
_FIRST_INTERVAL_S: Final = 1.0


class Timeline:
    """A sampler that reads the state of every pod at regular times.

    When there are `SAMPLES_MAX` samples, every other one is removed and the interval doubles.
    """

    def __init__(self, cluster: Cluster, loads: Mapping[str, PodLoad]) -> None:
        """Start sampling. `loads` is the work that each pod has completed, updated by the caller."""
        self.time_s: list[Seconds] = []
        self.pod_count: list[int] = []
        """Number of pods at each sample time, as `PodCount` counts them."""
        self.pods: dict[str, PodSamples] = {}
        self._cluster = cluster
        self._loop = cluster.loop
        self._loads = loads
        self._interval_s = _FIRST_INTERVAL_S
        cluster.loop.after(self._interval_s, self._sample)

    def summary(self) -> TimelineSummary:
        """Return the samples, with usage and hit rates rounded to four digits."""
        return TimelineSummary(
            time_s=self.time_s,
            pod_count=self.pod_count,
            pods={
                name: PodSamples(
                    running=samples.running,
                    waiting=samples.waiting,
                    kv_cache_usage=[round(usage, 4) for usage in samples.kv_cache_usage],
                    hit_rate=[round(rate, 4) for rate in samples.hit_rate],
                )
                for name, samples in self.pods.items()
            },
        )

    def _sample(self) -> None:
        for pod in self._cluster.pods:
            samples = self.pods.get(pod.name)
            if samples is None:
                before = len(self.time_s)
                none, nothing = [0] * before, [0.0] * before
                samples = PodSamples(
                    running=none, waiting=[*none], kv_cache_usage=nothing, hit_rate=[*nothing]
                )
                self.pods[pod.name] = samples
            page = pod.page(self._loop.now)
            samples.running.append(0 if page is None else int(page.running_requests))
            samples.waiting.append(0 if page is None else int(page.waiting_requests))
            samples.kv_cache_usage.append(0.0 if page is None else page.kv_cache_usage)
            load = self._loads.get(pod.name)
            samples.hit_rate.append(load.cached_tokens / load.prompt_tokens if load else 0.0)
        self.time_s.append(self._loop.now)
        self.pod_count.append(self._cluster.pods.count.pods)
        if len(self.time_s) >= SAMPLES_MAX:
            self._halve()
        self._loop.after(self._interval_s, self._sample)

    def _halve(self) -> None:
        self._interval_s *= 2
        del self.time_s[::2], self.pod_count[::2]
        for samples in self.pods.values():
            del samples.running[::2], samples.waiting[::2]
            del samples.kv_cache_usage[::2], samples.hit_rate[::2]
