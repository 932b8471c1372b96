"""`sim drive`: what it prints, writes and refuses; Ctrl-C leaves what was done."""

import json
import os
import signal
import threading
import time

import pytest
from aiohttp import web

from sim.__main__ import main
from tests.journal.test_reenacting import write
from tests.sim.drive.gateway import gateway
from tests.sim.experiments.test_replay import written
from tests.sim.made import BLOCK_TOKENS


@pytest.fixture
def trace(tmp_path):
    return written(tmp_path / "made.jsonl", 30)


def drive(trace, url, *more):
    return main(["drive", *map(str, (trace, "--url", url, "--speed", 1000, *more))])


def test_a_drive_fills_its_folder(trace, tmp_path, capsys):
    """Table, JSON, Markdown and a page, without any key."""
    keys = tmp_path / "keys"
    keys.write_text("authorization: Bearer c4n4ry\n")
    out = tmp_path / "out"
    with gateway() as served:
        given = ("--header-file", keys, "--header", "x-api-key: c4n4ry", "--model", "asked-for")
        assert drive(trace, served.url, "--block-tokens", BLOCK_TOKENS, *given, "--out", out) == 0
        assert served.asked[0][1]["x-api-key"] == "c4n4ry"
    printed = capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_bytes())
    assert summary["complete"]
    assert summary["requests"] == {
        "sent": 30, "whole": 30, "errors": 0, "not_sent": 0, "unfit": 0, "cut": 0,
    }  # fmt: skip
    assert set(summary["pods"]) == {"pod-0", "pod-1"}
    assert set(summary["models"]) == {"asked-for"}
    page = (out / "report.html").read_text()
    assert "<svg" in page
    for text in (printed, page, (out / "report.md").read_text(), json.dumps(summary)):
        assert "c4n4ry" not in text
        assert "pod-1" in text


def test_the_simulation_stands_beside(trace, tmp_path, capsys):
    """The figures that both have."""
    blocks = ("--block-tokens", str(BLOCK_TOKENS))
    assert main(["replay", str(trace), "--out", str(tmp_path / "simulated"), *blocks]) == 0
    capsys.readouterr()
    with gateway(pods=()) as served:
        assert drive(trace, served.url, *blocks, "--beside", tmp_path / "simulated") == 0
    printed = capsys.readouterr().out
    for row in ("TTFT simulated", "ITL simulated", "E2E simulated", "hit rate simulated"):
        assert row in printed
    assert "not told" not in printed


def test_a_capture_can_be_driven(tmp_path, capsys):
    """Ids of 64 bits, stretches, models that are hashes."""
    (tmp_path / "capture").mkdir()
    write(tmp_path / "capture", 40)
    with gateway() as served:
        assert drive(tmp_path / "capture", served.url, "--model", "real") == 0
        assert len(served.asked) == 40
        assert {body["model"] for _, _, body in served.asked} == {"real"}
    assert "40 with a whole answer" in capsys.readouterr().out


def test_nothing_whole_is_a_failure(trace, capsys):
    """And the reason is told."""
    with gateway() as served:
        served.answers = served.refuse
        assert drive(trace, served.url, "--block-tokens", BLOCK_TOKENS) == 1
    assert "30 status 503" in capsys.readouterr().out


