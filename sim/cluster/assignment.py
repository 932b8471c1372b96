"""The assignment of requests to pickers."""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import xxhash


class Assignment(StrEnum):
    """The way in which clients and gateways spread requests over pickers."""

    RANDOM = "random"
    """Each request goes to a random picker."""
    STICKY = "sticky"
    """A session stays with its picker while that runs. Requests without a session go to a random
    picker."""
    SKEWED = "skewed"
    """Each request goes to a random picker, and the n-th picker has a weight of 1/n."""


class Assigner:
    """An assigner of requests to the running pickers; `seed` determines all random choices."""

    def __init__(self, assignment: Assignment, replicas: int, seed: int) -> None:
        self._assignment = assignment
        self._seed = seed
        self._random = Random(f"{seed}:replica")
        self._weights = [1 / (1 + replica) for replica in range(replicas)]
        self._there = list(range(replicas))

    def is_there(self, replica: int | None) -> bool:
        """Return whether `replica` runs and gets requests; False for None."""
        return replica in self._there

    def leave(self, replica: int) -> None:
        """Send no more requests to `replica`."""
        self._there.remove(replica)

    def join(self, replica: int) -> None:
        """Send requests to `replica` again."""
        self._there = sorted({*self._there, replica})

    def choose(self, session: str) -> int | None:
        """Return the picker of a request with `session` ("" if it has none); None if no picker
        runs.
        """
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
        """Return a picker by rendezvous hashing: if a picker comes or goes, only its own sessions
        move.
        """

        def weight(replica: int) -> int:
            key = f"{self._seed}\0{replica}\0{session}"
            return xxhash.xxh64_intdigest(key.encode("utf-8", "surrogatepass"))

        return max(there, key=weight)
