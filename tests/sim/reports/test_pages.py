"""Every page that is written, in a real browser: on a phone and a desk, light and dark."""

import msgspec
import pytest
import pytest_asyncio

from epp.configuration.config import DEFAULT_CONFIG
from sim.__main__ import main
from sim.demo.command import _conditions, _parse
from sim.demo.report import SCHEMA, Summary, render_report, summarise
from sim.demo.workload import conversations
from tests.sim.browser import DESKTOP, PHONE, browser, chromium
from tests.sim.demo.test_report import OUTCOMES
from tests.sim.experiments.test_replay import written
from tests.sim.made import BLOCK_TOKENS

LONG = "a-configuration-whose-name-is-longer-than-a-line-on-a-phone"
SMALL_PHONE = (320, 568)
TEXT_PX_MIN = 11
BUDGET_BYTES = 300_000
TEXT_CONTRAST_MIN = 4.5
"""WCAG 2.2, 1.4.3; the other is its 1.4.11."""
MARK_CONTRAST_MIN = 3.0
pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES = ("replay", "compare", "sweep", "tune", "size", "leaderboard", "demo")


def demo_page():
    """The demo's own, with made outcomes."""
    slow = [msgspec.structs.replace(one, ttft_s=one.ttft_s * 12) for one in OUTCOMES]
    outcomes = {"round_robin": slow, "homing": OUTCOMES}
    pods = ([26, 25, 25, 25], [40, 31, 20, 10])
    arms = {
        name: summarise(found, counts)
        for (name, found), counts in zip(outcomes.items(), pods, strict=True)
    }
    options = _parse([])
    conditions = _conditions(options, conversations(options.workload, options.seed))
    return render_report(Summary(schema=SCHEMA, seed=1, arms=arms), outcomes, conditions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A page of each kind, with names that are long and pods that are many."""
    chromium()
    folder = tmp_path_factory.mktemp("pages")
    trace = written(folder / f"{LONG}.jsonl", 200)
    config = folder / f"{LONG}.yaml"
    config.write_text(DEFAULT_CONFIG)
    named = ["--config", str(config)]
    compared = [*named, "--config", "default", "--config", "random"]
    for command, *flags in (
        ("replay", "--pods", "12", *named),
        ("compare", "--seeds", "5", "--pods", "2", *compared),
        ("sweep", "--rates", "5,50,1000", "--pods", "2", *compared),
        ("tune", "--trials", "4", "--seeds", "3", "--pods", "2", *named),
        ("size", "--slo", "ttft-p90=1", "--pods-max", "4", "--seeds", "3", *compared),
    ):
        blocks = ["--block-tokens", str(BLOCK_TOKENS)]
        out = ["--out", str(folder / command)]
        assert main([command, str(trace), *flags, *blocks, *out]) == 0
    cases = "pickers-1,pickers-4,scrape-1s,scrape-10s,set-below,set-held"
    board = ["--cases", cases, "--strategies", f"{config},default,random", "--requests", "30"]
    assert main(["leaderboard", *board, "--out", str(folder / "leaderboard")]) == 0
    (folder / "demo").mkdir()
    (folder / "demo" / "report.html").write_text(demo_page())
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab():
    """One browser for all: to start it takes longer than to look."""
    async with browser() as tab:
        yield tab


@pytest.mark.parametrize("name", PAGES)
async def test_a_page_fetches_nothing_and_is_within_its_budget(folder, tab, name):
    """The decisions of a run, which readers search, are counted apart."""
    path = folder / name / "report.html"
    await tab.show(path)
    assert await tab.evaluate("performance.getEntriesByType('resource').length") == 0
    decisions = await tab.evaluate("document.getElementById('decisions')?.textContent.length ?? 0")
    assert len(path.read_text()) - decisions <= BUDGET_BYTES


@pytest.mark.parametrize("name", PAGES)
async def test_a_table_has_the_width_of_the_screen_before_it_is_cut(folder, tab, name):
    """It is wider than the text where it must be; and the page itself is not pushed sideways."""
    width = 1400
    await tab.show(folder / name / "report.html", (width, 900))
    assert await tab.evaluate("document.documentElement.scrollWidth") <= width
    boxes = await tab.evaluate(
        "[...document.querySelectorAll('.scroll')].map(box => [box.scrollWidth, box.clientWidth])"
    )
    assert [cut for cut, shown in boxes if cut > shown and shown < width - 100] == []


@pytest.mark.parametrize("name", PAGES)
async def test_what_is_code_is_shown_as_code(folder, tab, name):
    """Sentences are written once, for pages and for Markdown; a backtick is of Markdown."""
    await tab.show(folder / name / "report.html")
    assert "`" not in await tab.evaluate("document.querySelector('main').innerText")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("size", [PHONE, SMALL_PHONE], ids=str)
async def test_a_page_is_no_wider_than_a_phone(folder, tab, name, size):
    """Nothing is to be pushed sideways but a table, inside its own box, where it is whole."""
    await tab.show(folder / name / "report.html", size)
    assert await tab.evaluate("innerWidth") == size[0]
    assert await tab.evaluate("document.documentElement.scrollWidth") <= size[0]
    cut = await tab.evaluate(
        "[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll, svg')"
        " && one.getBoundingClientRect().right > innerWidth).map(one => one.outerHTML)"
    )
    assert cut == []
    boxes = await tab.evaluate(
        "[...document.querySelectorAll('.scroll')].map(box =>"
        " [box.tabIndex, getComputedStyle(box).overflowX])"
    )
    assert bool(boxes) == (name != "demo")
    assert all(box == [0, "auto"] for box in boxes)


TEXTS = """
[...document.querySelectorAll("svg")].filter(svg => svg.checkVisibility()).flatMap(svg => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll("text")].filter(one => one.textContent);
  const boxes = texts.map(one => one.getBoundingClientRect());
  return texts.map((one, at) => ({
    text: one.textContent,
    px: scale * parseFloat(getComputedStyle(one).fontSize),
    covers: texts.filter((_, other) => other > at &&
      boxes[at].left < boxes[other].right - 1 && boxes[other].left < boxes[at].right - 1 &&
      boxes[at].top < boxes[other].bottom - 5 && boxes[other].top < boxes[at].bottom - 5
    ).map(other => other.textContent),
  }));
})
"""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=str)
async def test_the_text_of_charts_can_be_read(folder, tab, name, size):
    """It is large enough as it is shown, and no label covers another."""
    await tab.show(folder / name / "report.html", size)
    texts = await tab.evaluate(TEXTS)
    assert len(texts) > 8
    assert [one for one in texts if one["px"] < TEXT_PX_MIN] == []
    assert [one for one in texts if one["covers"]] == []


CONTRASTS = """
(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => parts(colour).slice(0, 3).map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = one => {
    for (let at = one; at; at = at.parentElement) {
      const [red, green, blue, alpha = 1] = parts(getComputedStyle(at).backgroundColor);
      if (alpha) return `rgb(${red}, ${green}, ${blue})`;
    }
  };
  const contrast = (colour, one) => {
    const [low, high] = [light(colour), light(behind(one))].sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
  };
  const found = (kind, one, colour, at) =>
    ({kind, what: one.outerHTML.slice(0, 80), contrast: contrast(colour, at)});
  const texts = [...document.querySelectorAll("body *")].filter(one =>
    !["SCRIPT", "STYLE"].includes(one.tagName) &&
    [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  const style = one => getComputedStyle(one);
  return [
    ...texts.map(one => found("text", one,
      one.closest("svg") ? style(one).fill : style(one).color, one)),
    ...[...document.querySelectorAll("polyline")].map(one =>
      found("mark", one, style(one).stroke, one)),
    ...[...document.querySelectorAll("rect, circle")].map(one =>
      found("mark", one, style(one).fill, one)),
    ...[...document.querySelectorAll("i")].map(one =>
      found("mark", one, style(one).backgroundColor, one.parentElement)),
    {kind: "page", what: "", contrast: light(behind(document.body))},
  ];
})()
"""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_page_is_light_or_dark_as_is_preferred(folder, tab, name, scheme):
    """Its ground, and what is written and drawn on it, which stands out in both."""
    await tab.show(folder / name / "report.html", scheme=scheme)
    found = await tab.evaluate(CONTRASTS)
    assert {one["kind"] for one in found} == {"text", "mark", "page"}
    low = {"text": TEXT_CONTRAST_MIN, "mark": MARK_CONTRAST_MIN, "page": 0.0}
    assert [one for one in found if one["contrast"] < low[one["kind"]]] == []
    assert (found[-1]["contrast"] > 0.5) == (scheme == "light")


@pytest.mark.parametrize("name", [name for name in PAGES if name != "demo"])
async def test_numbers_stand_under_each_other(folder, tab, name):
    """To the right and with digits of one width, under a head; the names of rows to the left."""
    await tab.show(folder / name / "report.html")
    cells = await tab.evaluate(
        "[...document.querySelectorAll('.numbers td')].map(one => getComputedStyle(one))"
        ".map(one => one.textAlign + ' ' + one.fontVariantNumeric)"
    )
    names = await tab.evaluate(
        "[...document.querySelectorAll('.numbers tr > :first-child')]"
        ".map(one => getComputedStyle(one).textAlign + ' ' + one.tagName)"
    )
    assert set(cells) == {"right tabular-nums"}
    assert set(names) == {"left TH"}
