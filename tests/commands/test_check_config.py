import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from epp.__main__ import main
from epp.commands.check_config import check_config
from epp.configuration.config import DEFAULT_CONFIG
from epp.flags.subcommands import CheckFlags
from tests.core.journal.traffic import document
from tests.journal.test_reenacting import Peered, write

SAMPLES = Path(__file__).parents[1] / "configuration" / "config_samples"
CHART = str(SAMPLES / "chart-default.yaml")
OLD = str(SAMPLES / "first-generation.yaml")
REFUSED = str(SAMPLES / "refused" / "flow-control.yaml")


def check(**flags):
    out, err = io.StringIO(), io.StringIO()
    code = check_config(CheckFlags(**flags), out, err)
    return code, out.getvalue(), err.getvalue()


def test_a_valid_file_exits_0_and_names_its_hash():
    """One line, nothing on stderr."""
    code, out, err = check(file=CHART)
    assert (code, err) == (0, "")
    assert out.startswith(f"{CHART}: valid, hash ")
    assert len(out.splitlines()) == 1


def test_warnings_go_to_stderr_and_do_not_fail():
    """Those of the document, and those that the default flags give it."""
    code, out, err = check(file=OLD)
    assert code == 0
    assert out.startswith(f"{OLD}: valid")
    assert all(line.startswith(f"warning: {OLD}: ") for line in err.splitlines())
    assert "metricsStalenessThreshold 0.2s" in err


def test_an_invalid_file_exits_1_with_every_problem_on_stderr():
    """And says nothing else."""
    code, out, err = check(file=REFUSED, explain=True)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 3


def config_map(texts):
    """As `kubectl get configmap --output yaml` shows it, shortened."""
    return yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "data": texts})


@pytest.mark.parametrize("key", ["config.yaml", "other.yaml"])
def test_a_config_map_is_checked_by_what_it_holds(tmp_path, key):
    """Under any key if there is one; with the hash that the document alone has."""
    file = tmp_path / "configmap.yaml"
    file.write_text(config_map({key: Path(CHART).read_text()}))
    code, out, err = check(file=str(file))
    assert (code, err) == (0, "")
    assert out == check(file=CHART)[1].replace(CHART, f"{file}: {key}")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ({"a": DEFAULT_CONFIG, "b": ""}, "data of the ConfigMap has no text config.yaml"),
        (None, "data of the ConfigMap has no text config.yaml"),
        ({"config.yaml": None}, "data of the ConfigMap has no text config.yaml"),
        ({"config.yaml": "{}"}, "config.yaml: kind is missing, expected 'EndpointPickerConfig'"),
    ],
)
def test_a_config_map_without_a_configuration_is_invalid(tmp_path, texts, problem):
    """None, several of which none has the usual key, or one that is no good."""
    file = tmp_path / "configmap.yaml"
    file.write_text(config_map(texts))
    code, out, err = check(file=str(file))
    assert (code, out) == (1, "")
    assert err.startswith(f"{file}: {problem}")


@pytest.mark.parametrize("file", ["/nowhere/config.yaml", str(SAMPLES)])
def test_an_unreadable_file_exits_2(file):
    """Missing, or a directory."""
    code, out, err = check(file=file)
    assert (code, out) == (2, "")
    assert err.startswith(f"{file}: cannot be read: ")
    assert check(file=CHART, diff=file)[0] == 2


def test_a_difference_is_told_line_by_line(tmp_path):
    """From OLD to FILE; equal ones say so."""
    new = tmp_path / "new.yaml"
    new.write_text(Path(CHART).read_text().replace("weight: 3", "weight: 5"))
    code, out, err = check(file=str(new), diff=CHART)
    assert (code, out, err) == (0, "scorer prefix-cache-scorer: weight 3 -> 5\n", "")
    assert check(file=CHART, diff=CHART)[1] == f"{CHART} and {CHART} have the same effect\n"
    assert check(file=CHART, diff=REFUSED)[0] == 1


