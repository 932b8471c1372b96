"""Ports of pods on which nothing listens, with real servers of metrics pages, and missing labels of
places.
"""

import json
import time

import pytest

from epp.core.knowledge.pool import Standing
from epp.shell.files import endpoints_file
from tests import gateway as gw
from tests.app.test_wiring import pod_pages, serving, write_endpoints
from tests.envoy.rig import free_ports, until

ROLE = "llm-d.ai/role"
PREFILL_HEADER = "x-prefiller-host-port"
CHAT = {":path": "/v1/chat/completions"}
STAGED = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters: {deciders: {prefill: always-disagg-pd-decider}}
- type: always-disagg-pd-decider
- type: decode-filter
- type: prefill-filter
schedulingProfiles:
- name: decode
  plugins: [{pluginRef: decode-filter}]
- name: prefill
  plugins: [{pluginRef: prefill-filter}]
"""
FLAGS = ("--refresh-metrics-interval=20ms", "--metrics-staleness-threshold=500ms")


def body(number):
    message = {"role": "user", "content": f"question {number}"}
    return json.dumps({"model": "my-model", "messages": [message]}).encode()


async def pairs(running, count=40):
    """Return the decode and the prefill address of each of `count` chats."""
    found = set()
    for number in range(count):
        head = gw.request_headers(gw.COMPLETIONS | CHAT)
        answers = await running.answers(head, gw.request_body(body(number)), answers=2)
        found.add((gw.destination(answers[0]), gw.set_headers(answers[0])[PREFILL_HEADER]))
    return found


async def test_a_port_that_only_decode_pods_have_is_never_chosen_for_prefill(tmp_path, monkeypatch):
    """Both pods have the same two target ports; nothing listens on the second one of prefill.

    Its time to be ready passes, and the only other prefill port stops answering: still nothing goes
    there.
    """
    monkeypatch.setattr(endpoints_file, "READY_AFTER_S", 0.05)
    (closed,) = free_ports(1)
    async with pod_pages(["decode", "decode", "prefill"]) as pods:
        first, second, prefill = pods
        entries = [one.entry | {"labels": {ROLE: one.name}} for one in pods]
        entries.append(entries[2] | {"port": closed})
        async with serving(tmp_path, entries, *FLAGS, config=STAGED) as running:
            pool = running.scheduler.pool

            def standing():
                found = running.scheduler.standings(time.monotonic())
                return {pool.endpoint_in(slot).port: one for slot, one in found.items()}

            def are(*listening):
                ready = {port for port, one in standing().items() if one is Standing.READY}
                return ready == {one.port for one in listening}

            await until(lambda: are(*pods), "the ports that listen to be ready")
            await until(
                lambda: standing()[closed] is Standing.UNREACHABLE, "the closed port to be known"
            )
            expected = {(at.address, prefill.address) for at in (first, second)}
            assert await pairs(running) == expected
            await prefill.stop()
            await until(lambda: are(first, second), "the prefill pod to be unreachable")
            assert await pairs(running) == expected


TOPOLOGY = STAGED.replace(
    "- type: prefill-filter\n", "- type: prefill-filter\n- type: topology-affinity-scorer\n"
).replace(
    "{pluginRef: prefill-filter}",
    "{pluginRef: prefill-filter}, {pluginRef: topology-affinity-scorer}",
)
ZONE = "topology.kubernetes.io/zone"


@pytest.mark.parametrize(
    ("config", "labels", "warned"),
    [(TOPOLOGY, {}, 1), (TOPOLOGY, {ZONE: "a"}, 0), (STAGED, {}, 0)],
    ids=["no labels", "labels", "no topology"],
)
async def test_topology_without_labels_of_places_warns_once(config, labels, warned, tmp_path):
    entries = [
        {"name": role, "address": "10.0.0.1", "port": port, "labels": {ROLE: role} | labels}
        for role, port in (("decode", 8000), ("prefill", 8001))
    ]
    async with serving(tmp_path, entries, config=config) as running:
        write_endpoints(tmp_path, entries[:1])
        await until(lambda: len(running.scheduler.pool) == 1, "the new list of endpoints")
        lines = [one for one in running.lines if "--node-labels" in one["event"]]
    assert len(lines) == warned
