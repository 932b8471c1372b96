"""The time between two tokens, counted by passes, against what each request saw."""

import math

import numpy as np
import pytest

from sim.engine.engine import Engine, EngineSettings, Step
from sim.engine.profiles import DEFAULT_PROFILE, StepWork, find_profile
from sim.engine.request import EngineRequest
from sim.engine.speculation import Speculation
from sim.engine.speculative_engine import SpeculativeEngine
from sim.measurement.measures import Measures, Targets
from sim.measurement.token_gaps import STRETCHES_MAX, TokenGaps
from tests.sim.made import arrival, arrivals, cluster, kind


def counted(requests, **settings):
    """One engine, a pass at a time: what was counted, and what requests waited for each token."""
    engine = Engine(
        EngineSettings(**({"blocks_total": 5_000} | settings)), find_profile(DEFAULT_PROFILE)
    )
    for number, (prompt, output) in enumerate(requests):
        chain = range(number * 10_000, number * 10_000 + (prompt + output) // 16)
        engine.submit(
            EngineRequest(str(number), prompt_tokens=prompt, output_tokens=output, chain=chain), 0.0
        )
    now, gaps, told, latest = 0.0, [], TokenGaps(), {}
    while (step := engine.step(now)) is not None:
        now = step.ends_at
        for request in step.outputs:
            if request.request_id in latest:
                gaps.append(now - latest[request.request_id])
            latest[request.request_id] = now
        told.add(step)
    return told, gaps


def test_gaps_are_those_that_requests_see():
    """Every one of them, when prompts of others are computed in between."""
    told, gaps = counted([(500, 40), (20_000, 10), (300, 60), (9_000, 5)])
    found = told.whole()
    assert found.output_tokens == 115
    assert found.mean_s == pytest.approx(np.mean(gaps))
    assert found.p50_s == pytest.approx(np.percentile(gaps, 50, method="inverted_cdf"), rel=0.003)
    assert found.p99_s == pytest.approx(np.percentile(gaps, 99, method="inverted_cdf"), rel=0.003)
    stalls = sum(gap > 3 * found.p50_s for gap in gaps) / len(gaps)
    assert found.stall_share == pytest.approx(stalls)
    assert stalls > 0


def test_who_was_preempted_has_waited_longer():
    """From its last token to the next, with all that came between."""
    told, gaps = counted([(100, 200), (100, 200), (100, 200)], blocks_total=40)
    assert max(gaps) > 10 * np.median(gaps), "there was one"
    assert told.whole().mean_s == pytest.approx(np.mean(gaps), rel=0.02)


def test_tokens_that_come_together_are_one_gap():
    """Of a request that accepts everything: 39 tokens after the first in ten passes, as vLLM counts."""
    engine = SpeculativeEngine(
        EngineSettings(blocks_total=5_000),
        find_profile(DEFAULT_PROFILE),
        Speculation(acceptance=(1.0, 1.0, 1.0)),
    )
    engine.submit(EngineRequest("a", prompt_tokens=50, output_tokens=40, chain=range(5)), 0.0)
    now, told, passes_s = 0.0, TokenGaps(), []
    while (step := engine.step(now)) is not None:
        now = step.ends_at
        told.add(step)
        passes_s.append(step.duration_s)
    found = told.whole()
    assert found.output_tokens == 40
    assert len(passes_s) == 11
    assert found.mean_s == pytest.approx(np.mean(passes_s[1:]))


def test_many_passes_in_one_step_are_as_many_gaps():
    """A cluster merges passes; what comes out is the mean of all gaps of all requests."""
    measures = Measures(Targets())
    ended = []

    def end(request):
        measures.add(request)
        ended.append(request)

    cluster(
        arrivals(150, output=(2, 200)), pods=(kind(),) * 2, ended=end, stepped=measures.gaps.add
    ).run()
    spans_s = [one.finished_at - one.first_token_at for one in ended]
    gaps = sum(one.arrival.output_tokens - 1 for one in ended)
    found = measures.gaps.whole()
    assert found.mean_s == pytest.approx(sum(spans_s) / gaps)
    assert found.output_tokens == gaps + len(ended)


def made_step(ends_at, tokens):
    return Step(
        started_at=ends_at - 0.01, duration_s=0.01, passes=1, admitted=[], outputs=[],
        work=StepWork(tokens=tokens, decodes=tokens, sequences=tokens),
    )  # fmt: skip


def test_memory_does_not_grow_with_the_run():
    """A day of steps; what is asked of any part of it is found."""
    told = TokenGaps()
    for second in range(86_400):
        told.add(made_step(second + 0.5, 1 + (second >= 43_200)))
    assert len(told._stretches) <= STRETCHES_MAX
    half = told.within(43_200.0, 86_400.0)
    assert half.output_tokens / half.duration_s == pytest.approx(2, rel=0.01)


def test_no_token_after_another_is_no_gap():
    """Nothing is known, and it is said by NaN."""
    found = TokenGaps().whole()
    assert math.isnan(found.mean_s)
    assert math.isnan(found.p99_s)
    assert (found.output_tokens, found.duration_s) == (0, 0)


def test_throughput_is_of_the_steady_part():
    """One straggler at the end changes nothing; a batch that is sent at once is told as a whole."""
    rates = []
    for straggler in (10, 4_000):
        measures = Measures(Targets())
        given = [arrival(at, time_s=at / 10, output_tokens=20) for at in range(300)]
        given[-1] = arrival(299, time_s=29.9, output_tokens=straggler)
        cluster(given, ended=measures.add, stepped=measures.gaps.add).run()
        summary = measures.summary()
        assert summary.window.end_s == 29.9
        rates.append(summary.output_tokens_per_s)
    assert rates[0] == pytest.approx(200, rel=0.03)
    assert rates[1] == pytest.approx(rates[0], rel=0.01)
    measures = Measures(Targets())
    batch = [arrival(at, output_tokens=100) for at in range(50)]
    cluster(batch, ended=measures.add, stepped=measures.gaps.add).run()
    window, gaps = measures.window()
    assert window.end_s > 0.5
    assert window.drain_s == 0
    assert gaps.output_tokens == 5_000


@pytest.mark.parametrize(
    ("arrive_for_s", "asked_s", "warm_up_s"),
    [(500, None, 0), (1_000, None, 100), (9_000, None, 300), (9_000, 0.0, 0), (100, 20.0, 20)],
)
def test_a_warm_up_is_left_out_of_what_is_long_enough(arrive_for_s, asked_s, warm_up_s):
    """A tenth, at most 300 s; or what was asked for."""
    measures = Measures(Targets(), warm_up_s=asked_s)
    given = [arrival(at, time_s=arrive_for_s * at / 20) for at in range(21)]
    cluster(given, pods=1, policy="random", ended=measures.add, stepped=measures.gaps.add).run()
    assert measures.warm_up_s == pytest.approx(warm_up_s)
    assert measures.steady_series().arrived_s.min() >= warm_up_s
