"""Pickers that tell each other, through production's exchange in simulated time."""

import subprocess
import sys
from pathlib import Path

import pytest

from epp.core.peers.exchange import HEARTBEAT_S, SILENT_S_MAX
from epp.plugins.strategy import config_of, step
from sim.cluster.assignment import Assignment
from sim.cluster.check import checker
from sim.cluster.cluster import Cluster
from sim.cluster.faults import draw_faults
from sim.cluster.peering import Partition, PeerSettings, SlowPeer
from sim.cluster.policies import PolicySource
from sim.cluster.settings import Absence, ClientSettings, ClusterSettings, ClusterSettingsError
from sim.cluster.simulated_request import Failure, Fate
from sim.measurement.measures import Measures, Targets
from tests.sim.made import arrival, arrivals, cluster, kind, ran

NEAR = PeerSettings(delay_s=0.005)
REPLICAS = 4

DIGEST = """
from sim.cluster.settings import Absence
from sim.cluster.peering import Partition, PeerSettings, SlowPeer
from sim.measurement.measures import Measures, Targets
from tests.sim.made import arrivals, cluster
peers = PeerSettings(delay_s=0.02, loss=0.2, partitions=(Partition(2.0, 4.0, (0,)),),
                     slow=(SlowPeer(1, 0.5),))
measures = Measures(Targets())
one = cluster(arrivals(200), seed=3, replicas=3, peers=peers, absences=(Absence(2, 3.0, 5.0),),
              ended=measures.add)
one.run()
print(measures.digest, one.pickers.peering.summary())
"""


def shared_prompts(count=500, groups=40):
    """Groups whose prompts are long and shared."""
    return list(arrivals(count, rate=20.0, groups=groups, blocks=(60, 60), output=(4, 8)))


def hit_rate(requests):
    done = [request for request in requests if request.fate is Fate.COMPLETE]
    cached = sum(request.engine.cached_tokens for request in done)
    return cached / sum(request.arrival.prompt_tokens for request in done)


def hits(given, **fields):
    return hit_rate(ran(given, pods=SMALL, policy=TOLD_OR_BLIND, **fields)[0])


SMALL = (kind(blocks_total=5_000),) * 4
TOLD_OR_BLIND = PolicySource(
    name="told-or-blind",
    text=config_of(
        step("prefix-cache-scorer", 3, agreement="none"),
        step("queue-scorer", 2),
        step("kv-cache-utilization-scorer", 2),
        step("active-request-scorer", 1),
    ),
    source="told-or-blind",
)
"""Agreement would help those that are told nothing."""


def test_sharing_gives_several_pickers_the_hit_rate_of_one():
    """Blind ones make copies of every prefix, each where it likes."""
    given = shared_prompts()
    alone = hits(given)
    blind = hits(given, replicas=REPLICAS)
    told = hits(given, replicas=REPLICAS, peers=NEAR)
    assert blind < 0.9 * alone
    assert told > 0.97 * alone


def test_what_is_lost_or_late_costs_little():
    """A tenth of the frames, or a second; half a minute is as if nothing was told."""
    given = shared_prompts()
    told = hits(given, replicas=REPLICAS, peers=NEAR)
    blind = hits(given, replicas=REPLICAS)
    lossy = PeerSettings(delay_s=0.005, loss=0.1)
    assert hits(given, replicas=REPLICAS, peers=lossy) > told - 0.03
    assert hits(given, replicas=REPLICAS, peers=PeerSettings(delay_s=1.0)) > told - 0.03
    late = hits(given, replicas=REPLICAS, peers=PeerSettings(delay_s=40.0))
    assert late == pytest.approx(blind, abs=0.03)


def beliefs(one):
    """Of each picker, how many (block, endpoint) pairs it believes in."""
    return [sum(index.entries for index in _prefixes(policy)) for policy in one.pickers.policies]


def _prefixes(policy):
    return [index for index in policy.scheduler.indexes.values() if hasattr(index, "entries")]


