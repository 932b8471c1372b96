"""What the generated bootstrap does by itself: no picker is running in any of these."""

from collections import Counter

import pytest
from aiohttp import ClientSession

from epp.shell.gateway.bootstrap import DESTINATION_HEADER, BootstrapOptions
from tests.envoy.rig import http_client, http_filters, refusing_port, running_envoy
from tests.envoy.upstream import running_pods

pytestmark = pytest.mark.envoy


def keep_client_headers(document):
    filters = http_filters(document)
    filters[:] = [f for f in filters if f["name"] != "envoy.filters.http.header_mutation"]


async def ask(session, method, headers):
    data = b"{}" if method == "POST" else None
    url = "/v1/models"
    async with session.request(method, url, data=data, headers=headers) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_client_cannot_use_envoy_as_a_proxy_while_the_picker_is_down(fail_open, tmp_path):
    """The destination that a client names is never reached, failing open or closed."""
    async with refusing_port() as picker, running_pods(1) as (victim,):
        options = BootstrapOptions(
            picker_address=f"127.0.0.1:{picker}", plaintext=True, fail_open=fail_open
        )
        async with running_envoy(options, tmp_path) as envoy, http_client(envoy) as session:
            headers = {DESTINATION_HEADER: victim.address}
            posted = {500, 503} if fail_open else {500}
            assert await ask(session, "POST", headers) in posted
            assert await ask(session, "GET", headers) == (503 if fail_open else 500)
        assert victim.received == []


async def test_without_the_header_filter_a_client_could(tmp_path):
    """The danger is real: the same request reaches the victim once the filter is taken out."""
    async with refusing_port() as picker, running_pods(1) as (victim,):
        options = BootstrapOptions(
            picker_address=f"127.0.0.1:{picker}", plaintext=True, fail_open=True
        )
        async with (
            running_envoy(options, tmp_path, keep_client_headers) as envoy,
            http_client(envoy) as session,
        ):
            assert await ask(session, "GET", {DESTINATION_HEADER: victim.address}) == 200
        assert len(victim.received) == 1


async def test_round_robin_serves_the_pods_in_turn(tmp_path):
    """The comparison arm spreads requests evenly and needs no picker."""
    async with running_pods(4) as pods:
        options = BootstrapOptions(round_robin=tuple(pod.address for pod in pods))
        async with running_envoy(options, tmp_path) as envoy, http_client(envoy) as session:
            for _ in range(12):
                assert await ask(session, "POST", {}) == 200
        assert Counter(len(pod.received) for pod in pods) == {3: 4}


async def test_the_readiness_listener_shows_readiness_and_metrics_and_nothing_else(tmp_path):
    """Probes and Prometheus get in; the rest of the admin interface does not exist there."""
    options = BootstrapOptions(round_robin=("127.0.0.1:9",))
    async with running_envoy(options, tmp_path) as envoy, http_client(envoy) as session:
        seen = {}
        async with ClientSession() as admin:
            await admin.post(f"{envoy.admin_url}/healthcheck/fail")
        for path in (
            *("/ready", "/alive", "/stats/prometheus"),
            *("/stats", "/config_dump", "/quitquitquit"),
        ):
            async with session.get(envoy.readiness_url + path) as response:
                seen[path] = response.status
    assert seen == {
        # It is drained, and lives.
        "/ready": 503,
        "/alive": 200,
        "/stats/prometheus": 200,
        "/stats": 404,
        "/config_dump": 404,
        "/quitquitquit": 404,
    }
