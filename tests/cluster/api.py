"""The API server as an administrator asks it: JSON over HTTPS, inside the cluster."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from tests.cluster import certificates
from tests.cluster.place import NODE_ADDRESS, Place

_LINE_BYTES_MAX: Final = 1 << 22
"""Of one event of a watch."""


class Api:
    """Requests by path."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def get(self, path: str, **query: str) -> Any:
        async with self._session.get(path, params=query) as response:
            response.raise_for_status()
            return await response.json()

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[tuple[str, Any]]:
        """(ADDED, MODIFIED or DELETED, object) since `version`, until the API server ends it."""
        told = {**query, "watch": "true", "resourceVersion": version}
        unlimited = ClientTimeout(total=None)
        async with self._session.get(path, params=told, timeout=unlimited) as response:
            response.raise_for_status()
            async for line in response.content:
                event = json.loads(line)
                yield event["type"], event["object"]


@asynccontextmanager
async def administrator(place: Place) -> AsyncIterator[Api]:
    """Of the cluster that `place` keeps; to be asked from inside its network."""
    signed = place.certificates
    trusted = ssl.create_default_context(cafile=signed / f"{certificates.AUTHORITY}.crt")
    trusted.load_cert_chain(signed / "admin.crt", signed / "admin.key")
    async with ClientSession(
        f"https://{NODE_ADDRESS}:6443",
        connector=TCPConnector(ssl=trusted),
        read_bufsize=_LINE_BYTES_MAX,
    ) as session:
        yield Api(session)
