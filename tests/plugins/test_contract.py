"""What every plugin of the tables keeps to, whatever the pool looks like."""

import math
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.decision.plugin import ReadsIndex
from epp.core.session_tokens import SessionTokens
from epp.plugins import DEPRECATED, FILTERS, PICKERS, SCORERS
from tests.builders import affinity, candidates, endpoint, request, resident
from tests.builders import lora as activity

ADAPTERS = ("my-model", "a", "b", "c")
ROLES = ("decode", "prefill", "encode", "both", "other")

VARIANTS = {
    "by-label": [{"label": "llm-d.ai/role", "validValues": ["decode"], "allowsNoLabel": True}],
    "label-selector-filter": [
        {},
        {"matchExpressions": [{"key": "llm-d.ai/role", "operator": "Exists"}]},
    ],
    "prefix-cache-affinity-filter": [{}, {"explorationProbability": 0.5}, {"maxTTFTPenaltyMs": 1}],
    "prefix-cache-scorer": [
        {},
        {"matchLengthWeight": 0.5, "matchLengthScaleTokens": 100},
        {"agreement": "rendezvous", "agreementBelow": 1.0, "agreementKeyTokens": 1},
    ],
    "active-request-scorer": [{}, {"idleThreshold": 2, "maxBusyScore": 0.5}],
    "token-load-scorer": [{}, {"queueThresholdTokens": 1000}],
    "session-affinity-scorer": [{}, {"strategy": "session_id"}],
}

BY_LABEL = {
    "label-selector-filter", "by-label", "decode-filter", "prefill-filter", "encode-filter",
}  # fmt: skip
"""They select, so they may select nobody."""

BY_ORDER = {"no-hit-lru-scorer"}
"""Never-used endpoints are ranked in the order in which they come."""


def plugins(*tables):
    """Each plugin of the tables, with every set of parameters above."""
    return [
        msgspec.convert(parameters, plugin)
        for table in tables
        for name, plugin in table.items()
        for parameters in VARIANTS.get(name, [{}])
    ]


def reports():
    some = st.frozensets(st.sampled_from(ADAPTERS), max_size=3)
    slots = st.integers(0, 3)
    return st.one_of(
        st.none(),
        st.builds(lambda active, n: activity(*active, slots_max=n), some, slots),
        st.builds(
            lambda gpu, cpu, active, n: resident(gpu=gpu, cpu=cpu, active=active, slots_max=n),
            some, some, some, slots,
        ),
    )  # fmt: skip


def column(n, values):
    return st.lists(values, min_size=n, max_size=n)


@st.composite
def columns(draw):
    """Keyword arguments of `candidates` for 1 to 6 endpoints of any state."""
    n = draw(st.integers(1, 6))
    total = draw(st.integers(0, 5))
    count = st.one_of(st.just(math.nan), st.integers(0, 20).map(float))
    share = st.one_of(st.just(math.nan), st.floats(0, 1))
    role = st.one_of(st.just({}), st.sampled_from(ROLES).map(lambda role: {"llm-d.ai/role": role}))
    return {
        "waiting_requests": draw(column(n, count)),
        "running_requests": draw(column(n, count)),
        "kv_cache_usage": draw(column(n, share)),
        "metrics_age_s": draw(column(n, st.sampled_from([0.0, 1.5, 9.0, math.inf]))),
        "saturated": draw(column(n, st.booleans())),
        "inflight_requests": draw(column(n, st.integers(0, 9))),
        "inflight_prefill_tokens": draw(column(n, st.floats(0, 1e6))),
        "matched_blocks": draw(column(n, st.integers(0, total))),
        "total_blocks": total,
        "adapters": draw(column(n, reports())),
        "labels": draw(column(n, role)),
        "affinities": {
            "session-id-producer": affinity(draw(column(n, st.integers(0, 1)))),
            "no-hit-lru-producer": affinity(draw(st.permutations(range(n))), n),
        },
        "prompt_tokens": draw(st.integers(0, 10_000)),
    }


TOKENS = SessionTokens((b"key",))
REQUESTS = st.builds(
    request,
    request_id=st.sampled_from(["one", "two", "three"]),
    headers=st.sampled_from([{}, {"x-session-token": TOKENS.of(endpoint(1))}]),
    session_tokens=st.just(TOKENS),
    cold=st.booleans(),
)


def contents(pool):
    """Every array behind the candidates, copied."""
    held = vars(pool._columns).items()
    return {name: value.copy() for name, value in held if isinstance(value, np.ndarray)} | {
        name: known.matched.copy() for name, known in pool._affinities.items()
    }


def same(before, after):
    return before.keys() == after.keys() and all(
        np.array_equal(before[name], after[name], equal_nan=before[name].dtype.kind == "f")
        for name in before
    )


