"""Golden outputs of the chart: one whole text, and for each other one its differences from it.

Each dashboard in the differences is replaced by its file's name, as `@FILE` at its indentation.
`python -m tests.chart.golden_texts` writes all of them anew.
"""

import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.chart.rendering import CHART, VALUES, rendered
from tests.chart.tools import HELM_4, tools_of

FOLDER: Final = Path(__file__).parent / "golden"
WHOLE: Final = "existing-pool"
NAMES: Final = tuple(path.stem for path in VALUES)
CONTEXT_LINES: Final = 1
_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? ")
_DASHBOARDS: Final = CHART / "files/dashboards"
_INDENTATION: Final = "    "


def file_of(name: str) -> Path:
    return FOLDER / (f"{name}.yaml" if name == WHOLE else f"{name}.diff")


def golden_text(name: str) -> str:
    """Return the text that Helm rendered from the values `name`, byte for byte."""
    text = file_of(name).read_text(encoding="utf-8")
    if name == WHOLE:
        return text
    whole = golden_text(WHOLE).splitlines(keepends=True)
    return _unabridged("".join(_patched(whole, text.splitlines(keepends=True))))


def write_golden(name: str, text: str) -> None:
    """Write `text` for `golden_text`.

    The text named `WHOLE` must be written first, because the others are differences to it.
    """
    kept = text
    if name != WHOLE:
        pair = (golden_text(WHOLE), _abridged(text))
        lines = (each.splitlines(keepends=True) for each in pair)
        kept = "".join([*difflib.unified_diff(*lines, n=CONTEXT_LINES)][2:])
    file_of(name).write_text(kept, encoding="utf-8")


def _patched(whole: list[str], difference: list[str]) -> Iterator[str]:
    """Yield the lines of `whole` after the hunks of `difference`, a unified diff, are applied."""
    at = 0
    for line in difference:
        if hunk := _HUNK.match(line):
            first, lines = int(hunk[1]), int(hunk[2] or 1)
            # A hunk without old lines names the line that it comes after.
            begin = first - 1 if lines else first
            yield from whole[at:begin]
            at = begin
        elif line.startswith("+"):
            yield line[1:]
        else:
            assert whole[at] == line[1:], f"line {at + 1} of the whole one is another"
            if line.startswith(" "):
                yield line[1:]
            at += 1
    yield from whole[at:]


def _dashboards() -> Iterator[tuple[str, str]]:
    """Yield the abridged and the whole text of each dashboard."""
    for file in sorted(_DASHBOARDS.glob("*.json")):
        lines = file.read_text(encoding="utf-8").strip().splitlines()
        yield (
            f"{_INDENTATION}@{file.relative_to(CHART)}\n",
            "".join(f"{_INDENTATION}{line}\n" for line in lines),
        )


def _abridged(text: str) -> str:
    for short, long in _dashboards():
        text = text.replace(long, short)
    return text


def _unabridged(text: str) -> str:
    for short, long in _dashboards():
        text = text.replace(short, long)
    return text


def main() -> int:
    """Write all golden outputs as the chart renders them with Helm 4."""
    helm = tools_of(HELM_4) / "helm"
    FOLDER.mkdir(exist_ok=True)
    for values in sorted(VALUES, key=lambda path: path.stem != WHOLE):
        write_golden(values.stem, rendered(helm, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
