"""The server of `epp serve` and the simulator decide alike.

The simulator routes a trace by hashes; everything that its picker is told is then told, at the same
moments of an injected clock, to the server on loopback gRPC, which parses and hashes real bodies.
"""

import contextlib

import grpc
import numpy as np
import pytest

from epp.app.wiring import EndpointPicker
from epp.core.decision.inputs import PageScraped, PoolReplaced, Tick
from epp.core.protocol.session import Session
from epp.flags.command_lines import parse_serve
from epp.shell.gateway.ext_proc import PROCESS, ExtProc
from sim.cluster.policies import SchedulerPolicy, policy_source
from sim.traces.prompts import body_of
from tests import gateway as gw
from tests.sim.made import arrivals, cluster
from tests.transports import carried, transport_of

SEED = 7

WEIGHTED_RANDOM = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: token-load-scorer
- type: running-requests-size-scorer
- type: weighted-random-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
    weight: 2
  - pluginRef: token-load-scorer
  - pluginRef: running-requests-size-scorer
  - pluginRef: weighted-random-picker
"""


class Recorded(SchedulerPolicy):
    """The simulator's picker, with a log of what it was told and what it decided."""

    def __init__(self, settings, *, seed, log):
        super().__init__(settings, seed=seed)
        self.log = log

    def replace(self, endpoints, now):
        self.log.append(("replace", now, endpoints))
        super().replace(endpoints, now)

    def observe(self, endpoint, metrics, now):
        self.log.append(("observe", now, endpoint, metrics))
        super().observe(endpoint, metrics, now)

    def route(self, request, now):
        routed = super().route(request, now)
        self.log.append(("route", now, int(request.request_id), routed.decision))
        return routed

    def complete(self, route, outcome, now):
        self.log.append(("complete", now, route.decision.number))
        super().complete(route, outcome, now)

    def tick(self, now):
        self.log.append(("tick", now))
        super().tick(now)


class Clock:
    """Tells the time that it was set to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Server:
    """The server object of `epp serve` on a free port, its clock in our hands."""

    def __init__(self, folder, config):
        endpoints = folder / "endpoints.yaml"
        endpoints.write_text("endpoints: []\n")
        file = folder / "config.yaml"
        file.write_text(config)
        flags = ["--endpoints-file", str(endpoints), "--config-file", str(file)]
        self.picker = EndpointPicker(parse_serve([*flags, "--seed", str(SEED)], {}))
        self.scheduler = self.picker.scheduler
        self.clock = Clock()
        self.told = gw.Told()
        self.ext_proc = ExtProc(self._session, self.picker.observation, clock=self.clock)
        self.calls = {}

    def _session(self, gateway):
        settings = self.picker.sessions.settings
        return Session(self.scheduler, settings, gateway, self.told, lambda: "no-id")

    @contextlib.asynccontextmanager
    async def serving(self):
        """Inside, `process` is a stub of the service."""
        transport = transport_of("ngh2", self.ext_proc.methods, bytes_max=64 * 1024 * 1024)
        async with (
            carried(transport) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            self.process = channel.stream_stream(PROCESS)
            yield

    async def route(self, body):
        """Send a request; the decision of the server. Its stream stays open."""
        call = self.process()
        await call.write(gw.request_headers(gw.COMPLETIONS, modes=gw.protocol(response=gw.NONE)))
        await call.write(gw.request_body(body))
        await call.read()
        decision = self.told.exchange.decision
        self.calls[decision.number] = call
        return decision

    async def complete(self, number):
        """The response of a request has come and gone."""
        call = self.calls.pop(number)
        await call.write(gw.response_headers(200))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass


async def decisions_of_both(folder, config, requests):
    """Yields what the simulator decided and what the server decided, a pair a request."""
    given = list(arrivals(requests, rate=60.0, groups=24))
    log, server = [], Server(folder, config)
    settings = server.scheduler.settings
    cluster(given, seed=SEED, open_policy=lambda seed: Recorded(settings, seed=seed, log=log)).run()

    async with server.serving():
        for verb, now, *told in log:
            server.clock.now = now
            if verb == "route":
                index, expected = told
                yield expected, await server.route(body_of(given[index]))
            elif verb == "complete":
                await server.complete(*told)
            elif verb == "observe":
                endpoint, metrics = told
                slot = server.scheduler.pool.slot_of(endpoint)
                server.scheduler.take(PageScraped(slot, metrics), now)
            else:
                happened = PoolReplaced(*told) if verb == "replace" else Tick()
                server.scheduler.take(happened, now)
    assert server.scheduler.ledger.open_leases == 0


@pytest.mark.parametrize(
    ("config", "requests"),
    [
        pytest.param(policy_source("default").text, 1_200, id="default"),
        pytest.param(WEIGHTED_RANDOM, 300, id="weighted random"),
    ],
)
async def test_server_and_simulator_decide_alike(tmp_path, config, requests):
    """Equal picks, equal matched blocks, scores equal to 1e-12, over all requests."""
    decided = matched = 0
    async for expected, decision in decisions_of_both(tmp_path, config, requests):
        assert decision.number == expected.number
        assert decision.endpoint == expected.endpoint
        assert decision.leg.matched_blocks == expected.leg.matched_blocks
        assert decision.leg.total_blocks == expected.leg.total_blocks
        assert decision.leg.scorers == expected.leg.scorers
        parts, parts_expected = decision.leg.scored.parts, expected.leg.scored.parts
        np.testing.assert_allclose(parts, parts_expected, rtol=0, atol=1e-12)
        decided += 1
        matched += decision.leg.matched_blocks
    assert decided == requests
    assert matched > requests
