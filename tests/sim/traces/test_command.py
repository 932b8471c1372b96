"""`sim trace`: from the command line to files, tables, JSON and exit codes."""

import json

import pytest

from sim.__main__ import main
from sim.traces.formats import open_trace

LINE = '{"timestamp": %d, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, %d]}\n'


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(LINE % (1000 * time, time + 3) for time in range(20)))
    return path


def run(*arguments):
    return main(["trace", *map(str, arguments)])


def test_inspect_prints_a_table_and_a_sentence(mooncake, capsys):
    """What a reader wants to know first."""
    assert run("inspect", mooncake) == 0
    text = capsys.readouterr().out
    for part in ("in.jsonl (mooncake)", "20 in 19 s", "Hit ratios", "working set fits"):
        assert part in text


def test_inspect_calls_only_what_no_run_can_beat_a_bound(mooncake, capsys):
    """Placement by affinity is a rule of thumb, and a scheduler may do better."""
    assert run("inspect", mooncake) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Only 'one cache' with unlimited room is an upper bound" in text
    assert "(affinity); a scheduler may do better" in text


def test_inspect_calls_estimates_by_their_name(mooncake, capsys):
    """What placements reach, GPU time, and what follows from them; not what the trace says."""
    assert run("inspect", mooncake) == 0
    text = " ".join(capsys.readouterr().out.split())
    for told in (
        "estimates for placements", "The others are estimates of", "GPU time (estimate)",
        "Conclusions from these estimates, by rules of thumb: The working set fits",
    ):  # fmt: skip
        assert told in text
    assert "tokens (estimate)" not in text
    assert "prompt │ 1,100 │ 1,100 │ 1,100 │ 1,100 │ 1,100 │ 22,000" in text
    assert run("inspect", mooncake, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert "prompt_tokens" not in document["estimates"]
    for path in document["estimates"]:
        found = document
        for name in path.split("."):
            found = found[name]


def test_inspect_calls_tokens_that_were_not_counted_estimates(tmp_path, capsys):
    """Of raw requests: by the bytes of the prompt, and by the limit of the answer."""
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"model": "m", "prompt": "%s"}\n' % ("word " * 80))
    assert run("inspect", raw) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens (estimate)" in text
    assert "Prompt tokens are estimated as one for every 4 bytes of text" in text
    assert run("inspect", raw, "--json") == 0
    assert "prompt_tokens" in json.loads(capsys.readouterr().out)["estimates"]


def test_inspect_of_requests_at_one_instant_has_no_rate(tmp_path, capsys):
    """No number is divided by no time."""
    path = tmp_path / "instant.jsonl"
    path.write_text(LINE % (0, 3) * 3)
    assert run("inspect", path) == 0
    text = capsys.readouterr().out
    assert "3 at one instant" in text
    assert "inf" not in text


def test_inspect_prints_json(mooncake, capsys):
    """One document with a schema."""
    assert run("inspect", mooncake, "--json", "--pods", 2, "--kv-tokens", 1024) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["pool"] == {
        "pods": 2,
        "profile": "llama-3.1-8b-h100-tp1",
        "kv_tokens": 1024,
    }
    # Two whole blocks of 1,100 tokens, in all but the first.
    assert document["ceilings"]["one_cache"] == pytest.approx(19 * 1024 / (20 * 1100))


def test_inspect_takes_a_profile_of_ones_own(mooncake, tmp_path, capsys):
    """As `sim replay` does: FILE.toml; one that is no good is told, exit code 2."""
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\nlike = "llama-3.1-8b-h100-tp1"\nkv_tokens = 2048\n')
    assert run("inspect", mooncake, "--json", "--profile", path) == 0
    pool = json.loads(capsys.readouterr().out)["pool"]
    assert (pool["profile"], pool["kv_tokens"]) == ("mine", 2048)
    with pytest.raises(SystemExit) as left:
        run("inspect", mooncake, "--profile", tmp_path / "none.toml")
    assert left.value.code == 2
    assert "none.toml: No such file or directory" in capsys.readouterr().err


