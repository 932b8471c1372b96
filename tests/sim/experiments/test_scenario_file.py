"""Scenario files: what they say, what is refused, and three incidents from the file to the report."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from sim.__main__ import main
from sim.caches.names import cache_named, cache_spelt
from sim.cluster.assignment import Assignment
from sim.cluster.autoscaler import AutoscalerSettings, ScaledBy
from sim.cluster.incidents import Configure, Join, Leave, Restart, Slow, SlowLink
from sim.cluster.peering import Partition, PeerSettings
from sim.cluster.rerouting import Reschedule
from sim.cluster.scraping import ScrapeTrouble
from sim.cluster.settings import Absence, ClientSettings, ClusterSettingsError
from sim.cluster.simulated_pod import PodKind
from sim.engine.features import feature_spelt, features_named
from sim.experiments.pickers import Pickers
from sim.experiments.scenario_file import EVENTS, FILE_BYTES_MAX, ScenarioError, scenario_in
from sim.traces.capture import CaptureWriter
from tests.sim.made import arrivals, cluster, kind

EXAMPLES = Path(__file__).parents[3] / "docs/examples/scenarios"

WHOLE = """\
[[pods]]
count = 2
labels = { zone = "a" }
speed = 0.5

[[pods]]
profile = "qwen3-32b-h100-tp2"
max_loras = 3

[[events]]
kind = "join"
at_s = 10
startup_s = 20
count = 2

[[events]]
kind = "slow"
from_s = 30
to_s = 40
factor = 2
pods = [4]

[[events]]
kind = "restart"
at_s = 50

[[events]]
kind = "scrapes"
from_s = 5
to_s = 6
more_s = 0.1
pickers = [1]

[[events]]
kind = "configure"
at_s = 60
config = "llm-d-3-2-2"

[[rates]]
from_s = 10
to_s = 20
factor = 1
factor_end = 4

[[events]]
kind = "reschedule"
from_s = 70
to_s = 80
share = 0.5
pods = [2]

[[events]]
kind = "picker-restart"
at_s = 90
pickers = [1]

[[events]]
kind = "peer-partition"
from_s = 90
to_s = 95
pickers = [0]

[pickers]
count = 2
assignment = "sticky"
fallback_endpoints_max = 2
peer_delay_s = 0.01

[clients]
retries = 2
timeout_s = 30
"""

SCALED = """\
[autoscaler]
metric = "waiting-requests"
target = 2
pods_min = 2
pods_max = 9
labels = { "llm-d.ai/role" = "decode" }
stabilization_s = 60
"""


ROLE = """\
[[pods]]
role = "decode"
"""
WITH_ROLES = """\
[[pods]]
count = 2
role = "prefill"

[[pods]]
role = "decode"
nics = 4

[kv_transfer]
gigabytes_per_s = 10
setup_s = 0.002
legs = "concurrent"
push = true
lease_s = 60

[[events]]
kind = "leave"
at_s = 30
role = "prefill"
pods = [1]

[[events]]
kind = "slow-link"
from_s = 40
to_s = 50
factor = 10

