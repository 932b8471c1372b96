"""Two replicas with leader election by a real Lease."""

from contextlib import AsyncExitStack

from tests.apiserver.cluster import POOL, Release, running_engines, running_picker
from tests.chart.rendering import ROOT
from tests.envoy.rig import until

VALUES = ROOT / "tests/chart/values"
LEASE_S = 15


async def test_a_follower_takes_over_from_a_leader_that_dies_and_from_one_that_leaves(
    helm, namespace, tmp_path
):
    """One is ready at a time; killed, the Lease must run out first; asked to leave, at once."""
    release = Release(helm, namespace, VALUES / "leader-election.yaml", tmp_path)

    def holder():
        return namespace.get("leases", f"homing-{POOL}")["spec"].get("holderIdentity")

    async with running_engines("a") as (a,), AsyncExitStack() as opened:
        namespace.create_pool(a.port)
        namespace.run_pod(a)

        async def replica(name, *, ready):
            return await opened.enter_async_context(
                running_picker(release, tmp_path / name, pod_name=name, ready=ready)
            )

        first = await replica("picker-1", ready=True)
        assert holder() == "picker-1"
        second = await replica("picker-2", ready=False)
        await until(lambda: knows(second, a), "the follower to know the endpoints")
        assert not await second.process.is_ready()
        assert await second.metric("leader") == 0

        await first.process.kill()
        await until(second.process.is_ready, "the follower to take over", LEASE_S + 10)
        assert holder() == "picker-2"
        assert await second.pick() == a.address

        third = await replica("picker-3", ready=False)
        await until(lambda: knows(third, a), "the new follower to know the endpoints")
        second.process.terminate()
        await until(third.process.is_ready, "the new follower to take over")
        assert holder() == "picker-3"
        assert await second.process.exit_code() == 0
        assert release.refused() == set()
        assert namespace.get("leases", f"homing-{POOL}")["spec"]["leaseTransitions"] == 2


async def test_a_leader_that_cannot_renew_steps_down_before_its_lease_ends(
    helm, namespace, tmp_path
):
    """The API server falls silent on open connections; when it answers again, we lead again."""
    release = Release(helm, namespace, VALUES / "leader-election.yaml", tmp_path)
    namespace.create_pool(8000)
    async with running_picker(release, tmp_path / "picker") as picker:
        assert await picker.metric("leader") == 1
        with namespace.api.silent():
            await until(lambda: _not(picker.process.is_ready()), "it to step down", LEASE_S)
            assert await picker.metric("leader") == 0
        await until(picker.process.is_ready, "it to lead again")
    assert release.refused() == set()


async def _not(found):
    return not await found


async def knows(picker, *engines):
    if "serving" not in picker.log_text():
        return False
    return await picker.addresses() == {engine.address for engine in engines}
