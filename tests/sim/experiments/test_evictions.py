"""A run in which a picker evicts batch requests, from the trace to the report."""

import json

import pytest

from epp.plugins.strategy import config_of, producer, step
from sim.__main__ import main

CONFIG = config_of(
    producer("concurrency-detector", maxConcurrency=1), step("added-time-scorer")
) + (
    "saturationDetector: {pluginRef: concurrency-detector}\n"
    "featureGates: [flowControl]\n"
    "flowControl: {enableEviction: true}\n"
)
BATCH = {"body": {"model": "m", "prompt": "a word " * 40_000}, "priority": -1}
URGENT = {"body": {"model": "m", "prompt": "one"}, "priority": 1}


@pytest.mark.parametrize("retries", [0, 3])
def test_evictions_are_counted_also_of_requests_that_are_sent_again(tmp_path, retries):
    trace, config, out = (tmp_path / name for name in ("trace.jsonl", "evicting.yaml", "out"))
    requests = [BATCH | {"time_s": 0.0}, URGENT | {"time_s": 0.2}]
    trace.write_text("".join(json.dumps(one | {"output_tokens": 4}) + "\n" for one in requests))
    config.write_text(CONFIG)
    scenario = tmp_path / "retries.toml"
    scenario.write_text(f"[clients]\nretries = {retries}\n")
    arguments = ("replay", trace, "--config", config, "--pods", 1, "--scenario", scenario)
    more = ("--warm-up", 0, "--no-decisions", "--check", "--out", out)
    assert main([str(one) for one in (*arguments, *more)]) == 0
    told = json.loads((out / "summary.json").read_bytes())
    assert told["evicted"] == 1
    assert told["refusals"] == ({} if retries else {"evicted": 1})
    assert told["requests"]["complete"] == (2 if retries else 1)
    assert "| running requests evicted | 1 |" in (out / "report.md").read_text()
