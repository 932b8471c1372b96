"""Messages of msgspec, said again for people: made by msgspec itself."""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from epp.core.expectation import place_and_sentence


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Pod(Struct, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=1, le=9)] = 1
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    name: Annotated[str, Meta(min_length=1, pattern="^[a-z]*$")] = "a"
    weight: float | None = None
    colour: Colour = Colour.RED
    labels: dict[str, str] = {}
    shades: dict[str, tuple[Colour, ...] | None] = {}
    scheme: Literal["http", "https"] = "http"
    peers: Annotated[list[int], Meta(max_length=2)] = []
    ready: bool = True


class Pool(Struct):
    pods: list[Pod]


@pytest.mark.parametrize(
    ("document", "place", "sentence"),
    [
        ([], "", "expected a mapping, got a list"),
        ({}, "", "needs field `pods`"),
        ({"pods": 1}, ".pods", "expected a list, got a whole number"),
        ({"pods": [{"port": "x"}]}, ".pods[0].port", "expected a whole number, got a text"),
        ({"pods": [{"port": 0}]}, ".pods[0].port", "expected a whole number of at least 1"),
        ({"pods": [{"port": 10}]}, ".pods[0].port", "expected a whole number of at most 9"),
        ({"pods": [{"share": 0}]}, ".pods[0].share", "expected a number above 0"),
        ({"pods": [{"share": 1.5}]}, ".pods[0].share", "expected a number of at most 1"),
        ({"pods": [{"name": ""}]}, ".pods[0].name", "expected a text of at least 1 character"),
        ({"pods": [{"name": "A"}]}, ".pods[0].name", "expected a text that matches '^[a-z]*$'"),
        (
            {"pods": [{"weight": True}]},
            ".pods[0].weight",
            "expected a number or nothing, got true or false",
        ),
        (
            {"pods": [{"colour": "blue"}]},
            ".pods[0].colour",
            "expected red or green, got 'blue'",
        ),
        (
            {"pods": [{"shades": {"a": ["red", "blue"]}}]},
            ".pods[0].shades[...][1]",
            "expected red or green, got 'blue'",
        ),
        ({"pods": [{"scheme": "ftp"}]}, ".pods[0].scheme", "expected http or https, got 'ftp'"),
        ({"pods": [{"labels": {"a": 1}}]}, ".pods[0].labels[...]", "expected a text, got a whole number"),
        ({"pods": [{"peers": [1, 2, 3]}]}, ".pods[0].peers", "expected a list of at most 2 entries"),
        ({"pods": [{"ready": None}]}, ".pods[0].ready", "expected true or false, got nothing"),
        ({"pods": [{"prot": 1}]}, ".pods[0]", "has unknown field `prot`"),
    ],
)  # fmt: skip
def test_what_msgspec_says_is_said_in_words(document, place, sentence):
    """Without backticks round types, and without the dollar of the path."""
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(document, Pool)
    assert place_and_sentence(str(refused.value), Pool) == (place, sentence)


def test_values_of_a_type_that_nobody_names_cannot_be_told():
    """Who has the message alone tells what was given."""
    told = place_and_sentence("Invalid enum value 'blue' - at `$.pods[0].colour`")
    assert told == (".pods[0].colour", "'blue' is not one of the possible values")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "expected more: the text ends before it is whole"),
        (b"[", "expected more: the text ends before it is whole"),
        (b"kind", "expected JSON: invalid character (byte 0)"),
    ],
)
def test_what_is_no_json_is_said_in_words(text, sentence):
    """msgspec decodes it, and knows no more."""
    with pytest.raises(msgspec.DecodeError) as refused:
        msgspec.json.decode(text)
    assert place_and_sentence(str(refused.value)) == ("", sentence)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("'5' is not a duration", "'5' is not a duration"),
        ("Expected one of these", "expected one of these"),
        ("two\nlines", "two\nlines"),
        ("", ""),
    ],
)
def test_what_we_say_ourselves_stays(message, sentence):
    """Up to its first letter."""
    assert place_and_sentence(message) == ("", sentence)
