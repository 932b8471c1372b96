"""`sim validate`: passes on the recordings, fails on what is off, and says what it cannot read."""

import gzip
import json
import re
import shutil

import msgspec
import numpy as np
import pytest

from sim.__main__ import main
from sim.engine.engine import Engine
from sim.engine.least_squares import bounded_least_squares
from sim.engine.profiles import EstimateError, find_profile, profile_as_toml
from sim.engine.request import EngineRequest
from sim.truth import ladder, latency, validate
from sim.truth.judgement import TruthError, converted, described, lines_of
from tests.sim.terminal import on_a_terminal

BUILT_IN = """kind = "latency"
model = "m"
profile = "llama-3.1-8b-h100-tp1"
num_gpu_blocks = 5000
max_num_seqs = 64
max_num_batched_tokens = 2048
"""


def validated(tmp_path, *folders, profile=None):
    """Exit code and what `--json` wrote."""
    out = tmp_path / "judgements.json"
    options = [option for folder in folders for option in ("--truth", str(folder))]
    options += [] if profile is None else ["--profile", str(profile)]
    code = main(["validate", *options, "--json", str(out)])
    return code, json.loads(out.read_bytes())


@pytest.mark.parametrize(
    ("name", "judged"),
    [
        ("vllm-0.32-cpu", 2),
        ("rtx4090-llama-3.1-8b", 9),
        ("rtxpro6000-llama-3.1-8b", 9),
        ("llm-d-ladder", 3),
    ],
)
@pytest.mark.timeout(400)
def test_the_simulator_agrees_with_the_recording(request, tmp_path, capsys, name, judged):
    """Every judged number is within its tolerance, and all of them are printed."""
    folder = validate.RECORDINGS / name
    if name in validate.ELSEWHERE:
        folder = request.getfixturevalue("shared_data") / "truth" / name
    code, document = validated(tmp_path, folder)
    printed = capsys.readouterr().out
    print(printed)
    rows = document["judgements"]
    assert sum(row["tolerance"] is not None for row in rows) == judged
    assert [row["what"] for row in rows if not row["passed"]] == []
    assert (code, document["passed"]) == (0, True)
    assert all(row["what"] in printed for row in rows)
    # A fitted constant is neither recorded nor off by anything.
    constants = [row for row in rows if "fitted" in row["what"] and "in the profile" in row["what"]]
    assert all((row["recorded"], row["error"]) == (None, None) for row in constants)
    lines = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
    assert sum(line.endswith("  fitted") for line in lines) == len(constants)
    unjudged = sum(row["tolerance"] is None for row in rows) - len(constants)
    assert sum(line.endswith("  not judged") for line in lines) == unjudged
    assert ("not judged: the number has no tolerance" in printed) == bool(unjudged)


