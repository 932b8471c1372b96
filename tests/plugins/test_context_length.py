import pytest
from msgspec import ValidationError, convert

from epp.plugins.context_length import ContextLengthAware, ContextLengthRange
from tests.builders import candidates, request

LABEL = "llm-d.ai/context-length-range"


def pool(*ranges):
    return candidates(labels=[{} if one is None else {LABEL: one} for one in ranges])


def scores(tokens, *ranges, **fields):
    asked = request(prompt_tokens=tokens, **fields)
    return ContextLengthAware().score(asked, pool(*ranges)).tolist()


def test_within_its_range_an_endpoint_gets_more_the_narrower_it_is():
    """The formula of the field: 0.3 and 0.7 times (0.7 by width, 0.3 by room above)."""
    narrow, wide, none = scores(1_000, "0-2000", "0-10000", None)
    assert narrow == pytest.approx(0.3 + 0.7 * (0.7 / 1.2 + 0.3 * 0.5))
    assert wide == pytest.approx(0.3 + 0.7 * (0.7 / 2 + 0.3 * 0.9))
    assert none == 0.5


def test_beyond_its_range_the_nearer_is_better_and_worse_than_any_within():
    """So that a prompt that nobody is meant for goes to who comes closest."""
    near, far, within = scores(3_000, "0-2000", "10000-20000", "3000-3000")
    assert (near, far, within) == (
        pytest.approx(0.3 / 2),
        pytest.approx(0.3 / 8),
        1.0,
    )


def test_the_engines_own_tokens_count_where_they_are_known():
    """Four bytes an id."""
    assert scores(9_999, "8-8", token_ids=(bytes(4 * 3), bytes(4 * 5))) == [1.0]


HOSTILE = ["", "-", "a-b", "5", "1-2-3", "9-1", "-5-7", "1-" + "9" * 40, "²-³", "0-1" * 99]


@pytest.mark.parametrize("label", HOSTILE)
def test_a_label_that_is_no_range_gets_nothing_and_keeps_nothing(label):
    """Whoever may label pods writes it."""
    assert scores(5, label) == [0.0]
    assert ContextLengthRange().keep(request(prompt_tokens=5), pool(label)).tolist() == [False]


def test_the_filter_keeps_ranges_with_the_prompt_and_who_has_no_label():
    """It comes with the scorer, where that is told to filter."""
    assert ContextLengthAware().filter is None
    brought = convert({"enableFiltering": True, "label": LABEL}, ContextLengthAware).filter
    kept = brought.keep(request(prompt_tokens=100), pool("0-100", "101-200", None, " 0 - 400 "))
    assert kept.tolist() == [True, False, True, True]


def test_an_empty_label_is_refused():
    """Nobody could have it."""
    with pytest.raises(ValidationError):
        convert({"label": ""}, ContextLengthAware)
