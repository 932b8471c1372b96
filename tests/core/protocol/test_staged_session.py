"""The headers of a request that several endpoints serve, and what its response ends."""

import pytest
from msgspec import structs

from epp.core.decision.account import Route
from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.stages import Always, Multimodal, Never, Stages
from epp.core.protocol.session import SessionSettings
from epp.core.types import EndpointMetrics
from epp.plugins.scorers import Queue
from tests import gateway as gw
from tests.builders import endpoint
from tests.core.decision.staged import BOTH, ENCODE, of_role, pool_of, profile, scrape

PREFILL = "x-prefiller-host-port"
ENCODE_HEADER = "x-encoder-hosts-ports"
FORGED = {
    PREFILL: "10.6.6.6:1",
    ENCODE_HEADER: "10.6.6.6:1",
    "x-kv-cache-source-host-port": "10.6.6.6:1",
    "x-data-parallel-host-port": "10.6.6.6:1",
}
ALL = structs.replace(BOTH, encode=ENCODE, encode_if=Always())
CHAT = {":method": "POST", ":path": "/v1/chat/completions", "x-request-id": "r"}


def chat_body():
    return b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 2_000 + b'"}]}'


def stream_of(pool, **fields):
    return gw.Stream(pool, **fields)


def answered(pool, fields, body=None, **settings):
    stream = stream_of(pool, **settings)
    message = gw.request_body(chat_body() if body is None else body)
    return stream, stream.send(gw.request_headers(fields), message)


def test_the_prefill_endpoint_is_named_and_the_clients_copies_are_gone():
    stream, answers = answered(pool_of(["prefill", "decode"]), CHAT | FORGED)
    found = gw.set_headers(answers[0])
    assert gw.destination(answers[0]) == "192.168.1.2:8000"
    assert found[PREFILL] == "192.168.1.1:8000"
    assert ENCODE_HEADER not in found
    removed = gw.removed_headers(answers[0])
    assert removed == FORGED.keys() - {PREFILL}
    assert not removed & found.keys()
    stream.close()


@pytest.mark.parametrize(
    ("stages", "roles", "route"),
    [
        (structs.replace(BOTH, prefill_if=Never()), ["prefill", "decode"], Route.DECODE_ONLY),
        (BOTH, ["prefill", "decode"], Route.PREFILL_DECODE),
        (structs.replace(ALL, prefill=None), ["encode", "decode"], Route.ENCODE_DECODE),
        (ALL, ["encode", "prefill", "decode"], Route.ENCODE_PREFILL_DECODE),
        (structs.replace(BOTH, fallback=BOTH.decode), ["decode"], Route.AGGREGATED_FALLBACK),
    ],
)
def test_no_copy_of_the_client_is_left_on_any_route(stages, roles, route):
    """Each header is set or removed, and none is both."""
    stream, answers = answered(pool_of(roles, stages), CHAT | FORGED)
    found, removed = gw.set_headers(answers[0]), gw.removed_headers(answers[0])
    stages_named = {PREFILL: "prefill" in route, ENCODE_HEADER: "encode" in route}
    assert {name: name in found for name in stages_named} == stages_named
    assert found.keys() & FORGED.keys() == FORGED.keys() - removed
    assert not removed & found.keys()
    assert "10.6.6.6:1" not in found.values()
    stream.close()


def test_an_ipv6_address_is_in_brackets():
    made = pool_of([])
    members = [
        of_role(0, "prefill", address="[fd00::7]:8000"),
        of_role(1, "decode", address="[fd00::8]:8000"),
    ]
    made.take(PoolReplaced(members), 0.0)
    scrape(made, 0.0)
    _, answers = answered(made, CHAT)
    assert gw.set_headers(answers[0])[PREFILL] == "[fd00::7]:8000"


def test_all_encode_endpoints_that_the_picker_chose_are_named():
    picker = structs.replace(ENCODE.picker, max_num_of_endpoints=2)
    several = structs.replace(ALL, encode=structs.replace(ENCODE, picker=picker))
    made = pool_of(["prefill", "decode", "encode", "encode"], several)
    stream, answers = answered(made, CHAT | FORGED)
    found = gw.set_headers(answers[0])
    assert sorted(found[ENCODE_HEADER].split(",")) == ["192.168.1.3:8000", "192.168.1.4:8000"]
    assert gw.removed_headers(answers[0]) == FORGED.keys() - {PREFILL, ENCODE_HEADER}
    assert made.pool.columns.inflight_requests[:4].tolist() == [1, 1, 1, 1]
    stream.send(gw.response_headers(200))
    assert made.pool.columns.inflight_requests[:4].tolist() == [0, 1, 0, 0]
    stream.close()
    assert made.pool.columns.inflight_requests[:4].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("roles", [["prefill-decode"], ["decode"]])
