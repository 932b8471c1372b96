"""The tuned configuration as files for delivery: a document with comments about the measurement,
and a ConfigMap.
"""

from collections.abc import Sequence
from textwrap import fill, indent
from typing import Final

KEY: Final = "config.yaml"
"""Key of the configuration document in the ConfigMap of the Helm chart."""
_COLUMNS: Final = 100


def with_comment(paragraphs: Sequence[str], text: str) -> str:
    """Return `text`, a YAML document, below the paragraphs as comments.

    `kubectl apply` keeps these comments, because they are part of a value in the ConfigMap.
    """
    wrapped = [
        fill(
            _printable(paragraph),
            width=_COLUMNS,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for paragraph in paragraphs
    ]
    return "\n".join([*wrapped, text])


def config_map(name: str, text: str) -> str:
    """Return a ConfigMap manifest with the configuration document `text`, which begins in the first
    column and ends with a newline.
    """
    return (
        f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n"
        f"  {KEY}: |\n{indent(text, '    ')}"
    )


def _printable(text: str) -> str:
    """Return the text without line breaks and control characters.

    File names may contain any character, and a line break would end the comment.
    """
    return "".join(one if one.isprintable() else "?" for one in text)
