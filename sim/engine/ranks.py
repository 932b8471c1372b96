"""Data-parallel ranks of one server: engines behind one address, and the balancer between them.

Each rank has its own queue, blocks and cache. A request goes to the rank that it names. Otherwise
it goes to the first rank with the least 4 * waiting + running, as in vLLM's own balancer
(`DPLBAsyncMPClient`), which ignores prompts. vLLM counts its own placements at once and receives
the other counts every 100 ms; here all counts are current.

Ranks of a dense model are independent. If the profile has an expert curve (`Profile.expert_s`), all
ranks share the expert layers while any rank has work. Every pass begins on all ranks together, and
idle ranks compute a dummy token. A pass takes the time of the slowest rank without its experts,
plus the time of the experts for the tokens of all ranks.
"""

from collections.abc import Sequence
from typing import Final

from epp.core.types import Seconds
from sim.engine.engine import Engine, EngineSnapshot, Step
from sim.engine.profiles import StepWork
from sim.engine.request import EngineRequest

_WAITING_WEIGHT: Final = 4


class RankedEngine:
    """Several data-parallel ranks that are driven like one engine: steps begin and end as in
    `Engine.begin` and `Engine.end`.

    A step is that of one rank. If ranks share expert layers, it is one pass of all ranks with work.
    """

    def __init__(self, ranks: Sequence[Engine]) -> None:
        """Combine the engines of one or more ranks; all must have the same settings and profile."""
        self.ranks = tuple(ranks)
        self._in_step = bool(self.ranks[0].profile.expert_s)
        if self._in_step:
            for rank in self.ranks:
                rank.pass_by_pass = True

    @property
    def running(self) -> tuple[EngineRequest, ...]:
        """Requests that the engine of any data-parallel rank is computing."""
        return tuple(request for rank in self.ranks for request in rank.running)

    @property
    def waiting(self) -> tuple[EngineRequest, ...]:
        """Requests in the waiting queue of the engine of any data-parallel rank."""
        return tuple(request for rank in self.ranks for request in rank.waiting)

    @property
    def leaving(self) -> set[str]:
        """Ids of requests that were aborted in the running steps of all ranks and leave at the ends
        of these steps.
        """
        return {request_id for rank in self.ranks for request_id in rank.leaving}

    @property
    def received_tokens(self) -> int:
        """Number of prompt tokens that other engines computed, over all requests of all ranks whose
        first token has been generated.
        """
        return sum(rank.received_tokens for rank in self.ranks)

    @property
    def first_tokens(self) -> int:
        """Number of requests whose first token has been generated, over all ranks since their
        start.
        """
        return sum(rank.first_tokens for rank in self.ranks)

    @property
    def answers(self) -> int:
        """Number of requests with a complete answer, over all ranks since their start."""
        return sum(rank.answers for rank in self.ranks)

    @property
    def answer_tokens(self) -> int:
        """Number of output tokens of the completely answered requests, over all ranks."""
        return sum(rank.answer_tokens for rank in self.ranks)

    @property
    def passes(self) -> int:
        """Largest number of passes of a running step of any rank; 0 if no step is running."""
        return max(rank.passes for rank in self.ranks)

    @property
    def ends_at(self) -> Seconds | None:
        """Time when the next step of any rank ends. None if no step is running, or if ranks are
        independent and one with work could begin a step.
        """
        ends = [(rank.ends_at, rank) for rank in self.ranks]
        begun = [at for at, _ in ends if at is not None]
        if not begun:
            return None
        if not self._in_step and any(at is None and _has_work(rank) for at, rank in ends):
            return None
        return min(begun)

    @property
    def slowness(self) -> float:
        """Factor on the duration of steps that begin from now on, on all ranks."""
        return self.ranks[0].slowness

    @slowness.setter
    def slowness(self, slowness: float) -> None:
        for rank in self.ranks:
            rank.slowness = slowness

    def submit(self, request: EngineRequest, now: Seconds, rank: int | None = None) -> None:
        """Add `request` to the queue of rank `rank`, or of the rank that the balancer chooses if it
        is None.

        Raises `ValueError` if the rank can never serve the request; nothing has changed then.
        """
        self.ranks[self.least_loaded if rank is None else rank].submit(request, now)

    @property
    def least_loaded(self) -> int:
        """Number of the rank that the balancer would choose for a request now."""
        loads = [_load(rank) for rank in self.ranks]
        return loads.index(min(loads))

    def abort(self, request_id: str) -> bool:
        """Abort the request on the rank that has it, as `Engine.abort` does; return False if no
        rank has it.
        """
        return any(rank.abort(request_id) for rank in self.ranks)

    def cut(self, now: Seconds) -> None:
        """Shorten the running steps of all ranks, so that each ends with its pass in progress at
        `now`.
        """
        for rank in self.ranks:
            rank.cut(now)

    def begin(self, now: Seconds) -> Seconds | None:
        """Begin a step at `now` on each rank that has work and no running step. Return the end of
        the first step to end, or None if no rank can compute anything now.
        """
        if self._in_step:
            return self._begin_together(now)
        for rank in self.ranks:
            if rank.ends_at is None:
                rank.begin(now)
        return self.ends_at

    def end(self) -> Step:
        """End the step that ends first among the ranks (of all ranks with work if they share expert
        layers), and return its result.
        """
        begun = [(rank.ends_at, at) for at, rank in enumerate(self.ranks) if rank.passes]
        if not self._in_step:
            _, first = min((ends_at, at) for ends_at, at in begun if ends_at is not None)
            return self.ranks[first].end()
        return _joined([self.ranks[at].end() for _, at in begun])

    def snapshot(self, now: Seconds | None = None) -> EngineSnapshot:
        """Return the state of all ranks together as the pod's metrics page shows it: sums of
        counts, and the mean KV-cache usage.
        """
        told = [rank.snapshot(now) for rank in self.ranks]
        adapters = {adapter for one in told for adapter in one.adapters}
        return EngineSnapshot(
            running=sum(one.running for one in told),
            waiting=sum(one.waiting for one in told),
            deferred=sum(one.deferred for one in told),
            kv_cache_usage=self.kv_cache_usage(now),
            adapters=tuple(sorted(adapters)),
            preemptions=sum(one.preemptions for one in told),
            fetching=sum(one.fetching for one in told),
            fetched=sum(one.fetched for one in told),
            to_fetch=sum(one.to_fetch for one in told),
        )

    def kv_cache_usage(self, now: Seconds | None = None) -> float:
        """Return the share of the KV-cache blocks of all ranks that requests use."""
        return sum(rank.kv_cache_usage(now) for rank in self.ranks) / len(self.ranks)

    def check(self) -> None:
        """Check each rank as `Engine.check` does. Raises AssertionError."""
        for rank in self.ranks:
            rank.check()

    def _begin_together(self, now: Seconds) -> Seconds | None:
        assert not self.passes, "the last step has ended"
        profile, slowness = self.ranks[0].profile, self.slowness
        longest_s, tokens = 0.0, 0
        begun: list[Engine] = []
        for rank in self.ranks:
            ends_at = rank.begin(now)
            if ends_at is None:
                tokens += 1
                continue
            begun.append(rank)
            own = rank.tokens_begun
            longest_s = max(longest_s, ends_at - now - slowness * profile.expert_layers_s(own))
            tokens += own
        if not begun:
            return None
        duration_s = longest_s + slowness * profile.expert_layers_s(tokens)
        for rank in begun:
            rank.wait_for(duration_s)
        return self.ends_at


