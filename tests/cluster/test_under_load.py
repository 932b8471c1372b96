"""Pods of pickers and of models come and go while clients ask: who is lost, and which stream is cut."""

import pytest

from tests.cluster.conftest import MINUTES
from tests.cluster.release import (
    BY_LABEL,
    ENVOY,
    GATEWAY,
    GATEWAY_PORT,
    NAME,
    namespace,
)
from tests.cluster.stage import FIRST_MODELS, PICKERS, STREAMS, Stage

pytestmark = getattr(pytest.mark, MINUTES)
SERVED = {"200", "whole"}
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


@pytest.fixture(scope="module")
def stage(request, node, tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    with namespace(node, "load") as space:
        space.run_models(FIRST_MODELS)
        if request.param == STANDALONE:
            space.install({**BY_LABEL, "replicas": PICKERS, "standalone": ENVOY}, folder)
            url = space.address(f"{NAME}-envoy", GATEWAY_PORT)
        else:
            space.install({**BY_LABEL, "replicas": PICKERS, "service": {"headless": True}}, folder)
            space.run_gateway(f"--picker-address={NAME}-headless:9002", *GATEWAYS[request.param])
            url = space.address(GATEWAY, GATEWAY_PORT)
        yield Stage(space, request.param, url)


@both
async def test_models_are_rolled_out(stage, rows):
    row, told = await stage.models_rolled_out(rows)
    assert row.lost == 0, told


@both
async def test_models_are_scaled(stage, rows):
    row, told = await stage.models_scaled(rows)
    assert row.lost == 0, told


@both
async def test_a_picker_is_deleted(stage, rows):
    row, told = await stage.picker_deleted(rows)
    assert (row.lost, row.cut, row.streams) == (0, 0, STREAMS), told


@both
async def test_pickers_are_rolled_out(stage, rows):
    row, told = await stage.pickers_rolled_out(rows)
    assert (row.lost, row.cut, row.streams) == (0, 0, STREAMS), told


@pytest.mark.parametrize("stage", [STANDALONE, FULL_DUPLEX, FAIL_OPEN], indirect=True)
async def test_a_picker_is_killed(stage, rows):
    """What it had open is lost unless the gateway fails open."""
    row, told = await stage.picker_killed(rows)
    assert row.streams == STREAMS
    if stage.gateway == FAIL_OPEN:
        assert (row.lost, row.cut) == (0, 0), told
    # Whoever asks afterwards is served.
    lost_s = [
        at for outcome, span in told["spans_s"].items() if outcome not in SERVED for at in span
    ]
    assert not lost_s or max(lost_s) - min(lost_s) < LOST_S_MAX, told
