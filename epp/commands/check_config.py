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
from epp.configuration.upgrading import upgrade
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
    if flags.upgrade:
        return _upgraded(flags.file, out, err)
    try:
        plugins = plugin_tables()
        config = _load(flags.file, plugins) if flags.file else default_config(plugins)
        old = _load(flags.diff, plugins) if flags.diff else None
    except (ConfigError, OSError) as error:
        return _failed(error, err)
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


def _upgraded(file: str, out: TextIO, err: TextIO) -> int:
    """Write what is in `file` as it loads today to `out`, and what was rewritten to `err`. The exit code.

    That of the document as it is written: 1 where something stays that does not load.
    """
    try:
        text, source = _text_of(file)
        upgraded = upgrade(text, source)
    except (ConfigError, OSError) as error:
        return _failed(error, err)
    out.write(upgraded.text)
    for change in upgraded.changes:
        print(f"{source}: line {change.line}: {change.what}", file=err)
    if not upgraded.changes:
        print(f"{source}: nothing to rewrite", file=err)
    try:
        config = load_config(upgraded.text, f"{source}, rewritten", plugin_tables())
    except ConfigError as error:
        return _failed(error, err)
    for warning in config.warnings:
        print(f"warning: {warning}", file=err)
    return VALID


def _failed(error: ConfigError | OSError, err: TextIO) -> int:
    if isinstance(error, OSError):
        print(f"{error.filename}: cannot be read: {error.strerror}", file=err)
        return UNREADABLE
    for problem in error.problems:
        print(problem, file=err)
    return INVALID


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
    """The configuration in `file`."""
    text, source = _text_of(file)
    return load_config(text, source, plugins)


def _text_of(file: str) -> tuple[bytes | str, str]:
    """What is in `file`, "-" for standard input, and its name; of a ConfigMap, the document in it.

    At most one byte too much is read. Raises `ConfigError` and `OSError`.
    """
    if file == "-":
        return _document_in(sys.stdin.buffer.read(CONFIG_MAX_BYTES + 1), "standard input")
    with Path(file).open("rb") as stream:
        return _document_in(stream.read(CONFIG_MAX_BYTES + 1), file)


def _document_in(content: bytes, source: str) -> tuple[bytes | str, str]:
    """A configuration, or the one that a ConfigMap holds: under `CONFIG_MAP_KEY`, or alone."""
    manifest = read_mapping(content, source)
    if manifest.get("kind") != "ConfigMap":
        return content, source
    data = manifest.get("data")
    texts = data if isinstance(data, dict) else {}
    key = CONFIG_MAP_KEY if len(texts) != 1 else next(iter(texts))
    if not isinstance(texts.get(key), str):
        raise ConfigError([f"{source}: data of the ConfigMap has no text {key}"])
    return texts[key], f"{source}: {key}"