[[events]]
kind = "join"
at_s = 60
role = "decode"
"""


def written(tmp_path, text):
    path = tmp_path / "made.toml"
    path.write_text(text)
    return path


def read(tmp_path, text):
    return scenario_in(written(tmp_path, text), kind())


def test_all_that_can_be_said_is_read(tmp_path):
    """Pods, incidents, scrapes and rates; what is not told of a pod is as usual."""
    scenario = read(tmp_path, WHOLE)
    first, second, third = scenario.pods
    assert first == second == structs.replace(kind(), labels={"zone": "a"}, speed=0.5)
    assert (third.profile.name, third.engine.max_loras) == ("qwen3-32b-h100-tp2", 3)
    join, slow, restart, configure = scenario.incidents
    assert isinstance(join, Join)
    assert (len(join.kinds), join.startup_s) == (2, 20)
    assert slow == Slow(from_s=30, to_s=40, factor=2, pods=(4,))
    assert restart == Restart(at_s=50)
    assert isinstance(configure, Configure)
    assert configure.policy.name == "llm-d-3-2-2"
    assert scenario.scrape_troubles == (ScrapeTrouble(from_s=5, to_s=6, more_s=0.1, pickers=(1,)),)
    assert [rate.consumed_s for rate in scenario.rates] == [25]
    assert scenario.reschedules == (Reschedule(from_s=70, to_s=80, share=0.5, pods=(2,)),)
    plan = scenario.pickers
    assert plan.pickers == Pickers(
        count=2, assignment=Assignment.STICKY, fallback_endpoints_max=2, peer_delay_s=0.01
    )
    assert plan.absences == (Absence(1, 90, 100),)
    assert plan.peers == PeerSettings(delay_s=0.01, partitions=(Partition(90, 95, (0,)),))
    assert scenario.clients == ClientSettings(retries=2, timeout_s=30)
    scenario.check(kinds=scenario.pods, pickers=2)


def test_an_autoscaler_is_read(tmp_path):
    """What is not told is as Kubernetes has it."""
    (scaled,) = read(tmp_path, SCALED).autoscalers
    assert scaled == AutoscalerSettings(
        metric=ScaledBy.WAITING_REQUESTS, target=2, pods_min=2, pods_max=9, stabilization_s=60,
        labels={"llm-d.ai/role": "decode"}, interval_s=15, tolerance=0.1,
    )  # fmt: skip


def test_pods_with_roles_and_their_network_are_read(tmp_path):
    scenario = read(tmp_path, WITH_ROLES)
    assert [(pod.role, pod.nics) for pod in scenario.pods] == [
        ("prefill", 1), ("prefill", 1), ("decode", 4),
    ]  # fmt: skip
    assert {pod.engine.kv_connector.lease_s for pod in scenario.pods} == {60}
    transfer = scenario.kv_transfer
    assert (transfer.link.bytes_per_s, transfer.link.setup_s) == (10e9, 0.002)
    assert (transfer.concurrent, transfer.push) == (True, True)
    leave, slow, join = scenario.incidents
    assert leave == Leave(at_s=30, role="prefill", pods=(1,))
    assert slow == SlowLink(from_s=40, to_s=50, factor=10)
    assert join.kinds[0].role == "decode"
    scenario.check(kinds=scenario.pods, pickers=1)


def test_each_role_may_have_an_autoscaler(tmp_path):
    """If there are several autoscalers, each pod has one at most."""
    table = SCALED.replace("[autoscaler]", "[[autoscaler]]")
    of_both = WITH_ROLES.partition("[[events]]")[0] + table + table.replace("decode", "prefill")
    scenario = read(tmp_path, of_both.replace("pods_min = 2", "pods_min = 1"))
    labels = [one.labels["llm-d.ai/role"] for one in scenario.autoscalers]
    assert labels == ["decode", "prefill"]
    scenario.check(kinds=scenario.pods, pickers=1)
    twice = structs.replace(scenario, autoscalers=scenario.autoscalers[:1] * 2)
    with pytest.raises(ClusterSettingsError, match="expected at most one for each pod, got 2 for"):
        twice.check(kinds=scenario.pods, pickers=1)


def test_pods_keep_prompts_each_in_their_way(tmp_path):
    """As the table says, else as the flag does."""
    text = '[[pods]]\ncache = "kronk-imc-v1:slots=2"\n[[pods]]\ncache = "vllm"\n[[pods]]\n'
    usual = PodKind.of(kind().profile, cache=cache_named("mlx-disk"))
    pods = scenario_in(written(tmp_path, text), usual).pods
    assert [cache_spelt(pod.cache) for pod in pods] == ["kronk-imc-v1:slots=2", "vllm", "mlx-disk"]


def test_engines_do_besides_what_the_table_says(tmp_path):
    """All of it as told there, else as the flags say; an empty list is nothing."""
    text = (
        "[[pods]]\nengine = ['ranks:count=2', 'whole-prompts']\n[[pods]]\nengine = []\n[[pods]]\n"
    )
    usual = PodKind.of(kind().profile, features=features_named(["speculative:acceptance=0.5"]))
    pods = scenario_in(written(tmp_path, text), usual).pods
    assert [[feature_spelt(one) for one in pod.features] for pod in pods] == [
        ["whole-prompts", "ranks:count=2"],
        [],
        ["speculative:acceptance=0.5"],
    ]
    assert [pod.engine.chunked_prefill for pod in pods] == [False, True, True]


def test_an_empty_file_says_nothing(tmp_path):
    assert read(tmp_path, "") == type(read(tmp_path, ""))(file="made.toml")


def test_a_file_that_is_named_lies_beside_the_scenario(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n"
    )
    text = '[[events]]\nkind = "configure"\nat_s = 1\nconfig = "own.yaml"\n'
    (configure,) = read(tmp_path, text).incidents
    assert "queue-scorer" in configure.policy.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[[pods]]\nengine = ['eagle']",
            "[[pods]] 1: engine: No feature 'eagle' of engines; expected one of whole-prompts",
        ),
        ("[[event]]\nkind = 'leave'", "unknown table event, did you mean `events`?"),
        ("pods = 3", "pods: expected tables under [[pods]]"),
        ("[[events]]\nat_s = 1", "[[events]] 1: expected a kind of join, leave"),
        ("[[events]]\nkind = 'leave'\nat_s = 1\npod = [1]", "1, leave: unknown key pod, did you mean"),
        ("[[events]]\nkind = 'leave'\nat_s = -1", "1, leave: at_s: expected a number of at least 0"),
        ("[[events]]\nkind = 'leave'\nat_s = nan", "1, leave: at_s: expected a number"),
        ("[[events]]\nkind = 'leave'", "needs field `at_s`"),
        ("[[events]]\nkind = 'slow'\nfrom_s = 2\nto_s = 1\nfactor = 2", "expected to_s after from_s"),
        ("[[events]]\nkind = 'scrapes'\nfrom_s = 1\nto_s = 2", "expected loss or more_s above 0"),
        ("[[events]]\nkind = 'configure'\nat_s = 1\nconfig = 'random'", "got the baseline 'random'"),
        ("[[events]]\nkind = 'configure'\nat_s = 1\nconfig = 'no'", "no is neither a file nor one"),
        ("[[pods]]\nprofile = 'no'", "[[pods]] 1: profile: No profile 'no'"),
        ("[[pods]]\ncache = 'lru'", "[[pods]] 1: cache: No cache 'lru'"),
        ("[[pods]]\ncount = 1001", "1: count: expected a whole number of at most 1000"),
        ("[[rates]]\nfrom_s=0\nto_s=9\nfactor=2\n[[rates]]\nfrom_s=8\nto_s=10\nfactor=2", "overlap"),
        ("[[rates]]\nfrom_s=0\nto_s=9\nfactor=0", "[[rates]] 1: factor: expected a number of at least 0.001"),
        ("[clients]\nretry = 2", "[clients]: unknown key retry, did you mean `retries`?"),
        ("clients = 2", "clients: expected a table [clients]"),
        ("autoscaler = 1", "autoscaler: expected tables under [[autoscaler]]"),
        (2 * SCALED.replace("[auto", "[[auto").replace("er]\n", "er]]\n") + "pods = 1", "[[autoscaler]] 2: unknown key pods"),
        ("[[pods]]\nrole = 'encode'", "[[pods]] 1: role: expected one of both, decode, prefill, prefill-decode, got 'encode'"),
        ("[[pods]]\nnics = 2", "[[pods]] 1: nics: expected a role too"),
        ("[[pods]]\nrole = 'decode'\nnics = 0", "[[pods]] 1: nics: expected a whole number of at least 1"),
        ("[kv_transfer]", "[kv_transfer]: expected pods with a role in this file, got none"),
        (ROLE + "[kv_transfer]\nlink = 'infiniband'", "[kv_transfer]: link: expected one of nvlink"),
        (ROLE + "[kv_transfer]\nsetup_s = 1", "expected gigabytes_per_s and setup_s together"),
        (ROLE + "[kv_transfer]\nsetup_s = 1\ngigabytes_per_s = 1\nlink = 'nvlink'", "expected link or gigabytes_per_s"),
        (ROLE + "[kv_transfer]\npush = true", 'push: expected legs = "concurrent" with it'),
        (ROLE + "[kv_transfer]\nlegs = 'both'", "[kv_transfer]: legs: expected serial"),
        (ROLE + "[kv_transfer]\nbandwidth = 1", "[kv_transfer]: unknown key bandwidth"),
        ("[autoscaler]\ntarget = 2", "[autoscaler]: needs field `metric`"),
        (SCALED + "pods = 3", "[autoscaler]: unknown key pods, did you mean `pods_m"),
        (SCALED.replace("= 9", "= 1"), "[autoscaler]: expected pods_max of at least pods_min, 2, got 1"),
        (SCALED.replace("target = 2", "target = -2"), "[autoscaler]: target: expected a number above 0"),
        (SCALED.replace("waiting-", "wait-"), "[autoscaler]: metric: expected waiting-requests"),
        (SCALED + "[[events]]\nkind = 'join'\nat_s = 1", "expected events of kind join or an [autoscaler]"),
        ("[pickers]\ncount = 0", "[pickers]: count: expected a whole number of at least 1"),
        ("[pickers]\nreplicas = 2", "[pickers]: unknown key replicas"),
        ("[pickers]\nassignment = 'even'", "[pickers]: assignment: expected random"),
        ("[pickers]\npeer_loss = 2", "[pickers]: peer_loss: expected a number of at most 1"),
        ("[pickers]\npeer_slow = [{picker = 1, more_s = -1}]", "[pickers]: peer_slow[0].more_s: expected a number of at least 0"),
        ("[[events]]\nkind='reschedule'\nfrom_s=1\nto_s=2\nshare=0", "reschedule: share: expected a number above 0"),
        ("[[events]]\nkind='reschedule'\nfrom_s=2\nto_s=2", "expected to_s after from_s, 2 s, got 2 s"),
        ("[[events]]\nkind='peer-partition'\nfrom_s=1\nto_s=2", "needs field `pickers`"),
        ("[[events]]\nkind='picker-restart'\nat_s=-1", "picker-restart: at_s: expected a number of at least 0"),
        ("[[pods]", "made.toml: "),
        ("#" * (FILE_BYTES_MAX + 1), "expected 1,000,000 bytes at most"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(tmp_path, text, said):
    with pytest.raises(ScenarioError) as refused:
        read(tmp_path, text)
    assert "made.toml" in str(refused.value)
    assert said in str(refused.value)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind = 'leave'\nat_s = 1\npods = [4]", "expected a pod from 0 to 3, got 4"),
        ("kind = 'scrapes'\nfrom_s = 1\nto_s = 2\nloss = 1\npods = [4]", "a pod from 0 to 3, got 4"),
        ("kind = 'scrapes'\nfrom_s = 1\nto_s = 2\nloss = 1\npickers = [1]", "a picker from 0 to 0"),
        ("kind = 'join'\nat_s = 1\ncount = 997", "expected 1,000 pods at most, got 1,001"),
        ("kind = 'reschedule'\nfrom_s = 1\nto_s = 2\npods = [4]", "a pod from 0 to 3, got 4"),
        ("kind = 'picker-restart'\nat_s = 1\npickers = [1]", "a picker from 0 to 0, got 1"),
        ("kind = 'peer-partition'\nfrom_s = 1\nto_s = 2\npickers = [7]", "from 0 to 0, got 7"),
        (
            "kind='leave'\nat_s=1\npods=[4]\n[autoscaler]\nmetric='waiting-requests'\ntarget=1\npods_max=8",
            "expected a pod from 0 to 3, got 4",
        ),
        (
            "kind='leave'\nat_s=1\n[autoscaler]\nmetric='waiting-requests'\ntarget=1\npods_max=3",
            "[autoscaler]: expected 1 to 3 pods at the beginning, got 4",
        ),
        (
            "kind='slow'\nfrom_s=1\nto_s=5\nfactor=2\n[[events]]\nkind='slow'\nfrom_s=4\nto_s=6\nfactor=3\npods=[1]",
            "slow at 4 s: expected a start after the previous event of this kind for pod 1, which ends",
        ),
        (
            "kind='join'\nat_s=5\nstartup_s=5\n[[events]]\nkind='leave'\nat_s=6\npods=[4]",
            "got 4, which joins at 10 s",
        ),
    ],
)  # fmt: skip
def test_who_is_not_there_is_refused(tmp_path, text, said):
    scenario = read(tmp_path, f"[[events]]\n{text}")
    with pytest.raises(ClusterSettingsError) as refused:
        scenario.check(kinds=[kind()] * 4, pickers=1)
    assert said in str(refused.value)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Four minutes of 25 requests a second that share long prompts with others."""
    path = tmp_path_factory.mktemp("trace") / "made.jsonl"
    with path.open("wb") as file:
        writer = CaptureWriter(file, source="test")
        for one in arrivals(6_000, rate=25.0, groups=40, blocks=(24, 24), output=(60, 140)):
            # A capture wants an id for each full block.
            tokens = 64 * len(one.blocks) + 1
            writer.write_arrival(structs.replace(one, prompt_tokens=tokens))
    return path


