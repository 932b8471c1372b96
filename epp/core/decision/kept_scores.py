"""Scores that need not be asked for again.

Some hold longer than a request: of scorers that declare to read only what scrapes change
(`KEPT_READS`). Such a one is asked again about the same candidates only once a column that it reads has
changed; one that fails is asked at every decision. What is kept is final: clamped, and the
unknown filled in. Nobody else sees the arrays that it is kept in.

Others were found a moment ago: what a profile that acts found of a request is lent to a second one
that has the very same scorer.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from epp.core.decision.plugin import KEPT_READS, MODEL, Scorer
from epp.core.knowledge.candidates import Candidates, Floats, Ints
from epp.core.prompt.request import InferenceRequest

SETS_MAX: Final = 4
"""Sets of candidates of which scores are kept: all that are ready, and what filters leave of them."""
MODELS_MAX: Final = 32
"""Models of which each set keeps the scores of each scorer that reads the model."""
MODEL_LENGTH_MAX: Final = 256
"""Nothing is kept of a longer name: a client may send any."""

_NOBODY: Final[Ints] = np.empty(0, dtype=np.int64)
_OUTDATED: Final = -1
_UNSEEN: Final = (_OUTDATED, 0.0)


class _Named(Protocol):
    @property
    def plugin(self) -> Scorer: ...


class _Set:
    """What is kept of one set of candidates."""

    __slots__ = ("by_model", "model", "scores", "seen", "version")

    def __init__(self, scorers: int, n: int) -> None:
        self.scores: Floats = np.zeros((scorers, n))
        """The rows of scorers that say what they read, where `seen` says so."""
        self.seen = [_OUTDATED] * scorers
        """Row -> version of its columns when it was computed."""
        self.version = _OUTDATED
        """Version of all columns at which every such row was found to be up to date."""
        self.model = ""
        """Of which the rows are whose scorers read the model."""
        self.by_model: OrderedDict[tuple[int, str], tuple[int, Floats | float]] = OrderedDict()
        """(Row, model) -> version of its columns, scores."""


class KeptScores:
    """Of the scorers of one profile. They are pure functions of what they say that they read."""

    @classmethod
    def of(cls, scorers: Sequence[_Named], acting: Sequence[_Named] = ()) -> "KeptScores | None":
        """None: of these nothing can be kept, nor taken over."""
        made = cls(scorers, acting)
        return made if made._columns or made._lent else None

    def __init__(self, scorers: Sequence[_Named], acting: Sequence[_Named] = ()) -> None:
        """`acting` are those of the profile that acts, where `scorers` are of a second one: what both
        have is not kept, because it can be taken over.
        """
        found = {id(scorer.plugin): row for row, scorer in enumerate(acting)}
        lent = {
            row: found[id(scorer.plugin)]
            for row, scorer in enumerate(scorers)
            if id(scorer.plugin) in found
        }
        self._lent = list(lent)
        self._lent_by = list(lent.values())
        """Rows of the profile that acts, in the order of `_lent`."""
        declared = ((row, scorer.plugin.abilities.reads) for row, scorer in enumerate(scorers))
        reads = {
            row: names
            for row, names in declared
            if row not in lent and names is not None and set(names) <= set(KEPT_READS)
        }
        self._columns = {
            row: tuple(name for name in names if name != MODEL) for row, names in reads.items()
        }
        self._by_model = tuple(row for row, names in reads.items() if MODEL in names)
        self._never = tuple(row for row in range(len(scorers)) if row not in reads)
        self._scorers = len(scorers)
        self._sets: OrderedDict[bytes, _Set] = OrderedDict()
        """By the slots of the candidates, least recently used first."""
        self._slot = _NOBODY
        self._set = _Set(self._scorers, 0)
        """The one of the candidates in `_slot`."""

    def recall(
        self, request: InferenceRequest, candidates: Candidates
    ) -> tuple[Floats, Sequence[int]]:
        """float64[scorers, n] to write on, and its rows that are still to be computed, ascending."""
        if candidates.slot is not self._slot:
            self._find(candidates.slot)
        kept = self._set
        version = candidates.version
        model = request.model if self._by_model else ""
        if kept.version == version and kept.model == model:
            return kept.scores.copy(), self._never
        if kept.model != model:
            kept.model = model
            for row in self._by_model:
                kept.seen[row], kept.scores[row] = kept.by_model.get((row, model), _UNSEEN)
        outdated = [
            row
            for row, columns in self._columns.items()
            if kept.seen[row] != candidates.version_of(columns)
        ]
        if not outdated:
            kept.version = version
            return kept.scores.copy(), self._never
        kept.version = _OUTDATED
        return kept.scores.copy(), sorted((*self._never, *outdated))

    def take_over(
        self, request: InferenceRequest, candidates: Candidates, acting: Floats
    ) -> tuple[Floats, Sequence[int]]:
        """As `recall`, with the rows that both profiles have besides.

        `acting` is what the profile that acts found of the same request and candidates.
        """
        lent = acting[self._lent_by]
        if len(lent) == self._scorers:
            return lent, ()
        scores, rows = self.recall(request, candidates)
        scores[self._lent] = lent
        return scores, [row for row in rows if row not in self._lent]

    def keep(
        self,
        rows: Iterable[int],
        request: InferenceRequest,
        candidates: Candidates,
        scores: Floats,
    ) -> None:
        """`scores` is what the last `recall` has become; keep of its `rows` what may be kept."""
        kept = self._set
        if kept.version != _OUTDATED:
            return
        for row in rows:
            columns = self._columns.get(row)
            if columns is None:
                continue
            kept.seen[row] = candidates.version_of(columns)
            kept.scores[row] = scores[row]
            if row in self._by_model and len(request.model) <= MODEL_LENGTH_MAX:
                kept.by_model[row, request.model] = (kept.seen[row], scores[row].copy())
                kept.by_model.move_to_end((row, request.model))
                if len(kept.by_model) > MODELS_MAX * len(self._by_model):
                    kept.by_model.popitem(last=False)

    def _find(self, slot: Ints) -> None:
        """Make `_set` the one of the candidates in `slot`, by what it holds: filters make it anew."""
        self._slot = slot
        key = slot.tobytes()
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = _Set(self._scorers, len(slot))
            if len(self._sets) > SETS_MAX:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        self._set = found