def test_a_request_with_one_leg_has_no_header_and_keeps_none_of_the_client(roles):
    stages = structs.replace(BOTH, encode=ENCODE, encode_if=Multimodal())
    if roles == ["decode"]:
        stages = structs.replace(stages, fallback=stages.decode)
    _, answers = answered(pool_of(roles, stages), CHAT | FORGED)
    assert not {PREFILL, ENCODE_HEADER} & gw.set_headers(answers[0]).keys()
    assert gw.removed_headers(answers[0]) == set(FORGED)


def test_other_paths_and_requests_without_a_body_stay_at_the_decode_endpoint():
    for fields, body in (
        (CHAT | {":path": "/v1/embeddings"}, b'{"model":"m","input":"x"}'),
        (CHAT | {":path": "/v1/models", ":method": "GET"}, None),
    ):
        made = pool_of(["prefill", "decode"])
        stream = stream_of(made)
        head = gw.request_headers(fields | FORGED, end=body is None)
        answers = stream.send(head) if body is None else stream.send(head, gw.request_body(body))
        assert gw.destination(answers[0]) == "192.168.1.2:8000"
        assert gw.removed_headers(answers[0]) == set(FORGED)
        assert made.pool.columns.inflight_requests[0] == 0


def test_a_stage_without_an_endpoint_is_refused_with_its_reason():
    _, answers = answered(pool_of(["decode"]), CHAT | FORGED)
    status, error = gw.refusal(answers[0])
    assert (status, error["code"]) == (503, "rejected-no-prefill-endpoints")


@pytest.mark.parametrize(("status", "open_requests"), [(200, 0), (502, 1)])
def test_good_response_headers_end_the_prefill_leg(status, open_requests):
    made = pool_of(["prefill", "decode"])
    stream, _ = answered(made, CHAT)
    stream.send(gw.response_headers(status, server="uvicorn"))
    assert made.pool.columns.inflight_requests[0] == open_requests
    stream.close()
    assert made.pool.columns.inflight_requests[:2].tolist() == [0, 0]


def test_clients_are_told_both_endpoints_where_that_is_wanted():
    made = pool_of(["prefill", "decode"])
    stream, _ = answered(made, CHAT, settings=SessionSettings(explain_headers=True))
    (answer,) = stream.send(gw.response_headers(200))
    assert "prefill at pod-0" in gw.set_headers(answer)["x-homing-reason"]


RANK_ADDRESS = "x-data-parallel-host-port"


def ranks(**settings):
    """Return a scheduler of one pod with two ranks, of which the second has the shorter queue."""
    made = pool_of([], Stages(decode=profile("decode", scorers=[Queue()])), **settings)
    members = [
        endpoint(at, endpoint_id=f"pod:{8000 + at}", address=f"10.0.0.1:{8000 + at}")
        for at in range(2)
    ]
    made.take(PoolReplaced(members), 0.0)
    for slot, waiting in enumerate((9.0, 0.0)):
        made.take(PageScraped(slot, EndpointMetrics(waiting_requests=waiting)), 0.0)
    return made


def test_the_sidecar_is_told_the_rank_and_the_gateway_the_port_of_the_pod():
    made = ranks(primary_port=7000, fallback_endpoints_max=1)
    _, answers = answered(made, CHAT | FORGED)
    assert gw.destination(answers[0]) == "10.0.0.1:7000"
    assert gw.set_headers(answers[0])[RANK_ADDRESS] == "10.0.0.1:8001"
    assert gw.removed_headers(answers[0]) == FORGED.keys() - {RANK_ADDRESS}


def test_the_request_stays_counted_at_its_rank_whatever_port_served_it():
    """The gateway reports the port that it knows, here that of the other rank."""
    made = ranks(primary_port=8000)
    stream, _ = answered(made, CHAT)
    stream.send(gw.response_headers(200, by="10.0.0.1:8000"))
    assert made.pool.columns.inflight_requests[:2].tolist() == [0, 1]
    stream.close()
    assert made.pool.columns.inflight_requests[:2].tolist() == [0, 0]


def test_without_a_primary_port_the_gateway_addresses_the_rank():
    _, answers = answered(ranks(), CHAT | FORGED)
    assert gw.destination(answers[0]) == "10.0.0.1:8001"
    assert RANK_ADDRESS not in gw.set_headers(answers[0])
    assert gw.removed_headers(answers[0]) == set(FORGED)


def test_a_prompt_that_is_not_cached_is_answered_with_412():
    _, answers = answered(pool_of(["prefill", "decode"]), CHAT | {"prefer": "if-available"})
    status, error = gw.refusal(answers[0])
    assert (status, error["code"]) == (412, "rejected-not-cached")
