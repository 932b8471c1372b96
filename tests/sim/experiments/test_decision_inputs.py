"""What a decision went by is in its line: an outsider finds the same choice from that alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from epp.configuration.config import DEFAULT_CONFIG
from epp.core.knowledge.candidates import NUMBERS
from epp.plugins.added_time import AddedTime
from epp.plugins.cost import scores_of_cost
from sim.__main__ import main
from tests.sim.experiments.test_replay import written

SCRIPT = Path(__file__).parents[3] / "docs/examples/recompute.py"
SCORER = AddedTime.type_name
WORKLOADS = {
    # More than the pods' memory holds, at once: queues, and what they want of it.
    "crowded": (
        {"blocks": (20, 40), "groups": 60, "output": (20, 40)},
        ("--pods", "2", "--profile", "llama-3.1-8b-rtx-4090-tp1", "--speed", "20"),
    ),
    # Reports come later than they are gone by, and some never.
    "late": ({"output": (40, 80)}, ("--pods", "4", "--scrape-interval", "3", "--speed", "3")),
    # Pods that differ, pickers that hear each other, and deaths.
    "uneven": (
        {"output": (10, 60)},
        ("--pods", "3", "--profile", "llama-3.1-8b-h100-tp1", "--profile", "qwen3-32b-h100-tp2",
         "--replicas", "2", "--peer-delay", "0.01", "--faults-per-hour", "600"),
    ),
}  # fmt: skip


def replayed(tmp_path, workload, *arguments, count=120):
    fields, flags = WORKLOADS[workload]
    trace, out = written(tmp_path / "made.jsonl", count, **fields), tmp_path / "out"
    given = [str(trace), "--block-tokens", "64", *flags, "--inputs", *arguments, "--out", str(out)]
    assert main(["replay", *given]) == 0
    return out / "decisions.jsonl"


def recomputed(decisions):
    """By Python alone: no module of this project is to be found."""
    return subprocess.run(
        [sys.executable, "-IS", SCRIPT, decisions], capture_output=True, text=True, check=False
    )


def lines_of(decisions):
    return [json.loads(line) for line in decisions.read_text().splitlines()]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_an_outsider_finds_every_choice_again(tmp_path, workload):
    """By the formula on paper, to the last billionth of its seconds."""
    decisions = replayed(tmp_path, workload)
    done = recomputed(decisions)
    assert done.stdout.startswith("0 of "), done.stdout + done.stderr
    assert done.returncode == 0
    assert float(done.stdout.split("differ by ")[1].split()[0]) < 1e-6


def test_another_rule_is_noticed(tmp_path):
    """The formula would choose otherwise here and there, or nothing would be shown by it."""
    config = tmp_path / "other.yaml"
    config.write_text(
        DEFAULT_CONFIG.replace(
            f"type: {SCORER}", f"type: {SCORER}\n  parameters: {{evictionCost: 0, decodeTokens: 9}}"
        )
    )
    done = recomputed(replayed(tmp_path, "late", "--config", str(config)))
    assert done.returncode == 1, done.stdout
    assert "by the formula pod-" in done.stdout


def test_a_crowded_pool_tries_every_part(tmp_path):
    """Those that the other workloads may leave at nothing: or the script would be right without them."""
    parts = [
        pod["costs"][SCORER]
        for line in lines_of(replayed(tmp_path, "crowded"))
        for pod in line["candidates"]
    ]
    for name in ("queue", "prefill", "delay of others", "evictions", "decoding", "memory"):
        assert any(one[name] > 0 for one in parts), name


def test_adapters_are_among_what_was_known(tmp_path):
    """Slots and residents, and whether the adapter of the request is there."""
    trace, out = tmp_path / "lora.jsonl", tmp_path / "out"
    made = [
        "trace",
        "generate",
        "lora-mix",
        "--rate",
        "20",
        "--requests",
        "100",
        "--duration",
        "20",
    ]
    assert main([*made, "--out", str(trace)]) == 0
    flags = ["--pods", "3", "--max-loras", "2", "--inputs", "--out", str(out)]
    assert main(["replay", str(trace), *flags]) == 0
    decisions = out / "decisions.jsonl"
    done = recomputed(decisions)
    assert done.stdout.startswith("0 of 100 choices differ"), done.stdout
    told = [pod for line in lines_of(decisions) for pod in line["candidates"]]
    assert {pod["costs"][SCORER]["adapter"] for pod in told} == {0.0, 1.0, 1.5}
    for pod in told:
        assert pod["known"]["adapters"] is None or pod["known"]["adapters"]["slots_max"] == 2


def test_a_line_has_what_the_scorer_went_by(tmp_path):
    """The same numbers for all, the scores that follow from the costs, and the rest as without."""
    decisions = replayed(tmp_path, "late", count=60)
    noted = lines_of(decisions)
    plain = tmp_path / "plain"
    flags = WORKLOADS["late"][1]
    trace = str(tmp_path / "made.jsonl")
    assert main(["replay", trace, "--block-tokens", "64", *flags, "--out", str(plain)]) == 0
    for line, without in zip(noted, lines_of(plain / "decisions.jsonl"), strict=True):
        costs = [sum(pod["costs"][SCORER].values()) for pod in line["candidates"]]
        scores = [pod["parts"][SCORER] for pod in line["candidates"]]
        assert scores == pytest.approx(scores_of_cost(np.array(costs)).tolist(), abs=1e-6)
        for pod in line["candidates"]:
            assert set(pod["known"]) == {*NUMBERS, "adapters"} - {"matched_blocks"}
            assert pod["known"]["inflight_requests"] >= 0
            del pod["known"], pod["costs"]
        for name in ("block_tokens", "prompt_tokens", "output_tokens_max", "answer_tokens"):
            del line[name]
        assert line == without


def test_a_policy_without_costs_has_inputs_too(tmp_path):
    """What was known is known; nobody tells what it costs."""
    decisions = replayed(tmp_path, "late", "--config", "weighted-scores", count=20)
    for line in lines_of(decisions):
        assert all(pod["known"] and not pod["costs"] for pod in line["candidates"])
    assert lines_of(replayed_into(tmp_path, "random"))[0]["candidates"] == []


def replayed_into(tmp_path, config):
    folder = tmp_path / config
    folder.mkdir()
    return replayed(folder, "late", "--config", config, count=20)
