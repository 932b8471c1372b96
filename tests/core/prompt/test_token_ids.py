import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.prompt.token_ids import (
    COMPARED_MIN,
    MODELS_MAX,
    Agreement,
    first_difference,
    packed,
    unpacked,
)

IDS = st.lists(st.integers(0, 2**32 - 1))


@given(IDS)
def test_packed_ids_are_four_bytes_each(ids):
    """The same as of prompts that come as ids."""
    assert unpacked(packed(ids)) == ids
    assert packed(ids) == b"".join(number.to_bytes(4, "little") for number in ids)


@pytest.mark.parametrize("number", [-1, 2**32])
def test_what_is_no_id_is_not_packed(number):
    """The type of what can be raised is known."""
    with pytest.raises(OverflowError):
        packed([number])


@given(IDS, IDS)
def test_the_first_difference_is_as_far_as_both_go(ours, theirs):
    """An engine tells of the blocks that are full."""
    expected = next(
        (at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
        None,
    )
    assert first_difference(packed(ours), packed(theirs)) == expected


def compared(agreement, model, agreed, differ):
    right, wrong = packed([1, 2, 3]), packed([1, 9])
    told = [agreement.compare(model, right, right) for _ in range(agreed)]
    return [
        one for one in told + [agreement.compare(model, right, wrong) for _ in range(differ)] if one
    ]


def test_a_model_whose_ids_are_not_the_engines_is_warned_of_once():
    """With where they part."""
    (told,) = compared(Agreement(), "m", COMPARED_MIN - 20, 200)
    assert (told.model, told.position) == ("m", 1)
    assert told.agreed < 0.95 * told.compared


def test_a_few_differences_say_nothing():
    """A prompt may have been cut, or its session's tools changed."""
    agreement = Agreement()
    assert compared(agreement, "m", COMPARED_MIN, 5) == []
    assert agreement.exact("m")
    assert agreement.exact("never compared")


def test_a_model_is_judged_after_enough_prompts():
    """The first ones may be odd."""
    agreement = Agreement()
    assert compared(agreement, "m", 0, COMPARED_MIN - 1) == []
    assert agreement.exact("m")
    assert len(compared(agreement, "m", 0, 1)) == 1
    assert not agreement.exact("m")
    assert agreement.rows() == [("m", COMPARED_MIN, 0)]


def test_models_are_bounded():
    """Their names are clients'."""
    agreement = Agreement()
    for number in range(MODELS_MAX + 10):
        agreement.compare(str(number), b"", b"")
    assert len(agreement.rows()) == MODELS_MAX
