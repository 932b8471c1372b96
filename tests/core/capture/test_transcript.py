"""Notes as lines: what a trace reader finds, how late a line may stand, and what is not in it."""

import json

import msgspec
import pytest

from epp.core.capture.events import Opened
from epp.core.capture.lines import CaptureLine
from epp.core.capture.transcript import BEHIND_MAX
from epp.core.decision.inputs import OutputStarted, PageScraped, RequestEnded
from epp.core.knowledge.inflight import Ending, Outcome
from tests.core.capture.traffic import Live, configured, document


def lines_of(live):
    requests, _ = live.transcript.take()
    return [
        msgspec.json.decode(line, type=CaptureLine)
        for line in requests.splitlines()
        if b"homing-capture" not in line
    ]


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


def test_a_line_tells_when_how_much_and_what_came_of_it(live):
    """By the clock on the wall, in the picker's own tokens."""
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
def test_an_answer_that_nobody_counted_is_estimated(live, limit, outcome, tokens, estimated):
    """By how long it took, at most what the client allowed; one that failed has none."""
    lease = asked(live, output_tokens_max=limit)
    live.now += 2.0
    end(live, lease, **outcome)
    (line,) = lines_of(live)
    assert (line.output_tokens, line.estimated) == (tokens, estimated)


def test_a_line_stands_no_later_than_readers_look(live):
    """One that takes for ever is written unfinished, and its end changes nothing."""
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
    """So that the rest of it is its own, as the format wants it."""
    end(live, asked(live, prompts=(b"x" * 4 * 64 * 5,), prompt_tokens=64 * 9), status=200)
    (line,) = lines_of(live)
    assert not line.blocks
    assert [tokens for _, tokens in line.parts] == [64] * 5


def test_a_page_that_did_not_change_is_not_repeated(live):
    """Not in the same file; in the next one it is told again."""
    live.transcript.take()
    slot, metrics = 0, live.notes[-1].metrics
    live.scheduler.take(PageScraped(slot, metrics), 1.0)
    live.scheduler.take(PageScraped(slot, metrics), 2.0)
    _, events = live.transcript.take()
    told = [json.loads(line) for line in events.splitlines()]
    assert "page" not in told[-1]
    live.transcript.begin_file(3.0)
    _, events = live.transcript.take()
    opened = msgspec.json.decode(events, type=Opened)
    assert {one.slot for one in opened.observed} <= {0, 1, 2}
    assert all(one.page is not None for one in opened.observed)
    assert opened.replaced is not None
    assert opened.configured is not None


def test_blocks_of_another_size_need_another_file(live):
    """A file's header says what size all its blocks have."""
    same = configured(document())
    assert not live.transcript.changes_blocks(same)
    assert live.transcript.changes_blocks(msgspec.structs.replace(same, block_tokens=128))


def test_nothing_that_clients_wrote_is_in_any_line():
    """Prompt, model, session, salt, request id, headers; in no encoding that JSON has."""
    live = Live(document())
    live.begin(2)
    live.scrape()
    secret = "c4n4ry"
    live.ask(
        request_id=secret,
        model=secret,
        prompts=(secret.encode() * 200,),
        prompt_tokens=300,
        cache_salt=secret,
        headers={"x-session-id": secret, secret: secret, "authorization": secret},
        session_id=secret,
        subset=(secret, "192.168.1.1"),
        priority=0,
    )
    live.end()
    live.transcript.finish()
    requests, events = live.transcript.take()
    assert b'"model"' in requests
    assert b'"subset"' in events
    assert secret.encode() not in requests + events