def replayed(trace, out, *arguments):
    """The summary, and the columns of requests.parquet."""
    arguments = ["replay", trace, "--warm-up", "0", "--no-decisions", "--out", out, *arguments]
    assert main([str(argument) for argument in arguments]) == 0
    rows = pq.read_table(out / "requests.parquet")
    columns = {name: np.array(rows[name].to_pylist()) for name in rows.column_names}
    return json.loads((out / "summary.json").read_bytes()), columns


def example(name):
    return ("--scenario", EXAMPLES / f"{name}.toml")


def share_of(columns, pod, from_s, to_s):
    """Of the requests that arrived then, how many `pod` got."""
    then = (columns["arrival_s"] >= from_s) & (columns["arrival_s"] < to_s)
    return float((columns["pod"][then] == pod).mean())


def ttft_p90(columns, from_s, to_s):
    then = (columns["arrival_s"] >= from_s) & (columns["arrival_s"] < to_s)
    return float(np.percentile(columns["ttft_s"][then].astype(float), 90))


def test_a_slow_pod(trace, tmp_path):
    """The picker leaves most work to the three others while it lasts; round robin does not."""
    _, homing = replayed(trace, tmp_path / "homing", *example("slow-pod"))
    told, proxy = replayed(
        trace, tmp_path / "proxy", "--config", "round-robin", *example("slow-pod")
    )
    assert told["conditions"]["scenario"] == "slow-pod.toml"
    assert share_of(proxy, "pod-2", 70, 180) == pytest.approx(0.25, abs=0.01)
    assert share_of(homing, "pod-2", 70, 180) < 0.5 * share_of(homing, "pod-2", 0, 60)
    assert share_of(homing, "pod-2", 190, 240) > 1.5 * share_of(homing, "pod-2", 70, 180)
    assert ttft_p90(homing, 70, 180) < 0.5 * ttft_p90(proxy, 70, 180)


