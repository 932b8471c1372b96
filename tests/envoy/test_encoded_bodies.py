"""Compressed request bodies through a real Envoy: read for the decision, forwarded as they came."""

import asyncio
import gzip
import hashlib
import json
import zlib
from random import Random
from string import ascii_letters

import brotli
import pytest

from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import Stages
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.prompt.encodings import Unparsed, zstd
from epp.core.protocol.session import SessionSettings
from epp.flags.values import BodyMode
from tests.envoy.picker import IN_TURN
from tests.test_hermetic import PREFIX

pytestmark = pytest.mark.envoy

CHATS = 200
CHATS_OF_A_PROMPT = 4
PATH = "/v1/chat/completions"
WITH_PREFIXES = SchedulerSettings(
    stages=Stages(decode=IN_TURN), indexes={PREFIX: PrefixIndexSettings()}, prefix=PREFIX
)
ENCODERS = {
    "identity": bytes,
    "gzip": gzip.compress,
    "zstd": zstd.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
}
READING = [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL]


def chat(seed, size_bytes=4_000):
    text = "".join(Random(seed).choices(ascii_letters, k=size_bytes))
    message = {"role": "user", "content": text}
    return json.dumps({"model": "m", "messages": [message]}).encode()


async def post(wired, encoding, body, path=PATH):
    headers = {"content-encoding": encoding} if encoding else {}
    async with wired.client.post(path, data=body, headers=headers) as response:
        await response.read()
        return response.status


def arrived(pod):
    received = pod.received[-1]
    return received.headers.get("content-encoding"), received.body_sha256


def digest(body):
    return hashlib.sha256(body).hexdigest()


async def test_chats_are_served_alike_whatever_their_encoding(wire):
    """Of each prompt four copies, plain, gzip and zstd in every order; the later ones all hit."""
    wired = await wire(scheduling=WITH_PREFIXES)
    encodings = ("identity", "gzip", "zstd")
    for number in range(CHATS):
        body = chat(number // CHATS_OF_A_PROMPT)
        encoding = encodings[number % len(encodings)]
        encoded = ENCODERS[encoding](body)
        assert await post(wired, encoding, encoded) == 200
        assert arrived(wired.pod) == (encoding, digest(encoded))
        leg = wired.picker.witness.decisions[-1].decision.leg
        assert leg.total_blocks >= len(body) // 256 - 1
        assert leg.matched_blocks == (leg.total_blocks if number % CHATS_OF_A_PROMPT else 0)
    assert len(wired.picker.witness.decisions) == CHATS
    assert wired.picker.witness.refusals == []


@pytest.mark.parametrize("mode", list(BodyMode))
async def test_encoded_bodies_arrive_byte_for_byte_in_every_mode(mode, wire):
    """Where the picker sees the body it knows the prompt; a long one is decoded in many turns."""
    wired = await wire(request_body_mode=mode)
    for encoding, encode in ENCODERS.items():
        for size_bytes in (2_000, 600_000):
            encoded = encode(chat(1, size_bytes))
            assert await post(wired, encoding, encoded) == 200
            assert arrived(wired.pod) == (encoding, digest(encoded))
            exchange = wired.picker.witness.decisions[-1]
            assert not exchange.unparsed
            whole = mode is not BodyMode.BUFFERED_PARTIAL or size_bytes < 32_768
            assert (exchange.request.model == "m") == (mode in READING and whole)


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_rewritten_body_arrives_decoded(mode, wire):
    """The pod gets the new model in plain JSON, and headers that say so."""
    settings = SessionSettings(rewrite={"m": "another-model"}.get)
    wired = await wire(request_body_mode=mode, settings=settings)
    for encoding in ("gzip", "zstd"):
        body = chat(encoding)
        assert await post(wired, encoding, ENCODERS[encoding](body)) == 200
        changed = body.replace(b'"m"', b'"another-model"')
        assert arrived(wired.pod) == (None, digest(changed))


@pytest.mark.parametrize("mode", READING)
@pytest.mark.parametrize(
    ("encoding", "body", "reason"),
    [
        ("compress", b"anything", Unparsed.UNKNOWN),
        ("gzip, zstd", zstd.compress(gzip.compress(chat(1))), Unparsed.STACKED),
        ("zstd", zstd.compress(chat(1))[:-9], Unparsed.CORRUPT),
    ],
    ids=["unknown", "stacked", "truncated"],
)
async def test_a_body_that_cannot_be_read_reaches_a_pod(encoding, body, reason, mode, wire):
    """It is placed without its prompt; the engine judges it."""
    wired = await wire(request_body_mode=mode)
    assert await post(wired, encoding, body) == 200
    assert arrived(wired.pod) == (encoding, digest(body))
    assert wired.picker.witness.decisions[-1].unparsed == reason


def bomb():
    """A gzip body of 1:1000 that decodes to 100 MB."""
    encoder = zlib.compressobj(9, wbits=31)
    piece = bytes(2**20)
    return b"".join([encoder.compress(piece) for _ in range(100)]) + encoder.flush()


async def test_bombs_and_truncated_bodies_lose_no_probe(wire):
    """Ordinary chats are served while hostile bodies are refused, or placed unread."""
    wired = await wire()
    hostile = bomb()
    truncated = zstd.compress(chat(2, 500_000))[:-100]
    assert len(hostile) * 900 < 100 * 2**20
    over = asyncio.Event()

    async def probe():
        statuses = []
        while not over.is_set() or len(statuses) < 20:
            statuses.append(await post(wired, "", chat(len(statuses))))
        return statuses

    async def attack():
        statuses = []
        for _ in range(5):
            statuses.append(await post(wired, "gzip", hostile))
            statuses.append(await post(wired, "zstd", truncated))
        return statuses

    probing = asyncio.create_task(probe())
    attacked = await asyncio.gather(*(attack() for _ in range(3)))
    over.set()
    assert set(await probing) == {200}
    assert {status for statuses in attacked for status in statuses[::2]} == {413}
    assert {status for statuses in attacked for status in statuses[1::2]} == {200}
    messages = {refusal.message for refusal in wired.picker.witness.refusals}
    assert messages == {"the decoded request body is larger than 33554432 bytes"}
    unparsed = [exchange.unparsed for exchange in wired.picker.witness.decisions]
    assert unparsed.count(Unparsed.CORRUPT) == 15
