"""Parsing of configuration text into plain values, with one sentence for each fault.

The format is YAML as Kubernetes users write it (JSON is a subset). Duplicate keys, aliases and deep
nesting are refused, because each of them is a mistake or an attack.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final, cast

import yaml

from epp.configuration.compatibility import MetricSpec, parse_metric_spec
from epp.core.duration import Duration, parse_duration
from epp.core.expectation import place_and_sentence

CONFIG_MAX_BYTES: Final = 1_048_576
"""Maximum size of a document in bytes, which is the limit of a ConfigMap."""
_DEPTH_MAX: Final = 32
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Class of the YAML loader: the one in C if PyYAML was built with it, else the one in Python."""


def as_one_line(sentence: str) -> str:
    """Return `sentence` as one line, with unprintable characters escaped as in a Python literal.

    Names in a document may contain line breaks and terminal control sequences.
    """
    if sentence.isprintable():
        return sentence
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in sentence
    )


class ConfigError(Exception):
    """The error of a configuration document that cannot be used.

    Each of its problems is one sentence: where, what happened, what was expected.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(map(as_one_line, problems))
        super().__init__("\n".join(self.problems))


class _UniqueKeys(_LOADER):  # type: ignore[misc]
    """A YAML loader that refuses duplicate keys in a mapping; YAML would silently keep the last
    value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"key `{key.value}` appears twice in one mapping",
                        problem_mark=key.start_mark,
                    )
                seen.add((key.tag, key.value))
        return cast("dict[Any, Any]", super().construct_mapping(node, deep=deep))


def read_mapping(text: bytes | str, source: str) -> dict[str, Any]:
    size = len(text)
    if size > CONFIG_MAX_BYTES:
        raise ConfigError([f"{source}: has {size} bytes, expected at most {CONFIG_MAX_BYTES}"])
    try:
        document = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        what = error.problem or error.context
        if error.context and error.context.startswith("expected"):
            what = f"{error.context}, {error.problem}"
        if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
            what = f"expected YAML: {what}"
        raise ConfigError([f"{source}: {line}{what}"]) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"{source}: is not YAML: {reason}"]) from error
    if not isinstance(document, dict):
        found = "is empty" if document is None else "is not a mapping"
        raise ConfigError([f"{source}: {found}, expected an EndpointPickerConfig"])
    return document


def load_yaml(text: bytes | str) -> Any:
    """Return the one YAML document in `text` as plain values.

    Raises `yaml.YAMLError` or `ValueError`, also for valid YAML with duplicate keys, aliases or
    deep nesting.
    """
    _check_shape(text)
    return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 - it is a safe loader


def _check_shape(text: bytes | str) -> None:
    """Raise `yaml.YAMLError` for text that costs more to build than to read: aliases and very deep
    nesting.

    Building a nest of 100,000 levels overflows the stack of libyaml, which ends the process.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise _refused(
                f"alias *{event.anchor} is not supported; expected the value itself", event
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEPTH_MAX:
                raise _refused(f"is nested more than {_DEPTH_MAX} levels deep", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _refused(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    mark: Any = event.start_mark
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def decode(kind: type[Any], value: Any) -> Any:
    """Return the value that a text in the document stands for, if its type is unknown to msgspec: a
    duration or a reference to a metric.

    Raises `ValueError` for any other type or text.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {value!r}")  # noqa: TRY004 - msgspec adds the path
    if kind is Duration:
        return parse_duration(value)
    if kind is MetricSpec:
        return parse_metric_spec(value)
    raise ValueError(f"a parameter of type {kind.__name__} cannot be read from a configuration")


def sentence_of(where: str, error: Exception, kind: Any) -> str:
    """Return an error sentence: the place `where` in the document, the path within it, and why the
    value there is no valid `kind`.
    """
    place, what = place_and_sentence(str(error), kind)
    colon = "" if what.startswith(("needs field", "has unknown field")) else ":"
    return f"{where}{place}{colon} {what}"


def nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f", did you mean `{near[0]}`?" if near else ""