def test_a_scrape_outage_during_a_burst(trace, tmp_path):
    """The picker decides by its own books: nothing is refused, and no pod is forgotten or flooded."""
    told, homing = replayed(trace, tmp_path / "outage", *example("scrape-outage"))
    arrived_s = homing["arrival_s"]
    before, during = arrived_s < 60, (arrived_s >= 60) & (arrived_s < 100)
    assert during.sum() / 40 == pytest.approx(3 * before.sum() / 60, rel=0.1)
    assert set(homing["outcome"]) == {"complete"}
    assert told["metrics_age_s"] > 5
    shares = [share_of(homing, f"pod-{number}", 60, 100) for number in range(4)]
    assert 0.15 < min(shares) <= max(shares) < 0.35

    text = (EXAMPLES / "scrape-outage.toml").read_text()
    seeing = written(tmp_path, text[: text.index("[[events]]")])
    told_seeing, burst = replayed(trace, tmp_path / "burst", "--scenario", seeing)
    assert told_seeing["metrics_age_s"] < 0.3
    assert ttft_p90(homing, 60, 100) < 2 * ttft_p90(burst, 60, 100)


def test_a_rolling_restart_of_all_pods_under_load(trace, tmp_path):
    """Who is drained loses nobody and comes back cold; who is not fails what it had."""
    drained, requests = replayed(trace, tmp_path / "drained", *example("rolling-restart"))
    assert drained["requests"]["complete"] == 6_000
    # Announced no more from 1 s after its turn; away till 15 s after its last answer.
    for number, gone_at_s in enumerate((60, 100, 140, 180)):
        assert share_of(requests, f"pod-{number}", gone_at_s + 1.1, gone_at_s + 15) == 0
        assert share_of(requests, f"pod-{number}", gone_at_s - 20, gone_at_s) > 0.1

    text = (EXAMPLES / "rolling-restart.toml").read_text()
    crashing = written(tmp_path, text.replace("grace_s = 20", "grace_s = 0"))
    crashed, _ = replayed(trace, tmp_path / "crashed", "--scenario", crashing)
    assert crashed["failures"] == {"the pod died": crashed["requests"]["failed"]}
    assert 8 <= crashed["requests"]["failed"] < 0.1 * 6_000
    crashing.write_text(crashing.read_text() + "\n[clients]\nretries = 3\n")
    again, _ = replayed(trace, tmp_path / "again", "--scenario", crashing)
    assert again["requests"]["complete"] == 6_000
    assert again["retries"] >= crashed["requests"]["failed"] * 0.5
    assert "| requests sent again |" in (tmp_path / "again" / "report.md").read_text()
    calm, _ = replayed(trace, tmp_path / "calm", "--pods", "4")
    assert drained["hit_rate"] < calm["hit_rate"]


