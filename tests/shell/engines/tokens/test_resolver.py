"""Requests that wait for their tokens: none waits for long, and each goes on once."""

import asyncio

import pytest
import structlog

from epp.core.moment import PlacedMedia
from epp.core.prompt.parse import parse_request
from epp.core.prompt.token_ids import packed
from epp.shell.engines.tokens.breaker import FAILURES_MAX, OPEN_S
from epp.shell.engines.tokens.question import PromptTokens, TokensResult, TokensUnknownError
from epp.shell.engines.tokens.resolver import BODY_BYTES_MAX, WAITING_MAX, TokenResolver

BODY = b'{"model":"m","messages":[{"role":"user","content":"a secret"}]}'
IMAGE = b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,%b"}}]}]}'  # fmt: skip
IDS = (packed([1, 2, 3]),)
CAT = ((PlacedMedia("cat", 1, 2),),)


def asked(body=BODY, path="/v1/chat/completions"):
    parsed = parse_request(path=path, headers={":path": path}, body=body, request_id="r")
    return parsed.request, parsed.body


class Backend:
    """Answers as it is told, when it is told."""

    name = "vllm"

    def __init__(self):
        self.refusal = None
        self.questions = []
        self.answers = asyncio.Queue()
        self.cancelled = 0

    def refuses(self, question):
        return self.refusal

    async def find(self, question):
        self.questions.append(question)
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, PromptTokens) else PromptTokens(answer)

    def close(self):
        pass


class Told:
    def __init__(self):
        self.results = []

    def tokens_asked(self, backend, result, waited_s, tokens):
        self.results.append((backend, result, tokens))


class Rig:
    def __init__(self, timeout_s=30.0):
        self.now = 0.0
        self.backend = Backend()
        self.told = Told()
        self.resumed = []
        self.resolver = TokenResolver(self.backend, timeout_s, self.told, lambda: self.now)

    def begin(self, *, body=BODY, path="/v1/chat/completions"):
        return self.resolver.begin(*asked(body, path), self.resumed.append)

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def results(self):
        return [result for _, result, _ in self.told.results]


@pytest.fixture
def rig():
    return Rig()


async def test_a_request_goes_on_with_its_tokens(rig):
    """All else of it is as it came."""
    wait = rig.begin()
    assert wait is not None
    assert rig.resumed == []
    rig.backend.answers.put_nowait(IDS)
    await rig.settle()
    (request,) = rig.resumed
    assert request.token_ids == IDS
    assert request.prompts == asked()[0].prompts
    assert rig.told.results == [("vllm", TokensResult.FOUND, 3)]
    assert rig.resolver.waiting == 0
    wait.cancel()
    assert len(rig.told.results) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model":"m","prompt":[1,2,3]}'),
        ("/inference/v1/generate", b'{"model":"m","token_ids":[1]}'),
        ("/v1/models", b""),
        ("/v1/audio/speech", b"{}"),
    ],
)
async def test_who_has_ids_or_no_text_is_not_asked_about(rig, path, body):
    """Nor counted: there is nothing to find out."""
    assert rig.begin(path=path, body=body) is None
    assert rig.told.results == []


async def test_a_body_that_was_not_seen_is_not_asked_about(rig):
    """Nothing is known of the prompt."""
    request, _ = asked()
    assert rig.resolver.begin(request, b"", rig.resumed.append) is None


async def test_a_request_with_media_goes_on_with_what_they_are(rig):
    """Their ids alone would say nothing of them."""
    rig.begin(body=IMAGE % b"A")
    assert rig.backend.questions == []
    await rig.settle()
    assert rig.backend.questions[0].has_media
    rig.backend.answers.put_nowait(PromptTokens(IDS, CAT))
    await rig.settle()
    (request,) = rig.resumed
    assert (request.token_ids, request.moment.token_media) == (IDS, CAT)


