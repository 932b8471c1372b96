"""Charts in a real browser: values under the pointer, a part enlarged, series hidden, none of it fetched."""

import asyncio
import re

import numpy as np
import pytest
import pytest_asyncio

from sim.reports.charts import (
    SMALL,
    Axis,
    bar_chart,
    cdf_chart,
    figure,
    line_chart,
    page,
    scatter_chart,
)
from tests.sim.browser import DESKTOP, PHONE, browser, chromium

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMED = '</script><script>document.title = "broken"</script>'
"""A name that would end the page's script, if it were not escaped."""
STEPS = {"up": [(0.0, 0.0), (5.0, 40.0), (10.0, 100.0)], NAMED: [(0.0, 50.0), (10.0, 50.0)]}
WHISKERS = {"up": [(5.0, 31.0, 47.0)]}
LOG = np.array([0.01, 0.1, 1.0, 10.0])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page with a chart of each kind."""
    chromium()
    x = Axis.over([0.0, 10.0], unit="s", title="time")
    y = Axis(low=0.0, high=100.0, unit="%", title="share")
    dots = {"one": [(2.0, 20.0)], "other": [(8.0, 80.0)]}
    body = "".join(
        (
            figure("lines", line_chart(STEPS, x=x, y=y, label="lines"), list(STEPS)),
            figure(
                "marked",
                line_chart(STEPS, x=x, y=y, label="marked", dots=True, whiskers=WHISKERS),
                list(STEPS),
            ),
            figure("dots", scatter_chart(dots, x=x, y=y, label="dots"), list(dots)),
            figure("bars", bar_chart({"pod-1": 3.0, "pod-2": 1_500.0}, y=y, label="bars")),
            cdf_chart("logarithmic", {"": LOG}),
            figure("small", line_chart(STEPS, x=x, y=y, label="small", size=SMALL)),
        )
    )
    path = tmp_path_factory.mktemp("charts") / "page.html"
    path.write_text(page("Charts", "", body))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab():
    async with browser() as tab:
        yield tab


def in_figure(number, code):
    """An expression of `figure`, the figure of that number, `svg` in it and `near`, where a share is."""
    return f"""(() => {{
      const figure = document.querySelectorAll("figure")[{number}];
      const svg = figure.querySelector("svg");
      return {code};
    }})()"""


async def place(tab, number, across, up):
    """The place in the window of shares of the plot, scrolled to."""
    return await tab.evaluate(
        in_figure(
            number,
            f"""(() => {{
              svg.scrollIntoView({{block: "center", behavior: "instant"}});
              const plot = JSON.parse(svg.dataset.plot);
              const box = svg.getBoundingClientRect();
              const scale = box.width / svg.viewBox.baseVal.width;
              return [
                box.left + scale * (plot.left + {across} * (plot.right - plot.left)),
                box.top + scale * (plot.bottom - {up} * (plot.bottom - plot.top)),
              ];
            }})()""",
        )
    )


async def mouse(tab, kind, at, clicks=1):
    x, y = at
    button = {"button": "left", "buttons": 1, "clickCount": clicks} if kind != "mouseMoved" else {}
    await tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)


async def drag(tab, begin, end):
    await mouse(tab, "mouseMoved", begin)
    await mouse(tab, "mousePressed", begin)
    await tab.call(
        "Input.dispatchMouseEvent", type="mouseMoved", x=end[0], y=end[1], button="left", buttons=1
    )
    await mouse(tab, "mouseReleased", end)


async def told(tab, number):
    """The lines of the note; none if it is not shown."""
    return await tab.evaluate(
        in_figure(
            number,
            '[...figure.querySelectorAll(".note:not([hidden]) > div")].map(one => one.textContent)',
        )
    )


async def marks(tab, number):
    return await tab.evaluate(
        in_figure(number, '[...svg.querySelectorAll(".axes text")].map(one => one.textContent)')
    )


async def test_a_pointer_reads_every_line(written, tab):
    """Between points too: as the line is drawn, with name and unit; beside the plot nothing."""
    await tab.show(written)
    at_2_5 = 2.5 / 10.5
    await mouse(tab, "mouseMoved", await place(tab, 0, at_2_5, 0.5))
    time, up, level = await told(tab, 0)
    assert float(re.fullmatch(r"time: ([\d.]+) s", time)[1]) == pytest.approx(2.5, abs=0.02)
    assert float(re.fullmatch(r"up: ([\d.]+) %", up)[1]) == pytest.approx(20.0, abs=0.2)
    assert level == f"{NAMED}: 50 %"
    await mouse(tab, "mouseMoved", (2, 2))
    assert await told(tab, 0) == []


async def test_marked_points_are_read_exactly_with_their_intervals(written, tab):
    """From anywhere nearer to them than to another."""
    await tab.show(written)
    await mouse(tab, "mouseMoved", await place(tab, 1, 0.52, 0.9))
    assert await told(tab, 1) == ["time: 5 s", "up: 40 % (31 to 47)", f"{NAMED}: 50 %"]


async def test_dots_and_bars_tell_their_values(written, tab):
    """Dots where the pointer is near; a bar anywhere on it."""
    await tab.show(written)
    await mouse(tab, "mouseMoved", await place(tab, 2, 8.1 / 10.5, 0.81))
    assert await told(tab, 2) == ["time: 8 s", "other: 80 %"]
    await mouse(tab, "mouseMoved", await place(tab, 2, 0.5, 0.2))
    assert await told(tab, 2) == []
    bar = await tab.evaluate(
        in_figure(
            3,
            """(() => {
              const box = svg.querySelector("rect").getBoundingClientRect();
              svg.scrollIntoView({block: "center", behavior: "instant"});
              const now = svg.querySelector("rect").getBoundingClientRect();
              return [now.left + now.width / 2, now.bottom - 1];
            })()""",
        )
    )
    await mouse(tab, "mouseMoved", bar)
    assert await told(tab, 3) == ["pod-1: 3"]


async def test_a_part_of_a_chart_is_enlarged_and_given_back(written, tab):
    """By a drag: its axes tell the part, values stay what they are; a button shows all again."""
    await tab.show(written)
    whole = await marks(tab, 0)
    await drag(tab, await place(tab, 0, 4 / 10.5, 0.5), await place(tab, 0, 6 / 10.5, 0.5))
    numbers = [float(one) for one in await marks(tab, 0) if re.fullmatch(r"[\d.]+", one)]
    assert len([one for one in numbers if 4 <= one <= 6]) >= 3
    await mouse(tab, "mouseMoved", await place(tab, 0, 0.5, 0.5))
    time, up, _ = await told(tab, 0)
    assert float(time.split()[1]) == pytest.approx(5.0, abs=0.05)
    assert float(up.split()[1]) == pytest.approx(40.0, abs=0.5)
    await tab.evaluate(in_figure(0, 'figure.querySelector(".back").click()'))
    assert await marks(tab, 0) == whole
    assert await tab.evaluate(in_figure(0, 'figure.querySelector(".back").hidden'))


async def test_a_rectangle_enlarges_both_axes_of_a_logarithmic_chart(written, tab):
    """Each mark is inside the part, and there are some."""
    await tab.show(written)
    await drag(tab, await place(tab, 4, 0.6, 0.2), await place(tab, 4, 0.9, 0.8))
    low, high = (0.009 * (11 / 0.009) ** share for share in (0.59, 0.91))
    axis = await tab.evaluate(
        in_figure(
            4,
            """[...svg.querySelectorAll(".axes text[text-anchor=middle]")].slice(0, -1)
            .map(one => Number(one.textContent))""",
        )
    )
    assert len(axis) >= 2
    assert all(low <= one <= high for one in axis)


async def test_keys_and_a_double_click_do_what_a_mouse_does(written, tab):
    """Arrows read, plus and a double click enlarge, Escape gives back."""
    await tab.show(written)
    await tab.evaluate(in_figure(0, "svg.focus()"))
    press = "svg.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}'}}))".format
    await tab.evaluate(in_figure(0, press("ArrowRight")))
    assert len(await told(tab, 0)) == 3
    hidden = 'figure.querySelector(".back").hidden'
    await tab.evaluate(in_figure(0, press("+")))
    assert not await tab.evaluate(in_figure(0, hidden))
    await tab.evaluate(in_figure(0, press("Escape")))
    assert await tab.evaluate(in_figure(0, hidden))
    middle = await place(tab, 0, 0.5, 0.5)
    for clicks in (1, 2):
        await mouse(tab, "mousePressed", middle, clicks)
        await mouse(tab, "mouseReleased", middle, clicks)
    assert not await tab.evaluate(in_figure(0, hidden))


async def test_a_finger_reads_values_and_scrolls(written, tab):
    """Nothing is enlarged by it; the note is inside the screen, and stays."""
    await tab.show(written, PHONE)
    await tab.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        x, y = await place(tab, 0, 0.5, 0.5)
        await tab.call(
            "Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}]
        )
        assert len(await told(tab, 0)) == 3
        box = await tab.evaluate(
            in_figure(0, 'figure.querySelector(".note").getBoundingClientRect().toJSON()')
        )
        assert box["left"] >= 0
        assert box["right"] <= PHONE[0]
        await tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        assert len(await told(tab, 0)) == 3
        assert await tab.evaluate(in_figure(0, 'figure.querySelector(".back").hidden'))
    finally:
        await tab.call("Emulation.setTouchEmulationEnabled", enabled=False)


async def test_a_legend_hides_and_shows_its_series(written, tab):
    """In the chart and in what the pointer reads; the button says which it is."""
    await tab.show(written, DESKTOP)
    click = 'figure.querySelector(".legend button").click()'
    state = """[svg.querySelector("[data-series='0']").getBoundingClientRect().width > 0,
      figure.querySelector(".legend button").getAttribute("aria-pressed")]"""
    assert await tab.evaluate(in_figure(0, state)) == [True, "true"]
    await tab.evaluate(in_figure(0, click))
    assert await tab.evaluate(in_figure(0, state)) == [False, "false"]
    await mouse(tab, "mouseMoved", await place(tab, 0, 0.3, 0.5))
    assert [line.partition(":")[0] for line in await told(tab, 0)] == [
        "time",
        NAMED.partition(":")[0],
    ]
    await tab.evaluate(in_figure(0, click))
    assert await tab.evaluate(in_figure(0, state)) == [True, "true"]


async def test_a_page_asks_nothing_of_a_network_and_lets_no_other_script_run(written, tab):
    """The policy of the page refuses both, whatever a name in it says."""
    await tab.show(written)
    assert await tab.evaluate("document.title") == "Charts"
    assert await tab.evaluate("performance.getEntriesByType('resource').length") == 0
    refused = await tab.evaluate(
        "fetch('data:text/plain,x').then(() => 'fetched', () => 'refused')"
    )
    assert refused == "refused"
    ran = await tab.evaluate(
        """(() => {
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
          return window.ran ?? false;
        })()"""
    )
    assert ran is False


async def test_without_scripts_a_chart_is_whole(written, tab):
    """All lines, marks and names are there; nothing that would do nothing is shown."""
    await tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        await tab.call("Page.navigate", url=written.resolve().as_uri())
        async with asyncio.timeout(30):
            while await tab.evaluate("document.readyState") != "complete":
                pass
        assert await tab.evaluate("document.querySelectorAll('button').length") == 0
        assert await tab.evaluate(in_figure(0, "svg.querySelectorAll('polyline').length")) == 2
        assert len(await marks(tab, 0)) > 8
    finally:
        await tab.call("Emulation.setScriptExecutionDisabled", value=False)
