"""What a log shows of an exception."""

import io
import json
import os
import ssl

import pytest

from epp.shell.process.tracebacks import EXCEPTIONS_MAX, FRAMES_MAX, as_data, as_lines

SECRET = "canary-7f3a"


def raised(fail):
    """What `sys.exc_info()` is where `fail` failed, with a secret in a local variable."""
    local = SECRET
    with pytest.raises(Exception) as caught:  # noqa: PT012 - the local is what it is about
        assert local
        fail()
    return caught.type, caught.value, caught.tb


def shown(fail):
    """Both formats of it."""
    lines = io.StringIO()
    as_lines(lines, raised(fail))
    return json.dumps(as_data(raised(fail))), lines.getvalue()


def quoting():
    raise ValueError(f"cannot use {SECRET}")


def looking_up():
    {}[SECRET]


def noted():
    error = ValueError()
    error.add_note(SECRET)
    raise error


def decoding():
    SECRET.encode().decode("utf-16-le")
    b"\xff".decode()


def from_another():
    try:
        quoting()
    except ValueError as error:
        raise RuntimeError(SECRET) from error


def within_another():
    try:
        quoting()
    finally:
        looking_up()


def in_a_group():
    raise ExceptionGroup(SECRET, [ValueError(SECRET), ExceptionGroup("g", [KeyError(SECRET)])])


def unsayable():
    class UnsayableError(Exception):
        def __str__(self):
            raise RuntimeError(SECRET)

    raise UnsayableError(SECRET)


def with_number():
    raise OSError(5, SECRET)


def in_syntax():
    compile(f"{SECRET} = (", SECRET, "exec")


@pytest.mark.parametrize(
    "fail",
    [
        quoting,
        looking_up,
        noted,
        decoding,
        from_another,
        within_another,
        in_a_group,
        unsayable,
        with_number,
        in_syntax,
    ],
    ids=lambda fail: fail.__name__,
)
def test_neither_locals_nor_texts_are_shown(fail):
    """Of an exception, what it came from and what is in it: types and places only."""
    for format_of in shown(fail):
        assert SECRET not in format_of
        assert fail.__name__ in format_of or fail is in_syntax


def test_types_and_places_are_shown():
    """Enough to find the line, of the causes too."""
    data = as_data(raised(from_another))
    assert [(told["how"], told["exc_type"]) for told in data] == [
        ("raised", "RuntimeError"),
        ("from", "ValueError"),
    ]
    innermost = data[1]["frames"][-1]
    assert innermost["filename"] == __file__
    assert innermost["name"] == "quoting"
    assert innermost["lineno"] == quoting.__code__.co_firstlineno + 1


def test_members_of_a_group_are_shown():
    """A task group tells which of its tasks failed."""
    assert [told["exc_type"] for told in as_data(raised(in_a_group))] == [
        "ExceptionGroup",
        "ValueError",
        "ExceptionGroup",
        "KeyError",
    ]


def test_a_text_that_stands_in_the_code_is_kept():
    """It quotes nobody."""

    def fail():
        raise ValueError("the weights are all 0")

    data, lines = shown(fail)
    assert "the weights are all 0" in data
    assert "raised ValueError: the weights are all 0\n" in lines


def test_the_words_of_the_system_are_kept():
    """Of a file that is not there, without its name; an error of another library is no errno."""

    def fail():
        os.stat(f"/nonexistent/{SECRET}")

    assert as_data(raised(fail))[0]["exc_value"] == "No such file or directory"

    def other():
        raise ssl.SSLError(1, SECRET)

    assert as_data(raised(other))[0]["exc_value"] == ""


def test_what_is_shown_is_bounded():
    """Neither recursion nor a chain nor a group makes a long line."""

    def deep():
        deep()

    assert len(as_data(raised(deep))[0]["frames"]) == FRAMES_MAX

    def chain(links=100):
        try:
            if links:
                chain(links - 1)
        finally:
            raise ValueError

    assert len(as_data(raised(chain))) == EXCEPTIONS_MAX

    def wide():
        raise ExceptionGroup("many", [ValueError() for _ in range(10_000)])

    assert len(as_data(raised(wide))) == EXCEPTIONS_MAX

    def round_and_round():
        error = ValueError()
        error.__cause__ = KeyError()
        error.__cause__.__cause__ = error
        raise error

    assert len(as_data(raised(round_and_round))) == 2
