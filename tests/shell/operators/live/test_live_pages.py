"""The page /live in a real browser, and what else its port answers."""

import asyncio
import base64
import os
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from epp.journal.records import Applied, RefusedDocument
from epp.shell.operators.live.live_pages import LIVE_PAGES, LivePages
from epp.shell.operators.live.live_view import LiveScore
from epp.shell.operators.pages.bearer_token import BearerToken
from epp.shell.operators.pages.metrics_server import MetricsServer
from epp.shell.operators.pages.page_queue import PageQueue
from tests.commands.test_top_screen import WEIGHTS, live, live_decision, live_endpoint
from tests.envoy.rig import until
from tests.shell.operators.pages.test_metrics_server import get
from tests.sim.browser import DESKTOP, browser

PHONE = (360, 740)
HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>" + "w" * 300
WATCHED = """
window.wrong = [];
document.addEventListener("securitypolicyviolation", event => wrong.push(event.violatedDirective));
window.addEventListener("error", event => wrong.push(String(event.message)));
window.addEventListener("unhandledrejection", event => wrong.push(String(event.reason)));
"""


class View:
    """What is seen is what the test says."""

    def __init__(self):
        self.seen = live()
        self.looks = 0

    async def look(self):
        self.looks += 1
        return msgspec.json.encode(self.seen)


@asynccontextmanager
async def served(view, token=None):
    routes = LivePages(view).routes(PageQueue(asyncio.Lock()), token)
    server = MetricsServer(
        CollectorRegistry(), lambda: True, host="127.0.0.1", port=0, routes=routes
    )
    async with server:
        yield server


@asynccontextmanager
async def shown(view, size=DESKTOP, scheme="light", token=None):
    """A tab that shows the page, and its port."""
    async with served(view, token) as server, browser() as tab:
        await tab.call("Page.enable")
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        await tab.show(f"http://127.0.0.1:{server.port}/live", size, scheme)
        yield tab, server


async def sees(tab, text):
    """Wait until the page says `text`; all that it says."""

    async def said():
        return text in await tab.evaluate("document.body.innerText")

    await until(said, f"the page to say {text}", 30)
    return await tab.evaluate("document.body.innerText")


async def picture(tab, name):
    """For who wants to look: $HOMING_PICTURES is a folder."""
    folder = os.environ.get("HOMING_PICTURES")
    if folder:
        told = await tab.call("Page.captureScreenshot", captureBeyondViewport=True)
        Path(folder, f"{name}.png").write_bytes(base64.b64decode(told["data"]))


