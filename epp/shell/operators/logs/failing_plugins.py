"""What the log says of plugins that fail: a line a plugin and call of `report` at most."""

from typing import Final

import structlog

from epp.core.decision.failures import PluginFailures

_log: Final = structlog.get_logger(__name__)


class FailingPluginsLog:
    """Compares the counts with those that it saw last; called about once a second."""

    def __init__(
        self,
        failures: PluginFailures,
        sentence: str = "a plugin fails, requests are routed without it",
    ) -> None:
        self._failures = failures
        self._sentence = sentence
        self._seen: dict[str, int] = {}

    def report(self) -> None:
        """Say who failed since the last call, how often, and what it did last."""
        before, self._seen = self._seen, {}
        for failing in self._failures:
            name, count = failing.name, failing.failures
            self._seen[name] = count
            # Less than before: meanwhile it was configured no more, and is again.
            more = count - before.get(name, 0) if count >= before.get(name, 0) else count
            if more:
                _log.error(
                    self._sentence,
                    plugin=name,
                    failures=more,
                    last=failing.what,
                )
