"""A real Prometheus scrapes the pickers, knows the shipped rules, and has data for the dashboards."""

import json
import shutil
import subprocess
import urllib.parse

import pytest
import yaml

from tests.chart.rendering import CHART
from tests.chart.test_monitoring import dashboards
from tests.cluster.conftest import MINUTES
from tests.cluster.daemons import INSIDE
from tests.cluster.release import BY_LABEL, ENVOY, MODELS, NAME, load, name_of, namespace

ADDRESS = "127.0.0.1:9490"
RULES = CHART / "files/rules.yaml"
ALERT = "HomingNoReadyEndpoints"
NOTHING_AMISS = {
    *("capacity.json: Fairness between flows", "capacity.json: Mean wait"),
    *("capacity.json: Oldest wait", "capacity.json: Waiting in the picker"),
    *("capacity.json: Refused by the picker itself", "capacity.json: Shed"),
    *("endpoints.json: Errors", "endpoints.json: Failed scrapes"),
    "endpoints.json: Faults of KV events",
    *("endpoints.json: Outliers", "endpoints.json: Set aside, ejected"),
    *("overview.json: Failed connections, dropped frames", "overview.json: Errors"),
    *("overview.json: Failed lists and watches", "overview.json: Not counted or logged"),
    *("overview.json: Refusals", "overview.json: Requests that fail"),
    *("tuning.json: Candidates dropped", "tuning.json: Decided without the prompt"),
    "tuning.json: Spread of the load",
}
"""Panels without data while all goes well: nothing fails, no request waits in the picker, and no
engine has a queue.
"""
NOT_HERE = {
    *("endpoints.json: Data-parallel ranks", "overview.json: Capture lost"),
    "overview.json: Leader",
}
"""What this release has not turned on."""


@pytest.fixture
def asked_of_prometheus(node, tmp_path):
    """Starts it for a namespace; what it then answers to a path and its parameters."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus: apt-get install prometheus")
    processes = []

    def started(space):
        # Debian's is built without the discovery of Kubernetes: what that would find, as a list.
        targets = [
            {
                "targets": [f"{picker['status']['podIP']}:9090"],
                "labels": {"namespace": space.name, "pod": name_of(picker)},
            }
            for picker in space.pickers()
        ]
        config = {
            "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": NAME, "static_configs": targets}],
        }
        file = tmp_path / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        with (tmp_path / "log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [
                        *INSIDE,
                        program,
                        f"--config.file={file}",
                        f"--storage.tsdb.path={tmp_path / 'data'}",
                        f"--web.listen-address={ADDRESS}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

        def ask(path, **parameters):
            url = f"http://{ADDRESS}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            done = subprocess.run(
                [*INSIDE, "curl", "--silent", "--max-time", "5", url],
                capture_output=True,
                check=False,
            )
            return json.loads(done.stdout)["data"] if done.returncode == 0 else None

        return ask

    yield started
    for process in processes:
        process.terminate()
        process.wait(20)


def panels():
    """(where, query) of each panel, as a person sees it who chose nothing."""
    for name, board in dashboards().items():
        chosen = {"job": ".*", "model": ".*", "model_name": ".*"}
        for variable in board["templating"]["list"]:
            chosen.setdefault(variable["name"], ".*")
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                query = (
                    target["expr"]
                    .replace("$__rate_interval", "1m")
                    .replace("$__interval", "15s")
                    .replace("$__range", "5m")
                )
                for variable, value in chosen.items():
                    query = query.replace(f"${{{variable}}}", value).replace(f"${variable}", value)
                # There is no yesterday here.
                if "offset 1d" not in query:
                    yield f"{name}: {panel['title']}", query


@getattr(pytest.mark, MINUTES)
async def test_alerts_fire_and_resolve_and_dashboards_have_data(
    node, tmp_path, asked_of_prometheus
):
    # So that the picker sees answers.
    envoy = {**ENVOY, "responseBodyMode": "STREAMED"}
    with namespace(node, "prometheus") as space:
        space.run_models(3, "--kv-events")
        features = {"flowControl": {"enabled": True}, "kvEvents": {"enabled": True}}
        values = {**BY_LABEL, **features, "replicas": 2, "standalone": envoy}
        space.install(values, tmp_path)
        ask = asked_of_prometheus(space)

        def scraped():
            up = ask("query", query="up == 1")
            return up is not None and len(up["result"]) == 2

        await space.until(scraped, 60, "two targets that are up")
        assert len(ask("rules")["groups"]) == len(yaml.safe_load(RULES.read_text())["groups"])

        def firing():
            alerts = ask("alerts")["alerts"]
            return [
                one
                for one in alerts
                if one["labels"]["alertname"] == ALERT and one["state"] == "firing"
            ]

        def empty():
            shown = {where for where, query in panels() if ask("query", query=query)["result"]}
            lacking = {where for where, _ in panels()} - shown - NOTHING_AMISS - NOT_HERE
            print(sorted(lacking))
            return lacking

        async with load(space.address(f"{NAME}-envoy", 8081), streams=4, stream_s=20):
            await space.until(
                lambda: ask("query", query="homing:requests:rate5m > 1")["result"],
                120,
                "a rate of requests",
            )
            await space.until(lambda: not empty(), 60, "data in each panel")
        assert not firing()
        space.kubectl("scale", f"deployment/{MODELS}", "--replicas=0")
        await space.until(firing, 150, f"{ALERT} to fire")
        space.kubectl("scale", f"deployment/{MODELS}", "--replicas=2")
        await space.until(lambda: not firing(), 60, f"{ALERT} to resolve")
        broken = [
            rule
            for group in ask("rules")["groups"]
            for rule in group["rules"]
            if rule["health"] != "ok"
        ]
        assert not broken
