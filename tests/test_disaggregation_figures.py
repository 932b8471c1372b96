"""What docs/disaggregation-figures.md is measured by."""

from itertools import pairwise

import pytest

from docs import disaggregation_figures
from docs.disaggregation_figures import (
    AGGREGATED,
    ESTIMATED,
    LINK,
    LONG_RATES,
    PREFILL_TOKENS_PER_S,
    PROMPT_TOKENS,
    PUBLISHED,
    PUBLISHED_PREFILL,
    RATES,
    SPLITS,
    guide_profile,
    guide_setups,
    long,
    long_setups,
    read,
    run,
    steady,
    with_published_prefill,
)
from sim.cluster.links import LINKS


def rows(comparison):
    return {
        (row.profile, row.setup, row.rate_per_s): row
        for row in read().rows
        if row.comparison == comparison
    }


def test_all_that_the_page_shows_was_measured():
    expected = {
        (profile, setup, rate)
        for profile in (ESTIMATED, PUBLISHED_PREFILL)
        for setup in (AGGREGATED, *SPLITS)
        for rate in RATES
    }
    assert set(rows("guide")) == expected
    assert [row.link for row in read().rows if row.comparison == "links"] == list(LINKS)
    assert {(setup, rate) for _, setup, rate in rows("long")} == {
        (setup, rate) for setup in (AGGREGATED, "6P2D", "4P4D") for rate in LONG_RATES
    }
    for row in read().rows:
        requests = (
            disaggregation_figures.LONG_REQUESTS
            if row.comparison == "long"
            else row.rate_per_s * 120
        )
        assert row.completed == requests


def test_the_signs_of_the_guide_hold_at_every_rate():
    """Tokens follow each other faster, the first one comes later, the whole answer sooner."""
    found = rows("guide")
    for profile in (ESTIMATED, PUBLISHED_PREFILL):
        for rate in RATES:
            whole, split = (found[profile, setup, rate] for setup in (AGGREGATED, "8P2D"))
            assert split.itl_s < whole.itl_s
            assert split.ttft_s > 1.1 * whole.ttft_s
            if rate > 15:
                assert split.e2e_s < whole.e2e_s


def test_the_signs_hold_in_a_short_run():
    """They come from the model, not from the file."""
    given = [one for one in steady(45.0) if one.time_s < 20.0]
    whole, split, _ = guide_setups(PUBLISHED_PREFILL)
    one, other = (
        run("guide", PUBLISHED_PREFILL, setup, LINK, 45.0, given) for setup in (whole, split)
    )
    assert one.completed == other.completed == len(given)
    assert other.itl_s < 0.7 * one.itl_s
    assert other.ttft_s > 1.1 * one.ttft_s
    assert other.e2e_s < one.e2e_s
    parts = other.prefill_s + other.reservation_s + other.transfer_s + other.other_s
    assert parts == pytest.approx(other.ttft_s, rel=1e-4)


def test_decode_memory_dominates_with_few_decode_pods_only():
    """As in the study: most of the time to first token, and hardly any with twice as many."""
    share = {}
    for setup in long_setups()[1:]:
        row = run("long", ESTIMATED, setup, LINK, 2.0, list(long(2.0)))
        share[setup.name] = row.reservation_s / row.ttft_s
    assert share["6P2D"] > 0.5
    assert share["4P4D"] < 0.01


def test_the_second_profile_has_the_published_prefill_speed():
    """And decodes nearly as estimated."""
    estimated = guide_profile(1)
    profile = with_published_prefill(estimated, 1)
    assert profile.prefill_tokens_per_s(PROMPT_TOKENS) == pytest.approx(PREFILL_TOKENS_PER_S)
    assert profile.decode_step_s(16, 5_000) < 1.02 * estimated.decode_step_s(16, 5_000)


def test_requests_come_as_inference_perf_sends_them():
    """All within the duration, with gaps of random length."""
    given = list(steady(45.0))
    assert len(given) == 5_400
    assert given[-1].time_s == pytest.approx(120.0)
    gaps = [after.time_s - before.time_s for before, after in pairwise(given)]
    assert max(gaps) > 5 * sum(gaps) / len(gaps)


def test_tables_put_what_was_published_first():
    measured = read()
    assert (
        disaggregation_figures.guide_table(measured)
        .splitlines()[2]
        .startswith("| aggregated, 45 | **p")
    )
    signs = disaggregation_figures.sign_table(measured).splitlines()
    assert "| 0.41 x | 5.1 x | 2.17 x |" in signs[2]
    assert len(signs) == 2 + 1 + 2 * 2 * len(RATES)
    assert set(PUBLISHED) == {AGGREGATED, "8P2D"}
