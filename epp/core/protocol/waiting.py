"""The interface for requests that have to wait before they are placed.

A wait begins with `Resolver.begin`. It ends with one call of `resume`, with the request to be
placed or the reason of its refusal. A request that does not wait costs one call, and none without a
resolver. A wait in the queue (`flow_queue`) ends with the decision itself.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from epp.core.decision.decision import Decision
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Refusal

Resolution: TypeAlias = InferenceRequest | Decision | Refusal
"""The request to be placed, with what the wait added to it; the decision, if the wait was for an
endpoint; or the refusal of the request.
"""
Resume: TypeAlias = Callable[[Resolution], None]


class Wait(Protocol):
    """The wait of one request before its placement."""

    def cancel(self) -> None:
        """Stop the wait of the request; `resume` must not be called afterwards."""
        ...


class Resolver(Protocol):
    """A step before the placement of requests, which determines something about a request."""

    def begin(self, request: InferenceRequest, body: bytes, resume: Resume) -> Wait | None:
        """Begin the wait of `request`, or return None if it can be placed now.

        `resume` is called later, never inside this call. `body` is the body without its content
        encoding and after any rewrite; b"" if the picker has not read it.
        """
        ...
