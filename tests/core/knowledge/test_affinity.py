import msgspec
import pytest

from epp.core.duration import Duration
from epp.core.knowledge.affinity import (
    NoHitLru,
    NoHitLruSettings,
    SessionIndex,
    SessionIndexSettings,
)
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.prompt.request import InferenceRequest
from tests.builders import request


def of_session(session: str, **headers: str) -> InferenceRequest:
    return InferenceRequest(request_id="r", session_id=session, headers=headers)


def sessions(**parameters: object) -> SessionIndex:
    return SessionIndex(SessionIndexSettings(**parameters))


def ranks(index: NoHitLru, slots: int = 3) -> list[int]:
    return index.match(InferenceRequest(request_id="r"), slots, 0.0).matched.tolist()


def test_a_session_matches_the_slot_it_was_last_sent_to():
    """1 of 1 for the last slot, 0 for all others, earlier ones included."""
    index = sessions()
    index.record(of_session("s"), 0, 0.0)
    index.record(of_session("s"), 2, 1.0)
    answer = index.match(of_session("s"), 3, 2.0)
    assert answer.matched.tolist() == [0, 0, 1]
    assert answer.total == 1
    assert index.match(of_session("other"), 3, 2.0).matched.tolist() == [0, 0, 0]


def test_a_request_without_a_session_matches_nothing_and_is_not_kept():
    """0 of 0, before and after it was recorded."""
    index = sessions()
    index.record(of_session(""), 1, 0.0)
    answer = index.match(of_session(""), 2, 0.0)
    assert (answer.matched.tolist(), answer.total, len(index)) == ([0, 0], 0, 0)


def test_the_session_id_comes_from_the_configured_header_if_the_request_has_none():
    """The header name is compared in lower case; `session_id` wins over the header."""
    index = sessions(header_name="X-Chat")
    index.record(of_session("", **{"x-chat": "s"}), 1, 0.0)
    assert index.match(of_session("s"), 2, 0.0).matched.tolist() == [0, 1]
    assert index.match(of_session("t", **{"x-chat": "s"}), 2, 0.0).matched.tolist() == [0, 0]


def test_a_cookie_can_name_the_session():
    """The first of that name, in whatever company; of a header that is too long none."""
    index = sessions(cookie_name="chat")
    index.record(of_session("", cookie="a=b; chat=s; chat=t"), 1, 0.0)
    assert index.match(of_session("s"), 2, 0.0).matched.tolist() == [0, 1]
    for cookie in ("", "chat", "chat=", "Chat=s", "xchat=s", "a=chat=s", "chat=s;" + "x" * 20_000):
        assert index.match(of_session("", cookie=cookie), 2, 0.0).total == 0, cookie
    assert index.match(of_session("", cookie="chat=s=1"), 2, 0.0).total == 1
    assert index.match(of_session("", **{"x-session-id": "s"}), 2, 0.0).total == 0


def test_the_first_source_that_a_request_has_names_its_session():
    """Headers, and what the producer itself reads; what is blank is not there."""
    told = [{"header": " X-A "}, {"attribute": "SessionIDDataKey"}, {"header": "x-b"}]
    settings = msgspec.convert({"sources": told, "cookieName": "c"}, SessionIndexSettings)
    everything = {"x-a": "a", "cookie": "c=c", "x-b": "b"}
    assert settings.session_in(of_session("", **everything)) == "a"
    assert settings.session_in(of_session("", **everything | {"x-a": " "})) == "c"
    assert settings.session_in(of_session("", **{"x-b": " b "})) == "b"
    assert settings.session_in(of_session("own", **everything)) == "own"
    assert settings.session_in(of_session("", **{"x-session-id": "s"})) == ""
    assert SessionIndex(settings).signature == "session:x-a,cookie c,x-b"
    assert sessions().signature == "session:x-session-id"


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"headerName": "x-a", "cookieName": "b"}, "set only one of the two"),
        ({"sources": [{}]}, "either header or attribute"),
        ({"sources": [{"header": "x", "attribute": "SessionIDDataKey"}]}, "either header or"),
        ({"sources": [{"attribute": "agent-identity"}]}, "no producer provides"),
        ({"sources": [{"header": "x"}] * 17}, "length <= 16"),
    ],
)
def test_what_can_name_no_session_is_refused(parameters, problem):
    """Before it serves."""
    with pytest.raises(msgspec.ValidationError, match=problem):
        msgspec.convert(parameters, SessionIndexSettings)


