"""Manage the worker process that tokenizes prompts: start it, send requests to it, and kill it when
it hangs.

The worker answers one request at a time. Other requests wait in a bounded queue of the picker; a
cancelled request is removed from it. A request that is already with the worker continues after a
cancellation: the worker caches its result for the next turn of the conversation.
"""

import asyncio
import sys
import time
from collections import deque
from typing import Final, TypeVar

import msgspec
import structlog

from epp.configuration.token_producer import LocalTokenizers
from epp.core.types import ApiKind, Seconds
from epp.shell.engines.tokens.frames import (
    LENGTH_BYTES,
    Begin,
    Cannot,
    Done,
    Job,
    Load,
    Loaded,
    Ready,
    ToWorker,
    framed,
    from_worker,
    length_of,
)
from epp.shell.engines.tokens.question import (
    PromptTokens,
    Question,
    TokensResult,
    TokensUnknownError,
)

QUEUE_MAX: Final = 64
"""Maximum number of requests that wait for the tokenizer process."""
QUEUE_BYTES_MAX: Final = 16 * 1024 * 1024
JOB_S_MAX: Final[Seconds] = 20.0
"""Time in seconds without an answer after which the tokenizer process is considered hung and
restarted. The slowest input, two megabytes of blanks, takes two seconds of a whole core.
"""
LOAD_S_MAX: Final[Seconds] = 60.0
LOADED_AT_START_MAX: Final = 8
"""Number of tokenizers up to which the tokenizer process loads all when it starts. If there are
more, it loads each when it is first needed, so that its own limit (`LOADED_MAX`, also 8) is not
used up by models that no client requests.
"""
BACKOFF_S: Final[Seconds] = 0.5
BACKOFF_S_MAX: Final[Seconds] = 30.0
MODELS_TOLD_MAX: Final = 256
"""Maximum number of models for which a missing tokenizer is logged. The number is limited because
clients choose the names.
"""
_APIS: Final = frozenset({ApiKind.CHAT, ApiKind.COMPLETIONS, ApiKind.MESSAGES, ApiKind.RESPONSES})
MODULE: Final = "epp.shell.engines.tokens.worker"

_Answer = TypeVar("_Answer", Ready, Loaded, Done)

_log = structlog.get_logger(__name__)


class WorkerHungError(Exception):
    """Raised if the tokenizer process did not answer in time."""


class WorkerCannotError(Exception):
    """Raised if the tokenizer process can never do its work. The message is one sentence."""


class _Waiting:
    __slots__ = ("answered", "job")

    def __init__(self, job: Job, answered: asyncio.Future[Done]) -> None:
        self.job = job
        self.answered = answered


