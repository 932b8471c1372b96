import pytest

from epp.core.duration import Duration, check_above_zero, duration_text, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("50ms", 0.05), ("1m30s", 90.0), ("2h", 7200.0), ("1.5s", 1.5), ("-1s", -1.0)],
)
def test_go_durations_are_read(text, seconds):
    """A Go duration becomes seconds."""
    assert parse_duration(text) == pytest.approx(seconds)
    assert isinstance(parse_duration(text), Duration)


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "5x", "1s2", "١s"])
def test_anything_else_is_refused_in_one_sentence(text):
    """The sentence repeats what was written and says what was expected."""
    with pytest.raises(ValueError, match="is not a duration such as"):
        parse_duration(text)


@pytest.mark.parametrize("span_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_span_that_must_last_is_refused_when_it_does_not(span_s):
    """By its name, and with what it is."""
    check_above_zero("ttl", Duration(1e-9))
    with pytest.raises(ValueError, match=r"ttl is .*; it must be finite and above 0s"):
        check_above_zero("ttl", Duration(span_s))


@pytest.mark.parametrize(
    ("span_s", "text"),
    [
        (0.0, "0s"),
        (0.05, "0.05s"),
        (90.0, "90s"),
        (1e-05, "10us"),
        (2.5e-08, "0.025us"),
        (-3e-05, "-30us"),
        (2e6, "2000000s"),
    ],
)
def test_a_duration_is_written_without_an_exponent(span_s, text):
    """The text can be read again."""
    assert duration_text(span_s) == text
    assert parse_duration(text) == pytest.approx(span_s)