def test_a_partition_parts_and_heals():
    """Meanwhile each side knows its own; afterwards all know what is decided from then on."""
    given = shared_prompts(groups=150)
    last_s = given[-1].time_s
    half = Partition(0.0, last_s / 2, (0, 1))
    whole = Partition(0.0, 1e6, (0, 1))
    heard, hit = {}, {}
    for name, partitions in (("none", ()), ("half", (half,)), ("whole", (whole,))):
        peers = PeerSettings(delay_s=0.005, partitions=partitions)
        requests, one = ran(given, pods=SMALL, policy=TOLD_OR_BLIND, replicas=REPLICAS, peers=peers)
        heard[name] = [policy.scheduler.state.replicas_unheard for policy in one.pickers.policies]
        late = [request for request in requests if request.arrived_at > 0.6 * last_s]
        hit[name] = hit_rate(late)
    assert heard == {"none": [0] * 4, "half": [0] * 4, "whole": [2] * 4}
    assert hit["whole"] < hit["half"] - 0.05
    assert hit["half"] > hit["none"] - 0.03


@pytest.mark.parametrize("delay_s", [0.005, 10.0])
def test_pickers_know_each_other_from_the_start_however_far_apart(delay_s):
    """Nobody is taken for gone because what it says is under way, and nothing is left untold."""
    given = list(arrivals(150, rate=10.0))
    one = cluster(given, replicas=3, peers=PeerSettings(delay_s=delay_s))
    unheard = set()
    one.run(
        lambda: unheard.update(p.scheduler.state.replicas_unheard for p in one.pickers.policies)
    )
    assert unheard == {0}
    # A round of heartbeats is under way at the end, and with 10 s what was decided since.
    learnable = sum(at.time_s + delay_s + 0.1 < one.loop.now for at in given)
    assert learnable > 20
    assert one.pickers.peering.summary()["records_applied"] >= 2 * learnable


def first_decisions(requests, replica, after_s, count=100):
    found = [
        request
        for request in requests
        if request.replica == replica and request.routed_at and request.routed_at >= after_s
    ]
    assert len(found) > count
    return found[:count]


@pytest.mark.parametrize("from_s", [0.0, 10.0])
def test_a_picker_that_starts_with_a_snapshot_is_warm(from_s):
    """One that joins late and one that restarts: its first hundred decisions are like its peers';
    without a snapshot it knows only what it is told from then on.
    """
    given = shared_prompts(600)
    away = (Absence(1, from_s, 15.0),)
    hit = {}
    for snapshot in (True, False):
        peers = PeerSettings(delay_s=0.005, snapshot=snapshot)
        requests, _ = ran(given, pods=SMALL, replicas=2, peers=peers, absences=away)
        assert all(request.fate is Fate.COMPLETE for request in requests)
        assert not [r for r in requests if r.replica == 1 and from_s <= r.routed_at < 15.0]
        first = first_decisions(requests, 1, 15.0)
        hit[snapshot] = hit_rate(first)
        until_s = first[-1].routed_at
        peers_hit = hit_rate(
            [r for r in requests if r.replica == 0 and 15.0 <= r.routed_at <= until_s]
        )
        if snapshot:
            assert hit[snapshot] > peers_hit - 0.05
    assert hit[True] > hit[False] + 0.1


def test_what_a_dead_picker_had_in_flight_is_forgotten_by_the_others():
    """Its answers are served, its leases are gone everywhere once it has been silent."""
    given = [arrival(at, time_s=0.01 * at, output_tokens=2_000) for at in range(40)]
    one = cluster(given, replicas=2, peers=NEAR, absences=(Absence(0, 2.0, 30.0),))
    seen = {}

    def look():
        second = int(one.loop.now)
        loads = one.pickers.policies[1].scheduler.pool.columns.peers
        slots = [slot for slot, _ in one.pickers.policies[1].scheduler.pool.endpoints()]
        seen.setdefault(second, int(loads.requests(slots, len(slots)).sum()))

    requests = []
    one.clients._tell_ended = requests.append
    one.run(look)
    mine = [request for request in requests if request.replica == 0]
    assert seen[1] == len(mine) > 10
    assert seen[2 + int(SILENT_S_MAX + HEARTBEAT_S) + 1] == 0
    assert min(request.ended_at for request in mine) > 10.0
    assert {request.fate for request in requests} == {Fate.COMPLETE}


