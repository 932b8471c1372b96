"""`epp check-config`: the server's own reading of a configuration, told to a person."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from epp.configuration.build import (
    default_config,
    plugin_tables,
    settings_warnings,
)
from epp.configuration.config import (
    CONFIG_MAX_BYTES,
    ConfigError,
    PickerConfig,
    PluginTables,
    load_config,
)
from epp.configuration.describing import config_hash, diff_configs
from epp.configuration.document import read_mapping
from epp.configuration.explaining import explain
from epp.configuration.past_decisions import CaptureError, Judged, judge
from epp.flags.subcommands import CheckFlags

VALID: Final = 0
INVALID: Final = 1
UNREADABLE: Final = 2

CONFIG_MAP_KEY: Final = "config.yaml"
"""Where the chart's ConfigMap has its document."""


def check_config(flags: CheckFlags, out: TextIO, err: TextIO) -> int:
    """Exit code: 0 valid, 1 invalid or unsupported, 2 unreadable.

    Warnings and problems go to `err`, what was asked for to `out`.
    """
    try:
        plugins = plugin_tables()
        config = _load(flags.file, plugins) if flags.file else default_config(plugins)
        old = _load(flags.diff, plugins) if flags.diff else None
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=err)
        return INVALID
    except OSError as error:
        print(f"{error.filename}: cannot be read: {error.strerror}", file=err)
        return UNREADABLE
    for warning in (*config.warnings, *settings_warnings(config)):
        print(f"warning: {warning}", file=err)
    if flags.explain:
        out.write(explain(config))
    elif old is None:
        print(f"{config.source}: valid, hash {config_hash(config)}", file=out)
    if old is not None:
        for line in diff_configs(old, config) or [f"{old.source} and {config.source} are equal"]:
            print(line, file=out)
    return _held_against(config, flags.capture, plugins, out, err) if flags.capture else VALID


def _held_against(
    config: PickerConfig, capture: str, plugins: PluginTables, out: TextIO, err: TextIO
) -> int:
    """Say what `config` would have changed of the capture's decisions. The exit code."""
    try:
        judged = judge(Path(capture), plugins, config)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=err)
        return UNREADABLE
    except (CaptureError, OSError) as error:
        print(f"--capture {capture} cannot be read: {error}", file=err)
        return UNREADABLE
    for sentence in _verdict(judged):
        print(sentence, file=out)
    return VALID


def _verdict(judged: Judged) -> Iterator[str]:
    """What can be known, then what cannot and why."""
    known, decisions = judged.made_again, judged.decisions
    if known:
        of = f"{known:,} past decisions ({judged.changed / known:.1%})"
        yield f"{judged.changed:,} of {of} would have changed"
    elif decisions:
        yield "nothing is known of what would have changed"
    else:
        yield "there are no past decisions"
    if judged.unmade:
        unknown = decisions - known
        yield (
            f"of {unknown:,} more ({unknown / decisions:.1%} of all) nothing can be said: the "
            "configuration that made them does not make them again from what is captured"
        )
        yield from (f"  {count:,}: {why}" for why, count in judged.unmade.items())
    yield from (f"note: {sentence}" for sentence in judged.caveats)


def _load(file: str, plugins: PluginTables) -> PickerConfig:
    """The configuration in `file`, "-" for standard input; at most one byte too much is read."""
    if file == "-":
        return _read(sys.stdin.buffer.read(CONFIG_MAX_BYTES + 1), "standard input", plugins)
    with Path(file).open("rb") as stream:
        return _read(stream.read(CONFIG_MAX_BYTES + 1), file, plugins)


def _read(text: bytes, source: str, plugins: PluginTables) -> PickerConfig:
    """A configuration, or the one that a ConfigMap holds: under `CONFIG_MAP_KEY`, or alone."""
    manifest = read_mapping(text, source)
    if manifest.get("kind") != "ConfigMap":
        return load_config(text, source, plugins)
    data = manifest.get("data")
    texts = data if isinstance(data, dict) else {}
    key = CONFIG_MAP_KEY if len(texts) != 1 else next(iter(texts))
    if not isinstance(texts.get(key), str):
        raise ConfigError([f"{source}: data of the ConfigMap has no text {key}"])
    return load_config(texts[key], f"{source}: {key}", plugins)
