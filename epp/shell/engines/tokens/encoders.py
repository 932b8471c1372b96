"""Encode text into token ids with the files of one model.

This module is used only in the worker process. Two libraries can encode. `tokenizers` supports
every `tokenizer.json`; `tiktoken`, with the same ranks, takes a quarter of the time for byte-level
BPE. When a model is loaded, trials decide which one is used and whether texts can be split at
special tokens. A variant that differs in one of some hundred generated texts is not used.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

from tiktoken import Encoding
from tokenizers import Tokenizer

from epp.core.prompt.token_ids import packed

FILE_BYTES_MAX: Final = 64 * 1024 * 1024
TRIALS: Final = 200
"""Number of generated texts for which two tokenizer variants must return the same token ids."""
_BYTES: Final = 256

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Type of a function that converts text to token ids and adds no special tokens around it."""


class NoTokenizerError(Exception):
    """Raised if a tokenizer cannot be used. The message is one sentence without content of the
    tokenizer's files.
    """


class TextEncoder:
    """The encoder of text into the token ids of one model.

    `parts_of` splits a text where that changes no id, and `encode` returns the token ids of such a
    part.
    """

    def __init__(self, file: Path) -> None:
        """Read the tokenizer's `tokenizer.json`. Raises `NoTokenizerError`."""
        try:
            text = _read(file)
            described = json.loads(text)
            self._whole = Tokenizer.from_str(text)
        except NoTokenizerError:
            raise
        except (OSError, ValueError) as error:
            raise NoTokenizerError(f"{file} cannot be read: {type(error).__name__}") from error
        except Exception as error:  # the library raises no more specific type
            raise NoTokenizerError(f"{file} is not a usable tokenizer") from error
        self._whole.no_truncation()
        self._whole.no_padding()
        self._added: dict[str, int] = {
            added["content"]: added["id"] for added in described.get("added_tokens", ())
        }
        # Among tokens with the same beginning the longest one matches.
        by_length = sorted(filter(None, self._added), key=len, reverse=True)
        self._cuts = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")
        self._before, self._after = self._surroundings()
        samples = _samples(by_length)
        self.library = "tokenizers"
        self._encode: Encode = self._by_tokenizers
        faster = _by_tiktoken(described)
        if faster is not None and self._alike(faster, samples):
            self._encode = self._or_by_tokenizers(faster)
            self.library = "tiktoken"
        self.cut = bool(by_length) and _may_be_cut(described) and self._cuts_well(samples)
        """True if texts are split at special tokens before they are encoded."""
        if not self.cut:
            # The library finds special tokens in the complete text.
            self._encode = self._by_tokenizers
            self.library = "tokenizers"

    def parts_of(self, text: str) -> list[str]:
        """Split `text` into special tokens and the parts between them. The token ids of all parts
        in order are those of the whole text. A text that may not be split is the only part.
        """
        if not self.cut:
            return [text]
        return [part for part in self._cuts.split(text) if part]

    def encode(self, part: str) -> bytes:
        """Return the packed token ids of one part that `parts_of` returned."""
        special = self._added.get(part) if self.cut else None
        return packed((special,) if special is not None else self._encode(part))

    def surrounded(self, ids: bytes) -> bytes:
        """Return packed token ids with the special tokens that the tokenizer puts around a prompt
        that is not a chat.
        """
        return self._before + ids + self._after

    def whole(self, text: str) -> bytes:
        """Return the packed token ids of the complete `text`, encoded by the library
        `tokenizers`.
        """
        return packed(self._by_tokenizers(text))

    def _by_tokenizers(self, text: str) -> Sequence[int]:
        # This call computes no offsets and releases Python's lock.
        (encoded,) = self._whole.encode_batch_fast([text], add_special_tokens=False)
        ids: Sequence[int] = encoded.ids
        return ids

    def _or_by_tokenizers(self, faster: Encode) -> Encode:
        """Return an encoder that uses `faster`, and the library `tokenizers` where `faster` fails,
        as it does on very long runs of blanks.
        """

        def encode(text: str) -> Sequence[int]:
            try:
                return faster(text)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # noqa: BLE001  a panic of the library is a BaseException
                return self._by_tokenizers(text)

        return encode

    def _surroundings(self) -> tuple[bytes, bytes]:
        inner = self._by_tokenizers("a")
        outer = self._whole.encode("a", add_special_tokens=True).ids
        for start in range(len(outer) - len(inner) + 1):
            if outer[start : start + len(inner)] == list(inner):
                return packed(outer[:start]), packed(outer[start + len(inner) :])
        raise NoTokenizerError(
            "the tokenizer changes the ids of a text when it adds special tokens around it"
        )

    def _alike(self, faster: Encode, samples: Sequence[str]) -> bool:
        """Return True if `faster` and the library `tokenizers` return the same token ids for
        generated texts without special tokens.
        """
        texts = [part for sample in samples for part in self._cuts.split(sample)[::2] if part]
        try:
            return all(list(faster(text)) == list(self._by_tokenizers(text)) for text in texts)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001  the library cannot run the pattern
            return False

    def _cuts_well(self, samples: Sequence[str]) -> bool:
        self.cut = True
        return all(
            b"".join(map(self.encode, self.parts_of(sample))) == self.whole(sample)
            for sample in samples
        )


