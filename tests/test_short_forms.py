"""Short forms of the long targets that measure: each asserts signs and effects, not figures.

Each takes seconds where its target takes minutes, so that a harness that stopped working fails in
CI. Others stand beside what they test: tests/bench (chaos, attack, soak), tests/test_night.py, and
tests/sim/experiments/test_size.py, which compares `sim size` with a simulation of every pod count.
"""

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from docs import exact, ladders, walkthrough, walkthrough_cluster
from sim.__main__ import main as sim
from sim.measurement.summaries import LeaderboardSummary
from tests.chart.rendering import NAMESPACE, RELEASE, objects, one, rendered
from tests.chart.tools import HELM_3, ToolsError, tools_of
from tests.envoy.rig import ENVOY

CASE = "multi-turn"


def test_two_cells_of_the_leaderboard(tmp_path):
    """Where conversations come again, Homing's first tokens are sooner than those of round robin."""
    out = tmp_path / "board"
    strategies = "homing,round-robin-live"
    flags = ["--strategies", strategies, "--cases", CASE, "--seeds", "1", "--out", str(out)]
    assert sim(["leaderboard", *flags]) == 0
    summary = msgspec.json.decode((out / "summary.json").read_bytes(), type=LeaderboardSummary)
    assert summary.complete
    ttft_p90_s = {row.strategy: row.figures["ttft_p90_s"].value for row in summary.rows}
    assert ttft_p90_s["homing"] < ttft_p90_s["round-robin-live"]


def test_one_cell_of_what_exact_indexes_are_worth(capsys):
    """Pickers that do not share find more of what is cached where engines report it."""
    arms = (exact.APPROXIMATE, exact.EXACT)
    wanted = [(arm, exact.ALONE.of(arm)) for arm in arms]
    found = {cell.arm: cell.runs[0] for cell in exact.measure(wanted, seeds=[1], workers=2)}
    assert found["exact"].hit_rate > found["approximate"].hit_rate
    assert found["exact"].ttft_mean_s < found["approximate"].ttft_mean_s
    assert found["exact"].off_tokens < found["approximate"].off_tokens
    committed = {arm.name: exact.read().of(arm, exact.ALONE)[0] for arm in arms}
    report("exact", {name: (one, committed[name]) for name, one in found.items()})


def test_one_step_of_the_ladders():
    """At 35 requests a second prefix-aware pickers give out more than those that see load alone."""
    rate = 35.0
    arms = (ladders.PRECISE, ladders.LOAD)
    found = {one.arm: one.steps[0] for one in ladders.measure(arms, [rate], workers=2)}
    assert found["precise"].output_tokens_per_s > found["load"].output_tokens_per_s
    assert found["precise"].ttft_p90_s < found["load"].ttft_p90_s
    committed = ladders.read()
    at = ladders.RATES.index(int(rate))
    report("ladders", {arm.name: (found[arm.name], committed.of(arm)[at]) for arm in arms})


def report(page, cells):
    """Print the cells whose committed figures are of another tree."""
    for name, (now, then) in cells.items():
        if now != then:
            print(f"{page}, {name}: now {now}, committed {then}")


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
def test_the_first_steps_of_the_walkthrough(tmp_path):
    """Real picker and Envoy: both kinds of traffic are answered, and captured."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    walk = walkthrough.Walk(tmp_path, path)
    with walkthrough.served(walk):
        walkthrough.drive_before(walk, captured_s=6.0)
        walk.run("epp top --once")
    sent = 0
    for kind, *_ in walkthrough.KINDS:
        told = json.loads((tmp_path / f"{kind}-before" / "summary.json").read_text())
        assert told["requests"]["errors"] == 0
        sent += told["requests"]["sent"]
    assert sent > 20
    page = "\n".join(walk.page)
    assert "$ epp top --once" in page
    assert f"{walkthrough.PODS} of {walkthrough.PODS} ready" in page
    assert sim(["trace", "inspect", str(tmp_path / "capture")]) == 0


def test_the_first_steps_of_the_walkthrough_in_a_cluster(tmp_path):
    """Real Helm renders what the walk installs: a pool, a picker that captures, and its Envoy."""
    try:
        helm = tools_of(HELM_3) / "helm"
    except ToolsError as problem:
        pytest.skip(str(problem))
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(walkthrough_cluster.chart_values()))
    documents = objects(rendered(helm, values))
    assert one(documents, "InferencePool")["metadata"]["namespace"] == NAMESPACE
    deployment = one(documents, "Deployment")
    assert deployment["metadata"]["name"].startswith(RELEASE)
    pod = deployment["spec"]["template"]["spec"]
    containers = [*pod["containers"], *pod["initContainers"]]
    assert {"epp", "envoy"} <= {container["name"] for container in containers}
    (picker,) = (container for container in containers if container["name"] == "epp")
    assert any(argument.startswith("--capture") for argument in picker["args"])