def test_a_session_expires_after_the_ttl_since_its_last_request():
    """A look-up refreshes nothing, a request does, and what expired is dropped."""
    index = sessions(ttl=Duration(10))
    index.record(of_session("s"), 0, 0.0)
    index.record(of_session("s"), 0, 5.0)
    assert index.match(of_session("s"), 1, 15.0).matched.tolist() == [1]
    assert index.match(of_session("s"), 1, 15.5).matched.tolist() == [0]
    assert len(index) == 1
    index.expire(15.5)
    assert len(index) == 0


def test_above_the_bound_the_least_recently_used_session_goes():
    """Being recorded again saves a session; a lowered bound takes effect at once."""
    index = sessions(sessions_max=2)
    for session in ("a", "b", "a", "c"):
        index.record(of_session(session), 0, 0.0)
    held = [s for s in "abc" if index.match(of_session(s), 1, 0.0).matched[0]]
    assert held == ["a", "c"]
    assert SessionIndexSettings(sessions_max=1).adopt(index)
    assert len(index) == 1


def test_forgetting_a_slot_drops_its_sessions_only():
    """Sessions of other slots stay."""
    index = sessions()
    index.record(of_session("a"), 0, 0.0)
    index.record(of_session("b"), 1, 0.0)
    index.forget(0)
    assert index.match(of_session("a"), 2, 0.0).matched.tolist() == [0, 0]
    assert index.match(of_session("b"), 2, 0.0).matched.tolist() == [0, 1]


def test_a_retracted_session_leaves_the_slot_unless_it_was_there_before():
    """Then it is as old as before; a session that has been sent somewhere since is left alone."""
    index = sessions()
    first = index.record(of_session("s"), 0, 0.0)
    again = index.record(of_session("s"), 0, 1.0)
    index.retract(of_session("s"), 0, first, 2.0)
    assert len(index) == 1
    index.retract(of_session("s"), 0, again, 2.0)
    assert list(index.shared_entries()) == [(0, 0.0, index.share(of_session("s")))]
    moved = index.record(of_session("s"), 1, 3.0)
    index.retract(of_session("s"), 1, moved, 3.0)
    assert len(index) == 0
    index.retract(of_session(""), 1, index.record(of_session(""), 1, 4.0), 4.0)


def test_an_index_measures_itself():
    """Entries, what they take, and which look-ups found something."""
    index = sessions(sessions_max=2)
    for session in ("a", "b", "c"):
        index.record(of_session(session), 0, 0.0)
    for session in ("a", "c", ""):
        index.match(of_session(session), 1, 0.0)
    told = index.measures()
    assert (told.entries, dict(told.lookups), told.hits) == (2, {"full": 1, "none": 1}, 1)
    assert 200 < told.memory_bytes / told.entries < 500
    cold = NoHitLru(NoHitLruSettings())
    cold.record(InferenceRequest(request_id="r"), 4, 0.0)
    assert (cold.measures().entries, cold.measures().hits) == (1, None)


def test_a_slot_beyond_those_asked_for_is_not_matched():
    """The answer has exactly as many slots as were asked for."""
    index = sessions()
    index.record(of_session("s"), 5, 0.0)
    assert index.match(of_session("s"), 2, 0.0).matched.tolist() == [0, 0]
    lru = NoHitLru(NoHitLruSettings())
    lru.record(InferenceRequest(request_id="r"), 5, 0.0)
    assert ranks(lru, 2) == [0, 0]


def test_ranks_say_how_long_ago_a_slot_got_a_cold_prompt():
    """0 is never; 1 the least recently used; the total is how many are remembered."""
    index = NoHitLru(NoHitLruSettings())
    cold = request(cold=True)
    assert ranks(index) == [0, 0, 0]
    for slot in (2, 0, 2):
        index.record(cold, slot, 0.0)
    assert ranks(index) == [1, 0, 2]
    assert index.match(cold, 3, 0.0).total == 2


def test_a_warm_request_does_not_count_as_use():
    """Only prompts that nobody held move an endpoint back."""
    index = NoHitLru(NoHitLruSettings())
    index.record(request(cold=False), 1, 0.0)
    assert ranks(index) == [0, 0, 0]