class LocalWorker:
    """The backend `local`, which gets the tokens of prompts from a tokenizer process that it
    manages.
    """

    name = "local"

    def __init__(
        self,
        settings: LocalTokenizers,
        model_name: str,
        *,
        command: tuple[str, ...] = (sys.executable, "-m", MODULE),
        job_s_max: Seconds = JOB_S_MAX,
        backoff_s: Seconds = BACKOFF_S,
    ) -> None:
        """Create the token backend `local`. `model_name` is the model whose tokenizer is used for
        models without one.
        """
        self._begin = Begin(msgspec.json.encode(settings), model_name)
        self._model_name = model_name
        self._command = command
        self._job_s_max = job_s_max
        self._backoff_s = backoff_s
        self._models: dict[str, Loaded | None] = {}
        """Loaded tokenizer of each model with tokenizer files, or None if the current process has
        not loaded it yet or cannot load it.
        """
        self._broken: dict[str, str] = {}
        """Reason why the tokenizer files of a model cannot be used, by model."""
        self._to_load: deque[str] = deque()
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._wakened = asyncio.Event()
        self._ready = False
        self._loading = ""
        self._cannot = ""
        self._told: set[str] = set()
        self.starts = 0
        self.parts_known = 0
        self.parts_new = 0
        self.kept_bytes = 0

    def refuses(self, question: Question) -> TokensResult | None:
        request = question.request
        if not self._cannot and request.api not in _APIS:
            return TokensResult.UNSUPPORTED
        if question.has_media:
            return TokensResult.MEDIA
        if self._cannot or not self._ready:
            return TokensResult.NO_TOKENIZER if self._cannot else TokensResult.LOADING
        without = self._without_tokenizer(request.model)
        if without is not None:
            return without
        full = len(self._queue) >= QUEUE_MAX
        if full or self._queued_bytes + len(question.body) > QUEUE_BYTES_MAX:
            return TokensResult.BUSY
        return None

    def _without_tokenizer(self, asked: str) -> TokensResult | None:
        """Return why the requested model has no usable tokenizer now, or None if it has one.

        For a model with a usable tokenizer, `LOADING` is returned while the tokenizer of any model
        is being loaded or waits to be loaded. If the requested model's tokenizer is not loaded,
        this call requests that. A model without tokenizer is logged once.
        """
        model = self._tokenizer_of(asked)
        if model is None or model in self._broken:
            if model is None:
                self._tell_missing(asked, "has no tokenizer")
            return TokensResult.NO_TOKENIZER
        if self._models[model] is None and model not in {*self._to_load, self._loading}:
            self._to_load.append(model)
            self._wakened.set()
        return TokensResult.LOADING if self._loading or self._to_load else None

    def _tokenizer_of(self, model: str) -> str | None:
        if model in self._models:
            return model
        return self._model_name if self._model_name in self._models else None

    async def find(self, question: Question) -> PromptTokens:
        request = question.request
        model = self._tokenizer_of(request.model)
        assert model is not None, "requests without tokenizer are refused before"
        job = Job(model, request.api, question.body)
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._queued_bytes += len(job.body)
        self._wakened.set()
        try:
            done = await waiting.answered
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._queued_bytes -= len(job.body)
        if done.result != TokensResult.FOUND:
            raise TokensUnknownError(TokensResult(done.result))
        if len(done.ids) < len(request.prompts) or not all(done.ids):
            raise TokensUnknownError(TokensResult.INVALID)
        return PromptTokens(done.ids)

    async def run(self) -> None:
        """Run the tokenizer process until cancelled. When it ends, fail the waiting requests and
        restart it after a delay, unless it answered that it can never return tokens.
        """
        backoff_s = self._backoff_s
        while True:
            began_s = time.monotonic()
            try:
                await self._run_once()
            except WorkerCannotError as error:
                self._cannot = str(error)
                _log.warning(
                    "tokenizer process cannot work, all prompts are measured by their bytes",
                    problem=self._cannot,
                )
            except (OSError, EOFError, msgspec.DecodeError, ValueError, WorkerHungError) as error:
                _log.warning(
                    "tokenizer process ended and is restarted",
                    problem=type(error).__name__,
                    starts=self.starts,
                )
            self._forget_process()
            if self._cannot:
                await asyncio.Event().wait()
            if time.monotonic() - began_s > BACKOFF_S_MAX:
                backoff_s = self._backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _run_once(self) -> None:
        self.starts += 1
        process = await self._started()
        try:
            await self._talk(process)
        finally:
            await _end(process)

    async def _started(self) -> asyncio.subprocess.Process:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Libraries may print parts of a prompt, which must not be logged.
                stderr=asyncio.subprocess.DEVNULL,
                # A separate session keeps Ctrl-C away from the worker; the picker handles it.
                start_new_session=True,
            )
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A process that was started halfway must be ended here.
            await _end(await starting)
            raise

    async def _talk(self, process: asyncio.subprocess.Process) -> None:
        hello = await self._expect(process, self._begin, Ready, LOAD_S_MAX)
        self._models = dict.fromkeys(hello.models)
        if len(self._models) <= LOADED_AT_START_MAX:
            self._to_load.extend(self._models)
        if not self._models:
            self._tell_missing("", "no model has a tokenizer")
        self._ready = True
        while True:
            self._wakened.clear()
            if self._to_load:
                await self._load(process, self._to_load.popleft())
            elif self._queue:
                await self._answer(process, self._queue.popleft())
            elif process.stdout is None or process.stdout.at_eof():
                raise EOFError
            else:
                await self._wakened.wait()

    async def _load(self, process: asyncio.subprocess.Process, model: str) -> None:
        self._loading = model
        loaded = await self._expect(process, Load(model), Loaded, LOAD_S_MAX)
        self._loading = ""
        if loaded.problem:
            self._broken[model] = loaded.problem
            self._tell_missing(model, loaded.problem)
            return
        self._models[model] = loaded
        _log.info(
            "tokenizer loaded",
            model=model,
            library=loaded.library,
            keeps_parts=loaded.cut,
            chat_template=loaded.template,
            seconds=round(loaded.seconds, 1),
        )

    async def _answer(self, process: asyncio.subprocess.Process, waiting: _Waiting) -> None:
        self._queued_bytes -= len(waiting.job.body)
        if waiting.answered.done():
            return
        try:
            done = await self._expect(process, waiting.job, Done, self._job_s_max)
        except BaseException:
            if not waiting.answered.done():
                waiting.answered.set_exception(TokensUnknownError(TokensResult.FAILED))
            raise
        self.parts_known += done.parts_known
        self.parts_new += done.parts_new
        self.kept_bytes = done.kept_bytes
        if not waiting.answered.done():
            waiting.answered.set_result(done)

    async def _expect(
        self,
        process: asyncio.subprocess.Process,
        message: ToWorker,
        kind: type[_Answer],
        timeout_s: Seconds,
    ) -> _Answer:
        """Send `message` to the tokenizer process and return its answer, which must be of the type
        `kind`.

        Raises `WorkerHungError` if there is no answer within `timeout_s` seconds,
        `WorkerCannotError` if the process can never return tokens, and `ValueError` for an answer
        of another type.
        """
        assert process.stdin is not None, "the process has a pipe"
        assert process.stdout is not None, "the process has a pipe"
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(framed(message))
                await process.stdin.drain()
                length = length_of(await process.stdout.readexactly(LENGTH_BYTES))
                answer = from_worker(await process.stdout.readexactly(length))
        except TimeoutError as error:
            raise WorkerHungError from error
        if isinstance(answer, Cannot):
            raise WorkerCannotError(answer.sentence)
        if not isinstance(answer, kind):
            told = type(answer).__name__
            raise ValueError(f"the worker answered with {told}, expected {kind.__name__}")  # noqa: TRY004  the answer is wrong, not the call
        return answer

    def _forget_process(self) -> None:
        self._ready = False
        self._loading = ""
        self._to_load.clear()
        self._models = dict.fromkeys(self._models)
        self._broken.clear()
        self.kept_bytes = 0
        while self._queue:
            waiting = self._queue.popleft()
            if not waiting.answered.done():
                waiting.answered.set_exception(TokensUnknownError(TokensResult.FAILED))
        self._queued_bytes = 0

    def _tell_missing(self, model: str, problem: str) -> None:
        """Log a problem with the tokenizer of `model`, once per model and for at most
        `MODELS_TOLD_MAX` models.
        """
        if model in self._told or len(self._told) >= MODELS_TOLD_MAX:
            return
        self._told.add(model)
        _log.warning(
            "model has no usable tokenizer, its prompts are measured by their bytes",
            model=model,
            problem=problem,
        )

    def rows(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for model, loaded in self._models.items():
            state = "loaded" if loaded else self._broken.get(model, "not loaded")
            if model == self._loading:
                state = "loading"
            rows.append(
                {
                    "model": model,
                    "state": state,
                    "library": loaded.library if loaded else "",
                    "keeps_parts": bool(loaded and loaded.cut),
                    "chat_template": bool(loaded and loaded.template),
                }
            )
        return rows

    def totals(self) -> dict[str, object]:
        """Return the totals of the tokenizer process for the debug page."""
        return {
            "starts": self.starts,
            "waiting": len(self._queue),
            "parts_known": self.parts_known,
            "parts_new": self.parts_new,
            "kept_bytes": self.kept_bytes,
            "problem": self._cannot,
        }

    def close(self) -> None:
        """Fail all requests that are queued for the tokenizer process, and forget which models it
        has loaded. The process and the request that it answers end when `run` is cancelled.
        """
        self._forget_process()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process that tokenizes prompts, and close its pipes."""
    if process.returncode is None:
        process.kill()
    assert process.stdin is not None, "the process has a pipe"
    process.stdin.close()
    await process.communicate()
