"""The shadow profile: a second profile that judges all or a share of the decisions, and never acts.

It sees the same candidates, indexes and requests in flight as the acting profile, at the same time.
Its verdict therefore says where this one request would have gone. It does not say how the pool
would look if the profile had placed every request; the simulator answers that.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

from msgspec import Struct

from epp.core.decision.choice import Choice, ProfileState, Staleness, choose
from epp.core.decision.kept_scores import KeptScores
from epp.core.decision.profile import SchedulingProfile, Scored
from epp.core.decision.settings import SchedulerSettings
from epp.core.failures import PluginFailures
from epp.core.knowledge.candidates import Candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, Refusal

AGREED: Final = "agreed"
DIFFERED: Final = "differed"
NOBODY: Final = "nobody"
"""Verdict of the shadow profile if its filters left no endpoint."""
FAILED: Final = "failed"
"""Verdict of the shadow profile if one of its plugins failed, so that its choice is unknown."""


class ShadowVerdict(Struct, frozen=True, kw_only=True):
    """The shadow profile's choice for one request, compared with the choice of the acting profile."""

    verdict: str
    """Result of the comparison of both profiles' choices: `AGREED`, `DIFFERED`, `NOBODY` or
    `FAILED`.
    """
    endpoint: Endpoint | None = None
    uncached_tokens: float = 0.0
    """Number of prompt tokens that the shadow's `endpoint` is estimated not to have cached."""
    live_uncached_tokens: float = 0.0
    """Number of prompt tokens that the endpoint chosen by the acting profile is estimated not to
    have cached.
    """
    inflight_requests: int = 0
    """Number of requests in flight at the shadow's `endpoint` before this request."""
    live_inflight_requests: int = 0
    scorers: tuple[str, ...] = ()
    scored: Scored | None = None
    """Scores by the shadow profile, with a row for each of `scorers`. None if the profile made no
    choice.
    """
    position: int = -1
    """Position of the shadow's `endpoint` among the candidates that the shadow scored; -1 if it
    chose none.
    """
    live_position: int = -1
    """Position of the acting profile's endpoint among the shadow's scored candidates; -1 if the
    shadow did not score it.
    """

    def fields(self) -> dict[str, object]:
        """Return the verdict as plain, rounded values for a log line or a decision record."""
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
        """Return the weighted score of the candidate at `position` by each scorer, rounded to four
        digits; {} without such a candidate.
        """
        if self.scored is None or position < 0:
            return {}
        parts = self.scored.parts_of(position)
        return {name: round(part, 4) for name, part in zip(self.scorers, parts, strict=True)}


class ShadowTotals:
    """The totals of the shadow profile's verdicts since the picker started. The sums of tokens and
    requests cover only verdicts that name an endpoint.
    """

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter({AGREED: 0, DIFFERED: 0, NOBODY: 0, FAILED: 0})
        self.picks: Counter[int] = Counter()
        """Number of times that the shadow profile chose the endpoint in each slot, by slot. The
        scheduler drops the number when the endpoint leaves or restarts.
        """
        self.uncached_tokens = 0.0
        self.live_uncached_tokens = 0.0
        self.inflight_requests = 0
        self.live_inflight_requests = 0

    def add(self, verdict: ShadowVerdict, slot: int) -> None:
        """Add one verdict to the totals. `slot` is the slot of its endpoint, or -1 if it names
        none.
        """
        self.verdicts[verdict.verdict] += 1
        if slot < 0:
            return
        self.picks[slot] += 1
        self.uncached_tokens += verdict.uncached_tokens
        self.live_uncached_tokens += verdict.live_uncached_tokens
        self.inflight_requests += verdict.inflight_requests
        self.live_inflight_requests += verdict.live_inflight_requests


