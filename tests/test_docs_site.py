"""The documentation as a site: everything is on it, and nothing on it leads nowhere."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from mkdocs.config import load_config
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.diagrams import BLOCK_TOKENS, DIAGRAMS, PODS, PROMPT_TOKENS, added_s
from docs.redirects import Redirect, address, read, with_old_anchors
from docs.site import ELSEWHERE, on_page_markdown, slug
from epp.plugins.added_time import AddedTime
from epp.plugins.cost import scores_of_cost
from tests.builders import candidates, request
from tests.envoy.rig import until
from tests.sim.browser import browser
from tests.test_docs import PAGES, ROOT, anchors, name_of

CONFIG = ROOT / "mkdocs.yml"


@pytest.fixture(scope="module")
def config():
    return load_config(str(CONFIG))


def pages_in(nav):
    for entry in nav:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from pages_in(value)
        else:
            yield value


def test_every_page_is_in_the_navigation_once(config):
    """Those of docs/ and those that are kept elsewhere, and nothing else."""
    listed = sorted(pages_in(config["nav"]))
    there = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert listed == sorted([*there, *ELSEWHERE.values()])


SECTIONS = ["Get started", "Guides", "Concepts", "Reference", "Evidence"]
WRITTEN_BY_PROGRAMS = frozenset(
    {"flags.md", "night.md", "strategies.md", "walkthrough-cluster.md", "walkthrough.md"}
)
"""Pages that a program writes, all but an introduction at most."""
HAND_WRITTEN_MAX = 34


def test_the_documentation_has_five_sections_and_not_too_many_pages(config):
    """Pages about one subject are one page. Files outside of docs/ belong to what lies beside them."""
    assert [next(iter(entry)) for entry in config["nav"][1:]] == SECTIONS
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages >= WRITTEN_BY_PROGRAMS
    assert len(pages - WRITTEN_BY_PROGRAMS) <= HAND_WRITTEN_MAX


def test_every_page_that_is_kept_elsewhere_is_there():
    assert [path for path in ELSEWHERE if not (ROOT / path).is_file()] == []


def built(site, config=CONFIG):
    """As `make site` does it: `--quiet` would hide warnings from mkdocs too, and strict would pass."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", site],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder; that it was built, and how that went."""
    folder = tmp_path_factory.mktemp("site")
    return folder, built(folder)


@pytest.mark.timeout(240)  # ten seconds on a machine of one's own
def test_the_site_is_built_without_a_warning(site):
    """Pages, pictures and anchors that are linked to exist; nothing is loaded from elsewhere."""
    folder, done = site
    assert done.returncode == 0, done.stderr
    page = (folder / "start.html").read_text(encoding="utf-8")
    loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(https?:[^"]*)"', page)
    assert loaded == []
    assert 'data-md-component="source"' not in page, "it would ask the repository's host"
    for file in ("index.html", "overview.html", "chart.html", "scoring/added-time.svg"):
        assert (folder / file).is_file()
    assert not list(folder.rglob("*.py"))


IDS = re.compile(r'\sid="([^"]+)"')
FORWARD = re.compile(r'<a (?:id="(?P<old>[^"]+)" )?href="(?P<to>[^"]+)"')


def ids(page):
    return set(IDS.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("redirect", read(), ids=lambda redirect: redirect.page)
@pytest.mark.timeout(240)  # as above
def test_every_old_address_leads_to_its_text(site, redirect):
    """A page that has gone forwards to a heading that exists; a page that stayed has the old anchor."""
    folder, _ = site
    old = folder / address(redirect.page)
    assert old.is_file()
    if not redirect.gone:
        assert redirect.renamed.keys() <= ids(old)
        return
    assert not (ROOT / "docs" / redirect.page).exists()
    links = {found["old"]: found["to"] for found in FORWARD.finditer(old.read_text("utf-8"))}
    assert {anchor for anchor, _ in redirect.anchors()} == links.keys() - {None}
    for link in links.values():
        page, _, anchor = link.partition("#")
        assert anchor in ids(folder / page), link


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kubernetes.html", "install.html#on-kubernetes"),
        ("kubernetes.html#rights", "install.html#rights"),
        ("traces.html#variables", "operate.html#variables-of-the-exporter"),
        ("exact.html#not-an-anchor", "kv-events.html#approximate-or-exact-which-do-i-need"),
    ],
)
@pytest.mark.timeout(240)  # as above
async def test_a_browser_follows_an_old_address(site, old, new):
    """From a folder of files too, and to the section that the address names."""
    at = site[0].resolve().as_uri()
    async with browser() as tab:
        await tab.call("Page.navigate", url=f"{at}/{old}")

        async def arrived():
            # Asked of the target: a script or a frame of the old page ends when the browser goes on.
            told = await tab.call("Target.getTargetInfo")
            return told["targetInfo"]["url"] == f"{at}/{new}"

        assert await until(arrived, new, timeout_s=60)


def test_a_redirect_to_a_heading_that_is_not_there_is_an_error():
    """The hook makes a warning of it, which ends the build."""
    redirect = Redirect("a.md", "a.md", renamed={"old": "new"})
    content = '<h2 id="new">New</h2>'
    assert with_old_anchors(content, "a.md", [redirect]) == '<a id="old"></a>' + content
    assert with_old_anchors(content, "b.md", [redirect]) == content
    with pytest.raises(ValueError, match="0 headings #new"):
        with_old_anchors('<h2 id="newer">New</h2>', "a.md", [redirect])


FOUND = "document.querySelectorAll('.md-search-result__item a').length"
SEARCH = """
document.querySelector('[data-md-toggle=search]').click();
document.querySelector('[data-md-component=search-query]').value = 'drain grace';
document.querySelector('[data-md-component=search-query]').dispatchEvent(new Event('keyup'));
"""


@pytest.mark.timeout(240)  # as above
async def test_the_search_works_from_a_folder_of_files(site):
    """A browser runs no worker from there and reads no other file but scripts."""
    folder, _ = site
    async with browser() as tab:
        await tab.show(folder / "start.html")
        await tab.evaluate(SEARCH)

        async def found():
            return await tab.evaluate(FOUND)

        assert await until(found, "what is found", timeout_s=60)
        first = await tab.evaluate("document.querySelector('.md-search-result__item a').href")
        page = first.removeprefix(folder.resolve().as_uri() + "/").partition("?")[0]
        assert (folder / page.partition("#")[0]).is_file()


@pytest.mark.timeout(240)  # ten seconds on a machine of one's own
def test_a_dead_link_ends_the_build(tmp_path):
    """To a page, to a heading, to a file of the repository, and a page that is in no navigation."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs/versions.md").open("a") as page:
        page.write("\n[a](none.md) [b](flags.md#nowhere) [c](../epp/none.py)\n")
    (tmp_path / "docs/forgotten.md").write_text("# Forgotten\n")
    text = CONFIG.read_text(encoding="utf-8")
    own = tmp_path / "mkdocs.yml"
    own.write_text(text.replace("docs/site.py", str(ROOT / "docs/site.py")))
    done = built(tmp_path / "site", own)
    assert done.returncode == 1
    for dead in ("none.md", "flags.md#nowhere", "../epp/none.py", "forgotten.md"):
        assert dead in done.stderr


