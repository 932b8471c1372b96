"""KV transfers of a simulated pod, in real time: blocks that it holds, and blocks that it reads.

The exchange is that of vLLM's NIXL connector, which pulls. A prefill engine holds the blocks of a
finished prefill leg and describes them in `kv_transfer_params`. A decode engine reserves blocks for
the whole prompt, reads the blocks that its cache lacks, and lets the prefill engine release them.
Until then, the prefill engine holds them for the time of the lease, which the decode engine renews.

The side channel is HTTP at the address of the prefill engine, and no bytes of blocks are sent: a
read takes the time that a link needs for them. Reads do not share the bandwidth of a link.
"""

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import quote
from uuid import uuid4

import aiohttp
from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.legs import KVConnector
from sim.engine.links import Link
from sim.engine.request import EngineRequest

ROUTE: Final = "/kv_transfers/{engine_id}/{request_id}/{action}"
"""HTTP route of the side channel for KV transfers. The actions are `renew`, `read` and `release`."""
_ANSWER_S_MAX: Final = 5.0
"""Time in real seconds in which a prefill engine must answer on the side channel."""


class KVTransferParams(Struct, kw_only=True):
    """The members of `kv_transfer_params` that an engine reads; it ignores all others."""

    do_remote_decode: bool = False
    """True for the prefill leg of a disaggregated request: another engine decodes."""
    do_remote_prefill: bool = False
    """True in the decode leg. The other members then describe the blocks of the prefill leg."""
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None

    @property
    def complete(self) -> bool:
        """True if these parameters describe KV blocks of a prefill leg that can be read."""
        members = (self.remote_engine_id, self.remote_request_id, self.remote_host)
        return self.do_remote_prefill and None not in members and self.remote_port is not None


class TransferError(Exception):
    """KV blocks could not be read. The message is one sentence."""


class Leg(Protocol):
    """A decode leg, as `BlockReader` uses it: a request whose KV blocks are read from a prefill
    engine.
    """

    request: EngineRequest
    source: KVTransferParams | None


class LegOwner(Protocol):
    """The interface of the pod that the KV transfers of its legs use."""

    def release(self, request: EngineRequest) -> None:
        """Release the held blocks of a prefill leg."""
        ...

    def lease_expired(self, request: EngineRequest) -> None:
        """Release the held blocks of a prefill leg that no decode engine has read."""
        ...

    def received(self, leg: Leg, size_bytes: float, transfer_s: Seconds) -> None:
        """Let a decode leg continue, because its blocks have arrived."""
        ...

    def unread(self, leg: Leg, reason: str) -> None:
        """Fail a decode leg, because its blocks do not arrive."""
        ...


