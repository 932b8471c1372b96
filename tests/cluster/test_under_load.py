"""Pods of pickers and of models come and go while clients ask: who is lost, and which stream is cut."""

import asyncio

import pytest

from tests.cluster.release import (
    BY_LABEL,
    ENVOY,
    GATEWAY,
    GATEWAY_PORT,
    MODELS,
    NAME,
    Namespace,
    load,
    name_of,
    namespace,
)
from tests.cluster.rows import Row

SERVED = {"200", "whole"}
STREAMS = 8
STREAM_S = 60.0
SETTLED_S = 5.0
"""Before something is done, and after it."""
READY_S_MAX = 60.0
LOST_S_MAX = 5.0
"""From the first loss to the last: its container takes longer to come back."""

STANDALONE = "Envoy beside each picker"
FULL_DUPLEX = "Envoy, responses through the picker"
FAIL_OPEN = "Envoy, bodies buffered, fails open"
GATEWAYS = {
    FULL_DUPLEX: ("--response-body-mode=FULL_DUPLEX_STREAMED",),
    FAIL_OPEN: ("--request-body-mode=BUFFERED", "--fail-open"),
}
"""Of one Envoy for both pickers: the flags of its bootstrap."""

both = pytest.mark.parametrize("stage", [STANDALONE, FULL_DUPLEX], indirect=True)


class Stage:
    """Two pickers and four models behind one kind of gateway."""

    def __init__(self, space: Namespace, gateway: str, url: str) -> None:
        self.space = space
        self.gateway = gateway
        self.url = url

    def are_back(self) -> bool:
        """As many pickers as there were, all ready."""
        return len(self.space.ready_pickers()) == 2


@pytest.fixture(scope="module")
def stage(request, node, tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    with namespace(node, "load") as space:
        space.run_models(4)
        if request.param == STANDALONE:
            space.install({**BY_LABEL, "replicas": 2, "standalone": ENVOY}, folder)
            url = space.address(f"{NAME}-envoy", GATEWAY_PORT)
        else:
            space.install({**BY_LABEL, "replicas": 2, "service": {"headless": True}}, folder)
            space.run_gateway(f"--picker-address={NAME}-headless:9002", *GATEWAYS[request.param])
            url = space.address(GATEWAY, GATEWAY_PORT)
        yield Stage(space, request.param, url)


async def done(stage, rows, what, action, *, streams=0):
    """Counts what is lost while `action` runs, which answers when it is over."""
    await stage.space.until(stage.are_back, READY_S_MAX, "two pickers")
    async with load(stage.url, streams=streams, stream_s=STREAM_S) as asked:
        await asyncio.sleep(SETTLED_S)
        await asyncio.to_thread(action)
        await asyncio.sleep(SETTLED_S)
    row = rows.add(Row.of(stage.gateway, what, asked))
    assert row.sent > 100
    return row, asked.told


@both
async def test_models_are_rolled_out(stage, rows):
    def action():
        stage.space.kubectl("rollout", "restart", f"deployment/{MODELS}")
        stage.space.rolled_out(f"deployment/{MODELS}")

    row, told = await done(stage, rows, "models rolled out", action)
    assert row.lost == 0, told


@both
async def test_models_are_scaled(stage, rows):
    def action():
        for replicas in (8, 2):
            stage.space.kubectl("scale", f"deployment/{MODELS}", f"--replicas={replicas}")
            stage.space.rolled_out(f"deployment/{MODELS}")

    row, told = await done(stage, rows, "models scaled 4, 8, 2", action)
    stage.space.kubectl("scale", f"deployment/{MODELS}", "--replicas=4")
    stage.space.rolled_out(f"deployment/{MODELS}")
    assert row.lost == 0, told


@both
async def test_a_picker_is_deleted(stage, rows):
    def action():
        (picker, *_) = stage.space.pickers()
        stage.space.kubectl("delete", "pod", name_of(picker), "--wait=false")

    row, told = await done(stage, rows, "a picker deleted", action, streams=STREAMS)
    assert (row.lost, row.cut, row.streams) == (0, 0, STREAMS), told


@both
async def test_pickers_are_rolled_out(stage, rows):
    def action():
        stage.space.kubectl("rollout", "restart", f"deployment/{NAME}")
        stage.space.rolled_out(f"deployment/{NAME}")

    row, told = await done(stage, rows, "pickers rolled out", action, streams=STREAMS)
    assert (row.lost, row.cut, row.streams) == (0, 0, STREAMS), told


@pytest.mark.parametrize("stage", [STANDALONE, FULL_DUPLEX, FAIL_OPEN], indirect=True)
async def test_a_picker_is_killed(stage, rows):
    """Its process alone, by SIGKILL: what it had open is lost unless the gateway fails open."""

    def action():
        (picker, *_) = stage.space.pickers()
        stage.space.kill(picker)

    row, told = await done(stage, rows, "a picker killed", action, streams=STREAMS)
    assert row.streams == STREAMS
    if stage.gateway == FAIL_OPEN:
        assert (row.lost, row.cut) == (0, 0), told
    # Whoever asks afterwards is served.
    lost_s = [
        at for outcome, span in told["spans_s"].items() if outcome not in SERVED for at in span
    ]
    assert not lost_s or max(lost_s) - min(lost_s) < LOST_S_MAX, told
