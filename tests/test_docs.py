"""The documentation is true: what it generates, links to, shows and asks people to type."""

import argparse
import re
import shlex
import sys
from importlib import invalidate_caches
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from msgspec import structs

from docs.pictures import PICTURES
from docs.reference import refreshed
from epp import __main__ as epp_command
from epp.configuration.build import ENTRY_POINTS, build_settings, plugin_tables
from epp.configuration.config import load_config
from epp.configuration.explaining import explain
from epp.core.abilities import Abilities
from epp.core.decision.inputs import PageScraped, PoolReplaced
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.candidates import Candidates
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.knowledge.request_load import HELD_UP_MAX
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint, EndpointMetrics
from epp.flags import command_lines
from epp.plugins import added_time
from epp.plugins.added_time import AddedTime
from epp.shell.files.endpoints_file import load_endpoints
from epp.shell.operators.metrics.metric_table import METRICS
from sim import __main__ as sim_command
from sim.cluster.built_in import ENTRY_POINTS as STRATEGIES
from sim.cluster.built_in import strategies
from sim.engine.profiles import DEFAULT_PROFILE, find_profile, profile_as_toml

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in (
            "CONTRIBUTING.md",
            "SECURITY.md",
            "bench/README.md",
            "charts/homing/README.md",
            "deploy/README.md",
        )
    ),
]
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.yaml"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OTHERS = frozenset(
    {
        ".", "cat", "cp", "curl", "deploy/migrate-values", "docker", "envoy", "export", "fi", "helm",
        "if", "kill", "kind", "kubectl", "ls", "python3", "sed", "until",
    }
)  # fmt: skip
"""Commands in fenced blocks that are not ours."""


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(page, *languages):
    """Content of the fenced blocks of `page` in one of `languages`."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [content for language, content in found if language in languages]


def commands():
    """(page, words) of each command line that a page asks people to type."""
    for page in PAGES:
        lines = [line for block in blocks(page, "sh") for line in joined(block)]
        for block in blocks(page, "console"):
            lines += [line[2:] for line in block.splitlines() if line.startswith("$ ")]
        for line in lines:
            words = shlex.split(line.removesuffix("&"), comments=True)
            if words:
                yield page, words[: words.index(">")] if ">" in words else words


def joined(block):
    return block.replace("\\\n", " ").splitlines()


def anchors(page):
    """What GitHub makes of the headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


CHART = ROOT / "charts/homing/README.md"
"""Its table is made by tests/chart/values_table.py."""


@pytest.mark.parametrize("page", [page for page in PAGES if page != CHART], ids=name_of)
def test_generated_parts_are_what_the_code_says(page):
    """A plugin, flag or metric that changes changes its page; `make docs` writes it."""
    text = page.read_text(encoding="utf-8")
    assert text == refreshed(text), f"{name_of(page)} is stale: run `make docs`"


def test_every_parameter_has_a_meaning():
    """A row of a generated table has no empty last cell."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page):
    """Files exist, and headings that are linked to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), f"{name_of(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: {link}"


class ParsedError(Exception):
    """Raised in place of running a command that parsed."""


def test_commands_can_be_typed(tmp_path, monkeypatch):
    """Flags are known and have values that are taken; make targets exist.

    A profile that a command is to write is there for the commands after it.
    """
    monkeypatch.chdir(tmp_path)
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, arguments=None, namespace=None):
        parse(self, arguments, namespace)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    parsers = {
        "serve": lambda rest: command_lines.parse_serve(rest, {}),
        "check-config": command_lines.parse_check,
        "envoy-config": command_lines.parse_envoy,
        "explain": command_lines.parse_explain,
        "top": command_lines.parse_top,
    }
    seen = set()
    for page, words in commands():
        command, *rest = words
        seen.add(command)
        match command:
            case "epp":
                parsers[rest[0]](rest[1:])
            case "sim":
                with pytest.raises(ParsedError):
                    sim_command.main(rest)
                if rest[:2] == ["profile", "estimate"]:
                    profile = profile_as_toml(find_profile(DEFAULT_PROFILE), {})
                    Path(rest[rest.index("--out") + 1]).write_text(profile)
            case "make":
                assert set(rest) <= targets, f"{name_of(page)}: {words}"
            case _:
                assert command in OTHERS, f"{name_of(page)}: {words}"
    assert {"epp", "sim", "make"} <= seen