class Shadow:
    """A shadow profile together with the state with which it judges decisions."""

    @classmethod
    def of(
        cls, settings: SchedulerSettings, seed: int, totals: ShadowTotals, failures: PluginFailures
    ) -> "Shadow | None":
        """Return a `Shadow` for the shadow profile of `settings`, or None if they have none. Drop
        the failures of plugins that are not in this profile from `failures`.
        """
        profile = settings.shadow
        failures.retain(() if profile is None else profile.plugin_names)
        if profile is None:
            return None
        return cls(
            profile,
            acting=settings.profile,
            seed=seed,
            share=settings.shadow_share,
            block_tokens=settings.block_tokens,
            totals=totals,
            failures=failures,
            own_cold=not settings.stages.alone,
        )

    def __init__(
        self,
        profile: SchedulingProfile,
        *,
        acting: SchedulingProfile,
        seed: int,
        share: float,
        block_tokens: int,
        totals: ShadowTotals,
        failures: PluginFailures,
        own_cold: bool = False,
    ) -> None:
        """Create a shadow that judges a random `share` of the decisions, drawn by a generator of
        its own.

        `failures` counts failures of the shadow's plugins alone, because the acting profile may use
        the same plugins without failing. Results of plugins that both profiles have may be taken
        from the acting profile.
        """
        self.profile = profile
        self._share = share
        self.failures = failures
        self._state = ProfileState(
            random=Random(f"{seed}:shadow"),  # noqa: S311  not for security
            failures=failures,
            kept_scores=KeptScores.of(profile.scorers, acting.scorers),
            filters_alike=len(profile.filters) == len(acting.filters)
            and all(
                own.plugin is other.plugin
                for own, other in zip(profile.filters, acting.filters, strict=True)
            ),
            own_cold=own_cold,
        )
        self._block_tokens = block_tokens
        self._totals = totals

    def judge(
        self,
        request: InferenceRequest,
        acted: Choice,
        rotation: int,
        staleness: Staleness | None,
        endpoint_in: Callable[[int], Endpoint],
    ) -> ShadowVerdict | None:
        """Return the shadow profile's verdict on one decision, or None if the random share does not
        include this decision.

        It raises no error of a plugin. It changes only the shadow's totals, failures, cached scores
        and random state. `acted` is the choice of the acting profile. `endpoint_in` returns the
        endpoint of a slot.
        """
        if self._share < 1.0 and self._state.random.random() >= self._share:
            return None
        failed_before = self.failures.so_far
        slot = -1
        try:
            # Failed scorers run again here, so that their failures are counted for the shadow too.
            choice = choose(
                self.profile,
                request,
                acted.offered,
                self._state,
                rotation,
                staleness,
                acted if acted.sound else None,
            )
            if isinstance(choice, Refusal):
                verdict = ShadowVerdict(verdict=NOBODY)
            else:
                slot = choice.slot
                verdict = self._compared(request, acted, choice, endpoint_in(slot))
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.failures.raised(self.profile.picker_name, "judge", error)
        if self.failures.so_far != failed_before:
            verdict, slot = ShadowVerdict(verdict=FAILED), -1
        self._totals.add(verdict, slot)
        return verdict

    def _compared(
        self, request: InferenceRequest, acted: Choice, choice: Choice, endpoint: Endpoint
    ) -> ShadowVerdict:
        """Return the comparison of the shadow's choice with that of the acting profile."""
        ranked, position = choice.ranked, choice.picked[0]
        live, at = acted.ranked, acted.picked[0]
        live_slot = live.slot.item(at)
        live_position = at
        if ranked is not live:
            found = (ranked.slot == live_slot).nonzero()[0].tolist()
            live_position = found[0] if found else -1
        return ShadowVerdict(
            verdict=AGREED if choice.slot == live_slot else DIFFERED,
            endpoint=endpoint,
            uncached_tokens=self._uncached_tokens(request, ranked, position),
            live_uncached_tokens=self._uncached_tokens(request, live, at),
            inflight_requests=ranked.inflight_requests_of(position),
            live_inflight_requests=live.inflight_requests_of(at),
            scorers=self.profile.scorer_names,
            scored=choice.scored,
            position=position,
            live_position=live_position,
        )

    def _uncached_tokens(
        self, request: InferenceRequest, candidates: Candidates, position: int
    ) -> float:
        matched, _ = candidates.prefix_match(position)
        return max(0.0, float(request.prompt_tokens - matched * self._block_tokens))
