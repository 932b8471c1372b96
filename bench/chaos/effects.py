"""Proofs that the faults of `bench.chaos.faults` happened, each observed at the broken part.

No proof asks the part whether it was told to misbehave. Requests of a proof are sent to the part
directly, not through picker and gateway, so that they are in no figure of the table.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct

from bench.chaos.pods import (
    CRAWL,
    FAILS_FAST_S,
    FAILS_SLOWLY_S,
    FULL_REQUESTS,
    SLOWNESS,
    Fault,
)
from bench.effect import (
    OBSERVED_S_MAX,
    Effect,
    metric,
    negated,
    require_effect,
    within,
)
from epp.core.types import Seconds
from sim.engine.profiles import DEFAULT_PROFILE, find_profile

ASKED_TIMES: Final = 3
"""Number of direct requests of which the fastest is compared, because single ones may wait for the
pod's other work.
"""
ANSWER_TOKENS: Final = 16
LONG_ANSWER_TOKENS: Final = 64
NO_ANSWER_S: Final = 2.0
"""Seconds after which a direct request to a part that should hang counts as unanswered; a healthy
pod needs a tenth of them.
"""
QUIET_S: Final = 2.0
"""Duration in seconds of the observation in which pickers that a partition separates must exchange
nothing. They send several times a second otherwise.
"""
MODEL: Final = find_profile(DEFAULT_PROFILE).model


class Answered(Struct, frozen=True):
    """The result of one request that was sent directly to a pod."""

    status: int
    """HTTP status of the response; 0 if no whole response came within the timeout of the request,
    or if the connection failed.
    """
    took_s: Seconds


class DirectClient:
    """A client that sends completions directly to the pod at `port`, each with a new prompt."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._prompts = 0

    async def ask(self, timeout_s: Seconds = OBSERVED_S_MAX) -> Answered:
        """Send one request to the pod and return its result; never raises for a failure
        of the pod.
        """
        began_at = time.monotonic()
        status = 0
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=timeout_s)) as session,
                session.post(self._url, json=self._body(ANSWER_TOKENS)) as response,
            ):
                await response.read()
                status = response.status
        except (ClientError, TimeoutError):
            status = 0
        return Answered(status, time.monotonic() - began_at)

    async def fastest_s(self) -> Seconds:
        """Return the shortest time in seconds of `ASKED_TIMES` requests to the pod, one after the
        other.
        """
        return min([(await self.ask()).took_s for _ in range(ASKED_TIMES)])

    async def running_while_asked(self) -> float:
        """Return the number of running requests on the pod's metrics page while the pod serves a
        request of this client.
        """
        body = self._body(LONG_ANSWER_TOKENS) | {"stream": True}
        async with (
            ClientSession(timeout=ClientTimeout(total=OBSERVED_S_MAX)) as session,
            session.post(self._url, json=body) as response,
        ):
            # The first chunk comes when the request runs; the others take half a second.
            await response.content.readline()
            return await metric(f"http://{self.address}", "vllm:num_requests_running")

    @property
    def _url(self) -> str:
        return f"http://{self.address}/v1/completions"

    def _body(self, answer_tokens: int) -> dict[str, object]:
        self._prompts += 1
        return {
            "model": MODEL,
            "prompt": f"direct request {self._prompts} to {self.address}",
            "max_tokens": answer_tokens,
            "ignore_eos": True,
        }


class FailingPod:
    """Proof that the pod answers a direct request with `status`, no sooner than after `after_s`."""

    def __init__(self, port: int, after_s: Seconds, status: int = 500) -> None:
        self._client = DirectClient(port)
        self._after_s = after_s
        self._status = status

    async def before(self) -> None:
        """Raise `AssertionError` unless the pod, which is still healthy, serves a direct request."""
        await _require_serving(self._client)

    async def during(self) -> None:
        """Raise `NoEffectError` unless the pod fails a direct request as expected."""
        answered = await self._client.ask()
        require_effect(
            answered.status == self._status and answered.took_s >= self._after_s,
            f"failing pod {self._client.address}",
            observed=f"status {answered.status} after {answered.took_s:.3f} s",
            expected=f"status {self._status} after {self._after_s:g} s",
        )


