"""Alerts, recording rules and dashboards: promtool understands them, and the metrics exist."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from docs.dashboards import DASHBOARDS, FOLDER, text_of
from epp.shell.operators.metrics.metric_table import METRICS
from tests.chart.golden_texts import golden_text
from tests.chart.rendering import CHART, objects, one, refusal, rendered

RULES = CHART / "files/rules.yaml"
CASES = Path(__file__).parent / "rule_cases.yaml"
CASES_OF_DAYS = Path(__file__).parent / "rule_cases_of_days.yaml"
RUNBOOKS = CHART.parents[1] / "docs/runbooks.md"
RUNBOOK_URL = "https://github.com/homing-epp/homing/blob/main/docs/runbooks.md"
"""As in the files; the chart puts its value in place of it."""
PARTS = 4
NAME = re.compile(r"\bhoming_[a-z0-9_]+")
RECORDED = re.compile(r"\bhoming:[a-z0-9_:]+")


def exported():
    """Names as they are queried: a histogram is three."""
    for spec in METRICS:
        if spec.kind in {"histogram", "summary"}:
            parts = ("sum", "count") if spec.kind == "summary" else ("bucket", "sum", "count")
            yield from (f"{spec.name}_{part}" for part in parts)
        else:
            yield spec.name


def rules():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboards():
    """Each dashboard by the name of its file."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(FOLDER.glob("*.json"))
    }


def dashboard_expressions():
    """(where, expression) of each panel and annotation."""
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"]
        for annotation in board["annotations"]["list"]:
            yield f"{name}: {annotation['name']}", annotation["expr"]


def runbook_of(alert):
    return f"{RUNBOOK_URL}#{alert.lower()}"


def run(*command):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)


def test_promtool_takes_the_rules(promtool):
    done = run(promtool, "check", "rules", RULES)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("file", "part"), [*((CASES, part) for part in range(PARTS)), (CASES_OF_DAYS, 0)]
)
def test_alerts_fire_when_they_should_and_not_before(promtool, tmp_path, file, part):
    """The cases of rule_cases.yaml together take promtool too long on a busy machine."""
    cases = yaml.safe_load(file.read_text(encoding="utf-8")) | {"rule_files": [str(RULES)]}
    cases["tests"] = cases["tests"][part :: PARTS if file is CASES else 1]
    for test in cases["tests"]:
        for case in test["alert_rule_test"]:
            for expected in case["exp_alerts"]:
                expected["exp_annotations"]["runbook_url"] = runbook_of(case["alertname"])
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump(cases), encoding="utf-8")
    done = run(promtool, "test", "rules", file)
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_alert_has_a_case():
    tests = [
        test
        for file in (CASES, CASES_OF_DAYS)
        for test in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]
    ]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    for fires in (True, False):
        tested = {
            case["alertname"]
            for test in tests
            for case in test["alert_rule_test"]
            if bool(case["exp_alerts"]) is fires
        }
        assert tested == alerts, "fires" if fires else "does not fire"


