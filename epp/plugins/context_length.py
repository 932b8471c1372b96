"""Pods for short prompts and pods for long ones, told apart by a label: a scorer, and its filter."""

from functools import lru_cache
from typing import Annotated, ClassVar, Final

import numpy as np
from msgspec import Meta

from epp.plugins.contract import (
    Abilities,
    Bools,
    Candidates,
    Filter,
    Floats,
    InferenceRequest,
    Parameters,
)

CONTEXT_LENGTH_LABEL: Final = "llm-d.ai/context-length-range"
_NO_LABEL: Final = 0.5
_OUTSIDE_MOST: Final = 0.3
"""What comes close to a range gets less, and what is within it more."""
_WIDTH_TOKENS: Final = 10_000.0
_DISTANCE_TOKENS: Final = 1_000.0
_DIGITS_MAX: Final = 15
_LABEL_CHARACTERS_MAX: Final = 63
"""Kubernetes allows no more in the value of a label."""
_RANGES_MAX: Final = 1_024
TOKEN_ID_BYTES: Final = 4


@lru_cache(maxsize=_RANGES_MAX)
def _range_of(label: str) -> tuple[int, int] | None:
    """Least and most tokens of "0-2048"; None: it is no range."""
    if len(label) > _LABEL_CHARACTERS_MAX:
        return None
    bounds = [bound.strip() for bound in label.split("-")]
    if len(bounds) != 2 or not all(
        bound.isascii() and bound.isdigit() and len(bound) <= _DIGITS_MAX for bound in bounds
    ):
        return None
    least, most = map(int, bounds)
    return (least, most) if least <= most else None


def _length_of(request: InferenceRequest) -> int:
    """In the engine's own tokens, where they are known."""
    ids = request.moment.token_ids
    return sum(map(len, ids)) // TOKEN_ID_BYTES if ids else request.prompt_tokens


def _score(tokens: int, least: int, most: int) -> float:
    if least <= tokens <= most:
        width = most - least
        if not width:
            return 1.0
        narrow = 1.0 / (1.0 + width / _WIDTH_TOKENS)
        room = (most - tokens) / width
        return _OUTSIDE_MOST + (0.7 * narrow + 0.3 * room) * (1.0 - _OUTSIDE_MOST)
    distance = tokens - most if tokens > most else least - tokens
    return _OUTSIDE_MOST / (1.0 + distance / _DISTANCE_TOKENS)


class ContextLengthRange(Parameters, frozen=True):
    """Keep endpoints whose label has the length of the prompt within its range, or that have none.

    The label reads "least-most", in tokens; one that is no range keeps nothing.
    """

    type_name: ClassVar[str] = "context-length-aware"
    abilities: ClassVar[Abilities] = Abilities(reads=("labels", "prompt_tokens", "token_ids"))

    label: Annotated[str, Meta(min_length=1)] = CONTEXT_LENGTH_LABEL

    def keep(self, request: InferenceRequest, candidates: Candidates, /) -> Bools:
        tokens = _length_of(request)
        keep = np.ones(len(candidates), dtype=np.bool_)
        for position, labels in enumerate(candidates.labels):
            label = labels.get(self.label)
            if label is not None:
                found = _range_of(label)
                keep[position] = found is not None and found[0] <= tokens <= found[1]
        return keep


class ContextLengthAware(Parameters, frozen=True):
    """Prefer endpoints that are meant for prompts of this length: by a label such as "0-2048", in tokens.

    Within its range an endpoint gets from 0.3 to 1, more where the range is narrow and where there is
    room above the prompt; beyond it less than 0.3, the more the nearer. Without the label 0.5; with
    one that is no range 0. With `enable_filtering` it is a filter too, which keeps endpoints within
    whose range the prompt is and those without the label. The formula is llm-d-router's; the length
    is that of the engine's own tokens where a `token-producer` makes them, else bytes by four.
    """

    type_name: ClassVar[str] = "context-length-aware"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("labels", "prompt_tokens", "token_ids"), brings_filter=True
    )

    label: Annotated[str, Meta(min_length=1)] = CONTEXT_LENGTH_LABEL
    """Of endpoints, with their range."""
    enable_filtering: bool = False

    @property
    def filter(self) -> Filter | None:
        """What it filters by."""
        return ContextLengthRange(label=self.label) if self.enable_filtering else None

    def score(self, request: InferenceRequest, candidates: Candidates, /) -> Floats:
        tokens = _length_of(request)
        scores = np.full(len(candidates), _NO_LABEL)
        for position, labels in enumerate(candidates.labels):
            label = labels.get(self.label)
            if label is not None:
                found = _range_of(label)
                scores[position] = 0.0 if found is None else _score(tokens, *found)
        return scores