def test_a_slot_that_another_served_for_becomes_the_least_recently_used():
    """Taking back a cold request puts its slot first in line; a warm one changes nothing."""
    index = NoHitLru(NoHitLruSettings())
    cold = request(cold=True)
    for slot in (0, 1):
        index.record(cold, slot, 0.0)
    index.retract(request(cold=False), 1, None, 0.0)
    assert ranks(index) == [1, 2, 0]
    index.retract(cold, 1, None, 0.0)
    assert ranks(index) == [2, 1, 0]
    index.retract(cold, 2, None, 0.0)
    assert ranks(index) == [2, 1, 0]


def test_the_lru_is_bounded_and_forgets_slots():
    """Above `lruSize` the least recently used is as if never used; so is a forgotten one."""
    index = NoHitLru(NoHitLruSettings(lru_size=2))
    cold = request(cold=True)
    for slot in (0, 1, 2):
        index.record(cold, slot, 0.0)
    assert ranks(index) == [0, 1, 2]
    index.forget(1)
    index.forget(0)
    assert ranks(index) == [0, 0, 1]


def test_settings_open_and_adopt_their_own_kind_only():
    """Spelt as in the field, unknown parameters refused, another index not adopted."""
    session_settings = msgspec.convert(
        {"headerName": "x-chat", "sessionsMax": 3}, SessionIndexSettings
    )
    lru_settings = msgspec.convert({"lruSize": 3}, NoHitLruSettings)
    prefix_index = PrefixIndexSettings().open()
    for settings in (session_settings, lru_settings):
        index = settings.open()
        assert settings.adopt(index)
        assert not settings.adopt(prefix_index)
        index.expire(0.0)
        index.resize(0, 1, 1)
        with pytest.raises(msgspec.ValidationError, match="unknown"):
            msgspec.convert({"unknown": 1}, type(settings))
    with pytest.raises(ValueError, match=r"ttl is .*; it must be finite and above 0s"):
        SessionIndexSettings(ttl=Duration(0))


def test_of_a_session_that_two_pickers_sent_the_last_to_send_it_is_right():
    """In whatever order it is told, and told again; garbage is none."""
    one, other = sessions(), sessions()
    one.record(of_session("s"), 1, 5.0)
    key = one.share(of_session("s"))
    for order in ([(0, 4.0), (2, 6.0)], [(2, 6.0), (0, 4.0), (2, 6.0)]):
        index = sessions()
        for slot, stamp in order:
            index.learn(key, slot, stamp, 7.0)
        assert index.match(of_session("s"), 3, 7.0).matched.tolist() == [0, 0, 1]
    one.learn(key, 0, 4.0, 7.0)
    assert one.match(of_session("s"), 3, 7.0).matched.tolist() == [0, 1, 0]
    other.learn((*key, b"garbage"), 0, 1e9, 7.0)
    assert (len(other), other.share(of_session(""))) == (1, ())
    assert other.match(of_session("s"), 3, 307.0).matched.tolist() == [1, 0, 0]
    assert other.match(of_session("s"), 3, 307.1).matched.tolist() == [0, 0, 0]


def test_sessions_that_peers_tell_stay_within_the_bound_and_are_told_on():
    index = sessions(sessions_max=3)
    keys = [index.share(of_session(f"s{number}")) for number in range(5)]
    for number, key in enumerate(keys):
        index.learn(key, 0, float(number), 9.0)
    assert [(slot, stamp) for slot, stamp, _ in index.shared_entries()] == [
        (0, 2.0),
        (0, 3.0),
        (0, 4.0),
    ]
    index.learn(keys[0], 0, -400.0, 9.0)
    assert len(index) == 3


def test_cold_prompts_of_peers_take_their_place_by_when_they_were_sent():
    index = NoHitLru(NoHitLruSettings())
    index.record(request(cold=True), 0, 1.0)
    index.record(request(cold=True), 2, 3.0)
    cold = index.share(request(cold=True))
    assert index.share(request(cold=False)) == ()
    for _ in range(2):
        index.learn(cold, 1, 2.0, 3.0)
        assert ranks(index) == [1, 2, 3]
    index.learn(cold, 0, 2.5, 3.0)
    index.learn((), 1, 9.0, 9.0)
    assert ranks(index) == [2, 1, 3]
    assert [slot for slot, _, _ in index.shared_entries()] == [1, 0, 2]