def test_a_slow_peer_is_late_and_nobody_else():
    """What it decides is learnt later by as much; the others do not wait for it."""
    peers = PeerSettings(delay_s=0.005, slow=(SlowPeer(2, 1.0),))
    given = [
        arrival(
            at,
            time_s=1.0 + 3.0 * at,
            blocks=tuple(range(40 * at, 40 * at + 30)),
            prompt_tokens=2_000,
            block_tokens=64,
        )
        for at in range(12)
    ]
    requests = []
    one = cluster(given, replicas=3, peers=peers, ended=requests.append)
    known_since = [{} for _ in range(3)]

    def look():
        for known, entries in zip(known_since, beliefs(one), strict=True):
            known.setdefault(entries, one.loop.now)

    one.run(look)
    requests.sort(key=lambda request: request.sequence)
    assert {request.replica for request in requests} == {0, 1, 2}
    # Each decision adds as much, and has been learnt before the next.
    step = max(beliefs(one)) // len(given)
    for request in requests[:-1]:
        for replica in {0, 1, 2} - {request.replica}:
            late_s = known_since[replica][step * (request.sequence + 1)] - request.routed_at
            slow = 2 in (replica, request.replica)
            assert (1.005 if slow else 0.005) <= late_s <= (1.03 if slow else 0.03)


@pytest.mark.parametrize("policy", ["default", "round-robin"])
def test_blind_pickers_and_policies_without_an_exchange_decide_as_ever(policy):
    """One picker with peers switched on, and a baseline, tell nobody anything."""
    digests = set()
    for replicas, peers in (
        ((1, None), (1, NEAR)) if policy == "default" else ((3, None), (3, NEAR))
    ):
        measures = Measures(Targets())
        one = cluster(
            arrivals(150), policy=policy, replicas=replicas, peers=peers, ended=measures.add
        )
        one.run()
        assert one.pickers.peering.summary() is None
        digests.add(measures.digest)
    assert len(digests) == 1


def test_the_same_seed_gives_the_same_digest_and_frames_in_any_process():
    root = Path(__file__).parents[3]
    told = set()
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join([str(root), *sys.path])}
        found = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True,
            check=True, cwd=root,
        )  # fmt: skip
        told.add(found.stdout)
    assert len(told) == 1
    assert "'frames_lost': 0" not in told.pop()


def test_loss_has_dice_of_its_own():
    """The same requests reach the same pickers, whatever is lost."""
    assigned = []
    for loss in (0.0, 0.5):
        peers = PeerSettings(delay_s=0.005, loss=loss)
        requests, one = ran(arrivals(150), replicas=3, peers=peers)
        assigned.append([request.replica for request in requests])
        told = one.pickers.peering.summary()
        assert told["frames_lost"] == pytest.approx(loss * told["frames"], rel=0.2)
    assert assigned[0] == assigned[1]


def test_leaving_out_scrapes_that_nobody_reads_changes_nothing_for_peers():
    digests = set()
    for eagerly in (True, False):
        measures = Measures(Targets())
        one = cluster(arrivals(150, rate=3.0), replicas=3, peers=NEAR, ended=measures.add)

        def look(one: Cluster = one) -> None:
            for replica in range(3):
                one.pickers.read_pages(replica)

        one.run(look if eagerly else None)
        digests.add(measures.digest)
    assert len(digests) == 1


def test_events_follow_from_traffic_and_months_without_any_cost_nothing():
    """Frames are asked for where there is something to tell; at rest there are no heartbeats."""
    events = []
    for gap_s in (1_000.0, 1e7):
        given = [arrival(0), arrival(1, time_s=gap_s), arrival(2, time_s=gap_s + 1.0)]
        requests, one = ran(given, pods=2, replicas=2, peers=NEAR)
        assert [request.fate for request in requests] == [Fate.COMPLETE] * 3
        assert [policy.scheduler.state.replicas_unheard for policy in one.pickers.policies] == [
            0,
            0,
        ]
        events.append(one.loop.events)
    assert events[1] < 1.1 * events[0] < 10_000
    # A minute with one request: two heartbeats a second, and the frames of its two changes.
    _, quiet = ran([arrival(0, time_s=60.0)], pods=2, replicas=2, peers=NEAR)
    assert quiet.pickers.peering.summary()["frames"] <= 2 * 61 / HEARTBEAT_S + 4