def _load(rank: Engine) -> int:
    waiting = len(rank.waiting)
    if rank.legs is not None:
        waiting += rank.legs.waiting
    return _WAITING_WEIGHT * waiting + len(rank.running)


def _has_work(rank: Engine) -> bool:
    if rank.legs is not None and (rank.legs.stalled or rank.legs.fetched):
        return not rank.legs.stalled
    return bool(rank.running or rank.waiting)


def _joined(steps: Sequence[Step]) -> Step:
    """Return one step that combines the steps of several ranks. They began and ended together and
    have one pass each.
    """
    work = StepWork()
    for step in steps:
        one = step.work
        work.tokens += one.tokens
        work.decodes += one.decodes
        work.decode_context_tokens += one.decode_context_tokens
        work.longest_context_tokens = max(work.longest_context_tokens, one.longest_context_tokens)
        work.shared_tokens += one.shared_tokens
        work.prefills += one.prefills
        work.attention_pairs += one.attention_pairs
        work.sequences += one.sequences
        work.drafts += one.drafts
        work.drafts_accepted += one.drafts_accepted
        work.received += one.received
        work.handed_over += one.handed_over
        work.with_adapter |= one.with_adapter
        work.adapters_loaded += one.adapters_loaded
        work.restore_s = max(work.restore_s, one.restore_s)
    return Step(
        started_at=steps[0].started_at,
        duration_s=max(step.duration_s for step in steps),
        passes=1,
        work=work,
        admitted=[request for step in steps for request in step.admitted],
        outputs=[request for step in steps for request in step.outputs],
    )
