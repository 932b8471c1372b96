"""Data-parallel ranks of one server: engines behind one address, and the balancer between them.

Each rank has its own queue, blocks and cache. A request goes to the rank that it names, else to that with
the least of 4 * waiting + running, the first of several, as vLLM's own balancer places it
(`DPLBAsyncMPClient`): it looks at no prompt. vLLM counts what it has placed at once and hears of the rest every 100 ms; here counts
are those of now.

Ranks of a dense model are alone with themselves. Where the profile has a curve of experts
(`Profile.expert_s`) layers of experts are shared by all: every pass begins together, idle ranks compute
a dummy token, and a pass takes as long as the slowest rank without its experts, and the experts for the
tokens of all ranks. So it does while any rank has work.
"""

from collections.abc import Sequence
from typing import Final

from epp.core.types import Seconds
from sim.engine.engine import Engine, EngineSnapshot, Step
from sim.engine.profiles import StepWork
from sim.engine.request import EngineRequest

_WAITING_WEIGHT: Final = 4


class RankedEngine:
    """Drives its ranks as one engine: steps begin and end as `Engine.begin` and `end` have it.

    A step is that of one rank, or, where passes are common, of all that had work.
    """

    def __init__(self, ranks: Sequence[Engine]) -> None:
        """At least one rank, all with the same settings and profile."""
        self.ranks = tuple(ranks)
        self._in_step = bool(self.ranks[0].profile.expert_s)
        if self._in_step:
            for rank in self.ranks:
                rank.pass_by_pass = True

    @property
    def running(self) -> tuple[EngineRequest, ...]:
        """Of all ranks."""
        return tuple(request for rank in self.ranks for request in rank.running)

    @property
    def waiting(self) -> tuple[EngineRequest, ...]:
        """Of all ranks."""
        return tuple(request for rank in self.ranks for request in rank.waiting)

    @property
    def leaving(self) -> set[str]:
        """Who was aborted in a step that has begun, and goes at its end."""
        return {request_id for rank in self.ranks for request_id in rank.leaving}

    @property
    def first_tokens(self) -> int:
        """Requests that have had theirs, of all ranks."""
        return sum(rank.first_tokens for rank in self.ranks)

    @property
    def answers(self) -> int:
        """Requests that are answered, of all ranks."""
        return sum(rank.answers for rank in self.ranks)

    @property
    def answer_tokens(self) -> int:
        """What these were answered with."""
        return sum(rank.answer_tokens for rank in self.ranks)

    @property
    def passes(self) -> int:
        """The most of a step that has begun; 0: none has."""
        return max(rank.passes for rank in self.ranks)

    @property
    def ends_at(self) -> Seconds | None:
        """When the next step ends; None: none has begun, or a rank could begin one."""
        ends = [(rank.ends_at, rank) for rank in self.ranks]
        begun = [at for at, _ in ends if at is not None]
        if not begun:
            return None
        if not self._in_step and any(at is None and _has_work(rank) for at, rank in ends):
            return None
        return min(begun)

    @property
    def slowness(self) -> float:
        """Steps that begin from now on take this many times as long."""
        return self.ranks[0].slowness

    @slowness.setter
    def slowness(self, slowness: float) -> None:
        for rank in self.ranks:
            rank.slowness = slowness

    def submit(self, request: EngineRequest, now: Seconds, rank: int | None = None) -> None:
        """Queue `request` at `rank`, or where its balancer places it.

        ValueError if it can never fit; then nothing has changed.
        """
        self.ranks[self.least_loaded if rank is None else rank].submit(request, now)

    @property
    def least_loaded(self) -> int:
        """The rank where its balancer would place a request."""
        loads = [_load(rank) for rank in self.ranks]
        return loads.index(min(loads))

    def abort(self, request_id: str) -> bool:
        """As `Engine.abort`."""
        return any(rank.abort(request_id) for rank in self.ranks)

    def cut(self, now: Seconds) -> None:
        """Let the steps that have begun end with the passes in progress at `now`."""
        for rank in self.ranks:
            rank.cut(now)

    def begin(self, now: Seconds) -> Seconds | None:
        """Begin what steps can begin at `now`: when the first of all ends; None: there is nothing
        to do.
        """
        if self._in_step:
            return self._begin_together(now)
        for rank in self.ranks:
            if rank.ends_at is None:
                rank.begin(now)
        return self.ends_at

    def end(self) -> Step:
        """The step that ends first is over: what came out of it."""
        begun = [(rank.ends_at, at) for at, rank in enumerate(self.ranks) if rank.passes]
        if not self._in_step:
            _, first = min((ends_at, at) for ends_at, at in begun if ends_at is not None)
            return self.ranks[first].end()
        return _joined([self.ranks[at].end() for _, at in begun])

    def snapshot(self, now: Seconds | None = None) -> EngineSnapshot:
        """What a page says of all ranks: counts summed, usage the mean."""
        told = [rank.snapshot(now) for rank in self.ranks]
        adapters = {adapter for one in told for adapter in one.adapters}
        return EngineSnapshot(
            running=sum(one.running for one in told),
            waiting=sum(one.waiting for one in told),
            deferred=sum(one.deferred for one in told),
            kv_cache_usage=self.kv_cache_usage(now),
            adapters=tuple(sorted(adapters)),
            preemptions=sum(one.preemptions for one in told),
        )

    def kv_cache_usage(self, now: Seconds | None = None) -> float:
        """The held share of the blocks of all ranks."""
        return sum(rank.kv_cache_usage(now) for rank in self.ranks) / len(self.ranks)

    def check(self) -> None:
        """AssertionError if the books of a rank do not agree."""
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
    return _WAITING_WEIGHT * len(rank.waiting) + len(rank.running)


def _has_work(rank: Engine) -> bool:
    return bool(rank.running or rank.waiting)


def _joined(steps: Sequence[Step]) -> Step:
    """One step of several that began and ended together, each of one pass."""
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
