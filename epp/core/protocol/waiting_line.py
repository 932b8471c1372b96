"""Requests wait in line before they are placed, first come first served, while plugins hold them.

Nothing is remembered of a request but its place. Who has one keeps it until it is let go, whatever
comes after it: a request that nothing holds waits too while anybody waits.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.waiting import Resume

REQUESTS_MAX: Final = 16_384
"""In line; of more each is placed as it comes, as if there were no line."""


class WaitingLine:
    """A `Resolver`. Call `admit` after whatever may have made `holds` false.

    `holds` says of a request whether it is to wait now.
    """

    def __init__(
        self, holds: Callable[[InferenceRequest], bool], *, requests_max: int = REQUESTS_MAX
    ) -> None:
        self._holds = holds
        self._requests_max = requests_max
        self._places: OrderedDict[int, _Place] = OrderedDict()
        self._taken = 0
        """Places, ever."""
        self._admitting = False

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<WaitingLine [{len(self)} of {self._requests_max} requests wait]>"

    def begin(self, request: InferenceRequest, body: bytes, resume: Resume) -> "_Place | None":
        """None: nobody waits and nothing holds `request`, or the line is full."""
        if len(self) >= self._requests_max or not (self._places or self._holds(request)):
            return None
        self._taken += 1
        place = self._places[self._taken] = _Place(self._places, self._taken, request, resume)
        return place

    def admit(self) -> None:
        """Let go, oldest first, whom nothing holds, until one is held."""
        # What is placed may end something, and who hears of that asks again.
        if self._admitting or not self._places:
            return
        self._admitting = True
        try:
            while self._places:
                first = next(iter(self._places.values()))
                if self._holds(first.request):
                    return
                first.go()
        finally:
            self._admitting = False

    def let_all_go(self) -> None:
        """Nobody is to wait any more: who is in line now goes, oldest first."""
        for place in tuple(self._places.values()):
            place.go()


class _Place:
    """In line. A `Wait`."""

    __slots__ = ("_number", "_places", "_resume", "request")

    def __init__(
        self,
        places: "OrderedDict[int, _Place]",
        number: int,
        request: InferenceRequest,
        resume: Resume,
    ) -> None:
        self._places = places
        self._number = number
        self.request = request
        self._resume = resume

    def cancel(self) -> None:
        self._places.pop(self._number, None)

    def go(self) -> None:
        """Once: of a place that was left nothing is resumed."""
        if self._places.pop(self._number, None) is not None:
            self._resume(self.request)