class HeldBlocks:
    """The blocks of finished prefill legs that a pod holds for decode engines.

    The number of legs is bounded by the KV cache, in which each has at least one block.
    """

    def __init__(self, owner: LegOwner, connector: KVConnector, speed: float) -> None:
        """Create a set without held KV blocks. Leases end in simulated time, `speed` times as fast
        as real time.
        """
        self.engine_id: Final = uuid4().hex
        """Identity of the pod's engine in `kv_transfer_params`; a restarted engine has another one."""
        self._owner = owner
        self._connector = connector
        self._speed = speed
        self._held: dict[str, tuple[EngineRequest, asyncio.TimerHandle]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def hold(self, request: EngineRequest) -> None:
        """Hold the KV blocks of a prefill leg that has finished, until a decode engine releases
        them or their lease ends.
        """
        self._lease(request, self._connector.lease_s)

    def answer(self, engine_id: str, request_id: str, action: str) -> bool:
        """Do what a decode engine requests on the side channel. Return False if this engine does
        not hold the blocks, or does not know the action.
        """
        if engine_id != self.engine_id or request_id not in self._held:
            return False
        request, timer = self._held[request_id]
        if action == "release":
            timer.cancel()
            del self._held[request_id]
            self._owner.release(request)
            return True
        leases_s = {"renew": self._connector.renewal_s, "read": self._connector.lease_s}
        if action not in leases_s:
            return False
        timer.cancel()
        self._lease(request, leases_s[action], until_s=timer.when())
        return True

    def close(self) -> None:
        """Forget all held KV blocks, and cancel the timers that would end their leases."""
        for _, timer in self._held.values():
            timer.cancel()
        self._held.clear()

    def _lease(self, request: EngineRequest, lease_s: Seconds, until_s: Seconds = 0.0) -> None:
        """Let the lease of a prefill leg's blocks end in `lease_s` simulated seconds, or at
        `until_s` of the event loop's clock if that is later.
        """
        loop = asyncio.get_running_loop()
        ends_at = max(until_s, loop.time() + lease_s / self._speed)
        timer = loop.call_at(ends_at, self._expire, request)
        self._held[request.request_id] = (request, timer)

    def _expire(self, request: EngineRequest) -> None:
        del self._held[request.request_id]
        self._owner.lease_expired(request)


class _Read:
    """One decode leg whose blocks are read, or will be when its engine has reserved room."""

    __slots__ = ("leg", "reserved", "task")

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self.reserved = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


_Sizes: TypeAlias = Callable[[int], float]


class BlockReader:
    """The decode legs of a pod whose blocks have not arrived."""

    def __init__(
        self,
        owner: LegOwner,
        connector: KVConnector,
        link: Link,
        *,
        size_bytes: _Sizes,
        speed: float,
    ) -> None:
        """Create a reader without legs. `size_bytes` returns the size in bytes of the KV blocks of
        a number of tokens.
        """
        self._owner = owner
        self._connector = connector
        self._link = link
        self._size_bytes = size_bytes
        self._speed = speed
        self._reads: dict[str, _Read] = {}
        self._begun: asyncio.Queue[_Read] = asyncio.Queue()
        """Decode legs for which the task of `run` has not started a reading task. Each has a
        request of a client.
        """

    async def run(self) -> None:
        """Read the KV blocks of all decode legs, each in a task of its own, until this task is
        cancelled.
        """
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S_MAX)
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                read = await self._begun.get()
                if self._reads.get(read.leg.request.request_id) is read:
                    read.task = tasks.create_task(self._read(client, read))

    def begin(self, leg: Leg) -> None:
        """Let `run` read the KV blocks of a decode leg when its engine has reserved room for them."""
        read = _Read(leg)
        self._reads[leg.request.request_id] = read
        self._begun.put_nowait(read)

    def reserved(self, request: EngineRequest) -> None:
        """Report that the engine has reserved the blocks of a decode leg."""
        self._reads[request.request_id].reserved.set()

    def abandon(self, request_id: str) -> None:
        """Forget a decode leg that has left the engine, unless its blocks are reserved: its
        transfer then goes on to its end.
        """
        read = self._reads.get(request_id)
        if read is not None and not read.reserved.is_set():
            del self._reads[request_id]
            if read.task is not None:
                read.task.cancel()

    async def _read(self, client: aiohttp.ClientSession, read: _Read) -> None:
        leg = read.leg
        await self._wait_for_room(client, read)
        try:
            await self._ask(client, leg, "read")
            size_bytes = self._size_bytes(leg.request.fetched_tokens)
            transfer_s = self._link.transfer_s(size_bytes)
            await asyncio.sleep(transfer_s / self._speed)
            await self._ask(client, leg, "release")
        except TransferError as problem:
            self._owner.unread(leg, str(problem))
        else:
            self._owner.received(leg, size_bytes, transfer_s)
        finally:
            self._reads.pop(leg.request.request_id, None)

    async def _wait_for_room(self, client: aiohttp.ClientSession, read: _Read) -> None:
        """Wait until the decode engine has reserved KV blocks for the leg. Meanwhile, renew the
        lease of the blocks in the prefill engine.
        """
        while not read.reserved.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._connector.heartbeat_s / self._speed):
                    await read.reserved.wait()
                    return
            # A lost renewal shows when the blocks are read.
            with contextlib.suppress(TransferError):
                await self._ask(client, read.leg, "renew")

    async def _ask(self, client: aiohttp.ClientSession, leg: Leg, action: str) -> None:
        """Send `action` to the prefill engine. Raises `TransferError` if the engine cannot be
        reached or refuses the action.
        """
        source = leg.source
        assert source is not None, "the leg fetches its blocks"
        host = f"[{source.remote_host}]" if ":" in str(source.remote_host) else source.remote_host
        address = f"{host}:{source.remote_port}"
        path = ROUTE.format(
            engine_id=quote(str(source.remote_engine_id), safe=""),
            request_id=quote(str(source.remote_request_id), safe=""),
            action=action,
        )
        try:
            async with client.post(f"http://{address}{path}") as response:
                status = response.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            raise TransferError(
                f"The KV blocks at {address} cannot be read: {str(problem) or type(problem).__name__}."
            ) from problem
        if status != HTTPStatus.OK:
            raise TransferError(
                f"The engine at {address} does not hold KV blocks of request "
                f"{source.remote_request_id} (status {status})."
            )


def described(
    request: EngineRequest,
    held: HeldBlocks,
    *,
    address: tuple[str, int],
    block_size_tokens: int,
    expires_at_s: Seconds,
) -> dict[str, Any]:
    """Return `kv_transfer_params` of the answer to a prefill leg, with the members of vLLM 0.32.

    `address` is the host and port of the side channel, `expires_at_s` the Unix time at which the
    lease ends. The block ids count from 1 in each answer, because the simulated cache has no ids.
    """
    host, port = address
    blocks = -(-request.prompt_tokens // block_size_tokens)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": held.engine_id,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_request_id": request.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "transfer_mode": "pull",
        "remote_num_tokens": request.prompt_tokens,
        "remote_blocks_expiry_time": expires_at_s,
    }
