"""A second profile that judges decisions, all or a share of them, and acts on none.

It sees what the acting profile sees, at the same instant: the same candidates, the same indexes, the
same work in flight. So what it tells is where this one request would have gone, not what the pool
would look like had all gone there; for that there is the simulator.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

from msgspec import Struct

from epp.core.decision.failures import PluginFailures
from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.profile import Kept, SchedulingProfile, Scored
from epp.core.knowledge.candidates import Candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint

AGREED: Final = "agreed"
DIFFERED: Final = "differed"
NOBODY: Final = "nobody"
"""Its filters left no endpoint."""
FAILED: Final = "failed"
"""One of its plugins failed, so that it cannot be said where it would have gone."""


class ShadowVerdict(Struct, frozen=True, kw_only=True):
    """Where the shadow profile would have sent a request, beside where it went."""

    verdict: str
    """`AGREED`, `DIFFERED`, `NOBODY` or `FAILED`."""
    endpoint: Endpoint | None = None
    uncached_tokens: float = 0.0
    """Of the prompt, that `endpoint` is believed not to hold."""
    live_uncached_tokens: float = 0.0
    """The same where it went."""
    inflight_requests: int = 0
    """At `endpoint`, before this one."""
    live_inflight_requests: int = 0
    scorers: tuple[str, ...] = ()
    scored: Scored | None = None
    """Its rows are those of `scorers`."""
    position: int = -1
    """Of `endpoint` among those scored."""
    live_position: int = -1
    """Of where it went; -1 if the filters did not leave that."""

    def told(self) -> dict[str, object]:
        """For a log line or a record of the decision: plain values, rounded."""
        return {
            "verdict": self.verdict,
            "endpoint": "" if self.endpoint is None else self.endpoint.name,
            "uncached_tokens": self.uncached_tokens,
            "live_uncached_tokens": self.live_uncached_tokens,
            "inflight_requests": self.inflight_requests,
            "live_inflight_requests": self.live_inflight_requests,
            "parts": self._parts(self.position),
            "live_parts": self._parts(self.live_position),
        }

    def _parts(self, position: int) -> dict[str, float]:
        """What each scorer adds to the score at `position`."""
        if self.scored is None or position < 0:
            return {}
        parts = self.scored.parts_of(position)
        return {name: round(part, 4) for name, part in zip(self.scorers, parts, strict=True)}


class ShadowTotals:
    """What all verdicts come to, since the picker began. The sums are of those that name somebody."""

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter({AGREED: 0, DIFFERED: 0, NOBODY: 0, FAILED: 0})
        self.picks: Counter[int] = Counter()
        """Slot -> how often it was named."""
        self.uncached_tokens = 0.0
        self.live_uncached_tokens = 0.0
        self.inflight_requests = 0
        self.live_inflight_requests = 0

    def add(self, verdict: ShadowVerdict, slot: int) -> None:
        """`slot` of its endpoint; -1 if it names none."""
        self.verdicts[verdict.verdict] += 1
        if slot < 0:
            return
        self.picks[slot] += 1
        self.uncached_tokens += verdict.uncached_tokens
        self.live_uncached_tokens += verdict.live_uncached_tokens
        self.inflight_requests += verdict.inflight_requests
        self.live_inflight_requests += verdict.live_inflight_requests


class Shadow:
    """One shadow profile at work."""

    def __init__(
        self,
        profile: SchedulingProfile,
        *,
        seed: int,
        share: float,
        block_tokens: int,
        totals: ShadowTotals,
        failures: PluginFailures,
    ) -> None:
        """`share` of the decisions are judged, drawn by dice of its own; `failures` of its plugins
        alone: the acting profile may use the same without failing.
        """
        self.profile = profile
        self._share = share
        self.failures = failures
        self._kept_scores = KeptScores.of(profile.scorers)
        self._scorers = tuple(scorer.name for scorer in profile.scorers)
        self._random = Random(f"{seed}:shadow")  # noqa: S311  dice, not secrets
        self._block_tokens = block_tokens
        self._totals = totals

    def judge(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        live: tuple[Candidates, int],
        rotation: int,
        fresh_first: Callable[[Kept], Candidates],
        endpoint_in: Callable[[int], Endpoint],
    ) -> ShadowVerdict | None:
        """What it would have done; None: this one is not judged. Never raises, and changes nothing but
        its own totals and dice.

        `candidates` are those before any filter; `live` those that were scored, and the position of
        the one that was picked. `endpoint_in` a slot.
        """
        if self._share < 1.0 and self._random.random() >= self._share:
            return None
        failed_before = self._failures_so_far()
        slot = -1
        try:
            verdict, slot = self._judge(
                request, candidates, live, rotation, fresh_first, endpoint_in
            )
        except Exception as error:  # noqa: BLE001  a part that fails costs only what it adds
            self.failures.raised(self.profile.picker_name, "judge", error)
        if self._failures_so_far() != failed_before:
            verdict, slot = ShadowVerdict(verdict=FAILED), -1
        self._totals.add(verdict, slot)
        return verdict

    def _judge(
        self,
        request: InferenceRequest,
        candidates: Candidates,
        live: tuple[Candidates, int],
        rotation: int,
        fresh_first: Callable[[Kept], Candidates],
        endpoint_in: Callable[[int], Endpoint],
    ) -> tuple[ShadowVerdict, int]:
        profile, failures = self.profile, self.failures
        kept = profile.filter(request, candidates, failures)
        if not len(kept.candidates):
            return ShadowVerdict(verdict=NOBODY), -1
        ranked = fresh_first(kept)
        scored = profile.score(request, ranked, failures, self._kept_scores)
        picked = profile.pick(scored.total, ranked, self._random, rotation, failures)
        position = int(picked[0])
        acted, at = live
        slot, live_slot = int(ranked.slot[position]), int(acted.slot[at])
        live_position = position
        if slot != live_slot:
            also = (ranked.slot == live_slot).nonzero()[0]
            live_position = int(also[0]) if len(also) else -1
        return (
            ShadowVerdict(
                verdict=AGREED if slot == live_slot else DIFFERED,
                endpoint=endpoint_in(slot),
                uncached_tokens=self._uncached_tokens(request, ranked, position),
                live_uncached_tokens=self._uncached_tokens(request, acted, at),
                inflight_requests=int(ranked.inflight_requests[position]),
                live_inflight_requests=int(acted.inflight_requests[at]),
                scorers=self._scorers,
                scored=scored,
                position=position,
                live_position=live_position,
            ),
            slot,
        )

    def _uncached_tokens(
        self, request: InferenceRequest, candidates: Candidates, position: int
    ) -> float:
        matched, _ = candidates.prefix_match(position)
        return max(0.0, float(request.prompt_tokens - matched * self._block_tokens))

    def _failures_so_far(self) -> int:
        return sum(failing.failures for failing in self.failures)
