"""What rings, sessions, ledgers and loads keep to, whatever the pool looks like and indexes tell."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.candidates import Affinity
from epp.strategies import (
    aibrix,
    aibrix_preble,
    aibrix_vtc,
    early_blocks,
    keyed_ring,
    kthena,
    kubeai,
    load_balancing,
    manual_routing,
    session,
    session_ring,
)
from tests.builders import candidates, request
from tests.plugins.test_contract import answer, columns, contents, of_any_state, same

FAMILIES = (
    aibrix, aibrix_preble, aibrix_vtc, early_blocks, keyed_ring, kthena, kubeai, load_balancing,
    manual_routing, session, session_ring,
)  # fmt: skip
OPINIONS = [
    plugin()
    for family in FAMILIES
    for plugin in (*getattr(family, "FILTERS", ()), *getattr(family, "SCORERS", ()))
]
PICKERS = [plugin() for family in FAMILIES for plugin in getattr(family, "PICKERS", ())]
BY_ORDER = {"session-ring-scorer", "user-token-place-scorer", "kthena-prefix-scorer"}
"""The list's order is part of their rule."""
OF_EACH = {
    "routing-keys-producer": ("keys",),
    "recent-arrivals-producer": ("arrivals",),
    "block-table-producer": (),
    "kthena-prefix-producer": (),
}
OF_ALL = {"user-tokens-producer": ("tokens", "tokens_min", "tokens_max")}

ASKED = st.builds(
    request,
    api=st.sampled_from(["chat", "completions", "tokens", "opaque"]),
    session_id=st.sampled_from(["", "s"]),
    headers=st.sampled_from([{}, {"x-session-id": "h"}, {"user": "u"}, {"cookie": "\udcff"}]),
    model=st.sampled_from(["my-model", "a", ""]),
    prompts=st.sampled_from([(), (b"",), (b"Hello\xf8",), (b"user\xf9Hello\xf8\xff",), (b"\xff",)]),
)


@st.composite
def pools(draw):
    """Candidates of any state, and what indexes tell of them; or tell not."""
    state = draw(columns())
    n, total = len(state["waiting_requests"]), state["total_blocks"]
    numbers = st.floats(0, 1e6)
    matched = np.array(state["matched_blocks"], dtype=np.int64)
    if draw(st.booleans()):
        for name, told in OF_EACH.items():
            each = {column: np.array([draw(numbers) for _ in range(n)]) for column in told}
            state["affinities"][name] = Affinity(matched, total, each)
        for name, told in OF_ALL.items():
            every = {column: np.full(n, draw(numbers)) for column in told}
            state["affinities"][name] = Affinity(matched, total, every)
        tree = {
            name: np.array([draw(numbers) for _ in range(n)]) for name in ("requests", "cost_s")
        }
        tree["tree_blocks"] = np.full(n, float(draw(st.integers(0, total))))
        state["affinities"]["preble-tree-producer"] = Affinity(matched, total, tree)
    return candidates(**state)


@of_any_state
@given(pool=pools(), asked=ASKED, seed=st.integers(0, 99))
def test_opinions_are_sound_and_pure(pool, asked, seed):
    """Between 0 and 1, or masks; the same again; shuffled with the pool, but for those by order."""
    for size in (64, 100, 256):
        asked.chains.setdefault(size, (bytes(range(seed % 8 * 8)),))
    before = contents(pool)
    order = np.random.default_rng(seed).permutation(len(pool))
    for plugin in OPINIONS:
        first = answer(plugin, asked, pool).copy()
        assert first.shape == (len(pool),), plugin
        if first.dtype != np.bool_:
            assert np.all(np.isnan(first) | ((first >= 0) & (first <= 1))), plugin
        np.testing.assert_array_equal(answer(plugin, asked, pool), first, err_msg=str(plugin))
        assert same(before, contents(pool)), plugin
        if plugin.type_name not in BY_ORDER:
            shuffled = answer(plugin, asked, pool.take(order))
            np.testing.assert_allclose(shuffled, first[order], rtol=1e-9, err_msg=str(plugin))


@given(scores=st.lists(st.floats(0, 10), min_size=1, max_size=8), seed=st.integers(0, 9))
def test_pickers_pick_one_and_leave_the_sums(scores, seed):
    """The same dice, the same choice."""
    sums = np.array(scores)
    for plugin in PICKERS:
        picks = [plugin.pick(sums, candidates(len(scores)), Random(seed), 7) for _ in range(2)]
        assert picks[0].dtype == np.int64
        assert picks[0].shape == (1,)
        assert 0 <= picks[0][0] < len(scores)
        assert picks[0] == picks[1]
        assert sums.tolist() == scores


@pytest.mark.parametrize("plugin", [*OPINIONS, *PICKERS], ids=lambda plugin: plugin.type_name)
def test_plugins_are_immutable_and_strict(plugin):
    """As every plugin."""
    assert type(plugin).__struct_config__.frozen
    assert type(plugin).__struct_config__.forbid_unknown_fields
