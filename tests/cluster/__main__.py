"""Kubernetes of one node on this machine: `make cluster` starts it, `make cluster-down` ends it.

`python -m tests.cluster up|down|load|gateway|test|brief|page|env|kept`. Nothing of it reaches
another address. `load` gives it images of the tree anew, `gateway` puts Envoy Gateway into it,
`test` runs the tests that need it and takes it away if it did not run before, `brief` runs only
those that need neither minutes nor a gateway, `page` puts what they counted into
docs/availability.md, `env` prints what makes its `kubectl` and `helm` ready to type, `kept` only
says whether it could come up at once.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from docs import reference
from tests.apiserver.binaries import BinariesError
from tests.chart.rendering import ROOT
from tests.chart.tools import HELM_3, HELM_4, ToolsError, tools_of
from tests.cluster import gateway_class
from tests.cluster.conftest import ALONE, MINUTES
from tests.cluster.daemons import INSIDE
from tests.cluster.node import Node, missing
from tests.cluster.place import ClusterError, Place
from tests.cluster.rows import Rows

_TYPED = """\
The cluster is ready. To type commands:

  eval "$(python -m tests.cluster env)"
  kubectl get pods -A
"""
_PYTEST: Final = (sys.executable, "-m", "pytest", "tests/cluster")
_PASSES: Final = (
    ("-m", f"cluster and not {ALONE}", "-n", "2", "--dist", "loadgroup"),
    ("-m", f"cluster and {ALONE}", "-n", "0"),
)
"""Arguments of pytest for each pass.

Most of what tests do is to wait for streams: two run at a time, where they leave each other alone.
"""
_BRIEF: Final = (
    (
        "-m",
        f"cluster and not gateway and not {ALONE} and not {MINUTES}",
        *("-n", "2", "--dist", "loadgroup"),
    ),
)


class LackingError(Exception):
    """Error of an action that needs what this machine lacks; its message is one sentence."""


def _up(node: Node) -> None:
    node.up()
    print(_TYPED)


def _test(node: Node, passes: Sequence[Sequence[str]] = _PASSES) -> None:
    with node.kept_up():
        ended = [subprocess.run([*_PYTEST, *one], cwd=ROOT, check=False) for one in passes]
    if any(one.returncode for one in ended):
        raise ClusterError("tests in the cluster failed: what pytest said stands above")


def _gateway(node: Node) -> None:
    node.up()
    gateway_class.install(node)
    print("Envoy Gateway is there: its class of gateways is", gateway_class.CLASS)


def _page(node: Node) -> None:
    Rows(node.place.root / "rows").write(ROOT / "docs/cluster.json")
    reference.main()


def _kept(node: Node) -> None:
    if not node.built:
        raise LackingError("no Kubernetes is built here, `make cluster` does it")


def _env(node: Node) -> None:
    place = node.place
    inside = shlex.join(INSIDE)
    helm_3, helm_4 = tools_of(HELM_3), tools_of(HELM_4)
    print(
        f"export KUBECONFIG={shlex.quote(str(place.kubeconfig))}",
        f'kubectl() {{ {inside} {helm_3}/kubectl "$@"; }}',
        f'helm() {{ {inside} {helm_3}/helm "$@"; }}',
        f'helm4() {{ {inside} {helm_4}/helm "$@"; }}',
        f'inside() {{ {inside} "$@"; }}',
        sep="\n",
    )


_ACTIONS: Final[Mapping[str, Callable[[Node], None]]] = {
    "up": _up,
    "down": Node.down,
    "load": Node.load,
    "gateway": _gateway,
    "test": _test,
    "brief": partial(_test, passes=_BRIEF),
    "page": _page,
    "env": _env,
    "kept": _kept,
}


def main(arguments: Sequence[str]) -> int:
    """Return 0, 1 if the action failed, 2 if this machine lacks something, 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("what", choices=list(_ACTIONS))
    options = parser.parse_args(arguments)
    place = Place.of(os.environ)
    began_s = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", file=sys.stderr, flush=True)

    node = Node(place, os.environ, tell)
    try:
        if options.what != "env" and (lacking := missing()):
            raise LackingError(lacking)
        _ACTIONS[options.what](node)
    except LackingError as error:
        print(error, file=sys.stderr)
        return 2
    except (BinariesError, ClusterError, ToolsError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # What it had started by then it has ended.
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
