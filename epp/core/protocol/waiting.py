"""What a request may have to wait for before it is placed.

One way in: `Resolver.begin` says that the request waits. One way out: `resume` is called, once, with
the request as it is to be placed, or with why it is not. Who does not wait pays one question, and
where there is no resolver not even that.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from epp.core.prompt.request import InferenceRequest
from epp.core.types import Refusal

Resolution: TypeAlias = InferenceRequest | Refusal
"""The request as it is to be placed, with what was found out; or why it is refused."""
Resume: TypeAlias = Callable[[Resolution], None]


class Wait(Protocol):
    """One request that waits."""

    def cancel(self) -> None:
        """Nobody waits any more: `resume` is not to be called."""
        ...


class Resolver(Protocol):
    """Finds something out, or waits for room, before a request is placed."""

    def begin(self, request: InferenceRequest, body: bytes, resume: Resume) -> Wait | None:
        """None: the request can be placed now. Else `resume` is called later, never from in here.

        `body` is what the endpoint will get, after any rewrite; b"" where the picker has not seen it.
        """
        ...