def test_pods_join_and_another_configuration_holds_from_an_instant_on(trace, tmp_path):
    """What joins is used from then on; what was configured decides from then on."""
    text = """\
[[pods]]
count = 2

[[events]]
kind = "join"
at_s = 60
startup_s = 20

[[events]]
kind = "drain"
at_s = 100
pods = [0]

[[events]]
kind = "configure"
at_s = 150
config = "only-queues.yaml"
"""
    (tmp_path / "only-queues.yaml").write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n"
    )
    told, requests = replayed(
        trace, tmp_path / "out", "--scenario", written(tmp_path, text), "--replicas", "2"
    )
    assert told["requests"]["complete"] == 6_000
    assert share_of(requests, "pod-2", 0, 81) == 0
    assert share_of(requests, "pod-2", 85, 100) > 0.05
    assert share_of(requests, "pod-0", 101.1, 240) == 0
    predicted = requests["predicted_cached_tokens"]
    assert predicted[requests["arrival_s"] < 150].mean() > 500
    assert not predicted[requests["arrival_s"] > 150.1].any()


def test_a_scenario_that_does_not_go_with_the_flags_is_refused(trace, tmp_path, capsys):
    """One sentence, exit code 2; a file that cannot be read is exit code 1."""
    joins = written(tmp_path, "[[events]]\nkind = 'join'\nat_s = 1\n[[pods]]\ncount = 2")
    assert main(["replay", str(trace), "--scenario", str(joins), "--pods", "4"]) == 2
    assert "made.toml defines the pods: leave out --pods" in capsys.readouterr().err
    assert main(["replay", str(trace), "--scenario", str(joins), "--faults-per-hour", "1"]) == 2
    assert "leave out --faults-per-hour" in capsys.readouterr().err
    written(tmp_path, SCALED.replace("labels", "# labels"))
    assert main(["replay", str(trace), "--scenario", str(joins), "--faults-per-hour", "1"]) == 2
    assert "leave out --faults-per-hour" in capsys.readouterr().err
    written(tmp_path, "[[events]]\nkind = 'configure'\nat_s = 1\nconfig = 'default'")
    random = ["--config", "random"]
    assert main(["replay", str(trace), "--scenario", str(joins), *random]) == 2
    assert "made.toml configures pickers, and random has no" in capsys.readouterr().err
    assert main(["replay", str(trace), "--scenario", str(tmp_path / "no.toml")]) == 1
    assert "no.toml: No such file" in capsys.readouterr().err


