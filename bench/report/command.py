"""The command `python -m bench` without a benchmark's name: measure, write and print the
performance report.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench.report.contestants import transports
from bench.report.measuring import Measuring, Plan
from bench.report.rows import Reported, rows
from bench.report.writing import PLOT, to_json, to_markdown, to_svg
from bench.termination import end_in_order

FOLDER: Final = Path("bench-report")
QUICK_ROUNDS: Final = 2
QUICK_SHARE: Final = 0.2
BUSY_EXIT: Final = 3


def report(plan: Plan, folder: Path, machine: Mapping[str, object]) -> int:
    """Measure, and write the performance report to `folder`.

    Return 0, or 3 if a verdict was refused because the machine was busy. Raise `ContestantError` if
    a measured server does not start.
    """
    end_in_order()
    with Measuring.running(plan, lambda line: print(line, flush=True)) as measuring:
        results = measuring.everything()
    named = transports()
    reported = Reported(results, rows(results, named), named)
    folder.mkdir(parents=True, exist_ok=True)
    text = to_markdown(reported, machine)
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.json").write_bytes(to_json(reported, machine))
    (folder / PLOT).write_text(to_svg(reported), encoding="utf-8")
    print(f"\n{text}\nWritten to {folder}/: report.md, report.json, {PLOT}")
    return BUSY_EXIT if reported.was_busy else 0
