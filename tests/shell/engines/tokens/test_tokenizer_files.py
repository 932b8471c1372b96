import json

import pytest

from epp.configuration.token_producer import LocalTokenizers
from epp.shell.engines.tokens.tokenizer_files import (
    CONFIG_BYTES_MAX,
    MODELS_MAX,
    files_of,
    read_config,
)


def put(top, *places):
    for place in places:
        (top / place).mkdir(parents=True, exist_ok=True)
        (top / place / "tokenizer.json").write_text("{}")


def found(top, **fields):
    settings = LocalTokenizers(auto_discovery_dir=str(top), **fields)
    return {model: str(path.relative_to(top)) for model, path in files_of(settings).items()}


def test_models_are_called_by_their_paths(tmp_path):
    """As a mounted volume or the hub's cache has them."""
    put(tmp_path, "qwen3", "Qwen/Qwen3-32B", "models--meta--Llama/snapshots/abc", "a/b/c/d/e/f/g")
    assert found(tmp_path) == {
        "qwen3": "qwen3/tokenizer.json",
        "Qwen/Qwen3-32B": "Qwen/Qwen3-32B/tokenizer.json",
        "meta/Llama": "models--meta--Llama/snapshots/abc/tokenizer.json",
    }


def test_a_folder_of_one_model_is_that_model(tmp_path):
    """By its own name."""
    put(tmp_path, "")
    assert found(tmp_path) == {tmp_path.name: "tokenizer.json"}


def test_the_map_goes_before(tmp_path):
    """It names a folder or the file."""
    put(tmp_path, "one", "other")
    named = {"one": str(tmp_path / "other"), "more": str(tmp_path / "other" / "tokenizer.json")}
    assert found(tmp_path, model_tokenizer_map=named) == {
        "one": "other/tokenizer.json",
        "other": "other/tokenizer.json",
        "more": "other/tokenizer.json",
    }


def test_so_many_are_found_and_no_more(tmp_path):
    """Whatever is mounted."""
    put(tmp_path, *map(str, range(MODELS_MAX + 5)))
    assert len(found(tmp_path)) == MODELS_MAX


def test_a_folder_that_is_not_there_has_nothing(tmp_path):
    """It may be mounted later."""
    assert found(tmp_path / "none") == {}


def config(folder, **members):
    (folder / "tokenizer_config.json").write_text(json.dumps(members))


def test_templates_and_special_tokens_are_read(tmp_path):
    """A token is a text, or an object with one."""
    config(
        tmp_path, chat_template="t", bos_token={"content": "<s>"}, eos_token="</s>", pad_token=None
    )
    read = read_config(tmp_path)
    assert read.template(tools=False) == read.template(tools=True) == "t"
    assert read.special == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_template_for_tools_may_be_another(tmp_path):
    """By its name."""
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    config(tmp_path, chat_template=templates)
    read = read_config(tmp_path)
    assert (read.template(tools=False), read.template(tools=True)) == ("d", "t")


@pytest.mark.parametrize(
    ("name", "content"),
    [("chat_template.jinja", "own"), ("chat_template.json", '{"chat_template": "own"}')],
)
def test_a_template_in_a_file_of_its_own_goes_before(tmp_path, name, content):
    """As newer models have it."""
    config(tmp_path, chat_template="t")
    (tmp_path / name).write_text(content)
    assert read_config(tmp_path).template(tools=False) == "own"


def test_without_a_configuration_there_is_no_template(tmp_path):
    """Prompts of completions need none."""
    assert read_config(tmp_path).template(tools=False) == ""


def test_a_configuration_is_bounded(tmp_path):
    """Whoever mounted it."""
    config(tmp_path, chat_template="t" * CONFIG_BYTES_MAX)
    with pytest.raises(ValueError, match="larger"):
        read_config(tmp_path)
