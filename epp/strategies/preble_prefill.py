"""How long AIBrix's variant of Preble takes a prefill to last: fits of a 7B model on two cards.

Source: `prefix_cache_preble.go` of vllm-project/aibrix (2026-08), which ships them as constants.
"""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from epp.plugins.contract import Seconds

_UTILISED: Final = 0.9


class Gpu(StrEnum):
    """Whose prefill times were fitted, for a model of 7B parameters."""

    V100 = "V100"
    A6000 = "A6000"


class _Fit(Struct, frozen=True):
    """Milliseconds: of n new tokens by three ranges, of attention to a context, of long prompts."""

    linear: tuple[float, float]
    middle: tuple[float, float, float]
    least: float
    attention: tuple[float, float]
    attention_least: float
    quadratic: tuple[float, float, float]


_FITS: Final = {
    Gpu.V100: _Fit(
        (10.52444263, 0.27106428), (-295.0, 3.125, -6.4e-3), 55.0,
        (0.398, 4.65e-4), 0.80, (-18.425, 9.65e-3, 5.4e-6),
    ),
    Gpu.A6000: _Fit(
        (4.209777054806409, 0.10842571), (-118.0, 1.25, -2.56e-3), 22.0,
        (0.159, 1.86e-4), 0.32, (-7.37, 3.86e-3, 2.16e-6),
    ),
}  # fmt: skip


def prefill_s(gpu: Gpu, tokens: int, context_tokens: int) -> Seconds:
    """Seconds that AIBrix expects for `tokens` new ones that end a context of `context_tokens`."""
    fit = _FITS[gpu]
    if tokens >= 384:
        total = fit.linear[0] + fit.linear[1] * tokens
    elif tokens >= 192:
        total = fit.middle[0] + fit.middle[1] * tokens + fit.middle[2] * tokens**2
    else:
        total = fit.least
    attention = fit.attention_least
    if context_tokens > 1_024:
        attention = fit.attention[0] + fit.attention[1] * context_tokens
        if tokens <= 1_024:
            attention /= 2
    total += attention
    if tokens >= 4_096:
        total += fit.quadratic[0] + fit.quadratic[1] * tokens + fit.quadratic[2] * tokens**2
    return total / 1_000.0 / _UTILISED
