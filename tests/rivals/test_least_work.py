"""LPWL and LMetric, by hand."""

from homing_rivals.least_work import LeastPendingWork, WorkTimesBatch
from tests.builders import candidates, request


def best(plugin, **columns):
    scores = plugin.score(request(), candidates(prompt_tokens=640, total_blocks=10, **columns))
    return [at for at, score in enumerate(scores) if score == 1.0]


def test_least_pending_work_waits_for_a_prefix_as_long_as_it_saves():
    """640 tokens anew, or 500 ahead and nothing to do; 700 ahead is too long."""
    assert best(
        LeastPendingWork(), matched_blocks=[10, 0], inflight_prefill_tokens=[500.0, 0.0]
    ) == [0]
    assert best(
        LeastPendingWork(), matched_blocks=[10, 0], inflight_prefill_tokens=[700.0, 0.0]
    ) == [1]


def test_least_pending_work_breaks_ties_by_requests():
    """Who still decodes three has nothing to prefill either; more work is never a tie."""
    assert best(LeastPendingWork(), inflight_requests=[3, 1, 1, 2]) == [1, 2]
    assert best(
        LeastPendingWork(), inflight_requests=[3, 0], inflight_prefill_tokens=[0.0, 1.0]
    ) == [0]


def test_work_times_batch_takes_the_emptiest_of_those_that_hold_all():
    """Where the product would be 0 for both."""
    assert best(WorkTimesBatch(), matched_blocks=[10, 10, 0], inflight_requests=[4, 2, 0]) == [1]


def test_work_times_batch_leaves_a_prefix_when_the_batch_outweighs_it():
    """64 x 21 against 640 x 1: half the prompt cached does not outweigh twenty neighbours."""
    assert best(WorkTimesBatch(), matched_blocks=[9, 0], inflight_requests=[5, 0]) == [0]
    assert best(WorkTimesBatch(), matched_blocks=[9, 0], inflight_requests=[20, 0]) == [1]
