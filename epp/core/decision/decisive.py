"""Which parts made the difference between who was chosen and who was not."""

import math
from collections.abc import Sequence
from typing import Final

from epp.core.decision.scheduler import Decision

ENDPOINT_HEADER: Final = "x-homing-endpoint"
REASON_HEADER: Final = "x-homing-reason"
HEADER_CHARACTERS_MAX: Final = 256
LEVEL: Final = 1e-9
"""Sums that differ by less than this share of their parts differ by rounding."""


def decisive(chosen: Sequence[float], other: Sequence[float]) -> tuple[int, ...]:
    """Positions of the fewest parts without which `chosen` would not be ahead, the greatest first.

    Both are parts of a sum, in the same order; the greater sum is ahead. Empty: it is not.
    """
    leads = [part - against for part, against in zip(chosen, other, strict=True)]
    ahead = sum(leads)
    if ahead <= LEVEL * sum(map(abs, (*chosen, *other))):
        return ()
    found: list[int] = []
    for at in sorted(range(len(leads)), key=lambda at: -leads[at]):
        found.append(at)
        ahead -= leads[at]
        if ahead <= LEVEL:
            break
    return tuple(found)


def next_best(decision: Decision) -> int | None:
    """Position of the best candidate that was not chosen; None: there was one candidate alone."""
    total = decision.scored.total
    if len(total) < 2:
        return None
    rest = total.copy()
    rest[decision.picked] = -math.inf
    return int(rest.argmax())


def explaining_headers(decision: Decision) -> dict[str, str]:
    """Who was chosen, and why, for the client: printable ASCII of at most `HEADER_CHARACTERS_MAX`.

    E.g. `score 7, next 4, decided by prefix-cache-scorer, 9 of 9 blocks`.
    """
    scored, second = decision.scored, next_best(decision)
    told = [f"score {scored.total[decision.picked]:.4g}"]
    if second is None:
        told.append("the only candidate")
    else:
        told.append(f"next {scored.total[second]:.4g}")
        found = decisive(scored.parts_of(decision.picked), scored.parts_of(second))
        names = " and ".join(decision.scorers[at] for at in found)
        told.append(f"decided by {names}" if names else "a tie")
    told.append(f"{decision.matched_blocks} of {decision.total_blocks} blocks")
    return {
        ENDPOINT_HEADER: _as_header(decision.endpoint.name),
        REASON_HEADER: _as_header(", ".join(told)),
    }


def _as_header(text: str) -> str:
    shown = "".join(one if one.isascii() and one.isprintable() else "?" for one in text)
    return shown[:HEADER_CHARACTERS_MAX]
