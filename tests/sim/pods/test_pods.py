"""Simulated pods over real HTTP, and the command that starts them."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys

import pytest
from aiohttp import ClientSession
from prometheus_client import generate_latest

from epp.core.kv_events.payload import read_payload
from epp.core.kv_events.zmtp import SocketType, ZmtpConnection, ask_replay, read_replayed
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from tests.sim.running import MODEL, running_pod


def of_model(name, extra=""):
    return f'{name}{{engine="0",{extra}model_name="{MODEL}"}}'


async def until(condition):
    """Let the event loop run until `condition` holds; the test's timeout bounds it."""
    while not condition():
        await asyncio.sleep(0.001)


async def test_a_repeated_prompt_reports_cached_tokens():
    """The second time all full blocks but the last come from the cache, and usage says so."""
    async with running_pod() as pod:
        first = await pod.completion(prompt="a" * 640, max_tokens=4)
        second = await pod.completion(prompt="a" * 640, max_tokens=4)
        assert first["usage"]["prompt_tokens"] == 160
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 144
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert await pod.metric(of_model("prefix_cache_hits_total")) == 144
        assert await pod.metric(of_model("prefix_cache_queries_total")) == 320


async def test_the_next_turn_of_a_chat_hits_prompt_and_answer():
    """The generated answer, sent back, is found in the cache with the prompt before it."""
    async with running_pod() as pod:
        messages = [{"role": "user", "content": "x" * 400}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 64, "ignore_eos": True}
        _, answer = await pod.post("/v1/chat/completions", body)
        said = answer["choices"][0]["message"]
        assert said["role"] == "assistant"
        grown = [*messages, said, {"role": "user", "content": "go on"}]
        _, answer = await pod.post("/v1/chat/completions", {**body, "messages": grown})
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (answer_tokens := 104 + 64) // 16 * 16
        assert answer_tokens <= answer["usage"]["prompt_tokens"]


async def test_a_prompt_is_rendered_without_being_run():
    """Its token ids, one object a completion prompt and one a chat; the engine sees nothing."""
    async with running_pod() as pod:
        asked = {"model": MODEL, "prompt": ["abcdefgh", "x"]}
        status, rendered = await pod.post("/v1/completions/render", asked)
        assert status == 200
        ids = [each["token_ids"] for each in rendered]
        assert ids == [[0x64636261, 0x68676665], [ord("x")]]
        for each in ids:
            again = await pod.post("/v1/completions/render", {"model": MODEL, "prompt": each})
            assert again[1][0]["token_ids"] == each
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "abcd"}]}
        _, one = await pod.post("/v1/chat/completions/render", chat)
        assert ids[0][0] in one["token_ids"]
        assert await pod.metric(of_model("prefix_cache_queries_total")) == 0
        status, _ = await pod.post("/v1/completions/render", {**asked, "model": "another"})
        assert status == 404


async def test_tokens_are_told_without_a_request():
    """Those that render tells, of a prompt and of a chat; the model may be left out."""
    async with running_pod() as pod:
        status, told = await pod.post("/tokenize", {"prompt": "abcdefgh"})
        assert status == 200
        assert (told["count"], told["tokens"]) == (2, [0x64636261, 0x68676665])
        assert told["max_model_len"] == 31_984
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "abcd"}]}
        _, told = await pod.post("/tokenize", chat)
        _, rendered = await pod.post("/v1/chat/completions/render", chat)
        assert told["tokens"] == rendered["token_ids"]
        for body, expected in (
            ({"model": "another", "prompt": "x"}, 404), ({"model": MODEL}, 400), ([], 400),
        ):  # fmt: skip
            assert (await pod.post("/tokenize", body))[0] == expected


