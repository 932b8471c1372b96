"""The problems and warnings about one configuration document, and the typed conversion of its
values.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from epp.configuration.compatibility import IGNORED_SECTIONS, REFUSED_SECTIONS
from epp.configuration.document import ConfigError, as_one_line, decode, nearest, sentence_of
from epp.core.failures import Interrupted, place_of

T = TypeVar("T")


class Findings:
    """The problems and warnings about one configuration document so far.

    Each begins with the document's name, `source`.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def problem(self, sentence: str) -> None:
        """Add a problem to those of the document. A document with a problem is invalid."""
        self.problems.append(f"{self.source}: {sentence}")

    def warn(self, sentence: str) -> None:
        """Add a warning to the warnings about the document."""
        self.warnings.append(as_one_line(f"{self.source}: {sentence}"))

    def raise_problems(self) -> None:
        """Raise `ConfigError` with all problems of the document, if there are any."""
        if self.problems:
            raise ConfigError(self.problems)

    def convert(self, value: Any, kind: type[T], where: str) -> T | None:
        """Return `value` converted to the type `kind`, or None if that is impossible or `value` has
        unknown fields; the problems are recorded then.
        """
        before = len(self.problems)
        if isinstance(value, dict) and issubclass(kind, Struct):
            value = self._without_unknown(value, kind, where)
        try:
            converted = msgspec.convert(value, kind, dec_hook=decode)
        except (msgspec.ValidationError, TypeError) as error:
            self.problem(sentence_of(where, error, kind))
            return None
        except BaseException as error:  # noqa: BLE001  a plugin checks its own parameters
            self.problem(raised(where, "checking them", error, "expected ValueError"))
            return None
        return converted if len(self.problems) == before else None

    def _without_unknown(
        self, value: dict[str, Any], kind: type[Struct], where: str
    ) -> dict[str, Any]:
        """Return the known fields of `value`, and record every unknown field as a problem or a
        warning.

        msgspec would report only the first unknown field.
        """
        known = kind.__struct_encode_fields__
        for name in value:
            member = f"{where}.{name}"
            if why := REFUSED_SECTIONS.get(member):
                self.problem(f"{member} is not supported, because {why}: remove it")
            elif why := IGNORED_SECTIONS.get(member):
                self.warn(f"{member} has no effect, because {why}")
            elif name not in known:
                self.problem(f"{where} has unknown field `{name}`{nearest(str(name), known)}")
        return {name: member for name, member in value.items() if name in known}

    def items(self, value: Any, where: str) -> Sequence[Any]:
        """Return the members of the list `value`; empty without a list.

        A value that is not a list is recorded as a problem.
        """
        if value is None:
            return ()
        if not isinstance(value, list):
            self.problem(f"{where}: expected a list, got {type(value).__name__}")
            return ()
        return value


def raised(where: str, what: str, error: BaseException, *expected: str) -> str:
    """Return a sentence saying that a plugin raised `error` in the step `what`.

    Raises `error` again if it is an `Interrupted`.
    """
    if isinstance(error, Interrupted):
        raise error
    return ", ".join((f"{where}: {what} raised {type(error).__name__}{place_of(error)}", *expected))


def shown(given: object) -> str:
    """Return a value of the document as text for a message: its `repr`, or "missing" for None."""
    return "missing" if given is None else repr(given)
