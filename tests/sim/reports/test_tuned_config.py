"""A configuration under its comment, and in a ConfigMap."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from epp.commands.check_config import CONFIG_MAP_KEY
from epp.configuration.config import DEFAULT_CONFIG
from sim.reports.tuned_config import KEY, config_map, with_comment

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed; the dev group has it"
)


@given(st.lists(st.text(max_size=200), max_size=5), st.text(max_size=20))
def test_no_comment_gets_out_of_its_lines(paragraphs, name):
    """Whatever a trace file is called, the configuration is what it was."""
    text = with_comment(
        [*paragraphs, f"trace {name}\nkind: Other\r\u0085\u2028plugins: []"], DEFAULT_CONFIG
    )
    assert yaml.safe_load(text) == yaml.safe_load(DEFAULT_CONFIG)
    manifest = yaml.safe_load(config_map("homing-config", text))
    assert manifest["data"] == {KEY: text}
    assert (manifest["kind"], manifest["metadata"]) == ("ConfigMap", {"name": "homing-config"})


def test_the_manifest_is_one_of_kubernetes():
    """By its schemas, the oldest and the newest that the chart is for."""
    manifest = yaml.safe_load(config_map("homing-config", with_comment(["told"], DEFAULT_CONFIG)))
    for version in ("1.31", "1.36"):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_key_is_the_one_that_is_looked_for():
    """By the chart and by `epp check-config`."""
    assert KEY == CONFIG_MAP_KEY


def test_long_paragraphs_are_wrapped():
    """As the comments of people are; the first line tells where one begins."""
    text = with_comment(["word " * 60, "end"], "a: 1\n")
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert [line[:3] for line in lines] == ["# w", "#  ", "#  ", "#  ", "# e", "a: "]
