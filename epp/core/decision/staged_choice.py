"""The choice of the endpoints of one request, stage by stage, in either order.

Each stage chooses among the same candidates with its own profile. Two things pass from one stage to
another: the endpoint that was chosen before (`Candidates.peer`), and the number of prompt tokens
that the decode endpoint has cached, which the rules of other stages may read. A rule by time is applied after
both endpoints were chosen.
"""

from typing import Final, Protocol

from msgspec import Struct, structs

from epp.core.decision.account import Route
from epp.core.decision.choice import Choice
from epp.core.decision.if_available import if_available, not_cached
from epp.core.decision.stages import (
    ByTime,
    Order,
    PrefillWork,
    Stages,
    may_encode_elsewhere,
    may_prefill_elsewhere,
)
from epp.core.prompt.request import InferenceRequest
from epp.core.types import DECODE, ENCODE, PREFILL, Refusal, RefusalReason, Stage


class StageChoice(Protocol):
    """A function that returns the choice of an endpoint for a stage. Its arguments are the stage,
    the slot of the peer, or -1 if there is no peer, and the name of a profile other than that of the
    stage, or "".
    """

    def __call__(self, stage: Stage, peer: int, named: str = "", /) -> Choice | Refusal: ...


_NO_ENDPOINTS: Final = {
    Stage.PREFILL: RefusalReason.NO_PREFILL_ENDPOINTS,
    Stage.ENCODE: RefusalReason.NO_ENCODE_ENDPOINTS,
}
"""Reason of a refusal if the stage has no endpoint, by stage. Other stages have the usual reason.
"""


class StagedChoice(Struct, frozen=True):
    """The endpoints that were chosen for the stages of one request."""

    decode: Choice
    prefill: Choice | None = None
    """Choice of the prefill endpoint, or None if the request has no prefill leg."""
    encode: Choice | None = None
    """Choice of the encode endpoints, or None if the request has no encode leg."""
    work: Stage = DECODE
    """Stage that the request itself asks for. The choice `decode` is that of an endpoint for it."""
    prefilled: bool = False
    """True if another request prefilled the prompt of this one elsewhere."""
    profile: str = ""
    """Name in `Stages.named` of the profile that chose, or "" if those of the stages chose."""

    @property
    def route(self) -> Route:
        """Return the stages that have an endpoint of their own, as the route of the request."""
        if self.encode is None:
            return Route.DECODE_ONLY if self.prefill is None else Route.PREFILL_DECODE
        return Route.ENCODE_DECODE if self.prefill is None else Route.ENCODE_PREFILL_DECODE


def decode_first(
    stages: Stages,
    request: InferenceRequest,
    choose: StageChoice,
) -> StagedChoice | Refusal:
    """Choose the endpoints of a request: decode, then encode, then prefill near the decode
    endpoint. Return the refusal of the first stage that must run and has none.
    """
    decode = choose(DECODE, -1)
    if isinstance(decode, Refusal):
        return _named(DECODE, decode)
    cached_tokens = decode.cached_tokens
    encode = None if stages.encode is None else _encode(stages, request, choose, cached_tokens)
    if isinstance(encode, Refusal):
        return encode
    prefill, rule = None, stages.prefill_if
    if (
        stages.prefill is not None
        and (isinstance(rule, ByTime) or rule.applies(request, cached_tokens))
        and may_prefill_elsewhere(request)
    ):
        remote = _prefill(stages, choose, decode.slot)
        if isinstance(remote, Refusal):
            return remote
        prefill = remote
    chosen = StagedChoice(decode, prefill, encode)
    return _without_detours(_within_time(chosen, stages, request))


def prefill_first(
    stages: Stages,
    request: InferenceRequest,
    choose: StageChoice,
) -> StagedChoice | Refusal:
    """Choose the endpoints of a request: prefill, then encode, then decode near the prefill
    endpoint. Return the refusal of the first stage that must run and has none.
    """
    prefill = None
    if stages.prefill is not None and may_prefill_elsewhere(request):
        remote = _prefill(stages, choose, -1)
        if isinstance(remote, Refusal):
            return remote
        prefill = remote
    encode = None if stages.encode is None else _encode(stages, request, choose, 0)
    if isinstance(encode, Refusal):
        return encode
    peer = -1 if prefill is None else prefill.slot
    decode = choose(DECODE, peer)
    if isinstance(decode, Refusal):
        return _named(DECODE, decode)
    chosen = StagedChoice(decode, prefill, encode)
    return _without_detours(_within_time(chosen, stages, request))


