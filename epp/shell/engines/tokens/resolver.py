"""Let an inference request wait briefly until its tokens are known (`core/protocol/waiting`)."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog
from msgspec import structs

from epp.core.prompt.request import InferenceRequest
from epp.core.prompt.token_ids import ID_BYTES
from epp.core.protocol.waiting import Resume
from epp.core.types import ApiKind, Seconds
from epp.shell.engines.tokens.breaker import CircuitBreaker
from epp.shell.engines.tokens.question import (
    Question,
    TokensBackend,
    TokensResult,
    TokensUnknownError,
)

WAITING_MAX: Final = 1_024
"""Maximum number of inference requests that wait for their tokens."""
BODY_BYTES_MAX: Final = 2 * 1024 * 1024
"""Maximum size in bytes of a request body whose tokens are requested. Such a body has about half a
million tokens, which take a second.
"""
WITHOUT_TEXT: Final = frozenset({ApiKind.TOKENS, ApiKind.OPAQUE})
"""APIs for whose requests no tokens are requested, because their prompts are token ids already or
are unknown.
"""
_FAULTS: Final = frozenset(
    {TokensResult.TIMEOUT, TokensResult.FAILED, TokensResult.INVALID, TokensResult.DEFECT}
)
"""Results that are failures of the backend; several consecutive ones open its circuit."""

_log = structlog.get_logger(__name__)


class TokensObserver(Protocol):
    """An observer of the results of requests for tokens. It must not raise."""

    def tokens_asked(
        self, backend: str, result: TokensResult, waited_s: Seconds, tokens: int
    ) -> None: ...


class TokenResolver:
    """A `Resolver` that gets the tokens of inference requests from one backend.

    Every inference request for which `begin` returns a wait is resumed exactly once, at the latest
    after `timeout_s` seconds, unless the wait is cancelled.
    """

    def __init__(
        self,
        backend: TokensBackend,
        timeout_s: Seconds,
        observer: TokensObserver,
        clock: Callable[[], Seconds] = time.monotonic,
        *,
        asks: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Create a resolver that gets tokens from `backend`. `asks(model)` returns False if tokens
        of this model must not be requested, because they differ from the engine's.
        """
        self.backend = backend
        self.timeout_s = timeout_s
        self._observer = observer
        self._asks = asks
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._waits: set[_TokenWait] = set()
        self.results: dict[TokensResult, int] = {}

    @property
    def waiting(self) -> int:
        """Number of inference requests that wait for their tokens."""
        return len(self._waits)

    @property
    def open_circuit(self) -> bool:
        return self._breaker.is_open(self._clock())

    def begin(self, request: InferenceRequest, body: bytes, resume: Resume) -> "_TokenWait | None":
        if request.api in WITHOUT_TEXT or not body or request.token_ids:
            return None
        question = Question(request, body)
        now = self._clock()
        refused = self._refuses(question, now)
        if refused is not None:
            self._tell(refused, 0.0, 0)
            return None
        self._breaker.asked(now)
        return _TokenWait(self, question, resume, now)

    def _refuses(self, question: Question, now: Seconds) -> TokensResult | None:
        if len(question.body) > BODY_BYTES_MAX:
            return TokensResult.TOO_LONG
        if not self._breaker.allows(now):
            return TokensResult.OPEN
        if not self._asks(question.request.model):
            return TokensResult.NOT_THE_ENGINES
        if len(self._waits) >= WAITING_MAX:
            return TokensResult.BUSY
        try:
            return self.backend.refuses(question)
        except Exception:  # noqa: BLE001  the boundary of a backend
            _log.exception("token backend failed while it checked a request for tokens")
            return TokensResult.DEFECT

    def began(self, wait: "_TokenWait") -> None:
        self._waits.add(wait)

    def ended(
        self, wait: "_TokenWait", result: TokensResult | None, began_s: Seconds, tokens: int
    ) -> None:
        """Record that an inference request no longer waits. Count its `result`, report it to the
        observer and tell it to the circuit breaker, unless it is None because the wait was
        cancelled.
        """
        self._waits.discard(wait)
        if result is None:
            return
        now = self._clock()
        if result not in _FAULTS:
            self._breaker.succeeded()
        elif self._breaker.failed(now):
            _log.warning(
                "token backend fails repeatedly, prompts are measured by their bytes for a while",
                backend=self.backend.name,
                problem=result.value,
            )
        self._tell(result, now - began_s, tokens)

    def _tell(self, result: TokensResult, waited_s: Seconds, tokens: int) -> None:
        self.results[result] = self.results.get(result, 0) + 1
        self._observer.tokens_asked(self.backend.name, result, waited_s, tokens)

    def close(self) -> None:
        """Resume all waiting inference requests without tokens, and close the backend."""
        for wait in list(self._waits):
            wait.give_up(TokensResult.FAILED)
        self.backend.close()


class _TokenWait:
    """The wait of one inference request for its tokens."""

    __slots__ = ("_began_s", "_expiry", "_question", "_resolver", "_resume", "_task")

    def __init__(
        self, resolver: TokenResolver, question: Question, resume: Resume, began_s: Seconds
    ) -> None:
        loop = asyncio.get_running_loop()
        self._resolver = resolver
        self._question = question
        self._resume: Resume | None = resume
        self._began_s = began_s
        resolver.began(self)
        self._expiry = loop.call_later(resolver.timeout_s, self._expire)
        self._task = loop.create_task(self._find())

    def cancel(self) -> None:
        """Cancel the wait for tokens, because the client left or the gateway answered."""
        self._end(None, 0)

    def give_up(self, result: TokensResult) -> None:
        """End the wait with `result`, and resume the inference request without tokens. Do nothing
        if the wait has ended before.
        """
        resume = self._end(result, 0)
        if resume is not None:
            resume(self._question.request)

    def _expire(self) -> None:
        self._question.expired = True
        self.give_up(TokensResult.TIMEOUT)

    async def _find(self) -> None:
        try:
            found = await self._resolver.backend.find(self._question)
        except asyncio.CancelledError:
            # `_end` cancelled the task. If the backend did, nothing else would resume the request.
            self.give_up(TokensResult.DEFECT)
            raise
        except TokensUnknownError as unknown:
            self.give_up(unknown.result)
            return
        except Exception:  # noqa: BLE001  the boundary of a backend: a defect only loses one prompt's tokens
            _log.exception("token backend failed while it determined the tokens of a prompt")
            self.give_up(TokensResult.DEFECT)
            return
        resume = self._end(TokensResult.FOUND, sum(map(len, found.ids)) // ID_BYTES)
        if resume is not None:
            request = self._question.request
            moment = structs.replace(request.moment, token_ids=found.ids, token_media=found.media)
            resume(structs.replace(request, moment=moment))

    def _end(self, result: TokensResult | None, tokens: int) -> Resume | None:
        """End the wait with `result`, and cancel its task. Return the function that resumes the
        request, or None if the wait has ended before.
        """
        resume, self._resume = self._resume, None
        if resume is None:
            return None
        self._expiry.cancel()
        if asyncio.current_task() is not self._task:
            self._task.cancel()
        self._resolver.ended(self, result, self._began_s, tokens)
        return resume
