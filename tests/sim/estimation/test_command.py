"""`sim profile estimate` and `sim profile gpus`, as they are typed."""

import json

import pytest

from sim.__main__ import main
from sim.engine.profiles import find_profile
from tests.sim.estimation.examples import changed, config_of


def estimate(*arguments, model="llama-3.1-8b", gpu="l4"):
    return main(
        ["profile", "estimate", "--config", str(config_of(model)), "--gpu", gpu, *arguments]
    )


def test_three_commands_lead_from_a_configuration_to_a_report(tmp_path, monkeypatch, capsys):
    """A model and a GPU that are not built in; every report says that the profile is an estimate."""
    monkeypatch.chdir(tmp_path)
    assert estimate("--tp", "4", "--out", "mine.toml", model="gemma-3-27b") == 0
    assert "within ±" in capsys.readouterr().err
    assert main(["trace", "generate", "multi-turn", "--requests", "40", "--out", "t.jsonl"]) == 0
    assert main(["replay", "t.jsonl", "--profile", "mine.toml", "--pods", "2", "--out", "run"]) == 0
    sentence = "is estimated, within ± "
    assert sentence in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sentence in summary["warnings"][0]
    assert next(iter(summary["conditions"]["estimated"].values())).startswith("within ± ")
    for report in ("report.md", "report.html"):
        assert sentence in (tmp_path / "run" / report).read_text()


def test_a_sizing_without_an_answer_says_it_too(tmp_path, monkeypatch, capsys):
    """No option has a run that could be told; each estimated profile is named once."""
    monkeypatch.chdir(tmp_path)
    assert estimate("--out", "mine.toml", "--name", "mine") == 0
    assert main(["trace", "generate", "multi-turn", "--requests", "60", "--out", "t.jsonl"]) == 0
    capsys.readouterr()
    sizing = ["size", "t.jsonl", "--slo", "ttft-p90=0.0001", "--pods-max", "1", "--seeds", "3"]
    more = ["--profile", "llama-3.1-8b-h100-tp1", "--profile", "mine.toml", "--answer-only"]
    assert main([*sizing, *more, "--workers", "1", "--out", "sized"]) == 0
    assert capsys.readouterr().out.count("Profile mine is estimated, within ± ") == 1
    assert (
        "Profile mine is estimated, within ± " in (tmp_path / "sized" / "report.html").read_text()
    )


def test_inspection_says_that_its_profile_is_an_estimate(tmp_path, capsys):
    """In words and in JSON."""
    trace, profile = str(tmp_path / "t.jsonl"), str(tmp_path / "mine.toml")
    assert main(["trace", "generate", "multi-turn", "--requests", "20", "--out", trace]) == 0
    assert estimate("--out", profile) == 0
    capsys.readouterr()
    assert main(["trace", "inspect", trace, "--profile", profile]) == 0
    assert "is estimated, within ± " in capsys.readouterr().out
    assert main(["trace", "inspect", trace, "--profile", profile, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimated"].startswith("within ± ")


def test_without_a_file_the_profile_goes_to_stdout(tmp_path, capsys):
    """Nothing else does."""
    assert estimate("--name", "mine") == 0
    file = tmp_path / "piped.toml"
    file.write_text(capsys.readouterr().out)
    assert find_profile(str(file)).name == "mine"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tp", "3"], "argument --tp: '3' is not a power of two from 1 to 16"),
        (["--tp", "1000000"], "is not a power of two"),
        (["--gpu-memory-utilization", "2"], "is not a number above 0 and at most 1"),
        (["--gpu-memory-utilization", "nan"], "is not a number above 0 and at most 1"),
        (["--max-num-seqs", "-1"], "is not a whole number"),
        (["--quantization", "int2"], "expected auto, 16bit, fp8"),
    ],
)
def test_flags_that_make_no_sense_are_usage(capsys, arguments, sentence):
    """Exit code 2 and a sentence."""
    with pytest.raises(SystemExit) as caught:
        estimate(*arguments)
    assert caught.value.code == 2
    assert sentence.removeprefix("argument ") in capsys.readouterr().err


def test_input_that_is_no_good_is_code_2(tmp_path, capsys):
    """An unknown GPU, a file that is none, a model that is not supported: one line each."""
    assert estimate(gpu="h10") == 2
    assert "did you mean `h100`" in capsys.readouterr().err
    bad = changed(tmp_path, "llama-3.1-8b", architectures=["MambaForCausalLM"])
    assert main(["profile", "estimate", "--config", str(bad), "--gpu", "l4"]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told.startswith(f"sim: {bad}: architectures: 'MambaForCausalLM' is not supported")
    assert told.count("\n") == 1


def test_a_model_that_does_not_fit_is_code_1(capsys):
    """The input is good; more GPUs are needed."""
    assert estimate(gpu="h100", model="llama-3.3-70b") == 1
    assert "it needs --tp 2" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told(tmp_path, capsys):
    """Exit code 1."""
    assert estimate("--out", str(tmp_path / "nowhere" / "mine.toml")) == 1
    assert "No such file" in capsys.readouterr().err


def test_keys_without_effect_are_warned_of(tmp_path, capsys):
    """The estimate is made all the same."""
    file = changed(tmp_path, "llama-3.1-8b", frobnication_rank=3)
    assert main(["profile", "estimate", "--config", str(file), "--gpu", "l4"]) == 0
    assert "frobnication_rank" in capsys.readouterr().err


def test_gpus_are_listed(capsys):
    """With whether kernels were measured on them."""
    assert main(["profile", "gpus"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " measured" in lines["rtx-4090"]
    assert "not measured" in lines["t4"]
