import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import PeersUnheard, PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.prompt.canonical import Message, chat_prompt
from epp.core.types import ApiKind
from epp.plugins.agreement import Agreement, agreed_scores
from epp.plugins.scorers import PrefixCache
from tests.builders import candidates, endpoint, request
from tests.decision_digest import decision_digest

BLOCK = 256
KEY_BLOCKS = 16
"""1,024 tokens, as by default."""


def prompt(*blocks):
    """Canonical bytes of blocks, one a letter."""
    return b"".join(letter.encode() * BLOCK for letter in blocks)


def asked(blocks, *, replicas_unheard=3, **fields):
    """A completion whose chain is made, as when the index has matched it."""
    made = request(
        api=ApiKind.COMPLETIONS,
        prompts=(prompt(*blocks),),
        replicas_unheard=replicas_unheard,
        **fields,
    )
    made.chains_of(BLOCK, 1_000)
    return made


def chat(*texts, system="", **fields):
    """User and assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    messages = [Message(role, text) for role, text in zip(roles, texts, strict=False)]
    if system:
        messages.insert(0, Message("system", system))
    made = request(
        api=ApiKind.CHAT,
        prompts=(chat_prompt(messages, preamble={}),),
        replicas_unheard=3,
        **fields,
    )
    made.chains_of(BLOCK, 1_000)
    return made


def winner(made, pool=None, **parameters):
    """Who gets 1; everybody else gets 0."""
    pool = pool or candidates(matched_blocks=[0] * 20, total_blocks=10)
    scores = PrefixCache(**parameters).score(made, pool).tolist()
    assert sorted(scores) == [0.0] * (len(pool) - 1) + [1.0]
    return scores.index(1.0)


def test_one_picker_alone_goes_by_what_it_knows():
    """With `auto` and no replica, and with `none` and replicas, the score is the share."""
    pool = candidates(matched_blocks=[0, 2], total_blocks=10)
    alone = asked("ab" * 5, replicas_unheard=0)
    assert PrefixCache().score(alone, pool).tolist() == [0.0, 0.2]
    none = PrefixCache(agreement=Agreement.NONE)
    assert none.score(asked("ab" * 5), pool).tolist() == [0.0, 0.2]
    assert winner(alone, pool, agreement=Agreement.RENDEZVOUS) in (0, 1)


def test_one_picker_decides_as_if_there_were_no_agreement(monkeypatch):
    """Decision by decision, with every scorer and a pool that changes."""
    told = decision_digest(7, "max-score-picker")
    monkeypatch.setattr("epp.plugins.scorers.PrefixCache._agrees", lambda *_: False)
    assert decision_digest(7, "max-score-picker") == told


def test_what_is_known_well_enough_decides():
    """From `agreement_below` on the own index is believed."""
    made = asked("ab" * 5)
    pool = candidates(matched_blocks=[0, 8], total_blocks=10)
    assert PrefixCache().score(made, pool).tolist() == [0.0, 0.8]
    assert winner(made, pool, agreement_below=0.81) in (0, 1)


@given(st.randoms())
def test_replicas_with_the_same_endpoints_agree(random):
    """Whatever slots they have there, and whatever little they know."""
    numbers = random.sample(range(20), 20)
    pools = []
    for order in (sorted(numbers), numbers):
        scheduler = Scheduler(build_settings(default_config(plugin_tables())), seed=1)
        scheduler.take(PoolReplaced([endpoint(number) for number in order]), 0.0)
        scheduler.take(PeersUnheard(3), 0.0)
        pools.append(scheduler)
    text = "abcdefghijklmnopqrst" + random.choice("abc")
    chosen = [
        scheduler.schedule(
            request(api=ApiKind.COMPLETIONS, prompts=(prompt(*text),), prompt_tokens=1_344), 0.0
        ).endpoint.name
        for scheduler in pools
    ]
    assert chosen[0] == chosen[1]


def test_prompts_are_keyed_by_their_head():
    """Sixteen blocks in common are as good as all, fifteen are not."""
    head = "abcdefghijklmnop"
    same = {winner(asked(head + tail)) for tail in ("", "q", "rs", "tuv")}
    assert len(same) == 1
    others = {winner(asked(head[:15] + tail + head)) for tail in "qrstuvwxyz"}
    assert len(others) > 3


def test_the_head_ends_beyond_what_most_hold():
    """Else everybody who shares a long system prompt would go to one endpoint."""
    head = "abcdefghijklmnopqr"
    known = candidates(matched_blocks=[18] * 11 + [0] * 9, total_blocks=40)
    few = candidates(matched_blocks=[18] * 10 + [0] * 10, total_blocks=40)
    tails = [letter * 22 for letter in "stuvwxyz"]
    assert len({winner(asked(head + tail), known) for tail in tails}) > 3
    assert len({winner(asked(head + tail), few) for tail in tails}) == 1
    again = {winner(asked(head + "s" * 22 + tail), known) for tail in ("", "t", "uv")}
    assert len(again) == 1, "thirty-two blocks are in common"


def test_a_session_that_comes_again_stays_together_whatever_it_says():
    """By the id of the request or by its header; sessions spread."""
    again = {"sessions_return": True}
    said = [winner(asked(text * 10, session_id="one", **again)) for text in "abcdefgh"]
    assert len(set(said)) == 1
    assert winner(asked("z" * 10, headers={"x-session-id": "one"}, **again)) == said[0]
    header = PrefixCache(agreement_session_header="X-Chat")
    made = asked("y" * 10, headers={"x-chat": "one"}, **again)
    assert header.score(made, candidates(20)).argmax() == said[0]
    sessions = {winner(asked("a" * 10, session_id=str(number), **again)) for number in range(20)}
    assert len(sessions) > 5


def test_a_session_of_one_request_does_not_part_who_shares_a_head():
    """Nor a chat whose first message comes again under another name."""
    assert len({winner(asked("a" * 10, session_id=str(number))) for number in range(20)}) == 1
    assert len({winner(chat("Hello", session_id=str(number))) for number in range(20)}) == 1
    # Without a full block there is nothing else to go by.
    short = {winner(asked("", session_id=str(number))) for number in range(20)}
    assert len(short) > 5


@pytest.mark.parametrize("turns", [1, 4])
def test_a_picker_learns_whether_sessions_come_again(turns):
    """From what it decides: then the session is the key, else the head."""
    scheduler = Scheduler(build_settings(default_config(plugin_tables())), seed=1)
    scheduler.take(PoolReplaced([endpoint(number) for number in range(20)]), 0.0)
    scheduler.take(PeersUnheard(3), 0.0)
    chosen = []
    for number in range(60):
        session = f"{number % (60 // turns)}"
        head = prompt(*f"{chr(97 + number % 26)}" * 20)
        decision = scheduler.schedule(
            request(
                api=ApiKind.COMPLETIONS,
                prompts=(head,),
                prompt_tokens=1_280,
                headers={"x-session-id": session},
            ),
            0.0,
        )
        chosen.append(decision.lease.request.moment.sessions_return)
    assert chosen[-1] == (turns > 1)
    assert not chosen[0]


def test_who_hears_all_others_remembers_no_session():
    """It would cost each decision something, for nothing."""
    scheduler = Scheduler(build_settings(default_config(plugin_tables())), seed=1)
    scheduler.take(PoolReplaced([endpoint(0)]), 0.0)
    for unheard, expected in ((0, False), (1, False), (1, True)):
        scheduler.take(PeersUnheard(unheard), 0.0)
        made = request(prompts=(prompt("a"),), headers={"x-session-id": "one"})
        scheduler.schedule(made, 0.0)
        assert scheduler.placements.session_returns.expected == expected


def test_turns_of_a_chat_stay_together_and_chats_spread():
    """By all up to the end of the user's first message."""
    for first in ("Hello", "Hello" * 500):
        turns = [winner(chat(first, *["more"] * said)) for said in (0, 2, 4)]
        assert len(set(turns)) == 1
    assert len({winner(chat(f"Hello {number}", system="Help")) for number in range(20)}) > 5


