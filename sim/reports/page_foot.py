"""The end of every page: effects that are not modelled, and constants from one set-up."""

from collections.abc import Sequence

from sim.measurement.assumptions import NOT_MODELLED
from sim.measurement.summaries import AssumptionSummary
from sim.reports.charts import facts_table, figure, words
from sim.reports.report import CONSTANTS, assumption_rows


def page_foot(assumptions: Sequence[AssumptionSummary]) -> str:
    """Return the two figures at the end of a page, as HTML."""
    left_out = "".join(f"<li>{words(sentence)}</li>" for sentence in NOT_MODELLED)
    rows = [
        [constant, f"{here}; range {between}. Source: {source}."]
        for constant, here, between, source in assumption_rows(assumptions)[1:]
    ]
    return figure("What is not modelled", f"<ul>{left_out}</ul>") + figure(
        "Constants from one set-up", f"<p>{words(CONSTANTS)}</p>{facts_table(rows)}"
    )