class HangingPod:
    """Proof that the pod accepts a direct request and does not answer it."""

    def __init__(self, port: int) -> None:
        self._client = DirectClient(port)

    async def before(self) -> None:
        """Raise `AssertionError` unless the pod, which is still healthy, serves a direct request."""
        await _require_serving(self._client)

    async def during(self) -> None:
        """Raise `NoEffectError` unless a direct request to the pod stays open for `NO_ANSWER_S`
        without an answer.
        """
        answered = await self._client.ask(timeout_s=NO_ANSWER_S)
        require_effect(
            answered.status == 0 and answered.took_s >= NO_ANSWER_S,
            f"hanging pod {self._client.address}",
            observed=f"status {answered.status} after {answered.took_s:.3f} s",
            expected=f"no answer within {NO_ANSWER_S:g} s",
        )


class SlowPod:
    """Proof that a direct request takes at least half of `factor` times as long as before the
    fault.
    """

    def __init__(self, port: int, factor: float) -> None:
        self._client = DirectClient(port)
        self._factor = factor
        self._before_s: Seconds = 0.0

    async def before(self) -> None:
        """Measure the time of a direct request to the healthy pod."""
        self._before_s = await self._client.fastest_s()

    async def during(self) -> None:
        """Raise `NoEffectError` unless the pod became slower."""
        took_s = await self._client.fastest_s()
        require_effect(
            took_s >= self._factor / 2 * self._before_s,
            f"slow pod {self._client.address}",
            observed=f"{took_s:.3f} s for a direct request, {self._before_s:.3f} s before",
            expected=f"at least {self._factor / 2:g} times as long as before",
        )


class LyingPod:
    """Proof that the pod is slow, and that its page reports no running request while one runs."""

    def __init__(self, port: int, factor: float) -> None:
        self._client = DirectClient(port)
        self._slow = SlowPod(port, factor)

    async def before(self) -> None:
        """Raise `AssertionError` unless the page of the healthy pod reports the running request."""
        await self._slow.before()
        running = await self._client.running_while_asked()
        assert running >= 1, f"the healthy page reports {running:g} running requests"

    async def during(self) -> None:
        """Raise `NoEffectError` unless the pod became slow and its page does not report the running
        request.
        """
        await self._slow.during()
        running = await self._client.running_while_asked()
        require_effect(
            running == 0,
            f"lying page of pod {self._client.address}",
            observed=f"{running:g} running requests on the page while one runs",
            expected="0 running requests on the page",
        )


class FullPod:
    """Proof that the pod refuses some of `requests` direct requests that are sent at once, with
    `status`.
    """

    def __init__(self, port: int, requests: int, status: int) -> None:
        self._client = DirectClient(port)
        self._requests = requests
        self._status = status

    async def before(self) -> None:
        """Raise `AssertionError` if the healthy pod refuses one of the direct requests."""
        assert await self._refused() == 0, "the healthy pod refuses direct requests"

    async def during(self) -> None:
        """Raise `NoEffectError` unless the pod refuses at least one of the direct requests."""
        require_effect(
            await self._refused() > 0,
            f"full pod {self._client.address}",
            observed=f"none of {self._requests} requests at once answered with {self._status}",
            expected=f"at least one answered with {self._status}",
        )

    async def _refused(self) -> int:
        answers = await asyncio.gather(*(self._client.ask() for _ in range(self._requests)))
        return sum(one.status == self._status for one in answers)


class LeavingPicker:
    """Proof that the picker whose pages are at the URL `pages` is not ready any more, or
    has ended.
    """

    def __init__(self, pages: str, s_max: Seconds = OBSERVED_S_MAX) -> None:
        self._pages = pages
        self._s_max = s_max

    async def before(self) -> None:
        """Raise `AssertionError` unless the healthy picker is ready."""
        assert await self._ready(), f"the healthy picker at {self._pages} is not ready"

    async def during(self) -> None:
        """Raise `NoEffectError` if the picker is still ready after `s_max`."""
        require_effect(
            await within(self._s_max, lambda: negated(self._ready())),
            f"SIGTERM to the picker at {self._pages}",
            observed="it reports that it is ready",
            expected="it reports that it is not ready, or has ended",
        )

    async def _ready(self) -> bool:
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=NO_ANSWER_S)) as session,
                session.get(f"{self._pages}/readyz") as response,
            ):
                return response.status == 200
        except (ClientError, TimeoutError):
            return False


