"""Construction of the candidates of a past decision from the numbers that were stored with it."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from epp.core.knowledge.candidates import NUMBERS, Affinity, Candidates, Columns
from epp.core.knowledge.rendezvous import identity_hash
from epp.core.types import AdapterReport, Endpoint

_PREFIX: Final = "prefix"
_INFLIGHT_REQUESTS: Final = NUMBERS.index("inflight_requests")
_INFLIGHT_CONTEXT: Final = NUMBERS.index("inflight_context_tokens")
_INFLIGHT_PREFILL: Final = NUMBERS.index("inflight_prefill_tokens")
_MATCHED: Final = NUMBERS.index("matched_blocks")


def numbers_before(
    numbers: Sequence[float], *, prompt_tokens: int, prefill_tokens: float, matched_blocks: int
) -> list[float]:
    """Return `numbers`, the `NUMBERS` of the chosen endpoint after a decision, as the scorers saw
    them before it: without the placed request.

    The request has `prompt_tokens`, of which `prefill_tokens` were to be computed; `matched_blocks`
    of its blocks were cached.
    """
    before = [*numbers]
    before[_INFLIGHT_REQUESTS] -= 1
    before[_INFLIGHT_CONTEXT] -= prompt_tokens
    # An unknown number stays unknown, because it is the first argument.
    before[_INFLIGHT_PREFILL] = max(before[_INFLIGHT_PREFILL] - prefill_tokens, 0.0)
    before[_MATCHED] = matched_blocks
    return before


def rebuilt_candidates(
    endpoints: Sequence[Endpoint],
    numbers: Sequence[Sequence[float]],
    *,
    total_blocks: int,
    block_tokens: int,
    prompt_tokens: int,
    adapters: Sequence[AdapterReport | None] = (),
) -> Candidates:
    """Return candidates with the values in `numbers`, which has a row in the order of `NUMBERS` for
    each of `endpoints`.

    `adapters` are the adapter reports of the endpoints; if empty, none was reported. All other
    values are those of an unknown endpoint: it is not saturated, and the default index is the only
    one.
    """
    columns = Columns()
    matched = np.zeros(len(endpoints), dtype=np.int64)
    for endpoint, row in zip(endpoints, numbers, strict=True):
        told = dict(zip(NUMBERS, row, strict=True))
        slot = columns.add_slot()
        columns.endpoints[slot] = endpoint
        columns.identities[slot] = identity_hash(endpoint.endpoint_id)
        columns.set_load(
            slot, told["waiting_requests"], told["running_requests"], told["kv_cache_usage"]
        )
        columns.set_kv_capacity(slot, told["kv_capacity_tokens"])
        columns.observed_at_s[slot] = -told["metrics_age_s"]
        columns.inflight_requests[slot] = int(told["inflight_requests"])
        columns.inflight_context_tokens[slot] = int(told["inflight_context_tokens"])
        columns.prefill_backlog_tokens[slot] = told["inflight_prefill_tokens"]
        columns.prefill_tokens_per_s[slot] = told["prefill_tokens_per_s"]
        matched[slot] = int(told["matched_blocks"])
    for slot, report in enumerate(adapters):
        columns.set_adapters(slot, report)
    return Candidates(
        columns,
        np.arange(len(endpoints), dtype=np.int64),
        0.0,
        affinities={_PREFIX: Affinity(matched, total_blocks)},
        prefix=_PREFIX,
        block_tokens=block_tokens,
        prompt_tokens=prompt_tokens,
    )
