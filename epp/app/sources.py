"""Read the picker's configuration, endpoints and session keys from files at start, where a problem
is fatal unless there is a last-good copy, and watch these files afterwards.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from epp.configuration.build import plugin_tables
from epp.configuration.config import CONFIG_MAX_BYTES, ConfigError
from epp.configuration.live import LiveConfiguration
from epp.configuration.memory_plan import MemoryPlan
from epp.flags.serve import ServeFlags
from epp.shell.files.endpoints_file import EndpointsFileError, load_endpoints
from epp.shell.files.last_good import LastGood
from epp.shell.files.session_keys import Keys, SessionKeys
from epp.shell.files.watch import FileWatcher, first_read
from epp.shell.found import Found
from epp.shell.starting import StartError
from epp.shell.supervision import Loop

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Sources:
    """The picker's files of configuration, endpoints and session keys, with the last-good copies of
    the first two.
    """

    def __init__(
        self,
        flags: ServeFlags,
        *,
        on_config: Callable[[bytes], None],
        on_endpoints: Callable[[bytes], None],
        on_keys: Callable[[Keys], None],
        on_not_kept: Callable[[str], None],
    ) -> None:
        """Prepare to read and watch the files that `flags` name.

        `on_not_kept` is called with the name of a last-good copy that could not be written. Raises
        `StartError` if the file of session keys cannot be read.
        """
        self._flags = flags
        self._config = FileWatcher(
            Path(flags.config_file), on_config, _report_file, bytes_max=CONFIG_MAX_BYTES
        )
        self._endpoints = FileWatcher(Path(flags.endpoints_file), on_endpoints, _report_file)

        def copy_of(name: str) -> LastGood:
            return LastGood(flags.last_good_dir, name, lambda: on_not_kept(name))

        self.kept_config = copy_of("configuration")
        self.kept_endpoints = copy_of("endpoints")
        self._keys = SessionKeys(flags.session_token_key_file, on_keys)

    # A problem of the configuration or the endpoints is fatal at start unless a copy exists.

    def configuration(
        self, memory: MemoryPlan, started: Callable[[bytes], None]
    ) -> LiveConfiguration:
        """Return the configuration in force at the start of the picker.

        `started` is called with the content of `--config-file`. Raises `StartError` if neither the
        file nor its last-good copy is valid.
        """
        flags = self._flags

        def read() -> bytes:
            content = first_read(self._config, f"--config-file {flags.config_file}")
            started(content)
            return content

        def made(content: bytes | None) -> LiveConfiguration:
            return or_start_error(
                lambda: LiveConfiguration(flags, plugin_tables(), content, self._keys.keys, memory)
            )

        return self.kept_config.start(read, made) if flags.config_file else made(None)

    def endpoints(self) -> Found:
        """Return the endpoints of `--endpoints-file` at the start of the picker, or no endpoints
        without that flag.

        Raises `StartError` if neither the file nor its last-good copy is valid.
        """
        name = self._flags.endpoints_file
        if not name:
            return Found()
        return self.kept_endpoints.start(
            lambda: first_read(self._endpoints, f"--endpoints-file {name}"),
            lambda content: or_start_error(lambda: load_endpoints(content, name)),
        )

    def loops(self) -> dict[str, Loop]:
        """Return the loops that watch the given files and write their last-good copies, by the name
        of their task.
        """
        loops: dict[str, Loop] = {}
        if self._flags.endpoints_file:
            loops["endpoints"] = self._endpoints.run
        if self._flags.config_file:
            loops["config"] = self._config.run
        if self._flags.session_token_key_file:
            loops["session-keys"] = self._keys.run
        if self._flags.last_good_dir:
            loops["kept configuration"] = self.kept_config.run
            loops["kept endpoints"] = self.kept_endpoints.run
        return loops


def or_start_error(make: Callable[[], T]) -> T:
    """Return the result of `make()`.

    Raises `StartError` in place of `ConfigError` and `EndpointsFileError`.
    """
    try:
        return make()
    except (ConfigError, EndpointsFileError) as error:
        raise StartError("\n".join(error.problems)) from error


def _report_file(problem: str) -> None:
    _log.error("watched file cannot be read, its last content stays in force", problem=problem)