def _read(file: Path) -> str:
    if file.stat().st_size > FILE_BYTES_MAX:
        raise NoTokenizerError(f"{file} is larger than {FILE_BYTES_MAX} bytes")
    return file.read_text(encoding="utf-8")


def _may_be_cut(described: dict[str, Any]) -> bool:
    """Return True if no special token of the tokenizer absorbs adjacent blanks or depends on
    adjacent words, so that texts may be split at special tokens.
    """
    strips = ("lstrip", "rstrip", "single_word")
    return not any(added.get(strip) for added in described["added_tokens"] for strip in strips)


def _by_tiktoken(described: dict[str, Any]) -> Encode | None:
    """Return an encoder by `tiktoken` that is expected to return the tokenizer's ids, or None if
    `tiktoken` cannot represent the tokenizer. The caller compares the ids.
    """
    model = described.get("model") or {}
    pattern = _pattern_of(described.get("pre_tokenizer") or {})
    normalizer = described.get("normalizer")
    composed = normalizer is not None and normalizer.get("type") == "NFC"
    if model.get("type") != "BPE" or not pattern or not (normalizer is None or composed):
        return None
    if model.get("byte_fallback") or model.get("dropout") or model.get("end_of_word_suffix"):
        return None
    ranks = _ranks_of(model)
    if ranks is None:
        return None
    try:
        encoding = Encoding("local", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except Exception:  # noqa: BLE001  anything that the library rejects
        return None
    if not composed:
        return encoding.encode_ordinary
    normalize = unicodedata.normalize

    def encode(text: str) -> Sequence[int]:
        return encoding.encode_ordinary(text if text.isascii() else normalize("NFC", text))

    return encode


def _pattern_of(pre_tokenizer: dict[str, Any]) -> str:
    """Return the tokenizer's regular expression that splits text into words before their bytes are
    encoded, or "" for other schemes.
    """
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if len(steps) != 2 or [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return ""
    split, levels = steps
    pattern: str = split.get("pattern", {}).get("Regex", "")
    plain = split.get("behavior") == "Isolated" and not split.get("invert")
    return (
        pattern
        if plain and not levels.get("add_prefix_space") and not levels.get("use_regex")
        else ""
    )


def _ranks_of(model: dict[str, Any]) -> dict[bytes, int] | None:
    """Return the id of each token by the token's bytes, or None if the vocabulary is not one of
    bytes or the ids are not in the order of the tokenizer's merges.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary: dict[str, int] = model["vocab"]
    try:
        ranks = {bytes(byte_of[c] for c in token): number for token, number in vocabulary.items()}
    except KeyError:
        return None
    if not all(bytes([byte]) in ranks for byte in range(_BYTES)):
        return None
    last, made = -1, set[int]()
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merged = vocabulary.get(left + right)
        if merged is None:
            return None
        if merged in made:
            # Several merges may create a token, which has the rank of the first one.
            continue
        if merged < last:
            return None
        last = merged
        made.add(merged)
    return ranks


def byte_characters() -> list[str]:
    """Return the character that represents each byte value in vocabularies of byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(_BYTES)]


_SCRIPTS: Final = (
    "The quick brown fox's 12345 jumps, isn't it? ",
    "def f(x):\n\treturn {'a': [1, 2.5e-3], \"b\": x**2}\n\n",
    "Größe, façade, naïve, Ångström. ",
    "Съешь ещё этих мягких французских булок. ",
    "我能吞下玻璃而不伤身体。こんにちは、世界。안녕하세요 ",
    "مرحبا بالعالم שלום עולם नमस्ते ",
    "🙂👩‍👩‍👧‍👦🇪🇺 e\u0301 ﬁ ½ \u00a0\u2009 ",
    "    \n\n\n\t  \r\n   ....  ----====",
    "user@example.com https://example.com/?q=1&r=%20 #AbCdEf0123456789 ",
)


def _samples(added: Sequence[str]) -> list[str]:
    """Return generated texts in several scripts, with special tokens, to compare tokenizers; they
    are the same in each call.
    """
    dice = Random("tokens")  # noqa: S311  texts for trials, not secrets
    texts: list[str] = []
    for _ in range(TRIALS):
        pieces: list[str] = []
        for _ in range(dice.randrange(1, 8)):
            text = dice.choice(_SCRIPTS) * dice.randrange(1, 3)
            start, end = sorted((dice.randrange(len(text)), dice.randrange(len(text) + 1)))
            pieces.append(text[start:end])
            if added and dice.random() < 0.5:
                pieces.append(dice.choice(added))
        texts.append("".join(pieces))
    return texts