@pytest.mark.parametrize("session", [{}, {"session_id": "one"}])
def test_chats_below_a_long_preamble_share_it_before_they_spread(session):
    """Until most endpoints hold it: then the conversation decides, or the session."""
    system = "".join(f"{number:256}" for number in range(20))
    firsts = [f"Hello {number}" for number in range(12)]

    def winners(pool):
        named = [
            {k: f"{v} {first}" for k, v in session.items()} | {"sessions_return": bool(session)}
            for first in firsts
        ]
        return {
            winner(chat(first, system=system, **fields), pool)
            for first, fields in zip(firsts, named, strict=True)
        }

    cold = candidates(matched_blocks=[0] * 20, total_blocks=20)
    warm = candidates(matched_blocks=[20] * 11 + [0] * 9, total_blocks=40)
    assert len(winners(cold)) == 1
    assert len(winners(warm)) > 3


def test_what_has_nothing_to_go_by_is_scored_as_ever():
    """No full block, no session, no conversation."""
    made = request(api=ApiKind.COMPLETIONS, prompts=(b"Hello",), replicas_unheard=3)
    made.chains_of(BLOCK, 1_000)
    pool = candidates(matched_blocks=[0, 0], total_blocks=0)
    assert PrefixCache().score(made, pool).tolist() == [0.0, 0.0]


def test_too_many_requests_in_flight_are_the_next_ones():
    """What chance explains is no reason: that would part the pickers."""
    idle = candidates(inflight_requests=[16] * 10)
    first = agreed_scores(idle, 7).argmax()
    by_chance, too_many = ([16] * 10 for _ in range(2))
    by_chance[first] = 30
    too_many[first] = 60
    assert agreed_scores(candidates(inflight_requests=by_chance), 7).argmax() == first
    second = agreed_scores(candidates(inflight_requests=too_many), 7).argmax()
    weights = idle.rendezvous(7)
    assert second == np.argsort(weights)[-2]
    few = [0] * 10
    few[first] = 2
    assert agreed_scores(candidates(inflight_requests=few), 7).argmax() == first


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30), st.integers(0, 2**64 - 1))
def test_somebody_is_always_agreed_on(inflight, key):
    """Whoever it is has no more than the others by much."""
    scores = agreed_scores(candidates(inflight_requests=inflight), key)
    assert sorted(scores.tolist()) == [0.0] * (len(inflight) - 1) + [1.0]
    mean = sum(inflight) / len(inflight)
    assert inflight[scores.argmax()] <= 1.25 * mean + 3 * mean**0.5 + 1
    assert scores.dtype == np.float64
