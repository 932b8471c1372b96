"""Conversion of msgspec's error messages about a document to sentences for operators.

msgspec uses programmers' terms: "Expected `int` >= 1, got `str` - at `$.pods[2].port`". This module
turns that into a whole number and a text, at `pods[2].port`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import inspect

_PLACE: Final = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$(?P<place>.*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<field>[^.\[]+)|\[[^\]]*\]")
"""Regular expression that matches one step of a place in a document: the name of a field, or an
index.
"""
_NONE_OF_THEM: Final = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_NAMES: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
    "bytes": "bytes",
    "datetime": "a date and a time",
    "date": "a date",
    "time": "a time of day",
}
_UNITS: Final[Mapping[str, tuple[str, str]]] = {
    "str": ("character", "characters"),
    "bytes": ("byte", "bytes"),
}
"""Singular and plural of the unit in which the length of a type is counted; other types have
"entries".
"""
_BOUNDS: Final[Mapping[str, str]] = {
    ">=": "of at least",
    "<=": "of at most",
    ">": "above",
    "<": "below",
}


def place_and_sentence(message: str, kind: Any = None) -> tuple[str, str]:
    """Return the place in the document that a msgspec message names, and the rest as a sentence
    that begins in lower case.

    The place is "" or begins with "." or "[". A text that is no msgspec message stays as it is.
    `kind` is the type that the document was converted to, if known. For an enumeration, msgspec
    names only the given value, and the expected values come from `kind`.
    """
    parts = _PLACE.fullmatch(message)
    assert parts is not None
    place, what = parts["place"] or "", parts["what"]
    given = _NONE_OF_THEM.fullmatch(what)
    if given and kind is not None and (values := _values(inspect.type_info(kind), place)):
        return place, f"expected {_either(values)}, got {given['value']}"
    return place, _sentence(what)


def misfit(place: str, problem: Exception, kind: Any) -> str:
    """Return one text: the place of the error, which is `place` and the place within it that
    msgspec names, and what was expected there.

    `kind` is the type to which the part of the document at `place` was converted.
    """
    within, sentence = place_and_sentence(str(problem), kind)
    return ": ".join(part for part in (place, within.removeprefix("."), sentence) if part)


def _values(kind: inspect.Type, place: str) -> list[str]:
    """Return the values that are allowed at `place` in a document of type `kind`, or [] if any
    value is.
    """
    if isinstance(kind, inspect.UnionType):
        return next((found for one in kind.types if (found := _values(one, place))), [])
    step = _STEP.match(place)
    if step is None:
        if isinstance(kind, inspect.EnumType):
            return [str(one.value) for one in kind.cls]
        return [str(one) for one in kind.values] if isinstance(kind, inspect.LiteralType) else []
    rest = place[step.end() :]
    if isinstance(kind, inspect.StructType):
        named = (one.type for one in kind.fields if one.encode_name == step["field"])
        return next((_values(one, rest) for one in named), [])
    if isinstance(kind, inspect.DictType):
        return _values(kind.value_type, rest)
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return _values(kind.item_type, rest)
    return []


def _sentence(what: str) -> str:
    for pattern, told in _RULES:
        if found := pattern.fullmatch(what):
            return told(found)
    return f"e{what[1:]}" if what.startswith("Expected ") else what


def _kind(names: str) -> str:
    """Return the operators' words for the types that msgspec lists, such as "int | null"."""
    return _either(list(dict.fromkeys(_NAMES.get(name, name) for name in names.split(" | "))))


def _either(told: list[str]) -> str:
    return told[0] if len(told) == 1 else f"{', '.join(told[:-1])} or {told[-1]}"


def _bound(found: re.Match[str]) -> str:
    number = found["number"].removesuffix(".0")
    return f"expected {_kind(found['kind'])} {_BOUNDS[found['bound']]} {number}"


def _length(found: re.Match[str]) -> str:
    one, several = _UNITS.get(found["kind"], ("entry", "entries"))
    counted = one if found["number"] == "1" else several
    return f"expected {_kind(found['kind'])} {_BOUNDS[found['bound']]} {found['number']} {counted}"


def _got(found: re.Match[str]) -> str:
    return f"expected {_kind(found['expected'])}, got {_kind(found['got'])}"


_RULES: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`"), _got),
    (re.compile(r"Expected `(?P<kind>[^`]*)`"), lambda found: f"expected {_kind(found['kind'])}"),
    (re.compile(r"Expected `(?P<kind>int|float)` (?P<bound>[<>]=?) (?P<number>\S+)"), _bound),
    (
        re.compile(r"Expected `(?P<kind>\w+)` of length (?P<bound>[<>]=) (?P<number>\d+)"),
        _length,
    ),
    (
        re.compile(r"Expected `str` matching regex (?P<regex>.*)", re.DOTALL),
        lambda found: f"expected a text that matches {found['regex']}",
    ),
    (
        _NONE_OF_THEM,
        lambda found: f"{found['value']} is not one of the possible values",
    ),
    (
        re.compile(r"Object missing required field (?P<field>`.*`)", re.DOTALL),
        lambda found: f"needs field {found['field']}",
    ),
    (
        re.compile(r"Object contains unknown field (?P<field>`.*`)", re.DOTALL),
        lambda found: f"has unknown field {found['field']}",
    ),
    (
        re.compile(r"Input data was truncated"),
        lambda found: "expected more: the text ends before it is whole",
    ),
    (
        re.compile(r"JSON is malformed: (?P<why>.*)", re.DOTALL),
        lambda found: f"expected JSON: {found['why']}",
    ),
)
