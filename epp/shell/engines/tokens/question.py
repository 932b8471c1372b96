"""Requests for the token ids of a prompt, and the results of such requests."""

from enum import StrEnum
from functools import cached_property
from typing import Protocol

from msgspec import Struct

from epp.core.moment import PlacedMedia
from epp.core.prompt.canonical import DIGEST
from epp.core.prompt.request import InferenceRequest


class TokensResult(StrEnum):
    """The result of a request for the token ids of a prompt.

    After any result but `FOUND`, the prompt is measured by its bytes instead of its tokens.
    """

    FOUND = "found"
    TIMEOUT = "timeout"
    """The token ids were not available before the deadline."""
    BUSY = "busy"
    """Too many other requests for tokens wait, in the picker or at the renderer."""
    OPEN = "circuit-open"
    """The last requests for tokens failed, so that no more are sent for some seconds."""
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    """The renderer answered with a server error, the tokenizer process failed, or the backend was
    closed.
    """
    REFUSED = "refused"
    """The renderer or the chat template rejects the request, or the template fails."""
    INVALID = "invalid-answer"
    UNSUPPORTED = "unsupported"
    """The backend has no tokens for the request's API or for a member of its body."""
    MEDIA = "media"
    """The prompt has images or other media that have the same token ids, and the backend does not
    identify them.
    """
    NOT_THE_ENGINES = "not-the-engines"
    """The backend's token ids for this model differ from those that engines report as stored."""
    TOO_LONG = "too-long"
    NO_TOKENIZER = "no-tokenizer"
    LOADING = "loading"
    DEFECT = "defect"


class TokensUnknownError(Exception):
    """Raised if the token ids of a request are unavailable; `result` is the reason."""

    def __init__(self, result: TokensResult) -> None:
        super().__init__(result.value)
        self.result = result


class PromptTokens(Struct, frozen=True):
    """The token ids of the prompts of one request."""

    ids: tuple[bytes, ...]
    """Token ids of each prompt in `InferenceRequest.prompts`, packed as 4 little-endian bytes each.
    """
    media: tuple[tuple[PlacedMedia, ...], ...] = ()
    """Media of each prompt, in the order of their positions; () if no prompt has any."""


class Question:
    """A request for the token ids of an inference request. `expired` becomes true before the
    deadline cancels the task.
    """

    def __init__(self, request: InferenceRequest, body: bytes) -> None:
        self.request = request
        self.body = body
        self.expired = False

    @cached_property
    def has_media(self) -> bool:
        """True if a prompt of the request contains images or other media."""
        return any(DIGEST in prompt for prompt in self.request.prompts)


class TokensBackend(Protocol):
    """A source of the token ids of prompts."""

    name: str

    def refuses(self, question: Question) -> TokensResult | None:
        """Return the reason if a request for tokens is pointless now, else None. The call is
        cheap.
        """
        ...

    async def find(self, question: Question) -> PromptTokens:
        """Return the token ids of the request's prompts. Raises `TokensUnknownError`."""
        ...

    async def run(self) -> None:
        """Run the background work of this source of token ids until cancelled."""
        ...

    def rows(self) -> list[dict[str, object]]:
        """Return one row per renderer or model of this backend for the debug page, without content
        of prompts.
        """
        ...

    def totals(self) -> dict[str, object]:
        """Return totals over all renderers or models of this backend for the debug page."""
        ...

    def close(self) -> None:
        """Close the idle connections of this source of token ids, or fail the requests in its
        queue, as far as it has either.
        """
        ...
