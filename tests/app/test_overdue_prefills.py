"""A prefill that neither answers nor fails, seen by a picker that serves."""

from aiohttp import ClientSession

from tests import gateway as gw
from tests.app.test_ports import CHAT, PREFILL_HEADER, ROLE, STAGED, body
from tests.app.test_wiring import ready_at_once, serving
from tests.envoy.rig import until
from tests.streams import Call

DEADLINE = STAGED.replace(
    "{deciders: {prefill: always-disagg-pd-decider}}",
    "{deciders: {prefill: always-disagg-pd-decider}, prefillDeadline: 200ms}",
)
ENDPOINTS = [
    {"name": name, "address": f"10.0.0.{at}", "port": 8000, "metrics": None, "labels": {ROLE: role}}
    for at, (name, role) in enumerate((("p", "prefill"), ("d", "decode")), 1)
]


def head(request_id):
    return gw.request_headers(gw.COMPLETIONS | CHAT | {"x-request-id": request_id})


async def explained(running, request_id):
    """Return the text of `epp explain` for a request."""
    url = f"http://127.0.0.1:{running.picker.flags.metrics_port}/debug/explain"
    async with ClientSession() as http, http.get(url, params={"request_id": request_id}) as answer:
        assert answer.status == 200
        return await answer.text()


async def test_a_prefill_without_an_answer_is_counted_and_its_pair_is_named(tmp_path):
    """A later request of the same pair names it too. The request goes on."""
    async with serving(tmp_path, ENDPOINTS, config=DEADLINE) as running:
        ready_at_once(running)
        hanging = Call(running.channel)
        answers = await hanging.exchange(head("hanging"), gw.request_body(body(1)), answers=2)
        assert gw.destination(answers[0]) == "10.0.0.2:8000"
        assert gw.set_headers(answers[0])[PREFILL_HEADER] == "10.0.0.1:8000"
        told = "prefills at p for d neither ended nor failed within 0.2 s"
        await until(lambda: running.metric("prefills_overdue_total") == 1, "the deadline to pass")
        await running.answers(head("later"), gw.request_body(body(2)), answers=2)
        for request_id in ("hanging", "later"):
            assert told in await explained(running, request_id)
        assert running.scheduler.pool.set_aside_count() == 0
        await hanging.exchange(gw.response_headers(end=True), answers=1)
        await hanging.grpc.done_writing()
        await until(lambda: not running.scheduler.ledger.open_leases, "the end of the request")
