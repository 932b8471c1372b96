"""Of a counter that is written by whoever answers at the endpoint's address."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.knowledge.first_outputs import RISES_AFTER_FALL, SILENT_MAX, FirstOutputs
from epp.core.types import EndpointMetrics


class Endpoint:
    """What its page counts, and what we have there."""

    def __init__(self, count=100.0):
        self.outputs = FirstOutputs()
        self.count = count
        assert self.page(since_s=math.inf) == 0, "what was before is not ours"
        assert not self.outputs.counted
        assert self.page() == 0
        assert self.outputs.counted

    def page(self, more=0.0, inflight=10, since_s=0.2, **told):
        self.count += more
        metrics = EndpointMetrics(**{"first_outputs_total": self.count, **told})
        return self.outputs.scraped(metrics, inflight, since_s=since_s)


def test_what_the_counter_rises_by_is_told_once():
    there = Endpoint()
    assert there.page(3) == 3
    assert there.page() == 0
    assert there.page(1) == 1


def test_what_is_known_already_is_not_told():
    """Whether the page shows it at once or the next one does; not later: it was something else."""
    there = Endpoint()
    there.outputs.known()
    assert there.page(2) == 1
    there.outputs.known()
    assert there.page() == 0
    assert there.page(2) == 1
    there.outputs.known()
    assert (there.page(), there.page()) == (0, 0)
    assert there.page(2) == 2


def test_never_more_than_we_have_there():
    there = Endpoint()
    assert there.page(1e12, inflight=7) == 7
    assert there.page(1, inflight=7) == 1, "nothing of a leap is left for later"


def test_a_page_without_the_counter_ends_it():
    """The next one that tells begins anew."""
    there = Endpoint()
    there.count = math.nan
    assert there.page() == 0
    assert not there.outputs.counted
    there.count = 500.0
    assert there.page() == 0
    assert there.page(2) == 2
    assert there.outputs.counted


def test_of_pages_that_are_far_apart_nothing_is_learnt():
    """The requests of which they tell are over; the next one that is near begins anew."""
    there = Endpoint()
    there.outputs.known()
    for _ in range(3):
        assert there.page(5, since_s=4.0) == 0
        assert not there.outputs.counted
    assert there.page(2) == 2
    assert there.outputs.counted


def test_a_counter_that_stands_still_while_answers_come_is_not_gone_by():
    """Until it moves: an engine may tell late."""
    there = Endpoint()
    for _ in range(SILENT_MAX):
        assert there.outputs.counted
        there.outputs.known()
    assert there.page() == 0
    assert not there.outputs.counted
    there.page(1)
    assert there.outputs.counted


def test_a_counter_that_falls_is_not_gone_by_for_long():
    """Such as of several engines behind one address, each of which tells its own."""
    there = Endpoint()
    assert there.page(-50) == 0
    assert not there.outputs.counted
    for _ in range(RISES_AFTER_FALL - 1):
        assert there.page(5) == 0
    assert there.page(5) == 5
    for _ in range(100):
        assert there.page(900) <= 10
        assert there.page(-900) == 0
        assert not there.outputs.counted


def test_of_a_counter_that_counts_others_too_a_share_is_ours():
    """As large as our share of the requests there: a quarter, fractions added up."""
    there = Endpoint()
    told = [there.page(2, running_requests=30.0, waiting_requests=10.0) for _ in range(40)]
    assert sum(told) == 20
    assert max(told) == 1


def test_requests_that_end_after_the_page_was_read_are_not_of_others():
    """Alone, of each first output one is ours, however many requests end before a page is looked at.

    A first output that is lost would leave a prompt waiting for ever, because the oldest count as computed first.
    """
    there = Endpoint()
    told = sum(
        there.page(1, inflight=10 - number % 2, running_requests=10.0, waiting_requests=0.0)
        for number in range(1_000)
    )
    assert told == 1_000


def test_the_first_page_of_a_new_engine_counts_our_first_outputs():
    """It counts no more than we have there, so that all of them are ours."""
    outputs = FirstOutputs()
    first = EndpointMetrics(first_outputs_total=3.0)
    assert outputs.scraped(first, 5, since_s=math.inf) == 3
    assert outputs.counted
    assert outputs.scraped(EndpointMetrics(first_outputs_total=4.0), 5, since_s=0.2) == 1


def test_the_first_page_of_an_engine_that_has_served_others_tells_nothing():
    """Its counter is greater than what we have there."""
    outputs = FirstOutputs()
    first = EndpointMetrics(first_outputs_total=6.0)
    assert outputs.scraped(first, 5, since_s=math.inf) == 0
    assert not outputs.counted


def test_one_picker_alone_has_all_of_it():
    """Though some of its requests are still on their way."""
    there = Endpoint()
    assert [there.page(3, running_requests=8.0, waiting_requests=0.0) for _ in range(9)] == [3] * 9


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(0, 1e15), st.sampled_from([math.nan, math.inf, -1.0])),
            st.one_of(st.floats(0, 1e15), st.sampled_from([math.nan, math.inf])),
            st.integers(0, 1_000),
            st.integers(0, 9),
        )
    )
)
def test_whatever_pages_tell_it_is_a_number_of_our_requests(pages):
    outputs = FirstOutputs()
    for count, running, inflight, known in pages:
        for _ in range(known):
            outputs.known()
        metrics = EndpointMetrics(
            first_outputs_total=count, running_requests=running, waiting_requests=0.0
        )
        told = outputs.scraped(metrics, inflight, since_s=1.0)
        assert 0 <= told <= inflight + known + 10


def test_a_page_bounds_the_requests_without_a_first_output():
    """Three wait and two of the running ones are not counted; what was counted otherwise before is left out."""
    there = Endpoint(count=100.0)
    there.page(running_requests=4.0, waiting_requests=0.0, answers_total=90.0)
    there.page(1, running_requests=4.0, waiting_requests=0.0, answers_total=91.0)
    assert there.outputs.to_come_max == 0.0
    there.page(1, running_requests=7.0, waiting_requests=3.0, answers_total=91.0)
    assert there.outputs.to_come_max == 5.0
    there.page(running_requests=0.0, waiting_requests=0.0, answers_total=110.0)
    assert there.outputs.to_come_max == 0.0, "an idle engine has none"


def test_a_first_output_or_an_answer_shows_that_the_engine_ended_a_step():
    there = Endpoint(count=100.0)
    there.page(answers_total=90.0)
    there.page(1, answers_total=90.0)
    assert there.outputs.stepped
    there.page(answers_total=91.0)
    assert there.outputs.stepped
    there.page(answers_total=91.0)
    assert not there.outputs.stepped


def test_a_page_without_answers_bounds_nothing():
    there = Endpoint()
    there.page(1, running_requests=4.0, waiting_requests=1.0)
    assert there.outputs.to_come_max == math.inf
    there.page(1, running_requests=math.inf, waiting_requests=1.0, answers_total=1.0)
    assert there.outputs.to_come_max == math.inf
