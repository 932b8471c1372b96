"""The parts of the walk that no program of its own tests."""

import json

import yaml

from docs.walkthrough import GUESS, Walk, comparison, shadowed
from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config
from epp.plugins.strategies import STRATEGIES


def test_a_tuned_profile_becomes_the_shadow_of_another():
    """Two plug-ins of one type keep their parameters apart."""
    tuned = yaml.safe_load(STRATEGIES["weighted-scores"].config)
    tuned["plugins"][0]["parameters"] = {"matchLengthWeight": 0.5}
    text = yaml.safe_dump(shadowed(yaml.safe_load(GUESS), tuned))
    config = load_config(text, "shadowed", plugin_tables())
    assert [scorer.weight for scorer in config.profile.scorers] == [1, 6, 6]
    assert config.shadow is not None
    weights = {scorer.name: scorer.weight for scorer in config.shadow.scorers}
    assert weights["tuned-prefix-cache-scorer"] == 3
    assert len(weights) == 5
    assert config.warnings == ()


def test_what_was_driven_before_and_after_is_a_table(tmp_path):
    for at, name in enumerate(
        ("documents-before", "documents-after", "assistants-before", "assistants-after")
    ):
        (tmp_path / name).mkdir()
        told = {
            "requests": {"sent": 1_000 + at, "errors": at},
            "ttft_s": {"p50": 0.1, "p90": 0.2 + at},
            "e2e_s": {"mean": 2.0},
            "hit_rate": 0.5,
        }
        (tmp_path / name / "summary.json").write_text(json.dumps(told))
    rows = comparison(tmp_path)
    assert rows[2] == "| documents | before | 1,000 of 1,000 | 100 ms | 200 ms | 2.00 s | 50.0% |"
    assert rows[5] == "| assistants | after | 1,000 of 1,003 | 100 ms | 3.20 s | 2.00 s | 50.0% |"


def test_what_a_command_prints_is_on_the_page(tmp_path):
    walk = Walk(tmp_path, "/bin:/usr/bin")
    walk.run("printf 'a\\033[1mb\\033[0m\\r\\n'; seq 60")
    text = "\n".join(walk.page)
    assert text.startswith("```text\n$ printf")
    assert "\nab\n" in text
    assert text.rstrip().endswith("...\n```"), "long output is cut"
