"""Requests that wait at their picker until a renderer has tokenised their prompts, as in
production.

All pickers share one renderer, which works on one prompt at a time. A request waits at most until
the picker's deadline. The renderer does not know the deadline and finishes every prompt.
"""

from msgspec import Struct, structs

from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.waiting import Resume
from epp.core.types import Seconds
from sim.cluster.loop import Loop


class TokenizeSettings(Struct, frozen=True, kw_only=True):
    """Settings of a simulated renderer: the time that it takes to tokenise a prompt, and the time
    that a picker waits for it.
    """

    seconds_per_token: Seconds
    timeout_s: Seconds = 0.02
    """Maximum time in seconds that a request waits for its tokens; the picker's setting
    `tokenizeTimeout`.
    """


class SimulatedRenderer:
    """A `Resolver` that delays each request until its prompt is tokenised. The trace already
    contains the tokens; at a timeout, the request loses them.
    """

    def __init__(self, settings: TokenizeSettings, loop: Loop) -> None:
        self._settings = settings
        self._loop = loop
        self._free_at: Seconds = 0.0
        self.found = 0
        self.timeouts = 0

    def begin(
        self, request: InferenceRequest, body: bytes, resume: Resume
    ) -> "_SimulatedWait | None":
        """Start tokenising the prompt of `request`, and call `resume` with the request afterwards,
        or at the timeout. Return the wait, or None if it takes no time. A request that waits is
        counted in `found` or `timeouts`. `body` is not used in simulated time.
        """
        settings, now = self._settings, self._loop.now
        takes_s = settings.seconds_per_token * request.prompt_tokens
        if takes_s == 0.0:
            return None
        self._free_at = max(self._free_at, now) + takes_s
        wait_s = self._free_at - now
        if wait_s > settings.timeout_s:
            self.timeouts += 1
            wait_s = settings.timeout_s
            request = structs.replace(request, token_chains={})
        else:
            self.found += 1
        wait = _SimulatedWait(request, resume)
        self._loop.after(wait_s, wait.end)
        return wait


class _SimulatedWait:
    """The wait of one request for its tokens, which ends unless it is cancelled before."""

    __slots__ = ("_request", "_resume")

    def __init__(self, request: InferenceRequest, resume: Resume) -> None:
        self._request = request
        self._resume: Resume | None = resume

    def cancel(self) -> None:
        self._resume = None

    def end(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume(self._request)
