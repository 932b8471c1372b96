"""What engines say of first tokens, over scrapes, restarts and endpoints that leave."""

import math

import pytest

from epp.core.types import EndpointMetrics
from epp.shell.engines.first_tokens import STEP_S, WINDOW_S, FirstTokensSeen


class Scraped:
    def __init__(self):
        self.seen = FirstTokensSeen()
        self.now_s = 100.0

    def scrape(self, sum_s, count, *, endpoint="a", after_s=STEP_S):
        self.now_s += after_s
        metrics = EndpointMetrics(ttft_sum_s=sum_s, ttft_count=count)
        self.seen.observe(endpoint, metrics, self.now_s)

    def told(self, endpoint="a"):
        return self.seen.lately(self.now_s)[endpoint]


def test_the_mean_is_of_what_came_in_the_last_minute():
    scraped = Scraped()
    scraped.scrape(1_000.0, 10_000.0)
    assert scraped.told().lately_s is None, "what was before says nothing of now"
    scraped.scrape(1_002.0, 10_004.0)
    assert scraped.told().lately_s == pytest.approx(0.5)
    assert (scraped.told().sum_s, scraped.told().count) == (1_002.0, 10_004.0)
    for _ in range(int(WINDOW_S / STEP_S) + 2):
        scraped.scrape(1_002.0, 10_004.0)
    assert scraped.told().lately_s is None, "an idle minute"


def test_scrapes_between_two_steps_count_at_once():
    scraped = Scraped()
    scraped.scrape(1.0, 1.0)
    for at in range(1, 5):
        scraped.scrape(1.0 + at, 1.0 + at, after_s=STEP_S / 10)
    assert scraped.told().lately_s == pytest.approx(1.0)


@pytest.mark.parametrize("after", [(0.0, 0.0), (0.3, 1.0), (60.0, 2.0)])
def test_a_restart_takes_nothing_back(after):
    """Both counters fall, or only one; what was counted before stays."""
    scraped = Scraped()
    scraped.scrape(50.0, 100.0)
    scraped.scrape(51.0, 102.0)
    scraped.scrape(*after)
    told = scraped.told()
    assert (told.sum_s, told.count) == (51.0 + after[0], 102.0 + after[1])
    assert told.lately_s == pytest.approx((1.0 + after[0]) / (2.0 + after[1]))


def test_an_engine_that_does_not_tell_has_no_row():
    scraped = Scraped()
    scraped.scrape(math.nan, math.nan)
    scraped.scrape(1.0, math.nan)
    assert scraped.seen.lately(scraped.now_s) == {}


def test_a_page_that_forgets_to_tell_once_loses_nothing():
    scraped = Scraped()
    scraped.scrape(1.0, 1.0)
    scraped.scrape(math.nan, math.nan)
    scraped.scrape(3.0, 2.0)
    assert scraped.told().lately_s == pytest.approx(2.0)


def test_endpoints_that_left_are_forgotten():
    """Pods come and go for as long as we run."""
    scraped = Scraped()
    for name in "abc":
        scraped.scrape(1.0, 1.0, endpoint=name)
    scraped.seen.replace(["b"])
    assert set(scraped.seen.lately(scraped.now_s)) == {"b"}
