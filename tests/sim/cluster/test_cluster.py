"""The production scheduler over simulated pods."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs, to_builtins

from epp.configuration.config import DEFAULT_CONFIG
from epp.shell.engines import scrape
from sim.cluster import settings as simulated
from sim.cluster.faults import Fault, FaultKind
from sim.cluster.scraping import SCRAPE_JITTER
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_request import Failure, Fate
from sim.engine.profiles import find_profile
from sim.measurement.measures import Measures, Targets, ttft_of
from sim.reports.report import fact_rows
from tests.sim.made import arrival, arrivals, cluster, kind, ran

DIGEST = """
from sim.measurement.measures import Measures, Targets
from tests.sim.made import arrivals, cluster
from sim.cluster.faults import draw_faults
from itertools import islice
measures = Measures(Targets())
faults = draw_faults(3, mean_gap_s=2.0)
cluster(arrivals(150), policy="default", seed=3, replicas=2, abort_share=0.3, abort_after_s=0.3,
        faults=faults, ended=measures.add).run()
print(measures.digest)
"""


def fault(kind_of_fault, at_s, pod=0, duration_s=5.0, factor=1.0):
    return Fault(kind=kind_of_fault, at_s=at_s, pod=pod, duration_s=duration_s, factor=factor)


def test_the_scrape_rule_is_production_s():
    """Interval and jitter, number by number; a dead pod refuses, which brings no back-off."""
    assert simulated.SCRAPE_INTERVAL_S_MIN == scrape.INTERVAL_S_MIN
    assert simulated.SCRAPE_INTERVAL_S_PER_POD == scrape.INTERVAL_S_PER_ENDPOINT
    assert SCRAPE_JITTER == scrape.JITTER
    for pods in (1, 400, 1_000):
        settings = ClusterSettings(pods=(kind(),) * pods)
        assert settings.refresh_interval_s == scrape.interval_s_by_pool(pods)


def test_a_lone_request_takes_what_the_model_says():
    """TTFT is network there and back, front end and one step; nothing else is on the way."""
    given = [arrival(prompt_tokens=1_000, output_tokens=1)]
    (request,), one = ran(given, pods=1, network_delay_s=0.01)
    profile = one.settings.pods[0].profile
    step_s = request.finished_at - request.submitted_at
    expected_s = 0.03 + profile.frontend_delay_s(1_000) + step_s
    assert ttft_of(request) == pytest.approx(expected_s)
    assert request.ended_at - request.arrived_at == pytest.approx(expected_s)
    # The linear layers of a thousand tokens, and little besides.
    assert 0.0215 <= step_s <= 0.03


def test_every_request_completes_and_hits_what_its_group_has_cached():
    """Warm prompts are found in the pods' caches, and the picker's estimate is about right."""
    measures = Measures(Targets())
    requests, _ = ran(arrivals(300))
    for request in requests:
        measures.add(request)
    told = measures.summary()
    assert to_builtins(told.requests) == {
        "sent": 300,
        "complete": 300,
        "refused": 0,
        "failed": 0,
        "aborted": 0,
    }
    assert told.hit_rate > 0.5
    assert told.prediction.mean_absolute_error_tokens < 64
    assert 0 < told.metrics_age_s < 0.25


def test_pickers_know_every_pod_before_the_first_request():
    """No request finds a pool of which some pods are scraped and others are not."""
    requests, _ = ran(arrivals(20, rate=500.0), replicas=2)
    assert all(request.metrics_age_s <= 0.25 for request in requests)


def test_a_turn_waits_for_the_answer_before_it():
    """Sent when the earlier answer has come and the user has thought, however long it took."""
    given = [
        arrival(0, output_tokens=300),
        arrival(1, time_s=2.0, after=0, think_s=2.0, output_tokens=300),
        arrival(2, time_s=2.5, after=1, think_s=0.5),
        arrival(3, time_s=30.0, after=0, think_s=29.0),
    ]
    (first, second, third, last), _ = ran(given, pods=1)
    assert second.arrived_at == pytest.approx(first.ended_at + 2.0)
    assert third.arrived_at == pytest.approx(second.ended_at + 0.5)
    assert last.arrived_at == pytest.approx(first.ended_at + 29.0)


def test_impatient_clients_leave_and_their_work_ends():
    """Aborted requests free the engine, and no lease stays behind."""
    given = list(arrivals(100, output=(100, 200)))
    requests, one = ran(given, abort_share=0.5, abort_after_s=0.5)
    fates = [request.fate for request in requests]
    assert 20 < fates.count(Fate.ABORTED) < 60
    assert fates.count(Fate.ABORTED) + fates.count(Fate.COMPLETE) == 100
    assert [policy.open_requests for policy in one.pickers.policies] == [0]
    assert all(not pod.engine.running for pod in one.pods)


def test_patience_does_not_depend_on_the_policy():
    """Common random numbers: the same clients are impatient under every policy."""
    arrived = []
    for policy in ("default", "random"):
        requests, _ = ran(arrivals(50), policy=policy, abort_share=0.3, abort_after_s=0.01)
        arrived.append([(one.arrived_at, one.fate is Fate.ABORTED) for one in requests])
    assert arrived[0] == arrived[1]


def test_a_dead_pod_fails_what_it_had_and_is_routed_round():
    """Until discovery has told, requests for it fail; afterwards none go there."""
    faults = [fault(FaultKind.DIE, 2.0)]
    requests, one = ran(
        arrivals(400, output=(50, 100)), faults=faults, policy="round-robin", discovery_delay_s=1.0
    )
    failed = [request for request in requests if request.fate is Fate.FAILED]
    assert failed
    assert {request.pod.name for request in failed} == {"pod-0"}
    assert all(2.0 <= request.ended_at <= 3.2 for request in failed)
    late = [request for request in requests if request.arrived_at > 3.1]
    assert late
    assert all(request.fate is Fate.COMPLETE and request.pod.name != "pod-0" for request in late)
    assert len(one.pods) == 4


def test_three_of_four_pods_that_return_get_traffic_within_two_scrapes():
    """While they are away all goes to the fourth, before discovery has told, and none is lost."""
    asked_at = {}
    faults = [fault(FaultKind.RESTART, 2.0, pod=pod, duration_s=4.0) for pod in range(3)]
    requests, _ = ran(
        arrivals(600, rate=50.0, groups=600),
        faults=faults,
        discovery_delay_s=60.0,
        scrape_interval_s=0.2,
    )
    for request in requests:
        asked_at.setdefault(request.pod.name, []).append(request.routed_at)
    # Two scrapes to know that nobody is there, two to know that they are back.
    for name in ("pod-0", "pod-1", "pod-2"):
        assert not [at for at in asked_at[name] if 2.5 <= at < 6.0]
        assert [at for at in asked_at[name] if 6.0 <= at <= 6.6]
    failed = [request.routed_at for request in requests if request.fate is Fate.FAILED]
    assert all(at < 2.5 for at in failed)


def test_a_restarted_pod_serves_again_and_has_forgotten_everything():
    """The picker's index forgets it too: it predicts nothing that the pod has lost."""
    given = [
        arrival(0, prompt_tokens=641, blocks=tuple(range(10)), block_tokens=64),
        arrival(1, time_s=1.0, prompt_tokens=641, blocks=tuple(range(10)), block_tokens=64),
        arrival(2, time_s=20.0, prompt_tokens=641, blocks=tuple(range(10)), block_tokens=64),
    ]
    faults = [fault(FaultKind.RESTART, 5.0, duration_s=2.0)]
    requests, _ = ran(given, pods=1, faults=faults)
    assert [request.engine.cached_tokens for request in requests] == [0, 640, 0]
    assert [request.predicted_cached_tokens for request in requests] == [0, 640, 0]


