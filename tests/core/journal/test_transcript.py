"""Events made from notes, and the state that a new segment repeats."""

import msgspec
import pytest

from epp.core.decision.inputs import PageScraped
from epp.core.journal.events import Configured, Observed, Replaced
from epp.journal.frames import frame_of
from tests.core.journal.traffic import Live, configured, document


@pytest.fixture
def live():
    one = Live(document())
    one.begin(3)
    one.scrape()
    return one


def test_a_page_that_did_not_change_is_not_repeated(live):
    """A new segment repeats it."""
    metrics = live.notes[-1].metrics
    slot = live.notes[-1].slot
    live.scheduler.take(PageScraped(slot, metrics), 1.0)
    live.scheduler.take(PageScraped(slot, metrics), 2.0)
    assert [event.page for event in live.events[-2:]] == [None, None]
    context = live.transcript.context()
    assert [type(event) for event in context[:3]] == [Configured, Replaced, Observed]
    pages = {event.slot: event.page for event in context[2:]}
    assert pages[slot] is not None
    assert None not in pages.values()


def test_endpoints_that_left_are_not_repeated(live):
    """The state is as large as the pool."""
    live.begin(1)
    assert {event.slot for event in live.transcript.context()[2:]} <= {0}


def test_the_block_size_after_a_note_is_known_before():
    """A segment has blocks of one size."""
    live = Live(document())
    same = configured(document())
    other = msgspec.structs.replace(same, block_tokens=128)
    sizes = [live.transcript.block_tokens(note) for note in (None, same, other)]
    assert sizes == [64, 64, 128]


def test_nothing_that_clients_wrote_is_in_any_event():
    """Prompt, model, session, salt, request id and headers are left out or hashed."""
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
    written = b"".join(map(frame_of, live.events))
    assert b"model" in written
    assert b"subset" in written
    assert secret.encode() not in written
