"""Re-enactment of decisions from a folder that `epp serve --capture` wrote, with the same or
another configuration.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from epp.configuration.build import build_settings
from epp.configuration.config import PickerConfig, PluginTables, load_config
from epp.configuration.memory_plan import MemoryPlan, fitted
from epp.core.decision.settings import SchedulerSettings
from epp.core.journal.events import Configured, Level
from epp.core.journal.reenactment import (
    DIFFERENCES_SHOWN_MAX,
    Difference,
    Reenacted,
    Reenactment,
)
from epp.journal.reading import journals


def decide_again(
    folder: Path, plugins: PluginTables, config: PickerConfig | None = None
) -> dict[str, Reenacted]:
    """Return the re-enacted decisions of each picker process in `folder`, by the process's origin.

    Each decision is repeated with the captured part of the knowledge that the picker had at its
    time. If `config` is given, it replaces the configurations that were in force. Raises
    `JournalError`, and `ConfigError` for a captured document that is not a valid configuration.
    """
    if config is None:
        settings_of = _in_force(folder, plugins)
    else:
        settings_of = partial(_settings, config)
    found: dict[str, Reenacted] = {}
    for journal in journals(folder, Level.INPUTS):
        again = Reenactment(settings_of)
        for event in journal.events():
            again.feed(event)
        found[journal.origin] = again.result
    return found


class Judged(Struct, kw_only=True):
    """The comparison of captured decisions with those of another configuration, added up over all
    picker processes.
    """

    decisions: int = 0
    unmade: dict[Difference, int] = field(default_factory=dict)
    """Number of decisions that even the original configuration does not repeat, by kind of
    difference.

    Not all of its knowledge is captured, so the decision of another configuration is unknown too.
    """
    changed: int = 0
    """Number of decisions that the original configuration repeats and the other configuration
    changes.
    """
    caveats: list[str] = field(default_factory=list)

    @property
    def made_again(self) -> int:
        return self.decisions - sum(self.unmade.values())


def judge(folder: Path, plugins: PluginTables, config: PickerConfig) -> Judged:
    """Return how many captured decisions `config` would have changed, as far as that can be known.

    Raises the same errors as `decide_again`.
    """
    judged = Judged()
    for journal in journals(folder, Level.INPUTS):
        by_what_decided = Reenactment(_in_force(folder, plugins))
        by_config = Reenactment(partial(_settings, config))
        for event in journal.events():
            unmade, changed = by_what_decided.feed(event), by_config.feed(event)
            if unmade is not None:
                judged.unmade[unmade] = judged.unmade.get(unmade, 0) + 1
            elif changed is not None:
                judged.changed += 1
        judged.decisions += by_config.result.decisions
        caveats = by_config.result.caveats()
        judged.caveats += [f"{journal.origin}: {sentence}" for sentence in caveats]
    return judged


def _in_force(folder: Path, plugins: PluginTables) -> Callable[[Configured], SchedulerSettings]:
    """Return a function that returns the scheduler's settings for each captured configuration
    document.
    """

    def settings_of(configured: Configured) -> SchedulerSettings:
        source = f"{folder}: generation {configured.generation}"
        return _settings(load_config(configured.document, source, plugins), configured)

    return settings_of


def _settings(config: PickerConfig, configured: Configured) -> SchedulerSettings:
    settings = build_settings(
        config,
        metrics_staleness_s=configured.metrics_staleness_s,
        refresh_interval_s=configured.refresh_interval_s,
        fallback_endpoints_max=configured.fallback_endpoints_max,
    )
    indexes = settings.indexes
    if configured.indexes_bytes is not None:
        plan = MemoryPlan(limit_bytes=0, bodies_bytes=0, indexes_bytes=configured.indexes_bytes)
        indexes = fitted(indexes, plan)
    return structs.replace(
        settings,
        indexes=indexes,
        lease_ttl_without_response_phase_s=configured.lease_ttl_without_response_phase_s,
    )


def totals(found: Mapping[str, Reenacted]) -> dict[str, Any]:
    """Return the re-enacted decisions of all picker processes added up, as plain values."""
    total: dict[str, Any] = {"decisions": 0, "same": 0, "changed": 0, "differences": {}}
    for one in found.values():
        total["decisions"] += one.decisions
        total["same"] += one.same
        total["changed"] += one.changed
        for difference, count in one.differences.items():
            kinds = total["differences"]
            kinds[difference.value] = kinds.get(difference.value, 0) + count
    total["first"] = [msgspec.to_builtins(one) for each in found.values() for one in each.first]
    total["caveats"] = [
        f"{origin}: {sentence}" for origin, one in found.items() for sentence in one.caveats()
    ]
    return total


def sentences_of(total: Mapping[str, Any]) -> list[str]:
    """Return lines for a person about re-enacted decisions: the counts, the kinds of differences,
    the first differences, the caveats.
    """
    decisions, same = total["decisions"], total["same"]
    share = f" ({same / decisions:.2%})" if decisions else ""
    lines = [f"{decisions:,} decisions, {same:,} repeated{share}"]
    lines += [f"{count:,} differ, {why}" for why, count in total["differences"].items()]
    lines += [
        f"  request {one['request']}: went to {one['live'] or 'no endpoint'}, now "
        f"{one['again']}, {one['difference']}"
        for one in total["first"][:DIFFERENCES_SHOWN_MAX]
    ]
    return lines + [f"note: {sentence}" for sentence in total["caveats"]]
