import msgspec
import pytest

from epp.core.knowledge.prefill_speed import (
    FACTOR_MAX,
    LabelledSpeed,
    LearntSpeed,
    speed_by_labels,
)

FAST = LabelledSpeed(match_labels={"gpu": "h100"}, peak_prefill_throughput=40_000.0)
BOTH = LabelledSpeed(match_labels={"gpu": "h100", "tp": "2"}, peak_prefill_throughput=70_000.0)


def test_the_first_whose_labels_all_match():
    """Else what is said of all."""
    labels = {"gpu": "h100", "tp": "2", "app": "vllm"}
    assert speed_by_labels(labels, (FAST, BOTH), 1.0) == 40_000.0
    assert speed_by_labels(labels, (BOTH, FAST), 1.0) == 70_000.0
    assert speed_by_labels({"gpu": "h100"}, (BOTH, FAST), 1.0) == 40_000.0
    assert speed_by_labels({"gpu": "a100", "tp": "2"}, (BOTH, FAST), 1.0) == 1.0
    assert speed_by_labels({}, (), 1.0) == 1.0


@pytest.mark.parametrize(
    "given",
    [
        {"matchLabels": {}, "peakPrefillThroughput": 1},
        {"matchLabels": {"a": "b"}, "peakPrefillThroughput": 0},
        {"matchLabels": {"a": "b"}, "peakPrefillThroughput": float("inf")},
        {"matchLabels": {"a": "b"}, "peakPrefillThroughput": float("nan")},
        {"matchLabels": {"a": "b"}},
    ],
)
def test_a_speed_that_is_none_is_refused(given):
    """No labels would be everybody's; no speed at all."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, LabelledSpeed)


def test_a_speed_is_learnt_from_work_and_forgotten_again():
    """Half as fast as believed; then, after as much work again, twice as fast."""
    speed = LearntSpeed(1_000.0)
    assert speed.tokens_per_s == 1_000.0
    for _ in range(100):
        speed.worked(500.0, 1.0)
    assert speed.tokens_per_s == pytest.approx(500.0, rel=0.1)
    for _ in range(100):
        speed.worked(2_000.0, 1.0)
    assert speed.tokens_per_s == pytest.approx(2_000.0, rel=0.1)


def test_one_piece_of_work_says_little():
    speed = LearntSpeed(1_000.0)
    speed.worked(0.0, 0.1)
    assert speed.tokens_per_s > 900.0


@pytest.mark.parametrize("tokens", [0.0, 1e15])
def test_a_learnt_speed_has_bounds(tokens):
    speed = LearntSpeed(1_000.0)
    for _ in range(1_000):
        speed.worked(tokens, 1.0)
    assert speed.tokens_per_s == (1_000.0 * FACTOR_MAX if tokens else 1_000.0 / FACTOR_MAX)
