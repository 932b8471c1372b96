import msgspec
import pytest

from epp.core.prompt.canonical import Message, chat_prompt, responses_prompt, text_prompt
from epp.core.types import ApiKind
from tests.builders import request

SYSTEM = {"role": "system", "content": "You help."}


def chat(*messages, api=ApiKind.CHAT, tools=None, **fields):
    preamble = {} if tools is None else {b"tools": msgspec.Raw(tools)}
    prompt = chat_prompt(msgspec.convert(messages, list[Message]), preamble=preamble)
    return request(api=api, prompts=(prompt,), **fields)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_the_opening_is_the_same_at_each_turn():
    """It ends where the user's first message does."""
    first = chat(SYSTEM, user("Hello"))
    third = chat(SYSTEM, user("Hello"), assistant("Hi"), user("So?"), assistant("?"), user("!"))
    assert first.opening() == third.opening() is not None
    preamble_bytes, _ = first.opening()
    assert preamble_bytes == len(chat_prompt([Message("system", "You help.")], preamble={}))


@pytest.mark.parametrize(
    "other",
    [
        chat(SYSTEM, user("Hello!")),
        chat({"role": "system", "content": "You helped."}, user("Hello")),
        chat(user("Hello")),
        chat(SYSTEM, user("Hello"), tools=b'["a"]'),
        chat(SYSTEM, user("Hello"), model="adapter"),
        chat(SYSTEM, user("Hello"), cache_salt="tenant"),
        chat(SYSTEM, user("Hello"), api=ApiKind.MESSAGES),
    ],
)
def test_what_a_cache_would_not_share_opens_differently(other):
    """Text before it, the text itself, and all that is in the seed of a chain."""
    assert other.opening()[1] != chat(SYSTEM, user("Hello")).opening()[1]


@pytest.mark.parametrize(
    "made",
    [
        request(),
        request(api=ApiKind.CHAT),
        chat(SYSTEM),
        chat({"role": "superuser", "content": "a"}),
        request(api=ApiKind.COMPLETIONS, prompts=(text_prompt("user"),)),
        request(api=ApiKind.TOKENS, prompts=(b"user\xf9a\xf8\xff\x00",)),
        request(api=ApiKind.CHAT, prompts=(b"user\xf9never ended",)),
    ],
)
def test_what_is_no_conversation_has_no_opening(made):
    """Without a message of the user, or of an API without messages, or cut off."""
    assert made.opening() is None


def test_a_message_of_a_user_is_found_behind_another_role_that_ends_alike():
    """`superuser` is another role; and an input of Responses opens like any other."""
    made = chat({"role": "superuser", "content": "a"}, user("b"))
    assert made.opening()[0] == len(chat_prompt([Message("superuser", "a")], preamble={}))
    prompt = responses_prompt("Hello", preamble={}, instructions="Be brief")
    opening = request(api=ApiKind.RESPONSES, prompts=(prompt,)).opening()
    assert opening[0] == len(prompt) - len(
        responses_prompt("Hello", preamble={}, instructions=None)
    )


def test_a_block_hash_is_that_of_the_chain_or_of_its_last_block():
    """The same number for the same head, and None where there is no full block or no chain."""
    long, short, none = (request(prompts=(bytes(range(256)) * n + b"x",)) for n in (4, 2, 0))
    for one in (long, short, none):
        assert one.block_hash(256, 1) is None, "nobody has made the chain"
        one.chains_of(256, 100)
    assert long.block_hash(256, 2) == short.block_hash(256, 2) == short.block_hash(256, 9)
    assert long.block_hash(256, 1) != long.block_hash(256, 2) != long.block_hash(256, 4)
    assert none.block_hash(256, 1) is None


@pytest.mark.parametrize("characters", [1, 3, 100])
def test_the_first_text_is_how_the_user_begins(characters):
    """Neither what the system says, nor the role, nor what comes later."""
    said = "é€😀 and more"
    turns = (SYSTEM, user(said), {"role": "assistant", "content": "Yes."}, user("Next."))
    assert chat(*turns).first_text(characters) == said[:characters]
    whole = request(api=ApiKind.COMPLETIONS, prompts=(text_prompt(said),))
    assert whole.first_text(characters) == said[:characters]


def test_there_is_no_first_text_where_nobody_says_one():
    """Of another kind, let go, or without a user."""
    assert chat(SYSTEM).first_text(9) == ""
    assert chat(user("Hi")).without_prompts().first_text(9) is None
    assert request(api=ApiKind.EMBEDDINGS, prompts=(b"Hi",)).first_text(9) is None


def test_prompts_that_come_as_token_ids_are_their_own():
    """Nobody has to find them out."""
    ids = b"\1\0\0\0\2\0\0\0"
    assert request(api=ApiKind.TOKENS, prompts=(ids,)).token_ids == (ids,)
    assert request(api=ApiKind.CHAT, prompts=(b"x",)).token_ids == ()
    assert request(api=ApiKind.CHAT, prompts=(b"x",), token_ids=(ids,)).token_ids == (ids,)


def test_prompts_are_counted_when_they_are_gone_too():
    several = request(api=ApiKind.COMPLETIONS, prompts=(b"x" * 300, b"y", b""))
    assert several.prompt_count == 3
    several.chains_of(256, 100)
    assert several.without_prompts().prompt_count == 3
    assert request().prompt_count == 1, "where nothing is known of them"


def test_without_its_prompts_a_request_has_no_ids():
    """It is kept for as long as its answer takes."""
    kept = request(api=ApiKind.CHAT, prompts=(b"x",), token_ids=(b"\1\0\0\0",), cold=False)
    assert kept.without_prompts().token_ids == ()
    assert not kept.without_prompts().moment.cold


def test_images_are_known_when_the_prompt_is_gone():
    """They are looked for once; prompts that are ids have none that could be read."""
    shown = b"image_url\xfa%032x\xfd" % 7
    asked = request(prompts=(shown,), api=ApiKind.CHAT)
    (item,) = asked.media_items()
    assert asked.without_prompts().media_items() == (item,)
    assert request(prompts=(shown,), api=ApiKind.TOKENS).media_items() == ()
