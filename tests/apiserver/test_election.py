"""Two replicas with leader election by a real Lease."""

from contextlib import AsyncExitStack

from tests.apiserver.cluster import Release, running_engines, running_picker
from tests.chart.rendering import ROOT
from tests.envoy.rig import until

VALUES = ROOT / "tests/chart/values"
LEASE_S = 15


async def test_a_follower_takes_over_from_a_leader_that_dies_and_from_one_that_leaves(
    helm, namespace, tmp_path
):
    """All are ready, one leads; killed, the Lease must run out first; asked to leave, at once."""
    release = Release(helm, namespace, VALUES / "leader-election.yaml", tmp_path)

    def lease():
        return namespace.get("leases", "inference-homing")["spec"]

    def holder():
        return lease().get("holderIdentity")

    async with running_engines("a") as (a,), AsyncExitStack() as opened:
        namespace.create_pool(a.port)
        namespace.run_pod(a)

        async def replica(name):
            return await opened.enter_async_context(
                running_picker(release, tmp_path / name, pod_name=name)
            )

        first = await replica("picker-1")
        await until(lambda: leads(first), "the first to lead")
        assert holder() == "picker-1"
        second = await replica("picker-2")
        await second.knows(a)
        assert not await leads(second)
        assert await second.pick() == a.address, "who stands by answers who asks"

        await first.process.kill()
        await until(lambda: leads(second), "the follower to take over", LEASE_S + 10)
        assert holder() == "picker-2"
        assert await second.pick() == a.address

        third = await replica("picker-3")
        await third.knows(a)
        assert not await leads(third)
        second.process.terminate()
        await until(lambda: leads(third), "the new follower to take over")
        assert holder() == "picker-3"
        assert await second.process.exit_code() == 0
        assert release.refused() == set()
        # The release brings the Lease, held by nobody.
        assert lease()["leaseTransitions"] == 3


async def test_a_leader_that_cannot_renew_steps_down_before_its_lease_ends(
    helm, namespace, tmp_path
):
    """The API server falls silent on open connections; when it answers again, we lead again."""
    release = Release(helm, namespace, VALUES / "leader-election.yaml", tmp_path)
    namespace.create_pool(8000)
    async with running_picker(release, tmp_path / "picker") as picker:
        await until(lambda: leads(picker), "it to lead")
        with namespace.api.silent():
            await until(lambda: _not(leads(picker)), "it to step down", LEASE_S)
            assert await picker.process.is_ready()
        await until(lambda: leads(picker), "it to lead again")
    assert release.refused() == set()


async def _not(found):
    return not await found


async def leads(picker):
    return await picker.metric("leader") == 1
