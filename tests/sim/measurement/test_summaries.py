"""What stands in a summary.json, and what is read from it."""

import json

import pytest
from msgspec.structs import replace

from sim.measurement.summaries import (
    DifferenceSummary,
    KeptRun,
    NamedRun,
    ReplaySummary,
    Requests,
    RunSummary,
    Traffic,
    as_json,
    read_run,
)
from sim.output import OutputError
from tests.sim.made import filled


def test_a_run_stands_among_the_keys_of_what_it_is_part_of():
    """In the order of the fields: what is told of one run is told alike wherever it is told."""
    run = filled(RunSummary, bad_lines=0, digest="abc")
    told = json.loads(as_json(filled(ReplaySummary, config="mine", run=run)))
    assert list(told)[:7] == [
        *("schema", "complete", "seed", "config", "conditions", "bad_lines", "digest"),
    ]
    assert told["digest"] == "abc"
    assert list(told)[-2:] == ["assumptions", "timeline"]
    named = json.loads(as_json(NamedRun(config="mine", seed=1, run=run)))
    assert list(named)[:4] == ["config", "seed", "bad_lines", "digest"]
    assert {name: told[name] for name in list(named)[2:]} == dict(list(named.items())[2:])


def test_what_is_not_known_is_null_and_what_is_not_asked_for_is_not_there():
    """A key that is not there means that there could be none."""
    run = filled(RunSummary)
    told = json.loads(as_json(run))
    assert told["hit_rate"] is None
    assert not {"retries", "rescheduled", "evicted", "peers", "pool", "traffic"} & set(told)
    assert json.loads(as_json(replace(run, retries=0)))["retries"] == 0
    difference = filled(DifferenceSummary, verdict="better")
    assert "reference" not in json.loads(as_json(difference))
    assert difference.known_reference is replace(difference, reference=None).known_reference is None
    assert replace(difference, reference=2.0).known_reference == 2.0


def test_a_run_is_read_back(tmp_path):
    """From the file of a replay, whatever else is in it."""
    path = tmp_path / "summary.json"
    run = filled(
        RunSummary, bad_lines=1, hit_rate=0.5, traffic=Traffic(generated=True, resampled=None)
    )
    path.write_bytes(as_json(filled(ReplaySummary, run=run)))
    assert read_run(path) == run


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1, "digest": "abc", "ttft_s": 1}'])
def test_a_file_of_something_else_or_of_an_older_release_is_told_in_a_sentence(content, tmp_path):
    """With the file, and what it lacks."""
    path = tmp_path / "summary.json"
    path.write_text(content)
    with pytest.raises(OutputError) as problem:
        read_run(path)
    assert str(path) in str(problem.value)
    assert "\n" not in str(problem.value)


def test_requests_know_how_they_ended():
    """By fate, and as a share; of none nothing is lost."""
    requests = Requests(sent=8, complete=6, refused=1, failed=1, aborted=0)
    assert requests.ended == {"complete": 6, "refused": 1, "failed": 1, "aborted": 0}
    assert requests.share_lost == 0.25
    assert filled(Requests).share_lost == 0.0


def test_what_a_tuning_keeps_of_a_run_is_part_of_it():
    """Under the same names."""
    assert set(KeptRun.__struct_fields__) <= set(RunSummary.__struct_fields__)
