"""Which of the names that clients ask for are LoRA adapters, as far as engines show it.

An adapter and its model share no block, so that who takes one for the other predicts what is not there.
Engines name the adapter of a block, and their scrapes those that are loaded; the model's own names
nobody tells. Where adapters are served, a name that no engine has told yet may be either. It is one of
the model's own once an engine holds, as the model's, what was asked for under it and was not there before.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Container
from typing import Final, TypeVar

from epp.core.types import Seconds

ADAPTERS_MAX: Final = 8_192
NAMES_MAX: Final = 256
"""That clients asked for and no engine has told; clients choose them."""
AWAITED_S: Final[Seconds] = 10.0
"""So long an engine has to hold what one request asked for, until another takes its place."""
AWAITED_MAX: Final = 8
"""Requests of one name that are awaited at once: of some nobody hears, some are given up before anybody looks."""

_Kept = TypeVar("_Kept")


class ModelNames:
    """What is known of the names of one pool."""

    def __init__(self) -> None:
        self._adapters: set[str] = set()
        self._adapters_served = False
        self._own: OrderedDict[str, None] = OrderedDict()
        """Those of the model itself."""
        self._awaited: OrderedDict[str, deque[tuple[int, Seconds]]] = OrderedDict()
        """Name -> keys that somebody holds soon if it is one of the model's own, and since when."""

    def adapters_told(self, names: Collection[str]) -> None:
        """Engines serve adapters, these among them."""
        self._adapters_served = True
        self.adapters_named(names)

    def adapters_named(self, names: Collection[str]) -> None:
        """These are adapters; of other names nothing is said."""
        adapters = self._adapters
        if len(adapters) < ADAPTERS_MAX:
            adapters.update(names)

    def adapter_of(self, name: str, held: Container[int]) -> str | None:
        """The adapter that `name` is; "": none, the model itself; None: that is not known.

        `held`: the keys that any engine holds.
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
        """What `name` is will be seen by what was asked for under it a moment ago."""
        known = self._awaited.get(name)
        return known is not None and now - known[-1][1] < AWAITED_S / AWAITED_MAX

    def asked(self, name: str, key: int, held: Container[int], now: Seconds) -> None:
        """A prompt was sent under `name` that ends with `key` if that is one of the model's own."""
        if key not in held:
            awaited = self._awaited.get(name) or deque(maxlen=AWAITED_MAX)
            awaited.append((key, now))
            _put(self._awaited, name, awaited)


def _put(names: OrderedDict[str, _Kept], name: str, kept: _Kept) -> None:
    names[name] = kept
    names.move_to_end(name)
    if len(names) > NAMES_MAX:
        names.popitem(last=False)
