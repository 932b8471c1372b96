"""Speculative decoding: how many drafted tokens a pass accepts, and what drafting costs.

Acceptance is told by position, as vLLM counts it (`vllm:spec_decode_num_accepted_tokens_per_pos`
over `vllm:spec_decode_num_drafts`): of all passes the share that accept the token at this position,
and with it all before. One number drawn for a pass so decides how many of its tokens are accepted. It is
drawn from the request and the place in its answer: the same request meets the same acceptances
wherever and whenever it is served.

Acceptance may depend on how long the context is: then it is told at some lengths, is on the line between
two of them, and beyond the first and the last as there.

Drafting takes `draft_s` for each drafted token of a pass, whoever decodes: a drafter's pass reads its
weights once for all. The default is EAGLE's for Llama-3.1-8B on an H100 in vLLM 0.10.1, 2.135 ms for
three tokens, as SpecDecode-Bench/simulator has fitted it (arXiv 2601.11580).
"""

from bisect import bisect_right
from itertools import pairwise
from typing import Final

import xxhash
from msgspec import Struct

DRAFT_S: Final = 0.71e-3
DRAFTED_MAX: Final = 16
"""Tokens a pass; engines draft 1 to 8."""
CONTEXTS_MAX: Final = 16
"""Lengths of context at which acceptance is told."""
_SHARES: Final = r"[0-9.]+(/[0-9.]+)*"
ACCEPTANCE_TEXT: Final = rf"\A({_SHARES}|[0-9]{{1,9}}:{_SHARES}(\+[0-9]{{1,9}}:{_SHARES})*)\Z"
_WHOLE: Final = float(2**64)


class AcceptanceAt(Struct, frozen=True):
    """What is accepted where the context has `context_tokens`."""

    context_tokens: int
    acceptance: tuple[float, ...]
    """By position."""


class Speculation(Struct, frozen=True, kw_only=True):
    """Of one engine; ValueError if the acceptances cannot be."""

    acceptance: tuple[float, ...]
    """By position, up to the first context of which more is told."""
    longer: tuple[AcceptanceAt, ...] = ()
    """In longer contexts, ascending; between two on the line. `acceptance` is that of the first; (): of
    all contexts."""
    draft_s: float = DRAFT_S

    def __post_init__(self) -> None:
        if not 1 <= len(self.acceptance) <= DRAFTED_MAX:
            raise ValueError(f"expected 1 to {DRAFTED_MAX} acceptances, got {len(self.acceptance)}")
        for shares in (self.acceptance, *(one.acceptance for one in self.longer)):
            told = "/".join(f"{share:g}" for share in shares)
            if not all(0.0 <= share <= 1.0 for share in shares) or list(shares) != sorted(
                shares, reverse=True
            ):
                raise ValueError(
                    f"expected acceptances from 0 to 1, none above the one before it, got {told}"
                )
            if len(shares) != len(self.acceptance):
                raise ValueError(
                    f"expected {len(self.acceptance)} acceptances at each context, got {told}"
                )
        contexts = [one.context_tokens for one in self.longer]
        if len(contexts) > CONTEXTS_MAX:
            raise ValueError(f"expected at most {CONTEXTS_MAX} contexts, got {len(contexts)}")
        if any(before >= after for before, after in pairwise(contexts)):
            raise ValueError(f"expected each context longer than the one before it, got {contexts}")

    @property
    def drafted_tokens(self) -> int:
        """A pass and request."""
        return len(self.acceptance)

    def acceptance_at(self, context_tokens: int) -> tuple[float, ...]:
        """By position, where the context is so long."""
        longer = self.longer
        after = bisect_right(longer, context_tokens, key=lambda one: one.context_tokens)
        if after == 0:
            return self.acceptance
        before = longer[after - 1]
        if after == len(longer):
            return before.acceptance
        above = longer[after]
        way = (context_tokens - before.context_tokens) / (
            above.context_tokens - before.context_tokens
        )
        return tuple(
            (1.0 - way) * share + way * there
            for share, there in zip(before.acceptance, above.acceptance, strict=True)
        )

    def accepted(self, request_id: str, generated_tokens: int, context_tokens: int) -> int:
        """How many drafted tokens a request accepts in the pass at this place of its answer."""
        drawn = xxhash.xxh3_64_intdigest(request_id.encode(), seed=generated_tokens) / _WHOLE
        shares = self.acceptance_at(context_tokens) if self.longer else self.acceptance
        tokens = 0
        for share in shares:
            if drawn >= share:
                break
            tokens += 1
        return tokens


def speculation_of(text: str, draft_s: float = DRAFT_S) -> Speculation:
    """As `0.7/0.45`, or at lengths of context as `1024:0.7/0.45+32768:0.5/0.2`. Raises ValueError."""
    if ":" not in text:
        return Speculation(acceptance=_shares_of(text), draft_s=draft_s)
    told: list[AcceptanceAt] = []
    for part in text.split("+"):
        context, _, shares = part.partition(":")
        told.append(AcceptanceAt(int(context), _shares_of(shares)))
    return Speculation(acceptance=told[0].acceptance, longer=tuple(told), draft_s=draft_s)


def _shares_of(text: str) -> tuple[float, ...]:
    """Shares with slashes between them. Raises ValueError."""
    try:
        return tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise ValueError(f"expected numbers with / between them, got {text!r}") from None
