"""Entry point of `python -m sim.demo`, which `make demo` runs."""

import sys

from sim.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
