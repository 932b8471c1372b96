"""How many pods a run has had."""

from sim.cluster.incidents import Drain, Join, Leave, Restart, play
from sim.cluster.loop import Loop
from sim.cluster.pod_count import PodCount, PodTotals
from tests.sim.made import arrivals, cluster, kind


def test_what_lasted_counts():
    """Changes at one instant are one change; hours are of all pods together."""
    loop = Loop()
    count = PodCount(loop)
    for pods in (1, 2, 3):
        count.change(pods)
    loop.at(3_600.0, count.change, 5)
    loop.at(7_200.0, count.change, 4)
    loop.at(10_800.0, lambda: None)
    loop.run()
    assert count.totals() == PodTotals(pods_min=3, pods_max=5, pods_mean=4.0, pod_hours=12.0)


def test_before_anything_has_passed_there_is_what_there_is():
    count = PodCount(Loop())
    count.change(2)
    assert count.totals() == PodTotals(pods_min=2, pods_max=2, pods_mean=2.0, pod_hours=0.0)


def test_a_pod_takes_its_card_from_its_start_to_its_end():
    """While it starts, drains and restarts too; not once it has left."""
    one = cluster(arrivals(200, rate=5.0), pods=2)
    script = [
        Join(at_s=5, kinds=(kind(),), startup_s=5),
        Restart(at_s=12, pods=(0,), startup_s=4),
        Drain(at_s=20, pods=(1,), grace_s=5),
        Leave(at_s=30, pods=(2,)),
    ]
    play(script, one)
    counted = []
    one.run(lambda: counted.append((one.loop.now, one.pods.count.pods)))

    def between(from_s, to_s):
        return {pods for at, pods in counted if from_s < at < to_s}

    assert between(0, 5) == {2}
    assert between(5, 20) == {3}
    assert between(25, 30) == {2}
    assert between(30, 40) == {1}
