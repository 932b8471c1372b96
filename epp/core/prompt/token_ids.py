"""Token ids as bytes, four little-endian ones an id; and whether ours are the engine's."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

ID_BYTES: Final = 4
COMPARED_MIN: Final = 100
"""Prompts of a model after which it is judged."""
AGREEMENT_MIN: Final = 0.95
"""Of them, that had the engine's ids; with less, ours are not the engine's."""
MODELS_MAX: Final = 256


def packed(ids: Iterable[int]) -> bytes:
    """Raises `OverflowError` or `TypeError` for what is no id from 0 to 2**32 - 1."""
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpacked(ids: bytes) -> list[int]:
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def first_difference(ours: bytes, theirs: bytes) -> int | None:
    """The first position at which the two differ, as far as both go; None: they do not."""
    count = min(len(ours), len(theirs)) // ID_BYTES
    differ = np.frombuffer(ours, "<u4", count) != np.frombuffer(theirs, "<u4", count)
    return int(differ.argmax()) if differ.any() else None


class Disagreement(Struct, frozen=True):
    """Of a model whose ids are not the engine's."""

    model: str
    compared: int
    agreed: int
    position: int
    """The first one that differed in the last prompt that did."""


class _Compared:
    __slots__ = ("agreed", "count", "told")

    def __init__(self) -> None:
        self.count = 0
        self.agreed = 0
        self.told = False


class Agreement:
    """How often the ids that were found out are those that the engine says it has stored."""

    def __init__(self) -> None:
        self._by_model: dict[str, _Compared] = {}

    def compare(self, model: str, ours: bytes, theirs: bytes) -> Disagreement | None:
        """`theirs` are the ids of a stored prompt, or of its head, that was routed as `ours`.

        Returns what is to be warned of, once a model: less than `AGREEMENT_MIN` of so far at least
        `COMPARED_MIN` prompts had the engine's ids.
        """
        known = self._by_model.get(model)
        if known is None:
            if len(self._by_model) >= MODELS_MAX:
                return None
            known = self._by_model[model] = _Compared()
        position = first_difference(ours, theirs)
        known.count += 1
        if position is None:
            known.agreed += 1
            return None
        if known.told or known.count < COMPARED_MIN or self.exact(model):
            return None
        known.told = True
        return Disagreement(model, known.count, known.agreed, position)

    def exact(self, model: str) -> bool:
        """Whether nothing speaks against using the ids of `model` for those of the engine."""
        known = self._by_model.get(model)
        if known is None or known.count < COMPARED_MIN:
            return True
        return known.agreed >= AGREEMENT_MIN * known.count

    def rows(self) -> Sequence[tuple[str, int, int]]:
        """Model, prompts compared, prompts that agreed."""
        return [(model, known.count, known.agreed) for model, known in self._by_model.items()]
