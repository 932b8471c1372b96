"""Roles of simulated pods on the command line, and the processes that serve them."""

import argparse
import asyncio
import json
import re
import signal

import pytest
from aiohttp import ClientSession

from sim.engine.links import DEFAULT_LINK, LINKS
from sim.pods.command import add_parser
from sim.pods.roles import decodes, names_of, roles_named, transfers
from tests.sim.pods.test_pods import sim_serve


def test_roles_are_counted_in_their_order():
    roles = roles_named("prefill=2,encode=1,decode=1", pods_max=4)
    assert roles == ("prefill", "prefill", "encode", "decode")
    assert names_of(roles) == ["prefill-0", "prefill-1", "encode-0", "decode-0"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil=1", "'prefil=1' names no role; expected one of both, decode"),
        ("", "'' names no role"),
        ("decode=1,decode=2", "the role decode is given twice"),
        ("decode", "'decode' has no number of pods above 0; expected decode=COUNT"),
        ("decode=0", "'decode=0' has no number of pods"),
        ("decode=-1", "'decode=-1' has no number of pods"),
        ("decode=3,prefill=2", "is 5 pods; expected at most 4"),
        ("decode=9999999999999999999", "'decode=9999999999999999999' is more than 4 pods"),
        ("decode=" + "9" * 5_000, "pods; expected at most 4"),
        ("decode=0000000000", "has no number of pods above 0"),
    ],
)
def test_a_wrong_text_is_an_error(text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        roles_named(text, pods_max=4)


def test_a_count_may_begin_with_zeros():
    assert roles_named("decode=" + "0" * 5_000 + "2", pods_max=4) == ("decode", "decode")


@pytest.mark.parametrize(
    ("role", "with_sidecar", "with_connector"),
    [
        ("decode", True, True),
        ("prefill", False, True),
        ("prefill-decode", True, True),
        ("encode", False, False),
        ("encode-prefill", False, True),
        ("encode-prefill-decode", True, True),
    ],
)
def test_the_parts_of_a_pod_follow_from_its_role(role, with_sidecar, with_connector):
    assert (decodes(role), transfers(role)) == (with_sidecar, with_connector)


async def test_the_command_serves_roles_and_stops_during_a_prefill(tmp_path):
    """The announcement and the endpoints file have the labels."""
    file = tmp_path / "endpoints.yaml"
    arguments = ["--roles", "prefill=1,decode=1", "--port", "0", "--json"]
    async with (
        sim_serve(*arguments, "--endpoints-out", str(file)) as process,
        ClientSession() as client,
    ):
        told = json.loads(await process.stdout.readline())
        prefill, decode = told["pods"]
        assert (prefill["name"], decode["name"]) == ("prefill-0", "decode-0")
        labels = [pod["labels"] for pod in json.loads(file.read_text())["endpoints"]]
        assert labels == [{"llm-d.ai/role": "prefill"}, {"llm-d.ai/role": "decode"}]
        long = {"model": told["model"], "prompt": "x" * 400_000, "max_tokens": 9000}
        headers = {"x-prefiller-host-port": f"{prefill['address']}:{prefill['port']}"}
        url = decode["url"] + "/v1/completions"
        asked = asyncio.create_task(client.post(url, json=long, headers=headers))

        async def prefilling() -> bool:
            async with client.get(prefill["url"] + "/metrics") as response:
                page = await response.text()
                return bool(
                    re.search(r"^vllm:num_requests_running\{.*\} 1\.0$", page, re.MULTILINE)
                )

        while not await prefilling():
            pass
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        await asyncio.gather(asked, return_exceptions=True)
        assert "Traceback" not in (await process.stderr.read()).decode()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--roles", "decode=x"], "'decode=x' has no number of pods"),
        (["--roles", "decode=1", "--pods", "2"], "not allowed with"),
        (["--roles", "decode=1", "--kv-bandwidth", "0"], "is not a number above 0"),
        (["--roles", "decode=1", "--kv-link", "fast"], "expected one of nvlink"),
        (["--roles", "decode=1", "--engine", "speculative:acceptance=0.5"], "--roles does not"),
    ],
)
async def test_a_wrong_command_line_exits_2(arguments, says):
    async with sim_serve(*arguments) as process:
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert says in stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "bytes_per_s", "setup_s"),
    [
        ([], LINKS[DEFAULT_LINK].bytes_per_s, LINKS[DEFAULT_LINK].setup_s),
        (["--kv-link", "nvlink"], 600e9, LINKS["nvlink"].setup_s),
        (["--kv-link", "12:0.004"], 12e9, 0.004),
        (["--kv-bandwidth", "40"], 40e9, LINKS["ib-ndr400"].setup_s),
    ],
)
def test_the_network_is_named_as_for_replays(arguments, bytes_per_s, setup_s):
    """The earlier flag, a bandwidth alone, sets the same network."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    link = parser.parse_args(["serve", *arguments]).kv_link
    assert (link.bytes_per_s, link.setup_s) == (bytes_per_s, pytest.approx(setup_s))
