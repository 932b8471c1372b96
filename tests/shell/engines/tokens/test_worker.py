"""What the worker process answers, asked in this process; its frames, and how it ends."""

import io
import sys

import msgspec
import pytest

from epp.configuration.token_producer import LocalTokenizers
from epp.core.prompt.token_ids import unpacked
from epp.core.types import ApiKind
from epp.shell.engines.tokens.frames import (
    Begin,
    Done,
    Job,
    Load,
    Loaded,
    Ready,
    framed,
    from_worker,
    length_of,
)
from epp.shell.engines.tokens.question import TokensResult
from epp.shell.engines.tokens.worker import LOADED_MAX, Worker, serve
from tests.real_tokenizers import PACKAGES, folder_of, golden
from tests.shell.engines.tokens import tiny
from tests.shell.engines.tokens.conversations import CONVERSATIONS, PROMPTS

COMPLETIONS = ApiKind.COMPLETIONS
CHAT = {"messages": [{"role": "user", "content": "The quick fox " * 10}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("models")
    tiny.make(top / "tiny")
    tiny.make(top / "bare", template="")
    (top / "broken").mkdir()
    (top / "broken" / "tokenizer.json").write_text("secret")
    return top


def begin(folder, **fields):
    settings = LocalTokenizers(auto_discovery_dir=str(folder), **fields)
    return Begin(msgspec.json.encode(settings), "")


def loaded(folder, model="tiny", **fields):
    worker = Worker()
    assert model in worker.answer(begin(folder, **fields)).models
    assert worker.answer(Load(model)).problem == ""
    return worker


def job(body, api=ApiKind.CHAT, *, model="tiny"):
    return Job(model, api, msgspec.json.encode(body))


def ids(done):
    assert done.result == TokensResult.FOUND
    return [unpacked(one) for one in done.ids]


@pytest.fixture(scope="module")
def worker(folder):
    return loaded(folder)


def test_models_are_named_and_loaded(folder):
    """One at a time, and told of."""
    worker = Worker()
    assert set(worker.answer(begin(folder)).models) == {"tiny", "bare", "broken"}
    told = worker.answer(Load("tiny"))
    assert (told.library, told.cut, told.template) == ("tiktoken", True, True)
    assert not worker.answer(Load("bare")).template


@pytest.mark.parametrize("model", ["broken", "none"])
def test_one_that_cannot_be_loaded_is_told_of(folder, model):
    """By its path, not by what is in it."""
    worker = Worker()
    worker.answer(begin(folder))
    problem = worker.answer(Load(model)).problem
    assert problem
    assert "secret" not in problem
    assert worker.answer(job(CHAT, model=model)).result == TokensResult.NO_TOKENIZER


def test_so_many_are_loaded_and_no_more(folder):
    """Each is some hundred megabytes."""
    names = {f"m{number}": str(folder / "tiny") for number in range(LOADED_MAX + 1)}
    worker = Worker()
    worker.answer(begin(folder, model_tokenizer_map=names))
    worker._models = dict.fromkeys(list(names)[:LOADED_MAX])
    assert "which is the maximum" in worker.answer(Load(f"m{LOADED_MAX}")).problem


def test_a_turn_that_was_there_is_not_encoded_again(worker):
    """Only what is new."""
    first = worker.answer(job(CHAT))
    (again,) = [worker.answer(job(CHAT))]
    assert ids(first) == ids(again)
    assert (again.parts_known, again.parts_new) == (1, 0)
    longer = {"messages": [*CHAT["messages"], {"role": "user", "content": "lazy dog " * 10}]}
    told = worker.answer(job(longer))
    assert (told.parts_known, told.parts_new) == (1, 1)
    assert told.kept_bytes > 0


def test_prompts_of_completions_begin_as_the_tokenizer_has_it(worker):
    """Unless the request says otherwise; those that are ids are."""
    (plain, other), ((told,),) = (
        ids(worker.answer(job({"prompt": ["a", "b"]}, COMPLETIONS))),
        (ids(worker.answer(job({"prompt": "a", "add_special_tokens": False}, COMPLETIONS))),),
    )
    assert plain[1:] == told
    assert other[0] == plain[0]
    assert ids(worker.answer(job({"prompt": [[1, 2], "a"]}, COMPLETIONS)))[0] == [1, 2]


@pytest.mark.parametrize(
    ("message", "result"),
    [
        (job({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "refused"),
        (job({"messages": 1}), "refused"),
        (job({}, COMPLETIONS), "unsupported"),
        (job({"prompt": ["a", 7]}, COMPLETIONS), "unsupported"),
        (job({"prompt": [[-1]]}, COMPLETIONS), "failed"),
        (job(CHAT | {"truncate_prompt_tokens": 3}), "unsupported"),
        (Job("tiny", ApiKind.CHAT, body=b"no JSON"), "failed"),
        (Job("tiny", ApiKind.CHAT, body=b'{"messages":' + b"[" * 100_000), "failed"),
    ],
)
def test_what_has_no_tokens_has_a_reason(worker, message, result):
    """And the next question is answered."""
    done = worker.answer(message)
    assert (done.ids, done.result) == ((), result)
    assert worker.answer(job(CHAT)).result == TokensResult.FOUND


def test_a_model_without_a_template_has_no_chats(folder):
    """Its completions have tokens."""
    worker = loaded(folder, "bare")
    assert worker.answer(job(CHAT, model="bare")).result == TokensResult.UNSUPPORTED
    assert ids(worker.answer(job({"prompt": "a"}, COMPLETIONS, model="bare")))


def test_messages_have_the_ids_of_the_chat_that_they_are(worker):
    """Those that may be another chat have none."""
    chat = {"messages": [{"role": "system", "content": "You help."}, *CHAT["messages"]]}
    messages = CHAT | {"max_tokens": 5, "system": [{"type": "text", "text": "You help."}]}
    done = worker.answer(job(messages, ApiKind.MESSAGES))
    assert ids(done) == ids(worker.answer(job(chat)))
    unknown = messages | {"output_config": {"effort": "low"}}
    done = worker.answer(job(unknown, ApiKind.MESSAGES))
    assert (done.ids, done.result) == ((), TokensResult.UNSUPPORTED)


def test_responses_have_ids_where_nothing_is_put_round_a_prompt(folder, tmp_path):
    """Else it is there once or twice, by the engine's release."""
    responses = {"input": "The quick fox " * 10}
    tiny.make(tmp_path / "plain", begins=False)
    worker = loaded(tmp_path, "plain")
    done = worker.answer(job(responses, ApiKind.RESPONSES, model="plain"))
    assert ids(done) == ids(worker.answer(job(CHAT, model="plain")))
    done = loaded(folder).answer(job(responses, ApiKind.RESPONSES))
    assert done.result == TokensResult.UNSUPPORTED


def test_without_the_libraries_it_says_what_to_install(folder, monkeypatch):
    """Once, and it ends there."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "homing-epp[tokens]" in Worker().answer(begin(folder)).sentence


def test_it_answers_frame_by_frame_until_its_input_ends(folder):
    """Even in the middle of one."""
    sink = io.BytesIO()
    asked = framed(begin(folder)) + framed(Load("tiny")) + framed(job(CHAT))
    serve(io.BytesIO(asked + framed(job(CHAT))[:-1]), sink)
    answers = []
    rest = sink.getvalue()
    while rest:
        length = length_of(rest[:4])
        answers.append(from_worker(rest[4 : 4 + length]))
        rest = rest[4 + length :]
    assert [type(answer) for answer in answers] == [Ready, Loaded, Done]


@pytest.mark.parametrize("model", PACKAGES)
def test_real_tokenizers_give_the_ids_of_another_library(model):
    """Chat templates included, tools in whatever order; twice, the second time from what is kept."""
    folder = folder_of(model)
    settings = LocalTokenizers(model_tokenizer_map={model: str(folder)})
    worker = Worker()
    worker.answer(Begin(msgspec.json.encode(settings), ""))
    told = worker.answer(Load(model))
    assert (told.problem, told.library, told.cut) == ("", "tiktoken", True)
    expected = golden()[model]
    for _ in range(2):
        for name, (body, _) in CONVERSATIONS.items():
            assert ids(worker.answer(job(body, model=model))) == [expected["chats"][name]], name
        for prompt in PROMPTS:
            done = worker.answer(job({"prompt": prompt}, COMPLETIONS, model=model))
            assert ids(done) == [expected["prompts"][prompt]], prompt