def test_a_comparison_plays_the_same_scenario_to_all(trace, tmp_path):
    """In other processes too."""
    out = tmp_path / "out"
    arguments = ["compare", trace, "--config", "default", "--config", "random", "--seeds", "1",
                 "--requests", "1000", *example("slow-pod"), "--out", out]  # fmt: skip
    assert main([str(argument) for argument in arguments]) == 0
    summary = json.loads((out / "summary.json").read_bytes())
    assert summary["conditions"]["scenario"] == "slow-pod.toml"
    assert summary["conditions"]["pods"] == 4
    assert "| scenario of incidents | slow-pod.toml |" in (out / "report.md").read_text()


def test_every_kind_of_event_is_documented():
    """And every key of the tables that there is one of."""
    page = (EXAMPLES.parents[1] / "simulator.md").read_text()
    keys = (*AutoscalerSettings.__struct_fields__, *Pickers.__struct_fields__)
    assert [told for told in (*EVENTS, *keys) if f"`{told}`" not in page] == []


def test_an_autoscaler_follows_the_load(trace, tmp_path):
    """More pods while four times as many requests come, fewer after it; all of them are answered."""
    text = (EXAMPLES / "autoscaler.toml").read_text()
    # The requests of this trace are shorter.
    assert "target = 48" in text
    file = written(tmp_path, text.replace("target = 48", "target = 16"))
    told, requests = replayed(trace, tmp_path / "out", "--scenario", file)
    assert told["requests"]["complete"] == 6_000
    pool = told["pool"]
    timeline = told["timeline"]
    counts = dict(zip(timeline["time_s"], timeline["pod_count"], strict=True))
    (settings,) = scenario_in(file, kind()).autoscalers
    assert pool["autoscaled"] is True
    assert pool["pods_min"] == settings.pods_min
    assert pool["pods_min"] < pool["pods_max"] <= settings.pods_max
    assert counts[max(counts)] < pool["pods_max"]
    assert pool["pods_mean"] == pytest.approx(sum(counts.values()) / len(counts), rel=0.03)
    assert pool["pod_hours"] == pytest.approx(pool["pods_mean"] * max(counts) / 3600, rel=0.03)
    late = {name for name in set(requests["pod"]) if int(name[4:]) >= settings.pods_min}
    first_s = {name: requests["arrival_s"][requests["pod"] == name].min() for name in late}
    assert len(late) == pool["pods_max"] - pool["pods_min"]
    assert all(at >= 60 + settings.startup_s for at in first_s.values())
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"| pods | {pool['pods_min']} to {pool['pods_max']}, mean " in report
    assert "| pod-hours |" in report
    assert "Number of pods that start, serve" in (tmp_path / "out" / "report.html").read_text()