class PartedPickers:
    """Proof that no picker receives bytes from another one for `quiet_s`, although each did before
    the fault.
    """

    _RECEIVED: Final = {"direction": "received"}

    def __init__(self, pages: Sequence[str], quiet_s: Seconds = QUIET_S) -> None:
        self._pages = pages
        self._quiet_s = quiet_s

    async def before(self) -> None:
        """Raise `AssertionError` unless each healthy picker receives bytes from others."""
        first = await self._received()

        async def all_received() -> bool:
            return all(now > then for now, then in zip(await self._received(), first, strict=True))

        assert await within(OBSERVED_S_MAX, all_received), "the healthy pickers send nothing"

    async def during(self) -> None:
        """Raise `NoEffectError` if a picker receives bytes after those on their way have
        arrived.
        """
        await asyncio.sleep(self._quiet_s / 4)
        first = await self._received()
        await asyncio.sleep(self._quiet_s)
        last = await self._received()
        require_effect(
            first == last,
            "partition between the pickers",
            observed=f"{sum(last) - sum(first):g} bytes received in {self._quiet_s:g} s",
            expected="0 bytes received",
        )

    async def _received(self) -> list[float]:
        name = "homing_peer_bytes_total"
        return [await metric(pages, name, self._RECEIVED) for pages in self._pages]


class RisingCounter:
    """Proof that the counter `name` rises at each picker during the fault."""

    def __init__(
        self, what: str, pages: Sequence[str], name: str, s_max: Seconds = OBSERVED_S_MAX
    ) -> None:
        self._what = what
        self._pages = pages
        self._name = name
        self._s_max = s_max
        self._before: list[float] = []

    async def before(self) -> None:
        """Read and store the value of the counter on each picker's metrics page before the fault."""
        self._before = await self._counted()

    async def during(self) -> None:
        """Raise `NoEffectError` unless the counter of each picker rises, at the latest after
        `s_max`.
        """

        async def rose() -> bool:
            counted = await self._counted()
            return all(now > then for now, then in zip(counted, self._before, strict=True))

        require_effect(
            await within(self._s_max, rose),
            self._what,
            observed=f"{self._name} stays at {self._before}",
            expected=f"{self._name} rises at each picker",
        )

    async def _counted(self) -> list[float]:
        return [await metric(pages, self._name) for pages in self._pages]


class SilentServer:
    """Proof that a server accepts a POST to `url` and does not answer it within `s_max`."""

    def __init__(self, url: str, s_max: Seconds = NO_ANSWER_S) -> None:
        self._url = url
        self._s_max = s_max

    async def before(self) -> None:
        """Raise `AssertionError` unless the healthy server answers."""
        assert await self._answers(), f"the healthy server at {self._url} does not answer"

    async def during(self) -> None:
        """Raise `NoEffectError` if the server answers within `s_max`."""
        require_effect(
            not await self._answers(),
            f"silent server at {self._url}",
            observed=f"an answer within {self._s_max:g} s",
            expected=f"no answer within {self._s_max:g} s",
        )

    async def _answers(self) -> bool:
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=self._s_max)) as session,
                session.post(self._url, data=b"") as response,
            ):
                await response.read()
                return True
        except TimeoutError:
            return False


OF_POD: Final[Mapping[Fault, Callable[[int], Effect]]] = {
    Fault.FAILS_FAST: lambda port: FailingPod(port, FAILS_FAST_S),
    Fault.FAILS_SLOWLY: lambda port: FailingPod(port, FAILS_SLOWLY_S),
    Fault.HANGS: HangingPod,
    Fault.SLOW: lambda port: SlowPod(port, SLOWNESS),
    Fault.LIES: lambda port: LyingPod(port, SLOWNESS),
    Fault.CRAWLS: lambda port: SlowPod(port, CRAWL),
    Fault.REFUSES: lambda port: FailingPod(port, 0.0, status=429),
    Fault.FULL: lambda port: FullPod(port, 4 * FULL_REQUESTS, 503),
}
"""Function that returns the proof of each fault of a pod, given the pod's port."""


async def _require_serving(client: DirectClient) -> None:
    answered = await client.ask(timeout_s=NO_ANSWER_S)
    assert answered.status == 200, f"the healthy pod answers {answered.status}"
