"""`sim calibrate`: what is measured on an engine of known constants gives those constants."""

import math
import re
import shlex

import msgspec
import pytest

from sim.__main__ import main
from sim.engine.calibrate import FITTED, ItlPoint, Points, TtftPoint, calibrate
from sim.engine.engine import Engine, EngineSettings
from sim.engine.profiles import EstimateError, find_profile, profile_as_toml
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
    assert told.startswith("sim: mine: the points do not fit any engine: ")
    assert told.count("\n") == 1


REAL = find_profile("llama-3.1-8b-rtx-pro-6000-tp1")
"""What an estimate is to be moved towards."""


@pytest.fixture
def estimate(tmp_path):
    """A file with an estimate of `REAL` that is a fifth too fast in all that is fitted."""
    fast = msgspec.structs.replace(
        REAL,
        linear_s=tuple(0.8 * seconds for seconds in REAL.linear_s),
        linear_s_per_token=0.8 * REAL.linear_s_per_token,
        pair_s=0.8 * REAL.pair_s,
        decode_s_per_context_token=0.8 * REAL.decode_s_per_context_token,
        estimated=EstimateError(prefill=0.3, decode=0.3, kv_tokens=0.1),
    )
    file = tmp_path / "estimate.toml"
    file.write_text(profile_as_toml(fast, {}))
    return str(file)


def decode_error(profile, requests, context):
    return profile.decode_step_s(requests, context) / REAL.decode_step_s(requests, context) - 1


def prefill_error(profile, tokens):
    return profile.prefill_tokens_per_s(tokens) / REAL.prefill_tokens_per_s(tokens) - 1


def test_two_points_move_an_estimate_towards_the_engine(estimate):
    """Also where nothing was measured; the table of the linear layers stays a table."""
    points = Points(
        name="mine",
        like=estimate,
        ttft=[TtftPoint(prompt_tokens=2048, seconds=measured_ttft_s(REAL, 2048))],
        itl=[measured_itl(REAL, 16, 1024, 1.0)],
    )
    before = find_profile(estimate)
    profile, residuals = calibrate(points)
    assert max(abs(one.error) for one in residuals) < 0.05
    assert abs(decode_error(profile, 64, 2048)) < abs(decode_error(before, 64, 2048)) * 2 / 3
    assert profile.linear_tokens == before.linear_tokens
    assert prefill_error(profile, 4096) < prefill_error(before, 4096) * 2 / 3


def test_an_estimate_without_enough_points_stays_as_unsure_as_it_was(estimate):
    """With enough of one kind that kind is surer; a KV cache that is known is no estimate."""
    ttft, itl = points_of(REAL)
    few, _ = calibrate(Points(name="mine", like=estimate, itl=itl[:1]))
    assert few.estimated == EstimateError(prefill=0.3, decode=0.3, kv_tokens=0.1)
    given = {"kv_tokens": 500_000}
    many, _ = calibrate(Points(name="mine", like=estimate, ttft=ttft, itl=itl, profile=given))
    assert many.kv_tokens == 500_000
    assert many.estimated.kv_tokens == 0.0
    assert many.estimated.prefill < 0.15
    assert many.estimated.decode < 0.15


def test_a_point_far_from_an_estimate_is_not_believed_at_once(estimate):
    """One step that took ten times as long moves it, and not all the way."""
    far = ItlPoint(requests=16, context_tokens=1024, seconds=10 * REAL.decode_step_s(16, 1024))
    profile, _ = calibrate(Points(name="mine", like=estimate, itl=[far]))
    assert 1.1 * REAL.decode_step_s(16, 1024) < profile.decode_step_s(16, 1024) < 0.9 * far.seconds


def test_an_estimate_needs_one_point(tmp_path, estimate, capsys):
    """Exit code 2 without any; the file that is written says what is left of the error."""
    path = tmp_path / "points.toml"
    path.write_text(f'name = "mine"\nlike = "{estimate}"\n')
    assert main(["calibrate", str(path)]) == 2
    assert "mine: expected at least one point, of ttft or itl" in capsys.readouterr().err
    path.write_text(
        path.read_text() + "[[itl]]\nrequests = 1\ncontext_tokens = 100\nseconds = 0.011\n"
    )
    assert main(["calibrate", str(path), "--out", str(tmp_path / "mine.toml")]) == 0
    assert find_profile(str(tmp_path / "mine.toml")).estimated.decode == 0.3
    assert "the residuals do not show" not in capsys.readouterr().err
