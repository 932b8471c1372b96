"""Cost of reading a chat's request body: decoding and conversion to canonical bytes, without
hashing.
"""

import json
from collections.abc import Callable
from time import perf_counter

from epp.core.prompt.parse import Parsed, parse_request

_MESSAGE = (
    'The quick brown fox jumps over the lazy dog; it says: "again".\nAnd so on, and on. ' * 19
)
_SIZES = ((1_900, 1), (8_000, 5), (34_000, 21), (272_000, 174), (450_000, 288))
"""Sizes of the chats: bytes of the body, and number of messages; the first message is the system
prompt.
"""


def chat_body(size_bytes: int, messages: int) -> bytes:
    """Return the request body of a chat of about `size_bytes`, with alternating roles."""
    text = (_MESSAGE * 2)[: size_bytes // messages - 60]
    roles = ("system", *("user", "assistant") * messages)
    conversation = [{"role": role, "content": text} for role in roles[:messages]]
    return json.dumps({"model": "llama", "messages": conversation, "stream": True}).encode()


def best_us(work: Callable[[], object], *, rounds: int = 100, budget_s: float = 0.2) -> float:
    """Return the wall-clock microseconds of one call of `work`: the lowest mean of `rounds` rounds,
    each about `budget_s` / `rounds` long.
    """
    started = perf_counter()
    work()
    calls = max(1, int(budget_s / rounds / (perf_counter() - started + 1e-9)))
    best_s = float("inf")
    for _ in range(rounds):
        started = perf_counter()
        for _ in range(calls):
            work()
        best_s = min(best_s, (perf_counter() - started) / calls)
    return best_s * 1e6


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much) with the time of reading a chat's body."""
    rows = []
    for size_bytes, messages in _SIZES:
        body = chat_body(size_bytes, messages)

        def parse(body: bytes = body, rewrite: str = "") -> Parsed:
            parsed = parse_request(
                path="/v1/chat/completions",
                headers={},
                body=body,
                request_id="bench",
                model_rewrite=rewrite,
            )
            assert isinstance(parsed, Parsed), parsed
            return parsed

        label = f"{len(body) / 1000:.1f} KB chat, {messages} messages"
        rows.append((f"parse {label}", f"{best_us(parse):.1f} µs"))
        rewriting = best_us(lambda parse=parse: parse(rewrite="adapter"))
        rows.append((f"parse {label}, model rewritten", f"{rewriting:.1f} µs"))
    return rows


if __name__ == "__main__":
    for what, cost in run():
        print(f"{what:60} {cost:>12}")
