"""Lines of a trace, made from the events of a journal."""

import pytest

from epp.core.decision.inputs import OutputStarted, RequestEnded
from epp.core.journal.events import Configured, Scheduled
from epp.core.journal.requests import BEHIND_MAX, request_line, request_lines, shape_of_line
from epp.core.knowledge.inflight import Ending, Outcome
from tests.core.journal.traffic import Live, document


def lines_of(live):
    return list(request_lines(live.events))


def asked(live, **fields):
    live.ask(**({"priority": 0, "output_tokens_max": None} | fields))
    return live.open[-1]


@pytest.fixture
def live():
    one = Live(document())
    one.begin(3)
    one.scrape()
    return one


def end(live, lease, **outcome):
    live.scheduler.take(RequestEnded(lease, Outcome(**outcome)), live.now)


def test_a_line_has_the_time_the_sizes_and_the_outcome(live):
    """The time is Unix time, and lengths are in the picker's own tokens."""
    live.now = 2.0
    lease = asked(live, prompts=(b"x" * 1024,), prompt_tokens=260, session_id="me")
    live.now = 2.5
    live.scheduler.take(OutputStarted(lease), live.now)
    live.now = 4.0
    end(live, lease, status=200, output_tokens=33, cached_tokens=128)
    (line,) = lines_of(live)
    assert (line.time_s, line.prompt_tokens, line.output_tokens) == (1002.0, 260, 33)
    assert (line.first_token_s, line.end_s, line.status) == (0.5, 2.0, 200)
    assert (line.cached_tokens, line.estimated, len(line.blocks)) == (128, False, 4 * 8)
    assert line.endpoint.startswith("pod-")
    assert len(line.session) == 16


def test_a_line_has_the_headers_of_the_slo_and_no_other(live):
    given = {"x-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "20.5", "x-user": "me"}
    asked(live, headers=given)
    asked(live, headers={"x-llm-d-slo-ttft-ms": "soon"})
    first, second = lines_of(live)
    assert first.headers == {"x-llm-d-slo-ttft-ms": "250.0", "x-llm-d-slo-tpot-ms": "20.5"}
    assert second.headers == {}
    (event, _) = (event for event in live.events if isinstance(event, Scheduled))
    assert shape_of_line(first) == event.shape


@pytest.mark.parametrize(
    ("limit", "outcome", "tokens", "estimated"),
    [
        (None, {"status": 200}, 80, True),
        (50, {"status": 200}, 50, True),
        (None, {"status": 503}, 0, False),
        (None, {"status": 200, "output_tokens": 5}, 5, False),
        (None, {"ending": Ending.CLIENT_LEFT}, 80, True),
    ],
)
def test_an_answer_of_unknown_length_is_estimated(live, limit, outcome, tokens, estimated):
    """The estimate follows from its duration and the client's limit; a failed one has no answer."""
    lease = asked(live, output_tokens_max=limit)
    live.now += 2.0
    end(live, lease, **outcome)
    (line,) = lines_of(live)
    assert (line.output_tokens, line.estimated) == (tokens, estimated)


def test_a_line_is_not_later_than_readers_look(live):
    """A request that does not end is given unfinished, and its end changes nothing."""
    endless = asked(live)
    for _ in range(BEHIND_MAX + 1):
        end(live, asked(live, prompts=(b"",), prompt_tokens=1), status=200)
        live.open.pop()
    end(live, endless, status=200, output_tokens=9)
    lines = lines_of(live)
    places = {line.request: place for place, line in enumerate(lines)}
    assert len(lines) == BEHIND_MAX + 2
    assert places[0] <= BEHIND_MAX + 1
    assert lines[places[0]].end_s is None
    assert lines[places[0]].estimated


def test_a_prompt_that_is_hashed_in_part_has_parts(live):
    """The rest of the prompt is then its own."""
    end(live, asked(live, prompts=(b"x" * 4 * 64 * 5,), prompt_tokens=64 * 9), status=200)
    (line,) = lines_of(live)
    assert not line.blocks
    assert [tokens for _, tokens in line.parts] == [64] * 5


def test_requests_without_a_shape_have_no_line():
    """Their size is not known."""
    live = Live(document())
    live.run(20)
    without = [
        Scheduled(request=event.request, slot=0) if isinstance(event, Scheduled) else event
        for event in live.events
    ]
    assert list(request_lines(without)) == []


def test_open_requests_end_where_the_block_size_changes(live):
    """A line has blocks of one size."""
    asked(live)
    (was,) = [event for event in live.events if isinstance(event, Configured)]
    again = Configured(
        generation=2,
        hash="",
        document=was.document,
        block_tokens=128,
        metrics_staleness_s=2.0,
        refresh_interval_s=0.2,
    )
    lines = request_lines([*live.events, again, Scheduled(request=99, slot=0)])
    assert [line.request for line in lines] == [0]


def test_a_line_is_the_shape_again():
    """Old captures have lines in place of shapes."""
    live = Live(document())
    live.run(60)
    for event in live.events:
        if isinstance(event, Scheduled):
            line = request_line(event.shape, event.at_s, 64)
            assert shape_of_line(line) == event.shape
