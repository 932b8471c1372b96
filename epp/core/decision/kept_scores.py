"""A cache of the scores that scorers gave to candidates.

Scores of some scorers stay valid for several requests: those that declare to read only the values
in `KEPT_READS`, which change with the reports of engines. Such a scorer runs again for the same
candidates only after a column that it reads has changed. A scorer that failed runs again at the
next decision. Cached scores are final: they are clamped, and unknown values are filled in. The cached
arrays are never shared with plugins.

Other scores are borrowed. If the shadow profile has the very same scorer as the acting profile, it
uses the scores that the acting profile just computed, provided that both score the same candidates
and that no plugin of the acting profile failed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from epp.core.decision.plugin import KEPT_READS, MODEL, Scorer
from epp.core.knowledge.candidates import Candidates, Floats, Ints
from epp.core.prompt.request import InferenceRequest

SETS_MAX: Final = 4
"""Maximum number of candidate sets whose scores are cached, such as all ready endpoints, or those
that a filter left.
"""
MODELS_MAX: Final = 32
"""Maximum number of model names for which scores are cached, for each candidate set and each scorer
that reads the model.
"""
MODEL_LENGTH_MAX: Final = 256
"""Maximum length in characters of a model name for which scores are cached, because a client may
send any name.
"""

_NOBODY: Final[Ints] = np.empty(0, dtype=np.int64)
_OUTDATED: Final = -1
_UNSEEN: Final = (_OUTDATED, 0.0)


class _Named(Protocol):
    @property
    def plugin(self) -> Scorer: ...


class _Set:
    """The cached scores that the scorers gave to one set of candidates."""

    __slots__ = ("by_model", "model", "scores", "seen", "version")

    def __init__(self, scorers: int, n: int) -> None:
        self.scores: Floats = np.zeros((scorers, n))
        """Scores with a row for each scorer. A row is valid only for scorers that declare their
        reads, at the version in `seen`.
        """
        self.seen = [_OUTDATED] * scorers
        """Version of the columns that each scorer reads, at which its row of scores was computed,
        by row.
        """
        self.version = _OUTDATED
        """Version of all columns at which every row with declared reads was found up to date; -1 if
        this is not known of any version.
        """
        self.model = ""
        """Name of the model for which the current scores of scorers that read the model are valid.
        """
        self.by_model: OrderedDict[tuple[int, str], tuple[int, Floats | float]] = OrderedDict()
        """Scores of scorers that read the model, with the version of the columns for which they
        were computed. They are stored by (row, model), those that were computed longest ago first.
        """


class KeptScores:
    """A cache of the scores that the scorers of one profile gave. A scorer must be a pure function
    of the values that it declares to read.
    """

    @classmethod
    def of(cls, scorers: Sequence[_Named], acting: Sequence[_Named] = ()) -> "KeptScores | None":
        """Return a cache for the scores of `scorers`, or None if none of them can be cached or
        borrowed. `acting` are the scorers of the acting profile.
        """
        made = cls(scorers, acting)
        return made if made._columns or made._lent else None

    def __init__(self, scorers: Sequence[_Named], acting: Sequence[_Named] = ()) -> None:
        """Create a cache for `scorers` of this profile. `acting` are the scorers of the acting
        profile if this one is the shadow.

        Scores of scorers that both profiles have are not cached, because they can be borrowed.
        """
        found = {id(scorer.plugin): row for row, scorer in enumerate(acting)}
        lent = {
            row: found[id(scorer.plugin)]
            for row, scorer in enumerate(scorers)
            if id(scorer.plugin) in found
        }
        self._lent = list(lent)
        self._lent_by = list(lent.values())
        """Rows of the acting profile's scores that are borrowed, in the order of `_lent`, the rows
        of this profile that they fill.
        """
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
        """Cached candidate sets, by the slots of their candidates as bytes, least recently used
        first.
        """
        self._slot = _NOBODY
        self._set = _Set(self._scorers, 0)
        """Cached scores of the candidates that were looked up last, whose slots are in `_slot`."""

    def recall(
        self, request: InferenceRequest, candidates: Candidates
    ) -> tuple[Floats, Sequence[int]]:
        """Return float64[scorers, n] with the cached scores, and the rows that must still be
        computed, ascending.
        """
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
        """Return float64[scorers, n] with the cached and the borrowed scores, and the rows that
        must still be computed, ascending.

        `acting` holds the scores of the acting profile for the same request and candidates.
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
        """Cache the `rows` of `scores` that may be cached. `scores` is the completed array of the
        last `recall`. Do nothing if that found every cached row up to date.
        """
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
        """Make the cached scores of the candidates in `slot` the current ones, `_set`; create them
        if there are none. They are found by content, because filters copy arrays.
        """
        self._slot = slot
        key = slot.tobytes()
        found = self._sets.get(key)
        if found is None:
            found = self._sets[key] = _Set(self._scorers, len(slot))
            if len(self._sets) > SETS_MAX:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        self._set = found