async def test_a_very_long_prompt_is_not_asked_about(rig):
    """What it costs others is more than it is worth."""
    body = BODY.replace(b"secret", b"x" * BODY_BYTES_MAX)
    assert rig.begin(body=body) is None
    assert rig.results == [TokensResult.TOO_LONG]


async def test_what_the_backend_knows_before_costs_no_wait(rig):
    """It is counted all the same."""
    rig.backend.refusal = TokensResult.NO_TOKENIZER
    assert rig.begin() is None
    assert rig.results == [TokensResult.NO_TOKENIZER]


async def test_a_backend_that_fails_before_it_is_asked_costs_tokens(rig):
    """The request is placed by its bytes."""
    rig.backend.refuses = lambda question: 1 / 0
    with structlog.testing.capture_logs() as logs:
        assert rig.begin() is None
    assert rig.results == [TokensResult.DEFECT]
    assert len(logs) == 1


async def test_after_the_deadline_bytes_count():
    """The question is taken back, as one that was too slow."""
    rig = Rig(timeout_s=0.0)
    rig.begin()
    await rig.settle()
    (request,) = rig.resumed
    assert request.token_ids == ()
    assert rig.results == [TokensResult.TIMEOUT]
    assert rig.resolver.waiting == 0
    assert all(question.expired for question in rig.backend.questions)


async def test_a_client_that_leaves_is_not_waited_for(rig):
    """Nor counted, and its question is taken back."""
    wait = rig.begin()
    await rig.settle()
    wait.cancel()
    wait.cancel()
    await rig.settle()
    assert (rig.resumed, rig.told.results, rig.resolver.waiting) == ([], [], 0)
    assert rig.backend.cancelled == 1
    assert not rig.backend.questions[0].expired


@pytest.mark.parametrize(
    ("problem", "result"),
    [
        (TokensUnknownError(TokensResult.REFUSED), TokensResult.REFUSED),
        (RuntimeError("a secret"), TokensResult.DEFECT),
        (asyncio.CancelledError(), TokensResult.DEFECT),
    ],
)
async def test_whatever_fails_the_request_goes_on(rig, problem, result):
    """By its bytes; and nothing of it is logged."""
    with structlog.testing.capture_logs() as logs:
        rig.begin()
        rig.backend.answers.put_nowait(problem)
        await rig.settle()
    assert [request.token_ids for request in rig.resumed] == [()]
    assert rig.results == [result]
    assert all("secret" not in line["event"] for line in logs)


async def test_so_many_wait_and_no_more(rig):
    """Who comes then is placed by its bytes."""
    for _ in range(WAITING_MAX):
        assert rig.begin() is not None
    assert rig.begin() is None
    assert rig.results == [TokensResult.BUSY]
    rig.resolver.close()
    assert len(rig.resumed) == WAITING_MAX
    await rig.settle()


async def test_who_fails_again_and_again_is_left_alone():
    """For some seconds; then one request tries, while the others do not wait."""
    rig = Rig(timeout_s=0.0)
    with structlog.testing.capture_logs() as logs:
        for _ in range(FAILURES_MAX):
            assert rig.begin() is not None
            await rig.settle()
    assert len(logs) == 1
    assert rig.begin() is None
    assert rig.resolver.open_circuit
    rig.now += OPEN_S
    assert rig.begin() is not None
    assert rig.begin() is None
    await rig.settle()
    assert rig.results == [TokensResult.TIMEOUT] * 5 + [TokensResult.OPEN] * 2 + ["timeout"]
    rig.now += OPEN_S
    rig.resolver.timeout_s = 30.0
    rig.begin()
    rig.backend.answers.put_nowait(IDS)
    await rig.settle()
    assert not rig.resolver.open_circuit


async def test_what_is_closed_lets_everybody_go(rig):
    """A configuration without tokens came into force."""
    rig.begin()
    rig.resolver.close()
    await rig.settle()
    assert len(rig.resumed) == 1
    assert rig.backend.cancelled == 0