def test_ctrl_c_leaves_what_was_done(trace, tmp_path, capsys):
    """What had not ended is counted as cut."""
    with gateway() as served:
        stream = served.stream

        async def first_ten(request, body):
            if len(served.asked) > 10:
                served.held.clear()
            return await stream(request, body)

        served.answers = first_ten

        def interrupt():
            ends_at_s = time.monotonic() + 20
            while served.held.is_set() and time.monotonic() < ends_at_s:
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        assert (
            drive(
                trace,
                served.url,
                "--speed",
                1,
                "--block-tokens",
                BLOCK_TOKENS,
                "--out",
                tmp_path / "out",
            )
            == 130
        )
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert not summary["complete"]
    assert 0 < summary["requests"]["whole"] < 30
    assert "The run was interrupted" in (tmp_path / "out" / "report.md").read_text()
    assert "sim: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--url", "ftp://x"], "expected http://HOST"),
        (["--url", "http://user:word@x"], "expected a URL without password"),
        (["--url", "http://x", "--model", "=a"], "expected NAME or TRACED=NAME"),
        (["--url", "http://x", "--header", "nothing"], "expected NAME:VALUE"),
        (
            ["--url", "http://x", "--in-flight", "0"],
            "expected a whole number of at least 1, got '0'",
        ),
        (
            ["--url", "http://x", "--requests", "x"],
            "expected a whole number of at least 1, got 'x'",
        ),
        (["--url", "http://x", "--speed", "0"], "expected a finite number above 0, got '0'"),
        (["--url", "http://x", "--speed", "x"], "expected a finite number above 0, got 'x'"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(given, problem, trace, capsys):
    with pytest.raises(SystemExit) as found:
        main(["drive", str(trace), *given])
    assert found.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "expected the summary of `sim replay`"),
        ("{", "expected the summary of `sim replay`"),
        (None, "No such file"),
    ],
)
def test_what_is_no_simulation_cannot_stand_beside(content, problem, trace, tmp_path, capsys):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    assert drive(trace, "http://127.0.0.1:1", "--beside", tmp_path) == 1
    assert problem in capsys.readouterr().err


def test_a_file_of_headers_is_not_quoted(trace, tmp_path, capsys):
    (tmp_path / "keys").write_text("c4n4ry\n")
    assert drive(trace, "http://127.0.0.1:1", "--header-file", tmp_path / "keys") == 1
    assert "c4n4ry" not in capsys.readouterr().err
    (tmp_path / "keys").write_bytes(b"\xffc4n4ry")
    assert drive(trace, "http://127.0.0.1:1", "--header-file", tmp_path / "keys") == 1
    told = capsys.readouterr().err
    assert (
        told
        == f"sim: {tmp_path / 'keys'}: expected one header per line in UTF-8, got the byte 0xff at 0\n"
    )


def test_a_model_that_is_not_served_stops_the_drive(trace, tmp_path, capsys):
    """Before any request, with the names that are served and the flag that chooses one."""
    blocks, out = ("--block-tokens", BLOCK_TOKENS), tmp_path / "out"
    with gateway() as served:
        served.serve("llama", "qwen")
        assert drive(trace, served.url, *blocks, "--out", out) == 1
        said = capsys.readouterr().err
        assert (
            "does not serve 'trace', the model that requests would name. It serves 'llama', 'qwen'"
            in said
        )
        assert "--model NAME" in said
        assert not served.asked
        assert not out.exists()
        assert drive(trace, served.url, *blocks, "--model", "llama", "--out", out) == 0
        assert {body["model"] for _, _, body in served.asked} == {"llama"}
        assert drive(trace, served.url, *blocks, "--model", "none") == 1
        assert drive(trace, served.url, *blocks, "--unlisted-models") == 0


async def _not_json(request):
    return web.Response(text="<html>")


async def _another_shape(request):
    return web.json_response({"models": []})


async def _elsewhere(request):
    return web.Response(status=307, headers={"location": "http://127.0.0.1:1/v1/models"})


async def _endless(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(40):
        await response.write(b" " * 65_536)
    return response


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_not_json, "the answer is not a list of models"),
        (_another_shape, "the answer is not a list of models"),
        (_elsewhere, "the answer has status 307"),
        (_endless, "the answer is not a list of models"),
        (None, "the answer has status 404"),
    ],
)
def test_a_gateway_that_tells_no_models_is_driven_with_one_warning(trace, capsys, answer, why):
    """Of an answer without end a megabyte is read, and no redirect is followed."""
    with gateway() as served:
        served.models = answer or served.models
        assert drive(trace, served.url, "--block-tokens", BLOCK_TOKENS) == 0
    said = capsys.readouterr().err
    assert said.count("did not report which models it serves") == 1
    assert why in said


def test_keys_go_with_the_question_for_models(trace):
    """A gateway that asks for a key asks for it there too."""
    seen = []

    async def listed(request):
        seen.append(request.headers.get("x-api-key"))
        return web.json_response({"data": [{"id": "trace"}]})

    with gateway() as served:
        served.models = listed
        key = ("--header", "x-api-key: secret")
        assert drive(trace, served.url, "--block-tokens", BLOCK_TOKENS, *key) == 0
    assert seen == ["secret"]
