"""The command `epp`: serve, check-config, envoy-config, explain, decisions, changes, top.

What a subcommand needs is imported when it runs, so that checking a file starts at once.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec

from epp import __version__
from epp.configuration import flags as command_line
from epp.configuration.document import nearest
from epp.reader_left import until_reader_leaves

USAGE: Final = """\
usage: epp serve [flags]                                       pick endpoints over ext_proc
       epp check-config [FILE|-] [--diff OLD] [--explain]      check an EndpointPickerConfig
       epp envoy-config [--out FILE] [flags]                   print an Envoy bootstrap
       epp explain REQUEST_ID [--endpoint NAME] [--url URL]    why a request went where it went
       epp decisions [--since 02:00] [--until 02:20]           what was decided last night
       epp changes [--at 02:10] [--window 15m]                 before and after a change
       epp top [--url URL] [--with-peers] [--once]             watch pickers that run

`epp COMMAND --help` lists the flags, `epp --version` says which version this is. Flags without a
command are those of `epp serve`.
"""
SUCCESS: Final = 0
FAILURE: Final = 1
USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130
"""Ctrl-C where nothing waits for it, as shells count it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code, 2 for a command line that cannot be obeyed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return until_reader_leaves(lambda: _main(given))


def _main(arguments: Sequence[str]) -> int:
    command, *rest = arguments or [""]
    if command in {"--version", "-version"}:
        sys.stdout.write(f"epp {__version__}\n")
        return SUCCESS
    if command.startswith("-") and not command_line.wants_help([command]):
        # The field's manifests give the image flags alone.
        command, rest = "serve", list(arguments)
    commands = {
        "serve": serve,
        "check-config": check,
        "envoy-config": envoy,
        "explain": explain,
        "decisions": decisions,
        "changes": changes,
        "top": top,
    }
    run = commands.get(command)
    if run is None:
        asked = command_line.wants_help([command])
        hint = nearest(command, commands)
        problem = "" if asked or not command else f"epp: unknown command {command!r}{hint}\n"
        (sys.stdout if asked else sys.stderr).write(problem + USAGE)
        return SUCCESS if asked else USAGE_ERROR
    try:
        return run(rest)
    except command_line.FlagError as error:
        print(f"epp {command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def serve(arguments: Sequence[str]) -> int:
    if command_line.wants_help(arguments):
        return _help("epp serve [flags]", command_line.SERVE_HELP, command_line.ServeFlags)
    flags = command_line.parse_serve(arguments, os.environ)
    import_module("epp.interrupts").raise_interrupted()
    code: int = import_module("epp.app").run(flags)
    return code


def check(arguments: Sequence[str]) -> int:
    if command_line.wants_help(arguments):
        usage = "epp check-config [FILE|-] [--diff OLD] [--explain] [--capture DIR]"
        return _help(usage, command_line.CHECK_HELP, command_line.CheckFlags)
    flags = command_line.parse_check(arguments)
    import_module("epp.interrupts").raise_interrupted()
    code: int = import_module("epp.commands.check_config").check_config(
        flags, sys.stdout, sys.stderr
    )
    return code


def envoy(arguments: Sequence[str]) -> int:
    if command_line.wants_help(arguments):
        usage = "epp envoy-config [--out FILE] [flags]"
        return _help(usage, command_line.ENVOY_HELP, command_line.EnvoyFlags)
    flags = command_line.parse_envoy(arguments)
    bootstrap = import_module("epp.shell.gateway.bootstrap")
    options = msgspec.structs.asdict(flags)
    out, timeout = options.pop("out"), options.pop("message_timeout")
    try:
        # Field by field the same names; conversion checks them once more.
        text: str = bootstrap.render(
            msgspec.convert(
                options | {"message_timeout_s": float(timeout)}, bootstrap.BootstrapOptions
            )
        )
    except (ValueError, msgspec.ValidationError) as error:
        raise command_line.FlagError(str(error)) from error
    if not out:
        sys.stdout.write(text)
        return SUCCESS
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"epp envoy-config: {out} cannot be written: {error.strerror}", file=sys.stderr)
        return FAILURE
    return SUCCESS


def explain(arguments: Sequence[str]) -> int:
    if command_line.wants_help(arguments):
        usage = "epp explain REQUEST_ID [--endpoint NAME] [--url URL] [--dir DIR] [--json]"
        return _help(usage, command_line.EXPLAIN_HELP, command_line.ExplainFlags)
    flags = command_line.parse_explain(arguments)
    code: int = import_module("epp.commands.explain").explain_request(
        flags, sys.stdout, sys.stderr
    )
    return code


def decisions(arguments: Sequence[str]) -> int:
    if command_line.wants_help(arguments):
        usage = "epp decisions [--dir DIR] [--since TIME] [--until TIME] [--endpoint NAME] [--json]"
        return _help(usage, command_line.DECISIONS_HELP, command_line.DecisionsFlags)
    flags = command_line.parse_decisions(arguments)
    code: int = import_module("epp.commands.decisions").show_decisions(
        flags, sys.stdout, sys.stderr
    )
    return code


def changes(arguments: Sequence[str]) -> int:
    if command_line.wants_help(arguments):
        usage = "epp changes [--dir DIR] [--at TIME] [--window 15m] [--json]"
        return _help(usage, command_line.CHANGES_HELP, command_line.ChangesFlags)
    flags = command_line.parse_changes(arguments)
    code: int = import_module("epp.commands.changes").show_changes(
        flags, sys.stdout, sys.stderr
    )
    return code


def top(arguments: Sequence[str]) -> int:
    if command_line.wants_help(arguments):
        usage = "epp top [--url URL] [--with-peers] [--interval 2s] [--once]"
        return _help(usage, command_line.TOP_HELP, command_line.TopFlags)
    flags = command_line.parse_top(arguments)
    try:
        command = import_module("epp.commands.top")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        print("epp top: it needs rich: pip install 'homing-epp[top]'", file=sys.stderr)
        return FAILURE
    code: int = command.watch(flags, sys.stdout, sys.stderr)
    return code


def _help(usage: str, groups: command_line.Groups, kind: type[msgspec.Struct]) -> int:
    sys.stdout.write(command_line.help_text(usage, groups, kind))
    return SUCCESS


if __name__ == "__main__":
    sys.exit(main())
