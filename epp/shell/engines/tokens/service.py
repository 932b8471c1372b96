"""Provide the token producer of the current configuration, with its background work."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import structlog
from msgspec import Struct, field

from epp.configuration.token_producer import Backend, TokenProducer
from epp.core.knowledge.index import Held
from epp.core.prompt.request import InferenceRequest
from epp.core.prompt.token_ids import Agreement
from epp.core.types import Endpoint, Seconds
from epp.shell.engines.tokens.local import LocalWorker
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.renderer import Renderer, tls_of
from epp.shell.engines.tokens.resolver import WITHOUT_TEXT, TokenResolver, TokensObserver

SERVED_MAX: Final = 256
"""Maximum number of served requests whose token ids wait to be compared with the engine's; the
oldest are dropped.
"""
LOOKED_AT_MAX: Final = 64
"""Maximum number of comparisons with the engine's token ids per call of `look`."""
TOLD_S_MAX: Final[Seconds] = 1.0
"""Time in seconds after which an engine is assumed to have reported the blocks of a prompt that it
served.
"""

_log = structlog.get_logger(__name__)


class Compared(StrEnum):
    """The result of comparing the token ids of a request with those that the engine stored."""

    AGREES = "agrees"
    DIFFERS = "differs"


class TokensSnapshot(Struct, frozen=True, kw_only=True):
    """Counts of one token backend's results, for metrics and debug pages."""

    backend: str
    waiting: int = 0
    circuit_open: bool = False
    results: Mapping[str, int] = field(default_factory=dict)
    """Number of requests for tokens by `TokensResult`."""
    compared: Mapping[str, int] = field(default_factory=dict)
    """Number of requests whose token ids were compared with the engine's, by result (`Compared`).
    """


class _Served(Struct, frozen=True):
    """A served request whose blocks the engine may not have reported yet."""

    request: InferenceRequest
    endpoint: Endpoint
    held: Held
    """The part of the prompt that the engine stored when the request was served; later reports
    update it.
    """
    at_s: Seconds


class Prepared(Struct, frozen=True):
    """A token producer that is ready to be used, with the settings that it was built for."""

    settings: TokenProducer
    resolver: TokenResolver | None


