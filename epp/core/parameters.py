"""The base types of plugins: frozen structs whose fields are their parameters in the configuration."""

from typing import ClassVar, Protocol

from msgspec import Struct

from epp.core.abilities import Abilities


class Parameters(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A plugin's parameters. The configuration spells their names in camel case; types and bounds
    are checked when it is read.

    A subclass repeats `frozen=True`, which only type checkers need.
    """

    abilities: ClassVar[Abilities] = Abilities()


class Plugin(Protocol):
    type_name: ClassVar[str]
    abilities: ClassVar[Abilities]
