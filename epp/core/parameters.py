"""What plugins of every kind are made of: a frozen struct whose fields are its configuration."""

from typing import ClassVar, Protocol

from msgspec import Struct

from epp.core.abilities import Abilities


class Parameters(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What plugins are made of: fields are parameters, spelt as in the configuration, checked.

    A subclass says `frozen=True` again, which only type checkers need.
    """

    abilities: ClassVar[Abilities] = Abilities()


class Plugin(Protocol):
    type_name: ClassVar[str]
    abilities: ClassVar[Abilities]
