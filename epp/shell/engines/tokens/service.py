"""The token producer that the configuration in force names, and what runs for it."""

import asyncio
from collections.abc import Mapping, Sequence

import structlog
from msgspec import Struct, field

from epp.configuration.token_producer import Backend, TokenProducer
from epp.core.prompt.token_ids import Agreement
from epp.core.types import Endpoint
from epp.shell.engines.tokens.local import LocalWorker
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.renderer import Renderer, tls_of
from epp.shell.engines.tokens.resolver import TokenResolver, TokensObserver

_log = structlog.get_logger(__name__)


class TokensSnapshot(Struct, frozen=True, kw_only=True):
    """For metrics and pages."""

    backend: str
    waiting: int = 0
    circuit_open: bool = False
    results: Mapping[str, int] = field(default_factory=dict)
    """`TokensResult` -> questions."""


class Prepared(Struct, frozen=True):
    """A producer that may come into force."""

    settings: TokenProducer
    resolver: TokenResolver | None


class Tokens:
    """`resolver` is what sessions ask; None: prompts are measured by their bytes, and nobody waits."""

    def __init__(self, observer: TokensObserver) -> None:
        self._observer = observer
        self._settings = TokenProducer()
        self._endpoints: Sequence[Endpoint] = ()
        self._changed = asyncio.Event()
        self._agreement = Agreement()
        self._results: dict[str, dict[TokensResult, int]] = {}
        """Of backends that are no more in force."""
        self.resolver: TokenResolver | None = None

    def prepare(self, settings: TokenProducer) -> Prepared:
        """What `settings` ask for; changes nothing yet. Raises `ConfigError`."""
        if settings == self._settings:
            return Prepared(settings, self.resolver)
        match settings.backend:
            case Backend.ESTIMATE:
                return Prepared(settings, None)
            case Backend.VLLM:
                renderer = settings.renderer
                backend: Renderer | LocalWorker = Renderer(renderer, tls_of(renderer))
            case Backend.LOCAL:
                assert settings.local is not None, "the backend is what is given"
                backend = LocalWorker(settings.local, settings.model_name)
        resolver = TokenResolver(backend, settings.tokenize_timeout, self._observer)
        return Prepared(settings, resolver)

    def accept(self, prepared: Prepared) -> None:
        """`prepared` is in force from now on."""
        before, self.resolver = self.resolver, prepared.resolver
        self._settings = prepared.settings
        if before is prepared.resolver:
            return
        if before is not None:
            before.close()
            kept = self._results.setdefault(before.backend.name, {})
            for result, count in before.results.items():
                kept[result] = kept.get(result, 0) + count
        self.replace(self._endpoints)
        self._changed.set()

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """The pool is now `endpoints`."""
        self._endpoints = endpoints
        if self.resolver is not None and isinstance(self.resolver.backend, Renderer):
            self.resolver.backend.replace(endpoints)

    async def run(self) -> None:
        """What the backend in force does beside the questions, until cancelled."""
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

    def compare(self, model: str, ours: bytes, theirs: bytes) -> None:
        """An engine says that it stored `theirs`, ids of the head of a prompt that we took for `ours`."""
        disagreement = self._agreement.compare(model, ours, theirs)
        if disagreement is not None:
            _log.warning(
                "the token ids of a model are not the engine's: its tokenizer, chat template or "
                "special tokens differ",
                model=disagreement.model,
                compared=disagreement.compared,
                agreed=disagreement.agreed,
                first_difference_at=disagreement.position,
            )

    def exact(self, model: str) -> bool:
        """Whether nothing speaks against taking our ids for the engine's."""
        return self._agreement.exact(model)

    def snapshots(self) -> list[TokensSnapshot]:
        """Of the backend in force first; () where there never was one."""
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
            )
        return list(found.values())

    def described(self) -> dict[str, object]:
        """For who debugs; nothing of a prompt."""
        resolver = self.resolver
        compared = [
            {"model": model, "compared": count, "agreed": agreed}
            for model, count, agreed in self._agreement.rows()
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
