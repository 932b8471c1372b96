"""Implement `epp check-config`: validate a configuration as the server would, and explain it."""

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
from epp.configuration.defaults import default_with_stages
from epp.configuration.describing import config_hash, diff_configs
from epp.configuration.document import read_mapping
from epp.configuration.explaining import explain
from epp.configuration.upgrading import upgrade
from epp.core.types import Stage
from epp.flags.subcommands import CheckFlags
from epp.journal.problem import JournalError
from epp.journal.reenacting import Judged, judge

VALID: Final = 0
INVALID: Final = 1
UNREADABLE: Final = 2

_BY_ROLE: Final = {
    frozenset({Stage.PREFILL}): "If any endpoint prefills and does not decode (label "
    "llm-d.ai/role), the following default\napplies instead, from the next change of the endpoints "
    "on.",
    frozenset({Stage.PREFILL, Stage.ENCODE}): "If any endpoint encodes and does not decode, an "
    "encode stage and a fallback are added. Without an\nendpoint that only prefills, there is no "
    "prefill stage, and added-time-scorer chooses the\nendpoint that decodes.",
}
"""Sentences that introduce the defaults by role, by the stages that they have besides decode."""

CONFIG_MAP_KEY: Final = "config.yaml"
"""Key under which the chart's ConfigMap holds the `EndpointPickerConfig`."""


def check_config(flags: CheckFlags, out: TextIO, err: TextIO) -> int:
    """Validate the configuration and print what the flags request.

    Warnings and problems are written to `err`, requested output to `out`. Return the exit code: 0
    if the configuration is valid, 1 if it or that of `--diff` is invalid or unsupported, 2 if a
    file or the capture to compare with cannot be read.
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
        if not flags.file:
            for apart, introduction in _BY_ROLE.items():
                default = default_with_stages(apart)
                staged = load_config(default.text, default.source, plugins)
                out.write(f"\n{introduction}\n\n{explain(staged)}")
    elif old is None:
        print(f"{config.source}: valid, hash {config_hash(config)}", file=out)
    if old is not None:
        for line in diff_configs(old, config) or [
            f"{old.source} and {config.source} have the same effect"
        ]:
            print(line, file=out)
    return _print_comparison(config, flags.capture, plugins, out, err) if flags.capture else VALID


def _upgraded(file: str, out: TextIO, err: TextIO) -> int:
    """Write the document in `file`, rewritten to today's form, to `out`, and the list of changes to
    `err`.

    Return the exit code: 0 if the rewritten document is valid, 1 if a part of it still does not
    load or it cannot be rewritten, 2 if the file cannot be read.
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


def _print_comparison(
    config: PickerConfig, capture: str, plugins: PluginTables, out: TextIO, err: TextIO
) -> int:
    """Print how many decisions in the folder `capture` would differ with `config`.

    Return the exit code: 0, or 2 if the capture cannot be read.
    """
    try:
        judged = judge(Path(capture), plugins, config)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=err)
        return UNREADABLE
    except (JournalError, OSError) as error:
        print(f"--capture {capture} cannot be read: {error}", file=err)
        return UNREADABLE
    for sentence in _verdict(judged):
        print(sentence, file=out)
    return VALID


def _verdict(judged: Judged) -> Iterator[str]:
    """Yield sentences about captured decisions: how many would change, then how many could not be
    compared, and why.
    """
    known, decisions = judged.made_again, judged.decisions
    if known:
        of = f"{known:,} past decisions ({judged.changed / known:.1%})"
        yield f"{judged.changed:,} of {of} would have changed"
    elif decisions:
        yield "no past decision could be repeated, so the effect is unknown"
    else:
        yield "the capture contains no decisions"
    if judged.unmade:
        unknown = decisions - known
        yield (
            f"{unknown:,} more decisions ({unknown / decisions:.1%} of all) are not compared: the "
            "configuration that made them does not reproduce them from the capture"
        )
        yield from (f"  {count:,}: {why}" for why, count in judged.unmade.items())
    yield from (f"note: {sentence}" for sentence in judged.caveats)


def _load(file: str, plugins: PluginTables) -> PickerConfig:
    """Return the valid configuration in `file`. Raises `ConfigError` and `OSError`."""
    text, source = _text_of(file)
    return load_config(text, source, plugins)


def _text_of(file: str) -> tuple[bytes | str, str]:
    """Return the configuration text in `file` and the name of its source.

    "-" stands for standard input. If the file is a ConfigMap, the text is the document in it. At
    most one byte more than the size limit is read. Raises `ConfigError` and `OSError`.
    """
    if file == "-":
        return _document_in(sys.stdin.buffer.read(CONFIG_MAX_BYTES + 1), "standard input")
    with Path(file).open("rb") as stream:
        return _document_in(stream.read(CONFIG_MAX_BYTES + 1), file)


def _document_in(content: bytes, source: str) -> tuple[bytes | str, str]:
    """Return the text of the `EndpointPickerConfig` and the name of its source.

    If `content` is a ConfigMap, the text is its only entry, or else the entry `CONFIG_MAP_KEY`.
    Raises `ConfigError`.
    """
    manifest = read_mapping(content, source)
    if manifest.get("kind") != "ConfigMap":
        return content, source
    data = manifest.get("data")
    texts = data if isinstance(data, dict) else {}
    key = CONFIG_MAP_KEY if len(texts) != 1 else next(iter(texts))
    if not isinstance(texts.get(key), str):
        raise ConfigError([f"{source}: data of the ConfigMap has no text {key}"])
    return texts[key], f"{source}: {key}"