def test_what_comes_with_the_simulator_is_what_was_recorded(shared_data):
    """Byte for byte once it is unpacked, and below a megabyte in all."""
    files = [file for file in validate.RECORDINGS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 1_000_000
    for file in files:
        was = shared_data / "truth" / file.relative_to(validate.RECORDINGS)
        if file.suffix == ".gz":
            assert gzip.decompress(file.read_bytes()) == was.with_suffix("").read_bytes()
        elif file.name == "engine.toml":
            assert described(file.parent) == described(was.parent)
        else:
            assert file.read_bytes() == was.read_bytes()


@pytest.fixture
def from_a_clone(tmp_path, monkeypatch):
    """A folder with nothing beside it; of what comes with the simulator only what is quick."""
    monkeypatch.delenv("HOMING_SHARED", raising=False)
    clone, recordings = tmp_path / "clone", tmp_path / "recordings"
    clone.mkdir()
    shutil.copytree(validate.RECORDINGS / "vllm-0.32-cpu", recordings / "vllm-0.32-cpu")
    monkeypatch.setattr(validate, "RECORDINGS", recordings)
    monkeypatch.chdir(clone)
    return clone


def test_a_clone_has_recordings_to_be_judged_by(from_a_clone, capsys):
    """It passes, and one sentence says what was not run and where that would be found."""
    assert main(["validate"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  ok\n") == 2
    (sentence,) = [line for line in printed.splitlines() if line.startswith("Not run: ")]
    for told in (*validate.ELSEWHERE, "$HOMING_SHARED/truth", "../shared/truth", "--truth"):
        assert told in sentence


def test_recordings_beside_the_clone_are_judged_too(from_a_clone, recording, capsys):
    """One by a name that comes with the simulator stands in for it, and is not run twice."""
    shared = from_a_clone.parent / "shared" / "truth"
    for name in (*validate.ELSEWHERE, "vllm-0.32-cpu"):
        shutil.copytree(recording, shared / name)
    assert main(["validate"]) == 0
    printed = capsys.readouterr().out
    assert "Not run" not in printed
    assert "cached_tokens" not in printed
    assert len({line.split()[0] for line in printed.splitlines()[1:-1]}) == 3


def test_a_shared_folder_that_holds_nothing_is_no_success(from_a_clone, monkeypatch, capsys):
    """It was named, so that it is not passed over for what comes with the simulator."""
    monkeypatch.setenv("HOMING_SHARED", str(from_a_clone))
    assert main(["validate"]) == 2
    said = f"sim: No recording in {from_a_clone / 'truth'}; expected folders with an engine.toml.\n"
    assert capsys.readouterr().err == said


def test_a_packed_recording_that_is_cut_short_is_named(from_a_clone, capsys):
    """As any other that cannot be read."""
    file = validate.RECORDINGS / "vllm-0.32-cpu" / "sequential.jsonl.gz"
    file.write_bytes(file.read_bytes()[:5_000])
    assert main(["validate"]) == 1
    assert "sequential.jsonl: expected JSON lines, plain or compressed" in capsys.readouterr().err


@pytest.fixture
def recording(tmp_path):
    """A recording that the simulator made of itself, so that it fits to the last digit."""
    folder = tmp_path / "self"
    folder.mkdir()
    (folder / "engine.toml").write_text(BUILT_IN)
    write_requests(folder, 1.0)
    return folder


def write_requests(folder, slowness):
    random = np.random.default_rng(1)
    rows = [
        {
            "arrival_s": 0.1 * number, "queued_s": 0.1 * number, "input_tokens": int(tokens),
            "output_tokens": int(tokens) % 300 + 2, "first_token_s": 0.0, "last_token_s": 0.0,
        }
        for number, tokens in enumerate(random.integers(50, 3000, 160))
    ]  # fmt: skip
    shape = converted(folder, described(folder), latency.Description)
    served = [latency.RecordedRequest(**row) for row in rows]
    profile = find_profile("llama-3.1-8b-h100-tp1")
    ttft, _, e2e = latency.simulate(profile, shape.engine, served) * slowness
    for row, first, last in zip(rows, ttft, e2e, strict=True):
        row["first_token_s"] = row["queued_s"] + first
        row["last_token_s"] = row["queued_s"] + last
    (folder / "requests.jsonl").write_text("\n".join(json.dumps(row) for row in rows))


def test_a_recording_of_its_own_fits(tmp_path, recording):
    """What the simulator recorded of itself has no error, and the fit changes nothing."""
    code, document = validated(tmp_path, recording)
    assert code == 0
    errors = [row["error"] for row in document["judgements"] if row["tolerance"] is not None]
    assert len(errors) == 9
    assert max(map(abs, errors)) < 1e-6


def test_a_slower_engine_fails(tmp_path, recording, capsys):
    """An engine that is a third slower than its constants say is outside the tolerances."""
    write_requests(recording, 1.33)
    code, document = validated(tmp_path, recording)
    assert (code, document["passed"]) == (1, False)
    assert "FAILED" in capsys.readouterr().out


@pytest.fixture
def estimate(tmp_path):
    """The profile of the recording, as an estimate that is a tenth too slow and says a fifth."""
    known = find_profile("llama-3.1-8b-h100-tp1")
    slower = msgspec.structs.replace(
        known,
        weight_read_s=1.1 * known.weight_read_s,
        linear_s_per_token=1.1 * known.linear_s_per_token,
        estimated=EstimateError(prefill=0.2, decode=0.15, kv_tokens=0.1),
    )
    file = tmp_path / "estimate.toml"
    file.write_text(profile_as_toml(slower, {}))
    return file


def test_an_estimated_profile_is_judged_by_its_published_error(tmp_path, recording, estimate):
    """In the place of the recording's own, with nothing fitted."""
    code, document = validated(tmp_path, recording, profile=estimate)
    judged = [row for row in document["judgements"] if row["tolerance"] is not None]
    assert [row["tolerance"] for row in judged] == [0.2, 0.2, 0.2]
    assert all(0.001 < row["error"] < 0.2 for row in judged)
    assert not any("fitted" in row["what"].replace("nothing fitted", "") for row in judged)
    assert code == 0


def test_a_measured_profile_in_its_place_is_judged_as_ever(tmp_path, recording):
    """Another GPU is far outside the usual tolerances."""
    code, document = validated(tmp_path, recording, profile="llama-3.1-8b-a100-tp1")
    assert code == 1
    assert {row["tolerance"] for row in document["judgements"]} == {
        None,
        *latency.BLIND_TOLERANCES.values(),
    }


def test_an_interrupt_tells_what_is_done(tmp_path, recording):
    """Ctrl-C in the second of three recordings: 130, the first one's rows, and JSON that says so."""
    for name in ("b-second", "c-third"):
        shutil.copytree(recording, recording.with_name(name))
    first, out = recording.rename(tmp_path / "a-first"), tmp_path / "found.json"
    code, printed, shown = on_a_terminal(
        "validate", "--truth", tmp_path, "--json", out, interrupt_at="b-second"
    )
    assert code == 130
    assert "sim: interrupted, 1 of 3 recordings are done" in shown
    document = json.loads(out.read_bytes())
    assert (document["complete"], document["passed"]) == (False, False)
    assert {row["truth"] for row in document["judgements"]} == {first.name}
    assert f"{first.name}  mean TTFT, nothing fitted" in printed


def test_a_judge_tells_how_far_it_is(recording):
    """From little to nearly all, and never back, so that a bar can tell when it will end."""
    shares = []
    list(latency.judge(recording, described(recording), shares.append))
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2
    assert 0.8 < shares[-1] <= 1


def test_nothing_found_is_no_success(tmp_path, capsys):
    """An empty folder: exit code 2, and where it was looked."""
    assert main(["validate", "--truth", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: (folder / "engine.toml").write_text("kind = 'dream'"), "got 'dream'"),
        (lambda folder: (folder / "engine.toml").write_text("kind"), "engine.toml: expected TOML"),
        (
            lambda folder: (folder / "engine.toml").write_text("kind = 'latency'"),
            "needs field",
        ),
        (lambda folder: (folder / "requests.jsonl").unlink(), "requests.jsonl"),
        (lambda folder: (folder / "requests.jsonl").write_text("{}\n"), "requests.jsonl:1: "),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, recording, capsys, change, sentence):
    """A recording that is broken fails with a sentence, also in the JSON."""
    change(recording)
    code, document = validated(tmp_path, recording)
    assert code == 1
    assert sentence in capsys.readouterr().err
    assert sentence in document["problems"][0]


def test_bounds_hold_where_the_best_fit_lies_outside():
    """A pull below zero leaves the unknown at zero, and the other one takes what is left."""
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    free = bounded_least_squares(matrix, np.array([1.0, 0.0, -1.0]), np.array([5.0, 5.0]))
    assert free == pytest.approx([0.0, 0.0], abs=1e-12)
    high = bounded_least_squares(matrix, np.array([9.0, 9.0, 9.0]), np.array([4.0, np.inf]))
    assert high == pytest.approx([4.0, 5 * 6 / 14])


def test_the_pool_of_one_pod_serves_as_its_engine_alone_does(recording):
    """Nothing is lost or gained on the way: the times of an engine that is driven by hand."""
    shape = converted(recording, described(recording), latency.Description)
    served = lines_of(recording / "requests.jsonl", latency.RecordedRequest)
    profile = find_profile("llama-3.1-8b-h100-tp1")
    engine = Engine(shape.engine, profile)
    requests = [
        EngineRequest(
            str(number),
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            chain=[number],
            chain_ends=[(row.input_tokens + row.output_tokens) // shape.block_size_tokens],
        )
        for number, row in enumerate(served)
    ]
    now = 0.0
    for request, row in zip(requests, served, strict=True):
        while now < row.arrival_s and (step := engine.step(now)) is not None:
            now = step.ends_at
        now = max(now, row.arrival_s)
        engine.submit(request, row.arrival_s)
    while (step := engine.step(now)) is not None:
        now = step.ends_at
    ttft_s, _, e2e_s = latency.simulate(profile, shape.engine, served)
    assert ttft_s == pytest.approx([one.first_token_at - one.queued_at for one in requests])
    assert e2e_s == pytest.approx([one.last_token_at - one.queued_at for one in requests])


def test_a_recorded_request_that_cannot_fit_is_named(recording):
    """An engine of the description would have refused it."""
    file = recording / "engine.toml"
    file.write_text(re.sub(r"num_gpu_blocks = \d+", "num_gpu_blocks = 20", file.read_text()))
    with pytest.raises(TruthError, match=r"request 0.*fits the engine"):
        list(latency.judge(recording, described(recording), lambda _: None))


SMALL = ladder.Description(
    pods=2, profile="qwen3-32b-h100-tp2", kv_tokens_per_pod=60_000, max_num_batched_tokens=8192,
    max_num_seqs=256, host_ms=2.0, warm_up_rate_per_s=2.0, warm_up_s=5.0, groups=10,
    prompts_per_group=3, system_tokens=2000, question_tokens=300, output_tokens=100,
)  # fmt: skip
STAGES = [
    ladder.Stage(
        rate_per_s=rate, duration_s=10.0, round_robin_output_tokens_per_s=1.0,
        round_robin_ttft_mean_s=1.0, prefix_output_tokens_per_s=1.0, prefix_ttft_mean_s=1.0,
    )
    for rate in (2.0, 8.0)
]  # fmt: skip


@pytest.mark.parametrize("prefix_aware", [False, True])
def test_a_ladder_repeats_itself(prefix_aware):
    """The same seed gives the same outcomes."""
    profile = find_profile(SMALL.profile)
    runs = [
        ladder.Ladder(SMALL, profile, prefix_aware=prefix_aware).climb(STAGES, lambda _: None)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert all(outcome.output_tokens_per_s > 0 for outcome in runs[0])


def test_prefix_aware_routing_shortens_the_first_token():
    """With more prefixes than one pod can hold, the scheduler's arm waits less than round robin."""
    profile = find_profile(SMALL.profile)
    even, aware = (
        ladder.Ladder(SMALL, profile, prefix_aware=aware)
        .climb(STAGES, lambda _: None)[1]
        .ttft_mean_s
        for aware in (False, True)
    )
    assert aware < even
