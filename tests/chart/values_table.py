"""Writes the table of values in the chart's README anew: `python -m tests.chart.values_table`.

A row a value that has a comment beginning with `# --` above it in values.yaml.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parents[2] / "charts/homing"
_PART: Final = re.compile(r"(<!-- begin values -->\n).*?(<!-- end values -->)", re.DOTALL)
_KEY: Final = re.compile(r"( *)([A-Za-z_]+):")


def page(readme: str) -> str:
    """`readme` with its table as values.yaml has it now."""
    rows = [f"| `{key}` | `{default}` | {text} |" for key, default, text in _values()]
    table = "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])
    return _PART.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", readme)


def _values() -> Iterator[tuple[str, str, str]]:
    """Key, default as JSON, and comment."""
    source = (CHART / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(source)
    path: list[str] = []
    comment: list[str] = []
    for line in source.splitlines():
        text = line.strip()
        if text.startswith("# --"):
            comment = [text.removeprefix("# --").strip()]
        elif text.startswith("#") and comment:
            comment.append(text.removeprefix("#").strip())
        elif found := _KEY.match(line):
            path[len(found[1]) // 2 :] = [found[2]]
            if comment:
                yield ".".join(path), _default(defaults, path), " ".join(comment)
            comment = []


def _default(defaults: Any, path: list[str]) -> str:
    for key in path:
        defaults = defaults[key]
    return json.dumps(defaults)


if __name__ == "__main__":
    file = CHART / "README.md"
    file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{file.name} written\n")
