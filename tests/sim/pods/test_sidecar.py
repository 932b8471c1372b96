"""The sidecar of decode pods, before simulated engines and over real HTTP."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web

from sim.pods.server import listen, listening
from sim.pods.sidecar import Sidecar
from tests.sim.pods.role_pods import MODEL, running_roles

PROMPT = "a" * 640
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
TOKENS = 160
LARGE = 123456789012345678901234567890
"""No float has this value."""


def usage(answer):
    told = answer["usage"]
    cached = (told["prompt_tokens_details"] or {})["cached_tokens"]
    return told["prompt_tokens"], told["completion_tokens"], cached


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def test_prefill_runs_first_and_decode_fetches_its_blocks():
    async with running_roles("prefill", "decode") as pods:
        whole = await pods.post("decode-0", {**BODY, "prompt": "b" * 640})
        pods.seen.clear()
        address = pods["prefill-0"].address
        status, answer = await pods.post("decode-0", BODY, x_prefiller_host_port=address)
        assert status == whole[0] == 200
        assert usage(answer) == (TOKENS, 8, 0)
        assert pods.ports() == ["decode-0 sidecar", "prefill-0 engine", "decode-0 engine"]
        decode, prefill = pods["decode-0"], pods["prefill-0"]
        fetched = await decode.metric(
            "prompt_tokens_by_source_total", source="external_kv_transfer"
        )
        assert fetched == TOKENS
        assert await decode.metric("nixl_bytes_transferred_count") == 1
        assert not prefill.pod.engines.ranks[0].legs.held
        prefill.pod.engines.check()
        decode.pod.engines.check()


async def test_the_answer_is_that_of_one_pod():
    async with running_roles("prefill", "decode", "prefill-decode") as pods:
        address = pods["prefill-0"].address
        _, apart = await pods.post("decode-0", BODY, x_prefiller_host_port=address)
        _, alone = await pods.post("prefill-decode-0", BODY)
        assert apart["choices"] == alone["choices"]


async def test_both_legs_have_the_bodies_of_the_connector():
    async with running_roles("prefill", "decode") as pods:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        raw = json.dumps({**BODY, **stream, "seed": LARGE})
        url = f"http://{pods['decode-0'].address}/v1/completions?a=b"
        headers = {
            "content-type": "application/json",
            "x-prefiller-host-port": pods["prefill-0"].address,
            "x-request-id": "of-the-client",
        }
        async with pods.client.post(url, data=raw, headers=headers) as response:
            assert response.status == 200
            text = await response.text()
        _, prefill, decode = pods.generations()
        assert prefill.json["kv_transfer_params"] == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert prefill.json["stream"] is False
        assert "stream_options" not in prefill.json
        limits = ("max_tokens", "max_completion_tokens", "min_tokens")
        assert [prefill.json[name] for name in limits] == [1, 1, 1]
        assert prefill.json["seed"] == decode.json["seed"] == LARGE
        params = decode.json.pop("kv_transfer_params")
        assert params["do_remote_prefill"] is True
        assert params["remote_num_tokens"] == TOKENS
        assert params["remote_block_ids"] == [list(range(1, 11))]
        assert (decode.json["max_tokens"], decode.json["stream"]) == (8, True)
        assert "max_completion_tokens" not in decode.json
        assert text.endswith("data: [DONE]\n\n")
        assert '"cached_tokens":0' in text
        for leg in (prefill, decode):
            mine, sidecars = leg.headers["x-request-id"].split(",")
            assert mine == "of-the-client"
            assert len(sidecars) == 32
            assert "x-prefiller-host-port" not in leg.headers


async def test_kv_transfer_params_pass_as_they_came():
    """With members that nobody here knows, and numbers that no float holds."""
    params = '{"remote_num_tokens":98765432109876543210,"of a new version":{"x":[1.50,null]}}'
    seen = []

    async def prefill(request):
        answer = f'{{"usage":null,"kv_transfer_params":{params}}}'
        return web.Response(text=answer, content_type="application/json")

    async def engine(request):
        seen.append(await request.text())
        return web.json_response({})

    async with served(prefill) as there, served(engine) as here, sidecar_of(here) as (at, client):
        url, headers = f"http://{at}/v1/completions", {"x-prefiller-host-port": there}
        response = await client.post(url, data='{"prompt":"p"}', headers=headers)
        assert response.status == 200
    assert seen == [f'{{"prompt":"p","kv_transfer_params":{params}}}']


async def test_a_prefill_without_params_leaves_the_prompt_to_decode():
    async with running_roles("prefill", "decode", without_connector=("prefill-0",)) as pods:
        address = pods["prefill-0"].address
        status, answer = await pods.post("decode-0", BODY, x_prefiller_host_port=address)
        assert (status, usage(answer)) == (200, (TOKENS, 8, 0))
        _, _, decode = pods.generations()
        assert decode.json["kv_transfer_params"] is None
        page = pods["decode-0"]
        computed = await page.metric("prompt_tokens_by_source_total", source="local_compute")
        assert computed == TOKENS


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_the_failure_of_prefill_is_the_answer(status):
    async with running_roles("prefill", "decode") as pods:
        pods["prefill-0"].status = status
        address = pods["prefill-0"].address
        answered = await pods.post("decode-0", BODY, x_prefiller_host_port=address)
        assert answered == (status, {"error": "told to fail"})
        assert "decode-0 engine" not in pods.ports()


async def test_a_prefill_pod_that_is_gone_is_an_error_that_names_it():
    async with running_roles("prefill", "decode") as pods:
        gone = pods["prefill-0"]
        await gone.stop()
        status, answer = await pods.post("decode-0", BODY, x_prefiller_host_port=gone.address)
        assert status == 502
        assert gone.address in answer["error"]["message"]


async def test_blocks_that_are_lost_between_the_legs_fail_the_request():
    """The prefill engine restarted, so another process answers on its side channel."""
    async with running_roles("prefill", "prefill", "decode") as pods:
        url = pods["prefill-1"].address
        other = {
            "do_remote_prefill": True,
            "remote_engine_id": "of the process before",
            "remote_request_id": "r",
            "remote_host": "127.0.0.1",
            "remote_port": pods["prefill-1"].port,
        }
        status, answer = await pods.post("decode-0", {**BODY, "kv_transfer_params": other})
        assert status == 500
        assert f"{url} does not hold KV blocks" in answer["error"]["message"]
        decode = pods["decode-0"]
        assert await decode.metric("nixl_num_failed_transfers_total") == 1
        assert await decode.metric("request_success_total", finished_reason="error") == 1
        streamed = await pods.post(
            "decode-0", {**BODY, "stream": True, "kv_transfer_params": other}
        )
        assert "does not hold KV blocks" in streamed[1]
        decode.pod.engines.check()


async def test_a_lease_ends_if_nobody_reads():
    async with running_roles("prefill", speed=2000.0) as pods:
        asked = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        status, answer = await pods.post("prefill-0", asked)
        assert status == 200
        assert answer["kv_transfer_params"]["remote_num_tokens"] == TOKENS
        prefill = pods["prefill-0"]
        legs = prefill.pod.engines.ranks[0].legs
        assert len(legs.held) == 1
        await until(lambda: not legs.held)
        assert await prefill.metric("nixl_num_kv_expired_reqs_total") == 1


async def test_a_full_decode_engine_renews_the_lease_until_it_has_room():
    """The request before it decodes for twice as long as the lease."""
    async with running_roles("prefill", "decode", speed=1.0, blocks=60, lease_s=2.0) as pods:
        decode, prefill = pods["decode-0"], pods["prefill-0"]
        first = asyncio.create_task(pods.post("decode-0", {**BODY, "max_tokens": 700}))
        await until(lambda: decode.pod.engines.running)
        second = {**BODY, "prompt": "c" * 3200}
        status, _ = await pods.post("decode-0", second, x_prefiller_host_port=prefill.address)
        assert status == 200
        assert (await first)[0] == 200
        assert await prefill.metric("nixl_num_kv_expired_reqs_total") == 0
        assert await decode.metric("nixl_bytes_transferred_count") == 1


async def test_a_client_that_leaves_ends_its_legs():
    async with running_roles("prefill", "decode", speed=1.0) as pods:
        address = pods["prefill-0"].address
        asked = {**BODY, "prompt": "d" * 60_000}
        task = asyncio.create_task(pods.post("decode-0", asked, x_prefiller_host_port=address))
        prefill = pods["prefill-0"]
        await until(lambda: prefill.pod.engines.running)
        task.cancel()
        await until(lambda: not prefill.pod.engines.running)
        assert "decode-0 engine" not in pods.ports()


async def test_media_are_encoded_each_once():
    async with running_roles("encode", "encode", "prefill", "decode") as pods:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in ("u", "v", "u")]
        content = [{"type": "text", "text": "what is it?"}, *images]
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
        }
        encoders = f"{pods['encode-0'].address},{pods['encode-1'].address}"
        status, _ = await pods.post(
            "decode-0",
            asked,
            path="/v1/chat/completions",
            x_encoder_hosts_ports=encoders,
            x_prefiller_host_port=pods["prefill-0"].address,
        )
        assert status == 200
        ports = pods.ports()
        assert ports[0] == "decode-0 sidecar"
        assert sorted(ports[1:3]) == ["encode-0 engine", "encode-1 engine"]
        assert ports[3:] == ["prefill-0 engine", "decode-0 engine"]
        sent = sorted(
            (seen.headers["x-request-id"][-6:], seen.json["messages"][0]["content"])
            for seen in pods.generations()
            if seen.port.startswith("encode")
        )
        assert sent == [("-enc-0", [images[0]]), ("-enc-1", [images[1]])]


async def test_an_encode_pod_that_fails_is_an_error_that_names_it():
    async with running_roles("encode", "decode") as pods:
        pods["encode-0"].status = 503
        item = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
        asked = {"model": MODEL, "messages": [{"role": "user", "content": [item]}]}
        status, answer = await pods.post(
            "decode-0",
            asked,
            path="/v1/chat/completions",
            x_encoder_hosts_ports=pods["encode-0"].address,
        )
        assert status == 502
        assert f"{pods['encode-0'].address} answered item 0" in answer["error"]["message"]


async def test_other_paths_pass_and_ignore_the_headers():
    async with running_roles("prefill", "decode") as pods:
        decode = pods["decode-0"]
        for path in ("/metrics", "/v1/models", "/health"):
            url = f"http://{decode.address}{path}"
            headers = {"x-prefiller-host-port": pods["prefill-0"].address}
            async with pods.client.get(url, headers=headers) as response:
                assert response.status == 200
        status, _ = await pods.post(
            "decode-0",
            {"prompt": "x"},
            path="/tokenize",
            x_prefiller_host_port=pods["prefill-0"].address,
        )
        assert status == 200
        assert not any(seen.port.startswith("prefill") for seen in pods.seen)


async def test_a_request_goes_to_the_rank_that_it_names():
    """The gateway only reaches the port of the first rank; other addresses are none of the pod."""
    async with running_roles("decode", "decode") as pods:
        named = pods["decode-1"].address
        status, _ = await pods.post("decode-0", BODY, x_data_parallel_host_port=named)
        assert status == 200
        assert pods.ports() == ["decode-0 sidecar", "decode-1 engine"]
        assert "x-data-parallel-host-port" not in pods.generations()[1].headers
        status, answer = await pods.post("decode-0", BODY, x_data_parallel_host_port="10.9.9.9:1")
        assert status == 400
        assert "10.9.9.9:1, which is no rank" in answer["error"]["message"]


async def test_a_body_that_is_no_object_is_an_error():
    async with running_roles("prefill", "decode") as pods:
        address = pods["prefill-0"].address
        status, answer = await pods.post("decode-0", [1], x_prefiller_host_port=address)
        assert status == 400
        assert "not a JSON object" in answer["error"]["message"]


async def test_an_engine_that_is_down_is_503():
    async with sidecar_of("127.0.0.1:1") as (at, client):
        async with client.get(f"http://{at}/v1/models") as response:
            assert response.status == 503
            assert "engine cannot be reached" in (await response.json())["error"]["message"]
        async with client.get(f"http://{at}/health") as response:
            assert response.status == 200


@asynccontextmanager
async def served(handler):
    """Yield the address of a server that answers all POST requests with `handler`."""
    application = web.Application()
    application.router.add_post("/{path:.*}", handler)
    (own,) = listen("127.0.0.1", 0, 1)
    async with listening(application, own):
        yield f"127.0.0.1:{own.getsockname()[1]}"


@asynccontextmanager
async def sidecar_of(engine):
    """Yield the address of a sidecar for the engine at this address, and a client."""
    (own,) = listen("127.0.0.1", 0, 1)
    address = f"127.0.0.1:{own.getsockname()[1]}"
    async with (
        Sidecar.opened(f"http://{engine}") as sidecar,
        ClientSession() as client,
        listening(sidecar.application(), own),
    ):
        yield address, client
