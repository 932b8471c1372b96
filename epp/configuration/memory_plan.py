"""The division of the picker's memory limit.

Three parts share the limit: bodies of unanswered requests, the prefix indexes, and the process
itself. The rest is for temporary memory of requests: a body takes two to three times its length
while it is read.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from epp.core.knowledge.index import AffinityIndexSettings

PROCESS_BYTES: Final = 128 * 2**20
"""Memory in bytes that the picker's process is assumed to need: 110 MB for interpreter and
libraries, 18 MB for decisions on debug pages.
"""
INDEX_BYTES_MIN: Final = 8 * 2**20
"""Minimum memory in bytes of all prefix indexes: the prefixes of some thousand prompts.

Less is useless for routing.
"""
_INDEX_SHARE: Final = 2


class MemoryPlan(Struct, frozen=True, kw_only=True):
    limit_bytes: int
    bodies_bytes: int
    """Maximum bytes of the request bodies that all streams together store before they are answered.
    """
    indexes_bytes: int
    """Maximum bytes of all indexes whose memory can be limited, together. The configuration may set
    lower limits.
    """


def memory_plan(limit_bytes: int, bodies_bytes: int) -> MemoryPlan:
    """Return the division of `limit_bytes`: the prefix indexes get half of what the process and the
    bodies leave, but at least `INDEX_BYTES_MIN`.
    """
    left_bytes = limit_bytes - PROCESS_BYTES - bodies_bytes
    return MemoryPlan(
        limit_bytes=limit_bytes,
        bodies_bytes=bodies_bytes,
        indexes_bytes=max(INDEX_BYTES_MIN, left_bytes // _INDEX_SHARE),
    )


def fitted(
    indexes: Mapping[str, AffinityIndexSettings], plan: MemoryPlan
) -> dict[str, AffinityIndexSettings]:
    """Return the settings in `indexes`. Those whose memory can be limited share
    `plan.indexes_bytes` evenly; an index with a lower limit of its own keeps it.
    """
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
