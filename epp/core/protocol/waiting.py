"""The interface for requests that have to wait before they are placed.

A wait begins with `Resolver.begin`. It ends with one call of `resume`, with the request to be
placed or the reason of its refusal. A request that does not wait costs one call, and none without a
resolver.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from epp.core.prompt.request import InferenceRequest
from epp.core.types import Refusal

Resolution: TypeAlias = InferenceRequest | Refusal
"""The request to be placed, with the results of the wait, or the reason why it is refused."""
Resume: TypeAlias = Callable[[Resolution], None]


class Wait(Protocol):
    """The wait of one request."""

    def cancel(self) -> None:
        """End the wait; `resume` must not be called afterwards."""
        ...


class Resolver(Protocol):
    """A step before placing that determines something about a request or waits for room."""

    def begin(self, request: InferenceRequest, body: bytes, resume: Resume) -> Wait | None:
        """Begin a wait, or return None if the request can be placed now.

        `resume` is called later, never inside this call. `body` is what the endpoint will receive,
        after any rewrite; b"" if the picker has not read it.
        """
        ...
