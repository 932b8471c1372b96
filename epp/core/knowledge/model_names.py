"""The distinction between requested model names that are LoRA adapters and names of the base model.

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
"""Maximum number of stored names of the base model, and of watched unknown model names; clients
choose these names.
"""
AWAITED_S: Final[Seconds] = 10.0
"""Time in seconds within which at most `AWAITED_MAX` requests for one unknown model name are
watched.
"""
AWAITED_MAX: Final = 8
"""Maximum number of watched requests for one unknown model name. Some leave no event, and some
blocks are evicted early.
"""

_Kept = TypeVar("_Kept")


class ModelNames:
    """The model names that are known to be adapters or the base model of one pool."""

    def __init__(self) -> None:
        self._adapters: set[str] = set()
        self._adapters_served = False
        self._own: OrderedDict[str, None] = OrderedDict()
        """Names of the base model, in the order in which they were found."""
        self._awaited: OrderedDict[str, deque[tuple[int, Seconds]]] = OrderedDict()
        """Keys of recent prompts under each unknown model name, with the times of the requests. If
        an engine caches one of the keys, the name is one of the base model.
        """

    def adapters_told(self, names: Collection[str]) -> None:
        """Record that engines serve LoRA adapters with these names, so that other names may be
        adapters too.
        """
        self._adapters_served = True
        self.adapters_named(names)

    def adapters_named(self, names: Collection[str]) -> None:
        """Record that these names are LoRA adapters, without a conclusion about other names. Do
        nothing once `ADAPTERS_MAX` names are known.
        """
        adapters = self._adapters
        if len(adapters) < ADAPTERS_MAX:
            adapters.update(names)

    def adapter_of(self, name: str, held: Container[int]) -> str | None:
        """Return the model name `name` if it is a LoRA adapter, "" if it is empty, is the base
        model, or no adapters are served, or None if that is unknown.

        `held` are the keys that any engine has cached. If one of them is a watched key of `name`,
        which stands for a prompt to the base model, the name is recorded as one of the base model.
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
        """Return whether a request for the model name `name` began to be watched so recently that
        no other one is needed.
        """
        known = self._awaited.get(name)
        return known is not None and now - known[-1][1] < AWAITED_S / AWAITED_MAX

    def asked(self, name: str, key: int, held: Container[int], now: Seconds) -> None:
        """Watch for `key`, which an engine will cache if `name` is the base model: the last key of
        a prompt requested under that name. Do nothing if `key` is in `held`, that is, already
        cached.
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
