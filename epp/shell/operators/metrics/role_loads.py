"""The load of the endpoints of each role, by which autoscalers scale roles separately."""

from collections.abc import Mapping
from typing import Final

import numpy as np
from msgspec import Struct

from epp.core.knowledge.candidates import Candidates, Floats
from epp.plugins.filters import ROLE_LABEL, DecodeRole, EncodeRole, PrefillRole

OTHER: Final = "other"
"""Role in the metrics of endpoints whose label has an unknown value."""
_ROLES: Final = frozenset(
    role for kind in (DecodeRole, PrefillRole, EncodeRole) for role in kind.roles if role
)


class RoleLoad(Struct, frozen=True, kw_only=True):
    """The load of the ready endpoints of one role. A mean is None if no endpoint reports the value."""

    endpoints: int
    waiting_mean: float | None
    running_mean: float | None
    kv_cache_usage_mean: float | None
    inflight_requests: int
    """Number of requests in flight from this picker and its peers at all ready endpoints of the
    role.
    """
    inflight_prefill_tokens: float
    """Estimated number of uncached prompt tokens that are not yet prefilled at all ready endpoints
    of the role.
    """


def role_loads(ready: Candidates) -> Mapping[str, RoleLoad]:
    """Return the load by value of the role label, of those `ready` endpoints that have the label."""
    positions: dict[str, list[int]] = {}
    for position, labels in enumerate(ready.labels):
        if ROLE_LABEL in labels:
            role = labels[ROLE_LABEL]
            positions.setdefault(role if role in _ROLES else OTHER, []).append(position)
    return {role: _load(ready.take(np.array(at))) for role, at in sorted(positions.items())}


def _load(candidates: Candidates) -> RoleLoad:
    return RoleLoad(
        endpoints=len(candidates),
        waiting_mean=_mean(candidates.waiting_requests),
        running_mean=_mean(candidates.running_requests),
        kv_cache_usage_mean=_mean(candidates.kv_cache_usage),
        inflight_requests=int(candidates.inflight_requests.sum()),
        inflight_prefill_tokens=float(candidates.inflight_prefill_tokens.sum()),
    )


def _mean(column: Floats) -> float | None:
    known = column[~np.isnan(column)]
    return float(known.mean()) if len(known) else None
