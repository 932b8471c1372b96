"""Cost of converting prompts to token ids: `python -m bench tokens`.

The rows are: the conversion of texts by each library, and by the backend `local` as a request sees
it; a growing conversation with and without remembered parts; and the time for which the event loop
stops while a long prompt is converted, in a thread and in another process. The tokenizers are those
of `make tokenizers`; without them, the only row says so.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from bench.timing import best_us
from epp.configuration.token_producer import LocalTokenizers
from epp.core.prompt.parse import parse_request
from epp.core.types import Refusal
from epp.shell.engines.tokens.answers import ids_of, pieces_of, rendered_prompts
from epp.shell.engines.tokens.encoders import TextEncoder
from epp.shell.engines.tokens.local import LocalWorker
from epp.shell.engines.tokens.question import Question
from epp.shell.engines.tokens.segments import SegmentCache

FOLDER: Final = Path(
    os.environ.get("HOMING_TOKENIZERS") or Path.home() / ".cache/homing/tokenizers"
)
MODELS: Final = ("llama-3.1", "qwen3")
SIZES_KB: Final = (1, 8, 64, 200)
TEXT: Final = Path("docs/configuration.md")
BATCHES: Final = 10
TURNS: Final = 40
LONG_KB: Final = 200
TRIALS: Final = 5


def run() -> Iterator[tuple[str, str]]:
    found = [model for model in MODELS if (FOLDER / model / "tokenizer.json").is_file()]
    if not found:
        yield f"no tokenizers in {FOLDER}: `make tokenizers` gets them", "-"
        return
    text = TEXT.read_text(encoding="utf-8") * 5
    for model in found:
        encoder = TextEncoder(FOLDER / model / "tokenizer.json")
        for size_kb in SIZES_KB:
            part = text[: size_kb * 1024]
            for library, encode in (
                (encoder.library, encoder.encode),
                ("tokenizers", encoder.whole),
            ):
                taken_us = best_us(encode, lambda part=part: [part], batches=BATCHES)
                yield f"{model}, {size_kb} KB, {library}", f"{taken_us / size_kb:7.0f} µs a KB"
        yield from _conversation(model, encoder, text)
        yield from asyncio.run(_backend(model, text))
    yield from _answers()
    yield from asyncio.run(_loop_held(found[0], text))


def _conversation(model: str, encoder: TextEncoder, text: str) -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) for the last turn of a conversation of `TURNS` KB, with and
    without remembered parts.
    """
    turns = [text[at * 1024 : (at + 1) * 1024] for at in range(TURNS)]
    cut = "<|eot_id|>" if "llama" in model else "<|im_end|>"
    before, whole = cut.join(turns[:-1]), cut.join(turns)

    def warm() -> list[SegmentCache]:
        cache = SegmentCache()
        cache.ids_of(model, encoder, before)
        return [cache]

    for what, made in (("anew", lambda: [SegmentCache()]), ("from what is kept", warm)):
        taken_us = best_us(lambda cache: cache.ids_of(model, encoder, whole), made, batches=BATCHES)
        yield f"{model}, a chat of {TURNS} KB, {what}", f"{taken_us / 1000:7.2f} ms"


@asynccontextmanager
async def _local(model: str) -> AsyncIterator[LocalWorker]:
    """Run the backend `local`, whose process has loaded the tokenizer of `model`, during the
    context.
    """
    worker = LocalWorker(LocalTokenizers(model_tokenizer_map={model: str(FOLDER / model)}), "")
    running = asyncio.create_task(worker.run())
    while worker.refuses(_question(model, "")) is not None:  # noqa: ASYNC110  it tells nobody
        await asyncio.sleep(0.05)
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _question(model: str, text: str) -> Question:
    content = {"role": "user", "content": text}
    body = json.dumps({"model": model, "messages": [content]}).encode()
    parsed = parse_request(path="/v1/chat/completions", headers={}, body=body, request_id="")
    assert not isinstance(parsed, Refusal), "it is a chat"
    return Question(parsed.request, parsed.body)


async def _backend(model: str, text: str) -> list[tuple[str, str]]:
    """Return rows (what, how much) for the wait of a request with a new text: pipe, JSON, template
    and token ids.
    """
    rows: list[tuple[str, str]] = []
    async with _local(model) as worker:
        for size_kb in SIZES_KB:
            taken_s: list[float] = []
            for number in range(BATCHES):
                question = _question(model, text[number : number + size_kb * 1024])
                began = time.perf_counter()
                await worker.find(question)
                taken_s.append(time.perf_counter() - began)
            each_us = min(taken_s) * 1e6 / size_kb
            rows.append((f"{model}, {size_kb} KB, by `local`", f"{each_us:7.0f} µs a KB"))
    return rows


def _answers() -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) for reading a renderer's answer on the event loop."""
    answer = json.dumps({"token_ids": list(range(100_000, 200_000))}).encode()
    (prompt,) = rendered_prompts(answer, 1)
    taken_us = best_us(lambda whole: rendered_prompts(whole, 1), lambda: [answer], batches=BATCHES)
    yield "an answer of 100,000 ids: its members, at once", f"{taken_us / 1000:7.2f} ms"
    taken_us = best_us(ids_of, lambda: list(pieces_of(prompt.ids)), batches=BATCHES)
    yield "and each piece of its ids", f"{taken_us / 1000:7.2f} ms"


async def _loop_held(model: str, text: str) -> list[tuple[str, str]]:
    """Return rows (what, how much) with the time for which the event loop stopped while `LONG_KB`
    of text became token ids.

    Each is the best of `TRIALS` trials.
    """
    encoder = TextEncoder(FOLDER / model / "tokenizer.json")
    loop = asyncio.get_running_loop()
    rows: list[tuple[str, str]] = []

    def part(number: int) -> str:
        return text[number : number + LONG_KB * 1024]

    async def in_a_thread(number: int) -> None:
        await loop.run_in_executor(None, encoder.whole, part(number))

    async def in_a_thread_faster(number: int) -> None:
        await loop.run_in_executor(None, encoder.encode, part(number))

    async def in_the_process(_: int) -> None:
        await worker.find(next(questions))

    questions = iter([_question(model, part(number)) for number in range(TRIALS)])
    ways: tuple[tuple[str, Callable[[int], Awaitable[None]]], ...] = (
        ("in a thread, by tokenizers", in_a_thread),
        (f"in a thread, by {encoder.library}", in_a_thread_faster),
        ("in the process, template and JSON included", in_the_process),
    )
    async with _local(model) as worker:
        for way, make in ways:
            held = [await _held_s(make, number) for number in range(TRIALS)]
            longest, taken = min(held)
            rows.append(
                (
                    f"{model}, {LONG_KB} KB {way}: the loop stands still for",
                    f"{longest * 1000:7.2f} ms of {taken * 1000:.0f}",
                )
            )
    return rows


async def _held_s(make: Callable[[int], Awaitable[None]], number: int) -> tuple[float, float]:
    """Run `make(number)`. Return the longest time in seconds between two turns of the event loop
    meanwhile, and the whole duration in seconds.
    """
    longest = 0.0
    ended = False

    async def turns() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not ended:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now

    ticking = asyncio.create_task(turns())
    began = time.perf_counter()
    await make(number)
    taken = time.perf_counter() - began
    ended = True
    await ticking
    return longest, taken
