"""Draw the pictures of incidents in docs/simulator.md: `python -m docs.pictures`.

Each picture shows the scenario of the same name in docs/examples/scenarios. It is run like the
first seed of `sim compare`, on the traffic that the page names.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.__main__ import main as sim
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.experiments.run import Run, RunSettings
from sim.experiments.scenario_file import Scenario, scenario_in
from sim.measurement.measures import COLUMNS, Floats, Series
from sim.reports.charts import COLOURS, FULL, LEFT, Axis, Points, line_chart

FOLDER: Final = Path(__file__).parent
TRAFFIC: Final = ("shared-prefix", "--rate", "36", "--duration", "240")
WINDOW_S: Final = 5.0
"""Length in seconds of the window of arrivals that one point of a line summarizes."""

STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#52606d}"
    "polyline{fill:none;stroke-width:2;stroke-linejoin:round}"
    "line{stroke:#e4e7eb}.page{fill:#fff}.while{fill:#fde8c8}"
    + "".join(f".c{at}{{stroke:{light}}}" for at, (light, _) in enumerate(COLOURS))
)


class Picture(Struct, frozen=True, kw_only=True):
    """One picture: a figure over the time of an incident, with one line for each configuration."""

    title: str
    unit: str
    of_window: Callable[[Series], float]
    from_s: float
    to_s: float
    lines: Mapping[str, tuple[str, bool]]
    """Lines of the picture by name, as (configuration, True for a run without failing scrapes and
    without a change of the number of pods).
    """


def _ttft_p90_ms(window: Series) -> float:
    return 1000 * float(np.percentile(window.ttft_s, 90))


def _hit_rate_percent(window: Series) -> float:
    return 100 * float(window.cached_tokens.sum() / window.prompt_tokens.sum())


BOTH: Final = {"default": ("default", False), "round robin": ("round-robin", False)}
PICTURES: Final = {
    "slow-pod": Picture(
        title="TTFT p90", unit="ms", of_window=_ttft_p90_ms, from_s=60, to_s=180, lines=BOTH
    ),
    "scrape-outage": Picture(
        title="TTFT p90", unit="ms", of_window=_ttft_p90_ms, from_s=60, to_s=100,
        lines={"default": ("default", False), "default, pages read": ("default", True)},
    ),
    "autoscaler": Picture(
        title="TTFT p90", unit="ms", of_window=_ttft_p90_ms, from_s=60, to_s=100,
        lines=BOTH | {"default, two pods": ("default", True)},
    ),
    "rolling-restart": Picture(
        title="hit rate", unit="%", of_window=_hit_rate_percent, from_s=60, to_s=195, lines=BOTH
    ),
}  # fmt: skip


def draw(name: str, trace: str) -> str:
    """Return the picture of the scenario `name` as the text of an SVG file. `trace` is the path of
    its traffic.
    """
    picture = PICTURES[name]
    usual = PodKind.of(find_profile(DEFAULT_PROFILE))
    scenario = scenario_in(FOLDER / "examples/scenarios" / f"{name}.toml", usual)
    lines = {
        told: _points(picture, _ran(trace, _as_usual(scenario) if usually else scenario, config))
        for told, (config, usually) in picture.lines.items()
    }
    times_s = [at for points in lines.values() for at, _ in points]
    values = [value for points in lines.values() for _, value in points]
    x = Axis.over(times_s, unit="s", title="arrival")
    y = Axis.over(values, unit=picture.unit, title=picture.title)
    drawn = line_chart(lines, x=x, y=y, label=f"{picture.title} over time", size=FULL)
    begins, ends = (FULL.across(x.share(at_s)) for at_s in (picture.from_s, picture.to_s))
    top = FULL.up(1.0)
    shade = (
        f'<rect class="while" x="{begins:.1f}" y="{top:.1f}" width="{ends - begins:.1f}" '
        f'height="{FULL.up(0.0) - top:.1f}"/>'
    )
    return svg_file(drawn, list(lines), under=shade)


def svg_file(
    drawn: str,
    names: Sequence[str],
    *,
    under: str = "",
    over: str = "",
    legend_from: int = LEFT + 180,
) -> str:
    """Return a chart of `sim.reports.charts` as the text of an SVG file, with a legend beside its
    title.

    `under` and `over` are SVG elements that are drawn before and after the chart.
    """
    opened, _, rest = drawn.partition(">")
    page = f'<rect class="page" width="{FULL.width}" height="{FULL.height}"/>'
    rest = rest.removesuffix("</svg>")
    return (
        f'{opened} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{page}{under}'
        f"{_legend(names, legend_from)}{rest}{over}</svg>\n"
    )


def _legend(names: Sequence[str], begins: int) -> str:
    parts = []
    apart = min(170, (FULL.width - begins) // len(names))
    for number, name in enumerate(names):
        left = begins + apart * number
        parts.append(
            f'<polyline class="c{number}" points="{left},10 {left + 22},10"/>'
            f'<text x="{left + 28}" y="14">{name}</text>'
        )
    return "".join(parts)


def _as_usual(scenario: Scenario) -> Scenario:
    """Return the scenario with the same traffic but without failing scrapes and without the
    autoscaler.
    """
    return replace(scenario, scrape_troubles=(), autoscalers=())


def _ran(trace: str, scenario: Scenario, config: str) -> Series:
    """Run a scenario with a configuration, and return the results of the completed requests."""
    one = Run(
        RunSettings(
            trace=trace,
            policy=policy_source(config),
            cluster=ClusterSettings(pods=scenario.pods, scrape_troubles=scenario.scrape_troubles),
            scenario=scenario,
            warm_up_s=0.0,
        )
    )
    one.run()
    return one.measures.series()


def _points(picture: Picture, series: Series) -> Points:
    windows: Floats = np.floor(series.arrived_s / WINDOW_S)
    columns = {name: getattr(series, name) for name in COLUMNS}

    def within(window: float) -> Series:
        return Series(columns, windows == window)

    return [
        (WINDOW_S * (float(window) + 0.5), picture.of_window(within(window)))
        for window in np.unique(windows)
    ]


def main() -> None:
    """Draw all pictures of incidents and write them to docs/incidents."""
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder) / "incidents.jsonl")
        sim(["trace", "generate", *TRAFFIC, "--out", trace])
        for name in PICTURES:
            path = FOLDER / "incidents" / f"{name}.svg"
            path.parent.mkdir(exist_ok=True)
            path.write_text(draw(name, trace), encoding="utf-8")


if __name__ == "__main__":
    main()
