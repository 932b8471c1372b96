"""The table of pickers by what they share, small."""

import json

import pytest
from msgspec import structs

from sim.commands import run
from sim.experiments.jobs import run_job
from sim.experiments.replicas import (
    AGREEMENT,
    ARMS,
    NEAR,
    NOTHING,
    ONE_PICKER,
    PEERS,
    TRAFFIC,
    Arm,
    Traffic,
    replicas_experiment,
)
from sim.traces.capture import CaptureWriter
from tests.sim.made import arrivals, kind

ARMS_SMALL = (
    Arm(replicas=1, sharing=ONE_PICKER),
    Arm(replicas=4, sharing=NOTHING),
    Arm(replicas=4, sharing=AGREEMENT),
    Arm(replicas=4, sharing=NEAR),
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "heads.jsonl"
    with path.open("wb") as file:
        writer = CaptureWriter(file, source="test")
        for one in arrivals(200, rate=10.0, groups=30, blocks=(30, 31)):
            # A capture wants an id for each full block.
            tokens = 64 * len(one.blocks) + 1
            writer.write_arrival(structs.replace(one, session="", prompt_tokens=tokens))
    return path


def test_each_workload_runs_under_each_arm_with_each_seed(trace, tmp_path):
    """Rows come in the order of the table; those of one seed that are there are told."""
    made = Traffic(name="hot-spot", rate_per_s=2, duration_s=5)
    told = Traffic(name="heads", file=str(trace))
    experiment = replicas_experiment((made, told), ARMS_SMALL, (1, 2), tmp_path)
    assert len(experiment.jobs) == 2 * len(ARMS_SMALL) * 2
    assert [job.cluster.replicas for job in experiment.jobs[:6]] == [1, 1, 4, 4, 4, 4]
    assert experiment.jobs[0].trace != experiment.jobs[1].trace, "another seed, other traffic"
    assert experiment.jobs[0].trace == experiment.jobs[2].trace, "the same for every arm"
    rows = experiment.summary({0: run_job(experiment.jobs[0])}, False).rows
    assert [(row.workload, row.replicas, row.seeds) for row in rows] == [("hot-spot", 1, 1)]


def test_the_table_shows_that_agreement_helps_and_peers_more(trace, tmp_path):
    """By what the published table is about: hits compared with those of one picker."""
    told = Traffic(name="heads", file=str(trace))
    experiment = replicas_experiment((told,), ARMS_SMALL, (1,), tmp_path)
    results = {number: run_job(job) for number, job in enumerate(experiment.jobs)}
    summary = experiment.summary(results, True)
    one, nothing, agreement, near = (row.hit_rate.mean for row in summary.rows)
    assert agreement > 0.9 * one
    assert near > 0.97 * one
    assert min(agreement, near) > nothing + 0.1
    head, first, *_ = experiment.table(summary).splitlines()
    assert head.split()[:3] == ["workload", "pickers", "sharing"]
    assert "100.0%" in first
    assert "1.00 times" in first
    report = experiment.reports(summary, results)["report.md"]
    assert f"| heads | 4 | {AGREEMENT} |" in report
    assert f"| heads | 4 | {NEAR} |" in report


def test_what_the_command_runs_is_distinct_and_shares_what_it_says():
    """Nothing is shared only where the configuration says so, too."""
    assert len({(arm.replicas, arm.sharing, arm.assignment) for arm in ARMS}) == len(ARMS)
    assert len({workload.name for workload in TRAFFIC}) == len(TRAFFIC)
    for arm in ARMS:
        peers = arm.cluster(kind()).peers
        assert (peers is None) is (arm.sharing in (NOTHING, ONE_PICKER, AGREEMENT))
        assert peers is PEERS.get(arm.sharing)
    blind, agreeing = (
        Arm(replicas=2, sharing=sharing).policy.load().profile.scorers[0].plugin
        for sharing in (NOTHING, AGREEMENT)
    )
    assert (blind.peer_belief, agreeing.peer_belief) == (0.0, 0.8)


def test_the_command_writes_what_it_shows(trace, tmp_path, monkeypatch, capsys):
    """Of a trace file too; a summary for programs and a table for people."""
    monkeypatch.setattr("sim.experiments.replicas.TRAFFIC", ())
    monkeypatch.setattr("sim.experiments.replicas.ARMS", ARMS_SMALL[:2])
    out = tmp_path / "out"
    assert run(["replicas", str(trace), "--seeds=1", "--workers=1", f"--out={out}"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["complete"]
    assert [row["sharing"] for row in summary["rows"]] == [ONE_PICKER, NOTHING]
    assert "seeds 1 to 1" in capsys.readouterr().out
    assert (out / "report.md").read_text().count("| heads |") == 2
