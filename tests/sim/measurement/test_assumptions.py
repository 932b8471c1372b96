"""What is not modelled, and the constants that come from one set-up."""

import json
import re
from pathlib import Path

import msgspec

from sim.__main__ import main
from sim.engine.profiles import DEFAULT_PROFILE, Profile, find_profile, profiles_in
from sim.measurement.assumptions import ASSUMED, NOT_MODELLED, assumptions_of
from sim.reports.report import assumption_rows, markdown_table

PAGE = Path(__file__).parents[3] / "docs" / "simulator.md"
TRACE = (
    '{"format": "homing-capture", "version": 1}\n'
    '{"time_s": 0, "prompt_tokens": 65, "output_tokens": 2}\n'
)


def test_each_constant_is_one_that_a_profile_may_override():
    """And the default lies within the range that is told."""
    fields = {field.name for field in msgspec.structs.fields(Profile)}
    default = find_profile(DEFAULT_PROFILE)
    for one in ASSUMED:
        assert one.field in fields
        assert one.low <= one.factor * getattr(default, one.field) <= one.high
        assert one.source


def test_the_documentation_says_the_same():
    """Every sentence and every row."""
    page = PAGE.read_text()
    for sentence in NOT_MODELLED:
        assert f"- {sentence}\n" in page
    told = assumptions_of([find_profile(DEFAULT_PROFILE)])
    assert markdown_table(assumption_rows(told)) in page


def test_every_report_ends_with_them(tmp_path):
    """With the values of the profiles that ran, a user's own among them."""
    trace, mine = tmp_path / "trace.jsonl", tmp_path / "mine.toml"
    trace.write_text(TRACE)
    mine.write_text(f'[mine]\nlike = "{DEFAULT_PROFILE}"\nfrontend_s = 0.017\n')
    assert profiles_in(mine)["mine"].frontend_s == 0.017
    both = ["--config", "random", "--config", "round-robin", "--seeds", "1"]
    for command in (["replay"], ["compare", *both], ["sweep", *both, "--rates", "1"]):
        out = tmp_path / command[0]
        flags = ["--profile", str(mine), "--profile", DEFAULT_PROFILE, "--out", str(out)]
        assert main([command[0], str(trace), *command[1:], *flags]) == 0
        (first, *_) = json.loads((out / "summary.json").read_bytes())["assumptions"]
        assert first["values"] == {"mine": 17, DEFAULT_PROFILE: 10}
        report = (out / "report.md").read_text()
        assert "| 17 ms, 10 ms | 5 to 20 ms |" in report
        page = (out / "report.html").read_text()
        for text, code in ((report, r"`\1`"), (page, r"<code>\1</code>")):
            told = (re.sub("`(.+?)`", code, sentence) for sentence in NOT_MODELLED)
            assert all(sentence.split("'")[0] in text for sentence in told)
            assert text.index("What was run") < text.index("What is not modelled")
