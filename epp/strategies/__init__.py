"""Ideas of others, side by side: each a few small plugins and the configuration that names them.

A module is a family: what one project ships, or what rests on one idea. It may have `FILTERS`,
`SCORERS`, `PICKERS` and `INDEXES`, tuples of plugin classes, and has `STRATEGIES`. Like all plugins
these do no I/O and own neither clock nor dice; what they remember is in affinity indexes.
"""

from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

from epp.strategies import (
    added_time,
    aibrix,
    aibrix_preble,
    aibrix_vtc,
    arrival_rate,
    burst,
    dualmap,
    dynamo,
    early_blocks,
    expected_wait,
    filter_chain,
    infera,
    keyed_ring,
    kthena,
    kubeai,
    least_work,
    length_buckets,
    llm_d,
    load_balancing,
    manual_routing,
    outstanding_work,
    placement_map,
    preble,
    prefix_hash_ring,
    production_stack,
    prompt_blocks,
    radix_tree,
    ray_prefix_affinity,
    session,
    session_ring,
    simhash,
    smetric,
    smg_cache_aware,
    vllm_router,
    weighted_scores,
)
from epp.strategies.strategy import Strategy

FAMILIES: Final[tuple[ModuleType, ...]] = (
    added_time,
    aibrix,
    aibrix_preble,
    aibrix_vtc,
    arrival_rate,
    burst,
    dualmap,
    dynamo,
    early_blocks,
    expected_wait,
    filter_chain,
    infera,
    keyed_ring,
    kthena,
    kubeai,
    least_work,
    length_buckets,
    llm_d,
    load_balancing,
    manual_routing,
    outstanding_work,
    placement_map,
    preble,
    prefix_hash_ring,
    production_stack,
    prompt_blocks,
    radix_tree,
    ray_prefix_affinity,
    session,
    session_ring,
    simhash,
    smetric,
    smg_cache_aware,
    vllm_router,
    weighted_scores,
)  # fmt: skip
"""In the order in which tables show them."""


def plugin_classes(kind: str) -> Mapping[str, Any]:
    """Type name -> class, of all families; `kind` is FILTERS, SCORERS, PICKERS or INDEXES."""
    return {plugin.type_name: plugin for family in FAMILIES for plugin in getattr(family, kind, ())}


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {strategy.name: strategy for family in FAMILIES for strategy in family.STRATEGIES}
)
"""By name."""