def test_a_joining_pod_gets_work():
    """Once it has been announced."""
    requests, one = ran(arrivals(300, groups=300), pods=1, faults=[fault(FaultKind.JOIN, 3.0)])
    there = [request.arrived_at for request in requests if request.pod.name == "pod-1"]
    assert len(one.pods) == 2
    assert len(there) > 20
    assert min(there) >= 4.0


def test_a_lagging_pod_gets_less():
    """Load signals see what labels do not."""
    faults = [fault(FaultKind.LAG, 0.0, duration_s=1e6, factor=8.0)]
    requests, _ = ran(arrivals(400, output=(20, 60), groups=400), faults=faults)
    served = [request.pod.number for request in requests]
    assert served.count(0) < 0.7 * served.count(1)


def test_stale_pages_show_what_was():
    """The page of a frozen pod does not move although the pod does."""
    one = cluster(arrivals(50, output=(50, 100)), faults=[fault(FaultKind.STALE, 0.0)], pods=1)
    shown = set()
    one.run(
        lambda: (
            shown.add(one.pods[0].page(one.loop.now).running_requests) if one.loop.now < 4 else None
        )
    )
    assert shown == {0}


def test_unlike_pods_are_used_by_what_they_can_do():
    """The faster card serves more of an even load."""
    kinds = (kind(), kind(profile="llama-3.1-70b-h100-tp4"))
    requests, _ = ran(arrivals(300, groups=300, output=(20, 60)), pods=kinds)
    served = [request.pod.number for request in requests]
    assert served.count(0) > 1.2 * served.count(1)