def test_a_comparison_under_an_autoscaler_tells_pod_hours(trace, tmp_path):
    """They are what a policy costs; without an autoscaler all have the same, and none are told."""
    arguments = ["compare", trace, "--config", "default", "--config", "round-robin", "--seeds", "1",
                 "--requests", "2500", *example("autoscaler"), "--out", tmp_path / "out"]  # fmt: skip
    assert main([str(argument) for argument in arguments]) == 0
    summary = json.loads((tmp_path / "out/summary.json").read_bytes())
    for name, config in summary["configs"].items():
        (run,) = [one for one in summary["runs"] if one["config"] == name]
        assert config["figures"]["pod_hours"]["value"] == run["pool"]["pod_hours"] > 0
    assert "| pod-hours |" in (tmp_path / "out/report.md").read_text()


ROLES = """\
[[pods]]
count = 2
labels = { "llm-d.ai/role" = "prefill" }

[[pods]]
labels = { "llm-d.ai/role" = "decode" }

[[pods]]
labels = { "llm-d.ai/role" = "both" }
profile = "llama-3.1-70b-h100-tp4"
speed = 0.5

[[pods]]
"""


@pytest.mark.parametrize(
    ("role", "pods"),
    [("decode", {"pod-2", "pod-3", "pod-4"}), ("prefill", {"pod-0", "pod-1", "pod-3"})],
)
def test_filters_read_the_roles_of_pods(trace, tmp_path, role, pods):
    """As live: who has no role decodes, and does not prefill."""
    config = tmp_path / f"{role}.yaml"
    config.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        f"- type: {role}-filter\n- type: random-picker\n"
        "schedulingProfiles:\n- name: default\n  plugins:\n"
        f"  - pluginRef: {role}-filter\n  - pluginRef: random-picker\n"
    )
    _, requests = replayed(
        trace, tmp_path / "out", "--scenario", written(tmp_path, ROLES), "--config", config,
        "--requests", "300",
    )  # fmt: skip
    assert set(requests["pod"]) == pods
    own = {name: requests["tpot_s"][requests["pod"] == name].astype(float) for name in pods}
    others = np.concatenate([own[name] for name in pods - {"pod-3"}])
    assert own["pod-3"].mean() > 2 * others.mean()


