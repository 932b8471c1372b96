"""Two real vLLM behind Envoy and a picker that hears them: what is predicted is what is cached.

`make real` installs vLLM and runs this.
"""

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.envoy.process import EppProcess
from tests.envoy.rig import Envoy, running_envoy, until
from tests.envoy.test_replicas import metric
from tests.last_frame import LastFrame
from tests.real.vllm import BLOCK_TOKENS, MODEL, Place, running_engine

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

BLOCKS = 400
"""Of each engine: 12,800 tokens, of which the conversations want more."""
CONVERSATIONS = 24
TURNS = 5
ANSWER_TOKENS = 24
EXACT = [
    {
        "type": "token-producer",
        "parameters": {"tokenizeTimeout": "2s", "vllm": {"endpointDiscovery": {}}},
    },
    {
        "type": "precise-prefix-cache-producer",
        "parameters": {"tokenProcessorConfig": {"blockSizeTokens": BLOCK_TOKENS}},
    },
    {
        "type": "prefix-cache-scorer",
        "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
    },
]
APPROXIMATE = [{"type": "prefix-cache-scorer"}]
ROUND_ROBIN = []


def configuration(plugins: list[dict[str, object]]) -> dict[str, object]:
    """Return a configuration with `plugins` that gives a score of the prefix twice the queue's weight."""
    scored = any(plugin["type"] == "prefix-cache-scorer" for plugin in plugins)
    weights = {"prefix-cache-scorer": 2, "queue-scorer": 1} if scored else {"queue-scorer": 1}
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [*plugins, {"type": "queue-scorer"}, {"type": "max-score-picker"}],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [
                    *({"pluginRef": name, "weight": weight} for name, weight in weights.items()),
                    {"pluginRef": "max-score-picker"},
                ],
            }
        ],
    }


@dataclass(frozen=True, kw_only=True)
class Turn:
    request_id: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    told: dict[str, LastFrame]
    """By the engine's name."""
    picker: EppProcess
    envoy: Envoy


@asynccontextmanager
async def running_stage(folder: Path, plugins: list[dict[str, object]]) -> AsyncIterator[Stage]:
    """Two engines, a picker with `plugins`, and Envoy, with their files in `folder`."""
    place = Place.of(os.environ)
    if not place.whole:
        pytest.skip(f"no vLLM at {place.root}: `make real` installs it")
    folder.mkdir(exist_ok=True)
    async with AsyncExitStack() as opened:
        engines = [
            await opened.enter_async_context(
                running_engine(place, folder, name=name, blocks=BLOCKS)
            )
            for name in ("a", "b")
        ]
        endpoints = [
            {"name": engine.name, "address": "127.0.0.1", "port": engine.port} for engine in engines
        ]
        (folder / "endpoints.yaml").write_text(yaml.safe_dump({"endpoints": endpoints}))
        (folder / "config.yaml").write_text(yaml.safe_dump(configuration(plugins)))
        picker = EppProcess(
            folder / "epp.log",
            *("--endpoints-file", str(folder / "endpoints.yaml")),
            *("--config-file", str(folder / "config.yaml"), "--secure-serving=false"),
            *("--drain-grace=0s", "--drain-timeout=1s"),
        )
        await picker.start()
        try:

            async def both_ready() -> bool:
                return await metric(picker, "homing_ready_endpoints") == 2

            await until(both_ready, "both engines to be ready", 60)
            envoy = await opened.enter_async_context(
                running_envoy(
                    BootstrapOptions(picker_address=picker.address, plaintext=True), folder
                )
            )
            told = {engine.name: LastFrame(engine.replay_port) for engine in engines}
            yield Stage(told=told, picker=picker, envoy=envoy)
        finally:
            if picker.alive:
                await picker.kill()
            print(f"--- end of the log of epp serve\n{picker.log_text()[-4000:]}")


async def debug(stage: Stage, path: str):
    url = stage.picker.metrics_url.replace("/metrics", path)
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def all_noted(stage: Stage) -> None:
    """The picker knows all that the engines have told."""

    async def noted() -> bool:
        told = {name: ("live", await frame.ask()) for name, frame in stage.told.items()}
        rows = (await debug(stage, "/debug/endpoints?format=json"))["endpoints"]
        return told == {
            row["name"]: (
                row["kv_events"],
                -1 if row["kv_events_sequence"] is None else row["kv_events_sequence"],
            )
            for row in rows
        }

    await until(noted, "the picker to have noted all that both engines told", 60)