def test_pickers_that_do_not_see_each_other_balance_worse():
    """Four blind replicas make longer queues than one picker that sees everything."""
    waited = {}
    for replicas in (1, 4):
        requests, _ = ran(
            arrivals(400, rate=60, groups=400, output=(20, 60)),
            policy="least-requests",
            replicas=replicas,
        )
        assert len({request.replica for request in requests}) == replicas
        waited[replicas] = sum(request.ended_at - request.arrived_at for request in requests)
    assert waited[1] < waited[4]


def test_pickers_that_do_not_hear_each_other_agree_where_prompts_go(tmp_path):
    """Four of them share caches nearly as one would; without agreement each warms its own."""
    without = tmp_path / "without.yaml"
    scorer = "- type: added-time-scorer\n"
    without.write_text(DEFAULT_CONFIG.replace(scorer, scorer + "  parameters: {peerBelief: 0}\n"))
    hit_rate = {}
    for name, policy, replicas in (
        ("one", "default", 1),
        ("agreed", "default", 4),
        ("blind", str(without), 4),
    ):
        # Groups of long heads, one turn in each: what is hit is what another one left.
        given = [
            structs.replace(one, session="")
            for one in arrivals(300, rate=10.0, groups=40, blocks=(30, 31))
        ]
        requests, _ = ran(given, policy=policy, replicas=replicas)
        tokens = sum(one.arrival.prompt_tokens for one in requests)
        hit_rate[name] = sum(one.engine.cached_tokens for one in requests) / tokens
    assert hit_rate["agreed"] > 0.9 * hit_rate["one"]
    assert hit_rate["agreed"] > hit_rate["blind"] + 0.15


def test_what_can_never_fit_is_refused_by_the_pod():
    """400 from the engine, nothing lost, and the next request is served."""
    given = [arrival(0, prompt_tokens=10_000), arrival(1, time_s=0.1)]
    (large, small), one = ran(given, pods=(kind(blocks_total=100),))
    assert (large.fate, large.status) == (Fate.FAILED, 400)
    assert large.failure is Failure.KV_CACHE
    assert small.fate is Fate.COMPLETE
    assert one.pickers.policies[0].open_requests == 0


def test_what_is_longer_than_the_model_allows_is_refused_by_the_pod():
    """Prompt and answer together, to the token; it reaches no engine."""
    limit = find_profile("qwen3-32b-h100-tp2").max_model_len_tokens
    given = [
        arrival(0, prompt_tokens=limit - 4, output_tokens=4),
        arrival(1, time_s=60.0, prompt_tokens=limit - 4, output_tokens=5),
        arrival(2, time_s=60.0, prompt_tokens=limit, output_tokens=1),
    ]
    pods = (kind(profile="qwen3-32b-h100-tp2"),)
    (fits, *longer), one = ran(given, pods=pods)
    assert fits.fate is Fate.COMPLETE
    for request in longer:
        assert (request.fate, request.status) == (Fate.FAILED, 400)
        assert request.failure is Failure.CONTEXT
        assert request.engine is None
    assert one.pickers.policies[0].open_requests == 0


def test_a_request_for_an_adapter_fails_where_there_are_no_slots():
    """As the engine says it: 400."""
    ((request,), _) = ran([arrival(0, adapter="sql")], pods=1)
    assert (request.status, request.failure) == (400, Failure.ADAPTER)


def test_failures_are_counted_by_reason():
    """In the summary and in the table, as refusals are."""
    measures = Measures(Targets())
    given = [arrival(0, prompt_tokens=10_000), arrival(1, output_tokens=500)]
    pods = (kind(blocks_total=100),)
    restart = fault(FaultKind.RESTART, 1.0)
    cluster(given, pods=pods, faults=[restart], ended=measures.add).run()
    told = measures.summary()
    assert told.failures == {"longer than the KV cache": 1, "the pod died": 1}
    assert told.requests.failed == 2
    row = dict(fact_rows(told))
    assert row["failed"] == "1 longer than the KV cache, 1 the pod died"
    assert "refused" not in row


