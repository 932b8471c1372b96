"""The scorers of Homing's own stages: one for endpoints that prefill, one for endpoints that decode.

Both minimise seconds, by the formulas of `added-time-scorer` and of the rule by time (`ByTime`).
The decider `time-based-pd-decider` then compares the two chosen endpoints by the same formulas.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.added_time import AddedTime
from epp.plugins.contract import (
    KV_BYTES_PER_TOKEN,
    LINK_BYTES_PER_S,
    PREFILL_DELAY,
    REMOTE_OVERHEAD_S,
    REMOTE_OVERHEAD_S_PER_TOKEN,
    STEP_TOKENS,
    UNMEASURED_FACTOR,
    Abilities,
    ByTime,
    Candidates,
    Duration,
    Floats,
    InferenceRequest,
    Parameters,
    prefill_work,
    scores_of_cost,
)

_Share = Annotated[float, Meta(ge=0, le=1)]
_OF_OWN_PREFILL: Final = ("queue", "prefill", "delay of others", "first token weight")
"""Parts of the cost of `added-time-scorer` that a prefill at the decode endpoint causes."""
_AboveZero = Annotated[float, Meta(gt=0, le=1e15)]


class TransferTime(Parameters, frozen=True, dict=True):
    """The parameters of the time in which the KV cache of a prompt moves to another endpoint."""

    kv_bytes_per_token: _AboveZero = KV_BYTES_PER_TOKEN
    """Size in bytes of the KV cache of one token: 2 x layers x KV heads x size of a head x bytes of a
    number. The default is that of Qwen3-32B in BF16.
    """
    link_bytes_per_second: Annotated[float, Meta(ge=0, le=1e15)] = LINK_BYTES_PER_S
    """Speed in bytes per second at which KV blocks move between two endpoints, over all of their
    NICs together; 0 if they cannot. The default is RoCE with 200 Gbit/s.
    """
    learn_link_speed: bool = True
    """True if `linkBytesPerSecond` is only the speed until engines have reported transfers. The
    speed is then measured from their sizes and times on the metrics pages.
    """

    @property
    def transfer_s_per_token(self) -> float:
        """Return the time in seconds in which the KV cache of one token moves at the configured
        speed. It is infinite without a link.
        """
        link = self.link_bytes_per_second
        return self.kv_bytes_per_token / link if link else math.inf

    def transfer_to_s_per_token(self, candidates: Candidates) -> Floats | float:
        """Return the time in seconds in which the KV cache of one token moves to each candidate, at
        the measured speed if that is known and used, else at the configured one, which must not be
        0. It is a number if that is the same for all candidates.
        """
        link: Floats | float = self.link_bytes_per_second
        if self.learn_link_speed:
            link = candidates.link_bytes_per_s(self.link_bytes_per_second)
        return self.kv_bytes_per_token / link

    def ahead_s(self, tokens: Floats, candidates: Candidates) -> Floats:
        """Return float64[n]: the time in seconds in which the KV cache of `tokens` of earlier
        requests moves to each candidate. Until a speed was measured, it is `UNMEASURED_FACTOR`
        times as long if `learn_link_speed` is True.
        """
        ahead_s = tokens * self.transfer_to_s_per_token(candidates)
        if self.learn_link_speed and candidates.link_unmeasured:
            ahead_s *= UNMEASURED_FACTOR
        return ahead_s


class RemotePrefillTimes(TransferTime, frozen=True, dict=True):
    """The parameters of the time that a remote prefill takes."""

    prefill_delay: _Share = PREFILL_DELAY
    """Share of a prefill by which it delays every request that decodes at the endpoint; 1 with chunked
    prefill, because each chunk has thousands of tokens.
    """
    overhead: Duration = Duration(REMOTE_OVERHEAD_S)
    """Additional time of a remote prefill for any prompt: messages, and a second server that reads
    the request.
    """
    overhead_per_token: Duration = Duration(REMOTE_OVERHEAD_S_PER_TOKEN)
    """Additional time of a remote prefill for each prompt token, which the second server
    tokenizes.
    """

    def __post_init__(self) -> None:
        for name, span in (
            ("overhead", self.overhead),
            ("overheadPerToken", self.overhead_per_token),
        ):
            if not 0.0 <= span < 3600.0:
                raise ValueError(f"{name} is {span:g}s; it must be at least 0s and below 1h")

    @cached_property
    def rule(self) -> ByTime:
        """Return the rule with these parameters that compares a remote prefill with a prefill at
        the decode endpoint.
        """
        return ByTime(
            prefill_delay=self.prefill_delay,
            kv_bytes_per_token=self.kv_bytes_per_token,
            link_bytes_per_s=self.link_bytes_per_second,
            learn_link_speed=self.learn_link_speed,
            overhead_s=float(self.overhead),
            overhead_s_per_token=float(self.overhead_per_token),
        )


class PrefillTime(TransferTime, frozen=True, dict=True):
    """Prefer the endpoint that computes the prompt and sends its KV cache soonest. This scorer is
    for the prefill stage.

    The cost is t + r p / s + 2 max(y m - t, 0) with t = (b + p) / s. b are the pending prefill
    tokens of the endpoint, p is the prefill of this prompt as in `added-time-scorer`, r is
    `evictionCost`, s is the configured prefill speed, and m is the time in which the KV cache of
    one token moves. y are the tokens whose KV blocks the endpoint still has to send for earlier
    requests; with `learnLinkSpeed`, they count `UNMEASURED_FACTOR` times until a speed was
    measured. Their transfers delay that of this prompt, and it delays them, if they are not over
    when the prompt is computed. The last term is left out if `linkBytesPerSecond` is 0.
    """

    type_name: ClassVar[str] = "prefill-time-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=(
            *("matched_blocks", "uncached_tokens", "inflight_prefill_tokens"),
            *("prefill_tokens_per_s", "prompt_tokens", "sending_tokens"),
            *("link_bytes_per_s", "link_unmeasured"),
        ),
    )

    eviction_cost: Annotated[float, Meta(ge=0, le=100)] = 0.5
    """Number of tokens that are computed again later, for each token computed now, because new
    blocks evict others.

    `added-time-scorer` has 2, and gives the time to the first token up to 4 times the weight, so the
    ratio is the same.
    """

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        speed = candidates.prefill_tokens_per_s
        prefill_s = _prefill_tokens(request, candidates) / speed
        computed_s = candidates.inflight_prefill_tokens / speed + prefill_s
        cost = computed_s + self.eviction_cost * prefill_s
        if self.link_bytes_per_second:
            ahead_s = self.ahead_s(candidates.sending_tokens, candidates)
            cost += 2.0 * np.maximum(ahead_s - computed_s, 0.0)
        return scores_of_cost(cost)


class DecodeTime(RemotePrefillTimes, frozen=True, dict=True):
    """Prefer the endpoint where the request is decoded with the least added time. This scorer is
    for the decode stage.

    The cost has the parts of `added-time-scorer` that concern decoding, memory and adapters. The
    part for the prefill is the smaller of two times: that of a prefill at the endpoint itself,
    with the delay of others, and that of a remote prefill with the KV transfer to this endpoint,
    which shares the network with those of earlier requests (`time-based-pd-decider`). The wait for
    the first token has the additional weight of `added-time-scorer`. Blocks that are evicted count
    twice the cheaper way to have them again.

    A remote prefill is only considered if the prefill endpoint is chosen first (`stageOrder:
    prefill-first`).
    """

    type_name: ClassVar[str] = "decode-time-scorer"
    abilities: ClassVar[Abilities] = Abilities(
        reads=(
            *(AddedTime.abilities.reads or ()),
            *("uncached_tokens", "peer_candidates", "receiving_tokens", "sending_tokens"),
            *("link_bytes_per_s", "link_unmeasured"),
        ),
        reads_index=True,
        goes_by_sessions=True,
        tells_cost=True,
    )
    cost_unit: ClassVar[str] = "s"
    first_token_parts: ClassVar[tuple[str, ...]] = (
        *AddedTime.first_token_parts,
        *("remote prefill", "KV transfer"),
    )
    producer_type: ClassVar[str] = AddedTime.producer_type

    @property
    def producer(self) -> str | None:
        return ""

    @cached_property
    def _added(self) -> AddedTime:
        return AddedTime(prefill_delay=self.prefill_delay)

    def session_of(self, request: InferenceRequest, /) -> str:
        """Return the session that `request` names, as `added-time-scorer` does."""
        return self._added.session_of(request)

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        added = self._added
        speed = candidates.prefill_tokens_per_s
        work = added.work(request, candidates)
        queue_s, own_s = work.queue / speed, work.prefill / speed
        # A decode step has room for some prompt tokens, which delay nobody.
        delay_s = np.maximum(work.prefill - STEP_TOKENS, 0.0)
        delay_s *= work.requests * self.prefill_delay
        delay_s /= speed
        first_s = queue_s + own_s
        cost = work.decoding + work.memory
        cost /= speed
        if candidates.adapters_reported:
            adapter_s = added.adapter_s(request, candidates)
            first_s = first_s + adapter_s
            cost += adapter_s
        prefill_s = queue_s + own_s + added.weight_s(first_s) + delay_s
        again_s = own_s
        peer = candidates.peer_candidates
        if peer is not None and self.rule.link_bytes_per_s:
            waited_s, moved_s, delay_s = self._remote_s(request, candidates, peer, queue_s)
            first_s = waited_s + moved_s
            prefill_s = np.minimum(prefill_s, first_s + added.weight_s(first_s) + delay_s)
            again_s = np.minimum(again_s, moved_s)
        cost += prefill_s
        cost += added.eviction_cost * again_s
        return scores_of_cost(cost)

    def cost_parts(
        self, request: InferenceRequest, candidates: Candidates, /
    ) -> Mapping[str, Floats]:
        """Return each part of the request's cost at each candidate in seconds, float64[n] by name.

        The prompt is computed at the candidate or at the prefill endpoint, whichever takes less
        time. The parts of the other prefill are 0. `score` rates the candidates by the sum of all
        parts.
        """
        parts = dict(self._added.cost_parts(request, candidates))
        speed = candidates.prefill_tokens_per_s
        # A decode step has room for some prompt tokens, which delay no other request.
        share = np.fmax(0.0, 1.0 - STEP_TOKENS / np.fmax(parts["prefill"] * speed, 1.0))
        parts["delay of others"] *= share
        peer = candidates.peer_candidates
        if peer is None or not self.rule.link_bytes_per_s:
            return parts
        return self._with_remote_prefill(parts, request, candidates, peer)

    def _with_remote_prefill(
        self,
        parts: dict[str, Floats],
        request: InferenceRequest,
        candidates: Candidates,
        peer: Candidates,
    ) -> dict[str, Floats]:
        """Return `parts` with the parts of a remote prefill at `peer`, at those candidates where it
        takes less time.
        """
        added = self._added
        waited_s, moved_s, delay_s = self._remote_s(request, candidates, peer, parts["queue"])
        weight_s = added.weight_s(waited_s + moved_s)
        own_s = np.sum([parts[name] for name in _OF_OWN_PREFILL], axis=0)
        there = waited_s + moved_s + weight_s + delay_s < own_s
        again_s = np.minimum(parts["prefill"], moved_s)
        for name in _OF_OWN_PREFILL:
            parts[name] = np.where(there, 0.0, parts[name])
        parts["first token weight"] += np.where(there, weight_s, 0.0)
        parts["delay of others"] += np.where(there, delay_s, 0.0)
        parts["evictions"] = added.eviction_cost * again_s
        parts["remote prefill"] = np.where(there, waited_s, 0.0)
        parts["KV transfer"] = np.where(there, moved_s, 0.0)
        return parts

    def _remote_s(
        self, request: InferenceRequest, candidates: Candidates, peer: Candidates, queue_s: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return three arrays float64[n] of times in seconds with a remote prefill at `peer`: the
        time until the KV transfer begins, that of the transfer, and the delay of other transfers.

        `queue_s` are the times of earlier prefills at the candidates.
        """
        transfer_s = self.transfer_to_s_per_token(candidates)
        computed_s = self._prefill_s(request, peer)
        tokens = np.maximum(candidates.receiving_tokens, peer.sending_tokens)
        ahead_s = self.ahead_s(tokens, candidates)
        waited_s = np.maximum(np.maximum(computed_s, ahead_s), queue_s)
        moved_s: Floats = candidates.uncached_tokens * transfer_s
        return waited_s, moved_s, np.maximum(ahead_s - computed_s, 0.0)

    def _prefill_s(self, request: InferenceRequest, peer: Candidates) -> Floats:
        """Return float64[1]: the time in seconds until the prefill endpoint `peer` has computed the
        prompt, with the additional time of a remote prefill.
        """
        tokens = peer.inflight_prefill_tokens + _prefill_tokens(request, peer)
        overhead_s = self.rule.remote_overhead_s(request.prompt_tokens)
        seconds: Floats = tokens / peer.prefill_tokens_per_s + overhead_s
        return seconds


def _prefill_tokens(request: InferenceRequest, candidates: Candidates) -> Floats:
    """Return float64[n]: the work of computing the prompt of `request`, in prefill tokens."""
    return prefill_work(request.prompt_tokens, candidates.uncached_tokens)
