"""The process that tokenizes prompts: `python -m epp.shell.engines.tokens.worker`.

It is a separate process because `tokenizers` holds Python's lock while it encodes, and a template
is Python code. The process answers one request at a time, with frames on standard input and output,
and ends when its input ends. It writes nothing else, and in particular nothing of a prompt.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from epp.configuration.token_producer import LocalTokenizers
from epp.core.prompt.token_ids import packed
from epp.core.types import ApiKind
from epp.shell.engines.tokens import frames
from epp.shell.engines.tokens.chat_bodies import UnknownChatError, as_chat
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.segments import SegmentCache
from epp.shell.engines.tokens.tokenizer_files import files_of, read_config

PROMPTS_MAX: Final = 2_048
"""Maximum number of prompts per request that are tokenized; the picker has the same limit."""
LOADED_MAX: Final = 8
"""Maximum number of loaded tokenizers; one takes about 100 MB of memory."""
NICE: Final = 5
"""Niceness of the tokenizer process, so that the picker takes precedence on a shared processor."""
NEEDED: Final = (
    "the local tokenizer backend needs the extra `tokens`: pip install homing-epp[tokens]"
)

_decode_body = msgspec.json.Decoder(dict[str, Any]).decode


class _Model:
    def __init__(self, file: Path, settings: LocalTokenizers) -> None:
        # These imports happen here because the picker itself does not need them.
        from epp.shell.engines.tokens.chat_template import ChatTemplate  # noqa: PLC0415
        from epp.shell.engines.tokens.encoders import TextEncoder  # noqa: PLC0415

        self.encoder = TextEncoder(file)
        config = read_config(file.parent)

        def template(*, tools: bool) -> ChatTemplate | None:
            source = config.template(tools=tools)
            if not source:
                return None
            return ChatTemplate(
                source,
                config.special,
                settings.chat_template_content_format,
                settings.chat_template_kwargs,
            )

        self.template = template(tools=False)
        self.tool_template = template(tools=True)


class Worker:
    """The logic of the tokenizer process. It answers one message at a time, and also answers if it
    fails.
    """

    def __init__(self) -> None:
        self._settings: LocalTokenizers | None = None
        self._files: dict[str, Path] = {}
        self._models: dict[str, _Model] = {}
        self._cache = SegmentCache()

    def answer(self, message: frames.ToWorker) -> frames.FromWorker:
        match message:
            case frames.Begin():
                return self._begin(message)
            case frames.Load(model=model):
                return self._load(model)
            case frames.Job():
                return self._job(message)

    def _begin(self, message: frames.Begin) -> frames.FromWorker:
        try:
            import jinja2  # noqa: F401, PLC0415
            import tiktoken  # noqa: F401, PLC0415
            import tokenizers  # noqa: F401, PLC0415
        except ImportError:
            return frames.Cannot(NEEDED)
        self._settings = msgspec.json.decode(message.settings, type=LocalTokenizers)
        self._files = files_of(self._settings)
        return frames.Ready(tuple(self._files))

    def _load(self, model: str) -> frames.Loaded:
        assert self._settings is not None, "Begin must come first"
        began_s = time.monotonic()
        file = self._files.get(model)
        if file is None:
            return frames.Loaded(model, "no tokenizer has this name")
        if len(self._models) >= LOADED_MAX and model not in self._models:
            return frames.Loaded(model, f"{LOADED_MAX} tokenizers are loaded, which is the maximum")
        try:
            known = self._models[model] = _Model(file, self._settings)
        except Exception as error:  # noqa: BLE001  untrusted files, read by two libraries
            return frames.Loaded(model, f"{file} cannot be used: {_said(error)}")
        return frames.Loaded(
            model,
            "",
            known.encoder.library,
            known.encoder.cut,
            known.template is not None,
            time.monotonic() - began_s,
        )

    def _job(self, job: frames.Job) -> frames.Done:
        cache = self._cache
        known, new = cache.hits, cache.misses
        try:
            ids, result = self._ids_of(job), TokensResult.FOUND
        except _RefusedError as refused:
            ids, result = (), refused.result
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001  anything that a prompt may cause in two libraries and a template
            ids, result = (), TokensResult.FAILED
        told = cache.hits - known, cache.misses - new, cache.held_bytes
        return frames.Done(ids, result.value, *told)

    def _ids_of(self, job: frames.Job) -> tuple[bytes, ...]:
        model = self._models.get(job.model)
        if model is None:
            raise _RefusedError(TokensResult.NO_TOKENIZER)
        body = _decode_body(job.body)
        if body.get("truncate_prompt_tokens") is not None:
            raise _RefusedError(TokensResult.UNSUPPORTED)
        if job.api is ApiKind.COMPLETIONS:
            given = body.get("prompt")
            prompts = given if isinstance(given, list) else [given]
            around = body.get("add_special_tokens", True) is not False
            return tuple(
                self._text_ids(job.model, model, prompt, around=around)
                for prompt in prompts[:PROMPTS_MAX]
            )
        from epp.shell.engines.tokens.chat_template import NotRenderedError  # noqa: PLC0415

        try:
            body = as_chat(job.api, body)
        except UnknownChatError as error:
            raise _RefusedError(TokensResult.UNSUPPORTED) from error
        template = model.tool_template if body.get("tools") else model.template
        if template is None:
            raise _RefusedError(TokensResult.UNSUPPORTED)
        try:
            text = template.render(body)
        except NotRenderedError as error:
            raise _RefusedError(TokensResult.REFUSED) from error
        around = body.get("add_special_tokens") is True
        ids = self._text_ids(job.model, model, text, around=around)
        if job.api is ApiKind.RESPONSES and model.encoder.surrounded(ids) != ids:
            # vLLM adds the special tokens of a tokenizer once more, depending on the release.
            raise _RefusedError(TokensResult.UNSUPPORTED)
        return (ids,)

    def _text_ids(self, name: str, model: _Model, text: Any, *, around: bool) -> bytes:
        if isinstance(text, list):
            return packed(text)
        if not isinstance(text, str):
            raise _RefusedError(TokensResult.UNSUPPORTED)
        ids = self._cache.ids_of(name, model.encoder, text)
        return model.encoder.surrounded(ids) if around else ids


class _RefusedError(Exception):
    """Raised if the tokenizer process cannot return the tokens of a request; `result` is the
    reason.
    """

    def __init__(self, result: TokensResult) -> None:
        super().__init__(result.value)
        self.result = result


def _said(error: Exception) -> str:
    """Return the text of an error that the picker's code raised, but only the type of another
    error, which may quote a file.
    """
    ours = type(error).__module__.startswith("epp.")
    return str(error) if ours else type(error).__name__


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Read requests from `source` and write the answers to `sink`, until `source` ends."""
    worker = Worker()
    while True:
        head = source.read(frames.LENGTH_BYTES)
        if len(head) < frames.LENGTH_BYTES:
            return
        length = frames.length_of(head)
        frame = source.read(length)
        if len(frame) < length:
            return
        sink.write(frames.framed(worker.answer(frames.to_worker(frame))))
        sink.flush()


def main() -> None:
    # Threads of the library would take processors from the picker.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    # Nothing is loaded from the hub, and this makes it impossible.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.nice(NICE)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)


if __name__ == "__main__":
    main()
