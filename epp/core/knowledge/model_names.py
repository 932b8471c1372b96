"""The requested model names that are LoRA adapters, as far as engines show it.

An adapter and its base model share no blocks, so mistaking one for the other predicts wrong hits.
Engines name the adapter of a block, and their scrapes name the loaded adapters. Nothing lists the
names of the base model. If adapters are served, an unknown name may be either. A prompt requested
under that name decides, if it was not cached before. Once an engine caches it as the base model's,
the name is one of the base model.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Container
from typing import Final, TypeVar

from epp.core.types import Seconds

ADAPTERS_MAX: Final = 8_192
NAMES_MAX: Final = 256
"""Maximum number of requested names that engines have not named; clients choose these names."""
AWAITED_S: Final[Seconds] = 10.0
"""Time in seconds for an engine to cache the prompt of one request, after which another one is
used.
"""
AWAITED_MAX: Final = 8
"""Maximum number of awaited requests for one name. Some leave no event, and some blocks are evicted
early.
"""

_Kept = TypeVar("_Kept")


class ModelNames:
    """The known names of one pool."""

    def __init__(self) -> None:
        self._adapters: set[str] = set()
        self._adapters_served = False
        self._own: OrderedDict[str, None] = OrderedDict()
        """Names of the base model."""
        self._awaited: OrderedDict[str, deque[tuple[int, Seconds]]] = OrderedDict()
        """Keys that an engine will soon cache if the name is one of the base model, with their
        times, by name.
        """

    def adapters_told(self, names: Collection[str]) -> None:
        """Note that engines serve adapters with these names."""
        self._adapters_served = True
        self.adapters_named(names)

    def adapters_named(self, names: Collection[str]) -> None:
        """Note that these names are adapters; this says nothing about other names."""
        adapters = self._adapters
        if len(adapters) < ADAPTERS_MAX:
            adapters.update(names)

    def adapter_of(self, name: str, held: Container[int]) -> str | None:
        """Return the adapter that `name` is, "" if it is the base model, or None if that is
        unknown.

        `held` are the keys that any engine has cached.
        """
        if name in self._adapters:
            return name
        if not self._adapters_served or not name:
            return ""
        if name in self._own:
            return ""
        awaited = self._awaited.get(name)
        if awaited is None or not any(key in held for key, _ in awaited):
            return None
        del self._awaited[name]
        _put(self._own, name, None)
        return ""

    def awaits(self, name: str, now: Seconds) -> bool:
        """Return whether a recent request already serves to find out what `name` is."""
        known = self._awaited.get(name)
        return known is not None and now - known[-1][1] < AWAITED_S / AWAITED_MAX

    def asked(self, name: str, key: int, held: Container[int], now: Seconds) -> None:
        """Wait for `key`, the last key of a prompt requested under `name` if that is the base
        model.
        """
        if key not in held:
            awaited = self._awaited.get(name) or deque(maxlen=AWAITED_MAX)
            awaited.append((key, now))
            _put(self._awaited, name, awaited)


def _put(names: OrderedDict[str, _Kept], name: str, kept: _Kept) -> None:
    names[name] = kept
    names.move_to_end(name)
    if len(names) > NAMES_MAX:
        names.popitem(last=False)
