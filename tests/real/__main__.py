"""`make real`: a real vLLM behind Envoy and the picker; it is installed the first time."""

import os
import subprocess
import sys

from tests.chart.rendering import ROOT
from tests.real.vllm import LackingError, Place, install


def main() -> int:
    """pytest's exit code; 0 with a sentence where it cannot be had."""
    try:
        install(Place.of(os.environ), print)
    except LackingError as error:
        print(f"skipped: {error}")
        return 0
    except KeyboardInterrupt:
        return 130
    command = [sys.executable, "-m", "pytest", "-m", "real", "-n", "0", "-s", "tests/real"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