async def test_a_pod_says_where_it_tells_what_it_holds():
    """One that does not tell knows no such path."""
    async with running_pod() as pod, pod.client.get(pod.url("/kv_event_sources")) as response:
        assert response.status == 404
    async with running_pod(kv_events=True) as pod:
        async with pod.client.get(pod.url("/kv_event_sources")) as response:
            told = (await response.json())["0"]
        assert told["enable_kv_cache_events"]
        await pod.completion(prompt="a" * 640, max_tokens=4)
        port = int(told["replay_endpoint"].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        dealer = ZmtpConnection(SocketType.DEALER)
        while not dealer.ready:
            writer.write(dealer.to_send())
            dealer.feed(await reader.readexactly(1))
        dealer.send(ask_replay(0))
        writer.write(dealer.to_send())
        found = []
        while True not in found:
            data = await reader.read(65_536)
            assert data, "the pod closed"
            found += map(read_replayed, dealer.feed(data))
        writer.close()
        (event,) = read_payload(found[0][1]).events
        assert event.tokens == b"a" * 640


async def test_an_idle_pod_forgets_its_prompts_when_it_is_asked_to():
    async with running_pod() as pod:
        body = {"prompt": "a" * 640, "max_tokens": 4}
        await pod.completion(**body)
        async with pod.client.post(pod.url("/reset_prefix_cache")) as response:
            assert response.status == 200
        answer = await pod.completion(**body)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_has_the_text_of_the_whole_answer():
    """Streamed or not, a chat says the same; usage comes last and only if asked for."""
    async with running_pod() as pod:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "max_tokens": 20,
            "ignore_eos": True,
        }
        _, whole = await pod.post("/v1/chat/completions", body)
        with_usage = {**body, "stream_options": {"include_usage": True}}
        events = await pod.events("/v1/chat/completions", with_usage)
        *chunks, last = events
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert text == whole["choices"][0]["message"]["content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 20
        plain = await pod.events("/v1/chat/completions", body)
        assert all("usage" not in event for event in plain)


async def test_chunks_of_a_stream_have_as_many_tokens_as_the_interval():
    """The first token comes at once, and the last chunk has the rest."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "ignore_eos": True}
    async with running_pod() as pod:
        _, whole = await pod.post("/v1/completions", body)
    async with running_pod(stream_interval_tokens=8, speed=1.0) as pod:
        chunks = await pod.events("/v1/completions", body)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["text"]
    assert 3 <= len(texts) <= 4
    assert len(texts[0]) < len(texts[1])


async def test_the_headers_of_a_stream_come_before_its_first_token():
    """A client has the response headers while the engine still computes the prompt."""
    async with running_pod(speed=1.0) as pod:
        body = {"model": MODEL, "prompt": "x" * 100_000, "max_tokens": 1, "stream": True}
        async with pod.client.post(pod.url("/v1/completions"), json=body) as response:
            assert response.status == 200
            assert pod.pod.engines.ranks[0].snapshot().running == 0
            assert await pod.metric(of_model("generation_tokens_total")) == 0
            assert b"[DONE]" in await response.read()


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [("abcd" * 3, 1, 3), (["abcd", "abcdefgh"], 2, 3), ([1, 2, 3], 1, 3), ([[1], [2, 3]], 2, 3)],
)
async def test_every_kind_of_prompt_is_answered(prompt, choices, tokens):
    """A string, a list of them, token ids, a list of those: one choice a prompt."""
    async with running_pod() as pod:
        answer = await pod.completion(prompt=prompt, max_tokens=2)
        assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
        assert answer["usage"]["prompt_tokens"] == tokens
        events = await pod.events(
            "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        )
        assert {event["choices"][0]["index"] for event in events} == set(range(choices))


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "other", "prompt": "x"}, 404, "The model `other` does not exist."),
        ({"model": MODEL}, 400, "missing required field `prompt`"),
        ({"model": MODEL, "prompt": 5}, 400, "at least|Expected"),
        ({"model": MODEL, "prompt": ""}, 400, "The prompt is empty"),
        ({"model": MODEL, "prompt": []}, 400, "expected at least one prompt"),
        ({"model": MODEL, "prompt": [1, "x"]}, 400, "mixes token ids with prompts"),
        ({"model": MODEL, "prompt": [-1]}, 400, "A token id is an integer"),
        ({"model": MODEL, "prompt": "x", "max_tokens": 0}, 400, "expected at least 1"),
        ({"model": MODEL, "prompt": "x", "n": 2}, 400, "`n` is 2"),
        ({"model": MODEL, "prompt": "x" * 200_000}, 400, "maximum context length is 31984"),
    ],
)
async def test_a_bad_request_gets_an_error_object(body, status, says):
    """The status is in the body as well, with one sentence; nothing reaches the engine."""
    async with running_pod() as pod:
        got, answer = await pod.post("/v1/completions", body)
        assert got == status
        assert re.search(says, answer["error"]["message"])
        assert answer["error"]["code"] == status
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert pod.pod.engines.ranks[0].step(0.0) is None


async def test_bytes_that_are_no_json_get_an_error_object():
    """A body that cannot be decoded is a 400, an unknown path a 404, both as JSON."""
    async with running_pod() as pod:
        for path, status in [("/v1/chat/completions", 400), ("/nowhere", 404)]:
            async with pod.client.post(pod.url(path), data=b'{"model"') as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == status


async def test_a_client_that_leaves_frees_its_blocks():
    """Disconnecting aborts the request in the engine and counts it as aborted."""
    async with running_pod(speed=1.0) as pod:
        body = {"model": MODEL, "prompt": "x" * 4000, "max_tokens": 5000, "ignore_eos": True}
        response = await pod.client.post(pod.url("/v1/completions"), json={**body, "stream": True})
        assert await response.content.readline()
        assert pod.pod.engines.ranks[0].pool.blocks_used > 0
        response.close()
        await until(lambda: pod.pod.engines.ranks[0].pool.blocks_used == 0)
        aborted = of_model("request_success_total", 'finished_reason="abort",')
        assert await pod.metric(aborted) == 1


async def test_a_full_server_answers_503():
    """Beyond `max_num_queued_reqs` unfinished requests the next is turned away and counted."""
    async with running_pod(speed=1.0, max_num_queued_reqs=1) as pod:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 5000, "ignore_eos": True}
        first = await pod.client.post(pod.url("/v1/completions"), json={**body, "stream": True})
        status, answer = await pod.post("/v1/completions", body)
        assert status == 503
        assert "its limit is 1" in answer["error"]["message"]
        first.close()
        rejected = (
            f'admission_rejections_total{{model_name="{MODEL}",reason="max_num_queued_reqs"}}'
        )
        assert await pod.metric(rejected) == 1


async def test_adapters_are_loaded_listed_served_and_unloaded():
    """An adapter is a model with a parent, with a cache of its own."""
    async with running_pod() as pod:
        adapter = {"lora_name": "chat", "lora_path": "/adapters/chat"}

        async def change(verb, body):
            url = pod.url(f"/v1/{verb}_lora_adapter")
            async with pod.client.post(url, json=body) as response:
                return response.status

        assert await change("load", adapter) == 200
        assert await change("load", adapter) == 400
        async with pod.client.get(pod.url("/v1/models")) as response:
            models = (await response.json())["data"]
        parents = {model["id"]: model["parent"] for model in models}
        assert parents == {MODEL: None, "sql": MODEL, "chat": MODEL}
        await pod.completion(prompt="y" * 640)
        answer = await pod.completion(model="chat", prompt="y" * 640)
        assert answer["model"] == "chat"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        async with pod.client.get(pod.url("/metrics")) as response:
            page = await response.text()
        assert 'running_lora_adapters="chat",waiting_lora_adapters="chat"} 1.' in page
        assert await change("unload", adapter) == 200
        assert await change("unload", adapter) == 404
        status, _ = await pod.post("/v1/completions", {"model": "chat", "prompt": "y"})
        assert status == 404


async def test_probes_answer():
    """Health is 200, the version has the layout's number, the page says how it started."""
    async with running_pod() as pod:
        async with pod.client.get(pod.url("/health")) as response:
            assert response.status == 200
        async with pod.client.get(pod.url("/version")) as response:
            assert (await response.json())["version"] == "0.32.0"
        async with pod.client.get(pod.url("/metrics")) as response:
            assert "process_start_time_seconds 1." in await response.text()


async def test_the_page_tells_the_front_end_from_the_queue():
    """Time before the engine counts in the time to first token, not in the time queued."""
    async with running_pod() as pod:
        await pod.completion(prompt="x" * 40_000, max_tokens=1)
        queued_s = await pod.metric(of_model("request_queue_time_seconds_sum"))
        first_token_s = await pod.metric(of_model("time_to_first_token_seconds_sum"))
        prefill_s = await pod.metric(of_model("request_prefill_time_seconds_sum"))
    frontend_s = find_profile(DEFAULT_PROFILE).frontend_delay_s(10_000)
    assert 0 <= queued_s < first_token_s
    assert first_token_s >= frontend_s + queued_s + prefill_s - 1e-6


async def test_many_clients_are_served_at_once():
    """Concurrent requests all end, and the engine is empty and its gauges 0 afterwards."""
    async with running_pod(max_num_seqs=4) as pod:
        answers = await asyncio.gather(
            *(pod.completion(prompt=f"{index} " * 200, max_tokens=20) for index in range(20))
        )
        assert len({answer["id"] for answer in answers}) == 20
        await until(lambda: pod.pod.engines.ranks[0].pool.blocks_used == 0)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert await pod.metric(of_model(gauge)) == 0


@contextlib.asynccontextmanager
async def sim_serve(*arguments):
    """`sim serve` as a child process; killed if the test leaves it running."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sim", "serve", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_command_serves_and_stops_on_a_signal(number, tmp_path):
    """It prints the addresses, writes the endpoints file, and ends with 0 with a stream open."""
    endpoints = tmp_path / "endpoints.yaml"
    arguments = ["--pods", "2", "--port", "0", "--json", "--endpoints-out", str(endpoints)]
    async with sim_serve(*arguments, "--log-format", "json") as process, ClientSession() as client:
        ready = json.loads(await process.stdout.readline())
        assert [pod["name"] for pod in ready["pods"]] == ["pod-0", "pod-1"]
        written = json.loads(endpoints.read_text())["endpoints"]
        assert [(pod["address"], pod["port"]) for pod in written] == [
            (pod["address"], pod["port"]) for pod in ready["pods"]
        ]
        body = {"model": ready["model"], "prompt": "x", "max_tokens": 9000, "ignore_eos": True}
        url = ready["pods"][1]["url"] + "/v1/completions"
        async with client.post(url, json={**body, "stream": True}) as response:
            assert await response.content.readline()
            process.send_signal(number)
            assert await process.wait() == 0
    assert not list(tmp_path.glob(".*"))


async def test_a_port_in_use_is_one_sentence():
    """The sentence names the port, and the exit code is 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with sim_serve("--port", str(port)) as process:
            _, stderr = await process.communicate()
            assert process.returncode == 1
    sentence = f"sim: Cannot listen on 127.0.0.1 port {port}: Address already in use.\n"
    assert stderr.decode() == sentence


async def test_ports_beyond_the_last_are_one_sentence():
    """Consecutive ports must exist."""
    async with sim_serve("--port", "65535", "--pods", "2") as process:
        _, stderr = await process.communicate()
        assert process.returncode == 1
    assert stderr.decode() == "sim: 2 ports from port 65535 on would exceed port 65535.\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pods", "0"], "'0' is not an integer from 1 to 1000"),
        (["--speed", "0"], "'0' is not a number above 0"),
        (["--profile", "none"], "No profile 'none'"),
        (["--lora", "a", "--max-loras", "0"], "--lora needs --max-loras"),
        (["--engine", "nothing"], "No feature 'nothing' of engines"),
        (["--engine", "speculative:acceptance=0.4/0.7"], "none above the one before it"),
        (["--engine", "whole-prompts", "--engine", "whole-prompts"], "given twice"),
        (["--nonsense"], "unknown flag --nonsense"),
    ],
)
async def test_a_wrong_command_line_exits_2(arguments, says):
    """Usage errors are told on stderr."""
    async with sim_serve(*arguments) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 2
    assert says in stderr.decode()


