"""A real vLLM that prefills and one that decodes give the tokens of one alone.

Behind Envoy, the picker and our sidecar; the engines transfer KV blocks with NIXL. `make real`
installs vLLM and runs this.
"""

import os
import random
import re
from contextlib import AsyncExitStack

import aiohttp
import pytest
import yaml

from epp.plugins.filters import ROLE_LABEL
from epp.shell.gateway.bootstrap import BootstrapOptions
from sim.pods.server import listen, listening
from sim.pods.sidecar import Sidecar
from tests.envoy.process import EppProcess
from tests.envoy.rig import running_envoy, until
from tests.envoy.test_replicas import metric
from tests.real.vllm import MODEL, Place, running_engine

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

BLOCKS = 400
PROMPTS = 8
CONFIG = {
    "apiVersion": "llm-d.ai/v1",
    "kind": "EndpointPickerConfig",
    "plugins": [
        {
            "type": "disagg-profile-handler",
            "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}},
        },
        {"type": "always-disagg-pd-decider"},
        {"type": "decode-filter"},
        {"type": "prefill-filter"},
        {"type": "active-request-scorer"},
    ],
    "schedulingProfiles": [
        {
            "name": role,
            "plugins": [{"pluginRef": f"{role}-filter"}, {"pluginRef": "active-request-scorer"}],
        }
        for role in ("decode", "prefill")
    ],
}


@pytest.fixture
async def engines(tmp_path):
    """A prefill engine, a decode engine, and the URL of Envoy before them."""
    place = Place.of(os.environ)
    if not (place.whole and place.transfers):
        pytest.skip(f"no vLLM with NIXL at {place.root}: `make real` installs it")
    async with AsyncExitStack() as opened:
        prefill, decode = [
            await opened.enter_async_context(
                running_engine(place, tmp_path, name=name, blocks=BLOCKS, transfers=True)
            )
            for name in ("prefill", "decode")
        ]
        sidecar = await opened.enter_async_context(Sidecar.opened(decode.url))
        (own,) = listen("127.0.0.1", 0, 1)
        await opened.enter_async_context(listening(sidecar.application(), own))
        ports = {"prefill": prefill.port, "decode": own.getsockname()[1]}
        endpoints = [
            {"name": role, "address": "127.0.0.1", "port": port, "labels": {ROLE_LABEL: role}}
            for role, port in ports.items()
        ]
        (tmp_path / "endpoints.yaml").write_text(yaml.safe_dump({"endpoints": endpoints}))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        picker = EppProcess(
            tmp_path / "epp.log",
            *("--endpoints-file", str(tmp_path / "endpoints.yaml")),
            *("--config-file", str(tmp_path / "config.yaml"), "--secure-serving=false"),
            *("--drain-grace=0s", "--drain-timeout=1s"),
        )
        await picker.start()
        try:

            async def both_ready():
                return await metric(picker, "homing_ready_endpoints") == 2

            await until(both_ready, "both engines to be ready")
            options = BootstrapOptions(picker_address=picker.address, plaintext=True)
            envoy = await opened.enter_async_context(running_envoy(options, tmp_path))
            yield prefill, decode, envoy.url
        finally:
            await picker.kill()
            print(f"--- end of the log of epp serve\n{picker.log_text()[-4000:]}")


async def tokens_of(client, url, prompt):
    """The ids of the answer's tokens, and the number of prompt tokens."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with client.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens"]


async def fetched_tokens(client, engine):
    async with client.get(f"{engine.url}/metrics") as response:
        page = await response.text()
    found = re.search(
        r'^vllm:prompt_tokens_by_source_total\{.*"external_kv_transfer"\} (\S+)$',
        page,
        re.MULTILINE,
    )
    assert found
    return float(found[1])


async def test_prefill_and_decode_apart_give_the_tokens_of_one_engine(engines):
    prefill, decode, gateway = engines
    dice = random.Random(7)
    prompts = [
        f"{number}: " + " ".join(dice.choices(("alpha", "beta", "gamma", "delta"), k=60))
        for number in range(PROMPTS)
    ]
    async with aiohttp.ClientSession() as client:
        apart = [await tokens_of(client, gateway, prompt) for prompt in prompts]
        alone = [await tokens_of(client, prefill.url, prompt) for prompt in prompts]
        assert apart == alone
        assert await fetched_tokens(client, decode) == sum(tokens for _, tokens in apart)
