"""The configuration in force: loaded at start, and replaced as a whole by each valid document that
is read later.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from epp.configuration.build import build_settings, settings_warnings
from epp.configuration.config import (
    DEFAULT_CONFIG,
    DEFAULT_SOURCE,
    PickerConfig,
    PluginTables,
    load_config,
)
from epp.configuration.defaults import DEFAULT_SOURCES, default_for_roles
from epp.configuration.describing import config_hash, diff_configs
from epp.configuration.memory_plan import MemoryPlan, fitted
from epp.configuration.needed_indexes import block_tokens_of
from epp.core.decision.settings import SchedulerSettings
from epp.core.journal.events import Configured
from epp.core.prompt.parse import ParserName, ParserSet
from epp.core.session_tokens import SessionTokens
from epp.core.types import Endpoint
from epp.flags.serve import ServeFlags


class Offer(Struct, frozen=True, kw_only=True):
    """The scheduler's settings by a configuration document that may come into force, with what is
    to be reported about the document.
    """

    config: PickerConfig
    settings: SchedulerSettings
    warnings: tuple[str, ...]
    text: str = ""
    """Text of the configuration document as it was read."""
    changes: tuple[str, ...] = ()
    """Differences from the configuration in force, one sentence each."""


class LiveConfiguration:
    """The configuration in force: the flags and the last valid document.

    `read` only returns what a document would change; `accept` puts it into force.
    """

    def __init__(
        self,
        flags: ServeFlags,
        plugins: PluginTables,
        content: bytes | None,
        session_keys: Sequence[bytes] = (),
        memory: MemoryPlan | None = None,
    ) -> None:
        """Load the configuration in force at start. Raises `ConfigError`.

        `content` is that of `--config-file`, or None without that flag. `memory` limits the memory
        of the indexes; if it is None, only the document does.
        """
        self._flags = flags
        self._memory = memory
        self.sign_with(session_keys)
        self._plugins = plugins
        self.generation = 1
        """Number of the configuration in force: 1 at start, and one more for each accepted
        document.
        """
        if content is not None:
            text: bytes | str = content
            source = flags.config_file
        elif flags.config_text:
            text, source = flags.config_text, "--config-text"
        else:
            text, source = DEFAULT_CONFIG, DEFAULT_SOURCE
        self._text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        self.config: PickerConfig = load_config(text, source, plugins)

    @property
    def hash(self) -> str:
        """Return a hash of the configuration in force, which does not depend on the layout of its
        document.
        """
        return config_hash(self.config)

    @property
    def parsers(self) -> ParserSet:
        """Return the names of the request parsers that the configuration in force enables."""
        return parser_set(self.config)

    def sign_with(self, session_keys: Sequence[bytes]) -> None:
        """Use `session_keys` to sign and check session tokens in all settings that are returned
        from now on.
        """
        self._session_tokens = SessionTokens(
            session_keys, accept_unsigned=self._flags.accept_unsigned_session_tokens
        )

    def current(self, endpoints: int) -> Offer:
        """Return the settings by the configuration in force and the flags, for a pool of
        `endpoints` endpoints.
        """
        return self._offer(self.config, self._text, endpoints)

    def default_for(self, endpoints: Sequence[Endpoint]) -> Offer | None:
        """Return the built-in default for a pool of `endpoints` if another built-in default is in
        force; else None.

        The default serves the pool by role if any endpoint prefills or encodes, and does not
        decode. Otherwise one endpoint serves each request.
        """
        if self.config.source not in DEFAULT_SOURCES:
            return None
        default = default_for_roles(endpoints)
        if default.text == self._text:
            return None
        config = load_config(default.text, default.source, self._plugins)
        return self._offer(config, default.text, len(endpoints))

    def told(self, endpoints: int) -> Configured:
        """Return a record of the configuration in force, for a pool of `endpoints` endpoints, from
        which decisions can be re-enacted.
        """
        config, flags = self.config, self._flags
        return Configured(
            generation=self.generation,
            hash=self.hash,
            document=self._text,
            block_tokens=block_tokens_of(config.indexes, config.prefix),
            metrics_staleness_s=float(flags.metrics_staleness_threshold),
            refresh_interval_s=float(flags.refresh_interval_s(endpoints)),
            fallback_endpoints_max=flags.fallback_endpoints_max,
            lease_ttl_without_response_phase_s=float(flags.lease_ttl_without_response_phase),
            indexes_bytes=None if self._memory is None else self._memory.indexes_bytes,
        )

    def read(self, content: bytes, source: str, endpoints: int) -> Offer:
        """Return the settings that would apply if the document `content` came into force.

        `source` names the document, `endpoints` is the size of the pool. Raises `ConfigError`.
        """
        config = load_config(content, source, self._plugins)
        return self._offer(config, content.decode("utf-8", "replace"), endpoints)

    def accept(self, offer: Offer) -> None:
        """Put the configuration in `offer` into force.

        The generation increases by one, even if an equal document was read again. It stays if
        `offer` was made of the configuration in force (`current`).
        """
        self.generation += offer.config is not self.config
        self.config = offer.config
        self._text = offer.text

    def _offer(self, config: PickerConfig, text: str, endpoints: int) -> Offer:
        flags = self._flags
        with_flags: dict[str, Any] = {
            "metrics_staleness_s": flags.metrics_staleness_threshold,
            "refresh_interval_s": flags.refresh_interval_s(endpoints),
            "fallback_endpoints_max": flags.fallback_endpoints_max,
        }
        settings = build_settings(config, **with_flags)
        settings = msgspec.structs.replace(
            settings,
            indexes=settings.indexes
            if self._memory is None
            else fitted(settings.indexes, self._memory),
            lease_ttl_without_response_phase_s=flags.lease_ttl_without_response_phase,
            session_tokens=self._session_tokens,
        )
        return Offer(
            config=config,
            settings=settings,
            warnings=(
                *config.warnings,
                *settings_warnings(config, **with_flags),
                *self._session_warnings(config),
            ),
            text=text,
            changes=tuple(diff_configs(self.config, config)),
        )

    def _session_warnings(self, config: PickerConfig) -> list[str]:
        if self._flags.session_token_key_file:
            return []
        return [
            f"{config.source}: session tokens of {scorer.name} are signed with a key of this "
            "process, so other replicas and the next process do not accept them: set "
            "--session-token-key-file"
            for _, profile in config.stages.profiles()
            for scorer in profile.scorers
            if scorer.plugin.abilities.reads_session_tokens and _reads_tokens(scorer.plugin)
        ]


def _reads_tokens(plugin: Any) -> bool:
    return bool(plugin.reads_tokens)


def parser_set(config: PickerConfig) -> ParserSet:
    """Return the names of the request parsers that `config` enables."""
    return frozenset(ParserName(name) for name in config.parsers)
