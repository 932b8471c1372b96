"""Alerts, recording rules and the dashboard: promtool understands them, and the metrics exist."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from epp.shell.operators.metric_table import METRICS
from tests.chart.rendering import CHART

RULES = CHART / "files/rules.yaml"
DASHBOARD = CHART / "files/dashboard.json"
CASES = Path(__file__).parent / "rule_cases.yaml"
NAME = re.compile(r"\bhoming_[a-z0-9_]+")
RECORDED = re.compile(r"\bhoming:[a-z0-9_:]+")


def exported():
    """Names as they are queried: a histogram is three."""
    for spec in METRICS:
        if spec.kind == "histogram":
            yield from (f"{spec.name}_{part}" for part in ("bucket", "sum", "count"))
        else:
            yield spec.name


def rules():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def dashboard_expressions():
    """(where, expression) of each panel and annotation."""
    board = dashboard()
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in board["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def run(*command):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)


def test_promtool_takes_the_rules(promtool):
    done = run(promtool, "check", "rules", RULES)
    assert done.returncode == 0, done.stderr + done.stdout


def test_alerts_fire_when_they_should_and_not_before(promtool, tmp_path):
    """The cases of rule_cases.yaml."""
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8")) | {"rule_files": [str(RULES)]}
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump(cases), encoding="utf-8")
    done = run(promtool, "test", "rules", file)
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_alert_has_a_case():
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    tested = {
        case["alertname"]
        for test in cases["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}


def test_every_alert_says_what_is_the_matter():
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"info", "warning", "critical"}
            assert {"summary", "description"} <= set(rule["annotations"])


def test_promtool_takes_every_expression_of_the_dashboard(promtool, tmp_path):
    """Each as a recording rule, with Grafana's variables filled in."""
    filled = [
        expression.replace("$__rate_interval", "5m").replace("$job", ".*")
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
    """Those of the metric, or what Prometheus adds to a target."""
    added = {"job", "namespace", "pod", "instance", "le"}
    labels = {spec.name: set(spec.labels) for spec in METRICS}
    selector = re.compile(r"(homing_[a-z0-9_]+)\{([^}]*)\}")
    for where, expression in (
        *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
        *dashboard_expressions(),
    ):
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
    panels = dashboard()["panels"]
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


@pytest.mark.parametrize("switch", ["prometheusRule", "grafanaDashboard"])
def test_what_is_checked_here_is_what_is_installed(switch):
    """The golden output of the monitored chart holds both files, unchanged."""
    golden = Path(__file__).parent / "golden/monitored.yaml"
    for document in yaml.safe_load_all(golden.read_text(encoding="utf-8")):
        if switch == "prometheusRule" and document["kind"] == "PrometheusRule":
            assert document["spec"] == yaml.safe_load(RULES.read_text(encoding="utf-8"))
            return
        if switch == "grafanaDashboard" and "homing.json" in document.get("data", {}):
            assert json.loads(document["data"]["homing.json"]) == dashboard()
            return
    pytest.fail(f"{switch} renders nothing")
