"""The command line `sim`: parse the flags, run the selected subcommand, and return its exit code.

Exit codes: 0 done, 1 failed (one sentence on stderr), 2 wrong command line, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from epp import __version__
from epp.configuration.config import ConfigError
from epp.configuration.document import nearest
from epp.interrupts import raise_interrupted
from sim.cluster.policies import PolicyNameError
from sim.cluster.settings import ClusterSettingsError
from sim.drive import command as drive_command
from sim.engine import calibrate
from sim.engine.profiles import ProfileError
from sim.estimation import command as profile_command
from sim.experiments import compare, replay, replicas, size, strategies, sweep, tune
from sim.experiments.executors import ExecutorError
from sim.experiments.jobs import JobError
from sim.experiments.leaderboard import command as leaderboard
from sim.experiments.mean_traffic import MeanTrafficError
from sim.experiments.scenario_file import ScenarioError
from sim.experiments.space import SpaceError
from sim.measurement.objectives import NAMES, SHARES
from sim.output import OutputError
from sim.pods import command as serve_command
from sim.sentences import failed, sentence_of
from sim.traces import command as trace_command
from sim.traces.arrival import TraceError
from sim.truth import validate

_MISSING: Final = "the following arguments are required: "
_TOO_MANY: Final = "unrecognized arguments: "
_SLO: Final = "--slo"
_NO_VALUE: Final = "expected one argument"
"""Parts of argparse's error messages about missing arguments, unknown arguments, and a flag without
a value; `_SLO` is a flag's name.
"""


def run(arguments: Sequence[str] | None) -> int:
    """Run the subcommand of `sim` that `arguments` select and return its exit code."""
    parser: argparse.ArgumentParser = _Parser(
        prog="sim", description="Simulated vLLM pods for the endpoint picker.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"sim {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve_command.add_parser(commands)
    trace_command.add_parser(commands)
    replay.add_parser(commands)
    drive_command.add_parser(commands)
    compare.add_parser(commands)
    sweep.add_parser(commands)
    tune.add_parser(commands)
    size.add_parser(commands)
    replicas.add_parser(commands)
    strategies.add_parser(commands)
    leaderboard.add_parser(commands)
    profile_command.add_parser(commands)
    calibrate.add_parser(commands)
    validate.add_parser(commands)
    options = parser.parse_args(arguments)
    raise_interrupted()
    try:
        code: int = options.run(options)
    except BrokenPipeError:
        raise  # the reader of the output has left, which is no problem of the command
    except (PolicyNameError, ClusterSettingsError, MeanTrafficError) as problem:
        return failed(str(problem), code=2)
    except (
        TraceError, ProfileError, ScenarioError, SpaceError, ConfigError, OutputError, JobError,
        ExecutorError, OSError,
    ) as problem:  # fmt: skip
        return failed(sentence_of(problem), code=1)
    return code


class _Parser(argparse.ArgumentParser):
    """A parser of command lines that reports an error in one sentence, and suggests a similar flag
    or subcommand.

    The parsers of subcommands have this type too.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments, but first exit at an unknown flag. argparse would report missing
        required flags before unknown ones.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        for at, argument in enumerate(arguments):
            name, _, value = argument.partition("=")
            if argument == "--" or (self._subparsers and not argument.startswith("-")):
                break  # the rest are positional arguments, or the arguments of a subcommand
            if name.startswith("--") and name not in self._option_string_actions:
                value = value or "".join(arguments[at + 1 : at + 2])
                self.error(f"unknown flag {name}{self._meant_by(name, value)}")
        return super().parse_known_args(arguments, namespace)

    def _meant_by(self, name: str, value: str) -> str:
        """Return a suggestion of the flag that the unknown flag `name` may have meant, as the end
        of a sentence; "" if no flag is similar.
        """
        slo = name.removeprefix("--").replace("_", "-")
        if _SLO in self._option_string_actions and slo in NAMES:
            limit = value if value[:1].isdigit() else "SHARE" if slo in SHARES else "SECONDS"
            return f", write it as `{_SLO} {slo}={limit}`"
        return nearest(name, self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2.

        The usage text is not printed, because its screen of flags would hide the error.
        """
        told = message.removeprefix("argument ").replace(_NO_VALUE, "expected a value, got none")
        if told.startswith(_TOO_MANY):
            told = f"expected nothing more, got {told.removeprefix(_TOO_MANY)}"
        elif told.startswith(_MISSING):
            missing = told.removeprefix(_MISSING).split(", ")
            told = (
                f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} missing; "
                f"see `{self.prog} --help`"
            )
        self.exit(2, f"{self.prog}: {told}\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, argparse.ArgumentTypeError):
                raise  # the message is already one of ours
            raise argparse.ArgumentError(action, _expected(action, arg_string)) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            raise argparse.ArgumentError(action, _expected(action, value)) from None


def _expected(action: argparse.Action, value: Any) -> str:
    """Return "expected ..., got ..." for an argument with a wrong value, as part of an error."""
    choices = [choice for choice in map(str, action.choices or ()) if choice]
    numbers: dict[Any, str] = {int: "a whole number", float: "a number"}
    if choices:
        expected = " or ".join([", ".join(choices[:-1]), choices[-1]] if choices[1:] else choices)
    else:
        expected = numbers.get(action.type, "another value")
    return f"expected {expected}, got {str(value)!r}{nearest(str(value), choices)}"
