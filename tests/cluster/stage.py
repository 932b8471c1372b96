"""Two pickers and four models behind a gateway, and what is done to them while clients ask."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from tests.cluster.release import MODELS, NAME, Namespace, load, name_of
from tests.cluster.rows import Row, Rows

PICKERS: Final = 2
FIRST_MODELS: Final = 4
STREAMS: Final = 8
STREAM_S: Final = 60.0
SETTLED_S: Final = 5.0
"""Seconds for which clients ask before something is done, and again after it."""
READY_S_MAX: Final = 60.0
RATE_PER_S: Final = 20.0


class Stage:
    """Pickers and models in the namespace `space`; rows name the gateway at `url` by `gateway`."""

    def __init__(self, space: Namespace, gateway: str, url: str) -> None:
        self.space = space
        self.gateway = gateway
        self.url = url

    def are_back(self) -> bool:
        """Return whether there are as many pickers as there were, all ready."""
        return len(self.space.ready_pickers()) == PICKERS

    async def counted(
        self, rows: Rows, what: str, action: Callable[[], None], *, streams: int = 0
    ) -> tuple[Row, dict[str, Any]]:
        """Return what is lost while `action` runs, and what clients told.

        `action` returns when what it does is over.
        """
        await self.space.until(self.are_back, READY_S_MAX, "two pickers")
        async with load(
            self.url, rate_per_s=RATE_PER_S, streams=streams, stream_s=STREAM_S
        ) as asked:
            await asyncio.sleep(SETTLED_S)
            await asyncio.to_thread(action)
            await asyncio.sleep(SETTLED_S)
        row = rows.add(Row.of(self.gateway, what, asked))
        assert row.sent > 100
        return row, asked.told

    async def models_rolled_out(self, rows: Rows) -> tuple[Row, dict[str, Any]]:
        return await self.counted(rows, "models rolled out", lambda: self._roll_out(MODELS))

    async def models_scaled(self, rows: Rows) -> tuple[Row, dict[str, Any]]:
        """Scale the models to 8, to 2 and back; the way back is not counted."""

        def action() -> None:
            for replicas in (8, 2):
                self._scale(replicas)

        counted = await self.counted(rows, "models scaled 4, 8, 2", action)
        self._scale(FIRST_MODELS)
        return counted

    async def picker_deleted(self, rows: Rows) -> tuple[Row, dict[str, Any]]:
        def action() -> None:
            (picker, *_) = self.space.pickers()
            self.space.kubectl("delete", "pod", name_of(picker), "--wait=false")

        return await self.counted(rows, "a picker deleted", action, streams=STREAMS)

    async def pickers_rolled_out(self, rows: Rows) -> tuple[Row, dict[str, Any]]:
        return await self.counted(
            rows, "pickers rolled out", lambda: self._roll_out(NAME), streams=STREAMS
        )

    async def picker_killed(self, rows: Rows) -> tuple[Row, dict[str, Any]]:
        """Kill the process of a picker alone, by SIGKILL: nobody is told."""

        def action() -> None:
            (picker, *_) = self.space.pickers()
            self.space.kill(picker)

        return await self.counted(rows, "a picker killed", action, streams=STREAMS)

    def _roll_out(self, name: str) -> None:
        self.space.kubectl("rollout", "restart", f"deployment/{name}")
        self.space.rolled_out(f"deployment/{name}")

    def _scale(self, replicas: int) -> None:
        self.space.kubectl("scale", f"deployment/{MODELS}", f"--replicas={replicas}")
        self.space.rolled_out(f"deployment/{MODELS}")
