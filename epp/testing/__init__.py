"""Test support for authors of plugins: a check of the contract that every plugin must meet, and
builders for test values.

`check_plugin` checks the contract that Homing's own plugins meet. It draws its cases from a seed
and needs nothing beside Homing and its dependencies. The cases are the same everywhere, and no test
framework is needed.

`endpoint`, `request` and `candidates` build values with a default for everything that a test does
not set.
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
