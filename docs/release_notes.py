"""Print the notes of a release from CHANGELOG.md: `python -m docs.release_notes v0.1.0`.

The command exits with 1 and one sentence if the tag, the versions of package and chart and the
changelog do not agree; the release must then be stopped. It needs only Python.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_TAG: Final = re.compile(r"v(\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?)", re.ASCII)


class ReleaseError(Exception):
    """The error that prevents a release: the tag, the versions or the changelog do not agree. Its
    text is one sentence.
    """


def notes_of(tag: str, root: Path = ROOT) -> str:
    """Return the notes in CHANGELOG.md for the version that the git tag `tag` names.

    Raise `ReleaseError` if versions disagree, or if there are no notes.
    """
    match = _TAG.fullmatch(tag)
    if match is None:
        raise ReleaseError(f"the tag {tag!r} is no version, expected one such as v0.1.0")
    version = match[1]
    for where, found in _versions(root).items():
        if found != version:
            raise ReleaseError(f"the tag is {tag} and {where} says {found}, expected {version}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    title = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    section = re.search(rf"{title}(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD` with notes")
    return section[1].strip() + "\n"


def _versions(root: Path) -> dict[str, str]:
    """Return the version of the project in each file that states it, by file and member."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {"pyproject.toml": str(project["version"])}
    rivals = tomllib.loads((root / "rivals/pyproject.toml").read_text(encoding="utf-8"))["project"]
    found["rivals/pyproject.toml"] = str(rivals["version"])
    chart = (root / "charts/homing/Chart.yaml").read_text(encoding="utf-8")
    for member in ("version", "appVersion"):
        told = re.search(rf'^{member}: "?([^"\s]+)"?$', chart, re.MULTILINE)
        found[f"{member} of Chart.yaml"] = told[1] if told else "nothing"
    source = (root / "epp/__init__.py").read_text(encoding="utf-8")
    told = re.search(r'^__version__: Final = "([^"]+)"$', source, re.MULTILINE)
    found["epp/__init__.py"] = told[1] if told else "nothing"
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m docs.release_notes TAG\n")
        return 2
    try:
        sys.stdout.write(notes_of(arguments[0]))
    except ReleaseError as error:
        sys.stderr.write(f"release_notes: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
