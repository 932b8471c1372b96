"""Admission: whether a request may be placed now, or should wait until an endpoint has room."""

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from epp.core.decision.pool_state import PoolState
from epp.core.decision.profile import SchedulingProfile
from epp.core.flow.gate import Gate
from epp.core.knowledge.availability import Available, available
from epp.core.knowledge.candidates import Affinity, Candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Seconds, Stage

HOLD_FACTOR: Final = 8.0
"""Longest time that a request waits for a cached prefix while another endpoint has room, divided by
the prefill time that the prefix saves. It is above 1, because the time of an engine is lost for all
requests that wait, while others use the room in the meantime.
"""
HOLD_S_MAX: Final[Seconds] = 10.0
"""Longest time in seconds that a request waits for a cached prefix while another endpoint has room."""


class Admission:
    """The checks that a queue makes before it passes a request to the scheduler: whether endpoints
    have room for it, and whether a plugin makes it wait. A check changes no state, except that
    failures of plugins are counted, and that the gate records the room that it found and the time
    since which there is none.
    """

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self.may_hold = False
        """True if any plugin of a profile can make requests wait."""
        self._alone = True

    def configure(self) -> None:
        """Read from the settings which stages there are, and whether a plugin can make requests wait."""
        stages = self._state.settings.stages
        self._alone = stages.alone
        self.may_hold = any(one.holders for _, one in stages.profiles())

    def holds(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether a plugin wants `request` to wait in the queue. `schedule` does not check
        this and decides at once in any case.

        Return False if no endpoint is ready, because `schedule` then refuses the request at once.
        """
        state = self._state
        if not self.may_hold or not len(state.pool.ready(request.subset, now)):
            return False
        candidates, failures = self._candidates(request, now), state.failures
        profiles = state.settings.stages.profiles()
        return any(one.holds(request, candidates, failures) for _, one in profiles)

    def has_room(self, request: InferenceRequest, now: Seconds) -> bool:
        """Return whether `request` need not wait, because an endpoint has room for it and no plugin
        holds it. `schedule` does not check this.

        With flow control, usually return False while the whole pool has no ready endpoint. Return
        True if there are ready endpoints and none of them may serve the request, because `schedule`
        then refuses it at once.
        """
        gate = self._state.gate
        if gate is not None and not gate.certainly_open(request):
            if not len(self._state.pool.ready(None, now)):
                # Requests may wait for the first endpoint.
                return False
            if not gate.has_room(self.of_stages(request, now), request, now):
                return False
        return not self.may_hold or not self.holds(request, now)

    def hold_s(self, request: InferenceRequest, now: Seconds) -> Seconds:
        """Return how long `request` should wait for an endpoint that has no room but more of its
        prompt cached: `HOLD_FACTOR` times the additional prefill time at an endpoint with room, at
        most `HOLD_S_MAX`.

        Return 0 if all endpoints have room or none has, if no endpoint has any of the prompt
        cached, while no request waits in the queue, if no other request would pass this one, with
        another detector or ceiling than the defaults, or with more than one profile.
        """
        state = self._state
        gate = state.gate
        if (
            gate is None
            or gate.restricts
            or not self._alone
            or not gate.keeps_to_room(request, now)
        ):
            return 0.0
        known = state.indexes.joint(request, len(state.pool.columns.endpoints), now)
        if known is None or not known.matched.any():
            return 0.0
        candidates = self._candidates(request, now, {state.settings.prefix: known})
        is_open = gate.with_room(candidates, request, now)
        if is_open.all() or not is_open.any():
            return 0.0
        prefill_s = candidates.uncached_tokens / candidates.prefill_measured_tokens_per_s
        saved_s = float(prefill_s[is_open].min() - prefill_s.min())
        return min(HOLD_FACTOR * saved_s, HOLD_S_MAX)

    def saturation(self, request: InferenceRequest, now: Seconds) -> float:
        """Return the mean load of the endpoints of the fullest stage of `request`; 1.0 without
        endpoints or without flow control.
        """
        gate = self._state.gate
        if gate is None:
            return 1.0
        stages = self.of_stages(request, now)
        loads = [float(gate.load(stage, some).mean()) for stage, some in stages if len(some)]
        return max(loads, default=1.0)

    def why_full(self, request: InferenceRequest, now: Seconds) -> str:
        """Return a phrase about the endpoints that have no room for `request`, or about another
        reason why it waits.
        """
        gate, pool = self._state.gate, self._state.pool
        if gate is None:
            return "a plugin held it"
        for stage, candidates in self.of_stages(request, now):
            if not gate.has_room([(stage, candidates)], request, now):
                return gate.why_full(
                    candidates, request, lambda slot: pool.endpoint_in(slot).name, now
                )
        if self.holds(request, now):
            return "a plugin held it"
        return (
            "requests before it take the room of the endpoints, or a full endpoint has more of its "
            "prompt cached"
        )

    def of_stages(
        self, request: InferenceRequest, now: Seconds
    ) -> list[tuple[Stage | None, Candidates]]:
        """Return the candidates of the configured stages decode and prefill for `request`, by their
        roles, before any other filter. If one profile decides alone, return its candidates with the
        stage None.
        """
        candidates, stages = self._candidates(request, now), self._state.settings.stages
        if self._alone:
            return [(None, self._of_role(stages.decode, request, candidates))]
        named = [(Stage.DECODE, stages.decode), (Stage.PREFILL, stages.prefill)]
        return [
            (stage, self._of_role(profile, request, candidates))
            for stage, profile in named
            if profile is not None
        ]

    def below_ceiling(
        self, gate: Gate, offered: Available, request: InferenceRequest, now: Seconds
    ) -> Available:
        """Return `offered` with room only where `gate` sees some, or unchanged if that is nowhere
        or if more than one profile takes part in decisions (`Stages.alone` is False).
        """
        if not self._alone:
            return offered
        candidates = self._state.candidates(offered.with_room, {}, request, now)
        keep = gate.with_room(candidates, request, now)
        if keep.all() or not keep.any():
            return offered
        return structs.replace(offered, with_room=offered.with_room[keep])

    def _candidates(
        self,
        request: InferenceRequest,
        now: Seconds,
        affinities: Mapping[str, Affinity] = {},
    ) -> Candidates:
        """Return the endpoints that may serve `request` now, before any filter."""
        state = self._state
        ready = state.pool.ready(request.subset, now)
        ejection = state.outliers.ejection
        offered = available(ready, state.pool.columns, ejection, state.full, now)
        return state.candidates(offered.with_room, affinities, request, now)

    def _of_role(
        self, profile: SchedulingProfile, request: InferenceRequest, candidates: Candidates
    ) -> Candidates:
        if not len(candidates) or not profile.of_role.filters:
            return candidates
        return profile.of_role.filter(request, candidates, self._state.failures).candidates
