"""Token ids as bytes, four little-endian ones an id; and whether ours are the engine's."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

ID_BYTES: Final = 4
COMPARED_MIN: Final = 100
"""Prompts of a model after which it is judged."""
AGREEMENT_MIN: Final = 0.95
"""Of them, that had the engine's ids; with less, ours are not the engine's."""
TRIED_EACH: Final = 16
"""Of so many prompts of a model whose ids are not the engine's those of one are found out."""
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


class Disagreement(Struct, frozen=True):
    """Of a model whose ids are not the engine's."""

    model: str
    compared: int
    agreed: int
    same_tokens: int
    """From the head on, of the last prompt that differed."""


class ComparedModel(Struct):
    """How often the ids of one model's prompts were the engine's."""

    model: str
    compared: int = 0
    agreed: int = 0
    lately_compared: int = 0
    """What is long ago counts less and less."""
    lately_agreed: int = 0
    told: bool = False
    asked: int = 0
    """Since its ids are not the engine's."""

    @property
    def exact(self) -> bool:
        """Nothing speaks against using these ids for those of the engine."""
        lately = self.lately_compared
        return lately < COMPARED_MIN or self.lately_agreed >= AGREEMENT_MIN * lately


class Agreement:
    """How often the ids that were found out are those that the engine says it has stored."""

    def __init__(self) -> None:
        self._by_model: dict[str, ComparedModel] = {}

    def note(self, model: str, same_tokens: int | None) -> Disagreement | None:
        """A prompt was compared: None, its ids are the engine's; else so many from the head on are.

        Returns what is to be warned of, once a model: less than `AGREEMENT_MIN` of lately at least
        `COMPARED_MIN` prompts had the engine's ids.
        """
        known = self._by_model.get(model)
        if known is None:
            if len(self._by_model) >= MODELS_MAX:
                return None
            known = self._by_model[model] = ComparedModel(model)
        agrees = same_tokens is None
        known.compared += 1
        known.agreed += agrees
        known.lately_compared += 1
        known.lately_agreed += agrees
        if known.lately_compared >= 2 * COMPARED_MIN:
            known.lately_compared //= 2
            known.lately_agreed //= 2
        if same_tokens is None or known.told or known.exact:
            return None
        known.told = True
        return Disagreement(model, known.compared, known.agreed, same_tokens)

    def exact(self, model: str) -> bool:
        """Whether nothing speaks against using the ids of `model` for those of the engine."""
        known = self._by_model.get(model)
        return known is None or known.exact

    def asks(self, model: str) -> bool:
        """Whether to find out the ids of one more prompt: where they are not the engine's of one in
        `TRIED_EACH`, to see whether they still are not.
        """
        known = self._by_model.get(model)
        if known is None or known.exact:
            return True
        known.asked += 1
        return known.asked % TRIED_EACH == 0

    def rows(self) -> Sequence[ComparedModel]:
        """In the order in which they were first compared."""
        return list(self._by_model.values())