class Tokens:
    """The token producer of the current configuration. Sessions use its `resolver`, which is None
    if prompts are measured by bytes.
    """

    def __init__(
        self,
        observer: TokensObserver,
        held: Callable[[InferenceRequest, Endpoint], Held | None] = lambda *_: None,
    ) -> None:
        """Create the producer. `held` returns how much of a request's prompt an endpoint's engine
        reports as cached, or None if unknown. Later reports update what it returned.
        """
        self._observer = observer
        self._held = held
        self._settings = TokenProducer()
        self._endpoints: Sequence[Endpoint] = ()
        self._changed = asyncio.Event()
        self._agreement = Agreement()
        self._results: dict[str, dict[TokensResult, int]] = {}
        """Number of results of backends that are no longer used, by backend and result."""
        self._compared: dict[str, dict[Compared, int]] = {}
        """Number of comparisons with engines' token ids since the start, by backend and result."""
        self._served: deque[_Served] = deque(maxlen=SERVED_MAX)
        self.resolver: TokenResolver | None = None

    def prepare(self, settings: TokenProducer) -> Prepared:
        """Build a token producer for `settings` without using it yet, or return the current one if
        it has these settings. Raises `ConfigError`.
        """
        if settings == self._settings:
            return Prepared(settings, self.resolver)
        match settings.backend:
            case Backend.ESTIMATE:
                return Prepared(settings, None)
            case Backend.VLLM:
                renderer = settings.renderer
                backend: Renderer | LocalWorker = Renderer(renderer, tls_of(renderer))
            case Backend.LOCAL:
                assert settings.local is not None, "the backend implies these settings"
                backend = LocalWorker(settings.local, settings.model_name)
        resolver = TokenResolver(
            backend, settings.tokenize_timeout, self._observer, asks=self._asks
        )
        return Prepared(settings, resolver)

    def accept(self, prepared: Prepared) -> None:
        """Use the token producer in `prepared` from now on. If it is another one, close the
        previous one and forget which token ids agreed with the engine's.
        """
        before, self.resolver = self.resolver, prepared.resolver
        self._settings = prepared.settings
        if before is prepared.resolver:
            return
        self._agreement = Agreement()
        self._served.clear()
        if before is not None:
            before.close()
            kept = self._results.setdefault(before.backend.name, {})
            for result, count in before.results.items():
                kept[result] = kept.get(result, 0) + count
        self.replace(self._endpoints)
        self._changed.set()

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints of the pool, which may be the renderers."""
        self._endpoints = endpoints
        if self.resolver is not None and isinstance(self.resolver.backend, Renderer):
            self.resolver.backend.replace(endpoints)

    async def run(self) -> None:
        """Run the background work of the current token backend until cancelled."""
        while True:
            self._changed.clear()
            resolver = self.resolver
            if resolver is None:
                await self._changed.wait()
                continue
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(resolver.backend.run())
                await self._changed.wait()
                running.cancel()

    def served(self, request: InferenceRequest, endpoint: Endpoint, now: Seconds) -> None:
        """Compare the ids of `request`, which `endpoint` has served, with those that the engine
        stored; if it has not reported all of the prompt's blocks yet, `look` does so later.

        The engine reports its stored blocks with the ids in its own events. The request no longer
        has its prompt, so the hashes (keys) of its blocks are compared.
        """
        if self.resolver is None or request.api in WITHOUT_TEXT or not request.token_chains:
            return
        held = self._held(request, endpoint)
        if held is None:
            return
        if held.blocks >= held.total:
            self._note(request.model, None)
        else:
            self._served.append(_Served(request, endpoint, held, now))

    def look(self, now: Seconds) -> None:
        """Compare the token ids of requests that were served a while ago with the engine's, and
        count the results. The first time that too many differ for a model, log a warning. Call this
        method about once a second.

        A difference counts only if the engine reported everything since then and no report was
        forgotten. A block that was stored and evicted counts as stored.
        """
        served = self._served
        for _ in range(LOOKED_AT_MAX):
            if not served or served[0].at_s > now - TOLD_S_MAX:
                return
            one = served.popleft()
            before, held = one.held, self._held(one.request, one.endpoint)
            if before.blocks >= before.total or (held is not None and held.blocks >= held.total):
                self._note(one.request.model, None)
            elif held is not None and not before.void:
                self._note(one.request.model, held.blocks * held.block_tokens)

    def _note(self, model: str, same_tokens: int | None) -> None:
        if self.resolver is None:
            return
        compared = self._compared.setdefault(self.resolver.backend.name, {})
        result = Compared.AGREES if same_tokens is None else Compared.DIFFERS
        compared[result] = compared.get(result, 0) + 1
        disagreement = self._agreement.note(model, same_tokens)
        if disagreement is not None:
            _log.warning(
                "token ids differ from the engine's: tokenizer, chat template or special tokens "
                "differ; prompts are measured by their bytes",
                model=disagreement.model,
                backend=self.resolver.backend.name,
                compared=disagreement.compared,
                agreed=disagreement.agreed,
                same_tokens=disagreement.same_tokens,
            )

    def _asks(self, model: str) -> bool:
        return self._agreement.asks(model)

    def exact(self, model: str) -> bool:
        """Return True unless comparisons showed that the token ids for this model differ from the
        engine's.
        """
        return self._agreement.exact(model)

    def snapshots(self) -> list[TokensSnapshot]:
        """Return the counts of all token backends used so far, the current one first."""
        found: dict[str, TokensSnapshot] = {}
        resolver = self.resolver
        names = [] if resolver is None else [resolver.backend.name]
        for name in dict.fromkeys([*names, *self._results]):
            counted = dict(self._results.get(name, {}))
            current = resolver if resolver is not None and resolver.backend.name == name else None
            for result, count in (current.results if current else {}).items():
                counted[result] = counted.get(result, 0) + count
            found[name] = TokensSnapshot(
                backend=name,
                waiting=current.waiting if current else 0,
                circuit_open=bool(current and current.open_circuit),
                results={result.value: count for result, count in counted.items()},
                compared={
                    result.value: count for result, count in self._compared.get(name, {}).items()
                },
            )
        return list(found.values())

    def described(self) -> dict[str, object]:
        """Return a description of the token producer for the debug page, without content of
        prompts.
        """
        resolver = self.resolver
        compared = [
            {
                "model": row.model,
                "compared": row.compared,
                "agreed": row.agreed,
                "exact": row.exact,
            }
            for row in self._agreement.rows()
        ]
        if resolver is None:
            return {"backend": Backend.ESTIMATE.value, "parts": [], "compared": compared}
        return {
            "backend": resolver.backend.name,
            "timeout_s": float(resolver.timeout_s),
            "waiting": resolver.waiting,
            "circuit": "open" if resolver.open_circuit else "closed",
            "results": {result.value: count for result, count in resolver.results.items()},
            **resolver.backend.totals(),
            "parts": resolver.backend.rows(),
            "compared": compared,
        }
