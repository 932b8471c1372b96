"""The command `sim`; what it is made of is in `sim/commands.py`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from epp.reader_left import until_reader_leaves
from sim.interrupts import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of the simulator; the exit code."""
    return until_reader_leaves(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    try:
        # Importing it takes a second, in which a Ctrl-C is no traceback either.
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
