"""Declare a flag once, as a field of a struct that is annotated with a `Row`.

The field has the name, type and default. `msgspec.Meta` has the bounds of numbers and lists. The
row has everything else. Command lines, help texts, documentation and the chart's error messages are
generated from it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

CHART_SETS: Final = "the chart sets this flag"


class Row(Struct, frozen=True):
    """Properties of a command-line flag that its field cannot express."""

    group: str
    """Heading in the help text under which the flag is listed."""
    help: str
    chart: str = ""
    """Key of the chart's values that sets the flag, or a sentence about how the chart sets it; ""
    if the flag is given in the chart's `flags`.
    """
    environment: str = ""
    """Environment variable that is read if the flag is not given."""
    least: int | None = None
    """Smallest allowed value of a duration (in seconds) or of a byte count, which `msgspec` cannot
    check; None for no such bound.
    """
    most: int | None = None
    above: int | None = None
    kubernetes: bool = False
    """True if the flag has an effect only in Kubernetes."""
    needs: str = ""
    """Name of the flag without which this one has no effect."""

    @property
    def refusal_of_chart(self) -> str:
        """Error text of the chart if the flag is given in its value `flags`; "" if that
        is allowed.
        """
        return (
            self.chart
            if self.chart in {"", CHART_SETS} or " " in self.chart
            else f"use the key {self.chart}"
        )


class Flag(Struct, frozen=True):
    """A command-line flag: the row of its field, with the field's name, type and default."""

    name: str
    """Name of the flag on the command line, without dashes."""
    field: str
    type: Any
    default: Any
    row: Row

    @property
    def base(self) -> Any:
        """Type of the flag's value without the bounds."""
        return get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type

    @property
    def is_list(self) -> bool:
        """True if the flag takes several values, separated by commas."""
        return get_origin(self.base) is tuple


@cache
def flags_of(kind: type[Struct]) -> Mapping[str, Flag]:
    """Return the flags that the struct `kind` declares, by name in the order of declaration.

    Fields without a `Row` are skipped.
    """
    found: dict[str, Flag] = {}
    for field in msgspec.structs.fields(kind):
        told = get_args(field.type) if get_origin(field.type) is Annotated else ()
        for row in told:
            if isinstance(row, Row):
                name = field.name.replace("_", "-")
                found[name] = Flag(name, field.name, field.type, field.default, row)
    return found
