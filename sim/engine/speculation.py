"""Speculative decoding: the number of accepted draft tokens per pass, and the cost of drafting.

Acceptance is configured by position, as vLLM counts it
(`vllm:spec_decode_num_accepted_tokens_per_pos` over `vllm:spec_decode_num_drafts`). It is the share
of all passes that accept the token at a position and all tokens before it. Therefore one random
number per pass determines how many tokens are accepted. It depends on the request and the position
in its answer, so a request has the same acceptances in every run.

Acceptance may depend on the context length. It is then configured at some lengths. Between two
lengths it is interpolated linearly; beyond the first and the last it is constant.

Drafting takes `draft_s` for each draft token of a pass, for any number of requests, because a
drafter reads its weights once for all. The default is that of EAGLE for Llama-3.1-8B on an H100 in
vLLM 0.10.1: 2.135 ms for three tokens, as fitted by SpecDecode-Bench/simulator (arXiv 2601.11580).
"""

from bisect import bisect_right
from itertools import pairwise
from typing import Final

import xxhash
from msgspec import Struct

DRAFT_S: Final = 0.71e-3
DRAFTED_MAX: Final = 16
"""Maximum number of draft tokens per pass. Real engines draft 1 to 8."""
CONTEXTS_MAX: Final = 16
"""Maximum number of context lengths for which acceptance can be configured."""
_SHARES: Final = r"[0-9.]+(/[0-9.]+)*"
ACCEPTANCE_TEXT: Final = rf"\A({_SHARES}|[0-9]{{1,9}}:{_SHARES}(\+[0-9]{{1,9}}:{_SHARES})*)\Z"
_WHOLE: Final = float(2**64)


class AcceptanceAt(Struct, frozen=True):
    """The acceptance of draft tokens at a context length of `context_tokens`."""

    context_tokens: int
    acceptance: tuple[float, ...]
    """Share of the passes that accept the draft token at a position and all before it, by
    position.
    """


class Speculation(Struct, frozen=True, kw_only=True):
    """The settings of an engine's speculative decoding. Raises `ValueError` if the acceptances are
    invalid.
    """

    acceptance: tuple[float, ...]
    """Acceptance of draft tokens by position, for contexts up to the first length in `longer`; for
    all contexts if `longer` is empty.
    """
    longer: tuple[AcceptanceAt, ...] = ()
    """Acceptance of draft tokens at some context lengths, ascending, interpolated linearly in
    between. The first has the values of `acceptance`. An empty tuple means that `acceptance`
    applies to all contexts.
    """
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
        """Number of draft tokens per pass of each decoding request."""
        return len(self.acceptance)

    def acceptance_at(self, context_tokens: int) -> tuple[float, ...]:
        """Return the acceptance of draft tokens by position at a context length of
        `context_tokens`.
        """
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
        """Return how many draft tokens the request accepts in the pass that begins after
        `generated_tokens` tokens of its answer.
        """
        drawn = xxhash.xxh3_64_intdigest(request_id.encode(), seed=generated_tokens) / _WHOLE
        shares = self.acceptance_at(context_tokens) if self.longer else self.acceptance
        tokens = 0
        for share in shares:
            if drawn >= share:
                break
            tokens += 1
        return tokens


def speculation_of(text: str, draft_s: float = DRAFT_S) -> Speculation:
    """Return the speculative decoding that a text describes: `0.7/0.45` for all contexts, or
    `1024:0.7/0.45+32768:0.5/0.2` for several context lengths. Raises `ValueError` for an invalid
    text.
    """
    if ":" not in text:
        return Speculation(acceptance=_shares_of(text), draft_s=draft_s)
    told: list[AcceptanceAt] = []
    for part in text.split("+"):
        context, _, shares = part.partition(":")
        told.append(AcceptanceAt(int(context), _shares_of(shares)))
    return Speculation(acceptance=told[0].acceptance, longer=tuple(told), draft_s=draft_s)


def _shares_of(text: str) -> tuple[float, ...]:
    """Parse numbers separated by slashes. Raises `ValueError` for another text."""
    try:
        return tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise ValueError(f"expected numbers with / between them, got {text!r}") from None
