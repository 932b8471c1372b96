"""A first-come-first-served line of requests that plug-ins hold before they are placed.

The line stores only the position of a request. A request keeps its position until it is released.
While any request waits, a new one waits as well, even if no plug-in holds it.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.waiting import Resume

REQUESTS_MAX: Final = 16_384
"""Maximum number of requests in the waiting line. Further requests are placed at once, as if there
were no line.
"""


class WaitingLine:
    """A `Resolver` that lets requests wait in a line. The caller calls `admit` after events that
    may make `holds` false.

    `holds` returns whether a request must wait now.
    """

    def __init__(
        self, holds: Callable[[InferenceRequest], bool], *, requests_max: int = REQUESTS_MAX
    ) -> None:
        self._holds = holds
        self._requests_max = requests_max
        self._places: OrderedDict[int, _Place] = OrderedDict()
        self._taken = 0
        """Number of requests that ever entered the waiting line, by which their places are
        numbered.
        """
        self._admitting = False

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<WaitingLine [{len(self)} of {self._requests_max} requests wait]>"

    def begin(self, request: InferenceRequest, body: bytes, resume: Resume) -> "_Place | None":
        """Add `request` to the end of the line and return its place. Return None if the line is
        full, or if it is empty and nothing holds the request.
        """
        if len(self) >= self._requests_max or not (self._places or self._holds(request)):
            return None
        self._taken += 1
        place = self._places[self._taken] = _Place(self._places, self._taken, request, resume)
        return place

    def admit(self) -> None:
        """Release the requests in the line, oldest first, until the first of them must still wait."""
        # Placing a request may end another one, whose observers call this method again.
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
        """Release all requests that wait in the line, oldest first."""
        for place in tuple(self._places.values()):
            place.go()


class _Place:
    """The place of one request in the waiting line."""

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
        """Release the request from the line; do nothing if its wait was cancelled or has ended."""
        if self._places.pop(self._number, None) is not None:
            self._resume(self.request)
