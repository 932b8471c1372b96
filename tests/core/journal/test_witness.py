"""A witnessed scheduler decides what it would decide alone, and what it notes is let go of."""

import pytest

from epp.core.decision.inputs import PeerRecorded, Tick
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.journal.events import Completed, Decided, Learnt, Seen, Ticked
from epp.core.journal.witness import NAME_CHARACTERS_MAX, PROMPTS_MAX, Sample
from epp.core.types import ApiKind
from tests.builders import request
from tests.core.journal.traffic import Live, configured, document, settings_of

CHAT = b"\xf9system: be nice\xf8"


class Alone(Live):
    """The same traffic, unwitnessed."""

    def __init__(self, text, **more):
        super().__init__(text, **more)
        self.scheduler = Scheduler(settings_of(configured(text)), seed=1)


def outcomes(live):
    return [
        (one.number, one.endpoint.name, one.leg.matched_blocks)
        if isinstance(one, Decision)
        else one.reason
        for one in live.decisions
    ]


def test_witnessed_or_not_the_decisions_are_the_same():
    """With dice, too."""
    text = document(picker="weighted-random-picker")
    live, alone = Live(text), Alone(text)
    live.run(200)
    alone.run(200)
    assert outcomes(live) == outcomes(alone)


def test_every_input_is_noted_in_its_order():
    """A request that ended is not kept."""
    live = Live(document())
    live.begin(2)
    live.scrape()
    live.ask(priority=0)
    live.scheduler.take(Tick(), 1.0)
    live.end()
    kinds = [type(note) for note in live.notes]
    assert kinds.index(Seen) < kinds.index(Decided) < kinds.index(Ticked) < kinds.index(Completed)
    assert not live.witness._numbers


def test_what_is_not_sampled_is_not_noted():
    """Neither the decision nor the end."""
    live = Live(document(), share=1e-18)
    live.run(60)
    assert not [note for note in live.notes if isinstance(note, Decided | Completed)]
    assert len(live.decisions) == 60


@pytest.mark.parametrize("session", ["", "somebody"])
def test_another_secret_takes_others(session):
    """Which sessions are captured cannot be known without the salt."""
    prompts = [
        request(prompts=(b"%d" % number * 200,), api=ApiKind.COMPLETIONS) for number in range(64)
    ]
    taken = [
        [
            Sample(0.5, secret).takes(f"{session}{at}" if session else "", one, 256)
            for at, one in enumerate(prompts)
        ]
        for secret in (1, 2)
    ]
    assert taken[0] != taken[1]
    assert 10 < sum(taken[0]) < 54


def test_sessions_are_those_of_the_indexes_of_the_configuration():
    """By cookies too; where no index tells them apart, by the usual header."""
    index = """\
- type: session-id-producer
  parameters: {cookieName: chat}
schedulingProfiles:"""
    for text, headers in (
        (document().replace("schedulingProfiles:", index), {"cookie": "a=b; chat=somebody"}),
        (document(), {"x-session-id": "somebody"}),
    ):
        live = Live(text)
        live.begin(2)
        live.ask(headers=headers, priority=0)
        (asked,) = [note.asked for note in live.notes if isinstance(note, Decided)]
        assert asked.session == "somebody"


def test_what_clients_make_long_is_cut():
    """A model, a session or a salt as long as a body, and thousands of prompts."""
    live = Live(document())
    live.begin(1)
    live.scrape()
    long = "x" * 100_000
    live.ask(model=long, session_id=long, cache_salt=long, prompts=(b"y" * 300,) * 1000, priority=0)
    (asked,) = [note.asked for note in live.notes if isinstance(note, Decided)]
    assert {len(asked.model), len(asked.session), len(asked.cache_salt)} == {NAME_CHARACTERS_MAX}
    assert len(asked.chains) == PROMPTS_MAX


def test_what_peers_tell_is_one_note_a_tick():
    """They may tell thousands of things a second."""
    live = Live(document())
    live.begin(1)
    (name,) = live.scheduler.indexes.shared
    for _ in range(100):
        live.scheduler.take(PeerRecorded(name, [], 0, 0.0), 0.0)
    assert not [note for note in live.notes if isinstance(note, Learnt)]
    live.scheduler.take(Tick(), 1.0)
    live.scheduler.take(Tick(), 2.0)
    assert [note.records for note in live.notes if isinstance(note, Learnt)] == [100]
