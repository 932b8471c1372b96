"""Requests for the tokens of a prompt, and their results."""

from enum import StrEnum
from functools import cached_property
from typing import Protocol

from msgspec import Struct

from epp.core.moment import PlacedMedia
from epp.core.prompt.canonical import DIGEST
from epp.core.prompt.request import InferenceRequest


class TokensResult(StrEnum):
    """The result of a request for tokens.

    After any result but the first, prompts are measured by bytes.
    """

    FOUND = "found"
    TIMEOUT = "timeout"
    """The deadline passed."""
    BUSY = "busy"
    """Too many other requests are waiting, here or at the renderer."""
    OPEN = "circuit-open"
    """The last requests failed, so none are sent for some seconds."""
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    """The renderer answered with a server error, or the worker failed."""
    REFUSED = "refused"
    """The renderer or the chat template rejects the request."""
    INVALID = "invalid-answer"
    UNSUPPORTED = "unsupported"
    """The backend has no tokens for this API or a member of the body."""
    MEDIA = "media"
    """Different images have the same ids, and the backend does not identify them."""
    NOT_THE_ENGINES = "not-the-engines"
    """The ids for this model differ from those that engines store."""
    TOO_LONG = "too-long"
    NO_TOKENIZER = "no-tokenizer"
    LOADING = "loading"
    DEFECT = "defect"


class TokensUnknownError(Exception):
    """The tokens are unavailable; `result` contains the reason."""

    def __init__(self, result: TokensResult) -> None:
        super().__init__(result.value)
        self.result = result


class PromptTokens(Struct, frozen=True):
    """The tokens of one request."""

    ids: tuple[bytes, ...]
    """Ids of each remembered prompt, as 4 little-endian bytes each."""
    media: tuple[tuple[PlacedMedia, ...], ...] = ()
    """Media of each prompt in order; () if no prompt has any."""


class Question:
    """A request for tokens; `expired` is set before the deadline cancels its task."""

    def __init__(self, request: InferenceRequest, body: bytes) -> None:
        self.request = request
        self.body = body
        self.expired = False

    @cached_property
    def has_media(self) -> bool:
        """True if a prompt contains images or other media."""
        return any(DIGEST in prompt for prompt in self.request.prompts)


class TokensBackend(Protocol):
    """A source of tokens."""

    name: str

    def refuses(self, question: Question) -> TokensResult | None:
        """Return the reason if a request is pointless, else None. This is cheap."""
        ...

    async def find(self, question: Question) -> PromptTokens:
        """Return the tokens. Raises `TokensUnknownError`."""
        ...

    async def run(self) -> None:
        """Run background work until cancelled."""
        ...

    def rows(self) -> list[dict[str, object]]:
        """Return rows about its parts for debugging, without content of prompts."""
        ...

    def totals(self) -> dict[str, object]:
        """Return totals over all its parts."""
        ...

    def close(self) -> None:
        """Close open connections and processes."""
        ...