@pytest.mark.parametrize("chunks", [False, True])
def test_first_outputs_are_told_only_where_the_gateway_shows_them(chunks):
    """By default a long prompt's backlog drains by estimate; with chunks it ends at the token."""
    given = [arrival(0, prompt_tokens=50_000, output_tokens=100)]
    one = cluster(given, pods=1, response_chunks=chunks)
    columns = one.pickers.policies[0].scheduler.pool.columns
    backlogs = []

    def look():
        ((_, request),) = one.clients.requests.items() or ((0, None),)
        if request is not None and request.first_token_at is not None:
            backlogs.append(float(columns.prefill_backlog_tokens[0]))

    one.run(look)
    assert (backlogs[-1] == 0) is chunks


@pytest.mark.parametrize("faults", [(), (fault(FaultKind.RESTART, 5_000.0),)])
def test_a_gap_of_months_costs_what_minutes_do(faults):
    """Nobody ticks or scrapes when nothing is under way; both are back before the next request."""
    gaps_s, events = (1_000.0, 1e7), []
    for gap_s in gaps_s:
        given = [arrival(0), arrival(1, time_s=gap_s), arrival(2, after=1, think_s=gap_s)]
        requests, one = ran(given, pods=2, replicas=2, faults=faults)
        assert [request.fate for request in requests] == [Fate.COMPLETE] * 3
        assert all(request.metrics_age_s <= 0.25 for request in requests)
        assert requests[2].arrived_at == pytest.approx(requests[1].ended_at + gap_s)
        events.append(one.loop.events)
    assert events[1] < 1.1 * events[0] < 10_000


def test_a_pod_that_was_lost_while_nothing_was_under_way_is_known_to_be():
    """Discovery tells it to the pickers when they look again."""
    given = [arrival(0), *(arrival(at, time_s=5_000.0 + at) for at in range(1, 9))]
    requests, _ = ran(given, pods=2, policy="round-robin", faults=[fault(FaultKind.DIE, 2_000.0)])
    assert all(request.fate is Fate.COMPLETE for request in requests)
    assert {request.pod.name for request in requests[1:]} == {"pod-1"}


def test_what_is_sent_after_the_end_goes_on_where_it_ended():
    """On warm pods, with the clock where it was; the picker remembers too."""
    prompt = {"prompt_tokens": 640, "blocks": tuple(range(10)), "block_tokens": 64}
    ended = []
    one = cluster([arrival(0, **prompt)], pods=2, ended=ended.append)
    one.run()
    first_at = one.loop.now
    one.clients.go_on([arrival(1, time_s=first_at + 1.0, **prompt), arrival(2, time_s=0.0)])
    one.run()
    _, again, late = sorted(ended, key=lambda request: request.sequence)
    assert again.arrived_at == first_at + 1.0
    assert again.engine.cached_tokens > 0
    assert again.predicted_cached_tokens > 0
    # Nothing is sent in the past.
    assert late.arrived_at == again.arrived_at


def test_the_same_seed_gives_the_same_digest_in_any_process():
    """Two processes with different hash seeds, faults and aborts included; another seed differs."""
    root = Path(__file__).parents[3]
    found = set()
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join([str(root), *sys.path])}
        told = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True,
            check=True, cwd=root,
        )  # fmt: skip
        found.add(told.stdout)
    assert len(found) == 1
    measures = Measures(Targets())
    cluster(arrivals(150), seed=4, ended=measures.add).run()
    assert measures.digest not in found


def test_a_refused_request_has_no_latency():
    """Without a pod everything is refused, and the summary says so without dividing by nothing."""
    measures = Measures(Targets())
    faults = [fault(FaultKind.RESTART, 0.0, duration_s=100.0)]
    one = cluster(
        [arrival(0, time_s=3.0)], pods=1, policy="random", faults=faults, ended=measures.add
    )
    one.run()
    told = measures.summary()
    assert told.requests.refused == 1
    assert told.refusals == {"rejected-no-endpoints": 1}
    assert told.ttft_s.mean is None
    assert math.isfinite(one.loop.now)