async def test_ranks_that_share_experts_are_refused(tmp_path):
    """Their passes begin together, which tasks of their own do not show."""
    file = tmp_path / "experts.toml"
    curve = "expert_tokens = [1, 2]\nexpert_s = [0.1, 0.2]"
    file.write_text(f'[experts]\nlike = "{DEFAULT_PROFILE}"\n{curve}\n')
    async with sim_serve("--engine", "ranks:count=2", "--profile", str(file)) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 2
    assert "--engine ranks does not work with" in stderr.decode()


async def test_a_pod_that_speculates_gives_several_tokens_a_pass():
    """The same answer to the last token, in one gap of ITL for four tokens; its page counts tokens."""
    gaps, texts = {}, set()
    for features in ((), ("speculative:acceptance=1/1/1",)):
        async with running_pod(features=features) as pod:
            answer = await pod.completion(prompt="a" * 640, max_tokens=41, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 41
            texts.add(answer["choices"][0]["text"])
            assert await pod.metric(of_model("generation_tokens_total")) == 41
            gaps[features] = await pod.metric(of_model("inter_token_latency_seconds_count"))
    assert len(texts) == 1
    assert [*gaps.values()] == [40, 10]


async def test_a_stream_of_a_pod_that_speculates_is_whole():
    """What comes together is one part or several, and nothing is missing."""
    asked = {"prompt": "b" * 640, "max_tokens": 30, "ignore_eos": True}
    async with running_pod() as pod:
        whole = (await pod.completion(**asked))["choices"][0]["text"]
    async with running_pod(features=("speculative:acceptance=0.7/0.4",)) as pod:
        body = {"model": MODEL, "stream": True, **asked}
        async with pod.client.post(pod.url("/v1/completions"), json=body) as response:
            lines = (await response.text()).split("\n")
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == whole


async def test_a_prompt_that_fits_into_no_pass_is_refused():
    """Where prompts are computed whole: else it would wait for ever, and all behind it."""
    features = ("whole-prompts",)
    limits = {"max_num_batched_tokens": 1_024, "chunked_prefill": False}
    async with running_pod(features=features, **limits) as pod:
        told = {"model": MODEL, "prompt": "a" * 4 * 1_024, "max_tokens": 1}
        status, refused = await pod.post("/v1/completions", told)
        assert status == 400
        assert "maximum context length is 1024 tokens" in refused["error"]["message"]
        told["prompt"] = told["prompt"][4:]
        status, _ = await pod.post("/v1/completions", told)
        assert status == 200


async def test_the_command_line_starts_engines_with_what_it_tells():
    """As `sim replay` is told."""
    spelt = ["--engine", "speculative:acceptance=0:1/1+9000:0/0", "--engine", "whole-prompts"]
    async with sim_serve("--port", "0", "--json", *spelt) as process:
        told = json.loads(await process.stdout.readline())
        (pod,) = told["pods"]
        async with ClientSession() as client:
            body = {
                "model": told["model"],
                "prompt": "a" * 64,
                "max_tokens": 31,
                "ignore_eos": True,
            }
            async with client.post(f"{pod['url']}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
            async with client.get(f"{pod['url']}/metrics") as response:
                page = await response.text()
    assert re.search(r"^vllm:inter_token_latency_seconds_count\{.*\} 10\.0$", page, re.MULTILINE)


async def test_the_page_of_an_idle_pod_is_rendered_once(monkeypatch):
    """Hundreds of them are scraped several times a second; what a request changes is shown at once."""
    rendered = []

    def counted(registry):
        rendered.append(registry)
        return generate_latest(registry)

    monkeypatch.setattr("sim.pods.exposition.generate_latest", counted)
    async with running_pod() as pod:
        before = pod.pod.page.render()
        assert pod.pod.page.render() == before
        assert len(rendered) == 1
        await pod.completion(prompt="a" * 640, max_tokens=4)
        assert await pod.metric(of_model("prefix_cache_queries_total")) == 160
        assert await pod.metric(of_model("request_success_total", 'finished_reason="length",')) == 1
        pod.pod.page.reject("max_num_queued_reqs")
        assert b'reason="max_num_queued_reqs"} 1.0' in pod.pod.page.render()
