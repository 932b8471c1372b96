"""The command `epp`: serve, check-config, envoy-config, explain, decisions, changes, top.

The modules of a subcommand are imported when it runs, so that a short command starts at once.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from msgspec import Struct

from epp import __version__
from epp.configuration.document import nearest
from epp.flags import command_lines, subcommands
from epp.flags.reading import FlagError, help_text, wants_help
from epp.flags.serve import ServeFlags
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
"""Exit code of `epp` after Ctrl-C: 128 plus the number of SIGINT, as in shells."""


class Subcommand(Struct, frozen=True):
    """The command line of a subcommand, and the function that runs it."""

    usage: str
    """Arguments that `--help` shows after the subcommand's name."""
    flags: type[Struct]
    parse: Callable[[Sequence[str]], Any]
    module: str
    function: str
    """Name of the function in `module` that runs the subcommand.

    It takes the flags, standard output and standard error, and returns the exit code.
    """
    calls_plugins: bool = False
    needs: str = ""
    """Package without which the subcommand cannot run, and which the extra with the subcommand's
    name installs; "" if none is needed.
    """


SUBCOMMANDS: Final[Mapping[str, Subcommand]] = {
    "serve": Subcommand(
        "[flags]",
        ServeFlags,
        lambda arguments: command_lines.parse_serve(arguments, os.environ),
        "epp.commands.serve",
        "serve",
        calls_plugins=True,
    ),
    "check-config": Subcommand(
        "[FILE|-] [--diff OLD] [--explain] [--upgrade] [--capture DIR]",
        subcommands.CheckFlags,
        command_lines.parse_check,
        "epp.commands.check_config",
        "check_config",
        calls_plugins=True,
    ),
    "envoy-config": Subcommand(
        "[--out FILE] [flags]",
        subcommands.EnvoyFlags,
        command_lines.parse_envoy,
        "epp.commands.envoy_config",
        "envoy_config",
    ),
    "explain": Subcommand(
        "REQUEST_ID [--endpoint NAME] [--url URL] [--dir DIR] [--json]",
        subcommands.ExplainFlags,
        command_lines.parse_explain,
        "epp.commands.explain",
        "explain_request",
    ),
    "decisions": Subcommand(
        "[--dir DIR] [--since TIME] [--until TIME] [--endpoint NAME] [--json]",
        subcommands.DecisionsFlags,
        command_lines.parse_decisions,
        "epp.commands.decisions",
        "show_decisions",
    ),
    "changes": Subcommand(
        "[--dir DIR] [--at TIME] [--window 15m] [--json]",
        subcommands.ChangesFlags,
        command_lines.parse_changes,
        "epp.commands.changes",
        "show_changes",
    ),
    "top": Subcommand(
        "[--url URL] [--with-peers] [--interval 2s] [--once]",
        subcommands.TopFlags,
        command_lines.parse_top,
        "epp.commands.top",
        "watch",
        needs="rich",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that `arguments` (default: `sys.argv`) name.

    Return its exit code, or 2 if the command line is invalid, 1 if a package that the subcommand
    needs is not installed, 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return until_reader_leaves(lambda: _main(given))


def _main(arguments: Sequence[str]) -> int:
    name, *rest = arguments or [""]
    if name in {"--version", "-version"}:
        sys.stdout.write(f"epp {__version__}\n")
        return SUCCESS
    if name.startswith("-") and not wants_help([name]):
        # The field's manifests give the image flags alone.
        name, rest = "serve", list(arguments)
    command = SUBCOMMANDS.get(name)
    if command is None:
        if wants_help([name]):
            sys.stdout.write(USAGE)
            return SUCCESS
        hint = nearest(name, SUBCOMMANDS) or ", `epp --help` lists them"
        sys.stderr.write(f"epp: unknown command {name!r}{hint}\n" if name else USAGE)
        return USAGE_ERROR
    try:
        return run(name, command, rest)
    except FlagError as error:
        print(f"epp {name}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing != command.needs:
            raise
        print(f"epp {name}: it needs {missing}: pip install 'homing-epp[{name}]'", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED


def run(name: str, command: Subcommand, arguments: Sequence[str]) -> int:
    """Run `command` with `arguments` and return its exit code.

    Raises `FlagError` if the command line is invalid.
    """
    if wants_help(arguments):
        sys.stdout.write(help_text(f"epp {name} {command.usage}", command.flags))
        return SUCCESS
    flags = command.parse(arguments)
    if command.calls_plugins:
        import_module("epp.interrupts").raise_interrupted()
    function = getattr(import_module(command.module), command.function)
    code: int = function(flags, sys.stdout, sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
