"""What filters and scorers of costs keep to, whatever the pool looks like and indexes tell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.candidates import Affinity
from epp.strategies import dualmap, dynamo, filter_chain, infera, least_work, preble, smetric
from tests.builders import affinity, candidates, request
from tests.plugins.test_contract import REQUESTS, answer, columns, contents, of_any_state, same

FAMILIES = (dualmap, dynamo, filter_chain, infera, least_work, preble, smetric)
OPINIONS = [
    plugin()
    for family in FAMILIES
    for plugin in (*getattr(family, "FILTERS", ()), *getattr(family, "SCORERS", ()))
]
TOLD = {
    "block-load-producer": ("active_blocks", "new_blocks", "recent_miss_blocks"),
    "preble-history-producer": (
        "missed_tokens", "hit_tokens", "requests", "pushed_out_tokens",
    ),
}  # fmt: skip


@st.composite
def pools(draw):
    """Candidates of any state, and what indexes with columns tell of them; or tell not."""
    state = draw(columns())
    n, total = len(state["waiting_requests"]), state["total_blocks"]
    for name, told in TOLD.items() if draw(st.booleans()) else ():
        numbers = st.lists(st.floats(0, 1e6), min_size=n, max_size=n)
        state["affinities"][name] = Affinity(
            np.array(state["matched_blocks"], dtype=np.int64),
            total,
            {column: np.array(draw(numbers)) for column in told},
        )
    # Of a prompt and not of endpoints: the same for all.
    head = draw(st.integers(0, total))
    state["affinities"]["prefix-popularity-producer"] = affinity([head] * n, total)
    return candidates(**state)


@of_any_state
@given(pool=pools(), asked=REQUESTS, seed=st.integers(0, 99))
def test_opinions_are_sound_pure_and_do_not_depend_on_the_order(pool, asked, seed):
    """Between 0 and 1, or masks that leave somebody; the same again, and shuffled with the pool."""
    asked.chains[256] = (bytes(range(64)),)
    before = contents(pool)
    order = np.random.default_rng(seed).permutation(len(pool))
    for plugin in OPINIONS:
        first = answer(plugin, asked, pool).copy()
        assert first.shape == (len(pool),), plugin
        if first.dtype == np.bool_:
            assert first.any(), plugin
        else:
            assert np.all(np.isnan(first) | ((first >= 0) & (first <= 1))), plugin
        np.testing.assert_array_equal(answer(plugin, asked, pool), first, err_msg=str(plugin))
        assert same(before, contents(pool)), plugin
        shuffled = answer(plugin, asked, pool.take(order))
        np.testing.assert_allclose(shuffled, first[order], rtol=1e-9, err_msg=str(plugin))


@pytest.mark.parametrize("plugin", OPINIONS, ids=lambda plugin: plugin.type_name)
def test_opinions_are_immutable_and_strict(plugin):
    """As every plugin."""
    assert type(plugin).__struct_config__.frozen
    assert type(plugin).__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("plugin", OPINIONS, ids=lambda plugin: plugin.type_name)
def test_an_empty_prompt_divides_by_nothing(plugin):
    """No tokens, no blocks, nothing in flight."""
    found = answer(plugin, request(), candidates(3))
    assert found.shape == (3,)
