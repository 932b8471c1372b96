"""Which picker a request reaches."""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import xxhash


class Assignment(StrEnum):
    """How clients and the gateways between spread requests over pickers."""

    RANDOM = "random"
    """Each request by itself."""
    STICKY = "sticky"
    """A session stays with its picker while that is there; requests without one go at random."""
    SKEWED = "skewed"
    """Each request by itself, the n-th picker with a weight of 1/n."""


class Assigner:
    """Chooses among the pickers that are there; `seed` decides all that is drawn."""

    def __init__(self, assignment: Assignment, replicas: int, seed: int) -> None:
        self._assignment = assignment
        self._seed = seed
        self._random = Random(f"{seed}:replica")
        self._weights = [1 / (1 + replica) for replica in range(replicas)]
        self._there = list(range(replicas))

    def is_there(self, replica: int | None) -> bool:
        """Whether requests may reach it; None is nobody."""
        return replica in self._there

    def leave(self, replica: int) -> None:
        """`replica` is not reached any more."""
        self._there.remove(replica)

    def join(self, replica: int) -> None:
        """`replica` is reached again."""
        self._there = sorted({*self._there, replica})

    def choose(self, session: str) -> int | None:
        """The picker of a request of `session`, "" if it has none. None: no picker is there."""
        there = self._there
        if len(there) < 2:
            return there[0] if there else None
        if self._assignment is Assignment.STICKY and session:
            return self._home(session, there)
        if self._assignment is Assignment.SKEWED:
            weights = [self._weights[replica] for replica in there]
            return self._random.choices(there, weights)[0]
        return there[self._random.randrange(len(there))]

    def _home(self, session: str, there: Sequence[int]) -> int:
        """Rendezvous hashing: when a picker comes or goes, only its own sessions move."""

        def weight(replica: int) -> int:
            key = f"{self._seed}\0{replica}\0{session}"
            return xxhash.xxh64_intdigest(key.encode("utf-8", "surrogatepass"))

        return max(there, key=weight)
