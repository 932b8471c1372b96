"""What is asked for a request, and how it may end."""

from enum import StrEnum
from functools import cached_property
from typing import Protocol

from msgspec import Struct

from epp.core.moment import PlacedMedia
from epp.core.prompt.canonical import DIGEST
from epp.core.prompt.request import InferenceRequest


class TokensResult(StrEnum):
    """How the question for a prompt's tokens ended. After all but the first bytes count."""

    FOUND = "found"
    TIMEOUT = "timeout"
    """Not found before the deadline."""
    BUSY = "busy"
    """Too many others wait, here or at the renderer."""
    OPEN = "circuit-open"
    """The last questions failed, so nobody is asked for some seconds."""
    UNREACHABLE = "unreachable"
    FAILED = "failed"
    """The renderer answered with a server error, or the worker failed."""
    REFUSED = "refused"
    """The renderer, or the chat template, does not take the request."""
    INVALID = "invalid-answer"
    UNSUPPORTED = "unsupported"
    """An API, or a member of the body, for which the backend has no tokens."""
    MEDIA = "media"
    """The ids of two images are the same, and the backend does not say which ones they are."""
    NOT_THE_ENGINES = "not-the-engines"
    """The ids of this model are other than those that engines store."""
    TOO_LONG = "too-long"
    NO_TOKENIZER = "no-tokenizer"
    LOADING = "loading"
    DEFECT = "defect"


class TokensUnknownError(Exception):
    """The tokens cannot be had; `result` says why."""

    def __init__(self, result: TokensResult) -> None:
        super().__init__(result.value)
        self.result = result


class PromptTokens(Struct, frozen=True):
    """What was found out of one request."""

    ids: tuple[bytes, ...]
    """Of each of the prompts that it remembers, 4 little-endian bytes an id."""
    media: tuple[tuple[PlacedMedia, ...], ...] = ()
    """Of each prompt what is in it, in its order; (): none has any."""


class Question:
    """For one request; `expired` is set before its task is cancelled by the deadline."""

    def __init__(self, request: InferenceRequest, body: bytes) -> None:
        self.request = request
        self.body = body
        self.expired = False

    @cached_property
    def has_media(self) -> bool:
        """Images or the like are in a prompt."""
        return any(DIGEST in prompt for prompt in self.request.prompts)


class TokensBackend(Protocol):
    """Who knows the tokens."""

    name: str

    def refuses(self, question: Question) -> TokensResult | None:
        """Why it is not worth to ask, which costs nothing; None: ask."""
        ...

    async def find(self, question: Question) -> PromptTokens:
        """Raises `TokensUnknownError`."""
        ...

    async def run(self) -> None:
        """What goes on beside the questions, until cancelled."""
        ...

    def rows(self) -> list[dict[str, object]]:
        """Its parts for who debugs, without anything of a prompt."""
        ...

    def totals(self) -> dict[str, object]:
        """The same of all of it together."""
        ...

    def close(self) -> None:
        """Let go what is open."""
        ...
