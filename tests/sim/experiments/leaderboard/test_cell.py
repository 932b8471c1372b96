"""A cell runs anywhere with the same figures, or says that it cannot."""

import msgspec
import pytest
from msgspec.structs import replace

from sim.cluster.policies import policy_source
from sim.experiments.jobs import JobError
from sim.experiments.leaderboard import cell as cells
from sim.experiments.leaderboard.cases import CASES, Case
from sim.experiments.leaderboard.cell import Cell, inputs_of, run_cell
from sim.measurement.summaries import Traffic
from sim.traces.capture import CaptureWriter
from tests.sim.made import arrivals


def cell(case="pickers-1", policy="default", seed=1, requests=30, repetition=0):
    case = CASES[case] if isinstance(case, str) else case
    made = Cell(
        case=case,
        policy=policy_source(policy),
        seed=seed,
        repetition=repetition,
        requests=requests,
    )
    return replace(made, inputs=inputs_of(made))


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "mine.jsonl"
    with path.open("wb") as file:
        writer = CaptureWriter(file, source="test")
        for one in arrivals(60):
            tokens = 64 * len(one.blocks) + 1
            writer.write_arrival(msgspec.structs.replace(one, prompt_tokens=tokens))
    return path


def test_a_cell_repeats_itself_to_the_digit():
    """Sent through JSON as results are kept."""
    one, other = run_cell(cell()), run_cell(cell())
    assert one == other
    assert msgspec.json.decode(msgspec.json.encode(one), type=type(one)) == one
    assert one.summary.requests.sent == 30
    assert one.summary.traffic == Traffic(generated=True, resampled=None)


def test_strategies_get_the_same_requests_and_seeds_others():
    """By what was asked, not by what came of it."""
    told = [run_cell(cell(policy=name)).summary for name in ("default", "round-robin")]
    assert told[0].prompt_tokens == told[1].prompt_tokens
    assert told[0].digest != told[1].digest
    assert run_cell(cell(seed=2)).summary.prompt_tokens != told[0].prompt_tokens


@pytest.mark.parametrize("case", ["pickers-1", "pod-churn", "multi-turn"])
def test_traffic_that_is_held_gives_the_figures_of_traffic_in_a_file(case, monkeypatch):
    """A cell with too many requests to hold them reads each from its file."""
    held = run_cell(cell(case))
    monkeypatch.setattr(cells, "HELD_REQUESTS_MAX", 0)
    assert run_cell(cell(case)) == held


def test_what_happens_in_a_case_happens():
    """Pods that restart cut requests short, which clients send again."""
    summary = run_cell(cell("pod-churn", requests=400)).summary
    assert summary.retries > 0
    assert len(summary.pods) == CASES["pod-churn"].pods + 1, "one has joined"


def test_inputs_are_all_that_the_figures_depend_on(trace):
    """And nothing else: neither where a file is, nor what a strategy is called."""
    one = cell()
    others = [
        cell("scrape-1s"),
        cell(policy="round-robin"),
        cell(policy="random"),
        cell(seed=2),
        cell(requests=31),
    ]
    assert len({other.inputs for other in (one, *others)}) == 6
    assert cell().inputs == one.inputs
    renamed = replace(one.policy, name="mine", source="elsewhere")
    assert inputs_of(replace(one, policy=renamed)) == one.inputs
    there = cell(Case(name="mine", says="", file=str(trace)))
    elsewhere = trace.with_name("copy.jsonl")
    elsewhere.write_bytes(trace.read_bytes())
    assert cell(Case(name="mine", says="", file=str(elsewhere))).inputs == there.inputs
    changed = trace.with_name("changed.jsonl")
    changed.write_bytes(trace.read_bytes().replace(b'"output_tokens":1', b'"output_tokens":2'))
    assert cell(Case(name="mine", says="", file=str(changed))).inputs != there.inputs


def test_a_recorded_trace_is_replayed_then_resampled(trace):
    """As `sim compare` does."""
    case = Case(name="mine", says="", file=str(trace))
    first = run_cell(cell(case, requests=60)).summary
    again = run_cell(cell(case, seed=2, repetition=1, requests=60)).summary
    assert first.traffic.resampled is None
    assert first.requests.sent == 60
    assert again.traffic.resampled.blocks > 1


def test_a_machine_with_other_code_refuses(monkeypatch):
    """Figures that only look alike are worse than none."""
    mine = cell()
    monkeypatch.setattr(cells, "code_hash", lambda: "other")
    with pytest.raises(JobError, match="other code"):
        run_cell(mine)


def test_goodput_is_within_the_targets_of_the_case():
    """Each case states its own; who sends documents waits longer than who reads along."""
    for name in ("pickers-1", "set-below"):
        goodput = run_cell(cell(name)).summary.goodput
        targets = CASES[name].targets
        assert (goodput.ttft_target_s, goodput.tpot_target_s) == (targets.ttft_s, targets.tpot_s)
    assert CASES["set-below"].targets.ttft_s > CASES["pickers-1"].targets.ttft_s
