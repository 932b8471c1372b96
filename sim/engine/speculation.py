"""Speculative decoding: how many drafted tokens a pass accepts, and what drafting costs.

Acceptance is told by position, as vLLM counts it (`vllm:spec_decode_num_accepted_tokens_per_pos`
over `vllm:spec_decode_num_drafts`): of all passes the share that accept the token at this position,
and with it all before. One number drawn for a pass so decides how many of its tokens are accepted. It is
drawn from the request and the place in its answer: the same request meets the same acceptances
wherever and whenever it is served.

Drafting takes `draft_s` for each drafted token of a pass, whoever decodes: a drafter's pass reads its
weights once for all. The default is EAGLE's for Llama-3.1-8B on an H100 in vLLM 0.10.1, 2.135 ms for
three tokens, as SpecDecode-Bench/simulator has fitted it (arXiv 2601.11580).
"""

from typing import Final

import xxhash
from msgspec import Struct

DRAFT_S: Final = 0.71e-3
DRAFTED_MAX: Final = 16
"""Tokens a pass; engines draft 1 to 8."""
ACCEPTANCE_TEXT: Final = r"\A[0-9.]+(/[0-9.]+)*\Z"
_WHOLE: Final = float(2**64)


class Speculation(Struct, frozen=True, kw_only=True):
    """Of one engine; ValueError if the acceptances cannot be."""

    acceptance: tuple[float, ...]
    """By position."""
    draft_s: float = DRAFT_S

    def __post_init__(self) -> None:
        shares = self.acceptance
        if not 1 <= len(shares) <= DRAFTED_MAX:
            raise ValueError(f"expected 1 to {DRAFTED_MAX} acceptances, got {len(shares)}")
        if not all(0.0 <= share <= 1.0 for share in shares) or list(shares) != sorted(
            shares, reverse=True
        ):
            told = "/".join(f"{share:g}" for share in shares)
            raise ValueError(
                f"expected acceptances from 0 to 1, none above the one before it, got {told}"
            )

    @property
    def drafted_tokens(self) -> int:
        """A pass and request."""
        return len(self.acceptance)

    @property
    def length(self) -> float:
        """Tokens that a pass gives a request on average: the accepted ones and one more."""
        return 1.0 + sum(self.acceptance)

    def accepted(self, request_id: str, generated_tokens: int) -> int:
        """How many drafted tokens a request accepts in the pass at this place of its answer."""
        drawn = xxhash.xxh3_64_intdigest(request_id.encode(), seed=generated_tokens) / _WHOLE
        tokens = 0
        for share in self.acceptance:
            if drawn >= share:
                break
            tokens += 1
        return tokens


def acceptance_of(text: str) -> tuple[float, ...]:
    """Shares with slashes between them. Raises ValueError."""
    try:
        return tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise ValueError(f"expected numbers with / between them, got {text!r}") from None
