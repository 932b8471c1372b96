"""Find the tokenizer files of models among mounted files. This module is used only in the worker
process.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from epp.configuration.token_producer import LocalTokenizers

MODELS_MAX: Final = 64
"""Maximum number of models whose tokenizers are found in a folder."""
FOLDERS_MAX: Final = 10_000
"""Maximum number of folders that are searched for tokenizers."""
_DEPTH_MAX: Final = 6
TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")
CONFIG_BYTES_MAX: Final = 4 * 1024 * 1024
_SPECIAL: Final = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    "additional_special_tokens",
)
_CACHED: Final = "models--"
"""Prefix of the name of a model's folder in the Hugging Face cache, which contains `snapshots` of
revisions.
"""


def files_of(settings: LocalTokenizers) -> dict[str, Path]:
    """Return the path of each model's `tokenizer.json`; configured paths take precedence over found
    ones.
    """
    found = _discovered(Path(settings.auto_discovery_dir)) if settings.auto_discovery_dir else {}
    for model, place in settings.model_tokenizer_map.items():
        path = Path(place)
        found[model] = path if path.suffix == ".json" else path / TOKENIZER
    return found


def _discovered(top: Path) -> dict[str, Path]:
    """Find at most `MODELS_MAX` `tokenizer.json` files below `top`, and return them by the relative
    path of their folder. A folder of the Hugging Face cache has the model's name, and `top` itself
    its own name.
    """
    found: dict[str, Path] = {}
    for seen, (folder, below, files) in enumerate(os.walk(top, followlinks=True)):
        here = Path(folder)
        parts = here.relative_to(top).parts
        below.sort()
        if len(parts) >= _DEPTH_MAX or seen > FOLDERS_MAX or len(found) >= MODELS_MAX:
            below.clear()
        if TOKENIZER in files and len(found) < MODELS_MAX:
            found.setdefault(_model_of(parts) or top.name, here / TOKENIZER)
    return found


def _model_of(parts: tuple[str, ...]) -> str:
    if len(parts) == 3 and parts[0].startswith(_CACHED) and parts[1] == "snapshots":
        return parts[0].removeprefix(_CACHED).replace("--", "/")
    return "/".join(parts)


class TokenizerConfig(msgspec.Struct, frozen=True):
    """The tokenizer configuration beside a `tokenizer.json`: chat templates and special tokens."""

    templates: Mapping[str, str]
    """Chat templates by name. "default" is the usual one, and "tool_use" is for requests with
    tools.
    """
    special: Mapping[str, Any]

    def template(self, *, tools: bool) -> str:
        """Return the chat template for requests with or without tools, or "" if there is none."""
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default", "")


def read_config(folder: Path) -> TokenizerConfig:
    """Read the tokenizer configuration in `folder`; missing files are ignored.

    Raises `OSError`, `ValueError` and, for an incomplete list of templates, `KeyError`.
    """
    config = _json(folder / _CONFIG)
    templates = _templates_of(config.get("chat_template"))
    for name in _TEMPLATES:
        path = folder / name
        if path.is_file():
            text = _read(path)
            if path.suffix == ".json":
                text = _json(path).get("chat_template", "")
            templates["default"] = text
            break
    special = {name: _text_of(config[name]) for name in _SPECIAL if config.get(name) is not None}
    return TokenizerConfig(templates, special)


def _templates_of(given: Any) -> dict[str, str]:
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {one["name"]: one["template"] for one in given if isinstance(one, dict)}
    return {}


def _text_of(token: Any) -> Any:
    if isinstance(token, dict):
        return token.get("content", "")
    return [_text_of(one) for one in token] if isinstance(token, list) else token


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(_read(path), type=dict[str, Any]) if path.is_file() else {}


def _read(path: Path) -> str:
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise ValueError(f"{path.name} is larger than {CONFIG_BYTES_MAX} bytes")
    return path.read_text(encoding="utf-8")
