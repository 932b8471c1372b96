"""Cost of a routing decision: `schedule()` alone, and a chat from its bytes to serialised answers.

The scheduler is that of `epp serve` without a configuration, unless the row names another one. Its
endpoints were all scraped just before, and none reports LoRA adapters. Every prompt is new: a
shared system prompt, a history that some requests have sent before, and a new question. Transport
is not included.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import StringIO
from random import Random
from typing import TypeAlias

import structlog
import yaml
from prometheus_client import CollectorRegistry

from bench.gateway_messages import (
    CHAT_HEADERS,
    body_messages,
    headers_message,
    response_body_message,
)
from bench.timing import Timed, best_in_turns_us, best_us
from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.configuration.config import PickerConfig, load_config
from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.decision.scheduler import Decision, Scheduler
from epp.core.knowledge.inflight import Outcome
from epp.core.prompt.blocks import KnownSegments, hash_blocks
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.flow_queue import FlowQueue
from epp.core.protocol.messages import Event
from epp.core.protocol.session import Gateway, Observer, Session, SessionSettings
from epp.core.protocol.waiting import Resolution
from epp.core.types import ApiKind, Endpoint, EndpointMetrics, Refusal
from epp.plugins.filters import ROLE_LABEL
from epp.plugins.strategies import STRATEGIES
from epp.shell.gateway.codec import decode, encode
from epp.shell.gateway.wire import Decoder
from epp.shell.operators.decisions.recent_decisions import RecentDecisions
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.metrics.telemetry import Telemetry
from epp.shell.operators.observation import Observation

BLOCK_BYTES = 256
POD_BLOCKS = 27_214
"""Number of blocks of 16 tokens in the KV cache of an 8B model on an 80 GB GPU."""
_HASHING = {"seed": 1, "block_bytes": BLOCK_BYTES, "blocks_max": 2_048}
_Hash: TypeAlias = Callable[..., bytes]
_ROLES = ("decode", "prefill")
"""Roles that the endpoints get alternately; only configurations with several stages read them."""
BATCH = 100
"""Number of decisions in a batch, of which the sampled log shows one; fewer if prompts are long."""


class _NoWaker:
    """A waker of a queue in which no request waits."""

    def soon(self) -> None:
        raise AssertionError("every request has room")

    def at(self, time_s: float | None) -> None:
        """Do nothing, because no request waits."""


def _not_resumed(_: Resolution) -> None:
    raise AssertionError("no request waits")


class Pool:
    """A scheduler and its endpoints, which have different loads."""

    def __init__(
        self,
        endpoints: int,
        config: PickerConfig | None = None,
        now: float = 1_000.0,
        *,
        idle: bool = False,
    ) -> None:
        """Create the pool. With `idle`, the engines' pages report no requests."""
        self._idle = idle
        config = config or default_config(plugin_tables())
        self.scheduler = Scheduler(build_settings(config), seed=1)
        self.now = now
        self._random = Random("bench:pool")
        self.scheduler.take(
            PoolReplaced(
                [
                    Endpoint(
                        endpoint_id=f"uid-{number}:8000",
                        name=f"default/vllm-{number}",
                        address=f"10.0.{number // 250}.{number % 250 + 1}:8000",
                        labels={ROLE_LABEL: _ROLES[number % len(_ROLES)]},
                    )
                    for number in range(endpoints)
                ]
            ),
            self.now,
        )
        queue = FlowQueue(self.scheduler, _NoWaker(), self.now)
        self.queue = queue if queue.active else None
        self.scrape()

    def scrape(self) -> None:
        """Advance the time by 0.2 s and apply a successful scrape of every endpoint of the pool,
        with random load, or without load if the pool is idle.
        """
        self.now += 0.2
        for slot, _ in self.scheduler.pool.endpoints():
            metrics = EndpointMetrics(
                waiting_requests=0.0 if self._idle else float(self._random.randint(0, 9)),
                running_requests=0.0 if self._idle else float(self._random.randint(0, 64)),
                kv_cache_usage=0.0 if self._idle else self._random.random(),
                block_size_tokens=16,
                blocks_total=POD_BLOCKS,
            )
            self.scheduler.take(PageScraped(slot, metrics), self.now)