def transcripts():
    """(page, arguments, output) of each `epp check-config` that a page shows with its output."""
    for page in PAGES:
        for block in blocks(page, "console"):
            for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, output = command.partition("\n")
                yield page, shlex.split(line), output


def test_shown_output_is_what_is_printed(monkeypatch, capsys):
    """Line by line; `...` stands for any lines."""
    monkeypatch.chdir(ROOT)
    shown = list(transcripts())
    assert shown
    for _, words, output in shown:
        assert words[:2] == ["epp", "check-config"]
        epp_command.main(words[1:])
        printed = capsys.readouterr()
        pattern = re.escape(output).replace(re.escape("...\n"), "(?:.*\n)*")
        assert re.fullmatch(pattern, printed.err + printed.out), printed.err + printed.out


def documents(kind):
    """YAML of a `kind` on pages and in the folder of examples, with its place."""
    for page in PAGES:
        if page.name != "plugins.md":
            for block in blocks(page, "yaml"):
                yield from [(name_of(page), block)] * (kind in yaml.safe_load(block))
    for file in EXAMPLES:
        text = file.read_text(encoding="utf-8")
        if file.name not in {"misspelt.yaml", "older.yaml"} and kind in yaml.safe_load(text):
            yield name_of(file), text


METRIC = re.compile(r"\bhoming_[a-z0-9_]*[a-z0-9]\b")
SERIES = re.compile(r"_(bucket|sum|count)$")
OTHER_NAMES = frozenset({"homing_epp", "homing_near", "homing_peer", "homing_rivals"})
"""Our distributions, a module of an example, and what a command looks for in names of metrics."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_metric_on_a_page_exists(page):
    """As a metric or one of its series; that every metric is on a page, its generated table says."""
    there = {spec.name for spec in METRICS} | OTHER_NAMES
    named = set(METRIC.findall(page.read_text(encoding="utf-8")))
    assert {name for name in named if not {name, SERIES.sub("", name)} & there} == set()


def test_the_page_of_plugins_names_every_column_and_ability():
    """Whoever adds one says what it is."""
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    columns = {name for name, one in vars(Candidates).items() if isinstance(one, property)}
    names = {*columns, *Abilities.__struct_fields__} - {"slot", "version"}
    assert {name for name in names if f"`{name}" not in page} == set()


def test_every_scenario_of_the_examples_has_its_picture_on_a_page():
    """`python -m docs.pictures` draws each of them."""
    names = {file.stem for file in (ROOT / "docs/examples/scenarios").glob("*.toml")}
    assert names == set(PICTURES)
    page = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
    for name in names:
        drawn = ET.parse(ROOT / f"docs/incidents/{name}.svg").getroot()
        assert len(drawn.findall(".//{*}polyline")) >= len(PICTURES[name].lines)
        assert f"](incidents/{name}.svg)" in page
        assert f"](examples/scenarios/{name}.toml)" in page


def test_constants_of_the_default_scorer_have_their_source():
    """All of them, with the values of the code; where a number is from is no empty cell."""
    page = (ROOT / "docs/scoring.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\S+)[^|]* \| (.+) \|$", page, re.MULTILINE)
    told = {name: float(value.replace(",", "")) for name, value, source in rows if source.strip()}
    constants = {
        name: value
        for name, value in (vars(added_time) | {"HELD_UP_MAX": HELD_UP_MAX}).items()
        if name.isupper() and not name.startswith("_")
    }
    parameters = {
        field.encode_name: float(field.default)
        for field in structs.fields(AddedTime)
        if field.default != ""
    }
    assert told == constants | parameters | {"peakPrefillThroughput": PREFILL_TOKENS_PER_S}


def test_configurations_load():
    """Without a warning: what we show is what we would have people write.

    A walkthrough shows what `sim tune` wrote: a scorer that it switched off stays among the plugins.
    """
    shown = list(documents("kind"))
    assert shown
    for where, text in shown:
        tuned = where.startswith("docs/walkthrough")
        for warning in load_config(text, where, plugin_tables()).warnings:
            assert tuned, warning
            assert warning.endswith("is in no profile and has no effect")


def test_endpoints_files_load():
    shown = list(documents("endpoints"))
    assert shown
    for where, text in shown:
        assert load_endpoints(text.encode(), where).endpoints


def test_files_on_pages_are_the_examples_that_they_name():
    """Pages show what their commands read."""
    shown = [*blocks(ROOT / "README.md", "yaml"), *blocks(ROOT / "docs/start.md", "yaml")]
    for file in ("config.yaml", "endpoints.yaml"):
        assert (ROOT / "docs/examples" / file).read_text(encoding="utf-8") in shown
    example = (ROOT / "docs/examples/prefill-decode.yaml").read_text(encoding="utf-8")
    assert example in blocks(ROOT / "docs/disaggregation.md", "yaml")


PLUGINS = ROOT / "docs/plugins.md"


@pytest.fixture
def near(tmp_path, monkeypatch):
    """The module of the page on plugins, installed as its distribution would be."""
    (tmp_path / "homing_near.py").write_text("\n".join(blocks(PLUGINS, "python")), encoding="utf-8")
    information = tmp_path / "homing_near-1.0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: homing-near\nVersion: 1.0.0\n")
    classes = ("Near", "ShortQueue", "TwoChoices", "UserIndexSettings", "SameUser")
    entries = "".join(f"{name} = homing_near:{name}\n" for name in classes)
    entries += f"[{STRATEGIES}]\nnear = homing_near:STRATEGIES\n"
    (information / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{entries}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "homing_near", raising=False)
    invalidate_caches()
    strategies.cache_clear()
    yield
    strategies.cache_clear()
    sys.modules.pop("homing_near", None)


def scheduler_of(text):
    scheduler = Scheduler(build_settings(load_config(text, "plugins.md", plugin_tables())), seed=1)
    zones = [
        Endpoint(
            endpoint_id=f"pod-{zone}:8000",
            name=f"pod-{zone}",
            address=f"10.0.0.{number}:8000",
            labels={"zone": zone},
        )
        for number, zone in enumerate("abc", 1)
    ]
    scheduler.take(PoolReplaced(zones), 0.0)
    for slot, waiting in enumerate((0.0, 3.0, 30.0)):
        scheduler.take(PageScraped(slot, EndpointMetrics(waiting_requests=waiting)), 0.0)
    return scheduler


def endpoint_for(scheduler, **headers):
    request = InferenceRequest(
        request_id="r", headers={f"x-{name}": value for name, value in headers.items()}
    )
    decision = scheduler.schedule(request, 0.1)
    assert isinstance(decision, Decision)
    return decision.endpoint.name


@pytest.mark.usefixtures("near")
def test_the_documented_scorer_prefers_the_zone_that_is_asked_for():
    """Installed by its entry point and configured by the document on its page."""
    (document,) = blocks(PLUGINS, "yaml")
    scheduler = scheduler_of(document)
    assert [endpoint_for(scheduler, zone=zone) for zone in "cabac"] == [
        f"pod-{zone}" for zone in "cabac"
    ]
    assert "far = 0.5" in explain(load_config(document, "plugins.md", plugin_tables()))


@pytest.mark.usefixtures("near")
def test_the_documented_strategy_has_a_name():
    """By which the simulator runs it."""
    text = strategies()["near-and-idle"].config
    scorers = load_config(text, "plugins.md", plugin_tables()).profile.scorers
    assert [one.name for one in scorers] == ["near-scorer", "active-request-scorer"]


@pytest.mark.usefixtures("near")
def test_the_documented_filter_index_and_picker_work_together():
    """The long queue is never chosen; a user stays where the first request went."""
    scheduler = scheduler_of(
        """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: short-queue-filter
- type: same-user-scorer
"""
    )
    first = endpoint_for(scheduler, user="ada")
    assert {endpoint_for(scheduler, user="ada") for _ in range(5)} == {first}
    assert {endpoint_for(scheduler, user=f"user-{n}") for n in range(20)} == {"pod-a", "pod-b"}


@pytest.mark.usefixtures("near")
def test_the_documented_picker_takes_the_better_of_two():
    """With three candidates the worst is never the better one of two."""
    scheduler = scheduler_of(
        """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: two-choices-picker
"""
    )
    assert {endpoint_for(scheduler) for _ in range(30)} == {"pod-a", "pod-b"}
