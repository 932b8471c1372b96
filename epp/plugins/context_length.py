"""Endpoints for short prompts and endpoints for long ones, distinguished by a label: a scorer and
its filter.
"""

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
"""Score at the border of a range: an endpoint whose range of tokens contains the prompt's length
scores at least this, and another endpoint with a range scores less.
"""
_WIDTH_TOKENS: Final = 10_000.0
_DISTANCE_TOKENS: Final = 1_000.0
_DIGITS_MAX: Final = 15
_LABEL_CHARACTERS_MAX: Final = 63
"""Maximum number of characters that Kubernetes allows in the value of a label."""
_RANGES_MAX: Final = 1_024
TOKEN_ID_BYTES: Final = 4


@lru_cache(maxsize=_RANGES_MAX)
def _range_of(label: str) -> tuple[int, int] | None:
    """Return the lower and the upper bound in tokens of a label such as "0-2048", or None if the
    label is not a range.
    """
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
    """Return the number of tokens of the prompts by the engine's tokenizer if its token ids are
    known, else the estimate by bytes.
    """
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
    """Keep endpoints whose label's range contains the prompt length, and endpoints without the
    label.

    The label's value is "least-most", in tokens. An endpoint with an invalid value is dropped.
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
    """Prefer endpoints that are meant for prompts of this length, by a label such as "0-2048", in
    tokens.

    If the label's range contains the prompt length, the score is from 0.3 to 1. This score is
    higher for a narrow range and for a prompt that is well below the range's end. If the prompt
    length is outside the range, the score is below 0.3 and falls with the distance. An endpoint
    without the label scores 0.5, and one with an invalid value 0.

    The plugin is also a filter if `enable_filtering` is set: it keeps endpoints whose range
    contains the prompt length and those without the label. The formula of the score is
    llm-d-router's. The prompt length is the number of the engine's own tokens if a `token-producer`
    provides them, else the number of bytes divided by four.
    """

    type_name: ClassVar[str] = "context-length-aware"
    abilities: ClassVar[Abilities] = Abilities(
        reads=("labels", "prompt_tokens", "token_ids"), brings_filter=True
    )

    label: Annotated[str, Meta(min_length=1)] = CONTEXT_LENGTH_LABEL
    """Name of the endpoints' label that holds their range of prompt lengths."""
    enable_filtering: bool = False

    @property
    def filter(self) -> Filter | None:
        """Return the filter by prompt length if `enable_filtering` is set, else None."""
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
