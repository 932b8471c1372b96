"""The stages of a request, as data: which profile chooses the endpoint of each, and when it runs.

A request always has a decode stage, whose endpoint the gateway sends it to. A pool can serve the
other two elsewhere: one endpoint encodes the media of the prompt, and one computes its KV cache
(prefill). A rule is a pure value. It sees the request and the number of prompt tokens that the
decode endpoint has cached, or the work that the prefill is for each of two endpoints (`ByTime`). It
sees no clock, no candidates and no random numbers.

Source of the orders, of the rules and of their edge cases: llm-d/llm-d-router,
`scheduling/profilehandler/disagg`.
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, TypeAlias

from msgspec import Struct, field

from epp.core.decision.profile import SchedulingProfile
from epp.core.knowledge.prefill_speed import STEP_TOKENS, prefill_work
from epp.core.prompt.request import InferenceRequest
from epp.core.types import ApiKind, Refusal, RefusalReason, Seconds, Stage

ROTATION_SHIFT: Final = 32
ROTATION_FACTORS: Final = {
    Stage.PREFILL: round((1 + 5**0.5) / 2 * 2**ROTATION_SHIFT),
    Stage.ENCODE: round(2**0.5 * 2**ROTATION_SHIFT),
}
"""Factor by stage, in units of 2**-32. The number of a decision is multiplied by it to break ties in
that stage; the decode stage uses the number itself.

