"""Random faults of pods in a simulation run, determined by the seed."""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from random import Random
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.cluster.loop import Loop
from sim.cluster.pods import Pods
from sim.cluster.simulated_pod import SimulatedPod


class FaultKind(StrEnum):
    """The kind of a random fault of a pod in a simulation run."""

    DIE = "die"
    """The pod ends, and only a later fault of kind `RESTART` can start it again. Nothing happens if
    it has ended already, or if no other pod runs.
    """
    RESTART = "restart"
    """The pod's process dies if it still runs. It starts after `duration_s` with an empty KV cache,
    even if a fault of kind `DIE` ended it earlier.
    """
    JOIN = "join"
    """A new pod of the same kind as pod number `pod` joins."""
    LAG = "lag"
    """Every step of the pod's engine takes `factor` times as long, for `duration_s`, or until a
    later fault of this kind at the pod replaces it.
    """
    STALE = "stale"
    """The pod's metrics page does not change for `duration_s`, or until the pod's process ends, or
    a later fault of this kind at the pod replaces it.
    """


_WEIGHTS: Final = {
    FaultKind.DIE: 1,
    FaultKind.RESTART: 3,
    FaultKind.JOIN: 1,
    FaultKind.LAG: 3,
    FaultKind.STALE: 2,
}


class Fault(Struct, frozen=True, kw_only=True):
    """One random fault of a pod: pod number `pod` modulo the number of pods."""

    kind: FaultKind
    at_s: Seconds
    pod: int
    duration_s: Seconds
    factor: float
    """Factor by which the steps of the pod's engine take longer, for a fault of kind `LAG`."""


def draw_faults(seed: int, *, mean_gap_s: Seconds) -> Iterator[Fault]:
    """Yield random faults endlessly, as a Poisson process with `mean_gap_s` seconds between two
    faults on average.
    """
    random = Random(f"{seed}:faults")
    kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    at_s = 0.0
    while True:
        at_s += random.expovariate(1 / mean_gap_s)
        yield Fault(
            kind=random.choices(kinds, weights)[0],
            at_s=at_s,
            pod=random.randrange(1_000_000),
            duration_s=random.uniform(0.5, 10.0),
            factor=random.uniform(2.0, 10.0),
        )


class Faults:
    """The part of a simulated cluster that applies the faults of `faults`, which are in order of
    time, to `pods`.
    """

    def __init__(self, faults: Iterable[Fault], loop: Loop, pods: Pods) -> None:
        self._faults = iter(faults)
        self._loop = loop
        self._pods = pods
        self._latest: dict[tuple[int, FaultKind], Fault] = {}
        """Latest fault that lasts for a time, by number of the pod and kind of fault."""
        self._pull()

    def _pull(self) -> None:
        fault = next(self._faults, None)
        if fault is not None:
            self._loop.at(max(self._loop.now, fault.at_s), self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self._pull()
        loop, pods = self._loop, self._pods
        pod = pods[fault.pod % len(pods)]
        match fault.kind:
            case FaultKind.JOIN:
                pods.expect(1)
                pods.add([pod.kind])
            case FaultKind.DIE if pod.alive and sum(other.alive for other in pods) > 1:
                pod.returns = False
                pods.kill(pod)
            case FaultKind.RESTART:
                pod.returns = True
                pods.kill(pod)
                loop.after(fault.duration_s, pods.restart, pod)
            case FaultKind.LAG:
                pod.slow_down(fault.factor)
                self._end_later(fault, pod, lambda: pod.slow_down(1.0))
            case FaultKind.STALE:
                pod.freeze_page(True)
                self._end_later(fault, pod, lambda: pod.freeze_page(False))

    def _end_later(self, fault: Fault, pod: SimulatedPod, end: Callable[[], None]) -> None:
        """Call `end` after the duration of `fault`, unless a later fault of its kind at `pod` has
        replaced it.
        """
        key = pod.number, fault.kind
        self._latest[key] = fault

        def ended() -> None:
            if self._latest[key] is fault:
                end()

        self._loop.after(fault.duration_s, ended)