class Conversation:
    """Grows by a turn whenever it is asked to; a third of them share a system prompt."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.turns = 0
        self._dice = random.Random(number)
        self._messages = [{"role": "system", "content": words(random.Random(number % 3), 500)}]

    async def go_on(self, stage: Stage, session: aiohttp.ClientSession) -> Turn:
        self._messages.append({"role": "user", "content": words(self._dice, 150)})
        request_id = f"{self.number}-{self.turns}"
        self.turns += 1
        async with session.post(
            f"{stage.envoy.url}/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": self._messages,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "seed": 1,
            },
            headers={"x-request-id": request_id},
        ) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        content = answer["choices"][0]["message"]["content"]
        self._messages.append({"role": "assistant", "content": content})
        usage = answer["usage"]
        # An engine that found nothing tells none.
        details = usage.get("prompt_tokens_details") or {}
        return Turn(
            request_id=request_id,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
        )


def words(dice: random.Random, length: int) -> str:
    return "".join(dice.choice("abcdefgh ") for _ in range(length))


async def conversations(
    stage: Stage, after: Callable[[Stage], Awaitable[None]] | None = None
) -> list[Turn]:
    """Return all turns of all conversations, made one after the other; `after` is awaited after each."""
    dice = random.Random("real")
    turns = []
    open_ones = [Conversation(number) for number in range(CONVERSATIONS)]
    async with aiohttp.ClientSession() as session:
        while open_ones:
            # Close to each other, so that most of what a turn needs is still there.
            conversation = dice.choice(open_ones[:6])
            turns.append(await conversation.go_on(stage, session))
            if conversation.turns == TURNS:
                open_ones.remove(conversation)
            if after:
                await after(stage)
    return turns


async def predictions(stage: Stage, turns: list[Turn]) -> list[int]:
    """Return the cached tokens that the picker predicted for each of `turns`."""
    found = []
    for turn in turns:
        (row,) = (await debug(stage, f"/debug/decisions?format=json&request_id={turn.request_id}"))[
            "decisions"
        ]
        found.append(row["predicted_tokens"])
    return found


async def test_what_is_predicted_is_what_is_cached(tmp_path):
    """The prediction is exact for at least 99 % of the requests, while the engines evict blocks.

    The picker knows all reports of the engines before it gets the next request.
    """
    async with running_stage(tmp_path, EXACT) as stage:
        await all_noted(stage)
        turns = await conversations(stage, all_noted)
        predicted = await predictions(stage, turns)
    wrong = [
        (turn, tokens)
        for turn, tokens in zip(turns, predicted, strict=True)
        if tokens != turn.cached_tokens
    ]
    cached = sum(turn.cached_tokens for turn in turns)
    prompts = sum(turn.prompt_tokens for turn in turns)
    print(
        f"{len(turns)} requests, {prompts} prompt tokens, {cached} cached, "
        f"{sum(predicted)} predicted, {len(wrong)} requests predicted otherwise"
    )
    for turn, tokens in wrong:
        print(f"  {turn}: predicted {tokens}")
    assert cached > 0.5 * prompts
    assert len(wrong) <= 0.01 * len(turns)


async def test_the_approximate_index_chooses_well_and_predicts_badly(tmp_path):
    """The approximate index finds more cached tokens than round robin, and predicts too few of them."""
    cached = {}
    for name, plugins in {"approximate": APPROXIMATE, "round robin": ROUND_ROBIN}.items():
        async with running_stage(tmp_path / name.replace(" ", "-"), plugins) as stage:
            turns = await conversations(stage)
            predicted = sum(await predictions(stage, turns)) if plugins else 0
        prompts = sum(turn.prompt_tokens for turn in turns)
        cached[name] = sum(turn.cached_tokens for turn in turns) / prompts
        print(f"{name}: {prompts} prompt tokens, {cached[name]:.1%} cached, {predicted} predicted")
    assert cached["approximate"] > cached["round robin"]
