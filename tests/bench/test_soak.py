"""The soak: what it reads of the picker, its short form, and a change without an effect."""

import asyncio

import pytest

from bench.effect import NoEffectError, effects_alone
from bench.place import Place
from bench.soak import Soak, main, open_on
from tests.envoy.rig import ENVOY

PAGE = """\
# TYPE homing_inflight_requests gauge
homing_inflight_requests{endpoint_name="a",namespace="",port="1"} 2.0
homing_inflight_requests{endpoint_name="b",namespace="",port="2"} 1.0
# TYPE homing_extproc_streams_inflight gauge
homing_extproc_streams_inflight 4.0
"""


def test_what_is_open_is_counted_over_all_endpoints():
    """Requests in flight and streams."""
    assert sorted(open_on(PAGE).values()) == [3, 4]


def test_a_page_that_does_not_tell_is_no_proof_that_nothing_is_open():
    """A gauge that was renamed must not pass for 0."""
    with pytest.raises(KeyError, match="streams"):
        open_on(PAGE.replace("extproc_streams_inflight", "other"))


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
def test_half_a_minute_of_it_costs_no_request_of_the_picker(capsys):
    """Real pods, picker and Envoy: each change has its effect, and nothing is left open."""
    assert main(["--minutes", "0.5", "--rate-per-s", "40"]) == 0
    told = capsys.readouterr().out
    for change in ("pod killed", "page", "configuration", "endpoints"):
        assert f"{change} 0 times" not in told
        assert change in told


@pytest.mark.envoy
@pytest.mark.skipif(ENVOY is None, reason="the envoy command is not installed")
def test_a_change_that_is_replaced_by_nothing_fails_the_soak(capsys, monkeypatch):
    """A pod that goes on after it was killed ends the soak, without a figure."""

    async def nothing(self, port):
        pass

    monkeypatch.setattr("bench.place.Pods.kill", nothing)
    monkeypatch.setattr("bench.effect.ClosedPort.__init__", closed_soon)
    assert main(["--minutes", "0.5", "--rate-per-s", "5"]) == 1
    told = capsys.readouterr()
    assert "killed pod at port" in told.err
    assert "the fault did not take effect: observed a connection is accepted" in told.err
    assert told.out == ""


def closed_soon(self, what, port):
    self._what, self._port, self._s_max = what, port, 0.2


async def test_a_configuration_that_the_picker_does_not_read_is_no_change(tmp_path):
    """Its counter stays, so that the proof fails."""
    place = Place(
        folder=tmp_path,
        picker="",
        gateway="",
        pages="http://127.0.0.1:9",
        pods=None,
        picker_pid=0,
    )

    class Deaf(Soak):
        async def _reloads(self, good):
            return 1.0

    place.config_file.write_text("")
    with pytest.raises(NoEffectError, match="the picker counts no more reloads"):
        await Deaf(place, seed=1).reconfigure()


async def test_the_error_of_a_task_group_comes_without_the_group():
    async def fails():
        raise NoEffectError("nothing happened")

    with pytest.raises(NoEffectError, match="nothing happened"), effects_alone():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())
