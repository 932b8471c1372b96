"""Client of the API server for an administrator: JSON over HTTPS, inside the cluster."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from tests.cluster import certificates
from tests.cluster.place import NODE_ADDRESS, Place

_LINE_BYTES_MAX: Final = 1 << 22
"""Largest size of one event of a watch, in bytes."""


class Api:
    """Client of the API server, which is asked by path."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def get(self, path: str, **query: str) -> Any:
        async with self._session.get(path, params=query) as response:
            response.raise_for_status()
            return await response.json()

    async def watch(self, path: str, version: str, **query: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield (ADDED, MODIFIED or DELETED, object) for each event since `version`.

        The API server ends the watch.
        """
        told = {**query, "watch": "true", "resourceVersion": version}
        unlimited = ClientTimeout(total=None)
        async with self._session.get(path, params=told, timeout=unlimited) as response:
            response.raise_for_status()
            async for line in response.content:
                event = json.loads(line)
                yield event["type"], event["object"]


@asynccontextmanager
async def administrator(place: Place) -> AsyncIterator[Api]:
    """Yield the administrator's client of the cluster that `place` keeps.

    It is to be used from inside the network of the cluster.
    """
    signed = place.certificates
    trusted = ssl.create_default_context(cafile=signed / f"{certificates.AUTHORITY}.crt")
    trusted.load_cert_chain(signed / "admin.crt", signed / "admin.key")
    async with ClientSession(
        f"https://{NODE_ADDRESS}:6443",
        connector=TCPConnector(ssl=trusted),
        read_bufsize=_LINE_BYTES_MAX,
    ) as session:
        yield Api(session)
