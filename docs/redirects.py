"""Redirects from old addresses of the documentation site, listed in docs/redirects.toml, to the new
place of their text.

A removed page becomes a small page that forwards the browser, to the heading that the address
names. A heading that was renamed keeps its old anchor beside the new one.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

REDIRECTS: Final = Path(__file__).with_name("redirects.toml")

_PAGE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Moved</title>
<meta name="robots" content="noindex">
<link rel="canonical" href="{to}">
<noscript><meta http-equiv="refresh" content="0; url={to}"></noscript>
<p>This page has moved:</p>
<ul>
{links}
</ul>
<script>
const old = document.getElementById(decodeURIComponent(location.hash.slice(1)));
location.replace((old ?? document.querySelector("a")).href);
</script>
</html>
"""


class Redirect(Struct, frozen=True, forbid_unknown_fields=True):
    """The redirects from the old addresses of one page."""

    page: str
    """Old page, as the name of a Markdown file of the site."""
    to: str
    """Page that has the text now, with `#anchor` if it is a section of that page."""
    kept: list[str] = []
    """Anchors of a removed page that the new page has too."""
    renamed: dict[str, str] = {}
    """New anchor of each old anchor that was renamed."""

    @property
    def target(self) -> str:
        """New page without an anchor."""
        return self.to.partition("#")[0]

    @property
    def gone(self) -> bool:
        """True if the old page was removed from the site."""
        return self.page != self.target

    def anchors(self) -> Iterator[tuple[str, str]]:
        """Yield each old anchor of the page with its new anchor."""
        here = self.to.partition("#")[2]
        if here and here not in self.renamed:
            yield here, here
        yield from ((anchor, anchor) for anchor in self.kept)
        yield from self.renamed.items()


class _Redirects(Struct, frozen=True, forbid_unknown_fields=True):
    redirect: list[Redirect]


def read(path: Path = REDIRECTS) -> list[Redirect]:
    """Return all redirects. Raise `msgspec.ValidationError` if the file has another form."""
    return msgspec.toml.decode(path.read_bytes(), type=_Redirects).redirect


def address(page: str, anchor: str = "") -> str:
    """Return the address on the site of an anchor in a Markdown file; without an anchor, that of
    the page.
    """
    return f"{page.removesuffix('.md')}.html" + (f"#{anchor}" if anchor else "")


def forwarding_page(redirect: Redirect) -> str:
    """Return the HTML that replaces a removed page and forwards to the new one.

    It also works from a folder of files. Without scripts the browser forwards to the section
    `redirect.to`, whatever the anchor, and shows a link for each old anchor.
    """
    to = address(redirect.target, redirect.to.partition("#")[2])
    links = [f'<li><a href="{html.escape(to)}">{html.escape(to)}</a>']
    links += [
        f'<li><a id="{html.escape(old)}" href="{html.escape(address(redirect.target, new))}">'
        f"{html.escape(old.replace('-', ' '))}</a>"
        for old, new in redirect.anchors()
    ]
    return _PAGE.format(to=html.escape(to), links="\n".join(links))


def with_old_anchors(content: str, page: str, redirects: list[Redirect]) -> str:
    """Return the HTML of `page`, with the old anchors of renamed headings inserted before them.

    Raise `ValueError` if the page does not have a heading to which an old anchor leads.
    """
    for redirect in redirects:
        if redirect.page != page or redirect.gone:
            continue
        for old, new in redirect.renamed.items():
            heading = re.compile(rf'<h[1-6] id="{re.escape(new)}"')
            content, count = heading.subn(f'<a id="{old}"></a>\\g<0>', content)
            if count != 1:
                raise ValueError(
                    f"{page} has {count} headings #{new}, the target of #{old}; expected one"
                )
    return content
