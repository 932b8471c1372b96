"""The command `sim replay CAPTURE --check-decisions`: compute each decision of a live picker's
capture again and compare it with the recorded one.
"""

import argparse
from pathlib import Path
from typing import Any

from epp.configuration.build import plugin_tables
from epp.configuration.config import ConfigError
from epp.journal.problem import JournalError
from epp.journal.reenacting import decide_again, sentences_of, totals
from sim.cluster.policies import policy_source
from sim.measurement.summaries import SCHEMA, as_json
from sim.output import OutputError, open_folder, write_whole
from sim.traces.arrival import TraceError


def check_decisions(options: argparse.Namespace) -> int:
    """Run `sim replay --check-decisions` and return exit code 0, even if decisions differ.

    Raises errors that `sim` prints.
    """
    capture = Path(options.trace)
    if not capture.is_dir():
        raise TraceError(options.trace, 0, "", "Expected the directory of a live capture")
    config = None
    if options.config is not None:
        policy = policy_source(options.config)
        if not policy.text:
            raise ConfigError([f"{policy.name} is not a configuration: it cannot repeat decisions"])
        config = policy.load()
    folder = open_folder(options)
    try:
        total = totals(decide_again(capture, plugin_tables(), config))
    except JournalError as problem:
        raise OutputError(str(problem)) from None
    by = "the configuration in force" if config is None else options.config
    summary: dict[str, Any] = {"schema": SCHEMA, "capture": capture.name, "decided_by": by, **total}
    lines = [f"decided by {by}", *sentences_of(total)]
    print("\n".join(lines))
    if folder is not None:
        write_whole(folder / "summary.json", as_json(summary))
        report = "\n".join(["# Past decisions, repeated", "", *(f"- {one}" for one in lines)])
        write_whole(folder / "report.md", f"{report}\n".encode())
        print(f"results are in {folder}")
    return 0