@pytest.fixture
def linked(config):
    """What becomes of the Markdown of a page beside which there is `flags.md`."""
    files = Files(
        [
            File(name, config["docs_dir"], config["site_dir"], use_directory_urls=False)
            for name in ("start.md", "flags.md", *ELSEWHERE.values())
        ]
    )

    def on(page, markdown):
        return on_page_markdown(
            markdown, Page(None, files.get_file_from_path(page), config), config, files
        )

    return on


def test_links_to_pages_stay_on_the_site(linked):
    """From docs/ to what is kept elsewhere, and back."""
    assert linked("start.md", "[x](flags.md#epp-serve)") == "[x](flags.md#epp-serve)"
    assert linked("start.md", "[x](../deploy/README.md)") == "[x](manifests.md)"
    assert linked("chart.md", "[x](../../docs/flags.md)") == "[x](flags.md)"
    assert linked("overview.md", "[x](docs/flags.md)") == "[x](flags.md)"


def test_links_to_other_files_lead_into_the_repository(linked, config):
    """A file or a folder of it."""
    at = config["extra"]["repository"]
    assert (
        linked("start.md", "[x](../epp/app/wiring.py)") == f"[x]({at}/blob/main/epp/app/wiring.py)"
    )
    assert linked("overview.md", "[x](epp)") == f"[x]({at}/tree/main/epp)"
    assert linked("start.md", "[x](https://kind.sigs.k8s.io)") == "[x](https://kind.sigs.k8s.io)"


def test_what_stands_in_a_block_of_code_is_left_alone(linked):
    block = "```python\nread[0](../none.py)\n```\n"
    assert linked("start.md", block) == block


@pytest.mark.parametrize("link", ["none.md", "../none.py", "../../beside"])
def test_a_link_that_leads_nowhere_is_a_warning(linked, caplog, link):
    """Which ends a strict build."""
    linked("start.md", f"[x]({link})")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert link in caplog.text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_headings_have_the_same_anchors_on_the_site_as_where_they_lie(page):
    """What a test of links finds in a file, the site has too."""
    made = {slug(anchor.replace("-", " "), "-") for anchor in anchors(page)}
    assert {anchor.strip("-") for anchor in anchors(page)} == {each.strip("-") for each in made}


def test_what_is_configured_is_strict():
    """`make site` fails where this test would."""
    text = CONFIG.read_text(encoding="utf-8").replace("!!python/name:docs.site.slug", "slug")
    assert yaml.safe_load(text)["strict"] is True


@pytest.mark.parametrize("name", DIAGRAMS)
def test_pictures_are_those_of_the_formula(name):
    """`python -m docs.diagrams` draws them."""
    drawn = (ROOT / f"docs/scoring/{name}.svg").read_text(encoding="utf-8")
    assert drawn == DIAGRAMS[name]()
    page = "flow-control" if name == "flow" else "scoring"
    assert f"](scoring/{name}.svg)" in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


def test_the_sums_of_the_pictures_are_those_of_the_scorer():
    """To the digit: the page shows what decides."""
    rule = AddedTime()
    pool = candidates(
        prompt_tokens=PROMPT_TOKENS,
        total_blocks=PROMPT_TOKENS // BLOCK_TOKENS,
        matched_blocks=[pod.cached_tokens // BLOCK_TOKENS for pod in PODS],
        inflight_requests=[pod.requests for pod in PODS],
        inflight_prefill_tokens=[pod.pending_tokens for pod in PODS],
    )
    pool._columns.inflight_context_tokens[: len(PODS)] = [pod.context_tokens for pod in PODS]
    shown = scores_of_cost(np.array([added_s(pod, PROMPT_TOKENS, rule) for pod in PODS]))
    scores = rule.score(request(prompt_tokens=PROMPT_TOKENS), pool)
    assert scores == pytest.approx(shown, rel=1e-9)
    assert scores.argmax() == 1
