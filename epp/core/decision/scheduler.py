"""The straight line, and the verbs that both shells drive.

A shell calls `replace`, `observe`, `observe_failure`, `schedule`, `first_output`, `reschedule`,
`complete`, `configure` and `tick`, and nothing else. Every verb runs to completion and is told
`now` where it matters, so the same calls with the same seed give the same decisions, in production
and in the simulator.
"""

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
from msgspec import Struct, field

from epp.core.decision.plugin import MarksResponses
from epp.core.decision.profile import Kept, SchedulingProfile, Scored
from epp.core.knowledge.candidates import Affinity, Candidates
from epp.core.knowledge.index import AffinityIndex, AffinityIndexSettings
from epp.core.knowledge.inflight import Ending, InflightLedger, Lease, Outcome
from epp.core.knowledge.pool import EndpointPool, Standing
from epp.core.knowledge.saturation import UtilizationDetector
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, EndpointMetrics, Refusal, RefusalReason, Seconds


class SchedulerSettings(Struct, frozen=True, kw_only=True):
    """All that decides. Replaced as a whole by `Scheduler.configure`."""

    profile: SchedulingProfile
    indexes: Mapping[str, AffinityIndexSettings] = field(default_factory=dict)
    """By the name of the producer in the configuration, in the order in which they match."""
    prefix: str = ""
    """Which of `indexes` fills `matched_blocks`; "" if none does."""
    block_tokens: int = 64
    """Tokens in a block of that index."""
    saturation: UtilizationDetector = field(default_factory=UtilizationDetector)
    metrics_staleness_s: Seconds = 2.0
    """Endpoints with older metrics rank below every fresh one."""
    prefill_tokens_per_s: float = 15_928.0
    """`peakPrefillThroughput` of the field, until better is known."""
    fallback_endpoints_max: int = 0
    lease_ttl_without_response_phase_s: Seconds = 60.0


class Decision(Struct, frozen=True, kw_only=True):
    """Where a request goes, and why."""

    number: int
    """Counts decisions of this scheduler from 1."""
    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...]
    lease: Lease
    matched_blocks: int
    """Leading full blocks of the prompt that `endpoint` is believed to hold."""
    total_blocks: int
    block_tokens: int
    ready: int
    """Endpoints that were ready and in the subset, before filters."""
    eliminated: Mapping[str, int]
    """Name of the filter -> how many endpoints it dropped."""
    candidates: Candidates
    """Those that were scored."""
    picked: int
    """Position of `endpoint` among them."""
    scorers: tuple[str, ...]
    scored: Scored
    """Its rows are those of `scorers`, its columns those of `candidates`."""
    marking: tuple[MarksResponses, ...] = ()
    """The filters and scorers that set headers on the response."""

    def response_headers(self, served: str) -> dict[str, str]:
        """Headers to set on the response, e.g. the session token.

        `served`: the address that the gateway says it is from, "" if it does not say.
        """
        found: dict[str, str] = {}
        for plugin in self.marking:
            found.update(plugin.response_headers(self.lease.request, self.endpoint, served))
        return found


