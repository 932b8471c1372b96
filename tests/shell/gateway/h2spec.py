"""h2spec, which is in no registry of Python packages; `make h2spec` builds it.

What it needs beside its own source is taken as its authors left it: it pins nothing.
"""

import sys
from typing import Final

from tests.go_program import GoProgram

H2SPEC: Final = GoProgram(
    name="h2spec", package="github.com/summerwind/h2spec/cmd/h2spec", version="v2.2.1+incompatible"
)
"""The newest that the proxy has."""

if __name__ == "__main__":
    sys.exit(H2SPEC.command())
