"""An engine that verifies draft tokens: a decoding request gets one or more tokens per pass.

As in vLLM's scheduler, a decoding request is given its last token and its draft tokens, within the
budget and with blocks for all of them. The computation of rejected tokens is wasted, and their
blocks stay with the request. Full blocks of known tokens are registered. Drafting never exceeds the
remaining tokens of the answer.

A pass costs the verification: `tokens`, with the draft tokens, through the linear layers and the
head, and the context of each request read once. If it verifies any draft token, it also costs
`Speculation.draft_s` for each of the `drafted_tokens` positions, for any number of requests. The KV
cache of drafters and the cost of drafting beside prompts are not modelled.

Requests do not move in lockstep here, so each pass is a step of its own.
"""

from epp.core.types import Seconds
from sim.engine.engine import Engine, EngineSettings, Step
from sim.engine.profiles import Profile, StepWork
from sim.engine.prompt_cache import PromptCache
from sim.engine.request import EngineRequest
from sim.engine.speculation import Speculation


class SpeculativeEngine(Engine):
    """An `Engine` with speculative decoding. Every step has one pass.

    `outputs` of a step lists all requests that got tokens. A request may get several tokens.
    """

    def __init__(
        self,
        settings: EngineSettings,
        profile: Profile,
        speculation: Speculation,
        cache: PromptCache | None = None,
    ) -> None:
        super().__init__(settings, profile, cache)
        self._pass_s = self._verifying_pass_s
        self.speculation = speculation
        self._given: dict[EngineRequest, int] = {}
        """Number of tokens that the running pass gives to each decoding request."""

    def step(self, now: Seconds) -> Step | None:
        """Do one pass that starts at `now` and return its result. None if there is no request, or
        if none can be computed before a KV transfer or a KV lease ends.
        """
        return None if self._begin_pass(now) is None else self.end()

    def _verifying_pass_s(self, work: StepWork) -> Seconds:
        pass_s = self.profile.step_s(work)
        if work.drafts:
            speculation = self.speculation
            pass_s += speculation.draft_s * speculation.drafted_tokens
            pass_s += self.profile.head_s_per_sequence * work.drafts
        return pass_s

    def _continue_running(self, work: StepWork, chunks: list[EngineRequest]) -> tuple[int, bool]:
        before = self.preemptions
        budget = self.settings.max_num_batched_tokens
        self._given.clear()
        for request in list(self.running):
            if not budget:
                break
            if request not in self.running:
                continue
            if request is self._partial:
                tokens = min(request.known_tokens - request.computed_tokens, budget)
                if not self._grow(request, tokens):
                    self._preempt(request)
                    continue
                self._schedule(request, tokens, work)
                chunks.append(request)
            else:
                left = request.output_tokens - request.generated_tokens
                tokens = min(1 + self.speculation.drafted_tokens, left, budget)
                if not self._grow_or_preempt(request, tokens):
                    continue
                self._verify(request, tokens, work)
            budget -= tokens
        work.with_adapter = bool(self._adapters_running)
        return budget, self.preemptions > before

    def _grow_or_preempt(self, request: EngineRequest, tokens: int) -> bool:
        """Allocate blocks for the next `tokens` tokens of `request`, preempting the youngest
        running requests if necessary. Return False if `request` itself was preempted.
        """
        while not self._grow(request, tokens):
            youngest = next(reversed(self.running))
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _verify(self, request: EngineRequest, tokens: int, work: StepWork) -> None:
        """Schedule the last token of a decoding request and its draft tokens in this pass, and
        determine how many of them are accepted.
        """
        known = request.known_tokens
        accepted = self.speculation.accepted(request.request_id, request.generated_tokens, known)
        given = self._given[request] = 1 + min(accepted, tokens - 1)
        work.tokens += tokens
        work.decodes += 1
        work.decode_context_tokens += known
        work.longest_context_tokens = max(work.longest_context_tokens, known)
        work.sequences += 1
        work.drafts += tokens - 1
        work.drafts_accepted += given - 1
        full = known // self.settings.block_size_tokens
        self.pool.register(request.holding, request.chain, request.chain_ends, full)

    def _passes_alike(self) -> int:
        return 1

    def _finish_due(self, at: Seconds, before: Seconds) -> list[EngineRequest]:
        given = list(self._given)
        for request, tokens in self._given.items():
            request.generated_tokens += tokens
            request.computed_tokens = request.known_tokens - 1
            assert request.last_token_at is not None, "it decodes"
            request.token_gap_s = at - request.last_token_at
            request.last_token_at = at
            if request.finished:
                self._leave(request)
        self._given.clear()
        return given

    def _decode(self, request: EngineRequest) -> None:
        """Do nothing: here each pass looks at all running requests, so decoding ones need no list
        of their own.
        """

    def _check_decoding(self, decoding: list[EngineRequest]) -> None:
        size = self.settings.block_size_tokens
        for request in decoding:
            assert request.computed_tokens == request.known_tokens - 1, "all but the last token"
            assert request.holding.blocks >= -(-request.computed_tokens // size), "blocks for them"
