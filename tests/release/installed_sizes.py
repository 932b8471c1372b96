"""Sizes of what `pip install` of the wheel brings, in MB by distribution:
`python -m tests.release.installed_sizes [COMMIT ...]`.

Each commit (without any: the one that is checked out) is built and installed into an empty
environment of its own, of which pip is not counted. Distributions are of today, at every commit.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
MB: Final = 1_000_000
SHOWN_MIN_MB: Final = 2.0
"""Smaller distributions are added up."""
NOT_COUNTED: Final = {"pip", "setuptools"}


def installed(commit: str, folder: Path) -> Counter[str]:
    """Install `commit` in the empty `folder` and return the installed bytes by distribution."""
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tree:
        tree.extractall(folder / "tree", filter="data")
    venv.create(folder / "environment", with_pip=True)
    pip = [folder / "environment/bin/python", "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, folder / "tree"], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", wheel], check=True)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    return sizes(packages)


def sizes(packages: Path) -> Counter[str]:
    """Return the bytes in `packages` by distribution; a file that two of them have counts once."""
    found: Counter[str] = Counter()
    seen: set[Path] = set()
    for distribution in sorted(distributions(path=[str(packages)]), key=lambda one: one.name):
        for file in distribution.files or ():
            path = Path(distribution.locate_file(file)).resolve()
            if distribution.name not in NOT_COUNTED and path not in seen and path.is_file():
                seen.add(path)
                found[distribution.name] += path.stat().st_size
    return found


def table(columns: Mapping[str, Mapping[str, int]]) -> str:
    """Return a Markdown table with a row per distribution, the largest of the last column first."""
    names = {name for column in columns.values() for name in column}
    last = list(columns.values())[-1]

    def largest(name: str) -> float:
        return max(column.get(name, 0) for column in columns.values()) / MB

    shown = [name for name in names if largest(name) >= SHOWN_MIN_MB]
    shown.sort(key=lambda name: (-last.get(name, 0), -largest(name), name))
    rest = sorted(names - set(shown))
    rows = [
        ["MB", *columns],
        ["---"] * (1 + len(columns)),
        *([f"`{name}`", *_cells(columns, [name])] for name in shown),
        [f"{len(rest)} more, each below {SHOWN_MIN_MB:g}", *_cells(columns, rest)],
        ["together", *_cells(columns, names)],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(columns: Mapping[str, Mapping[str, int]], names: Iterable[str]) -> list[str]:
    kept = list(names)
    sums = (sum(column.get(name, 0) for name in kept) for column in columns.values())
    return [f"{size / MB:.0f}" if size else "" for size in sums]


def main(commits: Sequence[str]) -> int:
    columns: dict[str, Counter[str]] = {}
    for commit in commits or ["HEAD"]:
        with tempfile.TemporaryDirectory() as folder:
            columns[commit] = installed(commit, Path(folder))
    print(table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