def test_the_default_is_explained_without_a_file():
    """Profile with weights and shares, what each reads, index, saturation, parsers."""
    code, out, err = check(explain=True)
    assert (code, err) == (0, "")
    for line in (
        "profile default",
        "  scorer    added-time-scorer: weight 1 of 1, 100%",
        "      Prefer the endpoint where the request adds the least time to all requests.",
        "      prefillDelay = 0.3",
        "  picker    max-score-picker",
        "  index     approx-prefix-cache-producer: default prefix index",
        "      lruCapacityPerServer = 31250",
        "      ttl = 300s",
        "      metricsStalenessThreshold = 1s",
        "  openai-parser, anthropic-parser, vllmhttp-parser, passthrough-parser",
        "  defaultEngine = vllm",
        "  token usage is read only with both `epp serve --parse-response-usage`",
        "  and a gateway whose response_body_mode is STREAMED or FULL_DUPLEX_STREAMED",
    ):
        assert f"{line}\n" in out


@pytest.mark.parametrize(
    ("arguments", "code", "stream", "start"),
    [
        ([], 2, "err", "usage: epp serve"),
        (["--help"], 0, "out", "usage: epp serve"),
        (["fly"], 2, "err", "epp: unknown command 'fly', `epp --help` lists them\n"),
        (["serve", "--help"], 0, "out", "usage: epp serve [flags]\n\nServing:\n  --grpc-port\n"),
        (["serve"], 2, "err", "epp serve: no endpoints are configured: give --pool-name, "),
        (["serve", "--grpc-prt"], 2, "err", "epp serve: unknown flag '--grpc-prt', did you mean"),
        (["check-config"], 2, "err", "epp check-config: expected FILE"),
        (["check-config", "-help"], 0, "out", "usage: epp check-config"),
        (["check-config", CHART], 0, "out", f"{CHART}: valid"),
        (["check-config", REFUSED], 1, "err", f"{REFUSED}: "),
        (["envoy-config", "--help"], 0, "out", "usage: epp envoy-config"),
        (["envoy-config", "x"], 2, "err", "epp envoy-config: unexpected argument 'x'"),
    ],
)  # fmt: skip
def test_the_command_exits_as_the_design_says(capsys, arguments, code, stream, start):
    """0, 1 or 2, and where the words go."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    written = {"out": captured.out, "err": captured.err}
    assert written.pop(stream).startswith(start)
    assert list(written.values()) == [""]


def test_standard_input_is_a_file_named_minus():
    """As a process: the exit code and the streams are real, and no server module is imported."""
    script = (
        "import sys; from epp.__main__ import main; code = main(['check-config', '-']);"
        "assert not {'grpc', 'envoy', 'aiohttp', 'kubernetes'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=DEFAULT_CONFIG.encode(),
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert done.stderr == b""
    assert done.stdout.startswith(b"standard input: valid, hash ")
    assert done.returncode == 0


def test_envoy_config_prints_a_bootstrap_or_writes_it(capsys, tmp_path):
    """Every flag is an option of the bootstrap; one that it refuses exits 2."""
    arguments = [
        "envoy-config",
        "--plaintext",
        "--listen-port=8085",
        "--request-body-mode=BUFFERED",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "port_value: 8085" in printed
    out = tmp_path / "envoy.yaml"
    assert main([*arguments, "--out", str(out)]) == 0
    assert out.read_text() == printed
    assert main(["envoy-config", "--picker-address=nowhere"]) == 2
    assert capsys.readouterr().err.startswith(
        "epp envoy-config: address 'nowhere' is not host:port"
    )
    assert main([*arguments, "--out", str(tmp_path / "none" / "envoy.yaml")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_past_decisions_are_held_against_a_configuration(tmp_path):
    """How many would have changed; none, by the one that made them."""
    write(tmp_path, 120)
    new, same = tmp_path / "new.yaml", tmp_path / "same.yaml"
    new.write_text(document(weight=0))
    same.write_text(document())
    code, out, _ = check(file=str(new), diff=str(same), capture=str(tmp_path))
    assert code == 0
    assert "scorer queue-scorer: weight 2 -> 0" in out
    (changed,) = re.findall(r"(\d+) of 120 past decisions \(.*%\) would have changed", out)
    assert 0 < int(changed) < 120
    assert "are not compared" not in out
    code, out, _ = check(file=str(same), capture=str(tmp_path))
    assert "0 of 120 past decisions (0.0%) would have changed" in out


def test_what_a_capture_cannot_tell_is_not_told(tmp_path):
    """Where peers had a part in decisions: how many, and of how many nothing can be said."""
    write(tmp_path, 120, live=Peered(document()))
    same = tmp_path / "same.yaml"
    same.write_text(document())
    code, out, _ = check(file=str(same), capture=str(tmp_path))
    assert code == 0
    (known,) = re.findall(
        r"^0 of (\d+) past decisions \(0.0%\) would have changed$", out, re.MULTILINE
    )
    (unknown,) = re.findall(
        r"^(\d+) more decisions \(.*% of all\) are not compared", out, re.MULTILINE
    )
    assert int(known) + int(unknown) == 120
    reasons = re.findall(r"^  (\d+): the (?:index|same)|^  (\d+): another", out, re.MULTILINE)
    assert sum(int(one or other) for one, other in reasons) == int(unknown)
    assert "shared by peers are not captured" in out


def test_a_capture_that_cannot_be_read_exits_2(tmp_path):
    """It is said which."""
    for capture in (tmp_path, tmp_path / "nothing"):
        code, _, err = check(file=CHART, capture=str(capture))
        assert code == 2
        assert f"--capture {capture} cannot be read" in err


def test_an_older_document_is_printed_as_it_loads_today(tmp_path):
    """What was rewritten by its line, then what there is to say of the new one; and once is enough."""
    code, out, err = check(file=OLD, upgrade=True)
    assert code == 0
    assert f"{OLD}: line 2: apiVersion inference.networking.x-k8s.io/v1alpha1 is " in err
    assert f"warning: {OLD}, rewritten: " in err
    assert "deprecated" not in err
    assert "# As written for the first releases" in out
    newer = tmp_path / "newer.yaml"
    newer.write_text(out)
    assert check(file=str(newer))[0] == 0
    again = check(file=str(newer), upgrade=True)
    assert again[:2] == (0, out)
    assert again[2].startswith(f"{newer}: nothing to rewrite\n")


def test_of_a_config_map_the_document_in_it_is_printed(tmp_path):
    """With the name of its key in what is told."""
    file = tmp_path / "configmap.yaml"
    file.write_text(config_map({"config.yaml": Path(OLD).read_text()}))
    code, out, err = check(file=str(file), upgrade=True)
    assert (code, out) == (0, check(file=OLD, upgrade=True)[1])
    assert err.startswith(f"{file}: config.yaml: line 2: ")


def test_what_stays_unsupported_is_told_behind_the_document():
    """It is printed all the same: what could be rewritten was."""
    code, out, err = check(file=REFUSED, upgrade=True)
    assert code == 1
    assert out == Path(REFUSED).read_text()
    assert "nothing to rewrite" in err
    assert len(err.splitlines()) == 4


@pytest.mark.parametrize(
    ("content", "exit_code", "problem"),
    [
        (b"[]", 1, "is not a mapping"),
        ("kind: EndpointPickerConfig".encode("utf-16"), 1, "is not UTF-8"),
        (None, 2, "cannot be read"),
    ],
)
def test_what_cannot_be_rewritten_is_told_in_a_sentence(tmp_path, content, exit_code, problem):
    """And nothing is printed."""
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content)
    code, out, err = check(file=str(file), upgrade=True)
    assert (code, out) == (exit_code, "")
    assert problem in err
