"""Token ids as bytes, and a comparison of computed token ids with those that engines report."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

ID_BYTES: Final = 4
COMPARED_MIN: Final = 100
"""Number of prompts of a model that must be compared before its computed token ids can be judged to
differ from the engine's.
"""
AGREEMENT_MIN: Final = 0.95
"""Share of a model's compared prompts whose computed token ids must equal the engine's. Below it,
computed ids of the model are not used.
"""
TRIED_EACH: Final = 16
"""Number of prompts of a model of which only one is tokenized and compared, once the model's
computed token ids were judged to differ from the engine's.
"""
MODELS_MAX: Final = 256


def packed(ids: Iterable[int]) -> bytes:
    """Return 4 little-endian bytes for each token id. Raises `OverflowError` or `TypeError` unless
    all ids are integers from 0 to 2**32 - 1.
    """
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
    """A warning that the computed token ids of a model differ from the engine's."""

    model: str
    compared: int
    agreed: int
    same_tokens: int
    """Number of equal token ids at the beginning of the prompt that caused the warning."""


class ComparedModel(Struct):
    """The comparison of the computed token ids of one model with the engine's."""

    model: str
    compared: int = 0
    agreed: int = 0
    lately_compared: int = 0
    """Number of recently compared prompts of the model. It is halved when it reaches 2 *
    `COMPARED_MIN`, so that older prompts count less.
    """
    lately_agreed: int = 0
    told: bool = False
    asked: int = 0
    """Number of calls of `Agreement.asks` for this model since its computed ids were judged to
    differ.
    """

    @property
    def exact(self) -> bool:
        """Return whether the computed ids of this model may be used as the engine's, as they may
        until `COMPARED_MIN` prompts were compared.
        """
        lately = self.lately_compared
        return lately < COMPARED_MIN or self.lately_agreed >= AGREEMENT_MIN * lately


class Agreement:
    """The comparison, by model, of computed token ids with those that the engine reports as stored."""

    def __init__(self) -> None:
        self._by_model: dict[str, ComparedModel] = {}

    def note(self, model: str, same_tokens: int | None) -> Disagreement | None:
        """Record the comparison of one prompt: `same_tokens` is None if its ids are the engine's,
        else the number of equal ids at the beginning. A new model is ignored if `MODELS_MAX` are
        recorded.

        Return a warning once per model: if fewer than `AGREEMENT_MIN` of at least `COMPARED_MIN`
        recent prompts had the engine's ids.
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
        """Return whether the computed ids of `model` may be used as the engine's, as they may until
        `COMPARED_MIN` of its prompts were compared.
        """
        known = self._by_model.get(model)
        return known is None or known.exact

    def asks(self, model: str) -> bool:
        """Return whether the token ids of the next prompt of `model` are to be computed.

        If its ids differ from the engine's, the call is counted, and only one of `TRIED_EACH`
        prompts is computed and compared.
        """
        known = self._by_model.get(model)
        if known is None or known.exact:
            return True
        known.asked += 1
        return known.asked % TRIED_EACH == 0

    def rows(self) -> Sequence[ComparedModel]:
        """Return the comparison of each model, in the order in which the models were first
        compared.
        """
        return list(self._by_model.values())