class Chats:
    """Generator of request bodies of about `size_bytes`: a quarter system prompt, half history, a
    quarter question.
    """

    def __init__(self, size_bytes: int, messages: int) -> None:
        self._random = Random("bench:chats")
        self._words = [
            "".join(
                self._random.choices("abcdefghijklmnopqrstuvwxyz", k=self._random.randint(2, 9))
            )
            for _ in range(4_000)
        ]
        self._question_bytes = size_bytes // 4
        self._systems = [self._text(size_bytes // 4) for _ in range(16)]
        each = size_bytes // 2 // (messages - 2)
        self._histories = [[self._text(each) for _ in range(messages - 2)] for _ in range(64)]

    def _text(self, size_bytes: int) -> str:
        """Return random words of about `size_bytes` characters, with an occasional line break and
        quotation.
        """
        words = self._random.choices(self._words, k=size_bytes // 6)
        for at in range(0, len(words), 40):
            words[at] = f'\n"{words[at]}"'
        return " ".join(words)[:size_bytes]

    def body(self) -> bytes:
        """Return the body of the next chat request: a shared system prompt, a shared history and a
        new question.
        """
        pick = self._random.randrange
        texts = [
            self._systems[pick(16)],
            *self._histories[pick(64)],
            self._text(self._question_bytes),
        ]
        roles = ("system", *("user", "assistant") * len(texts))
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        return json.dumps({"model": "llama", "messages": messages, "stream": True}).encode()


class Silent:
    """An observer of the scheduler's decisions that does nothing."""

    def ignore(self, *told: object) -> None:
        pass

    decided = refused = failed = response_started = completed = ignore
    set_aside = unknown_body_mode = unknown_objective = protocol_violated = ignore
    response_body_declined = usage_unseen = responses_unseen = ignore


def telemetry_observer(pool: Pool) -> Observation:
    """Return the observer of decisions of `epp serve`, including its sampled log lines, whose
    output is discarded. Let the scheduler of `pool` keep the costs of decisions, as the picker
    does.
    """
    logger = structlog.wrap_logger(
        structlog.PrintLogger(StringIO()),
        processors=[structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    recent = RecentDecisions(pool.scheduler.pool)
    pool.scheduler.placements.keeps_costs = True
    return Observation(Telemetry(CollectorRegistry()), DecisionLog(logger, level="info"), recent)


class Decisions:
    """A player of chats of one size against one scheduler and its endpoints, one batch after the
    other.
    """

    def __init__(self, pool: Pool, chats: Chats, observer: Observer, batch: int) -> None:
        self._pool = pool
        self._chats = chats
        self._observer = observer
        self._batch = batch
        self._settings = SessionSettings()
        self._decode = Decoder().decode
        self._gateway = Gateway()
        self._gateway.sends_response_headers = True
        self._open: list[Session] = []

    def new_session(self) -> Session:
        """Return a new ext_proc session, which `close` will close."""
        session = Session(
            self._pool.scheduler,
            self._settings,
            self._gateway,
            self._observer,
            lambda: "id",
            queue=self._pool.queue,
        )
        session.resume = _not_resumed
        self._open.append(session)
        return session

    def opened(self) -> Iterator[tuple[Session, list[Event]]]:
        """Scrape the pool, then yield (ext_proc session, events of its request body) for each chat
        of a batch. The session has already received the request headers.
        """
        self._pool.scrape()
        for _ in range(self._batch):
            session = self.new_session()
            session.receive(self._decode(headers_message()), self._pool.now)
            yield session, [self._decode(message) for message in body_messages(self._chats.body())]

    def messages(self) -> Iterator[list[bytes]]:
        """Scrape the pool, then yield all messages of the request phase for each chat of a batch."""
        self._pool.scrape()
        for _ in range(self._batch):
            yield [headers_message(), *body_messages(self._chats.body())]

    def decide(self, opened: tuple[Session, list[Event]]) -> None:
        """Process the request body of a session into serialised answers."""
        session, events = opened
        for event in events:
            for answer in session.receive(event, self._pool.now):
                encode(answer)

    def serve(self, messages: list[bytes]) -> None:
        """Process the whole request phase of a stream, from the gateway's messages to serialised
        answers.
        """
        session = self.new_session()
        for message in messages:
            for answer in session.receive(self._decode(message), self._pool.now):
                encode(answer)

    def close(self) -> None:
        """End all ext_proc streams of the batch, and thus their requests."""
        for session in self._open:
            session.closed(self._pool.now)
        self._open.clear()


CHATS = {
    "8 KB": (8_000, 5, BATCH),
    "450 KB": (450_000, 288, 10),
}
"""Sizes of the chats: name -> (bytes of the body, number of messages, decisions per batch)."""


def chat_rows() -> list[tuple[str, str]]:
    """Return rows (what, how much) for a chat over 100 endpoints: the time from the bytes of its
    body, and from all messages of the request phase, to the serialised answers.
    """
    rows = []
    for size, (size_bytes, messages, batch) in CHATS.items():
        unobserved, seen = Pool(100), Pool(100)
        for observed, pool, observer in (
            ("unobserved", unobserved, Silent()),
            ("with telemetry and log", seen, telemetry_observer(seen)),
        ):
            streams = Decisions(pool, Chats(size_bytes, messages), observer, batch)
            body_us = best_us(streams.decide, streams.opened, after=streams.close)
            all_us = best_us(streams.serve, streams.messages, after=streams.close)
            what = f"{size} chat over 100 endpoints, {observed}, "
            rows.append((what + "body to answers", f"{body_us:.1f} µs"))
            rows.append((what + "all messages to answers", f"{all_us:.1f} µs"))
    return rows


def scheduled(endpoints: int, blocks: int, config: PickerConfig | None = None) -> Timed:
    """Return `schedule()` to be timed, which hashes the prompt, looks it up in the index and
    chooses.

    Prompts have `blocks` blocks, of which a quarter is shared with others.
    """
    pool = Pool(endpoints, config)
    scheduler = pool.scheduler
    random = Random("bench:prompts")
    heads = [random.randbytes(blocks // 4 * BLOCK_BYTES) for _ in range(16)]
    decided: list[Decision | Refusal] = []

    def requests() -> Iterator[InferenceRequest]:
        pool.scrape()
        for _ in range(max(4, min(BATCH, 10_000 // blocks))):
            prompt = random.choice(heads) + random.randbytes((blocks - blocks // 4) * BLOCK_BYTES)
            yield InferenceRequest(
                request_id="bench",
                api=ApiKind.CHAT,
                model="llama",
                prompts=(prompt,),
                prompt_tokens=64 * blocks,
                segments=scheduler.segments,
            )

    def complete() -> None:
        for decision in decided:
            assert isinstance(decision, Decision), decision
            scheduler.take(RequestEnded(decision.lease, Outcome()), pool.now)
        decided.clear()

    return Timed(
        lambda request: decided.append(scheduler.schedule(request, pool.now)), requests, complete
    )


def schedule_us(endpoints: int, blocks: int) -> float:
    """Return the microseconds of one `schedule()`; see `scheduled`."""
    return best_in_turns_us([scheduled(endpoints, blocks)])[0]


def hash_rows() -> list[tuple[str, str]]:
    """Return rows (what, how much) for hashing the blocks of a 450 KB prompt: without remembered
    segments, with new ones, and with known ones.
    """
    random = Random("bench:hashes")
    known = KnownSegments(secret=1)
    again = random.randbytes(450_000)
    known.hash_blocks(again, **_HASHING)

    def new() -> Iterator[bytes]:
        for _ in range(10):
            yield random.randbytes(450_000)

    ways: tuple[tuple[str, _Hash, Callable[[], Iterable[bytes]]], ...] = (
        ("no memory of segments", hash_blocks, new),
        ("all segments new", KnownSegments(secret=1).hash_blocks, new),
        ("all segments known", known.hash_blocks, lambda: [again] * 10),
    )
    return [
        (f"hash a 450 KB prompt, {what}", f"{best_us(partial(hashed, **_HASHING), prompts):.1f} µs")
        for what, hashed, prompts in ways
    ]


def decode_rows() -> list[tuple[str, str]]:
    """Return rows (what, how much) for decoding a gateway's messages: with protobuf, and with the
    fast parser.
    """
    more = {f"x-client-{number}": f"value-{number}" * number for number in range(9)}
    messages = {
        "11 request headers": headers_message(),
        "20 request headers": headers_message(CHAT_HEADERS | more),
        "8 KB body": body_messages(b"x" * 8_000)[0],
        "150 B of a response": response_body_message(b"x" * 150),
        "62 KB of a response": response_body_message(b"x" * 62_000),
    }
    rows = []
    for what, message in messages.items():
        for how, read in (("protobuf", decode), ("scan", Decoder().decode)):
            took_us = best_us(read, lambda message=message: [message] * 300)
            rows.append((f"read {what}, {how}", f"{took_us:.2f} µs"))
    return rows


def strategy_rows() -> list[tuple[str, str]]:
    """Return a row (what, how much) with the CPU time of a decision by the default strategy
    relative to one by weighted scores. The batches of both take turns.
    """
    weighted = load_config(STRATEGIES["weighted-scores"].config, "weighted", plugin_tables())
    default, other = best_in_turns_us([scheduled(100, 128), scheduled(100, 128, weighted)])
    what = "schedule() in that by `weighted-scores`, 100 endpoints, 128 blocks"
    return [(what, f"{default / other:.2f}")]


def shadow_rows() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the CPU time that a shadow profile equal to the default
    adds to a decision. Batches with and without it take turns.
    """
    document = yaml.safe_load(STRATEGIES["homing"].config)
    (profile,) = document["schedulingProfiles"]
    plugins = {plugin.get("name", plugin["type"]): plugin for plugin in document["plugins"]}
    named = [reference["pluginRef"] for reference in profile["plugins"]]
    twins = [plugins[name] | {"name": f"twin-of-{name}"} for name in named]
    twinned = [
        reference | {"pluginRef": f"twin-of-{reference['pluginRef']}"}
        for reference in profile["plugins"]
    ]
    shadowed = [
        document | {"shadow": {"name": "shadow", "plugins": profile["plugins"]}},
        document
        | {
            "plugins": [*document["plugins"], *twins],
            "shadow": {"name": "shadow", "plugins": twinned},
        },
    ]
    configs = [
        default_config(plugin_tables()),
        *(load_config(json.dumps(each), "shadowed", plugin_tables()) for each in shadowed),
    ]
    alone, common, apart = best_in_turns_us([scheduled(8, 30, config) for config in configs])
    return [
        row
        for which, cost_us in (("the same plugins", common), ("plugins of its own", apart))
        for row in (
            (
                f"schedule() with a shadow of {which} in that without, 8 endpoints, 30 blocks",
                f"{cost_us / alone:.2f}",
            ),
            ("that is", f"{cost_us - alone:.1f} µs"),
        )
    ]


def stages_config(*stages: str) -> PickerConfig:
    """Return a configuration in which each of `stages` runs for every request, with the scorers of
    llm-d's guide for disaggregated serving.
    """
    named = ("prefix-cache-scorer", "queue-scorer", "active-request-scorer")
    filters = [f"{stage}-filter" for stage in stages]
    plugins: list[dict[str, object]] = [{"type": name} for name in (*filters, *named)]
    if len(stages) > 1:
        deciders = {"prefill": "always-disagg-pd-decider"}
        plugins += [
            {"type": "always-disagg-pd-decider"},
            {"type": "disagg-profile-handler", "parameters": {"deciders": deciders}},
        ]
    document = {
        "apiVersion": "llm-d.ai/v1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [
            {
                "name": stage,
                "plugins": [{"pluginRef": name} for name in (f"{stage}-filter", *named)],
            }
            for stage in stages
        ],
    }
    return load_config(json.dumps(document), "stages", plugin_tables())


def stage_rows() -> list[tuple[str, str]]:
    """Return a row (what, how much) with the time of `schedule()` in two stages (decode and
    prefill) as a multiple of that in one stage. The batches of both take turns.
    """
    configs = stages_config("decode"), stages_config("decode", "prefill")
    one, two = best_in_turns_us([scheduled(1_000, 30, config) for config in configs])
    what = "schedule() in two stages in that in one, 1,000 endpoints, 30 blocks"
    return [(what, f"{two / one:.2f}")]


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the CPU time of routing decisions."""
    costs_us = {
        (endpoints, blocks): schedule_us(endpoints, blocks)
        for endpoints in (10, 100, 1_000)
        for blocks in (8, 30, 128, 1_024)
    }
    rows = [
        (f"schedule(), {endpoints:,} endpoints, {blocks:,} blocks", f"{cost_us:.1f} µs")
        for (endpoints, blocks), cost_us in costs_us.items()
    ]
    rows += [
        (
            f"schedule(), 1,000 endpoints against 10, {blocks:,} blocks",
            f"{cost_us / costs_us[10, blocks]:.2f} times",
        )
        for (endpoints, blocks), cost_us in costs_us.items()
        if endpoints == 1_000
    ]
    return (
        rows
        + strategy_rows()
        + shadow_rows()
        + stage_rows()
        + decode_rows()
        + hash_rows()
        + chat_rows()
    )


if __name__ == "__main__":
    for what, figure in run():
        print(f"{what:80} {figure:>12}")
