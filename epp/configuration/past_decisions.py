"""Re-enactment of a folder written by `epp serve --capture`, with the same or another
configuration.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field, structs

from epp.configuration.build import build_settings
from epp.configuration.config import PickerConfig, PluginTables, load_config
from epp.configuration.memory_plan import MemoryPlan, fitted
from epp.core.capture.events import (
    EVENTS_FORMAT,
    EVENTS_VERSION,
    Configured,
    Event,
    Opened,
    Scheduled,
)
from epp.core.capture.lines import FORMAT_NAME, CaptureLine
from epp.core.capture.reenactment import (
    DIFFERENCES_SHOWN_MAX,
    Difference,
    Reenacted,
    Reenactment,
)
from epp.core.capture.transcript import BEHIND_MAX
from epp.core.decision.settings import SchedulerSettings
from epp.core.expectation import misfit

_NAME: Final = re.compile(r"(requests|events)-(\w+-[0-9a-f]+)-(\d+)\.jsonl\.gz", re.ASCII)
_LINE_BYTES_MAX: Final = 16 * 1024 * 1024
_BROKEN: Final = (EOFError, zlib.error, gzip.BadGzipFile)
"""Errors at the end of a file whose writer was killed."""


class CaptureError(ValueError):
    """A capture that cannot be read. The message is one sentence."""


def past_files(folder: Path, kind: str) -> Mapping[str, list[Path]]:
    """Return the files of `kind`, "requests" or "events", by origin and in order. Raises `OSError`."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is not None and name[1] == kind:
            found.setdefault(name[2], []).append((int(name[3]), path))
    return {origin: [path for _, path in sorted(found[origin])] for origin in sorted(found)}


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file, whose end may be missing. Raises `CaptureError`,
    `OSError`.
    """
    with gzip.open(path) as file:
        try:
            while line := file.readline(_LINE_BYTES_MAX):
                if not line.endswith(b"\n"):
                    if len(line) == _LINE_BYTES_MAX:
                        raise CaptureError(
                            f"{path}: expected lines of less than {_LINE_BYTES_MAX} bytes"
                        )
                    return
                yield line
        except _BROKEN:
            return


def decide_again(
    folder: Path, plugins: PluginTables, config: PickerConfig | None = None
) -> dict[str, Reenacted]:
    """Return the re-enactment of each origin's decisions, with the knowledge at the time of each
    decision.

    If `config` is given, it replaces the configurations that were in force. Raises `CaptureError`,
    `OSError`, and `ConfigError` for a captured document that is not a valid configuration.
    """
    if config is None:
        settings_of = _in_force(folder, plugins)
    else:
        settings_of = partial(_settings, config)
    found: dict[str, Reenacted] = {}
    for origin, story in _stories(folder).items():
        again = Reenactment(settings_of)
        for event, line in story:
            again.feed(event, line)
        found[origin] = again.result
    return found


class Judged(Struct, kw_only=True):
    """The comparison of captured decisions with another configuration, for all origins together."""

    decisions: int = 0
    unmade: dict[Difference, int] = field(default_factory=dict)
    """Number of decisions that even the original configuration does not repeat, by kind of
    difference. Not all of its knowledge is captured, so the decision of another configuration is
    unknown too.
    """
    changed: int = 0
    """Number of the other decisions that differ."""
    caveats: list[str] = field(default_factory=list)

    @property
    def made_again(self) -> int:
        return self.decisions - sum(self.unmade.values())


def judge(folder: Path, plugins: PluginTables, config: PickerConfig) -> Judged:
    """Return what `config` would have decided instead, as far as that can be known.

    Raises the same errors as `decide_again`.
    """
    judged = Judged()
    for origin, story in _stories(folder).items():
        by_what_decided = Reenactment(_in_force(folder, plugins))
        by_config = Reenactment(partial(_settings, config))
        for event, line in story:
            unmade, changed = by_what_decided.feed(event, line), by_config.feed(event, line)
            if unmade is not None:
                judged.unmade[unmade] = judged.unmade.get(unmade, 0) + 1
            elif changed is not None:
                judged.changed += 1
        judged.decisions += by_config.result.decisions
        judged.caveats += [f"{origin}: {sentence}" for sentence in by_config.result.caveats()]
    return judged


def _in_force(folder: Path, plugins: PluginTables) -> Callable[[Configured], SchedulerSettings]:
    """Return the settings of each configuration in force, from its captured document."""

    def settings_of(configured: Configured) -> SchedulerSettings:
        source = f"{folder}: generation {configured.generation}"
        return _settings(load_config(configured.document, source, plugins), configured)

    return settings_of


def _stories(folder: Path) -> dict[str, Iterator[tuple[Event, CaptureLine | None]]]:
    """Return the events of each origin, a decision with its request. Raises `CaptureError`,
    `OSError`.
    """
    requests = past_files(folder, "requests")
    events = past_files(folder, "events")
    if not events:
        raise CaptureError(f"{folder}: found no events-*.jsonl.gz; expected the files of a capture")
    return {origin: _story(files, requests.get(origin, [])) for origin, files in events.items()}


def _story(events: list[Path], requests: list[Path]) -> Iterator[tuple[Event, CaptureLine | None]]:
    asked = _Requests(requests)
    for event in _events(events):
        yield event, asked.find(event.request) if isinstance(event, Scheduled) else None


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


def _events(files: list[Path]) -> Iterator[Event]:
    decode = msgspec.json.Decoder(Event).decode
    for path in files:
        for number, line in enumerate(lines_of(path), 1):
            try:
                event: Event = decode(line)
            except msgspec.DecodeError as error:
                raise CaptureError(misfit(f"{path}:{number}", error, Event)) from None
            if isinstance(event, Opened) and (event.format, event.version) != (
                EVENTS_FORMAT,
                EVENTS_VERSION,
            ):
                raise CaptureError(
                    f"{path}: expected {EVENTS_FORMAT} version {EVENTS_VERSION}, got "
                    f"{event.format} {event.version}"
                )
            yield event


class _Requests:
    """The request lines of one process by number; they are at most `BEHIND_MAX` late."""

    def __init__(self, files: list[Path]) -> None:
        self._lines = _request_lines(files)
        self._waiting: dict[int, CaptureLine] = {}
        self._latest = -1
        self._ended = False

    def find(self, number: int) -> CaptureLine | None:
        """Return the line, or None if it is missing. Each line is found once, in the order of the
        requests.
        """
        while number not in self._waiting and not self._ended:
            if self._latest > number + 2 * BEHIND_MAX:
                break
            line = next(self._lines, None)
            if line is None:
                self._ended = True
            elif line.request is not None:
                self._waiting[line.request] = line
                self._latest = max(self._latest, line.request)
        return self._waiting.pop(number, None)


def _request_lines(files: list[Path]) -> Iterator[CaptureLine]:
    decode = msgspec.json.Decoder(CaptureLine).decode
    for path in files:
        for number, line in enumerate(lines_of(path), 1):
            if number == 1 and FORMAT_NAME.encode() in line:
                continue
            try:
                yield decode(line)
            except msgspec.DecodeError as error:
                raise CaptureError(misfit(f"{path}:{number}", error, CaptureLine)) from None


def told(found: Mapping[str, Reenacted]) -> dict[str, Any]:
    """Return the totals of all origins, as plain values."""
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
    """Return the totals for a person: the counts, the kinds of differences, the first ones, the
    caveats.
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
