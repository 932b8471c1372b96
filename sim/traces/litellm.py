"""Reader of LiteLLM spend logs with `prefix_block_hashes` (LiteLLM 1.111 and later), one row a
line.

A row has 16 hexadecimal digits for each block of prompt tokens. The hashes are chained, with one
for a partial last block. The provider counts the tokens, and LiteLLM computes the hashes. The two
may differ by some tokens, so too many or too few hashes are no error. The position of the hashes in
a row depends on the export (`metadata` is an object or a string of JSON), so they are searched by
name.
"""

from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from epp.core.journal.lines import TokenCount
from sim.traces.arrival import Arrival, FieldError
from sim.traces.blocks import MOONCAKE_BLOCK_TOKENS, check_block_tokens
from sim.traces.reading import LineFormat, Parse, ReadOptions

HASHES: Final = "prefix_block_hashes"
_SIZES: Final = ("block_size", "block_size_tokens", "block_tokens")
_HEX_DIGITS: Final = 16


class _Row(Struct, rename={"started": "startTime"}):
    started: datetime | float
    prompt_tokens: TokenCount
    completion_tokens: TokenCount
    metadata: dict[str, Any] | str | None = None
    hashes: Any = field(default=None, name=HASHES)
    model: str = ""
    session_id: str | None = None
    end_user: str | None = None
    status: str | None = None
    cache_hit: str | bool | None = None

    @property
    def reached_the_model(self) -> bool:
        """True if the request succeeded, was not answered from LiteLLM's own cache, and has prompt
        tokens.
        """
        cached = str(self.cache_hit).lower() == "true"
        return bool(self.prompt_tokens) and self.status != "failure" and not cached


def _parser(first: bytes, options: ReadOptions) -> Parse:
    decode = msgspec.json.Decoder(_Row).decode
    sizes: dict[int, None] = {}

    def parse(index: int, line: bytes) -> Arrival | None:
        row = decode(line)
        if not row.reached_the_model:
            return None
        size, hashes = _hashes(row)
        size = options.block_tokens or size or MOONCAKE_BLOCK_TOKENS
        if size not in sizes:
            check_block_tokens(size)
            sizes[size] = None
        if isinstance(row.started, datetime):
            started_s = row.started.replace(tzinfo=row.started.tzinfo or UTC).timestamp()
        else:
            started_s = row.started
        return Arrival(
            index=index,
            time_s=started_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=max(1, row.completion_tokens),
            blocks=hashes,
            block_tokens=size if hashes else 0,
            model=row.model,
            session=row.session_id or row.end_user or "",
        )

    return parse


def _hashes(row: _Row) -> tuple[int | None, tuple[int, ...]]:
    """Return (tokens per block, block ids) of a row.

    The first is None if the row does not state it; there are no ids if the row has no hashes.
    """
    found = row.hashes
    if found is None:
        metadata = row.metadata
        if isinstance(metadata, str):
            metadata = msgspec.json.decode(metadata or "null", type=dict[str, Any] | None)
        found = _find(metadata, HASHES)
    size = None
    if isinstance(found, dict):
        size = _size(found)
        found = next((member for member in found.values() if isinstance(member, list)), None)
    if found is None:
        return size, ()
    if not isinstance(found, list):
        raise FieldError(HASHES, f"Expected an array, got {type(found).__name__}")
    return size, tuple(_identity(place, text) for place, text in enumerate(found))


def _size(found: dict[str, Any]) -> int | None:
    name = next((name for name in _SIZES if found.get(name) is not None), None)
    if name is None:
        return None
    size = found[name]
    # In Python, true and false are integers too.
    if type(size) is not int or size < 1:
        raise FieldError(f"{HASHES}.{name}", f"Expected an integer of at least 1, got {size!r:.40}")
    return size


def _identity(place: int, text: object) -> int:
    try:
        if isinstance(text, str) and len(text) == _HEX_DIGITS:
            return int(text, 16)
    except ValueError:
        pass
    raise FieldError(f"{HASHES}[{place}]", f"Expected {_HEX_DIGITS} hexadecimal digits")


def _find(document: object, name: str) -> Any:
    """Return the first member called `name` in nested JSON objects, at any depth; None if there is
    none.
    """
    if not isinstance(document, dict):
        return None
    if name in document:
        return document[name]
    for member in document.values():
        found = _find(member, name)
        if found is not None:
            return found
    return None


LITELLM: Final = LineFormat(
    name="litellm",
    recognises=lambda line: b'"startTime"' in line and b'"prompt_tokens"' in line,
    parser=_parser,
)
