"""What of the memory limit goes where.

One limit, three that share it: bodies that are not answered yet, the prefix indexes, and a process
that is there before the first request. What is left is for what comes and goes with a request: a
body that is read takes two to three times its length.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from epp.core.knowledge.index import AffinityIndexSettings

PROCESS_BYTES: Final = 128 * 2**20
"""Interpreter and libraries 110 MB, the decisions that the debug pages keep 18 MB."""
INDEX_BYTES_MIN: Final = 8 * 2**20
"""Prefixes of some thousand prompts. With less there is no prefix to route by."""
_INDEX_SHARE: Final = 2


class MemoryPlan(Struct, frozen=True, kw_only=True):
    limit_bytes: int
    bodies_bytes: int
    """All streams together may hold so much of unfinished bodies."""
    indexes_bytes: int
    """All prefix indexes together may take so much, if the configuration allows it."""


def memory_plan(limit_bytes: int, bodies_bytes: int) -> MemoryPlan:
    """Half of what process and bodies leave is for the indexes."""
    left_bytes = limit_bytes - PROCESS_BYTES - bodies_bytes
    return MemoryPlan(
        limit_bytes=limit_bytes,
        bodies_bytes=bodies_bytes,
        indexes_bytes=max(INDEX_BYTES_MIN, left_bytes // _INDEX_SHARE),
    )


def fitted(
    indexes: Mapping[str, AffinityIndexSettings], plan: MemoryPlan
) -> dict[str, AffinityIndexSettings]:
    """`indexes`, each that limits its memory with at most its even part of the plan."""
    count = sum(settings.abilities.limits_memory for settings in indexes.values())
    return {
        name: _fitted(settings, plan.indexes_bytes // count if count else 0)
        for name, settings in indexes.items()
    }


def _fitted(settings: AffinityIndexSettings, bytes_max: int) -> AffinityIndexSettings:
    limited: Any = settings
    if not settings.abilities.limits_memory or limited.memory_max_bytes <= bytes_max:
        return settings
    fitting: AffinityIndexSettings = msgspec.structs.replace(limited, memory_max_bytes=bytes_max)
    return fitting
