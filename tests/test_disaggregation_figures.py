"""The measurement of docs/disaggregation-figures.md."""

from itertools import pairwise

import pytest

from docs import disaggregation_figures
from docs.disaggregation_figures import (
    AGGREGATED,
    ESTIMATED,
    GUIDE_PROFILES,
    GUIDE_RATE,
    KERNEL_TIMES,
    LINK,
    LINK_DURATION_S,
    LONG_RATES,
    NO_HOST_TIME,
    PREFILL_TOKENS_PER_S,
    PROMPT_TOKENS,
    PUBLISHED,
    PUBLISHED_PREFILL,
    RANDOM_PREFILL,
    SPLITS,
    guide_profile,
    guide_setups,
    long,
    long_setups,
    read,
    run,
    steady,
)
from sim.engine.links import LINKS

SETUPS = (AGGREGATED, *SPLITS)


def rows(comparison):
    return {
        (row.profile, row.setup, row.rate_per_s): row
        for row in read().rows
        if row.comparison == comparison
    }


def test_all_that_the_page_shows_was_measured():
    expected = {(profile, setup, GUIDE_RATE) for profile in GUIDE_PROFILES for setup in SETUPS}
    assert set(rows("guide")) == {*expected, (PUBLISHED_PREFILL, RANDOM_PREFILL, GUIDE_RATE)}
    assert [row.link for row in read().rows if row.comparison == "links"] == list(LINKS)
    assert {(setup, rate) for _, setup, rate in rows("long")} == {
        (setup, rate) for setup in (AGGREGATED, "6P2D", "4P4D") for rate in LONG_RATES
    }
    requests = {
        "guide": 5_400,
        "links": sum(one.time_s < LINK_DURATION_S for one in steady(GUIDE_RATE)),
        "long": disaggregation_figures.LONG_REQUESTS,
    }
    for row in read().rows:
        assert row.completed == requests[row.comparison]


@pytest.mark.parametrize("profile", GUIDE_PROFILES)
def test_the_signs_of_the_guide_hold(profile):
    """Disaggregation shortens the time per token and the whole answer, and delays the first
    token.
    """
    found = rows("guide")
    whole, split = (found[profile, setup, GUIDE_RATE] for setup in (AGGREGATED, "8P2D"))
    assert split.tpot_s < whole.tpot_s
    assert split.ttft_s > 1.1 * whole.ttft_s
    assert split.e2e_s < whole.e2e_s


def test_published_runs_lie_near_the_profile_with_the_published_prefill_speed():
    """The statements of the page: E2E and time per token within 20 % of the runs of April."""
    found = rows("guide")
    for published in PUBLISHED[:2]:
        row = found[PUBLISHED_PREFILL, published.setup, GUIDE_RATE]
        assert row.tpot_s == pytest.approx(published.tpot_s, rel=0.2)
    whole = found[PUBLISHED_PREFILL, AGGREGATED, GUIDE_RATE]
    assert whole.e2e_s == pytest.approx(PUBLISHED[0].e2e_s, rel=0.2)
    random = found[PUBLISHED_PREFILL, RANDOM_PREFILL, GUIDE_RATE]
    assert 1.5 < random.ttft_s / whole.ttft_s < 2.2


def test_the_signs_hold_in_a_short_run():
    """They come from the model, not from the file."""
    given = [one for one in steady(GUIDE_RATE) if one.time_s < 10.0]
    whole, split, *_ = guide_setups(PUBLISHED_PREFILL)
    one, other = (
        run("guide", PUBLISHED_PREFILL, setup, LINK, GUIDE_RATE, given) for setup in (whole, split)
    )
    assert one.completed == other.completed == len(given)
    assert other.tpot_s < 0.7 * one.tpot_s
    assert other.ttft_s > 1.1 * one.ttft_s
    assert other.e2e_s < one.e2e_s
    parts = other.prefill_s + other.reservation_s + other.transfer_s + other.other_s
    assert parts == pytest.approx(other.ttft_s, rel=1e-4)


def test_random_prefill_pods_let_some_prompts_wait():
    """The same pods and prompts, chosen in turn and at random."""
    given = [one for one in steady(GUIDE_RATE) if one.time_s < 10.0]
    _, in_turn, random, _ = guide_setups(PUBLISHED_PREFILL)
    one, other = (
        run("guide", PUBLISHED_PREFILL, setup, LINK, GUIDE_RATE, given)
        for setup in (in_turn, random)
    )
    assert other.prefill_s > 1.1 * one.prefill_s


def test_decode_memory_dominates_with_few_decode_pods_only():
    """As in the study: most of the time to first token, and hardly any with twice as many."""
    share = {}
    for setup in long_setups()[1:]:
        row = run("long", ESTIMATED, setup, LINK, 2.0, list(long(2.0)))
        share[setup.name] = row.reservation_s / row.ttft_s
    assert share["6P2D"] > 0.5
    assert share["4P4D"] < 0.01


def test_profiles_of_the_guide_differ_as_their_names_say():
    estimated, kernels, prefill, no_host = (
        guide_profile(name, 1)
        for name in (ESTIMATED, KERNEL_TIMES, PUBLISHED_PREFILL, NO_HOST_TIME)
    )
    assert prefill.prefill_tokens_per_s(PROMPT_TOKENS) == pytest.approx(PREFILL_TOKENS_PER_S)
    assert prefill.decode_step_s(16, 5_000) < 1.02 * kernels.decode_step_s(16, 5_000)
    assert no_host.host_s == 0.0
    assert no_host.linear_s == kernels.linear_s
    assert kernels.kv_tokens == estimated.kv_tokens
    assert estimated.estimated is not None
    assert kernels.estimated is None


def test_kernel_times_come_near_the_prefill_speed_that_the_guide_publishes():
    """Two independent measurements: single kernels, and whole engines."""
    tokens_per_s = guide_profile(KERNEL_TIMES, 1).prefill_tokens_per_s(PROMPT_TOKENS)
    assert tokens_per_s == pytest.approx(PREFILL_TOKENS_PER_S, rel=0.15)


def test_requests_come_as_inference_perf_sends_them():
    """All within the duration, with gaps of random length."""
    given = list(steady(45.0))
    assert len(given) == 5_400
    assert given[-1].time_s == pytest.approx(120.0)
    gaps = [after.time_s - before.time_s for before, after in pairwise(given)]
    assert max(gaps) > 5 * sum(gaps) / len(gaps)


def test_tables_put_what_was_published_first():
    measured = read()
    guide = disaggregation_figures.guide_table(measured).splitlines()
    assert guide[2].startswith("| aggregated | **published, April** | 6.7 s | 24.8 ms |")
    signs = disaggregation_figures.sign_table(measured).splitlines()
    assert "| 0.53 x | 2.9 x | 2.71 x |" in signs[2]
    assert len(signs) == 2 + 3 + 2 * len(GUIDE_PROFILES) + 1
