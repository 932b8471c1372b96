"""Ideas of others, side by side: each a few small plugins and the configuration that names them.

A module is a family: what one project ships, or what rests on one idea. It may have `FILTERS`,
`SCORERS`, `PICKERS` and `INDEXES`, tuples of plugin classes, and has `STRATEGIES`. Like all plugins
these do no I/O and own neither clock nor dice; what they remember is in affinity indexes.
"""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

from epp.strategies import (
    aibrix,
    aibrix_preble,
    aibrix_vtc,
    early_blocks,
    keyed_ring,
    kthena,
    kubeai,
    least_work,
    load_balancing,
    manual_routing,
    prompt_blocks,
    session,
    session_ring,
)
from epp.strategies.strategy import Strategy

FAMILIES: Final[tuple[ModuleType, ...]] = (
    aibrix,
    aibrix_preble,
    aibrix_vtc,
    early_blocks,
    keyed_ring,
    kthena,
    kubeai,
    least_work,
    load_balancing,
    manual_routing,
    prompt_blocks,
    session,
    session_ring,
)  # fmt: skip
"""In the order in which tables show them."""


def plugin_classes(kind: str) -> Mapping[str, Any]:
    """Type name -> class, of all families; `kind` is FILTERS, SCORERS, PICKERS or INDEXES."""
    return {plugin.type_name: plugin for family in FAMILIES for plugin in getattr(family, kind, ())}


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {strategy.name: strategy for family in FAMILIES for strategy in family.STRATEGIES}
)
"""By name."""
