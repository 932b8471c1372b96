"""Failures of requests that several endpoints served, and the endpoint that explains them.

The decode endpoint's sidecar passes on the status of a prefill or encode endpoint that failed. A
single failure therefore does not show which endpoint failed. An endpoint is blamed once no single
partner took part in all of its failures: then it failed with two different partners. Failures that
a blamed endpoint took part in no longer count against its partners.
"""

from collections.abc import Sequence


class PairFailures:
    """The endpoints that may explain the failed requests of each endpoint since its last success."""

    def __init__(self) -> None:
        self._suspects: dict[int, frozenset[int]] = {}
        """Slots of the partners that took part in every failed request of an endpoint since its
        last success, by slot of the endpoint.
        """

    def failed(self, slots: Sequence[int]) -> list[int]:
        """Record that a request failed that the endpoints in `slots` served together.

        Return the slots of the endpoints that are to blame. Their failures, and those of other
        endpoints that they explain, are dropped.
        """
        blamed: list[int] = []
        for slot in slots:
            others = frozenset(slots) - {slot}
            suspects = self._suspects.get(slot, others) & others
            self._suspects[slot] = suspects
            if not suspects:
                blamed.append(slot)
        for slot in blamed:
            self._blame(slot)
        return blamed

    def succeeded(self, slots: Sequence[int]) -> None:
        """Record that the endpoints in `slots` served a request together and that it succeeded."""
        for slot in slots:
            self._suspects.pop(slot, None)

    def forget(self, slot: int) -> None:
        """Drop the failures of `slot`, and those of other endpoints that it may explain, because its
        endpoint left or restarted.
        """
        self._blame(slot)

    def _blame(self, slot: int) -> None:
        """Drop the failures of `slot`, and the failures of other endpoints that it explains."""
        self._suspects.pop(slot, None)
        for other in [at for at, suspects in self._suspects.items() if slot in suspects]:
            del self._suspects[other]
