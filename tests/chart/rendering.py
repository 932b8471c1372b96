"""The chart as Helm renders it."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "charts/homing"
VALUES: Final = sorted((Path(__file__).parent / "values").glob("*.yaml"))
RELEASE: Final = "inference"
NAMESPACE: Final = "models"
NAMED_SECRETS: Final = Path(__file__).parent / "named_secrets.yaml"
"""File of values beneath all others. It names a secret that the chart would otherwise draw anew."""
HELM_MAX_S: Final = 20


def helm(binary: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm without the user's own settings and repositories."""
    return subprocess.run(
        [binary, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=HELM_MAX_S,
        env={"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"},
    )


@cache
def rendered(binary: Path, values: Path, *arguments: str) -> str:
    """Return the manifests that would be installed with this file of values."""
    done = helm(
        *(binary, "template", RELEASE, CHART, "--namespace", NAMESPACE),
        *("--values", NAMED_SECRETS, "--values", values, *arguments),
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def refusal(binary: Path, *arguments: str) -> str:
    """Return the error that Helm writes about values that it must refuse."""
    done = helm(binary, "template", RELEASE, CHART, *arguments)
    assert done.returncode != 0, "rendered, expected a refusal"
    return done.stderr


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def picker(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the container of the picker."""
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    (container,) = (item for item in pod["containers"] if item["name"] == "epp")
    return container
