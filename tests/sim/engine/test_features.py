"""Features of engines by name."""

import pytest

from sim.engine.features import (
    FEATURES,
    FeatureError,
    Ranks,
    Speculative,
    WholePrompts,
    feature_named,
    feature_spelt,
    features_named,
)

TEXTS = ("whole-prompts", "speculative:acceptance=0.7/0.4", "ranks:count=4")


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "speculative:acceptance=0.7,draft_s=0.001",
        "speculative:acceptance=0:0.7/0.4+9000:0.5/0.2",
    ],
)
def test_a_feature_is_spelt_as_it_is_told(text):
    """What is not the default."""
    assert feature_spelt(feature_named(text)) == text


def test_there_is_a_text_for_each():
    """Or the tests here leave one out."""
    assert {text.partition(":")[0] for text in TEXTS} == set(FEATURES)


def test_features_are_in_one_order_however_they_are_told():
    """And each is what it says."""
    told = features_named(reversed(TEXTS))
    assert told == (WholePrompts(), Speculative(acceptance="0.7/0.4"), Ranks(count=4))
    assert told[1].speculation().acceptance == (0.7, 0.4)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (
            ["eagle"],
            "No feature 'eagle' of engines; expected one of whole-prompts, speculative, ranks",
        ),
        (["whole-prompts:x=1"], "No parameter 'x=1' of the feature whole-prompts; expected none"),
        (["ranks:size=2"], "No parameter 'size=2' .* with one of count"),
        (["ranks:count=1"], "at least 2"),
        (["ranks"], "count"),
        (["speculative"], "acceptance"),
        (["speculative:acceptance=0.4/0.7"], "none above the one before it, got 0.4/0.7"),
        (["speculative:acceptance=a"], "acceptance"),
        (["speculative:acceptance=9:0.7+8:0.4"], "longer than the one before it"),
        (["speculative:acceptance=9:0.7+0.4"], "acceptance"),
        (["speculative:acceptance=0.7,draft_s=-1"], "draft_s"),
        (["ranks:count=2", "ranks:count=3"], "ranks is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused(texts, told):
    """In one sentence."""
    with pytest.raises(FeatureError, match=told):
        features_named(texts)
