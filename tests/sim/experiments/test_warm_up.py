"""How much a sizing excludes: as long as caches need, not the busiest part, the same at every load."""

import pytest

from sim.experiments.warm_up import BUSIEST_S, EXCLUDED_CHOSEN, warm_up_of
from sim.traces.standard import Drawing
from tests.sim.made import arrival

LENGTH_S = 600


def each_second(text, *, tokens=1_000, length_s=LENGTH_S, busy_s=0, **fields):
    """A request each second; `text`: second -> ids of its prompt, `tokens` each.

    Outputs of the first `busy_s` seconds are long.
    """
    return [
        arrival(
            at,
            time_s=float(at),
            prompt_tokens=tokens * len(text(at)),
            output_tokens=1_000 if at < busy_s else 4,
            blocks=text(at),
            block_tokens=tokens,
            **{name: value(at) for name, value in fields.items()},
        )
        for at in range(length_s)
    ]


def chosen(given, *, generated=True, given_s=None):
    return warm_up_of(given, generated=generated, given_s=given_s)


def test_prompts_that_share_nothing_need_no_warm_up():
    """There is nothing that a cache could hold."""
    found = chosen(each_second(lambda at: (at,)))
    assert (found.seconds, found.needed_s, found.share_excluded) == (0.0, 0.0, 0.0)
    assert not found.warning


@pytest.mark.parametrize("gap_s", [10, 60])
def test_caches_need_as_long_as_text_takes_to_come_again(gap_s):
    """Each text comes again after so many seconds: until then all of it misses."""
    found = chosen(each_second(lambda at: (at % gap_s,)))
    assert found.seconds == found.needed_s == gap_s + 1


def test_a_session_that_begins_in_the_trace_needs_no_warm_up():
    """Its text was in no cache before; of a recording nobody knows, it may have begun before."""
    given = each_second(
        lambda at: (at % 60,), session=lambda at: f"s{at % 60}", turn=lambda at: at // 60
    )
    assert chosen(given).seconds == 0.0
    assert chosen(given, generated=False).seconds == 61.0
    under_way = each_second(
        lambda at: (at % 60,), session=lambda at: f"s{at % 60}", turn=lambda at: 3 + at // 60
    )
    assert chosen(under_way).seconds == 61.0


def test_text_of_several_sessions_needs_one_even_where_they_begin():
    """A system prompt was in the caches before, whoever sends it now."""
    given = each_second(lambda at: (at % 30, 1_000 + at), session=lambda at: f"s{at}")
    assert chosen(given).seconds == 31.0


def test_little_text_is_not_waited_for():
    """Less than a twentieth of the prompt tokens comes again late."""
    given = each_second(lambda at: (0,) * 1 + tuple(range(100 * at + 1, 100 * at + 29)))
    assert chosen(given).seconds == 0.0


def test_a_fifth_of_the_requests_at_most_is_excluded():
    """However long caches would need; the report says how long that is."""
    found = chosen(each_second(lambda at: (at % 200,)))
    assert found.needed_s == 201.0
    assert found.seconds == EXCLUDED_CHOSEN * LENGTH_S
    assert found.share_excluded == pytest.approx(EXCLUDED_CHOSEN)


def test_the_busiest_part_is_not_excluded():
    """The first minutes are far busier: the warm-up ends where the busiest part begins."""
    given = each_second(lambda at: (at % 100,), busy_s=100)
    found = chosen(given)
    assert found.needed_s == 101.0
    assert found.seconds == found.busiest_from_s
    assert not found.busiest_excluded


def test_what_a_user_excludes_is_warned_of():
    """More than a quarter of the requests, or the busiest part; the first is named with its share."""
    given = each_second(lambda at: (at,))
    found = chosen(given, given_s=200.0)
    assert found.given
    assert found.seconds == 200.0
    assert found.warning.startswith("The warm-up of 200 s excludes 33% of the requests, so the")
    assert chosen(given, given_s=149.0).warning == ""
    busy = each_second(lambda at: (at,), busy_s=100)
    told = chosen(busy, given_s=100.0).warning
    assert "the busiest part of the traffic (from 0 s on)" in told


def test_the_busiest_part_is_a_minute_or_holds_200_requests():
    """So that its percentiles mean something."""
    assert chosen(each_second(lambda at: (at,))).busiest_s == pytest.approx(200.0, rel=0.01)
    often = [arrival(at, time_s=at / 50) for at in range(10_000)]
    assert chosen(often).busiest_s == BUSIEST_S
    assert chosen(often[:100]).busiest_s == pytest.approx(1.98)


@pytest.mark.parametrize(
    ("kind", "rate", "duration"), [("interactive-chat", 6.0, 120.0), ("multi-turn", 4.0, 150.0)]
)
def test_generated_chats_are_judged_on_their_busiest_minutes(kind, rate, duration):
    """A tenth of the arrivals of the first chat is 107 s: nearly all of its busiest part."""
    drawing = Drawing(kind=kind, rate_per_s=rate, duration_s=duration)
    found = chosen(drawing.generated().arrivals(1))
    assert found.share_excluded < 0.1
    assert not found.busiest_excluded
    assert not found.warning


def test_no_requests_are_refused():
    """As by all that reads a trace."""
    with pytest.raises(ValueError, match="no requests"):
        chosen([])
