"""For tests of plugins: what every plugin must keep to, and values to test the rest with.

`check_plugin` is the contract that Homing's own plugins pass. It draws its cases from a seed, with
nothing but the standard library and numpy: the same cases everywhere, and no test framework to
install. `endpoint`, `request` and `candidates` make values with a default for all that a test does
not care about.
"""

from epp.testing.builders import (
    affinity,
    candidates,
    endpoint,
    loaded_adapters,
    request,
    resident_adapters,
)
from epp.testing.churn import Churn, churn
from epp.testing.contract import ContractError, check_plugin

__all__ = [
    "Churn",
    "ContractError",
    "affinity",
    "candidates",
    "check_plugin",
    "churn",
    "endpoint",
    "loaded_adapters",
    "request",
    "resident_adapters",
]