class Scheduler:
    """One pool of endpoints, one profile, the indexes it reads and the work in flight."""

    def __init__(self, settings: SchedulerSettings, *, seed: int) -> None:
        self.settings = settings
        self.seed = seed
        self.pool = EndpointPool()
        self.ledger = InflightLedger(self.pool.columns, settings.prefill_tokens_per_s)
        self.indexes: dict[str, AffinityIndex] = {
            name: index.open() for name, index in settings.indexes.items()
        }
        self.decisions = 0
        self._random = Random(f"{seed}:picker")  # noqa: S311  dice, not secrets
        self._read_profile()

    def __repr__(self) -> str:
        return (
            f"<Scheduler [{self.decisions} decisions, {self.ledger.open_leases} open leases, "
            f"seed {self.seed}] {self.pool!r}>"
        )

    def replace(self, endpoints: Sequence[Endpoint], now: Seconds) -> None:
        """The pool is now `endpoints`; what left or restarted is forgotten."""
        for slot in self.pool.replace(endpoints, now):
            self._forget(slot)

    def observe(self, slot: int, metrics: EndpointMetrics, now: Seconds) -> None:
        """Take in a good scrape of the endpoint in `slot`."""
        if self.pool.observe(slot, metrics, now):
            self._forget(slot)
        if metrics.blocks_total and metrics.block_size_tokens:
            for index in self.indexes.values():
                index.resize(slot, metrics.blocks_total, metrics.block_size_tokens)

    def observe_failure(self, slot: int, *, answered: bool) -> None:
        """The endpoint in `slot` was scraped in vain. Not `answered`: nobody was there in time."""
        self.pool.observe_failure(slot, answered=answered)

    def schedule(self, request: InferenceRequest, now: Seconds) -> Decision | Refusal:
        """Choose an endpoint for `request` and assume from now on that it goes there."""
        slots = self.pool.ready(request.subset, now)
        if not len(slots):
            return self._nobody_ready(request)

        affinities = {
            name: index.match(request, len(self.pool.columns), now)
            for name, index in self.indexes.items()
        }
        candidates = self._candidates(slots, affinities, request, now)
        if request.priority < 0 and self.settings.saturation.saturation(candidates) >= 1.0:
            return _saturated(f"the pool is saturated and priority {request.priority} may be shed")

        profile = self.settings.profile
        kept = profile.filter(request, candidates)
        if not len(kept.candidates):
            return _nobody_left(kept, len(slots))
        ranked, eliminated = self._fresh_first(kept, now)
        scored = profile.score(request, ranked)
        picked = profile.pick(scored.total, ranked, self._random, self.decisions)
        return self._assume(request, ranked, scored, picked.tolist(), len(slots), eliminated, now)

    def first_output(self, lease: Lease, now: Seconds) -> None:
        """A first chunk of the answer was seen: the prompt of `lease` is prefilled."""
        self.ledger.first_output(lease, now)

    def reschedule(self, lease: Lease, served: str, now: Seconds) -> None:
        """The gateway says that the endpoint at `served` ("ip:port") serves the request.

        The index entries and the lease move there; if no endpoint of the pool has that address,
        they end.
        """
        slot = self.pool.slot_at(served)
        if lease.slot < 0 or slot == lease.slot:
            return
        request = lease.request
        for name, index in self.indexes.items():
            kept = lease.matched_blocks if name == self.settings.prefix else 0
            index.retract(request, lease.slot, kept, now)
        if slot is None:
            self.ledger.close(lease, now)
            return
        matched = 0
        for name, index in self.indexes.items():
            if name == self.settings.prefix:
                matched = int(index.match(request, len(self.pool.columns), now).matched[slot])
            index.record(request, slot, now)
        lease.matched_blocks = matched
        uncached = max(0.0, request.prompt_tokens - matched * self.settings.block_tokens)
        self.ledger.move(lease, slot, uncached, now)

    def complete(self, lease: Lease, outcome: Outcome, now: Seconds) -> Endpoint | None:
        """The request ended, one way or another; a second call does nothing.

        Returns the endpoint if this outcome is one failure too many and sets it aside.
        """
        if lease.slot < 0:
            return None
        set_aside = None
        if (
            outcome.status is not None
            and self.ledger.is_live(lease)
            and self.pool.responded(lease.slot, outcome.status, now, by_gateway=outcome.by_gateway)
        ):
            set_aside = self._endpoint(lease.slot)
        if outcome.ending is Ending.UNSEEN:
            self.ledger.close_later(lease, now, self.settings.lease_ttl_without_response_phase_s)
        else:
            self.ledger.close(lease, now)
        return set_aside

    def configure(self, settings: SchedulerSettings, now: Seconds) -> list[str]:
        """Decide by `settings` from the next request on.

        Indexes that can take their new settings keep what they know; the names of those that had
        to start anew are returned. Pool, leases and counters stay.
        """
        restarted: list[str] = []
        indexes: dict[str, AffinityIndex] = {}
        for name, index_settings in settings.indexes.items():
            known = self.indexes.get(name)
            if known is None or not index_settings.adopt(known):
                restarted.append(name)
                known = index_settings.open()
            indexes[name] = known
        self.indexes = indexes
        self.settings = settings
        self.ledger.prefill_tokens_per_s = settings.prefill_tokens_per_s
        self._read_profile()
        return restarted

    def standings(self, now: Seconds) -> dict[int, Standing]:
        """Slot -> whether its endpoint is among those that get work first, and if not, why not."""
        return self.pool.standings(now, self.settings.metrics_staleness_s)

    def tick(self, now: Seconds) -> None:
        """Bounded housekeeping, about once a second."""
        self.ledger.close_due(now)
        for index in self.indexes.values():
            index.expire(now)

    def _read_profile(self) -> None:
        """What every decision would otherwise ask the profile again."""
        profile = self.settings.profile
        self._scorer_names = tuple(scorer.name for scorer in profile.scorers)
        asked = (
            *(named.plugin for named in profile.filters),
            *(scorer.plugin for scorer in profile.scorers),
        )
        self._marking = tuple(plugin for plugin in asked if isinstance(plugin, MarksResponses))

    def _candidates(
        self,
        slots: np.ndarray[tuple[int], np.dtype[np.int64]],
        affinities: Mapping[str, Affinity],
        request: InferenceRequest,
        now: Seconds,
    ) -> Candidates:
        prefix = affinities.get(self.settings.prefix)
        request.cold = prefix is None or not prefix.matched[prefix.matched.argmax()]
        return Candidates(
            self.pool.columns,
            slots,
            now,
            affinities=affinities,
            prefix=self.settings.prefix,
            block_tokens=self.settings.block_tokens,
            prompt_tokens=request.prompt_tokens,
            prefill_tokens_per_s=self.settings.prefill_tokens_per_s,
        )

    def _fresh_first(self, kept: Kept, now: Seconds) -> tuple[Candidates, dict[str, int]]:
        """Leave out who is stale while anybody is fresh, and who is unreachable while anybody is not."""
        if self.pool.all_observed_since(now - self.settings.metrics_staleness_s):
            return kept.candidates, kept.eliminated
        unreachable = self.pool.columns.unreachable[kept.candidates.slot]
        stale = kept.candidates.metrics_age_s > self.settings.metrics_staleness_s
        first = ~(stale | unreachable)
        if not first.any():
            first = ~unreachable
        if first.all() or not first.any():
            return kept.candidates, kept.eliminated
        eliminated = dict(kept.eliminated)
        for name, dropped in (
            ("stale-metrics", stale & ~unreachable & ~first),
            ("unreachable", unreachable),
        ):
            if dropped.any():
                eliminated[name] = int(np.count_nonzero(dropped))
        return kept.candidates.take(first), eliminated

    def _assume(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        scored: Scored,
        picked: list[int],
        ready: int,
        eliminated: dict[str, int],
        now: Seconds,
    ) -> Decision:
        """Record the choice in the same step that makes it, so that the next one sees it."""
        first = picked[0]
        slot = int(candidates.slot[first])
        matched, total = candidates.prefix_match(first)
        uncached = max(0.0, float(request.prompt_tokens - matched * self.settings.block_tokens))
        lease = self.ledger.open(
            request, slot, matched_blocks=matched, prefill_tokens=uncached, now=now
        )
        for index in self.indexes.values():
            index.record(request, slot, now)
        request.drop_prompts()
        self.decisions += 1
        return Decision(
            number=self.decisions,
            endpoint=self._endpoint(slot),
            fallbacks=self._fallbacks(candidates, scored, picked),
            lease=lease,
            matched_blocks=matched,
            total_blocks=total,
            block_tokens=self.settings.block_tokens,
            ready=ready,
            eliminated=eliminated,
            candidates=candidates,
            picked=first,
            scorers=self._scorer_names,
            scored=scored,
            marking=self._marking,
        )

    def _fallbacks(
        self, candidates: Candidates, scored: Scored, picked: list[int]
    ) -> tuple[Endpoint, ...]:
        """What the picker named after the first, then the best of the rest."""
        wanted = self.settings.fallback_endpoints_max
        if not wanted:
            return ()
        order = picked[1:] + np.argsort(-scored.total, kind="stable").tolist()
        others = list(dict.fromkeys(at for at in order if at != picked[0]))
        return tuple(self._endpoint(int(candidates.slot[at])) for at in others[:wanted])

    def _endpoint(self, slot: int) -> Endpoint:
        endpoint = self.pool.columns.endpoints[slot]
        assert endpoint is not None, f"slot {slot} is empty"
        return endpoint

    def _forget(self, slot: int) -> None:
        self.ledger.forget(slot)
        for index in self.indexes.values():
            index.forget(slot)

    def _nobody_ready(self, request: InferenceRequest) -> Refusal:
        members = len(self.pool)
        where = "" if request.subset is None else " in the subset that the gateway allows"
        return Refusal(
            reason=RefusalReason.NO_ENDPOINTS,
            status=503,
            message=f"no endpoint{where} is ready: 0 of {members}",
        )


def _saturated(message: str, eliminated: Mapping[str, int] | None = None) -> Refusal:
    return Refusal(
        reason=RefusalReason.SATURATED, status=429, message=message, eliminated=eliminated or {}
    )


def _nobody_left(kept: Kept, ready: int) -> Refusal:
    dropped = ", ".join(f"{count} by {name}" for name, count in kept.eliminated.items())
    message = f"no endpoint is left: 0 of {ready} after dropping {dropped}"
    if kept.shed_by:
        return _saturated(message, kept.eliminated)
    return Refusal(
        reason=RefusalReason.NO_ENDPOINTS,
        status=503,
        message=message,
        eliminated=kept.eliminated,
    )
