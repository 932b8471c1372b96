"""Reports of `sim drive`: a table for the terminal, report.md, and an HTML page that needs no
network.
"""

from typing import Final

from sim.drive.summary import UNTOLD, DriveMeasures
from sim.measurement.summaries import DriveSummary, GroupSummary, RunSummary, Summary
from sim.reports.charts import card, cdf_chart, facts_table, figure, html_table, page, scrolling
from sim.reports.report import markdown_table, number, seconds, share, table

_RANKS: Final = ("mean", "p50", "p90", "p99")
_LATE_S_MAX: Final = 0.05
"""Delay in seconds between planned and actual sending, at the 99th percentile, above which a report
warns that the driver itself was slow.
"""


def drive_table(summary: DriveSummary, beside: RunSummary | None) -> str:
    """Return the results of a run of `sim drive` as text for the terminal. `beside` has a
    simulation's results to show beside them, or is None.
    """
    warnings = "".join(f"{warning}\n\n" for warning in warnings_of(summary))
    facts = "\n".join(f"{name:<24}  {value}" for name, value in _facts(summary))
    parts = [table(_latencies(summary, beside)), facts]
    if _pods_are_told(summary):
        parts.append(table(_groups("pod", summary.pods)))
    if len(summary.models) > 1:
        parts.append(table(_groups("model", summary.models)))
    return warnings + "\n\n".join(parts) + "\n"


def drive_report(summary: DriveSummary, beside: RunSummary | None) -> str:
    """Return the results of a run of `sim drive` as the text of report.md. `beside` has a
    simulation's results to show beside them, or is None.
    """
    parts = ["# A trace as real requests", *(f"**{one}**" for one in warnings_of(summary))]
    parts.append(markdown_table(_latencies(summary, beside)))
    parts.append(markdown_table([["", ""], *_facts(summary)]))
    parts += ["## By pod", markdown_table(_groups("pod", summary.pods))]
    parts += ["## By model", markdown_table(_groups("model", summary.models))]
    parts += ["## What was run", markdown_table([["", ""], *_conditions(summary)])]
    return "\n\n".join(parts) + "\n"


def drive_page(summary: DriveSummary, measures: DriveMeasures, beside: RunSummary | None) -> str:
    """Return the results of a run of `sim drive` as the text of report.html. `beside` has a
    simulation's results to show beside them, or is None.
    """
    ttft_s = {name: group.ttft_s for name, group in sorted(measures.pods.items())[:8]}
    body = [
        card(
            [
                ("TTFT mean", seconds(summary.ttft_s.mean)),
                ("TTFT p90", seconds(summary.ttft_s.p90)),
                ("ITL p99", seconds(summary.itl_s.p99)),
                ("hit rate", share(summary.hit_rate)),
                ("requests", f"{summary.requests.sent:,}"),
                ("errors", f"{summary.requests.errors:,}"),
            ]
        ),
        '<div class="pair">',
        cdf_chart(
            "Time to first token: share of requests within a time", {"": measures.all.ttft_s}
        ),
        cdf_chart("Whole answer: share of requests within a time", {"": measures.all.e2e_s}),
        "</div>",
    ]
    if _pods_are_told(summary):
        body.append(cdf_chart("Time to first token, by pod", ttft_s))
    body += [
        figure("Latency", scrolling(html_table(_latencies(summary, beside)))),
        figure("By pod", scrolling(html_table(_groups("pod", summary.pods)))),
        figure("By model", scrolling(html_table(_groups("model", summary.models)))),
        figure("In numbers", facts_table(_facts(summary))),
        figure("What was run", facts_table(_conditions(summary))),
    ]
    said = (
        "Real requests at the trace's times. Only turns of conversations waited, for the answers "
        "that they continue."
    )
    return page(
        f"{summary.conditions['trace']}, as real requests",
        "\n".join([*warnings_of(summary), said]),
        "\n".join(body),
    )


def warnings_of(summary: DriveSummary) -> list[str]:
    """Return a warning sentence for each condition that makes the figures of a run of `sim drive`
    misleading.
    """
    requests, late_s = summary.requests, summary.late_s.p99
    told = {
        "The run was interrupted: only requests that had ended are counted.": not summary.complete,
        f"{requests.not_sent:,} requests were not sent, because --in-flight was reached: the gateway "
        "received less load than the trace has.": requests.not_sent,
        f"{requests.unfit:,} requests were not sent, because their token ids cannot be written as text "
        "or their recorded bodies are not JSON.": requests.unfit,
        f"1 % of the requests were sent at least {seconds(late_s)} late: the driver itself was "
        "slow.": late_s is not None and late_s > _LATE_S_MAX,
        f"{requests.errors:,} requests have no complete answer.": requests.errors,
    }
    return [sentence for sentence, holds in told.items() if holds]


def _latencies(summary: DriveSummary, beside: RunSummary | None) -> list[list[str]]:
    """Return the rows of the latency table of `sim drive`: one each for TTFT, ITL and E2E. With a
    simulation to compare, each is followed by the simulation's row, and rows of hit rates are
    added.
    """
    rows = [["", *_RANKS]]
    for name, label in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("e2e_s", "E2E")):
        rows.append([label, *_ranks(getattr(summary, name))])
        if beside is not None:
            rows.append([f"{label} simulated", *_ranks(getattr(beside, name))])
    if beside is not None:
        rows.append(["hit rate", share(summary.hit_rate), "", "", ""])
        rows.append(["hit rate simulated", share(beside.hit_rate), "", "", ""])
    return rows


def _ranks(found: Summary) -> list[str]:
    """Return the cells of a row of the latency table: mean and percentiles as text, with a dash for
    a missing one.
    """
    return [seconds(getattr(found, rank, None)) for rank in _RANKS]


def _groups(kind: str, groups: dict[str, GroupSummary]) -> list[list[str]]:
    head = [kind, "requests", "errors", "TTFT p50", "TTFT p90", "ITL p50", "ITL p99", "E2E p90"]
    rows = [[*head, "hit rate"]]
    for name, found in groups.items():
        rows.append(
            [
                name,
                f"{found.requests:,}",
                f"{found.errors:,}",
                seconds(found.ttft_s.p50),
                seconds(found.ttft_s.p90),
                seconds(found.itl_s.p50),
                seconds(found.itl_s.p99),
                seconds(found.e2e_s.p90),
                share(found.hit_rate),
            ]
        )
    return rows


def _facts(summary: DriveSummary) -> list[list[str]]:
    requests = summary.requests
    named = ", ".join(f"{count:,} {why}" for why, count in summary.errors.items())
    return [
        ["requests sent", f"{requests.sent:,}, {requests.whole:,} with a whole answer"],
        *([["errors", named]] if named else []),
        *([["cut at the end", f"{requests.cut:,}"]] if requests.cut else []),
        ["hit rate", f"{share(summary.hit_rate)} of prompt tokens"],
        ["output", f"{number(summary.output_tokens_per_s)} tokens/s"],
        ["took", seconds(summary.took_s)],
        ["sent late, p99", seconds(summary.late_s.p99)],
    ]


def _conditions(summary: DriveSummary) -> list[list[str]]:
    return [
        [name.replace("_", " "), str(value)]
        for name, value in summary.conditions.items()
        if value not in (None, "")
    ]


def _pods_are_told(summary: DriveSummary) -> bool:
    return list(summary.pods) not in ([], [UNTOLD])
