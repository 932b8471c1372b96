"""The end of report pages about simulations, except that of the leaderboard: effects that the simulator
does not model, and constants that were measured on one set-up.
"""

from collections.abc import Sequence

from sim.measurement.assumptions import NOT_MODELLED
from sim.measurement.summaries import AssumptionSummary
from sim.reports.charts import facts_table, figure, words
from sim.reports.report import CONSTANTS, assumption_rows


def page_foot(assumptions: Sequence[AssumptionSummary]) -> str:
    """Return the end of a report page as HTML: two figures about the limits of the model."""
    left_out = "".join(f"<li>{words(sentence)}</li>" for sentence in NOT_MODELLED)
    rows = [
        [constant, f"{here}; range {between}. Source: {source}."]
        for constant, here, between, source in assumption_rows(assumptions)[1:]
    ]
    return figure("What is not modelled", f"<ul>{left_out}</ul>") + figure(
        "Constants from one set-up", f"<p>{words(CONSTANTS)}</p>{facts_table(rows)}"
    )
