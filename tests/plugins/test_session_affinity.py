import pytest
from msgspec import ValidationError, convert

from epp.core.session_tokens import SessionTokens
from epp.plugins import session_affinity
from tests.builders import affinity, candidates, endpoint, request


def scored(scorer, pool, **fields):
    return scorer.score(request(**fields), pool).tolist()


TOKENS = SessionTokens((b"key",))


def test_a_session_returns_to_the_endpoint_in_its_token():
    """The token that a response sets is the token that a request is pinned by."""
    scorer = session_affinity.SessionAffinityScorer()
    headers = scorer.response_headers(request(session_tokens=TOKENS), endpoint(1), "")
    assert headers == {"x-session-token": TOKENS.of(endpoint(1))}
    asked = {"headers": headers, "session_tokens": TOKENS}
    assert scored(scorer, candidates(3), **asked) == [0.0, 1.0, 0.0]
    assert scorer.producer is None


@pytest.mark.parametrize("token", ["", "%%%", "é", "abc", "cG9kLTE=", TOKENS.of(endpoint(7))])
def test_a_token_that_names_no_candidate_prefers_nobody(token):
    """Missing, malformed, unsigned, or of an endpoint that is gone."""
    headers = {"x-session-token": token} if token else {}
    asked = {"headers": headers, "session_tokens": TOKENS}
    assert scored(session_affinity.SessionAffinityScorer(), candidates(2), **asked) == [0.0, 0.0]


def test_where_there_is_no_key_no_token_is_given():
    """Nobody could read it."""
    assert (
        session_affinity.SessionAffinityScorer().response_headers(request(), endpoint(1), "") == {}
    )


def test_the_session_header_has_the_name_it_is_given():
    """Header names are compared in lower case."""
    scorer = convert({"headerName": "X-Pin"}, session_affinity.SessionAffinityScorer)
    headers = scorer.response_headers(request(session_tokens=TOKENS), endpoint(0), "")
    assert list(headers) == ["x-pin"]
    asked = {"headers": headers, "session_tokens": TOKENS}
    assert scored(scorer, candidates(2), **asked) == [1.0, 0.0]


def test_a_session_id_is_looked_up_in_its_index():
    """Nothing is written to the response: the client already has its id."""
    scorer = convert({"strategy": "session_id"}, session_affinity.SessionAffinityScorer)
    pool = candidates(3, affinities={"session-id-producer": affinity([0, 1, 0])})
    assert scored(scorer, pool) == [0.0, 1.0, 0.0]
    assert scored(scorer, candidates(2)) == [0.0, 0.0]
    assert scorer.producer == "session-id-producer"
    assert scorer.response_headers(request(), endpoint(), "") == {}


FILTER = session_affinity.SessionAffinityFilter
BOTH = pytest.mark.parametrize("kind", [session_affinity.SessionAffinityScorer, FILTER])


def test_the_filter_keeps_the_endpoint_of_the_session_alone():
    """As long as it is a candidate; else nobody goes."""
    headers = {"x-session-token": TOKENS.of(endpoint(1))}
    asked = request(headers=headers, session_tokens=TOKENS)
    assert FILTER().keep(asked, candidates(3)).tolist() == [False, True, False]
    assert FILTER().keep(asked, candidates(1)).tolist() == [True]
    assert FILTER().keep(request(), candidates(2)).tolist() == [True, True]


def test_the_filter_goes_by_session_ids_too():
    """By the index."""
    told = convert({"strategy": "session_id"}, FILTER)
    pool = candidates(3, affinities={"session-id-producer": affinity([0, 0, 1])})
    assert told.keep(request(), pool).tolist() == [False, False, True]
    assert told.keep(request(), candidates(2)).tolist() == [True, True]


@BOTH
def test_the_field_spells_the_header_of_the_token_otherwise(kind):
    """Trimmed, in lower case; empty is the default."""
    told = convert({"encodedEndpointHeaderConfig": {"header": " X-Pin "}}, kind)
    assert list(told.response_headers(request(session_tokens=TOKENS), endpoint(), "")) == ["x-pin"]
    assert convert({"encodedEndpointHeaderConfig": {"header": " "}}, kind).token_header == (
        "x-session-token"
    )


@BOTH
def test_what_it_says_of_sessions_is_for_the_index(kind):
    """Only what is given."""
    config = {
        "sources": [
            {"header": "x-a"},
            {"attribute": "SessionIDDataKey", "producer": "session-id-producer"},
        ],
        "evictionTtlSeconds": 60,
        "evictionSweepSeconds": 5,
    }
    told = convert({"strategy": "session_id", "sessionIdConfig": config}, kind)
    assert told.producer_parameters == {"sources": config["sources"], "ttl": "60.000000s"}
    assert kind().producer_parameters == {}


@BOTH
def test_what_has_no_effect_is_told(kind):
    """No profile changes a session's endpoint, and a session that is too old needs no sweep."""
    given = {"profileName": "prefill", "sessionIdConfig": {"evictionSweepSeconds": 5}}
    assert convert(given, kind).warnings() == [
        "profileName has no effect, because it cannot change the endpoint of a session",
        "evictionSweepSeconds has no effect, because an expired session is never found",
    ]
    assert kind().warnings() == []


@BOTH
@pytest.mark.parametrize(
    "parameters",
    [
        {"strategy": "cookie"},
        {"headerName": "x-a", "encodedEndpointHeaderConfig": {"header": "x-b"}},
        {"sessionIdConfig": {"sources": [{}]}},
        {"sessionIdConfig": {"sources": [{"header": "x", "attribute": "SessionIDDataKey"}]}},
        {"sessionIdConfig": {"sources": [{"attribute": "agent-identity"}]}},
        {"sessionIdConfig": {"sources": [{"header": "x"}] * 17}},
        {"sessionIdConfig": {"evictionTtlSeconds": -1}},
        {"sessionIdConfig": {"evictionSweepSeconds": -1}},
    ],
)
def test_what_cannot_be_is_refused(kind, parameters):
    """Before it serves."""
    with pytest.raises(ValidationError):
        convert(parameters, kind)
