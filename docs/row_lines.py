"""Formatting of JSON files whose changes people read: each value that fits on one line stands on
one line, so a changed row is one changed line.
"""

import json
from typing import Any, Final

LINE_CHARACTERS_MAX: Final = 160


def row_lines(value: Any) -> str:
    """Return `value` as JSON in which each part that fits on one line of 160 characters stands on
    one line. It ends with a newline.
    """
    return _lines(value, 0) + "\n"


def _lines(value: Any, depth: int) -> str:
    whole = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or depth + len(whole) <= LINE_CHARACTERS_MAX:
        return whole
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, dict):
        items = [
            f"{json.dumps(name, ensure_ascii=False)}: {_lines(one, depth + 1)}"
            for name, one in value.items()
        ]
    else:
        items = [_lines(one, depth + 1) for one in value]
    indent = " " * (depth + 1)
    inner = ",\n".join(indent + item for item in items)
    return f"{opening}\n{inner}\n{' ' * depth}{closing}"
