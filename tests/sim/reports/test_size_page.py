"""The page of a sizing in a real browser: who looks at the frontier sees the answer there."""

import math
from itertools import pairwise

import pytest
import pytest_asyncio
from msgspec.structs import replace

from sim.reports.size_report import size_page
from tests.sim.browser import DESKTOP, PHONE, browser, chromium
from tests.sim.reports.test_size_report import NONE, OPTION, SUMMARY, count

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT_PX_MAX = 16
"""That of sentences: a chart whose labels are larger is a small one blown up."""
CHEAP = replace(OPTION, counts=[count(4, 1.05), count(5, 0.8), count(6, 0.5)])
DEAR = replace(
    OPTION,
    profile="two-cards",
    pods=40,
    used=0.4,
    cost_per_hour=100.0,
    counts=[count(20, 30.0), count(39, 1.2), count(40, 0.4), count(41, 0.3)],
)
BEATEN = replace(DEAR, config="round-robin", used=0.7, on_front=False)
ALLOWED_NOTHING = replace(
    count(64, 30.0),
    used=math.inf,
    bounds=[replace(one, used=math.inf) for one in count(64, 30.0).bounds],
)
"""As a bound of no lost request is broken by one."""
PAGES = {
    "priced": replace(SUMMARY, options=[CHEAP, DEAR, BEATEN]),
    "unpriced": replace(
        SUMMARY,
        options=[
            replace(
                OPTION,
                pods=1,
                used=0.1,
                price_per_hour=None,
                counts=[
                    replace(count(pods, used), cost_per_hour=None)
                    for pods, used in ((1, 0.1), (2, 0.0))
                ],
            )
        ],
    ),
    "none": NONE,
    "impossible": replace(
        NONE, options=[replace(NONE.options[0], counts=[count(32, 4_000.0), ALLOWED_NOTHING])]
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pages of sizings that were not run."""
    chromium()
    folder = tmp_path_factory.mktemp("sized")
    for name, summary in PAGES.items():
        (folder / f"{name}.html").write_text(size_page(summary))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab():
    async with browser() as tab:
        yield tab


FRONTIER = """
(() => {
  const svg = [...document.querySelectorAll("figure svg")].find(one => one.checkVisibility());
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const plot = JSON.parse(svg.dataset.plot);
  return {
    texts: [...svg.querySelectorAll("text")].map(one => one.textContent),
    px: [...svg.querySelectorAll("text")].map(one =>
      scale * parseFloat(getComputedStyle(one).fontSize)),
    cut: [...svg.querySelectorAll("text")].filter(one =>
      one.getBoundingClientRect().left < svg.getBoundingClientRect().left ||
      one.getBoundingClientRect().right > svg.getBoundingClientRect().right
    ).map(one => one.textContent),
    outside: [...svg.querySelectorAll("circle")].filter(one =>
      one.cx.baseVal.value < plot.left || one.cx.baseVal.value > plot.right ||
      one.cy.baseVal.value < plot.top || one.cy.baseVal.value > plot.bottom).length,
    series: Object.fromEntries([...svg.querySelectorAll("[data-series]")].map(one => [
      one.dataset.name,
      [...one.querySelectorAll("circle")].map(dot => ({
        large: dot.r.baseVal.value > 5, x: dot.cx.baseVal.value, y: dot.cy.baseVal.value})),
    ])),
    allowed: Number(svg.querySelector('[data-name="the limit"] polyline')
      .getAttribute("points").split(" ")[0].split(",")[1]),
  };
})()
"""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=str)
async def test_the_frontier_is_drawn_for_the_screen(folder, tab, name, size):
    """Its labels are whole and no larger than the text about it; each dot lies between the axes."""
    await tab.show(folder / f"{name}.html", size)
    drawn = await tab.evaluate(FRONTIER)
    assert max(drawn["px"]) <= TEXT_PX_MAX
    assert drawn["cut"] == []
    assert drawn["outside"] == 0
    assert "used share of the bounds (%)" in drawn["texts"]


async def test_the_answers_stand_out_and_lie_under_what_is_allowed(folder, tab):
    """One large dot for each option, of the number that was found; the limit has none."""
    await tab.show(folder / "priced.html")
    drawn = await tab.evaluate(FRONTIER)
    assert drawn["series"].pop("the limit") == []
    assert drawn["series"].pop("the front") == []
    assert set(drawn["series"]) == {
        "a-card, default", "two-cards, default", "two-cards, round-robin"
    }  # fmt: skip
    for dots in drawn["series"].values():
        [found] = [dot for dot in dots if dot["large"]]
        assert found["y"] > drawn["allowed"]
        # Up is more: those that cost less break a bound.
        assert all(dot["y"] < drawn["allowed"] for dot in dots if dot["x"] < found["x"])
    await tab.show(folder / "none.html")
    drawn = await tab.evaluate(FRONTIER)
    assert not any(dot["large"] for dots in drawn["series"].values() for dot in dots)
    assert all(dot["y"] < drawn["allowed"] for dots in drawn["series"].values() for dot in dots)


async def test_cheap_options_do_not_lie_on_each_other(folder, tab):
    """Beside one that costs twenty times as much their dots can be told apart."""
    await tab.show(folder / "priced.html", PHONE)
    drawn = await tab.evaluate(FRONTIER)
    places = [dot["x"] for dot in drawn["series"]["a-card, default"]]
    assert all(after - before > 10 for before, after in pairwise(places))


async def test_an_axis_of_pods_has_no_half_of_one(folder, tab):
    """And what uses nothing of its bounds is drawn all the same."""
    await tab.show(folder / "unpriced.html")
    drawn = await tab.evaluate(FRONTIER)
    assert len(drawn["series"]["a-card, default"]) == 2
    assert {"1", "2"} <= set(drawn["texts"])
    assert "1.5" not in drawn["texts"]


@pytest.mark.parametrize("name", PAGES)
async def test_nothing_on_the_page_is_empty(folder, tab, name):
    """No panel without content, no column of dashes alone, nothing that is no number."""
    await tab.show(folder / f"{name}.html")
    panels = await tab.evaluate(
        "[...document.querySelectorAll('figure')].map(one => one.innerText.trim().split('\\n'))"
    )
    assert all(len(lines) > 1 for lines in panels)
    text = await tab.evaluate("document.querySelector('main').innerText")
    assert not {"nan", "inf%", "None", "null"} & set(text.split())
    columns = await tab.evaluate(
        "[...document.querySelectorAll('table.numbers')].flatMap(table =>"
        " [...table.tHead.rows[0].cells].map((head, at) =>"
        " [head.innerText, [...table.tBodies[0].rows].map(row => row.cells[at].innerText)]))"
    )
    if name in ("priced", "unpriced"):
        assert [head for head, cells in columns if set(cells) == {"-"}] == []
