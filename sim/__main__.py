"""Entry point of the command `sim`; `sim/commands.py` has its subcommands."""

import sys
from collections.abc import Sequence
from importlib import import_module

from epp.reader_left import until_reader_leaves
from sim.interrupts import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `sim` with `arguments` (None for those of the process) and return the exit
    code.
    """
    return until_reader_leaves(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    try:
        # The import takes a second, during which Ctrl-C must not print a traceback either.
        commands = import_module("sim.commands")
        code: int = commands.run(arguments)
    except ModuleNotFoundError as problem:
        print(f"sim: {problem.name} is missing; install homing-epp[sim]", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sim: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
