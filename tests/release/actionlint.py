"""actionlint, which is in no registry of Python packages as a binary; `make actionlint` builds it."""

import sys
from typing import Final

from tests.go_program import GoProgram

ACTIONLINT: Final = GoProgram(
    name="actionlint", package="github.com/rhysd/actionlint/cmd/actionlint", version="v1.7.7"
)

if __name__ == "__main__":
    sys.exit(ACTIONLINT.command())
