"""Builders of endpoints, requests and candidates for tests, with a default for everything that a
test does not set.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from epp.core.knowledge.candidates import Affinity, Candidates, Columns
from epp.core.knowledge.rendezvous import identity_hash
from epp.core.moment import Moment
from epp.core.prompt.request import InferenceRequest
from epp.core.types import AdapterReport, Endpoint

NOW_S: Final = 1_000.0
PREFIX: Final = "approx-prefix-cache-producer"


def endpoint(number: int = 0, **fields: Any) -> Endpoint:
    """Return the test endpoint with number `number`, whose address is 192.168.1.<number +
    1>:8000.
    """
    defaults = {
        "endpoint_id": f"uid-{number}:8000",
        "name": f"pod-{number}",
        "address": f"192.168.1.{number + 1}:8000",
    }
    return Endpoint(**(defaults | fields))


def request(**fields: Any) -> InferenceRequest:
    """Return a test request for `my-model`, without a prompt unless `prompts` is given.

    Fields of its `moment` are passed beside its own fields.
    """
    known = {name: fields.pop(name) for name in Moment.__struct_fields__ if name in fields}
    defaults: dict[str, Any] = {"request_id": "test-request-id", "model": "my-model"}
    defaults["moment"] = Moment(**known)
    return InferenceRequest(**(defaults | fields))


def loaded_adapters(*active: str, slots_max: int = 0) -> AdapterReport:
    """Return the report of LoRA adapters that an engine with `vllm:lora_requests_info`
    would give.
    """
    return AdapterReport(active=frozenset(active), slots_max=slots_max)


def resident_adapters(
    *,
    gpu: Collection[str] = (),
    cpu: Collection[str] = (),
    active: Collection[str] = (),
    pinned: Collection[str] = (),
    slots_max: int = 0,
) -> AdapterReport:
    """Return the report of LoRA adapters that an engine with series of their residency
    would give.
    """
    return AdapterReport(
        active=frozenset(active),
        slots_max=slots_max,
        resident_known=True,
        gpu=frozenset(gpu),
        cpu=frozenset(cpu),
        pinned=frozenset(pinned),
    )


def candidates(  # noqa: PLR0913  one argument per column
    n: int | None = None,
    *,
    waiting_requests: Sequence[float] | None = None,
    running_requests: Sequence[float] | None = None,
    kv_cache_usage: Sequence[float] | None = None,
    metrics_age_s: Sequence[float] | None = None,
    saturated: Sequence[bool] | None = None,
    inflight_requests: Sequence[int] | None = None,
    inflight_prefill_tokens: Sequence[float] | None = None,
    receiving_tokens: Sequence[float] | None = None,
    sending_tokens: Sequence[float] | None = None,
    link_bytes_per_s: Sequence[float] | None = None,
    unreported_requests: Sequence[int] | None = None,
    matched_blocks: Sequence[int] | None = None,
    total_blocks: int = 0,
    adapters: Sequence[AdapterReport | None] | None = None,
    labels: Sequence[Mapping[str, str]] | None = None,
    names: Sequence[str] | None = None,
    attributes: Sequence[Mapping[str, float]] | None = None,
    affinities: Mapping[str, Affinity] | None = None,
    block_tokens: int = 64,
    prompt_tokens: int = 0,
) -> Candidates:
    """Return test candidates in slots 0, 1, ... with the given columns, or `n` candidates if no
    column is given.

    A missing column is unknown if engines report it, and 0 if the picker counts it. Metrics are 0 s
    old unless `metrics_age_s` is given.
    """
    given = (
        waiting_requests, running_requests, kv_cache_usage, metrics_age_s, saturated,
        inflight_requests, inflight_prefill_tokens, receiving_tokens, sending_tokens,
        unreported_requests, matched_blocks, adapters, labels, names, attributes,
        link_bytes_per_s,
    )  # fmt: skip
    lengths = {len(column) for column in given if column is not None}
    if n is not None:
        lengths.add(n)
    assert len(lengths) == 1, f"columns of lengths {sorted(lengths)}"
    n = lengths.pop()

    columns = Columns()
    for slot in range(n):
        columns.add_slot()
        fields: dict[str, Any] = {"labels": labels[slot]} if labels else {}
        if names:
            fields["name"] = names[slot]
        made = columns.endpoints[slot] = endpoint(slot, **fields)
        columns.identities[slot] = identity_hash(made.endpoint_id)
        columns.set_adapters(slot, adapters[slot] if adapters else None)
        columns.set_attributes(slot, attributes[slot] if attributes else {})

    def fill(column: npt.NDArray[Any], values: Sequence[Any] | None, default: object) -> None:
        column[:n] = default if values is None else values

    fill(columns.waiting_requests, waiting_requests, math.nan)
    fill(columns.running_requests, running_requests, math.nan)
    fill(columns.kv_cache_usage, kv_cache_usage, math.nan)
    fill(columns.saturated, saturated, False)
    fill(columns.inflight_requests, inflight_requests, 0)
    fill(columns.unreported_requests, unreported_requests, 0)
    fill(columns.prefill_backlog_tokens, inflight_prefill_tokens, 0.0)
    fill(columns.receiving_tokens, receiving_tokens, 0.0)
    fill(columns.sending_tokens, sending_tokens, 0.0)
    fill(columns.link_bytes_per_s, link_bytes_per_s, math.nan)
    known_speeds = [one for one in link_bytes_per_s or () if not math.isnan(one)]
    if known_speeds:
        columns.pool_link_bytes_per_s = median(known_speeds)
    columns.prefill_drained_at_s[:n] = NOW_S
    columns.observed_at_s[:n] = NOW_S - np.array(metrics_age_s or [0.0] * n)

    known = dict(affinities or {})
    if matched_blocks is not None:
        known[PREFIX] = affinity(matched_blocks, total_blocks)
    return Candidates(
        columns,
        np.arange(n),
        NOW_S,
        affinities=known,
        prefix=PREFIX,
        block_tokens=block_tokens,
        prompt_tokens=prompt_tokens,
    )


def affinity(matched: Iterable[int], total: int = 1) -> Affinity:
    """Return the match of an affinity index for tests: `matched` blocks by endpoint slot, of
    `total` blocks.
    """
    return Affinity(np.array(list(matched), dtype=np.int64), total)
