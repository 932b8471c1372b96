"""Runs with pods that have roles: their flags, figures, files and reports."""

import argparse
import json
from collections import Counter

import pytest

from sim.__main__ import main
from sim.cluster.check import checker
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettingsError
from sim.cluster.simulated_request import Fate
from sim.experiments.run import Run
from sim.experiments.run_options import add_run_options, conditions, run_settings
from sim.measurement.measures import ttft_of
from sim.traces.capture import CaptureWriter
from tests.sim.made import arrivals
from tests.sim.staged import DISAGGREGATED

ROLES = ("--roles", "prefill=1,decode=2")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "made.jsonl"
    with path.open("wb") as file:
        writer = CaptureWriter(file, source="made")
        for arrival in arrivals(60, rate=10):
            writer.write_arrival(arrival)
    (tmp_path / "staged.yaml").write_text(DISAGGREGATED)
    return path


def settings_of(trace, *flags, policy="staged"):
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    source = policy_source(str(trace.parent / "staged.yaml") if policy == "staged" else policy)
    return run_settings(parser.parse_args([str(trace), *flags]), source, 1)


def ran(trace, *flags, policy="staged"):
    """Return the requests by number, and the summary of the run."""
    ended = []
    one = Run(settings_of(trace, *flags, policy=policy), [ended.append])
    one.cluster.run(checker(one.cluster))
    return sorted(ended, key=lambda request: request.sequence), one.summary()


def test_flags_give_pods_roles_and_a_network(trace):
    settings = settings_of(trace, *ROLES, "--kv-link", "5:0.001", "--kv-nics", "4")
    pods, transfer = settings.cluster.pods, settings.cluster.kv_transfer
    assert [(pod.role, pod.nics) for pod in pods] == [("prefill", 4), ("decode", 4), ("decode", 4)]
    assert (transfer.link.bytes_per_s, transfer.concurrent) == (5e9, False)
    told = conditions(settings)
    assert told["roles"] == {"prefill": 1, "decode": 2}
    assert (told["kv_link"], told["kv_legs"]) == ("5 GB/s, 1 ms", "serial")
    assert "roles" not in conditions(settings_of(trace))
    assert settings_of(trace).cluster.kv_transfer is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--roles", "prefill=1,encode=1"), "expected roles of both, decode, prefill, prefill-dec"),
        (("--roles", "prefill"), "'prefill' has no number of pods above 0; expected prefill=COUNT"),
        (("--roles", "prefil=2"), "'prefil=2' names no role"),
        ((*ROLES, "--kv-link", "fast"), "expected one of nvlink"),
        ((*ROLES, "--kv-nics", "0"), "'0' is not an integer from 1 to 64"),
    ],
)
def test_wrong_flags_are_refused(trace, flags, says, capsys):
    with pytest.raises(SystemExit):
        settings_of(trace, *flags)
    assert says in capsys.readouterr().err


def test_flags_that_contradict_each_other_are_refused(trace, tmp_path):
    scenario = tmp_path / "pods.toml"
    scenario.write_text("[[pods]]\ncount = 2\n")
    for flags, says in (
        (("--kv-link", "nvlink"), "--kv-link needs --roles"),
        (("--kv-nics", "2"), "--kv-nics needs --roles"),
        ((*ROLES, "--pods", "3"), "--roles gives the number of pods: leave out --pods"),
        ((*ROLES, "--scenario", str(scenario)), "defines the pods: leave out --roles"),
        ((*ROLES, "--cache", "mlx-disk"), "KV transfers need vLLM's cache, got mlx-disk"),
    ):
        with pytest.raises(ClusterSettingsError) as refused:
            settings_of(trace, *flags)
        assert says in str(refused.value)