def test_generate_writes_the_same_file_for_one_seed(tmp_path, capsys):
    """Plain and packed; another seed writes another."""
    outs = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl", "a.gz", "b.gz")]
    for out, seed in zip(outs, (1, 1, 2, 1, 1), strict=True):
        assert run("generate", "agent-tree", "--requests", 50, "--seed", seed, "--out", out) == 0
    first, again, other, packed, packed_again = (out.read_bytes() for out in outs)
    assert first == again != other
    assert packed == packed_again
    assert list(open_trace(outs[0])) == list(open_trace(outs[3]))
    assert "50 requests written" in capsys.readouterr().out


def test_generate_takes_a_rate_and_bursts(tmp_path, capsys):
    """In the place of the workload's own stages."""
    out = tmp_path / "out.jsonl"
    flags = ("--rate", 50, "--duration", 10, "--burstiness", 0)
    assert run("generate", "code-generation", *flags, "--requests", 400, "--out", out) == 0
    capsys.readouterr()
    assert run("generate", "zero-reuse", *flags, "--out", out, "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"] in {499, 500}


def test_convert_keeps_what_prompts_share(mooncake, tmp_path, capsys):
    """Mooncake to a capture and back: the same lengths, the same ceilings."""
    capture, back = tmp_path / "capture.jsonl", tmp_path / "back.jsonl"
    assert run("convert", mooncake, capture, "--to", "capture") == 0
    assert run("convert", capture, back, "--to", "mooncake") == 0
    capsys.readouterr()
    found = []
    for path in (mooncake, capture, back):
        assert run("inspect", path, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        found.append([document[name] for name in ("ceilings", "prompt_tokens", "reuse", "gap_cv")])
    assert found[0] == found[1]
    # Under new ids requests may be placed on other pods, but share the same.
    assert found[0][0]["one_cache"] == found[2][0]["one_cache"]
    assert found[0][1:] == found[2][1:]


WORKLOAD = """
data: {type: random}
load:
  type: poisson
  stages: [{rate: 10, duration: 3}]
"""


def test_the_seed_is_told_first_where_it_decides(mooncake, tmp_path, capsys):
    """As text the first line, as JSON a member; requests that are listed do not depend on it."""
    described, seeded, out = tmp_path / "w.yaml", tmp_path / "s.yaml", tmp_path / "out.jsonl"
    described.write_text(WORKLOAD)
    seeded.write_text(WORKLOAD + "  base_seed: 4\n")
    written = ("--out", out, "--force")
    converted = (out, "--to", "capture", "--force")
    for call, told in [
        (("inspect", mooncake), True),
        (("generate", "rag", "--requests", 5, *written), True),
        (("convert", described, *converted), True),
        (("convert", seeded, *converted), False),
        (("convert", mooncake, *converted), False),
    ]:
        assert run(*call, "--seed", 7) == 0
        assert capsys.readouterr().out.startswith("seed 7\n") == told
        assert run(*call, "--seed", 7, "--json") == 0
        assert json.loads(capsys.readouterr().out).get("seed") == (7 if told else None)


def test_a_bar_knows_how_much_there_is_to_read(mooncake, capsys, monkeypatch):
    """On a terminal it ends at all of it, which a bar without an end does not show."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("inspect", mooncake, "--json") == 0
    assert "100%" in capsys.readouterr().err


def test_raw_requests_leave_no_text_in_a_capture(tmp_path):
    """And are hidden under a salt that nobody knows, or under the one that was given."""
    raw = tmp_path / "raw.jsonl"
    body = {"model": "m", "prompt": "The secret of the house. " * 40}
    raw.write_text("\n".join(json.dumps({"body": body, "session": "alice"}) for _ in range(3)))
    salt = tmp_path / "salt"
    salt.write_text("pepper\n")
    outs = [tmp_path / f"{number}.jsonl" for number in range(4)]
    for number, out in enumerate(outs):
        flags = ("--salt-file", salt) if number > 1 else ()
        assert run("convert", raw, out, "--to", "capture", *flags) == 0
    texts = [out.read_text() for out in outs]
    assert not any("secret" in text or "alice" in text for text in texts)
    assert texts[0] != texts[1] != texts[2] == texts[3]
    assert all(one.shareable_tokens > 200 for one in open_trace(outs[0]))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("inspect", "{missing}"), "No such file"),
        (("inspect", "{bad}"), "bad.jsonl:2: input_length: Expected this field, found none"),
        (("inspect", "{in}", "--format", "azure"), "in.jsonl:1: Expected columns TIMESTAMP"),
        (("inspect", "{in}", "--block-tokens", "100"), "got 100"),
        (("convert", "{in}", "{in}", "--to", "mooncake"), "in.jsonl exists; --force replaces it"),
        (("convert", "{bad}", "{out}", "--to", "capture"), "bad.jsonl:2: input_length"),
        (("generate", "rag", "--out", "{missing}/out"), "none/out: No such file or directory"),
        (("generate", "rag", "--out", "{folder}", "--force"), "{folder}: Is a directory"),
        (
            ("inspect", "{worse}", "--format", "mooncake", "--skip-bad"),
            "worse.jsonl:1: Expected JSON: ",
        ),
        (
            ("inspect", "{empty}", "--format", "mooncake"),
            "empty: The trace is empty, expected at least",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(mooncake, tmp_path, capsys, arguments, problem):
    """On stderr, with exit code 1, and no half-written file is left."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text(LINE % (0, 3) + '{"timestamp": 0, "output_length": 1}\n')
    worse, empty, folder = tmp_path / "worse.jsonl", tmp_path / "empty", tmp_path / "folder"
    worse.write_text("{oops\n{oops\n")
    empty.touch()
    folder.mkdir()
    places = {"in": mooncake, "bad": bad, "missing": tmp_path / "none", "out": tmp_path / "out"}
    places |= {"worse": worse, "empty": empty, "folder": folder}
    names = sorted(path.name for path in tmp_path.iterdir())
    before = mooncake.read_bytes()
    assert run(*(argument.format(**places) for argument in arguments)) == 1
    assert problem.format(**places) in capsys.readouterr().err
    assert mooncake.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_convert_of_an_empty_trace_writes_nothing(tmp_path, capsys):
    """A capture without requests would be no more use than the trace."""
    trace, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    trace.write_text('{"format": "homing-capture", "version": 1}\n')
    assert run("convert", trace, out, "--to", "capture") == 1
    assert capsys.readouterr().err == (
        f"sim: {trace}: The trace is empty, expected at least one request\n"
    )
    assert not out.exists()


@pytest.mark.parametrize("option", ["--burstiness", "--duration"])
def test_options_that_do_not_go_together_are_a_wrong_call(tmp_path, capsys, option):
    """Exit code 2, as for an option that there is not."""
    assert run("generate", "rag", option, "2", "--out", tmp_path / "out") == 2
    assert f"{option} needs --rate" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_skipped_lines_are_counted_in_what_is_printed(mooncake, capsys):
    """With the first few of them."""
    with mooncake.open("a") as file:
        file.write("{}\n")
    assert run("inspect", mooncake, "--skip-bad") == 0
    shown = capsys.readouterr().out.split()
    assert "1 malformed lines skipped" in " ".join(shown)
    # The table breaks long paths anywhere.
    assert "in.jsonl:21" in "".join(shown)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "no-such-kind", "--out", "x"),
        ("inspect",),
        ("inspect", "x", "--pods", "0"),
        ("generate", "rag", "--out", "x", "--burstiness", "-1"),
        ("generate", "rag", "--out", "x", "--rate", "nan"),
        ("convert", "x", "y", "--to", "azure"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments):
    """As every command does."""
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2


def test_generate_writes_steady_traffic(tmp_path, capsys):
    """As the capture's own draw has it; the file says that it is steady."""
    out = tmp_path / "out.jsonl"
    flags = ("--rate", 5, "--duration", 60, "--steady")
    assert run("generate", "interactive-chat", *flags, "--out", out) == 0
    trace = open_trace(out)
    read, generated = list(trace), trace.generated()
    assert generated is not None
    assert generated.steady
    drawn = list(generated.arrivals(1))
    assert [(one.turn, one.after) for one in read] == [(one.turn, one.after) for one in drawn]
    assert any(one.turn and one.after is None for one in read)
    assert run("generate", "multi-turn", *flags, "--out", tmp_path / "other.jsonl") == 2
    assert "--steady with multi-turn: Expected sessions that end" in capsys.readouterr().err
