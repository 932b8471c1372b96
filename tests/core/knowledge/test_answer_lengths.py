import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import PageScraped, PoolReplaced, Tick
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.answer_lengths import (
    ANSWERS_MIN,
    TOKENS_MIN,
    AnswerLengths,
)
from epp.core.types import EndpointMetrics
from tests.builders import endpoint, request


def page(answers, tokens):
    return EndpointMetrics(answers_total=answers, answer_tokens_total=tokens)


def learnt(*pages):
    """What is known after `pages`, each (slot, answers, tokens)."""
    lengths = AnswerLengths()
    for slot, answers, tokens in pages:
        lengths.scraped(slot, page(answers, tokens))
    lengths.tick()
    return lengths.tokens


def test_what_has_ended_between_two_pages_is_averaged():
    """What the engine had counted before the first page, somebody else's days, is no part of it."""
    assert (
        learnt((0, 1_000.0, 1e6), (0, 1_010.0, 1e6 + 1_000.0), (0, 1_020.0, 1e6 + 2_000.0)) == 100.0
    )


def test_of_few_answers_nothing_is_known():
    assert learnt((0, 0.0, 0.0), (0, ANSWERS_MIN - 1.0, 1_500.0)) is None
    assert learnt() is None


def test_newer_answers_count_more():
    """After a few hundred short ones the long ones are forgotten."""
    turned = learnt((0, 0.0, 0.0), (0, 256.0, 256e3), (0, 2_304.0, 256e3 + 2_048 * 100.0))
    assert turned == pytest.approx(100.0, rel=0.1)


@pytest.mark.parametrize(
    "lie", [(1e9, 1e9), (500.0, 1e300), (500.0, 0.0), (math.inf, 5.0), (math.nan, math.nan)]
)
def test_one_endpoint_that_says_what_cannot_be_moves_nobody(lie):
    honest = [(slot, total, 100.0 * total) for slot in (0, 1) for total in (0.0, 50.0)]
    assert learnt(*honest, (2, 0.0, 0.0), (2, *lie)) == 100.0


@pytest.mark.parametrize("told", [(7.0, 7.0), (0.0, 0.0)])
def test_counters_that_fall_begin_anew(told):
    """Nor is what is counted from there compared with what was before."""
    answers, tokens = told
    assert learnt((0, 100.0, 1e4), (0, *told), (0, answers + 20.0, tokens + 20 * 60.0)) == 60.0


def test_an_endpoint_that_left_is_forgotten():
    lengths = AnswerLengths()
    for total in (0.0, 100.0):
        lengths.scraped(0, page(total, 80.0 * total))
    lengths.tick()
    assert lengths.tokens == 80.0
    lengths.forget(0)
    lengths.tick()
    assert lengths.tokens is None


@given(
    st.lists(
        st.tuples(st.integers(0, 2), *[st.floats(allow_nan=True, allow_infinity=True)] * 2),
        max_size=30,
    )
)
def test_whatever_pages_say_a_length_is_one(pages):
    known = learnt(*pages)
    assert known is None or TOKENS_MIN <= known <= 1e6


def test_the_next_decisions_know_it():
    """From the tick after the pages on; an endpoint that restarts tells it anew."""
    scheduler = Scheduler(build_settings(default_config(plugin_tables())), seed=1)
    scheduler.take(PoolReplaced([endpoint()]), 0.0)
    for step in (0, 1):
        told = page(40.0 * step, 40.0 * step * 90.0)
        scheduler.take(PageScraped(0, told), 0.1 + step)
    assert scheduler.schedule(request(), 1.2).lease.request.moment.answer_tokens is None
    scheduler.take(Tick(), 1.3)
    assert scheduler.schedule(request(), 1.4).lease.request.moment.answer_tokens == 90.0
    scheduler.take(PageScraped(0, EndpointMetrics(process_started_at_s=1.0)), 1.5)
    scheduler.take(PageScraped(0, EndpointMetrics(process_started_at_s=2.0)), 1.6)
    scheduler.take(Tick(), 1.7)
    assert scheduler.schedule(request(), 1.8).lease.request.moment.answer_tokens is None
