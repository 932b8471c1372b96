"""Scrapes that are done when somebody looks, against scrapes that are done when they are due."""

import inspect
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.engines import scrape
from sim.cluster.faults import Fault, FaultKind
from sim.cluster.loop import Loop
from sim.cluster.scraping import SCRAPE_JITTER, SCRAPE_TIMEOUT_S, Scraper, ScrapeTrouble
from sim.cluster.simulated_pod import SimulatedPod
from sim.engine.request import EngineRequest
from sim.measurement.measures import Measures, Targets
from tests.sim.made import arrival, arrivals, cluster, kind

INTERVAL_S = 0.2
CHANGES = st.lists(
    st.tuples(
        st.floats(0.0, 0.7),
        st.sampled_from(("submit", "look", "die", "restart", "freeze", "thaw", "slow", "abort")),
    ),
    max_size=30,
)


def started(delay_s, loop, troubles=()):
    pod = SimulatedPod(0, "uid-0", kind(), loop, lambda pod, step: None)
    scraper = Scraper(
        pod, pod.endpoint, Random("1"), loop.now,
        interval_s=INTERVAL_S, delay_s=delay_s, troubles=troubles,
    )  # fmt: skip
    return pod, scraper


def change(pod, what, number):
    if what == "submit" and pod.alive:
        output_tokens = 1 + number * 37 % 200
        chain = list(range(number * 1_000, number * 1_000 + (160 + output_tokens) // 16))
        pod.submit(
            EngineRequest(str(number), prompt_tokens=160, output_tokens=output_tokens, chain=chain)
        )
    elif what == "abort" and pod.alive:
        pod.abort(str(number - 1))
    elif what == "die" and pod.alive:
        pod.die()
    elif what == "restart" and not pod.alive:
        pod.restart()
    elif what in ("freeze", "thaw") and pod.alive:
        pod.freeze_page(what == "freeze")
    elif what == "slow":
        pod.slow_down(1.0 + number % 3)


def seen_by_looking(changes, delay_s):
    """What a picker knows after each look, which asks the scraper then."""
    loop = Loop()
    pod, scraper = started(delay_s, loop)
    known, looks = [None, 0], []

    def look():
        for read_at, page in scraper.read(loop.now):
            known[:] = [known[0], known[1] + 1] if page is None else [(read_at, page), 0]
        looks.append(tuple(known))

    schedule(loop, pod, changes, look)
    loop.run()
    return looks


def seen_by_events(changes, delay_s):
    """The same, each scrape an event at its instant and each reading another."""
    loop = Loop()
    pod, _ = started(delay_s, loop)
    pod.scrapers.clear()
    random = Random("1")
    known, looks = [None, 0], []

    def drawn():
        return 1 - SCRAPE_JITTER + 2 * SCRAPE_JITTER * random.random()

    def scrape(jitter):
        loop.at(loop.now + delay_s, read, loop.now + delay_s, pod.page(loop.now))
        loop.at(loop.now + INTERVAL_S * jitter, scrape, drawn())

    def read(read_at, page):
        known[:] = [known[0], known[1] + 1] if page is None else [(read_at, page), 0]

    jitter = drawn()
    loop.at(random.random() * INTERVAL_S, scrape, jitter)
    last_at = schedule(loop, pod, changes, lambda: looks.append(tuple(known)))
    while loop.next_at is not None and loop.next_at <= last_at:
        loop.step()
    return looks


def schedule(loop, pod, changes, look):
    at = 0.0
    for number, (pause_s, what) in enumerate(changes):
        # No two things at one instant: their order would be anybody's.
        at += pause_s + 1e-3 + number * 1e-7
        if what == "look":
            loop.at(at, look)
        else:
            loop.at(at, change, pod, what, number)
    return at


@given(CHANGES, st.sampled_from((0.001, 0.15, 0.6)))
def test_who_looks_now_and_then_sees_what_was_read_last(changes, delay_s):
    """Page by page, with the time at which it was read and the refusals since."""
    assert seen_by_looking(changes, delay_s) == seen_by_events(changes, delay_s)


def test_what_is_kept_does_not_grow_with_what_nobody_reads():
    """An hour without a look leaves what is still on its way, and the last that has arrived."""
    loop = Loop()
    _, scraper = started(0.5, loop)
    for at in range(1, 3_600):
        scraper.catch_up(float(at))
    assert len(scraper._pages) <= 0.5 / (INTERVAL_S * (1 - SCRAPE_JITTER)) + 2


def test_a_stopped_scraper_is_told_nothing():
    """The pod does not hold it any more."""
    loop = Loop()
    pod, scraper = started(0.001, loop)
    scraper.stop()
    assert pod.scrapers == []


RESTARTED = (Fault(kind=FaultKind.RESTART, at_s=2.0, pod=1, duration_s=1.5, factor=1.0),)


def measured(given_all, *, eagerly, **settings):
    """All that was measured, with a picker that is told of every page when it is read, or not."""
    measures = Measures(Targets())
    one = cluster(given_all, replicas=2, ended=measures.add, **settings)

    def look() -> None:
        for replica in range(2):
            one.pickers.read_pages(replica)

    one.run(look if eagerly else None)
    return measures


@pytest.mark.parametrize("delay_s", [0.001, 0.5])
@pytest.mark.parametrize("faults", [(), RESTARTED])
@pytest.mark.parametrize(
    ("policy", "rate"),
    [
        pytest.param("weighted-scores", 3.0, id="by the last page"),
        pytest.param("default", 60.0, id="by every page"),
    ],
)
def test_looking_at_every_event_changes_nothing(delay_s, faults, policy, rate):
    """A picker that is told of every page when it is read decides the same.

    What is learnt from page to page is the same where somebody looks as often as there are pages.
    """
    turns = [
        arrival(9_000 + at, time_s=at, after=at, think_s=at % 7, session="s") for at in range(30)
    ]
    given_all = sorted([*arrivals(120, rate=rate), *turns], key=lambda one: one.time_s)
    settings = {"policy": policy, "scrape_delay_s": delay_s, "faults": faults}
    lazily = measured(given_all, eagerly=False, **settings)
    assert lazily.digest == measured(given_all, eagerly=True, **settings).digest


def test_pages_reach_the_picker_in_the_order_of_the_scrapes():
    """However long they are on their way: none is replaced by an older one."""
    one = cluster(arrivals(60, rate=5.0), pods=2, scrape_delay_s=0.5)
    policy = one.pickers.policies[0]
    told = {}
    observe = policy.observe

    def watched(endpoint, page, now):
        told.setdefault(endpoint.endpoint_id, []).append(now)
        observe(endpoint, page, now)

    policy.observe = watched
    one.run()
    assert len(told) == 2
    for times in told.values():
        assert len(times) > 10
        assert all(earlier < later for earlier, later in pairwise(times))


def test_the_timeout_is_production_s():
    """A pause after failures is never longer: the next scrape only waits for the one before."""
    timeout_s = inspect.signature(scrape.Scraper).parameters["timeout_s"].default
    assert timeout_s == SCRAPE_TIMEOUT_S
    assert scrape.BACKOFF_S_MAX <= SCRAPE_TIMEOUT_S


def read_until(loop, scraper, until_s):
    """All that the picker reads, looked for every 50 ms."""
    found = []
    while loop.now < until_s:
        loop.now += 0.05
        found += scraper.read(loop.now)
    return found


def test_scrapes_that_get_no_answer_time_out_one_after_another():
    """As production asks: the next one when the one before was given up; later all is well again."""
    loop = Loop()
    _, scraper = started(0.001, loop, [ScrapeTrouble(from_s=5, to_s=15, loss=1.0)])
    reads = read_until(loop, scraper, 20)
    lost_s = [at for at, page in reads if page is None]
    assert 8 <= len(lost_s) <= 10
    assert 5 + SCRAPE_TIMEOUT_S <= lost_s[0] <= lost_s[-1] < 15 + SCRAPE_TIMEOUT_S
    assert min(after - before for before, after in pairwise(lost_s)) > 0.999 * SCRAPE_TIMEOUT_S
    assert not [at for at, page in reads if page and 5.01 < at < 15]
    assert len([at for at, page in reads if page and at > 16.5]) > 10


def test_scrapes_take_longer_and_tell_what_was_when_they_were_asked():
    """In order, one at a time; a delay that reaches the timeout is a loss."""
    loop = Loop()
    pod, scraper = started(0.001, loop, [ScrapeTrouble(from_s=0, to_s=9, more_s=0.5)])
    loop.at(4.0, pod.submit, EngineRequest("1", prompt_tokens=16, output_tokens=9_000, chain=[]))
    reads = []
    for _ in range(200):
        while loop.next_at is not None and loop.next_at <= loop.now + 0.05:
            loop.step()
        loop.now += 0.05
        reads += scraper.read(loop.now)
    times_s = [at for at, _ in reads]
    assert times_s == sorted(times_s)
    # A request that came at 4 s is seen half a second later, not before.
    seen_at_s = next(at for at, page in reads if page.running_requests)
    assert 4.5 < seen_at_s < 5.2
    loop = Loop()
    _, scraper = started(0.001, loop, [ScrapeTrouble(from_s=0, to_s=20, more_s=1.0)])
    assert {page for _, page in read_until(loop, scraper, 9)} == {None}


def test_a_share_of_the_scrapes_is_lost():
    """Before a quarter of the pages the picker has waited for one that did not come."""
    loop = Loop()
    _, scraper = started(0.001, loop, [ScrapeTrouble(from_s=0, to_s=600, loss=0.25)])
    pages_s = [at for at, page in read_until(loop, scraper, 600) if page is not None]
    waited = [after - before > SCRAPE_TIMEOUT_S for before, after in pairwise(pages_s)]
    assert 0.2 < sum(waited) / len(waited) < 0.3
