"""Scenario files: what they say, what is refused, and three incidents from the file to the report."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from sim.__main__ import main
from sim.caches.names import cache_named, cache_spelt
from sim.cluster.clients import Clients
from sim.cluster.cluster import ClusterSettingsError
from sim.cluster.incidents import Configure, Join, Restart, Slow
from sim.cluster.scraping import ScrapeTrouble
from sim.cluster.simulated_pod import PodKind
from sim.experiments.scenario_file import EVENTS, FILE_BYTES_MAX, ScenarioError, scenario_in
from sim.traces.capture import CaptureWriter
from tests.sim.made import arrivals, kind

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

[clients]
retries = 2
timeout_s = 30
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
    assert scenario.clients == Clients(retries=2, timeout_s=30)
    scenario.check(pods=3, pickers=2)


def test_pods_keep_prompts_each_in_their_way(tmp_path):
    """As the table says, else as the flag does."""
    text = '[[pods]]\ncache = "kronk-imc-v1:slots=2"\n[[pods]]\ncache = "vllm"\n[[pods]]\n'
    usual = PodKind.of(kind().profile, cache=cache_named("mlx-disk"))
    pods = scenario_in(written(tmp_path, text), usual).pods
    assert [cache_spelt(pod.cache) for pod in pods] == ["kronk-imc-v1:slots=2", "vllm", "mlx-disk"]


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
        ("[[event]]\nkind = 'leave'", "unknown table event, did you mean `events`?"),
        ("pods = 3", "pods: expected tables under [[pods]]"),
        ("[[events]]\nat_s = 1", "[[events]] 1: expected a kind of join, leave"),
        ("[[events]]\nkind = 'leave'\nat_s = 1\npod = [1]", "1, leave: unknown key pod, did you mean"),
        ("[[events]]\nkind = 'leave'\nat_s = -1", "1, leave: Expected `float` >= 0"),
        ("[[events]]\nkind = 'leave'\nat_s = nan", "1, leave: Expected `float`"),
        ("[[events]]\nkind = 'leave'", "missing required field `at_s`"),
        ("[[events]]\nkind = 'slow'\nfrom_s = 2\nto_s = 1\nfactor = 2", "expected to_s after from_s"),
        ("[[events]]\nkind = 'scrapes'\nfrom_s = 1\nto_s = 2", "expected loss or more_s above 0"),
        ("[[events]]\nkind = 'configure'\nat_s = 1\nconfig = 'random'", "got the baseline 'random'"),
        ("[[events]]\nkind = 'configure'\nat_s = 1\nconfig = 'no'", "no is neither a file nor one"),
        ("[[pods]]\nprofile = 'no'", "[[pods]] 1: profile: No profile 'no'"),
        ("[[pods]]\ncache = 'lru'", "[[pods]] 1: cache: No cache 'lru'"),
        ("[[pods]]\ncount = 1001", "<= 1000"),
        ("[[rates]]\nfrom_s=0\nto_s=9\nfactor=2\n[[rates]]\nfrom_s=8\nto_s=10\nfactor=2", "overlap"),
        ("[[rates]]\nfrom_s=0\nto_s=9\nfactor=0", "[[rates]] 1: Expected `float` >= 0.001"),
        ("[clients]\nretry = 2", "[clients]: unknown key retry, did you mean `retries`?"),
        ("clients = 2", "clients: expected a table [clients]"),
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
        (
            "kind='slow'\nfrom_s=1\nto_s=5\nfactor=2\n[[events]]\nkind='slow'\nfrom_s=4\nto_s=6\nfactor=3\npods=[1]",
            "slow at 4 s: expected the one of pod 1 before to have ended",
        ),
        (
            "kind='join'\nat_s=5\nstartup_s=5\n[[events]]\nkind='leave'\nat_s=6\npods=[4]",
            "got 4, which joins at 10 s",
        ),
    ],
)  # fmt: skip
def test_who_is_not_there_is_refused(tmp_path, text, said):
    scenario = read(tmp_path, f"[[events]]\n{text}")
    with pytest.raises(ClusterSettingsError, match=r"^made\.toml: ") as refused:
        scenario.check(pods=4, pickers=1)
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
    assert "| sent again |" in (tmp_path / "again" / "report.md").read_text()
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
    assert share_of(requests, "pod-2", 85, 100) > 0.1
    assert share_of(requests, "pod-0", 101.1, 240) == 0
    predicted = requests["predicted_cached_tokens"]
    assert predicted[requests["arrival_s"] < 150].mean() > 500
    assert not predicted[requests["arrival_s"] > 150.1].any()


def test_a_scenario_that_does_not_go_with_the_flags_is_refused(trace, tmp_path, capsys):
    """One sentence, exit code 2; a file that cannot be read is exit code 1."""
    joins = written(tmp_path, "[[events]]\nkind = 'join'\nat_s = 1\n[[pods]]\ncount = 2")
    assert main(["replay", str(trace), "--scenario", str(joins), "--pods", "4"]) == 2
    assert "made.toml says which pods there are: leave out --pods" in capsys.readouterr().err
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
    assert "| what happens when | slow-pod.toml |" in (out / "report.md").read_text()


def test_every_kind_of_event_is_documented():
    page = (EXAMPLES.parents[1] / "simulator.md").read_text()
    assert [kind_of for kind_of in EVENTS if f"`{kind_of}`" not in page] == []
