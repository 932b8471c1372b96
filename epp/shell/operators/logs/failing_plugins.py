"""Log failures of plugins, at most one line per plugin and call of `report`."""

from typing import Final

import structlog

from epp.core.failures import PluginFailures

_log: Final = structlog.get_logger(__name__)


class FailingPluginsLog:
    """A log of plugins that fail. It compares each failure count with that of the previous report.
    Call `report` about once a second.
    """

    def __init__(
        self,
        failures: PluginFailures,
        sentence: str = "plugin failed, requests are routed without it",
    ) -> None:
        self._failures = failures
        self._sentence = sentence
        self._seen: dict[str, int] = {}

    def report(self) -> None:
        """Log each plugin that failed since the last call, with the number of failures and the last
        failure.
        """
        before, self._seen = self._seen, {}
        for failing in self._failures:
            name, count = failing.name, failing.failures
            self._seen[name] = count
            # A smaller count means that the plugin was removed and configured again.
            more = count - before.get(name, 0) if count >= before.get(name, 0) else count
            if more:
                _log.error(
                    self._sentence,
                    plugin=name,
                    failures=more,
                    last=failing.what,
                )
