"""What NOTES tell people to type, typed, with the real helm and kubectl."""

import re
import shlex
import subprocess

import pytest

from tests.apiserver.cluster import POOL, Release, running_engines, running_picker
from tests.chart.rendering import CHART, RELEASE, ROOT
from tests.chart.rendering import helm as run_helm
from tests.envoy.rig import until

VALUES = ROOT / "tests/chart/values"


@pytest.fixture
def kubectl_does(kubectl, namespace, tmp_path):
    """Runs a command line of kubectl, here."""
    kubeconfig = namespace.api.kubeconfig(tmp_path / "kubectl.yaml")

    def run(line):
        program, *arguments = shlex.split(line)
        assert program == "kubectl"
        command = [kubectl, "--kubeconfig", kubeconfig, "--cache-dir", tmp_path / "cache"]
        done = subprocess.run(
            [*command, *arguments], check=False, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def command(release, start):
    """The line of NOTES that starts so."""
    (line,) = (line for line in release.notes.splitlines() if line.startswith(f"  {start}"))
    return line.strip()


async def test_a_pool_of_another_picker_is_pointed_at_this_one(
    helm, namespace, kubectl_does, tmp_path
):
    """By the command of NOTES; selector and ports stay."""
    namespace.create_pool(8000)
    before = namespace.get("inferencepools", POOL)["spec"]
    release = Release(helm, namespace, VALUES / "existing-pool.yaml", tmp_path)
    assert "patched" in kubectl_does(command(release, "kubectl patch"))
    spec = namespace.get("inferencepools", POOL)["spec"]
    reference = spec.pop("endpointPickerRef")
    assert reference["name"] == "inference-homing"
    assert reference["port"] == {"number": 9002}
    assert reference["failureMode"] == "FailOpen"
    before.pop("endpointPickerRef")
    assert spec == before


async def test_an_upgrade_with_other_weights_is_a_reload_with_an_event(
    helm, namespace, kubectl_does, tmp_path
):
    """`helm upgrade` changes the ConfigMap; `kubectl events` shows what came of it."""
    release = Release(helm, namespace, VALUES / "existing-pool.yaml", tmp_path)
    async with running_engines("a") as (engine,):
        namespace.create_pool(engine.port)
        namespace.run_pod(engine)
        async with running_picker(release, tmp_path / "picker") as picker:
            await picker.knows(engine)
            done = run_helm(
                *(helm, "upgrade", RELEASE, CHART, "--namespace", namespace.name),
                *("--values", VALUES / "tuned-config.yaml", "--set", "configMapKey=config.yaml"),
                *("--kubeconfig", namespace.api.kubeconfig(tmp_path / "helm.yaml")),
            )
            assert done.returncode == 0, done.stderr

            async def weight():
                return await picker.metric(
                    "scorer_weight", profile="default", scorer="prefix-cache-scorer"
                )

            await until(lambda: _equal(weight(), 2.5), "the new weight")
            shown = command(release, "kubectl events")
            await until(lambda: "ConfigApplied" in kubectl_does(shown), "the Event")
            assert re.search(r"prefix-cache-scorer: added with weight 2\.5", kubectl_does(shown))
            described = kubectl_does(f"kubectl describe inferencepool {POOL} -n {namespace.name}")
            assert "ConfigApplied" in described


async def _equal(found, expected):
    return await found == expected
