"""Implement `epp explain REQUEST_ID`: show why the picker routed a request to its endpoint."""

import time
from collections.abc import Iterable
from typing import Final, TextIO
from urllib.parse import quote

import msgspec

from epp.commands.debug_client import DebugClient, NoAnswerError, read_token
from epp.commands.decisions import explain_past
from epp.flags.subcommands import ExplainFlags
from epp.journal.problem import JournalError
from epp.shell.operators.decisions.explanation import explanation
from epp.shell.printable import printable

FOUND: Final = 0
NOT_FOUND: Final = 1
NO_ANSWER: Final = 2
_OK: Final = 200
_UNKNOWN: Final = 404


def explain_request(flags: ExplainFlags, out: TextIO, err: TextIO) -> int:
    """Request the explanation of a decision from one picker after the other until one knows it, and
    print it. With `--dir`, read recorded decisions instead.

    Return the exit code: 0 if the request is known, 1 if it is not, 2 if a picker gave no answer or
    an error and no other one knows the request, or if the token or the recorded decisions cannot be read.
    """
    if flags.dir:
        return _explain_past(flags, out, err)
    accept = "application/json" if flags.json else "text/plain"
    path = f"/debug/explain?request_id={quote(flags.request_id, safe='')}"
    if flags.endpoint:
        path += f"&endpoint={quote(flags.endpoint, safe='')}"
    found = NOT_FOUND
    try:
        token = read_token(flags.token_file)
        clients = [DebugClient(url, token) for url in flags.url]
    except NoAnswerError as error:
        print(f"epp explain: {error}", file=err)
        return NO_ANSWER
    for client in clients:
        try:
            status, body = client.get(path, accept=accept)
        except NoAnswerError as error:
            print(f"epp explain: {error}", file=err)
            found = NO_ANSWER
            continue
        lines = list(_shown(body))
        if status == _OK:
            out.writelines(f"{line}\n" for line in lines)
            return FOUND
        where = f"{client.url}: " if status == _UNKNOWN else f"{client.url} answers {status}: "
        for line in lines[:1]:
            print(f"{where}{line}", file=err)
        if status != _UNKNOWN:
            found = NO_ANSWER
    return found


def _explain_past(flags: ExplainFlags, out: TextIO, err: TextIO) -> int:
    """Print the explanation of the request from recorded decisions, without a picker.

    Return the exit code: 0 if the request is recorded, 1 if it is not, 2 if the recorded decisions
    cannot be read.
    """
    try:
        rows = explain_past(flags.dir, flags.request_id, flags.endpoint, time.time())
    except JournalError as error:
        print(f"epp explain: {error}", file=err)
        return NO_ANSWER
    if not rows:
        told = f"{flags.dir} contains no request {flags.request_id}"
        print(printable(told), file=err)
        return NOT_FOUND
    if flags.json:
        out.write(msgspec.json.encode({"decisions": rows}).decode() + "\n")
    else:
        out.write("\n".join(map(explanation, rows)))
    return FOUND


def _shown(body: bytes) -> Iterable[str]:
    """Yield the lines of a response body, with characters escaped that could control the terminal."""
    return map(printable, body.decode("utf-8", "replace").splitlines())