def test_every_alert_says_what_is_the_matter():
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"info", "warning", "critical"}
            assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_every_alert_has_its_runbook_and_every_runbook_its_alert():
    """A section under its name, with what it means, what to look at and what to do."""
    text = RUNBOOKS.read_text(encoding="utf-8")
    sections = dict(
        re.findall(r"^## (Homing\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert list(sections) == list(alerts)
    for name, section in sections.items():
        assert alerts[name]["annotations"]["runbook_url"] == runbook_of(name)
        for part in ("Means.", "Look at.", "Do."):
            assert f"\n**{part}**" in section, f"{name}: {part}"


def test_runbooks_ask_for_metrics_that_exist(promtool, tmp_path):
    """With labels that they have; and promtool understands the queries."""
    text = RUNBOOKS.read_text(encoding="utf-8")
    queries = [
        line
        for block in re.findall(r"^```promql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(queries) >= len([rule for rule in rules() if "alert" in rule])
    assert set(NAME.findall(text)) <= set(exported()) | {spec.name for spec in METRICS}
    check_labels(("a runbook", query) for query in queries)
    records = [{"record": f"runbook:{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "runbooks.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "runbooks", "rules": records}]}))
    done = run(promtool, "check", "rules", file)
    assert done.returncode == 0, done.stderr + done.stdout


def test_dashboards_are_what_their_source_says():
    """`python -m docs.dashboards` writes them."""
    assert sorted(dashboards()) == sorted(board.file.name for board in DASHBOARDS)
    for board in DASHBOARDS:
        assert board.file.read_text(encoding="utf-8") == text_of(board), board.file.name


def test_every_panel_says_what_it_shows():
    """A sentence each; and every dashboard lets one choose, and leads to the others."""
    for name, board in dashboards().items():
        variables = [variable["name"] for variable in board["templating"]["list"]]
        assert variables[:2] == ["DS_PROMETHEUS", "job"], name
        assert board["links"][0]["tags"] == ["homing"], name
        for variable in board["templating"]["list"][2:]:
            text = json.dumps(board["panels"])
            assert f"${variable['name']}" in text, f"{name}: ${variable['name']} chooses nothing"
        for panel in board["panels"]:
            if panel["type"] != "row":
                assert panel["description"].endswith("."), f"{name}: {panel['title']}"
                assert panel["targets"], f"{name}: {panel['title']}"


def test_promtool_takes_every_expression_of_the_dashboards(promtool, tmp_path):
    """Each as a recording rule, with Grafana's variables filled in."""
    filled = [
        re.sub(r"\$(job|model|endpoint)\b", ".*", expression.replace("$__rate_interval", "5m"))
        for _, expression in dashboard_expressions()
    ]
    assert not [expression for expression in filled if "$" in expression]
    records = [{"record": f"panel:{n}", "expr": text} for n, text in enumerate(filled)]
    file = tmp_path / "dashboard.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    done = run(promtool, "check", "rules", file)
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_metric_that_is_asked_for_is_exported():
    """In rules and dashboard; and what alerts read of recording rules is recorded."""
    known = set(exported())
    records = {rule["record"] for rule in rules() if "record" in rule}
    for where, expression in (
        *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
        *dashboard_expressions(),
    ):
        used = set(NAME.findall(expression))
        assert used | set(RECORDED.findall(expression)), where
        assert used <= known, where
        assert set(RECORDED.findall(expression)) <= records, where


def test_labels_that_are_asked_for_exist():
    """In rules and dashboards."""
    check_labels(
        (
            *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
            *dashboard_expressions(),
        )
    )


def check_labels(expressions):
    """Those of the metrics, or what Prometheus adds to a target."""
    added = {"job", "namespace", "pod", "instance", "le"}
    labels = {spec.name: set(spec.labels) for spec in METRICS}
    selector = re.compile(r"(homing_[a-z0-9_]+)\{([^}]*)\}")
    for where, expression in expressions:
        grouped = {
            label.strip()
            for group in re.findall(r"\bby \(([^)]*)\)", expression)
            for label in group.split(",")
        }
        names = [re.sub(r"_(bucket|sum|count)$", "", name) for name in NAME.findall(expression)]
        known = added.union(*(labels.get(name, set()) for name in names))
        if names:
            assert grouped <= known, where
        for name, inside in selector.findall(expression):
            asked = set(re.findall(r"([a-z_]+)\s*[!=]=?~?", inside))
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert asked <= added | labels[base], where


def test_panels_have_places_and_names_of_their_own():
    """No two overlap, no two have one id."""
    for board in dashboards().values():
        check_places(board["panels"])


def check_places(panels):
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_runbooks_may_be_somewhere_else(helm_4):
    """On a wiki of one's own, where the cluster reaches nothing outside."""
    values = Path(__file__).parent / "values/monitored.yaml"
    base = "https://wiki.example.com/homing"
    text = rendered(helm_4, values, "--set", f"prometheusRule.runbookBaseUrl={base}")
    rule = one(objects(text), "PrometheusRule")
    found = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]
    assert [each["annotations"]["runbook_url"] for each in found] == [
        f"{base}#{each['alert'].lower()}" for each in found
    ]
    bad = "prometheusRule.runbookBaseUrl=somewhere"
    assert "runbookBaseUrl" in refusal(helm_4, "--values", str(values), "--set", bad)


@pytest.mark.parametrize("switch", ["prometheusRule", "grafanaDashboard"])
def test_what_is_checked_here_is_what_is_installed(switch):
    """The golden output of the monitored chart holds both files, unchanged."""
    for document in objects(golden_text("monitored")):
        if switch == "prometheusRule" and document["kind"] == "PrometheusRule":
            assert document["spec"] == yaml.safe_load(RULES.read_text(encoding="utf-8"))
            return
        if switch == "grafanaDashboard" and "homing-overview.json" in document.get("data", {}):
            assert {
                name.removeprefix("homing-"): json.loads(text)
                for name, text in document["data"].items()
            } == dashboards()
            return
    pytest.fail(f"{switch} renders nothing")
