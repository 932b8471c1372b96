"""The assignment of requests to the pickers (replicas) of a simulated cluster."""

from collections.abc import Sequence
from enum import StrEnum
from random import Random

import xxhash


class Assignment(StrEnum):
    """The way in which clients and gateways spread requests over pickers."""

    RANDOM = "random"
    """Each request goes to a random picker."""
    STICKY = "sticky"
    """Each session goes to the same picker while the same pickers run. If a picker stops or starts,
    only the sessions of that picker move. Requests without a session go to a random picker.
    """
    SKEWED = "skewed"
    """Each request goes to a random picker, where the n-th picker has a weight of 1/n."""


class Assigner:
    """The part of a simulated gateway that chooses a running picker for each request; `seed`
    determines all random choices.
    """

    def __init__(self, assignment: Assignment, replicas: int, seed: int) -> None:
        self._assignment = assignment
        self._seed = seed
        self._random = Random(f"{seed}:replica")
        self._weights = [1 / (1 + replica) for replica in range(replicas)]
        self._there = list(range(replicas))

    def is_running(self, replica: int | None) -> bool:
        """Return whether picker `replica` runs and receives requests; False for None."""
        return replica in self._there

    def leave(self, replica: int) -> None:
        """Stop sending requests to picker `replica`."""
        self._there.remove(replica)

    def join(self, replica: int) -> None:
        """Resume sending requests to picker `replica`."""
        self._there = sorted({*self._there, replica})

    def choose(self, session: str) -> int | None:
        """Return the number of the picker for a request with `session` ("" if it has none), or None
        if no picker runs.
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
        """Return the picker of a session by rendezvous hashing: if a picker joins or leaves, only
        the sessions of that picker move.
        """

        def weight(replica: int) -> int:
            key = f"{self._seed}\0{replica}\0{session}"
            return xxhash.xxh64_intdigest(key.encode("utf-8", "surrogatepass"))

        return max(there, key=weight)
