"""kwok, which plays the kubelets of nodes that do not exist; `make kwok` builds it."""

import sys
from typing import Final

from tests.go_program import GoProgram

KWOK: Final = GoProgram(name="kwok", package="sigs.k8s.io/kwok/cmd/kwok", version="v0.8.0")

if __name__ == "__main__":
    sys.exit(KWOK.command())