@pytest.mark.parametrize("seed", range(10))
def test_the_invariants_hold_with_peers_absences_and_faults(seed):
    peers = PeerSettings(delay_s=0.02, loss=0.3, partitions=(Partition(1.0, 3.0, (0,)),))
    ended = []
    one = cluster(
        arrivals(60, rate=15.0, seed=seed),
        pods=tuple(kind(blocks_total=200) for _ in range(4)),
        seed=seed,
        replicas=3,
        peers=peers,
        assignment=list(Assignment)[seed % 3],
        absences=(Absence(1, 0.0, 1.0), Absence(2, 1.5, 2.5)),
        abort_share=0.3,
        abort_after_s=0.3,
        faults=draw_faults(seed, mean_gap_s=2.0),
        ended=ended.append,
    )
    one.run(checker(one))
    assert sorted(request.sequence for request in ended) == list(range(60))
    assert [policy.open_requests for policy in one.pickers.policies] == [0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"absences": (Absence(3, 1.0, 5.0),)}, "away .*: expected a picker from 0 to 1, got 3"),
        ({"absences": (Absence(0, 1.0, 1.1),)}, "expected an absence of at least 0.4 s, got 0.1 s"),
        (
            {"absences": (Absence(0, 1.0, 5.0), Absence(0, 6.0, 9.0))},
            "picker 0 dies at 6 s: expected this to be at least 2 s after its restart at 5 s",
        ),
        (
            {"peers": PeerSettings(delay_s=0.0, slow=(SlowPeer(2, 1.0),))},
            "slow .*: expected a picker from 0 to 1, got 2",
        ),
        (
            {"peers": PeerSettings(delay_s=0.0, partitions=(Partition(0.0, 1.0, (0, 7)),))},
            "partition .*: expected a picker from 0 to 1, got 7",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, said):
    with pytest.raises(ClusterSettingsError, match=said):
        ClusterSettings(pods=(kind(),), replicas=2, **fields)


@pytest.mark.parametrize("policy", ["default", "round-robin"])
def test_while_no_picker_is_there_clients_are_refused(policy):
    """500, as from a gateway that fails closed; what was under way ends well, and then it begins anew."""
    given = list(arrivals(400, rate=20.0, groups=4, blocks=(20, 20), output=(50, 100)))
    requests, one = ran(given, policy=policy, absences=(Absence(0, 8.0, 12.0),))
    away = [request for request in requests if 8.0 < request.arrived_at < 11.99]
    assert {(request.fate, request.status, request.failure) for request in away} == {
        (Fate.FAILED, 500, Failure.NO_PICKER)
    }
    others = [request for request in requests if request not in away]
    assert {request.fate for request in others[:-1]} == {Fate.COMPLETE}
    assert any(request.routed_at < 8.0 < request.ended_at for request in others)
    assert [policy.open_requests for policy in one.pickers.policies] == [0]


def test_a_picker_that_was_away_has_forgotten():
    """Its index and its counts: what pods still hold is news to it."""
    given = list(arrivals(400, rate=20.0, groups=4, blocks=(20, 20)))
    requests, _ = ran(given, absences=(Absence(0, 8.0, 12.0),))
    before = [request for request in requests if 5.0 < request.arrived_at < 8.0]
    first = next(request for request in requests if request.arrived_at > 12.0)
    assert min(request.predicted_cached_tokens for request in before) > 0
    assert first.predicted_cached_tokens == 0 < first.engine.cached_tokens
    late = [request for request in requests if request.arrived_at > 15.0]
    assert min(request.predicted_cached_tokens for request in late) > 0


def test_clients_that_ask_again_outlast_a_picker_that_restarts():
    """However they met it, each request is answered once."""
    requests, one = ran(
        arrivals(200, rate=20.0),
        absences=(Absence(0, 3.0, 6.0),),
        clients=ClientSettings(retries=4, pause_s=0.5),
    )
    assert {request.fate for request in requests} == {Fate.COMPLETE}
    assert one.clients.retried > 0


def test_all_pickers_may_join_late():
    """Until the first is there nobody is routed; all are reached in the end."""
    requests, _ = ran(
        arrivals(300, rate=20.0), replicas=2, absences=(Absence(0, 0.0, 2.0), Absence(1, 0.0, 4.0))
    )
    early = [request for request in requests if request.arrived_at < 1.99]
    assert {request.failure for request in early} == {Failure.NO_PICKER}
    assert {request.replica for request in early} == {None}
    assert {request.replica for request in requests if 2.1 < request.arrived_at < 3.9} == {0}
    assert {request.replica for request in requests if request.arrived_at > 4.1} == {0, 1}
