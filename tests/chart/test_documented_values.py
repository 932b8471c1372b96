"""What pages say to give to Helm is taken by the chart: each `--set`, and each piece of values."""

import json
import re
import shlex
from itertools import pairwise

import pytest
import yaml

from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config
from epp.flags import command_lines
from tests.chart.rendering import CHART, NAMESPACE, RELEASE, helm, objects, picker
from tests.test_docs import PAGES, ROOT, blocks, joined, name_of

KEYS = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"].keys()
NEEDED = ("--set", "image.repository=registry.example.com/homing,pool.name=vllm-llama")
"""What every installation says, and a page that shows one more value does not repeat."""
INLINE = re.compile(r"`--set ([^`\s]+)`")


def commands():
    """(page, values given) of each command of Helm that installs this chart."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in joined(block):
                words = shlex.split(line, comments=True)
                if words[:1] == ["helm"] and "charts/homing" in words:
                    sets = [value for flag, value in pairwise(words) if flag == "--set"]
                    yield page, tuple(sets)
        for value in INLINE.findall(page.read_text(encoding="utf-8")):
            yield page, (value,)


def pieces():
    """(page, text) of each block of YAML whose keys are all the chart's."""
    for page in PAGES:
        for block in blocks(page, "yaml"):
            for document in yaml.safe_load_all(block):
                if isinstance(document, dict) and document.keys() <= KEYS:
                    yield page, yaml.safe_dump(document)


def of_page(found):
    return [pytest.param(value, id=f"{name_of(page)}-{n}") for n, (page, value) in enumerate(found)]


def starts(binary, *arguments):
    done = helm(binary, "template", RELEASE, CHART, "--namespace", NAMESPACE, *NEEDED, *arguments)
    assert done.returncode == 0, done.stderr
    container = picker(objects(done.stdout))
    environment = {"NAMESPACE": NAMESPACE, "POD_NAME": "a", "POD_IP": "10.0.0.1"}
    return command_lines.parse_serve(container["args"][1:], environment)


@pytest.mark.parametrize("sets", of_page(commands()))
def test_what_is_set_on_a_page_is_taken(any_helm, sets):
    starts(any_helm, *(word for value in sets for word in ("--set", value)))


def test_values_on_a_page_are_taken(any_helm, tmp_path):
    """Pages that show some as a file; most say `--set`."""
    for _, text in pieces():
        (tmp_path / "values.yaml").write_text(text, encoding="utf-8")
        starts(any_helm, "--values", tmp_path / "values.yaml")


def test_pages_are_looked_through():
    """Those above would pass where nothing is found."""
    assert any("capture.share=0.1" in value for _, sets in commands() for value in sets)
    assert len(list(commands())) >= 7


@pytest.mark.parametrize("share", ["0.1", "0.25", "1", "1.0"])
def test_a_share_is_a_number_however_helm_reads_it(any_helm, share):
    """`--set` makes a string of a number with a point."""
    told = starts(any_helm, "--set", f"capture.enabled=true,capture.share={share}")
    assert told.capture_share == float(share)


@pytest.mark.parametrize("share", ["0", "0.0", "1.5", "2", "-0.1", "half"])
def test_a_share_that_is_none_is_refused(any_helm, share):
    done = helm(any_helm, "template", RELEASE, CHART, *NEEDED, "--set", f"capture.share={share}")
    assert done.returncode != 0
    assert "share" in done.stderr


def test_the_values_for_two_roles_are_the_rendered_ones():
    """The page of stages links the example; a golden output has the same values. The configuration
    loads without a warning about its stages.
    """
    example = yaml.safe_load((ROOT / "docs/examples/two-roles.yaml").read_text())
    rendered = yaml.safe_load((ROOT / "tests/chart/values/two-roles.yaml").read_text())
    assert example == rendered
    config = load_config(yaml.safe_dump(example["config"]), "two-roles.yaml", plugin_tables())
    assert {"decode", "prefill"} <= {name for name, _ in config.stages.profiles()}
    assert not [said for said in config.warnings if "stage" in said]