The golden ratio and the square root of 2 are irrational and independent. Ties in two stages are
therefore combined in all ways equally often (Weyl's equidistribution theorem). The same rotation
would pair endpoint i of one role with endpoint i of the other for ever.
"""

PREFILL_DELAY: Final = 1.0
"""Share of a prefill by which it delays each decoding request.

With chunked prefill, a step computes a chunk of thousands of tokens and decodes one token of each
request, so each request waits for the whole prefill. `python -m docs.stage_rule` compares values.
"""
KV_BYTES_PER_TOKEN: Final = 262_144.0
"""Assumed size of the KV cache of one token: Qwen3-32B in BF16 (64 layers, 8 heads of 128), the
model of the default prefill speed.
"""
LINK_BYTES_PER_S: Final = 20e9
"""Assumed speed of KV transfers: RoCE with 200 Gbit/s, in the latency profiles of
llm-d/llm-d-inference-sim.
"""
UNMEASURED_FACTOR: Final = 100.0
"""Factor by which KV transfers are assumed to be slower than configured until the first one has shown
its speed, for those that a request would wait for. Pairs of endpoints thus have one transfer at a
time until then: a wrong configured speed would else send all prompts over a slow network.
"""
REMOTE_OVERHEAD_S: Final[Seconds] = 0.012
"""Assumed additional time of a remote prefill: two messages between sidecar and prefill endpoint,
and a second server that reads the request. The simulator's profiles have 10 ms for the latter.
"""
REMOTE_OVERHEAD_S_PER_TOKEN: Final[Seconds] = 10e-6
"""Assumed time in which the server of the prefill endpoint tokenizes one token of a prompt, as in
the simulator's profiles.
"""

_ENCODE_PATHS: Final = ("/v1/chat/completions",)
_PREFILL_PATHS: Final = (
    *_ENCODE_PATHS,
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/inference/v1/generate",
)
"""Ends of the URL paths on which the sidecar of a decode endpoint obeys `x-prefiller-host-port`."""
_ENCODE_APIS: Final = frozenset({ApiKind.CHAT})
_PREFILL_APIS: Final = frozenset(
    {ApiKind.CHAT, ApiKind.COMPLETIONS, ApiKind.MESSAGES, ApiKind.RESPONSES, ApiKind.TOKENS}
)


class Order(StrEnum):
    """The order in which the endpoints of a request are chosen."""

    DECODE_FIRST = "decode-first"
    PREFILL_FIRST = "prefill-first"


class PrefillEnd(StrEnum):
    """The event that shows the end of the prefill and encode stages."""

    HEADERS = "headers"
    """The arrival of the response headers. Use it if the sidecar starts decode after prefill."""
    OUTPUT = "output"
    """The arrival of the first output. Use it if the sidecar starts both stages at once."""


class Never(Struct, frozen=True):
    """The rule of a stage that never runs."""

    def applies(self, request: InferenceRequest, cached_tokens: int) -> bool:
        return False


class Always(Struct, frozen=True):
    """The rule of a stage that runs for every request."""

    def applies(self, request: InferenceRequest, cached_tokens: int) -> bool:
        return True


class Uncached(Struct, frozen=True):
    """The rule of a stage that runs if at least `tokens` prompt tokens are not cached at the decode
    endpoint.

    The stage never runs if `tokens` is 0, or for prompts of fewer than `prompt_tokens` tokens.
    """

    tokens: int
    prompt_tokens: int = 0

    def applies(self, request: InferenceRequest, cached_tokens: int) -> bool:
        total = request.prompt_tokens
        if not self.tokens or total < self.prompt_tokens:
            return False
        return total - cached_tokens >= self.tokens


class Multimodal(Struct, frozen=True):
    """The rule of a stage that runs for prompts with an image, audio or video."""

    def applies(self, request: InferenceRequest, cached_tokens: int) -> bool:
        return bool(request.media_items())


Rule: TypeAlias = Never | Always | Uncached | Multimodal


class PrefillWork(Struct, frozen=True, kw_only=True):
    """The work of one endpoint that would compute the prompt of a request."""

    uncached_tokens: float
    """Number of tokens of the request's prompt that the endpoint has not cached."""
    pending_tokens: float
    """Number of uncached prompt tokens of earlier requests that the endpoint has not computed yet.
    """
    tokens_per_s: float
    """Configured prefill speed of the endpoint, above 0."""
    decoding_requests: float = 0.0
    """Number of requests that the endpoint decodes and that its prefill delays."""
    receiving_tokens: float = 0.0
    """Number of prompt tokens of earlier requests whose KV blocks the endpoint still has to
    receive.
    """
    sending_tokens: float = 0.0
    """Number of prompt tokens of earlier requests whose KV blocks the endpoint still has to send.
    """
    link_bytes_per_s: float = math.nan
    """Measured speed in bytes per second of KV transfers to the endpoint, or the median of the pool if
    that of the endpoint is unknown. If none is known, it is 0 if the next transfer will show one,
    else NaN.
    """


class ByTime(Struct, frozen=True, kw_only=True):
    """The rule of a prefill stage that runs if it saves time: remote prefill is compared with a
    prefill at the decode endpoint.

    With x uncached tokens of T prompt tokens at an endpoint, the prefill has the work of
    p = x (1 + (T - x/2) / `ATTENTION_TOKENS`) tokens. Let b be the pending tokens, s the speed and n
    the decoding requests of an endpoint D that decodes or P that prefills, and let y be the tokens
    whose KV blocks D still has to receive or P still has to send, whichever are more:

        time(endpoint) = (b + p + a n max(p - `STEP_TOKENS`, 0)) / s         a = `prefill_delay`
        local    = time(D)
        computed = time(P) + overhead_s + T overhead_s_per_token
        ahead    = y m                            m = kv_bytes_per_token / link_bytes_per_s
        remote   = max(computed, b_D / s_D, ahead) + x_D m + max(ahead - computed, 0)

    A step that decodes has room for `STEP_TOKENS` prompt tokens, so these delay no request. The first
    maximum is there because the request also queues at D, behind earlier prefills and behind earlier
    transfers. With `learn_link_speed`, `ahead` is multiplied by `UNMEASURED_FACTOR` until the first
    transfer has shown its speed, and m follows from measured speeds afterwards. Transfers share the network of both endpoints, and the last of several ends when the
    bytes of all have moved. What is left of the others when this transfer begins is also the sum of
    its delays of them, which is the last summand. The answer is decoded at the same endpoint in both
    cases, so its time is the same. The prefill does not run elsewhere if the decode endpoint has
    cached the whole prompt.
    """

    prefill_delay: float = PREFILL_DELAY
    """Share of a prefill by which it delays every request that decodes at the endpoint."""
    kv_bytes_per_token: float = KV_BYTES_PER_TOKEN
    """Size in bytes of the KV cache of one token."""
    link_bytes_per_s: float = LINK_BYTES_PER_S
    """Speed in bytes per second at which KV blocks move between two endpoints; 0 if they cannot. It
    is used until a speed was measured.
    """
    learn_link_speed: bool = True
    """True if the measured speed of KV transfers replaces `link_bytes_per_s`."""
    overhead_s: Seconds = REMOTE_OVERHEAD_S
    """Time that a remote prefill takes in addition, for any prompt."""
    overhead_s_per_token: Seconds = REMOTE_OVERHEAD_S_PER_TOKEN
    """Time that a remote prefill takes in addition for each prompt token."""

    @property
    def transfer_s_per_token(self) -> Seconds:
        """Return the time in seconds in which the KV cache of one token moves; infinite without a
        link.
        """
        if not self.link_bytes_per_s:
            return math.inf
        return self.kv_bytes_per_token / self.link_bytes_per_s

    def transfer_to_s_per_token(self, work: PrefillWork) -> Seconds:
        """Return the time in seconds in which the KV cache of one token moves to the endpoint of
        `work`, by its measured speed if that is known and used.
        """
        if not (self.learn_link_speed and work.link_bytes_per_s > 0.0):
            return self.transfer_s_per_token
        return self.kv_bytes_per_token / work.link_bytes_per_s

    def prefill_s(self, work: PrefillWork, prompt_tokens: int) -> Seconds:
        """Return the time in seconds until the endpoint of `work` has computed the prompt, with the
        time that this takes from the requests that it decodes.
        """
        prefill = prefill_work(prompt_tokens, work.uncached_tokens)
        delay = self.prefill_delay * max(0.0, prefill - STEP_TOKENS)
        prefill += work.decoding_requests * delay
        return (work.pending_tokens + prefill) / work.tokens_per_s

    def remote_overhead_s(self, prompt_tokens: int) -> Seconds:
        """Return the time in seconds that a remote prefill takes in addition for the prompt."""
        return self.overhead_s + prompt_tokens * self.overhead_s_per_token

    def remote_s(self, prompt_tokens: int, local: PrefillWork, remote: PrefillWork) -> Seconds:
        """Return the time in seconds until the decode endpoint has the KV cache of the prompt, if
        the endpoint of `remote` computes it, plus the time by which this delays other transfers.
        `local` is the work of the decode endpoint without it.
        """
        computed_s = self.prefill_s(remote, prompt_tokens) + self.remote_overhead_s(prompt_tokens)
        queued_s = local.pending_tokens / local.tokens_per_s
        transfer_s = self.transfer_to_s_per_token(local)
        ahead_s = max(local.receiving_tokens, remote.sending_tokens) * transfer_s
        if self.learn_link_speed and not local.link_bytes_per_s:
            ahead_s *= UNMEASURED_FACTOR
        moved_s = local.uncached_tokens * transfer_s
        delay_s = max(0.0, ahead_s - computed_s)
        return max(computed_s, queued_s, ahead_s) + moved_s + delay_s

    def saves_time(self, prompt_tokens: int, local: PrefillWork, remote: PrefillWork) -> bool:
        """Return whether the prefill should run at the endpoint of `remote`, and not at the decode
        endpoint, whose work is `local`.
        """
        if not local.uncached_tokens or not self.link_bytes_per_s:
            return False
        remote_s = self.remote_s(prompt_tokens, local, remote)
        return remote_s < self.prefill_s(local, prompt_tokens)


PrefillRule: TypeAlias = Rule | ByTime
"""The rule of a prefill stage. `ByTime` needs both endpoints, so it has no `applies`."""


class Stages(Struct, frozen=True, kw_only=True):
    """The profiles that choose the endpoints of a request, and the rules by which stages run."""

    decode: SchedulingProfile
    """Profile that chooses the endpoint to which the gateway sends the request."""
    prefill: SchedulingProfile | None = None
    """Profile that chooses the endpoint of a remote prefill, or None if every endpoint prefills its
    own requests.
    """
    encode: SchedulingProfile | None = None
    """Profile that chooses the endpoints that encode media, or None if every endpoint encodes its
    own.
    """
    prefill_if: PrefillRule = Never()
    """Rule by which the prefill stage runs."""
    encode_if: Rule = Never()
    """Rule by which the encode stage runs."""
    order: Order = Order.DECODE_FIRST
    """Order in which the endpoints are chosen. With `PREFILL_FIRST`, the prefill stage runs for every
    request that may be prefilled elsewhere, unless `prefill_if` is `ByTime`; other rules have no
    effect.
    """
    fallback: SchedulingProfile | None = None
    """Profile that chooses one endpoint for the whole request if the prefill or encode stage must
    run and has no endpoint. If it is None, such a request is refused.
    """
    prefill_end: PrefillEnd = PrefillEnd.HEADERS
    """Event from which on the request no longer counts at its prefill and encode endpoints."""
    prefill_deadline_s: Seconds = 60.0
    """Time in seconds after which a prefill stage that has not ended counts as overdue."""
    screen: SchedulingProfile | None = None
    """Profile whose filters drop candidates before any stage chooses, or None if there are none."""
    named: Mapping[str, SchedulingProfile] = field(default_factory=dict)
    """Profiles among which the header `header` of a request chooses, by name; empty if each request
    uses the profiles of the stages. `decode` is the profile of requests without the header.
    """
    header: str = ""
    """Lower-case name of the request header that names the profile, one of `named`; "" if no header
    does.
    """

    @property
    def alone(self) -> bool:
        """Return whether one endpoint serves the whole of every request, and one profile chooses it
        among all candidates.
        """
        return not (self.prefill or self.encode or self.screen or self.named)

    def named_by(self, request: InferenceRequest) -> str | Refusal:
        """Return the name in `named` of the profile that chooses an endpoint for `request`, or a
        refusal if its header names another. If `named` has only one profile, the header is ignored.
        """
        told = request.headers.get(self.header, "")
        if not told or len(self.named) == 1:
            return next(name for name, one in self.named.items() if one is self.decode)
        if told in self.named:
            return told
        return Refusal(
            reason=RefusalReason.BAD_REQUEST,
            status=400,
            message=f"header {self.header} is {told!r:.80}; expected {' or '.join(self.named)}",
        )

    def enough_cached(self, request: InferenceRequest, cached_tokens: int) -> bool:
        """Return whether an endpoint with this many cached tokens of `request` may serve it if the
        client wants a cached prompt only.
        """
        if isinstance(self.prefill_if, Uncached):
            return not self.prefill_if.applies(request, cached_tokens)
        return cached_tokens > 0

    def profiles(self) -> Iterator[tuple[str, SchedulingProfile]]:
        """Yield (name, profile) for each profile, decode first. The name is that of its stage,
        `fallback`, `screen`, or the request header and the value that select it.
        """
        named = {
            Stage.DECODE.value: self.decode,
            Stage.PREFILL.value: self.prefill,
            Stage.ENCODE.value: self.encode,
            "fallback": self.fallback,
            "screen": self.screen,
        }
        for name, profile in named.items():
            if profile is not None:
                yield name, profile
        for name, profile in self.named.items():
            if profile is not self.decode:
                yield f"{self.header} {name}", profile


def rotation_of(stage: Stage, rotation: int) -> int:
    """Return the number by which `stage` breaks ties between endpoints in decision number
    `rotation`.
    """
    factor = ROTATION_FACTORS.get(stage)
    return rotation if factor is None else rotation * factor >> ROTATION_SHIFT


def may_prefill_elsewhere(request: InferenceRequest) -> bool:
    """Return whether the sidecar of the decode endpoint would obey the prefill header of `request`.

    It obeys it on five paths. A request with several prompts is excluded, because the request that
    the sidecar sends to the prefill endpoint would compute an answer for each.
    """
    return request.prompt_count == 1 and _may_be_remote(request, _PREFILL_PATHS, _PREFILL_APIS)


def may_encode_elsewhere(request: InferenceRequest) -> bool:
    """Return whether the sidecar of the decode endpoint would obey the encode header of `request`."""
    return _may_be_remote(request, _ENCODE_PATHS, _ENCODE_APIS)


def _may_be_remote(
    request: InferenceRequest, paths: tuple[str, ...], apis: frozenset[ApiKind]
) -> bool:
    """Return whether the method of `request` is POST and its path ends with one of `paths`. If the
    gateway does not report the path, return whether the API of `request` is one of `apis`.
    """
    headers = request.headers
    path = headers.get(":path", "")
    if not path:
        return request.api in apis
    return headers.get(":method", "POST") == "POST" and path.partition("?")[0].endswith(paths)
