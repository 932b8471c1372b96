"""Strategies of other routers: each is a few small plugins and the configuration that names them.

A module is a family: the strategies of one project, or those of one idea. It may have `FILTERS`,
`SCORERS`, `PICKERS` and `INDEXES`, tuples of plugin classes, and it has `STRATEGIES`. Like all
plugins, these do no I/O and use neither clock nor random numbers of their own; their state is in
affinity indexes. Homing finds them by the entry points of pyproject.toml, like plugins of any
distribution.
"""

from types import ModuleType
from typing import Any, Final

from epp.plugins.contract import Strategy
from homing_rivals import (
    aibrix,
    aibrix_vtc,
    dualmap,
    dynamo,
    early_blocks,
    filter_chain,
    infera,
    kthena,
    kubeai,
    least_work,
    llm_d,
    load_balancing,
    preble,
    production_stack,
    prompt_blocks,
    radix_tree,
    ray_prefix_affinity,
    session,
    simhash,
    smetric,
    smg_cache_aware,
)

FAMILIES: Final[tuple[ModuleType, ...]] = (
    aibrix,
    aibrix_vtc,
    dualmap,
    dynamo,
    early_blocks,
    filter_chain,
    infera,
    kthena,
    kubeai,
    least_work,
    llm_d,
    load_balancing,
    preble,
    production_stack,
    prompt_blocks,
    radix_tree,
    ray_prefix_affinity,
    session,
    simhash,
    smetric,
    smg_cache_aware,
)  # fmt: skip
"""Modules of this distribution in the order in which tables show their strategies."""

STRATEGIES: Final[tuple[Strategy, ...]] = tuple(
    strategy for family in FAMILIES for strategy in family.STRATEGIES
)
PLUGINS: Final[tuple[type[Any], ...]] = tuple(
    plugin
    for family in FAMILIES
    for kind in ("FILTERS", "SCORERS", "PICKERS", "INDEXES")
    for plugin in getattr(family, kind, ())
)
"""All plugin classes of this distribution; the entry points of `homing.plugins` name each
of them.
"""
