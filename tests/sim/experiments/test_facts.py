"""What is known of the Mooncake conversation hour must come out (own replays by others, public).

The suite replays the first ten minutes; `make validate` replays the whole hour over five seeds.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.cluster.policies import PolicySource
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.run import Run, RunSettings
from sim.measurement.measures import mean

SHORT_REQUESTS = 2_000
WEIGHTED = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
    weight: {prefix}
  - pluginRef: queue-scorer
    weight: {queue}
  - pluginRef: kv-cache-utilization-scorer
    weight: {kv}
  - pluginRef: max-score-picker
"""


@pytest.fixture(scope="module")
def conversation(shared_data):
    path = shared_data / "traces" / "mooncake_conversation.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


def ttft_mean_s(trace, weights, *, seed=1, requests=None):
    """Mean TTFT of prefix : queue : KV on eight pods of the default profile, and the run."""
    prefix, queue, kv = weights
    text = WEIGHTED.format(prefix=prefix, queue=queue, kv=kv)
    one = Run(
        RunSettings(
            trace=str(trace),
            policy=PolicySource(name=":".join(map(str, weights)), text=text, source="test"),
            cluster=ClusterSettings(pods=(PodKind.of(find_profile(DEFAULT_PROFILE)),) * 8),
            seed=seed,
            requests_max=requests,
        )
    )
    one.run()
    return mean(one.measures.series().ttft_s), one.measures


def test_prefix_alone_sends_everything_to_one_pod(conversation):
    """Every prompt begins with the same block: without a load term the first pod gets it all."""
    balanced_s, _ = ttft_mean_s(conversation, (3, 2, 2), requests=1_000)
    collapsed_s, measures = ttft_mean_s(conversation, (1, 0, 0), requests=1_000)
    assert collapsed_s > 20 * balanced_s
    assert max(load.requests for load in measures.pods.values()) > 900


def test_two_good_weightings_are_close_over_ten_minutes(conversation):
    """3:2:2 and 1:1:1 over two seeds; the whole hour over five is in `make validate`."""
    means = {
        weights: [
            ttft_mean_s(conversation, weights, seed=seed, requests=SHORT_REQUESTS)[0]
            for seed in (1, 2)
        ]
        for weights in ((3, 2, 2), (1, 1, 1))
    }
    first, other = (sum(found) / len(found) for found in means.values())
    assert other == pytest.approx(first, rel=0.15)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_prefix_alone_collapses_over_the_hour(conversation):
    """Thousands of seconds of mean TTFT on one pod, under a second on eight."""
    balanced_s, balanced = ttft_mean_s(conversation, (3, 2, 2))
    collapsed_s, collapsed = ttft_mean_s(conversation, (1, 0, 0))
    assert 0.3 < balanced_s < 0.8
    assert 0.12 < balanced.summary().hit_rate < 0.18
    assert 1_000 < collapsed_s < 4_000
    pods = [f"pod-{number}" for number in range(8)]
    assert collapsed.summary(pods).imbalance.requests.max_over_mean > 7.9


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_two_good_weightings_are_within_five_per_cent_over_the_hour(conversation):
    """3:2:2 and 1:1:1, mean TTFT over five seeds."""
    means = [
        sum(ttft_mean_s(conversation, weights, seed=seed)[0] for seed in range(1, 6)) / 5
        for weights in ((3, 2, 2), (1, 1, 1))
    ]
    assert means[1] == pytest.approx(means[0], rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_million_requests_stream_through_in_bounded_memory(tmp_path):
    """Less than 500 MB at the peak: neither the trace nor the requests are held."""
    trace = tmp_path / "million.jsonl"
    with trace.open("w") as file:
        for index in range(1_000_000):
            blocks = [index % 500, 1_000 + index]
            file.write(
                f'{{"timestamp": {index * 2}, "input_length": 1024, "output_length": 2, '
                f'"hash_ids": {blocks}}}\n'
            )
    code = (
        "import resource, sys; from sim.__main__ import main; "
        f"main(['replay', {str(trace)!r}, '--config', 'round-robin', '--pods', '64', "
        f"'--out', {str(tmp_path / 'out')!r}]); "
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    root = Path(__file__).parents[3]
    environment = dict(os.environ) | {"PYTHONPATH": ":".join([str(root), *sys.path])}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert int(told.stdout.rsplit("peak ", 1)[1]) < 500
