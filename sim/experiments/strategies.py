"""The command `sim strategies`: list routing strategies by name, or print the configuration of
one.
"""

import argparse
import json
from typing import Final

from epp.configuration.document import nearest
from sim.cluster.built_in import (
    RIVALS_MISSING,
    configurations,
    rivals_installed,
    strategies,
)
from sim.cluster.policies import BASELINES, PolicyNameError, built_in

_DEFAULT_IDEA: Final = "The default configuration of epp serve."


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim strategies`."""
    parser = commands.add_parser(
        "strategies",
        help="list the names that --config accepts, or print a strategy's configuration",
        description="Print all strategies in a table, or the EndpointPickerConfig of NAME.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="strategy whose configuration to print"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_run)


def idea_of(name: str) -> str:
    """Return one sentence that describes the routing strategy with this name."""
    strategy = strategies().get(name)
    if strategy is not None:
        return strategy.idea
    if name in BASELINES:
        return "A baseline without scraped metrics and without a prefix index."
    return _DEFAULT_IDEA


def _omissions(name: str) -> str:
    strategy = strategies().get(name)
    return "" if strategy is None else strategy.omissions


def _told(name: str) -> dict[str, str]:
    return {"idea": idea_of(name), "omissions": _omissions(name)}


def _run(options: argparse.Namespace) -> int:
    if options.name is None:
        names = built_in()
        if options.json:
            print(json.dumps({name: _told(name) for name in names}, indent=2))
            return 0
        width = max(map(len, names))
        for name in names:
            omissions = _omissions(name)
            left_out = f" Leaves out: {omissions}." if omissions else ""
            print(f"{name:{width}}  {idea_of(name)}{left_out}")
        return 0
    if options.name in BASELINES:
        raise PolicyNameError(
            f"{options.name} is a baseline of the simulator and has no configuration"
        )
    text = configurations().get(options.name)
    if text is None:
        hint = nearest(options.name, built_in())
        more = "" if rivals_installed() else f"; {RIVALS_MISSING}"
        raise PolicyNameError(
            f"{options.name} is not a strategy{hint}; sim strategies lists them{more}"
        )
    if options.json:
        print(json.dumps({"name": options.name, **_told(options.name), "config": text}))
        return 0
    print(text, end="")
    return 0
