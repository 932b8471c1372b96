"""Tokens that nobody can make without the key, and that tell nothing."""

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from epp.core import session_tokens
from epp.core.decision.inputs import PoolReplaced, Reconfigured
from epp.core.decision.profile import SchedulingProfile, WeightedScorer
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.session_tokens import NO_TOKENS, SessionTokens
from epp.plugins.pickers import MaxScore
from epp.plugins.session_affinity import SessionAffinityScorer
from tests.builders import endpoint, request

OLD, NEW, OTHER = (bytes([number]) * 32 for number in (1, 2, 3))
PODS = [endpoint(number, name=f"default/vllm-{number}") for number in range(3)]


def old_form(name):
    return base64.b64encode(name.encode()).decode()


def test_a_token_is_of_the_endpoint_that_it_was_made_for():
    tokens = SessionTokens((NEW,))
    for number, pod in enumerate(PODS):
        assert tokens.holders(tokens.of(pod), PODS) == [at == number for at in range(3)]
    assert tokens.holders(tokens.of(endpoint(9)), PODS) == [False] * 3, "one that is gone"


def test_a_token_is_a_keyed_hash_and_nothing_else():
    """Its form is kept: what another release made must be read."""
    message = b"homing session token 1\0" + PODS[0].endpoint_id.encode()
    tag = hmac.new(NEW, message, hashlib.sha256).digest()[:16]
    expected = base64.urlsafe_b64encode(b"\x01" + tag).decode().rstrip("=")
    assert SessionTokens((NEW,)).of(PODS[0]) == expected
    assert len(expected) == 23


def test_another_replica_with_the_key_reads_it_and_one_without_does_not():
    token = SessionTokens((NEW,)).of(PODS[1])
    assert SessionTokens((NEW,)).holders(token, PODS) == [False, True, False]
    for stranger in (SessionTokens((OTHER,)), NO_TOKENS):
        assert stranger.holders(token, PODS) == [False] * 3


def test_keys_are_changed_without_losing_a_session():
    """First all replicas accept the new one, then they sign with it, then the old one goes."""
    before, both, after, at_last = (
        SessionTokens(keys) for keys in ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,))
    )
    assert both.of(PODS[0]) == before.of(PODS[0])
    assert after.of(PODS[0]) == at_last.of(PODS[0]) != before.of(PODS[0])
    for signer, reader in ((before, both), (both, before), (both, after), (after, both)):
        assert reader.holders(signer.of(PODS[0]), PODS) == [True, False, False]
    assert at_last.holders(before.of(PODS[0]), PODS) == [False] * 3


def test_without_a_key_no_token_is_made():
    assert NO_TOKENS.of(PODS[0]) == ""
    assert NO_TOKENS.holders("", PODS) == [False] * 3


@given(
    st.one_of(
        st.text(max_size=64),
        st.text(alphabet="ABCxyz019-_", min_size=23, max_size=23),
        st.sampled_from([old_form(pod.name) for pod in PODS]),
        st.sampled_from([pod.endpoint_id for pod in PODS]),
    )
)
def test_what_is_no_token_names_nobody(text):
    """Whatever a client makes up, the field's form included."""
    assert SessionTokens((NEW, OLD)).holders(text, PODS) == [False] * 3


def test_the_unsigned_form_is_read_where_it_is_accepted_and_never_made():
    """So that sessions survive the change; anybody can write it."""
    token = old_form("default/vllm-2")
    accepting = SessionTokens((NEW,), accept_unsigned=True)
    assert accepting.holders(token, PODS) == [False, False, True]
    assert accepting.of(PODS[2]) == SessionTokens((NEW,)).of(PODS[2])
    for nonsense in ("", "%%%", "é", "abc", "/////w==", old_form("gone"), old_form("")):
        assert accepting.holders(nonsense, [*PODS, endpoint(3, name="")]) == [False] * 4


def test_neither_key_nor_endpoint_is_shown():
    tokens = SessionTokens((NEW,))
    token = tokens.of(PODS[0])
    assert "vllm" not in base64.urlsafe_b64decode(token + "=").decode("latin-1")
    assert repr(tokens) == "<SessionTokens [1 keys]>"
    assert str(NEW)[2:-1] not in repr(request(session_tokens=tokens))


def test_each_endpoint_is_hashed_once_a_key(monkeypatch):
    """Whoever sends made-up tokens makes nobody hash again."""
    hashed = []
    real = session_tokens._token
    monkeypatch.setattr(
        session_tokens,
        "_token",
        lambda key, identity: hashed.append(identity) or real(key, identity),
    )
    tokens = SessionTokens((NEW, OLD))
    for number in range(50):
        tokens.holders(f"{number:023}", PODS)
        tokens.of(PODS[0])
    assert len(hashed) == 2 * len(PODS)
    tokens.holders("short", [endpoint(7)])
    assert len(hashed) == 2 * len(PODS), "nor hash at all, for what cannot be one"


def test_what_is_remembered_is_bounded(monkeypatch):
    """Pods come and go for as long as the process lives."""
    monkeypatch.setattr(session_tokens, "ENDPOINTS_MAX", 10)
    tokens = SessionTokens((NEW, OLD))
    for number in range(100):
        pod = endpoint(number)
        assert tokens.holders(tokens.of(pod), [pod]) == [True]
        assert len(tokens._token_of) <= 10
        assert len(tokens._identity_of) <= 20


def picker(*keys, accept_unsigned=False):
    profile = SchedulingProfile(
        name="default",
        filters=(),
        scorers=(WeightedScorer("session-affinity-scorer", SessionAffinityScorer(), 1.0),),
        picker_name="max-score-picker",
        picker=MaxScore(),
    )
    settings = SchedulerSettings(
        stages=Stages(decode=profile),
        session_tokens=SessionTokens(keys, accept_unsigned=accept_unsigned),
    )
    made = Scheduler(settings, seed=1)
    made.take(PoolReplaced(PODS), 0.0)
    return made


def chosen(made, headers):
    """Where ten requests of one session go."""
    return {made.schedule(request(headers=headers), 1.0).endpoint.name for _ in range(10)}


@pytest.mark.parametrize("first", range(3))
def test_a_session_returns_to_its_endpoint_through_any_replica_with_the_key(first):
    one, two, stranger = picker(NEW), picker(OLD, NEW), picker(OTHER)
    for _ in range(first):
        one.schedule(request(), 1.0)
    decision = one.schedule(request(), 1.0)
    headers = decision.response_headers("")
    assert headers == {"x-session-token": SessionTokens((NEW,)).of(decision.endpoint)}
    for replica in (one, two):
        assert chosen(replica, headers) == {decision.endpoint.name}
    assert chosen(stranger, headers) == {pod.name for pod in PODS}


def test_a_session_outlives_a_change_of_keys():
    """From the next request on its token is the new one."""
    made = picker(OLD)
    before = made.schedule(request(), 1.0)
    headers = before.response_headers("")
    settings = structs.replace(made.settings, session_tokens=SessionTokens((NEW, OLD)))
    made.take(Reconfigured(settings), 1.0)
    after = made.schedule(request(headers=headers), 1.0)
    assert after.endpoint == before.endpoint
    assert after.response_headers("") != headers
    assert chosen(made, after.response_headers("")) == {before.endpoint.name}


def test_a_client_can_neither_read_nor_make_a_token_of_a_pod():
    """It cannot steer to a pod whose name it knows."""
    forged = {"x-session-token": old_form("default/vllm-1")}
    assert chosen(picker(NEW), forged) == {pod.name for pod in PODS}
    assert chosen(picker(NEW, accept_unsigned=True), forged) == {"default/vllm-1"}
