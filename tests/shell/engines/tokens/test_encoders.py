"""The faster library, and cuts at special tokens, only where they change no id."""

import json

import pytest

from epp.core.prompt.token_ids import packed, unpacked
from epp.shell.engines.tokens.encoders import NoTokenizerError, TextEncoder, byte_characters
from tests.shell.engines.tokens import tiny

TEXTS = (
    "The quick fox",
    "<|im_start|>user\nGröße 我 \U0001f642<|im_end|>\n<|im_start|><|im_start|>x",
    "",
    "  two  ",
    "<|im_start|",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny.make(folder)


def ids_by(encoder, text):
    return [number for part in encoder.parts_of(text) for number in unpacked(encoder.encode(part))]


@pytest.mark.parametrize("text", TEXTS)
def test_parts_have_the_ids_of_the_whole(made, text):
    """By the faster library."""
    folder, tokenizer = made
    encoder = TextEncoder(folder / "tokenizer.json")
    assert (encoder.library, encoder.cut) == ("tiktoken", True)
    assert ids_by(encoder, text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert unpacked(encoder.whole(text)) == ids_by(encoder, text)


def test_a_prompt_gets_what_the_tokenizer_puts_round_it(made):
    """A chat has it from its template."""
    folder, tokenizer = made
    encoder = TextEncoder(folder / "tokenizer.json")
    text = "The quick fox"
    surrounded = unpacked(encoder.surrounded(packed(ids_by(encoder, text))))
    assert surrounded == tokenizer.encode(text).ids != ids_by(encoder, text)


def test_a_special_token_that_takes_blanks_with_it_is_no_place_to_cut(tmp_path):
    """Then the whole is encoded, by the library that looks for them."""
    tokenizer = tiny.make(tmp_path, strips=True)
    encoder = TextEncoder(tmp_path / "tokenizer.json")
    assert (encoder.library, encoder.cut) == ("tokenizers", False)
    text = "a   <|im_end|> b"
    assert encoder.parts_of(text) == [text]
    assert ids_by(encoder, text) == tokenizer.encode(text, add_special_tokens=False).ids


def changed(folder, change):
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    change(described)
    file.write_text(json.dumps(described))
    return TextEncoder(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda described: described.update(normalizer={"type": "Lowercase"}),
        lambda described: described.update(normalizer={"type": "NFKC"}),
        lambda described: described["model"].update(ignore_merges=False, merges=described["model"]["merges"][::-1]),
        lambda described: described["pre_tokenizer"]["pretokenizers"][0].update(behavior="MergedWithPrevious"),
        lambda described: described["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    ],
)  # fmt: skip
def test_what_the_faster_library_would_do_otherwise_it_does_not_do(tmp_path, change):
    """Ids are those of the file's own library."""
    tiny.make(tmp_path)
    encoder = changed(tmp_path, change)
    assert encoder.library == "tokenizers"
    for text in TEXTS:
        assert packed(ids_by(encoder, text)) == encoder.whole(text)


def test_composed_characters_are_composed_for_both(tmp_path):
    """As Qwen's tokenizers have it."""
    tiny.make(tmp_path)
    encoder = changed(tmp_path, lambda described: described.update(normalizer={"type": "NFC"}))
    assert encoder.library == "tiktoken"
    assert encoder.encode("e\u0301") == encoder.encode("é") == encoder.whole("e\u0301")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"model":{"type":"BPE"}}'])
def test_a_file_that_is_none_is_told_of(tmp_path, content):
    """Without what is in it."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(NoTokenizerError, match=r"tokenizer\.json"):
        TextEncoder(tmp_path / "tokenizer.json")


def test_each_byte_has_its_character():
    """And no two the same."""
    assert len(set(byte_characters())) == 256
    assert byte_characters()[ord("a")] == "a"
    assert byte_characters()[ord(" ")] == "Ġ"


HOSTILE = {
    "blanks": " ",
    "line breaks": "\n",
    "letters": "a",
    "marks": "e\u0301",
    "special tokens": "<|im_end|>",
    "ideographs": "我",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_prompt_that_is_one_thing_again_and_again_has_its_ids(made, kind):
    """Where one library gives up, the other one does it."""
    folder, _ = made
    encoder = TextEncoder(folder / "tokenizer.json")
    text = HOSTILE[kind] * (200_000 // len(HOSTILE[kind]))
    assert packed(ids_by(encoder, text)) == encoder.whole(text)