def _prefill(stages: Stages, choose: StageChoice, peer: int) -> Choice | Refusal | None:
    """Return the choice of the prefill endpoint, or None if there is none and the prefill is not
    required to run elsewhere, because its rule is by time.
    """
    chosen = choose(PREFILL, peer)
    if isinstance(chosen, Refusal):
        by_time = isinstance(stages.prefill_if, ByTime)
        return None if by_time else _named(PREFILL, chosen)
    return chosen


def _within_time(chosen: StagedChoice, stages: Stages, request: InferenceRequest) -> StagedChoice:
    """Return `chosen` without its prefill endpoint if the rule is by time and a remote prefill
    saves no time; else `chosen`.
    """
    rule, prefill = stages.prefill_if, chosen.prefill
    if prefill is None or not isinstance(rule, ByTime):
        return chosen
    local = _work(chosen.decode, chosen.decode)
    if rule.saves_time(request.prompt_tokens, local, _work(prefill, chosen.decode)):
        return chosen
    return structs.replace(chosen, prefill=None)


def _work(choice: Choice, decode: Choice) -> PrefillWork:
    """Return the work of the endpoint of `choice` if it computes the prompt.

    Its prefill delays decoding only if it is among the candidates of the decode stage.
    """
    numbers = choice.ranked.prefill_numbers_of(choice.picked[0])
    uncached, pending, tokens_per_s, running, receiving, sending, link = numbers
    decodes = choice is decode or bool((decode.ranked.slot == choice.slot).any())
    return PrefillWork(
        uncached_tokens=uncached,
        pending_tokens=pending,
        tokens_per_s=tokens_per_s,
        decoding_requests=running if decodes else 0.0,
        receiving_tokens=receiving,
        sending_tokens=sending,
        link_bytes_per_s=link,
    )


def one_request(
    stages: Stages,
    request: InferenceRequest,
    choose: StageChoice,
) -> StagedChoice | Refusal:
    """Choose one endpoint for a request that the picker must not split into stages: its client
    sends one request for each stage, or wants a cached prompt only. Split any other request.

    A profile with the name of a stage does the work of that stage. A request that asks for decode
    was prefilled by an earlier one, unless the client wants a cached prompt only. Return a refusal
    if the header names no profile, if no endpoint is left, or if too little of the prompt is cached
    for a client that wants a cached prompt only.
    """
    name = stages.named_by(request) if stages.named else ""
    if isinstance(name, Refusal):
        return name
    available_only = if_available(request.headers)
    if not (name or available_only):
        order = prefill_first if stages.order is Order.PREFILL_FIRST else decode_first
        return order(stages, request, choose)
    choice = choose(DECODE, -1, name)
    if isinstance(choice, Refusal):
        return choice
    cached_tokens = choice.cached_tokens
    if available_only and not stages.enough_cached(request, cached_tokens):
        where = choice.ranked.name_of(choice.picked[0])
        return not_cached(where, request.prompt_tokens, cached_tokens)
    work = Stage(name) if name in set(Stage) else DECODE
    return StagedChoice(
        choice,
        work=work,
        prefilled=work is DECODE
        and PREFILL in stages.named
        and stages.header in request.headers
        and not available_only,
        profile=name,
    )


def _encode(
    stages: Stages, request: InferenceRequest, choose: StageChoice, cached_tokens: int
) -> Choice | Refusal | None:
    """Return the choice of encode endpoints, None if the encode stage does not run, or the refusal
    if it has no endpoint.
    """
    if not (may_encode_elsewhere(request) and stages.encode_if.applies(request, cached_tokens)):
        return None
    chosen = choose(ENCODE, -1)
    return _named(ENCODE, chosen) if isinstance(chosen, Refusal) else chosen


def _without_detours(chosen: StagedChoice) -> StagedChoice:
    """Return `chosen` without each stage whose endpoint also works on the stage after it, because
    that endpoint needs no header to do both.
    """
    if chosen.prefill is not None and chosen.prefill.slot == chosen.decode.slot:
        chosen = structs.replace(chosen, prefill=None)
    computing = chosen.prefill or chosen.decode
    if chosen.encode is not None and chosen.encode.slot == computing.slot:
        chosen = structs.replace(chosen, encode=None)
    return chosen


def _named(stage: Stage, refusal: Refusal) -> Refusal:
    """Return `refusal` of one stage as that of the whole request, which names `stage`."""
    reason = refusal.reason
    if reason is RefusalReason.NO_ENDPOINTS:
        reason = _NO_ENDPOINTS.get(stage, reason)
    message = f"the request cannot be served in stage {stage}: {refusal.message}"
    return structs.replace(refusal, reason=reason, message=message, stage=stage)
