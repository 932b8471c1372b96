"""docs/estimates.json and sim/estimation/efficiencies.toml are what the measurements say."""

import msgspec
import pytest

from docs import estimates, kernel_times
from sim.estimation.gpus import gpus
from sim.estimation.roofline import KINDS, fitted


@pytest.fixture(scope="module")
def measured():
    return kernel_times.read()


def test_efficiencies_are_those_of_the_measurements(measured):
    """Of one GPU, to the digits that are written."""
    partial = estimates.fit_gpu(measured, "h100")
    for field, value in partial.items():
        assert getattr(fitted().gpus["h100"], field) == pytest.approx(value, rel=0.01), field


def test_the_file_says_what_the_results_say():
    """Both are written by the same command."""
    assert estimates.EFFICIENCIES.read_text() == estimates.as_toml(estimates.read())


def test_no_estimate_is_further_off_than_is_published():
    """Of all that were left out, by kind."""
    known, results = fitted(), estimates.read()
    for left in (*results.left, *results.built_in):
        published = (known.measured if left.without == "model" else known.unmeasured)[left.kind]
        assert (left.prefill or 0) <= published.prefill, left
        assert (left.decode or 0) <= published.decode, left
    for cache in results.caches:
        allowed = known.memory.expert_error if cache.experts else known.memory.dense_error
        assert abs(cache.error) <= allowed, cache
    assert set(known.measured) == set(known.unmeasured) == set(KINDS)


def test_a_model_that_is_left_out_has_no_part_in_its_estimate(measured):
    """Other times of it change nothing."""
    one = next(one for one in measured if one.gpu == "h100" and one.model == "qwen3-32b")
    twice = [msgspec.structs.replace(one, products=[(at, 2 * s) for at, s in one.products])]
    others = [other for other in measured if other is not one]
    alone = [other for other in measured if other.model != "qwen3-32b"]
    assert estimates.fit_gpu(alone, "h100") == estimates.fit_gpu(
        [each for each in [*others, *twice] if each.model != "qwen3-32b"], "h100"
    )
    full = estimates.without_model(measured, "h100", "qwen3-32b")
    assert full.linear_compute == pytest.approx(estimates.fit_gpu(alone, "h100")["linear_compute"])


def test_measured_gpus_are_in_the_table(measured):
    """So that a profile can be made for each."""
    assert {one.gpu for one in measured} == set(fitted().gpus) <= set(gpus())
