"""Read the scheduler's state for one metrics page."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.candidates import Candidates
from epp.core.knowledge.hit_accuracy import Verdict
from epp.core.knowledge.pool import Standing
from epp.core.peers.exchange import PeerExchange
from epp.core.protocol.budget import BodyBudget
from epp.core.types import Seconds
from epp.plugins.rollout import RolloutScreener
from epp.shell.kubernetes.state import ClusterSnapshot
from epp.shell.operators.metrics.role_loads import role_loads
from epp.shell.operators.metrics.telemetry import PoolSnapshot
from epp.shell.process.pressure import MemoryPressure


def pool_snapshot(
    scheduler: Scheduler,
    pool_name: str,
    bodies: BodyBudget,
    pressure: MemoryPressure,
    cluster: ClusterSnapshot | None,
    now: Seconds,
    *,
    messages: Mapping[str, int] | None = None,
    peers: PeerExchange | None = None,
) -> PoolSnapshot:
    """Return the scheduler's state for a metrics page. It must be used and dropped within one
    synchronous step.

    `messages` counts gateways' messages by decoder. `peers` is None if this picker has no peers.
    """
    pool, accuracy = scheduler.pool, scheduler.accuracy
    compared = {slot: accuracy.comparison(slot) for slot, _ in pool.endpoints()}
    slots = np.array([slot for slot, _ in pool.endpoints()], dtype=np.int64)
    links = None if scheduler.settings.stages.prefill is None else scheduler.state.links
    return PoolSnapshot(
        pool=pool_name,
        candidates=Candidates(
            pool.columns,
            slots,
            now,
            affinities={},
        ),
        ready=list(scheduler.standings(now).values()).count(Standing.READY),
        set_aside=pool.set_aside_count(),
        roles=role_loads(
            Candidates(pool.columns, scheduler.pool.ready(None, now), now, affinities={})
        ),
        revision_shares=_revision_shares(scheduler, now),
        prefills_overdue=None
        if scheduler.settings.stages.prefill is None
        else scheduler.state.overdue_prefills.total,
        kv_link_bytes_per_s=None if links is None else links.bytes_per_s,
        kv_link_ignored=None if links is None else links.ignored,
        indexes=scheduler.indexes.standings(),
        held_body_bytes=bodies.held_bytes,
        held_body_bytes_max=bodies.bytes_max,
        memory_limit_bytes=pressure.limit_bytes,
        memory_pressure=pressure.level,
        load_reports={
            "read": scheduler.state.load_reports,
            "unread": scheduler.state.load_reports_unread,
        },
        rank_choices={
            choice.value: count for choice, count in scheduler.placements.rank_choices.items()
        },
        messages=messages or {},
        segments={"known": scheduler.segments.known, "new": scheduler.segments.new},
        hits={slot: one for slot, one in compared.items() if one is not None},
        hit_verdicts={verdict.value: 0 for verdict in Verdict}
        | Counter(accuracy.verdict(slot).value for slot in compared),
        hit_errors={side.value: errors for side, errors in accuracy.errors.items()},
        bytes_per_token=dict(accuracy.models()),
        latency_errors={}
        if scheduler.state.latency is None
        else {slot: scheduler.state.latency.errors_of(slot) for slot in slots.tolist()},
        answer_tokens=scheduler.answer_lengths.tokens,
        slowness=scheduler.outliers.slowness(),
        outliers=dict(scheduler.outliers.detected(now)),
        full=len(scheduler.full.by_slot),
        ejections={
            cause.value: count for cause, count in scheduler.outliers.ejection.total.items()
        },
        plugin_errors=dict.fromkeys(scheduler.settings.plugin_names, 0)
        | {failing.name: failing.failures for failing in scheduler.failures},
        cluster=cluster,
        peers=peers,
        shadow=None if scheduler.shadow is None else scheduler.shadow_totals,
    )


def _revision_shares(scheduler: Scheduler, now: Seconds) -> Mapping[str, float]:
    """Return the share of requests that each revision of the ready endpoints gets, by revision;
    {} without a screener of revisions.
    """
    pool, screen = scheduler.pool, scheduler.settings.stages.screen
    if screen is None:
        return {}
    screeners = [one.plugin for one in screen.filters]
    ready = [pool.endpoint_in(slot) for slot in pool.ready(None, now).tolist()]
    return {
        revision: share
        for screener in screeners
        if isinstance(screener, RolloutScreener)
        for revision, share in screener.shares(ready).items()
    }