def busy():
    """Something of everything, with a name that is longer than a phone is wide."""
    parts = dict.fromkeys(WEIGHTS, 1.0)
    return live(
        refused={"rejected-saturated": 3},
        shed_total=2,
        endpoints_total=205,
        endpoints=[
            *(live_endpoint(at) for at in range(3)),
            live_endpoint(3, state="unreachable", metrics_age_s=None, waiting=None, failed=4),
        ],
        decisions=[
            live_decision(),
            live_decision(request_id="", runner_up=None, decided_by=[], status=502),
            live_decision(
                score=LiveScore(endpoint="p" * 90, total=5.0, parts=parts),
                served_by="10.0.0.9:8000",
            ),
            live_decision(refused="rejected-saturated", status=429, score=None, runner_up=None),
        ],
        configuration=Applied(
            generation=3,
            hash="abcdef0123",
            source="/etc/homing/config.yaml",
            at_s=1.7e9,
            changes=("scorer queue-scorer: weight 2 -> 3",),
            weights=WEIGHTS,
        ),
        configuration_refused=RefusedDocument(at_s=1.7e9, problem="config.yaml: unknown plugin"),
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
async def test_all_is_told_on_screens_of_every_size(size, scheme):
    """Without scrolling sideways, in the preferred colours, and without breaking its own policy."""
    view = View()
    view.seen = busy()
    async with shown(view, size, scheme) as (tab, server):
        said = await sees(tab, "live")
        await picture(tab, f"live-{size[0]}-{scheme}")
        for text in (
            *("llama-pool", "4 of 205", "3 × rejected-saturated", "201 more pods"),
            *("x3k2p", "unreachable", "50 % of 70 %", "prefix-cache-scorer × 3"),
            *("prefix-cache-scorer decided", "9 of 9 blocks", "served by 10.0.0.9:8000"),
            *("refused: rejected-saturated", "generation 3", "weight 2 -> 3", "unknown plugin"),
            "7c9e6679-7425-40de-944b-e07fc1f90ae7",
        ):
            assert text in said, text
        width = await tab.evaluate("document.documentElement.scrollWidth")
        assert width <= size[0]
        ground = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
        pieces = await tab.evaluate(
            "[...document.querySelectorAll('#decisions li:first-child .stack')]"
            ".map(bar => [...bar.children].map(piece => Math.round("
            "100 * piece.getBoundingClientRect().width / bar.getBoundingClientRect().width)))"
        )
        assert pieces == [[43, 57], [57]], "3 and 4 of 7, and 4 of 7"
        assert await tab.evaluate("wrong") == []
        loaded = await tab.evaluate("performance.getEntriesByType('resource').map(at => at.name)")
        assert set(loaded) <= {f"http://127.0.0.1:{server.port}/debug/live"}


async def test_names_are_text_whatever_they_hold():
    """Of pods, models, requests, scorers and documents; nothing runs, nothing is loaded."""
    view = View()
    score = LiveScore(endpoint=HOSTILE, total=1.0, parts={HOSTILE: 1.0})
    view.seen = live(
        pool=HOSTILE,
        refused={HOSTILE: 1},
        endpoints=[live_endpoint(1, name=HOSTILE, address=HOSTILE, state=HOSTILE)],
        decisions=[
            live_decision(
                request_id=HOSTILE, model=HOSTILE, score=score, runner_up=score,
                decided_by=[HOSTILE], served_by=HOSTILE,
            ),
            live_decision(refused=HOSTILE, score=None),
        ],
        configuration=Applied(
            hash=HOSTILE, source=HOSTILE, changes=(HOSTILE,), weights={HOSTILE: 1.0}
        ),
        configuration_refused=RefusedDocument(at_s=0.0, problem=HOSTILE),
    )  # fmt: skip
    async with shown(view, PHONE) as (tab, _):
        said = await sees(tab, "live")
        assert said.count("<img src=x onerror=") >= 10
        assert await tab.evaluate("window.pwned") is None
        assert await tab.evaluate("document.images.length") == 0
        assert await tab.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        assert await tab.evaluate("wrong") == []


async def test_it_looks_again_and_says_when_nobody_answers():
    """What is shown stays, and is said to be old."""
    view = View()
    async with shown(view) as (tab, _):
        await sees(tab, "llama-pool")
        view.seen = live(pool="another-pool")
        await sees(tab, "another-pool")
        assert view.looks >= 2

        async def fail():
            raise RuntimeError("nothing to see")

        view.look = fail
        said = await sees(tab, "no answer: what is shown is old")
        assert "another-pool" in said


async def test_a_token_is_asked_for_and_kept_in_the_page(tmp_path):
    """The page is open and holds nothing; the data need the token."""
    (tmp_path / "token").write_text("s3cret")
    view = View()
    async with shown(view, token=BearerToken(tmp_path / "token")) as (tab, server):
        said = await sees(tab, "a token is needed")
        assert "llama-pool" not in said
        await tab.evaluate(
            "document.getElementById('token').value = 's3cret';"
            "document.getElementById('ask').requestSubmit()"
        )
        await sees(tab, "llama-pool")
        assert await tab.evaluate("document.getElementById('ask').hidden")
        assert "s3cret" not in await tab.evaluate("location.href + document.cookie")
        assert await tab.evaluate("localStorage.length + sessionStorage.length") == 0
        assert (await get(server, "/live"))[0] == 200
        assert (await get(server, "/debug/live"))[0] == 401


async def test_the_page_allows_nothing_but_itself():
    """Its policy names its style and its script by their hashes, and no other place."""
    async with served(View()) as server:
        status, headers, page = await get(server, "/live")
        policy = headers["content-security-policy"]
        assert status == 200
        assert headers["content-type"].startswith("text/html")
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert "https://" not in page
        assert "style=" not in page
        assert len(page) < 20_000
        async with ClientSession() as client:
            url = f"http://127.0.0.1:{server.port}/debug/live"
            async with client.get(url, headers={"origin": "http://evil.example"}) as answer:
                assert "access-control-allow-origin" not in answer.headers
                assert answer.headers["cache-control"] == "no-store"
    assert set(LIVE_PAGES) == {"/live", "/debug/live"}
