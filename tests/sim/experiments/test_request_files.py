"""What a run writes of its requests; whole files are read back in `test_replay`."""

from types import SimpleNamespace

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.core.decision.profile import Scored
from sim.experiments.request_files import candidates_of

NAMES = st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"]), max_size=6)
NUMBERS = st.floats(allow_infinity=False)


@given(st.data())
def test_candidates_are_written_as_objects_of_them_would_be(data):
    """Byte by byte, whatever they are called and whatever the numbers are."""
    names = data.draw(st.lists(NAMES, min_size=1, max_size=5))
    scorers = data.draw(st.lists(NAMES, unique=True, max_size=4))
    n = len(names)
    matched = data.draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n))
    total = data.draw(st.lists(NUMBERS, min_size=n, max_size=n))
    rows = data.draw(
        st.lists(
            st.lists(NUMBERS, min_size=n, max_size=n), min_size=len(scorers), max_size=len(scorers)
        )
    )
    scored = Scored(np.array(total), np.array(rows).reshape(len(scorers), n), np.ones(len(scorers)))
    decision = SimpleNamespace(
        candidates=SimpleNamespace(
            endpoints=[SimpleNamespace(name=name) for name in names],
            matched_blocks=np.array(matched),
        ),
        scorers=tuple(scorers),
        scored=scored,
    )
    objects = [
        {
            "endpoint": name,
            "matched_blocks": matched[at],
            "score": total[at],
            "parts": {scorer: row[at] for scorer, row in zip(scorers, rows, strict=True)},
        }
        for at, name in enumerate(names)
    ]
    assert bytes(candidates_of(decision)) == msgspec.json.encode(objects)