def test_a_summary_has_routes_legs_and_transfers(trace):
    requests, summary = ran(trace, *ROLES)
    stages = summary.stages
    routes = Counter(request.route.decision.account.route.value for request in requests)
    assert stages.routes == routes
    assert set(routes) == {"prefill-decode", "decode-only"}
    legs = [request for request in requests if request.handover is not None]
    assert stages.prefill_legs == stages.transfers == len(legs)
    tokens = sum(request.engine.fetched_tokens for request in legs)
    assert stages.transferred_tokens == tokens
    assert stages.transferred_bytes == tokens * 131_072
    parts = (stages.prefill_s, stages.reservation_s, stages.transfer_s, stages.other_s)
    ttft_s = sum(map(ttft_of, legs)) / len(legs)
    assert sum(part.mean for part in parts) == pytest.approx(ttft_s, rel=1e-4)
    assert min(part.mean for part in parts[::2]) > 0
    assert stages.refusals == {}
    assert stages.leases_expired == 0
    (prefill,) = stages.prefill_pods.values()
    assert set(stages.prefill_pods) == {"pod-0"}
    assert prefill.requests == len(legs)
    assert prefill.cached_tokens == sum(request.cached_tokens for request in legs)
    assert set(summary.pods) == {"pod-1", "pod-2"}


def test_a_decode_pod_computes_only_what_no_prefill_pod_computed(trace):
    requests, summary = ran(trace, *ROLES)
    own = sum(
        request.arrival.prompt_tokens - request.cached_tokens
        for request in requests
        if request.handover is None
    )
    loads = summary.pods.values()
    assert sum(load.prompt_tokens - load.cached_tokens for load in loads) == own


def test_a_run_without_roles_has_no_stages(trace):
    _, summary = ran(trace, policy="default")
    assert not summary.stages


def test_requests_without_a_prefill_pod_are_counted_by_stage(trace, tmp_path):
    scenario = tmp_path / "leaves.toml"
    scenario.write_text(
        '[[pods]]\nrole = "prefill"\n[[pods]]\nrole = "decode"\n'
        '[[events]]\nkind = "leave"\nat_s = 2\nrole = "prefill"\n'
    )
    requests, summary = ran(trace, "--scenario", str(scenario))
    refused = [request for request in requests if request.fate is Fate.REFUSED]
    assert summary.stages.refusals == {"prefill": len(refused)}
    assert refused
    assert summary.refusals == {"rejected-no-prefill-endpoints": len(refused)}


def test_each_role_has_an_autoscaler_of_its_own(trace, tmp_path):
    scaled = (
        '[[autoscaler]]\nmetric = "inflight-requests"\ntarget = 1\npods_max = 4\nstartup_s = 0.5\n'
        'interval_s = 1\nlabels = {{ "llm-d.ai/role" = "{}" }}\n'
    )
    scenario = tmp_path / "scaled.toml"
    scenario.write_text(
        '[[pods]]\nrole = "prefill"\n[[pods]]\nrole = "decode"\n'
        + scaled.format("prefill")
        + scaled.format("decode").replace("target = 1", "target = 0.2")
    )
    settings = settings_of(trace, "--scenario", str(scenario))
    one = Run(settings)
    one.run()
    assert Counter(pod.kind.role for pod in one.cluster.pods)["decode"] > 1
    assert one.summary().pool.autoscaled
    assert [told["labels"] for told in conditions(settings)["autoscaler"]] == [
        {"llm-d.ai/role": "prefill"},
        {"llm-d.ai/role": "decode"},
    ]


def test_a_baseline_decodes_on_decode_pods_and_prefills_round_robin(trace):
    requests, summary = ran(trace, "--roles", "prefill=2,decode=2", policy="round-robin")
    assert summary.stages.routes == {"prefill-decode": 60}
    assert {load.requests for load in summary.stages.prefill_pods.values()} == {30}
    assert {request.pod.number for request in requests} == {2, 3}


def test_files_and_reports_show_the_stages(trace, tmp_path, capsys):
    out = tmp_path / "out"
    config = str(trace.parent / "staged.yaml")
    assert main(["replay", str(trace), *ROLES, "--config", config, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("routes  ", "prefill-decode", "KV transfers", "waiting for decode memory"):
        assert words in shown
    lines = [json.loads(line) for line in (out / "decisions.jsonl").read_text().splitlines()]
    assert {(line["route"], line["prefill"]) for line in lines} == {
        ("prefill-decode", "pod-0"),
        ("decode-only", None),
    }
    report = (out / "report.md").read_text()
    assert "pod-0, prefill legs" in report
    assert "| pods by role | prefill: 1, decode: 2 |" in " ".join(report.split("\n")).replace(
        "  ", " "
    )
