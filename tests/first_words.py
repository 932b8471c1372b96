"""Beginnings of texts: docstrings of Python files and sentences of Markdown files.

`tests/test_repository.py` limits the share of texts that begin without a subject.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Text(NamedTuple):
    """One docstring or sentence."""

    place: str
    """File and line."""
    begin: str
    """First line of a docstring, or the sentence."""

    @property
    def word(self) -> str:
        """The first word, or "" if the text begins with code, a link or a number."""
        found = re.match(r"[A-Za-z]+", self.begin)
        return found[0] if found else ""


def docstrings(path: Path) -> Iterator[Text]:
    """Yield the docstrings of modules, classes, functions and attributes in a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        before: Sequence[ast.AST | None] = [None, *body]
        for previous, statement in zip(before, body, strict=False):
            match statement:
                case ast.Expr(ast.Constant(str(text))) if (
                    documented
                    if previous is None
                    else isinstance(previous, ast.Assign | ast.AnnAssign)
                ):
                    yield Text(f"{path}:{statement.lineno}", text.strip().partition("\n")[0])


_NO_PROSE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^(?: {4}|\t)[^\n]*$", re.DOTALL | re.MULTILINE)


def sentences(path: Path) -> Iterator[Text]:
    """Yield the sentences of paragraphs and lists in a Markdown file, from three words on.

    Headings, tables, code and comments are left out, because they need no sentences.
    """
    text = path.read_text(encoding="utf-8")
    prose = _NO_PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), 1):
        if line.startswith(("|", "#", "<", "![")):
            continue
        plain = re.sub(r"^\s*(?:[-*]|\d+\.)\s+|\*\*", "", line)
        for sentence in re.split(r"(?<=[.!?])\s+", plain.strip()):
            if len(sentence.split()) > 2:
                yield Text(f"{path}:{number}", sentence)


def beginning_with(texts: Sequence[Text], words: frozenset[str]) -> list[Text]:
    """Return the texts whose first word is one of `words`."""
    return [text for text in texts if text.word in words]
