"""What goes wrong with pods, drawn from the seed."""

from collections.abc import Iterator
from enum import StrEnum
from random import Random
from typing import Final

from msgspec import Struct

from epp.core.types import Seconds


class FaultKind(StrEnum):
    DIE = "die"
    """The pod is gone for good, unless it is the last one."""
    RESTART = "restart"
    """The process dies and comes back after a while, empty."""
    JOIN = "join"
    """One more pod of the same kind."""
    LAG = "lag"
    """Every step takes several times as long, for a while."""
    STALE = "stale"
    """The page stands still, for a while."""


_WEIGHTS: Final = {
    FaultKind.DIE: 1,
    FaultKind.RESTART: 3,
    FaultKind.JOIN: 1,
    FaultKind.LAG: 3,
    FaultKind.STALE: 2,
}


class Fault(Struct, frozen=True, kw_only=True):
    """One fault. It strikes pod `pod`, counted round when there are fewer."""

    kind: FaultKind
    at_s: Seconds
    pod: int
    duration_s: Seconds
    factor: float
    """How many times slower a lagging pod is."""


def draw_faults(seed: int, *, mean_gap_s: Seconds) -> Iterator[Fault]:
    """Faults without end, as a Poisson process with one every `mean_gap_s` on average."""
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
