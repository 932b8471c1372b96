"""Generator of the manifests of deploy/: `python -m tests.chart.manifests` writes them anew.

A manifest has the objects that the chart renders for the values.yaml beside it, without the parts
that only Helm needs. An overlay on the base, or a component, gets the objects that the base lacks.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.chart import tools
from tests.chart.rendering import CHART, NAMESPACE, ROOT, helm, objects

DEPLOY: Final = ROOT / "deploy"
HELM_LABELS: Final = ("helm.sh/chart", "app.kubernetes.io/managed-by")
HEAD: Final = "# Written by `python -m tests.chart.manifests` from values.yaml.\n"


class _Plain(yaml.SafeDumper):
    """A dumper that writes no anchors and writes text of several lines as a literal block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Plain.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def generated(binary: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each generated file."""
    base = chart_objects(binary, DEPLOY / "base/values.yaml")
    yield DEPLOY / "base/homing.yaml", _text(base)
    for values in sorted(DEPLOY.glob("overlays/*/values.yaml")):
        found = chart_objects(binary, values)
        kustomization = yaml.safe_load((values.parent / "kustomization.yaml").read_text())
        if "../../base" in kustomization["resources"]:
            missing = [document for document in base if document not in found]
            assert not missing, f"{values} changes objects of the base: make a component of it"
            added = [document for document in found if document not in base]
            yield values.parent / "objects.yaml", _text(added)
        else:
            yield values.parent / "homing.yaml", _text(found)
    names = [_name(document) for document in base]
    for values in sorted(DEPLOY.glob("components/*/values.yaml")):
        found = chart_objects(binary, values)
        added = [document for document in found if _name(document) not in names]
        yield values.parent / "objects.yaml", _text(added)


def _name(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def chart_objects(binary: Path, values: Path) -> list[dict[str, Any]]:
    """Return the objects that the chart renders for `values`, without traces of Helm."""
    done = helm(
        *(binary, "template", "homing", CHART, "--namespace", NAMESPACE),
        *("--values", values, "--skip-tests"),
    )
    assert done.returncode == 0, done.stderr
    return [_without_helm(document) for document in objects(done.stdout)]


def _without_helm(document: dict[str, Any]) -> dict[str, Any]:
    """Remove Helm's labels and all namespaces, which the kustomization sets; return `document`."""
    metadata = document["metadata"]
    metadata.pop("namespace", None)
    for subject in document.get("subjects", ()):
        # One that is there kustomize leaves alone; a missing one is that of the ServiceAccount.
        subject.pop("namespace", None)
    pod = document["spec"]["template"]["metadata"] if document["kind"] == "Deployment" else {}
    for labels in (metadata.get("labels", {}), pod.get("labels", {})):
        for label in HELM_LABELS:
            labels.pop(label, None)
    return document


def _text(documents: list[dict[str, Any]]) -> str:
    dumped = (yaml.dump(d, Dumper=_Plain, sort_keys=False, width=100) for d in documents)
    return HEAD + "---\n".join(dumped)


if __name__ == "__main__":
    for file, text in generated(tools.tools_of(tools.HELM_4) / "helm"):
        file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{file.relative_to(ROOT)} written\n")
