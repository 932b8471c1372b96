"""What a flag is, said once: a field of a struct, annotated with its `Row`.

The field has name, type and default, `msgspec.Meta` the bounds of numbers and lists, the row the
rest. Command lines, help, the pages and the chart's refusals are read from it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Struct

CHART_SETS: Final = "the chart sets this flag"


class Row(Struct, frozen=True):
    """The rest of what is said of a flag."""

    group: str
    """Under which heading help has it."""
    help: str
    chart: str = ""
    """The chart's value that sets it, or a sentence; "": it is given among the chart's `flags`."""
    environment: str = ""
    """The variable that counts where the flag is not given."""
    least: int | None = None
    """Of durations in seconds and of bytes, whose types `msgspec` cannot bound."""
    most: int | None = None
    above: int | None = None
    kubernetes: bool = False
    """Whether it means something in Kubernetes only."""
    needs: str = ""
    """The flag without which it has no effect."""

    @property
    def refusal_of_chart(self) -> str:
        """What the chart says to who gives it among `flags`; "" where that is right."""
        return (
            self.chart
            if self.chart in {"", CHART_SETS} or " " in self.chart
            else f"use the key {self.chart}"
        )


class Flag(Struct, frozen=True):
    """A row with what its field says."""

    name: str
    """As it is given, without dashes."""
    field: str
    type: Any
    default: Any
    row: Row

    @property
    def base(self) -> Any:
        """The type without its bounds."""
        return get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type

    @property
    def is_list(self) -> bool:
        """Whether it takes several values, separated by commas."""
        return get_origin(self.base) is tuple


@cache
def flags_of(kind: type[Struct]) -> Mapping[str, Flag]:
    """The flags of a command by name, in their order; fields without a row are none."""
    found: dict[str, Flag] = {}
    for field in msgspec.structs.fields(kind):
        told = get_args(field.type) if get_origin(field.type) is Annotated else ()
        for row in told:
            if isinstance(row, Row):
                name = field.name.replace("_", "-")
                found[name] = Flag(name, field.name, field.type, field.default, row)
    return found
