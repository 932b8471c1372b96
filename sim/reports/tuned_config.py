"""A tuned configuration for delivery: a document with comments about the measurement, and a
ConfigMap.
"""

from collections.abc import Sequence
from textwrap import fill, indent
from typing import Final

KEY: Final = "config.yaml"
"""Key of the document in the chart's ConfigMap."""
_COLUMNS: Final = 100


def with_comment(paragraphs: Sequence[str], text: str) -> str:
    """Return `text`, a YAML document, below comments. `kubectl apply` keeps them, because they are
    part of the value.
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
    """Return a ConfigMap manifest with `text`, a document that begins in the first column and ends
    with a newline.
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
