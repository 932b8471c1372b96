"""The rules of other routers for pods with roles, on the leaderboard's cases."""

from pathlib import Path

import pytest

from sim.cluster.policies import policy_source
from sim.experiments.leaderboard.cases import STAGED_CASES
from sim.experiments.leaderboard.cell import run_cell
from sim.experiments.leaderboard.command import cells_of

EXAMPLES = sorted((Path(__file__).parents[4] / "docs/examples/disaggregation").glob("*.yaml"))


def ran(path, case):
    (cell,) = cells_of([STAGED_CASES[case]], [policy_source(str(path))], range(1, 2), 40)
    return run_cell(cell).summary


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_rule_answers_every_request(path):
    """Rules of always prefill elsewhere; a threshold keeps what is mostly cached at the decode pod."""
    summary = ran(path, "split-mixed")
    assert summary.requests.complete == 40
    routes = summary.stages.routes
    if path.stem == "llm-d-2048":
        assert set(routes) == {"decode-only", "prefill-decode"}
    if path.stem in {"llm-d-always", "dynamo", "aibrix"}:
        assert routes == {"prefill-decode": 40}


def test_every_rule_of_the_page_is_there():
    assert {path.stem for path in EXAMPLES} == {
        "aibrix", "dynamo", "llm-d-16", "llm-d-2048", "llm-d-always", "time-25gbit",
    }  # fmt: skip


def test_the_slow_link_moves_as_much_and_takes_longer():
    (always,) = (path for path in EXAMPLES if path.stem == "llm-d-always")
    usual, slow = (ran(always, name) for name in ("split-long", "split-slow-link"))
    assert slow.stages.transferred_tokens == usual.stages.transferred_tokens > 0
    assert slow.stages.transfer_s.mean > 4 * usual.stages.transfer_s.mean
