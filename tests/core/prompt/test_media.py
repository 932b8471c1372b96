"""Images, audio and video of a request, in every API, and the stage that encodes them."""

import json

import pytest
from msgspec import structs

from epp.core.decision.stages import Multimodal
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.prompt.parse import parse_request
from epp.plugins.encoder_cache import EncoderCacheAffinity, EncoderCacheSettings
from epp.plugins.filters import EncodeRole
from tests.builders import PREFIX
from tests.core.decision.staged import BOTH, pool_of, profile

IMAGES = "mm-embeddings-cache-producer"
TEXT = {"type": "text", "text": "what is this?"}
CHAT = {
    "image": {"type": "image_url", "image_url": {"url": "https://a/cat.png"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "audio by URL": {"type": "audio_url", "audio_url": {"url": "https://a/cat.wav"}},
    "video": {"type": "video_url", "video_url": {"url": "https://a/cat.mp4"}},
}
MESSAGES = {
    "image": {"type": "image", "source": {"type": "url", "url": "https://a/cat.png"}},
    "data": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AA"},
    },
}
RESPONSES = {"image": {"type": "input_image", "image_url": "https://a/cat.png"}}


def chat(*parts):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}]}


def messages(*parts):
    document = {"max_tokens": 9, "messages": [{"role": "user", "content": list(parts)}]}
    return "/v1/messages", document


def responses(*parts):
    return "/v1/responses", {"input": [{"role": "user", "content": list(parts)}]}


def parsed(path, document):
    body = json.dumps({"model": "m", **document}).encode()
    headers = {":method": "POST", ":path": path}
    return parse_request(path=path, headers=headers, body=body, request_id="r").request


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        *((chat, part) for part in CHAT.values()),
        *((messages, part) for part in MESSAGES.values()),
        *((responses, part) for part in RESPONSES.values()),
    ],
)
def test_each_type_of_media_counts_in_each_api(shape, part):
    """Once, even if it is in the prompt twice."""
    assert len(parsed(*shape(part)).media_items()) == 1
    assert parsed(*shape(part, part)).media_items() == parsed(*shape(part)).media_items()


@pytest.mark.parametrize("document", [chat(TEXT), messages(TEXT), responses()])
def test_a_prompt_of_text_has_no_media(document):
    assert parsed(*document).media_items() == ()


def test_different_images_differ_and_equal_ones_do_not():
    cat, dog = ({"type": "image_url", "image_url": {"url": f"https://a/{name}"}} for name in "cd")
    assert len(set(parsed(*chat(cat, dog, cat)).media_items())) == 2
    assert parsed(*chat(dog)).media_items() == parsed(*chat(TEXT, dog)).media_items()


def test_a_data_uri_of_ten_megabytes_is_one_item_and_not_part_of_the_prompt():
    """Its digest stands for it, so that the prompt stays short."""
    uri = "data:image/png;base64," + "A" * 10_000_000
    request = parsed(*chat(TEXT, {"type": "image_url", "image_url": {"url": uri}}))
    assert len(request.media_items()) == 1
    assert sum(map(len, request.prompts)) < 1_000


def encoding_pool():
    """Return a scheduler of a pool with two encoders, which prefers the one that has the media."""
    encode = profile("encode", EncodeRole(), scorers=[EncoderCacheAffinity()])
    stages = structs.replace(BOTH, encode=encode, encode_if=Multimodal())
    indexes = {PREFIX: PrefixIndexSettings(), IMAGES: EncoderCacheSettings()}
    return pool_of(["prefill", "decode", "encode", "encode"], stages, indexes=indexes)


@pytest.mark.parametrize("part", CHAT.values(), ids=CHAT)
def test_media_are_recorded_where_they_are_encoded(part):
    """The next request with them goes to the same encoder, and no other endpoint has them."""
    made = encoding_pool()
    first = made.schedule(parsed(*chat(part)), 0.1)
    (encoder,) = first.encoders
    affinity = made.indexes.match(parsed(*chat(part)), 4, 0.2)[IMAGES]
    expected = [made.pool.endpoint_in(slot) == encoder for slot in range(4)]
    assert (affinity.matched > 0).tolist() == expected
    for _ in range(4):
        assert made.schedule(parsed(*chat(TEXT, part)), 0.2).encoders == (encoder,)


def test_text_needs_no_encoder():
    assert encoding_pool().schedule(parsed(*chat(TEXT)), 0.1).encoders == ()
