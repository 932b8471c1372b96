"""AIBrix's fits of prefill times."""

import pytest

from epp.strategies.preble_prefill import Gpu, prefill_s


@pytest.mark.parametrize(
    ("gpu", "tokens", "context", "milliseconds"),
    [
        (Gpu.V100, 100, 100, 55.0 + 0.80),
        (Gpu.V100, 200, 2_000, -295 + 3.125 * 200 - 6.4e-3 * 200**2 + (4.65e-4 * 2_000 + 0.398) / 2),
        (Gpu.V100, 2_000, 2_000, 0.27106428 * 2_000 + 10.52444263 + 4.65e-4 * 2_000 + 0.398),
        (Gpu.A6000, 384, 384, 0.10842571 * 384 + 4.209777054806409 + 0.32),
        (
            Gpu.A6000, 4_096, 8_000,
            0.10842571 * 4_096 + 4.209777054806409 + 1.86e-4 * 8_000 + 0.159
            - 7.37 + 3.86e-3 * 4_096 + 2.16e-6 * 4_096**2,
        ),
    ],
)  # fmt: skip
def test_the_fits_by_hand(gpu, tokens, context, milliseconds):
    """Each range once, and both cards."""
    assert prefill_s(gpu, tokens, context) == pytest.approx(milliseconds / 1_000 / 0.9)
