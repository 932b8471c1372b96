import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.prompt.token_ids import (
    COMPARED_MIN,
    MODELS_MAX,
    TRIED_EACH,
    Agreement,
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


def compared(agreement, model, agreed, differ):
    told = [agreement.note(model, None) for _ in range(agreed)]
    return [one for one in told + [agreement.note(model, 64) for _ in range(differ)] if one]


def test_a_model_whose_ids_are_not_the_engines_is_warned_of_once():
    """With how far they are the same."""
    (told,) = compared(Agreement(), "m", COMPARED_MIN - 20, 400)
    assert (told.model, told.same_tokens) == ("m", 64)
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
    (row,) = agreement.rows()
    assert (row.model, row.compared, row.agreed, row.exact) == ("m", COMPARED_MIN, 0, False)


def test_ids_that_are_not_the_engines_are_found_out_now_and_then():
    """Those that are are always; when they are again, always again."""
    agreement = Agreement()
    assert all(agreement.asks("m") for _ in range(2 * TRIED_EACH))
    compared(agreement, "m", 0, 1_000)
    assert sum(agreement.asks("m") for _ in range(10 * TRIED_EACH)) == 10
    compared(agreement, "m", 1_000, 0)
    assert all(agreement.asks("m") for _ in range(2 * TRIED_EACH))


def test_models_are_bounded():
    """Their names are clients'."""
    agreement = Agreement()
    for number in range(MODELS_MAX + 10):
        agreement.note(str(number), None)
    assert len(agreement.rows()) == MODELS_MAX
