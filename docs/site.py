"""Hooks of mkdocs that build the documentation site from this repository: `make site`.

Pages are written for GitHub, so links lead to files of the repository. The hooks turn links to
pages into links of the site, and links to other files into links into the repository. A link to a
missing file is a warning, which ends the build. Markdown files outside of docs/, for example beside
the chart, become pages too, and old addresses lead to the present ones (docs/redirects.py).
`extra.repository` of mkdocs.yml is the address of the repository's files.
"""

import logging
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs import redirects

ROOT: Final = Path(__file__).parent.parent
LOG: Final = logging.getLogger("mkdocs.homing")

ELSEWHERE: Final[Mapping[str, str]] = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
    "bench/README.md": "costs.md",
    "charts/homing/README.md": "chart.md",
    "deploy/README.md": "manifests.md",
}
"""Page of the site for each Markdown file outside of docs/."""

_FENCE: Final = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"(\]\()([^)\s]+)(\))")


def slug(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading, so that a link to it works on GitHub and on
    the site.
    """
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Hook of mkdocs: add the Markdown files outside of docs/ to the pages of the site."""
    for path, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Hook of mkdocs: turn links to files of the repository into links of the site."""
    source = _path_of(page.file.src_uri)
    written = []
    last = 0
    for fence in _FENCE.finditer(markdown):
        written += [_linked(markdown[last : fence.start()], source, page, config, files), fence[0]]
        last = fence.end()
    return "".join([*written, _linked(markdown[last:], source, page, config, files)])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Hook of mkdocs: insert the old anchors of renamed headings."""
    try:
        return redirects.with_old_anchors(html, page.file.src_uri, redirects.read())
    except ValueError as problem:
        LOG.warning("docs/redirects.toml: %s", problem)
        return html


def on_post_build(config: MkDocsConfig) -> None:
    """Hook of mkdocs: at the address of each removed page, write a page that forwards to the new
    one.
    """
    for redirect in redirects.read():
        if redirect.gone:
            path = Path(config.site_dir, redirects.address(redirect.page))
            path.write_text(redirects.forwarding_page(redirect), encoding="utf-8")


def _path_of(page: str) -> str:
    """Return the path in the repository of the file that became `page` of the site."""
    return next((path for path, to in ELSEWHERE.items() if to == page), f"docs/{page}")


def _linked(text: str, source: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def link(found: re.Match[str]) -> str:
        return found[1] + _target(found[2], source, page, config, files) + found[3]

    return _LINK.sub(link, text)


def _target(link: str, source: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if link.startswith(("https://", "http://", "mailto:", "#")):
        return link
    name, _, anchor = link.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    to = ELSEWHERE.get(path) or path.removeprefix("docs/")
    if (path in ELSEWHERE or path.startswith("docs/")) and files.get_file_from_path(to) is not None:
        here = posixpath.dirname(page.file.src_uri) or "."
        return posixpath.relpath(to, here) + (f"#{anchor}" if anchor else "")
    if not (ROOT / path).exists() or path.startswith(".."):
        LOG.warning("%s links to %s, which is not a file of the repository", source, link)
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config.extra['repository']}/{kind}/main/{path}"