def answer(plugin, asked, pool):
    verb = plugin.keep if hasattr(plugin, "keep") else plugin.score
    found = verb(asked, pool)
    return np.full(len(pool), np.nan) if found is None else found


# Drawing a pool costs more than running every plugin on it, so all of them share each.
of_any_state = settings(max_examples=100, deadline=None)


@of_any_state
@given(state=columns(), asked=REQUESTS)
def test_a_score_is_between_0_and_1_or_unknown(state, asked):
    """float64[n], or None."""
    pool = candidates(**state)
    for plugin in plugins(SCORERS):
        scores = plugin.score(asked, pool)
        if scores is None:
            continue
        assert scores.dtype == np.float64, plugin
        assert scores.shape == (len(pool),), plugin
        assert np.all(np.isnan(scores) | ((scores >= 0) & (scores <= 1))), plugin


@of_any_state
@given(state=columns(), asked=REQUESTS)
def test_a_filter_answers_with_a_mask(state, asked):
    """bool[n]; only filters by label may leave nobody."""
    pool = candidates(**state)
    for plugin in plugins(FILTERS):
        keep = plugin.keep(asked, pool)
        assert keep.dtype == np.bool_, plugin
        assert keep.shape == (len(pool),), plugin
        assert keep.any() or plugin.type_name in BY_LABEL, plugin


@of_any_state
@given(state=columns(), asked=REQUESTS)
def test_a_plugin_changes_nothing_and_repeats_itself(state, asked):
    """A pure function: the columns stay, and so does the answer."""
    pool = candidates(**state)
    before = contents(pool)
    for plugin in plugins(FILTERS, SCORERS):
        first = answer(plugin, asked, pool).copy()
        np.testing.assert_array_equal(answer(plugin, asked, pool), first, err_msg=str(plugin))
        assert same(before, contents(pool)), plugin


@of_any_state
@given(state=columns(), asked=REQUESTS, seed=st.integers(0, 99))
def test_the_order_of_candidates_does_not_matter(state, asked, seed):
    """Shuffled candidates get their own answers, shuffled."""
    pool = candidates(**state)
    order = np.random.default_rng(seed).permutation(len(pool))
    shuffled = pool.take(order)
    for plugin in plugins(FILTERS, SCORERS):
        expected = answer(plugin, asked, pool)[order]
        found = answer(plugin, asked, shuffled)
        if plugin.type_name in BY_ORDER:
            expected, found = np.sort(expected), np.sort(found)
        np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=str(plugin))


@of_any_state
@given(
    scores=st.lists(st.floats(0, 10), min_size=1, max_size=8),
    rotation=st.integers(0, 2**40),
    seed=st.integers(0, 9),
)
def test_a_picker_picks_from_the_candidates(scores, rotation, seed):
    """int64[k], and the sums stay as they are."""
    sums = np.array(scores)
    for plugin in plugins(PICKERS):
        chosen = plugin.pick(sums, candidates(len(scores)), Random(seed), rotation)
        assert chosen.dtype == np.int64, plugin
        assert chosen.shape == (1,), plugin
        assert 0 <= chosen[0] < len(scores), plugin
        assert sums.tolist() == scores, plugin


def test_a_plugin_is_found_under_its_own_name():
    """Or under an older one that is flagged as such."""
    for table in (FILTERS, SCORERS, PICKERS):
        for name, plugin in table.items():
            assert name in {plugin.type_name, *DEPRECATED}
    assert set(DEPRECATED) <= set(FILTERS)
    assert set(DEPRECATED.values()) <= set(FILTERS) - set(DEPRECATED)


@pytest.mark.parametrize("plugin", plugins(FILTERS, SCORERS, PICKERS))
def test_a_plugin_is_immutable_and_strict(plugin):
    """Its parameters are fixed, and an unknown one is refused."""
    assert type(plugin).__struct_config__.frozen
    assert type(plugin).__struct_config__.forbid_unknown_fields


def test_readers_of_an_index_say_which():
    """So that one that is missing can be made."""
    readers = {
        name: (plugin.producer, plugin.producer_type)
        for name, table in (("filter", FILTERS), ("scorer", SCORERS))
        for name, kind in table.items()
        if name != "by-label" and isinstance(plugin := kind(), ReadsIndex)
    }
    assert readers == {
        "prefix-cache-affinity-filter": ("", "approx-prefix-cache-producer"),
        "prefix-cache-scorer": ("", "approx-prefix-cache-producer"),
        "no-hit-lru-scorer": ("no-hit-lru-producer", "no-hit-lru-producer"),
        "session-affinity-scorer": (None, "session-id-producer"),
        "token-load-scorer": ("", "approx-prefix-cache-producer"),
    }