VIEWS = """\
[pickers]
count = 2
HEARS

[[events]]
kind = "scrapes"
from_s = 5
to_s = 30
loss = 1.0
pickers = [1]
"""


@pytest.mark.parametrize("hears", ["", "peer_delay_s = 0.005"])
def test_a_picker_that_hears_nothing_is_wrong_about_the_load(tmp_path, hears):
    """Its pages are old; who hears the other knows of all that is in flight, who does not of half."""
    scenario = read(tmp_path, VIEWS.replace("HEARS", hears))
    plan = scenario.pickers
    one = cluster(
        arrivals(600, rate=25.0, output=(60, 140)), replicas=plan.pickers.count, peers=plan.peers,
        scrape_troubles=scenario.scrape_troubles,
    )  # fmt: skip
    known, ages_s = [], {0: [], 1: []}

    def look():
        now = one.loop.now
        for request in one.clients.requests.values():
            if request.routed_at == now > 10:
                ages_s[request.replica].append(request.metrics_age_s)
                if request.replica == 1:
                    routed = sum(other.route is not None for other in one.clients.requests.values())
                    believed = request.route.decision.leg.candidates.inflight_requests.sum()
                    known.append(believed / routed)

    one.run(look)
    assert max(ages_s[0]) < 0.5
    assert min(ages_s[1]) > 5.0
    assert len(known) > 100
    share = np.mean(known)
    assert share > 0.95 if hears else 0.3 < share < 0.7


def test_a_gateway_that_goes_elsewhere_is_told_of(trace, tmp_path):
    """How often, in the summary, the report and each decision."""
    text = """\
[pickers]
fallback_endpoints_max = 2

[[events]]
kind = "reschedule"
from_s = 5
to_s = 15
share = 0.5
"""
    out = tmp_path / "out"
    told, _ = replayed(
        trace, out, "--scenario", written(tmp_path, text), "--requests", "500", "--decisions",
        "--check",
    )  # fmt: skip
    assert told["requests"]["complete"] == 500
    assert 80 < told["rescheduled"] < 170
    named = f"| served by another pod than the first named | {told['rescheduled']} |"
    assert named in (out / "report.md").read_text()
    lines = [json.loads(line) for line in (out / "decisions.jsonl").read_text().splitlines()]
    elsewhere = [line for line in lines if line["served"] is not None]
    assert len(elsewhere) == told["rescheduled"]
    assert all(line["served"] != line["endpoint"] for line in elsewhere)


def test_a_picker_restarts_under_load(trace, tmp_path):
    """With nobody else there clients ask again until it is back; it has forgotten what pods hold."""
    text = """\
[[events]]
kind = "picker-restart"
at_s = 20
startup_s = 5

[clients]
retries = 5
"""
    told, requests = replayed(
        trace, tmp_path / "out", "--scenario", written(tmp_path, text), "--requests", "1000",
        "--config", "weighted-scores",
    )  # fmt: skip
    assert told["requests"]["complete"] == 1_000
    assert told["retries"] > 100
    predicted = requests["predicted_cached_tokens"]
    arrived_s = requests["arrival_s"]
    before = predicted[(arrived_s > 15) & (arrived_s < 20)].mean()
    after = predicted[(arrived_s > 20) & (arrived_s < 25)].mean()
    assert after < 0.8 * before
