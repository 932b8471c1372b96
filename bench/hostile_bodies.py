"""Maximum cost of a hostile request body for the event loop, from its last byte to the decision.

Each attack repeats one piece. A flood of too many pieces is refused; the most pieces that are
accepted, in a body of the same length, then cost more than the flood. The garbage collector runs as
in `epp serve`, and its time is included. Peak memory is the memory allocated in addition to the
body itself.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from bench.decision import Chats, Pool, Silent
from epp.core.prompt.parse import Parsed, parse_request
from epp.core.protocol.messages import BodyMode, BodyModes, RequestBody, RequestHeaders
from epp.core.protocol.session import Gateway, Session, SessionSettings
from epp.shell.process.garbage import GARBAGE_THRESHOLDS

MB: Final = 1_000_000
SIZES: Final = ((1 * MB, 5), (32 * MB, 1))
"""Bytes of a hostile body, and how often it is measured; the larger is about the default limit of
`epp serve`.
"""
_WITHIN: Final = 0.05
"""Relative precision of the search for the largest number of pieces that the picker accepts."""

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_RESPONSES, _MESSAGES, _GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
_DIGITS: Final = b"7" * 4_000

_SAID = b'{"model":"m","messages":[{"role":"u"}],'
_CONTENT, _CONTENT_END = b'{"model":"m","messages":[{"role":"u","content":[', b"]}]}"
_BLOCK, _BLOCK_END = _CONTENT + b'{"type":"x","y":[', b"]}]}]}"
_TEXT, _TEXT_END = b'{"model":"m","messages":[{"role":"u","content":"', b'"}]}'
_LIST, _LIST_END = b'{"model":"m","messages":[', b"]}"
_PROMPT, _INPUT = b'{"model":"m","prompt":[', b'{"model":"m","input":['


class Attack(NamedTuple):
    """A hostile body of `head`, any number of pieces, and `tail`, which closes the object that
    `head` opens.
    """

    name: str
    path: str
    head: bytes
    piece: bytes | Callable[[int], bytes]
    """The repeated piece of the body, or a function that returns it for its number."""
    tail: bytes
    between: bytes = b","
    rewritten: bool = False
    """True if the picker replaces the model name in the body by another one."""

    def pieces_max(self, size_bytes: int) -> int:
        """Return how many of the attack's pieces fit into a body of `size_bytes`, at least 1."""
        piece = self.piece if isinstance(self.piece, bytes) else self.piece(1_000_000)
        room = size_bytes - len(self.head) - len(self.tail)
        return max(1, room // (len(piece) + len(self.between)))

    def body(self, size_bytes: int, count: int) -> bytes:
        """Return a body of about `size_bytes` with `count` pieces; a long text fills what they
        leave.
        """
        piece = self.piece
        pieces = [piece] * count if isinstance(piece, bytes) else map(piece, range(count))
        body = self.head + self.between.join(pieces) + self.tail
        left = size_bytes - len(body) - len(b',"x":""')
        return body[:-1] + b',"x":"' + b"x" * left + b'"}' if left > 0 else body


def _numbered(form: bytes) -> Callable[[int], bytes]:
    return lambda number: form % number


def _new_prompt(number: int) -> bytes:
    """Return the JSON of a prompt with one block of token ids that no other number gives."""
    return b"[" + b",".join(b"%d" % digit for digit in map(int, f"{number:064}")) + b"]"


ATTACKS: Final = (
    # The model.
    Attack("`model` again and again", _CHAT, _SAID, b'"model":"m"', b"}"),
    Attack("`model` again, rewritten", _CHAT, _SAID, b'"model":"m"', b"}", rewritten=True),
    Attack(
        "`model` in objects of an unknown member, rewritten",
        *(_CHAT, _SAID + b'"y":[', b'{"model":"m"}', b"]}"),
        rewritten=True,
    ),
    Attack(
        "`model` in a text, rewritten",
        *(_CHAT, _TEXT, rb"\"model\":\"m\"", _TEXT_END),
        rewritten=True,
    ),
    Attack("escaped quotes, rewritten", _CHAT, _TEXT, rb"\"", _TEXT_END, b"", rewritten=True),
    # Values that are decoded unchanged.
    Attack("arrays in arrays, 400 deep", _CHAT, _BLOCK, b"[" * 400 + b"]" * 400, _BLOCK_END),
    Attack("empty arrays in a block", _CHAT, _BLOCK, b"[]", _BLOCK_END),
    Attack("objects in a block", _CHAT, _BLOCK, b'{"a":{"a":{}}}', _BLOCK_END),
    Attack("strings in a block", _CHAT, _BLOCK, b'"ab"', _BLOCK_END),
    Attack("names in a block", _CHAT, _CONTENT + b"{", _numbered(b'"%d":1'), b"}" + _CONTENT_END),
    Attack("digits in a block", _CHAT, _BLOCK, b"1", _BLOCK_END),
    Attack("integers of 21 digits in a block", _CHAT, _BLOCK, b"7" * 21, _BLOCK_END),
    Attack("integers of 250 digits in a block", _CHAT, _BLOCK, b"7" * 250, _BLOCK_END),
    Attack("integers of 4,000 digits in a block", _CHAT, _BLOCK, _DIGITS, _BLOCK_END),
    Attack("fractions in a block", _CHAT, _BLOCK, b"0.1", _BLOCK_END),
    Attack("1e300 in a block", _CHAT, _BLOCK, b"1e300", _BLOCK_END),
    Attack("5e-324 in a block", _CHAT, _BLOCK, b"5e-324", _BLOCK_END),
    Attack("fractions of 30 digits in a block", _CHAT, _BLOCK, b"0." + b"7" * 30, _BLOCK_END),
    Attack("fractions of 250 digits in a block", _CHAT, _BLOCK, b"0." + b"7" * 250, _BLOCK_END),
    Attack(
        "objects as arguments of a call",
        _CHAT,
        _LIST + b'{"role":"u","tool_calls":[{"function":{"name":"f","arguments":[',
        b"{}",
        b"]}}]}" + _LIST_END,
    ),
    Attack(
        "objects in a media part",
        *(_CHAT, _CONTENT + b'{"type":"image_url","image_url":{', _numbered(b'"%d":{}')),
        b"}}" + _CONTENT_END,
    ),
    # Values that are written field by field.
    Attack("messages", _CHAT, _LIST, b'{"role":"","content":""}', _LIST_END),
    Attack("messages without content", _CHAT, _LIST, b'{"role":""}', _LIST_END),
    Attack("messages of one part", _CHAT, _LIST, b'{"role":"","content":[1]}', _LIST_END),
    Attack("messages with a call", _CHAT, _LIST, b'{"role":"","tool_calls":[{}]}', _LIST_END),
    Attack("messages with audio", _CHAT, _LIST, b'{"role":"","audio":{"a":1}}', _LIST_END),
    Attack(
        "messages with names",
        *(_CHAT, _LIST, b'{"role":"","name":"","refusal":"","reasoning":""}', _LIST_END),
    ),
    Attack("texts as parts", _CHAT, _CONTENT, b'""', _CONTENT_END),
    Attack("digits as parts", _CHAT, _CONTENT, b"1", _CONTENT_END),
    Attack("empty objects as parts", _CHAT, _CONTENT, b"{}", _CONTENT_END),
    Attack("text parts", _CHAT, _CONTENT, b'{"type":"text","text":""}', _CONTENT_END),
    Attack("unknown parts", _CHAT, _CONTENT, b'{"type":"x","y":1}', _CONTENT_END),
    Attack(
        "image parts",
        *(_CHAT, _CONTENT, b'{"type":"image_url","image_url":{"url":""}}', _CONTENT_END),
    ),
    Attack(
        "`messages` again and again",
        *(_CHAT, b'{"model":"m",', b'"messages":[{"role":""}]', b"}"),
    ),
    Attack("Responses items", _RESPONSES, _INPUT, b"{}", b"]}"),
    Attack("Responses messages", _RESPONSES, _INPUT, b'{"role":"","content":""}', b"]}"),
    Attack("Responses calls", _RESPONSES, _INPUT, b'{"type":"function_call","name":""}', b"]}"),
    Attack("Anthropic calls", _MESSAGES, _CONTENT, b'{"type":"tool_use","name":""}', _CONTENT_END),
    Attack("Anthropic results", _MESSAGES, _CONTENT, b'{"type":"tool_result"}', _CONTENT_END),
    Attack(
        "texts as Anthropic system prompt",
        *(_MESSAGES, _SAID + b'"system":[', b'""', b"]}"),
    ),
    # Values that are skipped, or kept unchanged.
    Attack("an object as `max_tokens`", _CHAT, _SAID + b'"max_tokens":[', b"{}", b"]}"),
    Attack("arrays as `stream`", _CHAT, _SAID + b'"stream":[', b"[]", b"]}"),
    Attack("4,000 digits as `max_tokens`", _CHAT, _SAID, b'"max_tokens":' + _DIGITS, b"}"),
    Attack("arrays in an unknown member", _CHAT, _SAID + b'"y":[', b"[]", b"]}"),
    Attack("unknown members", _CHAT, _SAID, b'"a":1', b"}"),
    Attack("tools", _CHAT, _SAID + b'"tools":[', b'{"a":1}', b"]}"),
    Attack("`input` again and again, without a path", "", _SAID, b'"input":1', b"}"),
    # Texts.
    Attack("escaped quotes", _CHAT, _TEXT, rb"\"", _TEXT_END, b""),
    Attack("backslashes", _CHAT, _TEXT, rb"\\", _TEXT_END, b""),
    Attack("escaped letters", _CHAT, _TEXT, rb"\u00e9", _TEXT_END, b""),
    Attack("escaped surrogates", _CHAT, _TEXT, rb"\ud83d\ude00", _TEXT_END, b""),
    Attack("brackets and commas in a text", _CHAT, _TEXT, b"[0.1,", _TEXT_END, b""),
    # Prompts.
    Attack("digits as token ids", _COMPLETIONS, _PROMPT, b"1", b"]}"),
    Attack("token ids", _COMPLETIONS, _PROMPT, b"12345", b"]}"),
    Attack("token ids of vLLM", _GENERATE, b'{"token_ids":[', b"257", b"]}"),
    Attack("empty prompts", _COMPLETIONS, _PROMPT, b'""', b"]}"),
    Attack("prompts of one id", _COMPLETIONS, _PROMPT, b"[1]", b"]}"),
    Attack("prompts of one block of ids", _COMPLETIONS, _PROMPT, _new_prompt, b"]}"),
    Attack("prompts of one block", _COMPLETIONS, _PROMPT, _numbered(b'"%0260d"'), b"]}"),
)


def is_let_in(attack: Attack, body: bytes) -> bool:
    """Return True if the picker's parser accepts the hostile body, False if it refuses it."""
    parsed = parse_request(
        path=attack.path,
        headers={},
        body=body,
        request_id="bench",
        model_rewrite="other" if attack.rewritten else "",
    )
    return isinstance(parsed, Parsed)


def most_let_in(attack: Attack, size_bytes: int) -> tuple[int, bytes]:
    """Return about the largest accepted number of pieces in a body of `size_bytes`, and that body;
    the number is 0 if no body is accepted.
    """
    most, body = 0, b""
    refused = attack.pieces_max(size_bytes) + 1
    tried = refused - 1
    while refused - most > _WITHIN * refused and tried > most:
        of_tried = attack.body(size_bytes, tried)
        if is_let_in(attack, of_tried):
            most, body = tried, of_tried
        else:
            refused = tried
        tried = (most + refused) // 2
    return most, body


@contextmanager
def serving_garbage_collector() -> Iterator[None]:
    """Run the context with the garbage collector as in `epp serve`: its thresholds, and almost no
    earlier objects.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Loop:
    """A player of hostile bodies, one ext_proc stream after the other, against one scheduler and
    its endpoints.
    """

    def __init__(self) -> None:
        self._pool = Pool(8)

    def serve(self, attack: Attack, body: bytes) -> float:
        """Return the CPU seconds that `body` costs, from its last byte to the answers."""
        settings = SessionSettings(rewrite=lambda _: "other" if attack.rewritten else None)
        session = Session(self._pool.scheduler, settings, Gateway(), Silent(), lambda: "id")
        self._pool.scrape()
        modes = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
        headers = RequestHeaders({":path": attack.path}, end_of_stream=False, modes=modes)
        session.receive(headers, self._pool.now)
        event = RequestBody(body, end_of_stream=True)
        started = time.thread_time()
        session.receive(event, self._pool.now)
        elapsed_s = time.thread_time() - started
        session.closed(self._pool.now)
        return elapsed_s

    def best_s(self, attack: Attack, body: bytes, repetitions: int) -> float:
        """Return the lowest CPU seconds of `body` in `repetitions` measurements."""
        with serving_garbage_collector():
            return min(self.serve(attack, body) for _ in range(repetitions))

    def peak_bytes(self, attack: Attack, body: bytes) -> int:
        """Return the maximum bytes of memory allocated while the picker processes `body`."""
        tracemalloc.start()
        try:
            self.serve(attack, body)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def run() -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) with the CPU time and memory that each attack costs."""
    loop = Loop()
    ordinary = Attack("an ordinary chat", _CHAT, b"", b"", b"")

    def figure(attack: Attack, body: bytes, repetitions: int) -> str:
        per_mb = loop.best_s(attack, body, repetitions) * 1_000 / (len(body) / MB)
        peak = loop.peak_bytes(attack, body) / MB
        return f"{per_mb:.1f} ms/MB, peak {peak:.0f} MB"

    for size_bytes, repetitions in SIZES:
        size = f"{size_bytes // MB} MB"
        body = Chats(size_bytes, 600 * size_bytes // MB).body()
        yield f"{ordinary.name}, {size}", figure(ordinary, body, repetitions)
        for attack in ATTACKS:
            count, body = most_let_in(attack, size_bytes)
            flood = attack.pieces_max(size_bytes)
            if count < flood:
                refused = attack.body(size_bytes, flood)
                what = f"{attack.name}, {size} of it, refused"
                yield what, figure(attack, refused, repetitions)
            if count:
                yield f"{attack.name}, {count:,} in {size}", figure(attack, body, repetitions)
