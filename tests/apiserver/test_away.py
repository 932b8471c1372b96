"""The API server dies and comes back: requests never notice, endpoints never go wrong."""

import asyncio

from tests import gateway as gw
from tests.apiserver.cluster import Release, running_engines, running_picker
from tests.chart.rendering import ROOT
from tests.envoy.rig import until

VALUES = ROOT / "tests/chart/values"
AWAY_S = 30
REQUESTS_PER_S = 20
BACKOFF_S_MAX = 30.0


class Load:
    """Requests at a steady rate, all different, so that every endpoint gets some."""

    def __init__(self, picker):
        self._picker = picker
        self.destinations = []
        """Where each of them went."""

    async def run(self):
        while True:
            prompt = gw.prompt(f"{len(self.destinations)} questions")
            self.destinations.append(await self._picker.pick(prompt))
            await asyncio.sleep(1 / REQUESTS_PER_S)


async def test_nothing_is_lost_while_the_api_server_is_away(helm, namespace, tmp_path):
    """What is known serves on; what changed is known soon after; nothing else comes or goes."""
    api = namespace.api
    release = Release(helm, namespace, VALUES / "existing-pool.yaml", tmp_path)
    async with running_engines("a", "b", "c") as (a, b, c):
        namespace.create_pool(a.port)
        namespace.run_pod(a)
        namespace.run_pod(b)
        async with running_picker(release, tmp_path / "picker") as picker:
            await picker.knows(a, b)
            load = Load(picker)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(load.run())
                api.kill()
                seen = set()
                async with asyncio.timeout(AWAY_S + 10):
                    for _ in range(AWAY_S):
                        await asyncio.sleep(1)
                        seen.add(frozenset(await picker.addresses()))
                        assert await picker.process.is_ready()
                assert seen == {frozenset({a.address, b.address})}
                assert await picker.metric("kube_errors_total", resource="pods", kind="unreachable")

                api.start()
                await until(lambda: asyncio.to_thread(api.ready), "the API server", 60)
                namespace.delete("pods", "b", grace_s=0)
                namespace.run_pod(c)
                gone_after = len(load.destinations)
                await picker.knows(a, c, timeout_s=BACKOFF_S_MAX + 10)
                answered = len(load.destinations)
                await until(lambda: len(load.destinations) > answered + 20, "more requests")
                running.cancel()
            assert set(load.destinations[:gone_after]) == {a.address, b.address}
            assert set(load.destinations[answered + 1 :]) == {a.address, c.address}
            assert len(load.destinations) > AWAY_S * REQUESTS_PER_S / 4

            # The watch goes on.
            namespace.tell_pod(a, ready=False)
            await picker.knows(c)
            assert await picker.metric("kube_repairs_total", resource="pods") == 0
