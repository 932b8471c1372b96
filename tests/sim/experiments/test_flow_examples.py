"""The examples of flow control pass check-config, and serve a burst in the simulator."""

from pathlib import Path

import pytest
from msgspec import structs

from epp import __main__ as epp_command
from epp.core.types import RefusalReason
from sim.cluster.simulated_request import Fate
from tests.sim.made import arrivals, kind, ran

FOLDER = Path(__file__).parents[3] / "docs/examples/flow-control"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
WAITING = {"guide", "max-saturation", "program-aware", "soft-reflective-ceiling"}
"""Names of the examples with which requests of this burst wait. The sessions of `agents` are small."""
PRIORITIES = (100, 0, -10)


def burst():
    """300 requests within three seconds, of three priorities and three agents for each."""
    for one in arrivals(300, rate=100.0, output=(8, 32)):
        number = one.index % 9
        yield structs.replace(
            one,
            priority=PRIORITIES[number % 3],
            session=f"agent-{number}",
            headers=(("x-llm-d-inference-fairness-id", f"tenant-{number // 3}"),),
        )


def test_every_example_is_here():
    assert [file.stem for file in EXAMPLES] == [
        "agents",
        "guide",
        "max-saturation",
        "probabilistic-admitter",
        "program-aware",
        "soft-reflective-ceiling",
    ]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_passes_check_config(file, capsys):
    assert epp_command.main(["check-config", str(file), "--explain"]) == 0
    explained = capsys.readouterr().out
    assert ("queue: requests wait in the picker" in explained) == (
        file.stem != "probabilistic-admitter"
    )


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_serves_a_burst(file):
    """On one pod with room for 8 requests at once. Nothing is left waiting."""
    pod = kind(max_num_seqs=8)
    ended, cluster = ran(list(burst()), policy=str(file), pods=(pod,))
    assert len(ended) == 300
    for queue in cluster.pickers.queues:
        assert queue.control.requests == 0
    waited = sum(one.place is not None for one in ended)
    assert bool(waited) == (file.stem in WAITING), f"{waited} requests waited"
    refused = [one for one in ended if one.fate is Fate.REFUSED]
    assert all(one.fate in {Fate.COMPLETE, Fate.REFUSED} for one in ended)
    assert {one.refusal.reason for one in refused} <= {
        RefusalReason.SATURATED,
        RefusalReason.WAIT_EXPIRED,
    }
    # A request of a positive priority never had to give way.
    assert all(one.arrival.priority <= 0 for one in refused)
    if file.stem == "probabilistic-admitter":
        assert {one.arrival.priority for one in refused} == {-10}
