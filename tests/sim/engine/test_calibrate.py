"""`sim calibrate`: what is measured on an engine of known constants gives those constants."""

import math
import re
import shlex

import msgspec
import pytest

from sim.__main__ import main
from sim.engine.calibrate import FITTED, ItlPoint, Points, TtftPoint, calibrate
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import find_profile
from sim.engine.request import EngineRequest

TRUTH = find_profile("llama-3.1-70b-h100-tp4")
LENGTHS = (64, 512, 2048, 8192, 20_000)
BATCHES = ((1, 512), (16, 1024), (64, 2048), (128, 512))


def engine_of(profile):
    return Engine(EngineSettings(blocks_total=profile.kv_tokens // 16 + 1), profile)


def measured_ttft_s(profile, tokens):
    """As a client of an idle engine measures it."""
    engine = engine_of(profile)
    request = EngineRequest("a", prompt_tokens=tokens, output_tokens=1, chain=range(tokens // 16))
    now = profile.frontend_delay_s(tokens)
    engine.submit(request, now)
    while engine.begin(now) is not None:
        now = engine.end().ends_at
    return request.first_token_at


def points_of(profile, noise=0.0):
    """Points measured on an engine, alternately too long and too short by `noise`."""
    ttft = [
        TtftPoint(
            prompt_tokens=tokens,
            seconds=measured_ttft_s(profile, tokens) * (1 + noise * (-1) ** index),
        )
        for index, tokens in enumerate(LENGTHS)
    ]
    itl = [
        measured_itl(profile, requests, context, 1 + noise * (-1) ** index)
        for index, (requests, context) in enumerate(BATCHES)
    ]
    return ttft, itl


def measured_itl(profile, requests, context, factor):
    """The first step in which all of a batch decode; its mean context is what is read off."""
    engine = engine_of(profile)
    for number in range(requests):
        shape = {"prompt_tokens": context, "output_tokens": 500, "chain": [number]}
        engine.submit(EngineRequest(str(number), **shape, chain_ends=[(context + 500) // 16]), 0.0)
    step = engine.step(0.0)
    while step.work.decodes < requests:
        step = engine.step(step.ends_at)
    read = round(step.work.decode_context_tokens / requests)
    return ItlPoint(requests=requests, context_tokens=read, seconds=step.duration_s * factor)


@pytest.fixture(scope="module")
def exact():
    return points_of(TRUTH)


def test_exact_points_give_the_constants_back(exact):
    """From the constants of another model and GPU, with what cannot be told apart given."""
    ttft, itl = exact
    given = {
        field: getattr(TRUTH, field)
        for field in ("decode_s", "head_s", "host_s", "all_reduce_s", "all_reduce_s_per_token")
    }
    points = Points(name="mine", like="qwen3-32b-h100-tp2", ttft=ttft, itl=itl, profile=given)
    profile, residuals = calibrate(points)
    for field in FITTED:
        assert getattr(profile, field) == pytest.approx(getattr(TRUTH, field), rel=0.02), field
    assert max(abs(residual.error) for residual in residuals) < 1e-3


def test_residuals_tell_of_points_that_do_not_fit():
    """Points that are 10 % off alternately leave residuals of that size."""
    ttft, itl = points_of(TRUTH, noise=0.10)
    _, residuals = calibrate(Points(name="mine", like=TRUTH.name, ttft=ttft, itl=itl))
    assert max(abs(residual.error) for residual in residuals) > 0.05


def toml_of(ttft, itl):
    lines = ['name = "mine"', 'like = "llama-3.1-70b-h100-tp4"']
    for kind, points in (("ttft", ttft), ("itl", itl)):
        for point in points:
            lines.append(f"[[{kind}]]")
            lines += [f"{name} = {value}" for name, value in msgspec.to_builtins(point).items()]
    return "\n".join(lines)


def test_the_command_writes_a_profile_that_can_be_used(tmp_path, exact, capsys):
    """The file names its profile; residuals are printed, and the worst is in the file."""
    (tmp_path / "points.toml").write_text(toml_of(*exact))
    out = tmp_path / "mine.toml"
    assert main(["calibrate", str(tmp_path / "points.toml"), "--out", str(out)]) == 0
    assert find_profile(str(out)).pair_s == pytest.approx(TRUTH.pair_s, rel=0.02)
    assert "Worst residual of" in out.read_text()
    printed = capsys.readouterr().err
    assert "TTFT of 8192 tokens" in printed
    assert "%" in printed


def test_the_example_of_the_help_works_as_it_is_printed(tmp_path, monkeypatch, capsys):
    """Its points give a profile without a residual that matters, and its commands run."""
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    points, commands = re.findall(r"(?:^    .+\n)+", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "points.toml").write_text(points)
    generate = "sim trace generate rag --requests 5 --out trace"
    calls = [generate, *commands.replace("TRACE", "trace").splitlines()]
    for call in calls:
        command, *arguments = shlex.split(call)
        assert command == "sim"
        assert main(arguments) == 0, call
    assert find_profile("my-card.toml").kv_tokens == 120_000
    worst = re.search(
        r"Worst residual of 7 points: ([\d.]+)%", (tmp_path / "my-card.toml").read_text()
    )
    assert float(worst[1]) < 10


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda ttft, itl: (ttft[:2], itl), "at least 3 different prompt lengths"),
        (lambda ttft, itl: (ttft, itl[:1]), "at least 2 different decode contexts"),
    ],
)
def test_too_few_points_are_refused(tmp_path, exact, capsys, change, sentence):
    """Exit code 2 and a sentence with the file."""
    (tmp_path / "points.toml").write_text(toml_of(*change(*exact)))
    assert main(["calibrate", str(tmp_path / "points.toml")]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"seconds": math.nan}, "ttft[3].seconds: expected"),
        ({"seconds": math.inf}, "ttft[3].seconds: expected a number of at most 3600"),
        ({"seconds": 0.0}, "ttft[3].seconds: expected"),
        ({"prompt_tokens": 0}, "ttft[3].prompt_tokens: expected a whole number of at least 1"),
    ],
)
def test_a_point_that_nobody_measured_is_refused(tmp_path, exact, capsys, wrong, sentence):
    """Exit code 2, one sentence with file, point and field, and nothing on stdout."""
    ttft, itl = exact
    ttft = [*ttft[:3], msgspec.structs.replace(ttft[3], **wrong), *ttft[4:]]
    path = tmp_path / "points.toml"
    path.write_text(toml_of(ttft, itl))
    assert main(["calibrate", str(path)]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told.startswith(f"sim: {path}: ")
    assert sentence in told
    assert told.count("\n") == 1


def test_points_of_no_engine_are_refused(tmp_path, exact, capsys):
    """Longer prompts that take no time at all: a sentence, as for other bad points."""
    ttft, itl = exact
    ttft = [msgspec.structs.replace(point, seconds=1e-6) for point in ttft]
    itl = [msgspec.structs.replace(point, seconds=1e-6) for point in itl]
    path = tmp_path / "points.toml"
    path.write_text(toml_of(ttft, itl))
    assert main(["calibrate", str(path)]) == 2
    shown, told = capsys.readouterr()
    assert shown == ""
    assert told.startswith("sim: mine: the points are those of no engine: ")
    assert told.count("\n") == 1
