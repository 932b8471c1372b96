"""`python -m sim.demo`, which is what `make demo` runs."""

import sys

from sim.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
