"""Traffic of three means, as a workload file."""

import statistics

import pytest
from msgspec.structs import replace

from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.mean_traffic import MeanTraffic, MeanTrafficError
from sim.traces.formats import open_trace

CARD = find_profile(DEFAULT_PROFILE)


def read(traffic, tmp_path, profiles=(CARD,)):
    path = tmp_path / "traffic.yaml"
    path.write_bytes(traffic.document(profiles))
    return list(open_trace(path))


def test_it_has_the_means_that_were_asked_for(tmp_path):
    """A few per cent off, as any draw; nothing is shared."""
    found = read(MeanTraffic(requests_per_s=10.0, prompt_tokens=2_000, output_tokens=300), tmp_path)
    assert found[-1].time_s == pytest.approx(200.0, rel=0.05)
    assert len(found) == pytest.approx(2_000, rel=0.1)
    assert statistics.mean(one.prompt_tokens for one in found) == pytest.approx(2_000, rel=0.1)
    assert statistics.mean(one.output_tokens for one in found) == pytest.approx(300, rel=0.1)
    texts = [one.blocks for one in found]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(("rate", "duration_s"), [(0.1, 3600.0), (1.0, 2000.0), (500.0, 120.0)])
def test_it_lasts_as_long_as_some_requests_take(rate, duration_s):
    """From two minutes to an hour."""
    traffic = MeanTraffic(requests_per_s=rate, prompt_tokens=100, output_tokens=10)
    assert traffic.duration_s == duration_s


def test_every_request_fits_the_smallest_card(tmp_path):
    """Else long ones would be refused, and no number of pods would be enough."""
    small = replace(CARD, name="small", max_model_len_tokens=4_096)
    traffic = MeanTraffic(requests_per_s=20.0, prompt_tokens=1_000, output_tokens=500)
    found = read(traffic, tmp_path, (CARD, small))
    assert max(one.prompt_tokens + one.output_tokens for one in found) <= 4_096
    with pytest.raises(MeanTrafficError) as refused:
        MeanTraffic(requests_per_s=1.0, prompt_tokens=3_000, output_tokens=0).document([small])
    assert str(refused.value) == (
        "a mean of 3,000 tokens a request is too large for small: its maximum, 4,096 tokens, must "
        "be at least 1.5 times the mean; expected a mean of at most 2,730 tokens"
    )
