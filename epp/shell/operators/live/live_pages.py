"""Serve /live, a page that shows the picker, and /debug/live, the data that it polls.

The page itself contains no data and needs no token. It loads nothing from other hosts, runs only
its own script, and writes data as text. The data require the operators' bearer token, if one is
configured.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web

from epp.shell.operators.live.live_view import LiveView
from epp.shell.operators.pages.bearer_token import BearerToken
from epp.shell.operators.pages.page_queue import PageQueue

LIVE_PAGES: Final = {
    "/live": "live view of the picker for a browser",
    "/debug/live": "data of that page as JSON; `epp top` shows the same",
}
_PAGE: Final = Path(__file__).with_name("live_page.html")
_INLINE: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class LivePages:
    """The routes of /live and /debug/live for the metrics server."""

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._page = _PAGE.read_text(encoding="utf-8")
        self._headers = {
            "content-security-policy": _policy(self._page),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-store",
        }

    def routes(self, queue: PageQueue, token: BearerToken | None = None) -> list[web.RouteDef]:
        """Return the routes of /live and /debug/live. The data are created in `queue` and require
        `token`, if it is not None.
        """
        made = queue.queued(self._data)
        data = token.guarded(made) if token else made
        return [web.get("/live", self._show), web.get("/debug/live", data)]

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html", headers=self._headers)

    async def _data(self, _: web.Request) -> web.Response:
        return web.Response(
            body=await self._view.look(),
            content_type="application/json",
            headers={hdrs.CACHE_CONTROL: "no-store", "x-content-type-options": "nosniff"},
        )


def _policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the style and script in `page`, and data
    from the page's origin.
    """
    allowed = {
        kind: f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        for kind, content in _INLINE.findall(page)
    }
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {allowed['style']}",
            f"script-src {allowed['script']}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
